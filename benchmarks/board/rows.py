"""The rows of each task: training rows, development rows, and test rows in as many folds as there are seeds.

Made from the public files, once, by hashes of their text, so that everybody gets the same. Test rows are never
used to tune, and no training or development row has the text of a test row. A run with the i-th seed is scored on
the i-th fold: the spread between seeds then holds what training leaves to chance and what the choice of test rows
does.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedstrata.errors import UserError

Row = dict[str, Any]
T = TypeVar("T")
MOST_DEV = 1000
"""Development rows, of which more would not choose better for their cost."""


@dataclass(frozen=True)
class Parts:
    """The rows of a task, each part in the order of hashes."""

    train: list[Row]
    dev: list[Row]
    test: list[list[Row]]


def make(task: str, data: Path, folder: Path, folds: int) -> dict[str, Any]:
    """Write ``train.jsonl``, ``dev.jsonl`` and ``fold-0.jsonl`` … into ``folder``; what they hold, from its facts.

    Args:
        task: a key of :data:`TASKS`.
        data: a folder that holds the data set's folder or file at any depth.
        folder: where to write; what is there already is made anew only where it is incomplete.
        folds: number of test folds.

    Returns:
        ``rows`` of each part, and ``digest``, a hash of them all.

    Raises:
        UserError: the data set is not there, or there twice, or is not as expected.
    """
    facts = folder / "facts.json"
    if facts.exists():
        found: dict[str, Any] = json.loads(facts.read_text("utf-8"))
        if len(found["rows"]) == folds + 2:
            return found
    folder.mkdir(parents=True, exist_ok=True)
    parts = TASKS[task](data, folds)
    files = {"train": parts.train, "dev": parts.dev, **{f"fold-{i}": rows for i, rows in enumerate(parts.test)}}
    if empty := next((name for name, rows in files.items() if not rows), None):
        raise UserError(f"{task}: the data set leaves no row for {empty}")
    digest = hashlib.sha256()
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, "utf-8")
        digest.update(f"{name}\n{text}".encode())
    found = {"rows": {name: len(rows) for name, rows in files.items()}, "digest": digest.hexdigest()[:16]}
    partial = facts.with_suffix(".part")
    partial.write_text(json.dumps(found), "utf-8")
    os.replace(partial, facts)  # last of all: without it the files are made again
    return found


def find(data: Path, name: str) -> Path:
    """The one folder or file called ``name`` in ``data`` or below.

    Raises:
        UserError: there is none, or there are several.
    """
    found = sorted(path for path in [data, *data.rglob("*")] if path.name.lower() == name.lower())
    if len(found) != 1:
        many = f"{len(found)} of them" if found else "none"
        raise UserError(f"{data}: expected one folder or file called {name!r} in it or below, found {many}")
    return found[0]


def number(text: str) -> int:
    """A hash of a text, the same everywhere."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def shuffled(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of their hashes."""
    return sorted(rows, key=lambda row: number(json.dumps(row, ensure_ascii=False)))


def key(row: Mapping[str, Any]) -> str:
    """The text of a row, by which two rows are the same."""
    texts = [value for name, value in row.items() if name not in ("label", "tags")]
    return json.dumps(texts, ensure_ascii=False).lower()


def divided(train: Sequence[Row], dev: Sequence[Row], test: Sequence[Row], folds: int) -> Parts:
    """Official parts; rows of training and development whose text comes later too are left out."""
    tested = {key(row) for row in test}
    dev = [row for row in dev if key(row) not in tested]
    seen = tested | {key(row) for row in dev}
    train = [row for row in train if key(row) not in seen]
    test = shuffled(test)
    return Parts(shuffled(train), shuffled(dev)[:MOST_DEV], [test[i::folds] for i in range(folds)])


def cut(things: Sequence[T], shares: Sequence[float], text: Callable[[T], str]) -> list[list[T]]:
    """Things by the hash of their text: the first share of them, the next, …, and the rest."""
    parts: list[list[T]] = [[] for _ in range(len(shares) + 1)]
    for thing in things:
        place, left = number(text(thing)) % 10_000 / 10_000, 0.0
        for part, share in zip(parts, (*shares, 2.0), strict=True):  # noqa: B007
            left += share
            if place < left:
                break
        part.append(thing)
    return parts


def lines(path: Path) -> Iterator[str]:
    """The lines of a text file."""
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        yield from file


