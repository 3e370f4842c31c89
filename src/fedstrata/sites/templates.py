"""The text of a new ``server.toml`` and a new ``site.toml``; values in braces are filled in."""

from __future__ import annotations

import textwrap

from fedstrata.plan.disclosure import SENT


def _comment(text: str) -> str:
    """A text as comment lines."""
    return textwrap.fill(text, 112, initial_indent="# ", subsequent_indent="#   ")


SERVER = """\
format = 2  # of this file
# The server of a federation. A relative path starts at the folder of this file.

host = "{host}"  # name or address under which sites reach this machine; the certificate names it
# bind = "{bind}"  # address to listen on; default: host if it is loopback, else every address
port = {port}  # for Flower, which tells who is there and calls the sites; default 9440
stream_port = {stream_port}  # for activations, with methods that split the model; default 9441
message_port = {message_port}  # for messages with parts of the model, while a run is on; default 9442
# page_port = 9443  # for the page of serve --page, on this machine alone

{certificate}[tls]
ca = "tls/ca.pem"  # certificate of the CA that signed the next one; every site has a copy
certificate = "tls/server.pem"  # the server's certificate
key = "tls/server.key"  # its private key, readable by its owner alone (chmod 600)
{clients}
[limits]
# max_weight = 10_000  # most examples for which a site counts, or {{NAME = 10_000}}; default: all that it says

# Who may take part: the name of each site and its public key. No default: others are refused.
[sites]
{sites}
"""

LOCAL_CERTIFICATE = """\
# The certificate was made for local tests and ends on {end:%Y-%m-%d}. The next one can be signed with tls/ca.key,
# the key of the CA; keep it on another machine.
"""

CLIENTS = """\
clients = "tls/clients.pem"  # certificate of the CA that signed each site's own; without it a key and a token do
"""

CLIENT = """\
certificate = "{name}.pem"  # this site's own certificate, which the server demands
certificate_key = "{name}.tls.key"  # its private key, readable by its owner alone (chmod 600)
"""

SITE = """\
format = 2  # of this file
# A site of a federation. A relative path starts at the folder of this file.
# This folder is for the site alone: hand it over in private, then delete it at the server.

name = "{name}"  # by which the server knows this site
server = "{server}"  # the server's address for Flower; it says the other ports
ca = "ca.pem"  # certificate of the CA that signed the server's
key = "{name}.key"  # this site's private key, readable by its owner alone (chmod 600)
peers = "peers"  # folder with the public key of every site, NAME.pub, for [privacy] sum_only: this site adds its
# changes only to those of sites that sign with these keys; take one from whoever made it, never from the server
{client}folder = "state"  # on this site's disk: personal parts, received parts, logs; created when needed

# The site's own rows.
[data]
train = "train.csv"  # EDIT: a file (csv tsv jsonl json parquet xlsx txt), a folder, a list, or a data set id
text = "text"  # column of the text; two columns in a list for pairs; default "text"
label = "label"  # column of the label; default "label"
# test = "test.csv"  # test rows; default: the share of train that the job asks for is held out
# columns = ["text", "label"]  # column names of files without a header line; default: the header line
# delimiter = ";"  # between the fields of a csv file; default: found out
# encoding = "cp1252"  # of text files; default: UTF-8, or what they are found to have
# limit = 1000  # read at most so many rows; default: all
# documents = "lines"  # a row of a plain txt file: "lines" (default), "blank" or "headings" between rows

[device]
name = "auto"  # "cpu", "cuda", or "auto": a GPU if there is one (default)
# threads = 4  # CPU threads; default: as many as there are cores

# What may leave this site, and what whoever gets it can read (fedstrata audit measures it):
"""
SITE += "".join(_comment(f'"{payload}": {words}') + "\n" for payload, words in SENT.items())
SITE += """\
[allow]
payloads = ["weights"]  # of these three; default ["weights"]
# methods = ["fedavg", "fedbfpt"]  # methods in which the site takes part; default: every method

# A model that this site has already: a run that starts from the very same one does not send it.
[model]
# path = "minilm"  # folder of the model; default: every start model is sent

# In which jobs the site takes part: "ask" its owner on the terminal about each, only those that are "listed", or
# "any" that the tables here permit. A service has no terminal. Default "ask".
[approve]
runs = "any"
# jobs = []  # digests of approved jobs, "sha256:...", as the server's run and `fedstrata join --dry-run` show them

[limits]
min_examples = 8  # fewest distinct rows of its own that go into a message; default 8
# max_rounds = 10_000  # most rounds of a run; this is the default
# max_runs = 20  # most runs that the site ever takes part in; default: no limit, as for all that follow
# bytes_per_round = 500_000_000  # most bytes that may leave in a round
# bytes_per_run = 10_000_000_000  # in a run
# bytes_per_day = 10_000_000_000  # in 24 hours, whatever the run
# seconds_per_run = 86_400  # most seconds of work in a run
# disk_per_run = 20_000_000_000  # most bytes of a run on the site's disk
# epsilon = 20.0  # most that the noise of all runs together may let through; then runs without noise are refused
# delta = 1e-5  # of epsilon

# What a run must offer. Without noise, parts of the model tell words and classes of the rows they were trained on.
[require]
# level = "example"  # noise that hides any one example, or "client": any change of this site's; default: none
# epsilon = 8.0  # most that a run may let through of it; default: no limit, for level the least noise will do
# delta = 1e-5  # of epsilon, whatever the job's is
# sum_only = true  # the server sees nothing but sums over the sites; default false
# honest = 3  # with sums: most sites on whose noise this one relies, itself included; default 1
"""
