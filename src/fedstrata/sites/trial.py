"""What a run would do to a site, tried in a process of its own before the site agrees to anything.

A config, a tokenizer and a job come from the server. Building the model without weights, reading the rows and
tokenizing them, and making the plans are done there first, within limits of time, memory and output: a regular
expression that never ends, one that ends the process, a model that does not fit or a bug in a library end that
process and no other. What went well once goes well again, for it is the same bytes; the tokens are then cached.
"""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedstrata.engines.machine import all_cores, cores, memory
from fedstrata.errors import TokenizerError, UserError
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.permission import Refused
from fedstrata.sites.proposal import Proposal, propose
from fedstrata.sites.settings import SiteSettings

LOG = logging.getLogger("fedstrata.site")
PRELOAD = ["fedstrata.sites.proposal"]
SECONDS = 900.0
"""For all of it, where ``[limits] seconds_per_run`` is not less."""
MEMORY_SHARE = 0.8
"""Of the machine's memory."""
OWN_MEMORY_SHARE = 0.95
OUTPUT_BYTES = 50 * 10**9
"""Of a file, where ``[limits] disk_per_run`` is not less: the tokens."""
MOST_RESULT = 1 << 16
"""Bytes of the result."""
START_SECONDS = 120.0
"""For the process to be there; it imports the libraries once per program."""


@dataclass(frozen=True)
class Bounds:
    """Limits of the process.

    Attributes:
        seconds: of time.
        memory: bytes that it may take beyond what it has when it begins.
        output: bytes of a file.
    """

    seconds: float
    memory: int
    output: int


def bounds_of(settings: SiteSettings) -> Bounds:
    """The limits that follow from the site's settings and its machine."""
    limits = settings.limits
    seconds = min(SECONDS, limits.seconds_per_run or SECONDS)
    return Bounds(
        seconds, int(MEMORY_SHARE * machine_memory()), min(OUTPUT_BYTES, limits.disk_per_run or OUTPUT_BYTES)
    )


def warm_up() -> None:
    """Start the process from which trials are forked, which imports the libraries meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with _without_main():
        forkserver.ensure_running()


def try_run(settings: SiteSettings, hello: HelloHeader, folder: Path) -> Proposal:
    """Try a run in a process of its own; the model's files are in ``folder`` already.

    Raises:
        Refused: it did not end, or ended otherwise than it should.
        UserError: the site's own rows or device cannot be used.
    """
    bounds = bounds_of(settings)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, settings, hello, folder, bounds), daemon=True)
    with _without_main():
        process.start()
    theirs.close()
    try:
        if not (mine.poll(START_SECONDS) and mine.recv_bytes(16) == b"begins"):
            raise Refused("a process to try the run in does not begin; its own log says more")
        if not mine.poll(bounds.seconds):
            raise Refused(f"trying its model and tokenizer did not end within {bounds.seconds:g} s")
        result = json.loads(mine.recv_bytes(MOST_RESULT))
    except (EOFError, OSError, ValueError):
        process.join(10)
        LOG.error("trying the run: the process ended with %s", process.exitcode)
        raise Refused(f"trying its model and tokenizer ended {_ended(process.exitcode)}") from None
    finally:
        process.kill()
        process.join()
        mine.close()
    return _outcome(result)


def _outcome(result: dict[str, Any]) -> Proposal:
    match result["kind"]:
        case "proposal":
            return Proposal(**result["proposal"])
        case "refused":
            raise Refused(result["text"])
        case "user":
            raise UserError(result["text"])
        case _:
            LOG.error("trying the run: %s", result["text"])
            raise Refused(f"trying its model and tokenizer failed ({result['kind']}); its own log says more")


def _ended(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    return f"with exit code {code}"


@contextmanager
def _without_main() -> Iterator[None]:
    """Inside, a new process does not import the program's own main module: that is none of its business."""
    import __main__

    kept = {name: getattr(__main__, name, None) for name in ("__spec__", "__file__")}
    try:
        for name in kept:
            setattr(__main__, name, None)
        yield
    finally:
        for name, value in kept.items():
            if value is None and name == "__file__":
                delattr(__main__, name)
            else:
                setattr(__main__, name, value)


def _child(out: Connection, settings: SiteSettings, hello: HelloHeader, folder: Path, bounds: Bounds) -> None:
    """The process: tries the run and writes what came of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    limit_memory(bounds.memory)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bounds.output, bounds.output))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _end_with_parent()
    out.send_bytes(b"begins")
    try:
        result = {"kind": "proposal", "proposal": asdict(propose(settings, hello, folder, bounds.memory))}
    except Refused as error:
        result = {"kind": "refused", "text": str(error)}
    except TokenizerError as error:
        result = {"kind": type(error.__cause__).__name__, "text": str(error)}
    except UserError as error:
        result = {"kind": "user", "text": str(error)}
    except BaseException as error:  # a panic of tokenizers is no Exception
        result = {"kind": type(error).__name__, "text": str(error)}
    content = json.dumps({key: value[:2000] if isinstance(value, str) else value for key, value in result.items()})
    out.send_bytes(content.encode()[:MOST_RESULT])
    out.close()
    os._exit(0)


def _end_with_parent() -> None:
    """Let this process end with the program that wants its result, however that ends.

    By a signal of the system's, since a regular expression that never ends lets no code of this process run.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)


def machine_memory() -> int:
    """Bytes of memory of the machine or container, whatever share of its cores this program uses."""
    return memory() * all_cores() // min(cores(), all_cores())


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has now; beyond that libraries raise errors."""
    used = sum(int(line.split()[1]) * 1024 for line in _status() if line.startswith("VmData:"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def limit_own_memory(device: str) -> None:
    """Bound this program's memory to a share of the machine's, so that a batch that is too large is an error here.

    Without it the system ends the program. Drivers of GPUs map more than they use: with one there is no bound.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        limit_memory(int(OWN_MEMORY_SHARE * machine_memory()))


def _status() -> Iterator[str]:
    try:
        yield from Path("/proc/self/status").read_text().splitlines()
    except OSError:
        yield "VmData: 0 kB"