def table(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a file with tabs and a header, in which quotes mean nothing."""
    yield from csv.DictReader(lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)


def json_rows(path: Path) -> list[Row]:
    """``text`` and ``label`` of JSON lines."""
    return [{name: row[name] for name in ("text", "label")} for row in map(json.loads, lines(path))]


def chemprot(data: Path, folds: int) -> Parts:
    """ChemProt, as it is divided."""
    folder = find(data, "chemprot")
    train, dev, test = (json_rows(folder / f"{part}.txt") for part in ("train", "dev", "test"))
    return divided(train, dev, test, folds)


def mrpc(data: Path, folds: int) -> Parts:
    """MRPC has no development file: a tenth of its training rows."""
    folder = find(data, "MRPC")

    def rows(name: str) -> list[Row]:
        return [
            {"first": row["#1 String"], "second": row["#2 String"], "label": row["Quality"]}
            for row in table(folder / name)
        ]

    dev, train = cut(rows("msr_paraphrase_train.txt"), [0.1], key)
    return divided(train, dev, rows("msr_paraphrase_test.txt"), folds)


def jnlpba(data: Path, folds: int) -> Parts:
    """JNLPBA: words and their tags. Its abstracts are cut anew: its own test file is too small for equality."""
    folder = find(data, "JNLPBA")
    abstracts = [rows for name in ("train", "devel", "test") for rows in documents(folder / f"{name}.tsv")]
    return recut(abstracts, [0.64, 0.05], folds)


def documents(path: Path) -> list[list[Row]]:
    """The sentences of each document of a file with a word and its tag per line, sentences between blank lines."""
    found: list[list[Row]] = [[]]
    words: list[str] = []
    tags: list[str] = []
    for line in [*lines(path), ""]:
        fields = line.split()
        if fields and fields[0] == "-DOCSTART-":
            found.append([])
        elif fields:
            words.append(fields[0])
            tags.append(fields[-1])
        elif words:
            found[-1].append({"words": words, "tags": tags})
            words, tags = [], []
    return [rows for rows in found if rows]


def csabstruct(data: Path, folds: int) -> Parts:
    """CSAbstruct: the sentences of all abstracts with their roles, cut anew for the same reason as JNLPBA."""
    folder = find(data, "csabstruct")
    abstracts = [
        [{"text": text, "label": label} for text, label in zip(found["sentences"], found["labels"], strict=True)]
        for name in ("train", "dev", "test")
        for found in map(json.loads, lines(folder / f"{name}.jsonl"))
    ]
    return recut(abstracts, [0.68, 0.06], folds)


def recut(documents: Sequence[Sequence[Row]], shares: Sequence[float], folds: int) -> Parts:
    """Whole documents by the hash of their first row: the shares of testing and development, and the rest."""
    parts = cut(documents, shares, lambda document: key(document[0]))
    test, dev, train = ([row for document in part for row in document] for part in parts)
    return divided(train, dev, test, folds)


def qbio(data: Path, folds: int) -> Parts:
    """Abstracts with their arXiv category as label, by which Dirichlet partitions them; 120 in each test fold."""
    rows = [
        {"text": row["abstract"], "label": row["primary_cat"]}
        for row in map(json.loads, lines(find(data, "arxiv_qbio.jsonl")))
    ]
    test, dev, train = cut(rows, [0.1, 0.05], key)
    parts = divided(train, dev, test, folds)
    return Parts(parts.train, parts.dev[:120], [fold[:120] for fold in parts.test])


def sst2(data: Path, folds: int) -> Parts:
    """SST-2's training file alone, cut by whole sentences: its rows are phrases of sentences, and the sentences.

    A row that is part of no other row stands for its sentence. Three sentences in ten are for testing, three in a
    hundred for development. A phrase belongs to the part that all sentences with it are of; a phrase of sentences
    of different parts, mostly a short one, is left out. So no training row is part of a test sentence.
    """
    labels: dict[str, str] = {}
    for row in table(find(data, "SST-2") / "train.tsv"):
        labels[" ".join(row["sentence"].split())] = row["label"]
    within: dict[str, set[str]] = {}
    wholes = whole_rows(labels)
    for whole in wholes:
        for phrase in phrases(whole):
            if phrase in labels:
                within.setdefault(phrase, set()).add(whole)
    where = {whole: _part(whole, folds) for whole in wholes}
    parts: dict[str, list[Row]] = {}
    for text, label in labels.items():
        places = {where[whole] for whole in within.get(text, ())} or {"train"}
        if len(places) == 1:
            parts.setdefault(places.pop(), []).append({"text": text, "label": label})
    return Parts(
        shuffled(parts.get("train", [])),
        shuffled(parts.get("dev", []))[:MOST_DEV],
        [shuffled(parts.get(f"fold-{i}", [])) for i in range(folds)],
    )


def _part(sentence: str, folds: int) -> str:
    place = number(sentence) % 1000
    if place < 300:
        return f"fold-{place % folds}"
    return "dev" if place < 330 else "train"


def whole_rows(texts: Mapping[str, Any]) -> list[str]:
    """The texts that are part of no other."""
    inner = {phrase for text in texts for phrase in phrases(text) if phrase != text and phrase in texts}
    return [text for text in texts if text not in inner]


def phrases(text: str) -> Iterator[str]:
    """Every run of words of a text, itself included."""
    words = text.split(" ")
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            yield " ".join(words[start:end])


TASKS: Mapping[str, Callable[[Path, int], Parts]] = {
    "sst2": sst2,
    "chemprot": chemprot,
    "csabstruct": csabstruct,
    "mrpc": mrpc,
    "jnlpba": jnlpba,
    "qbio": qbio,
}
"""Task -> what reads its data set."""
