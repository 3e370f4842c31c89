"""Columns of text from files, folders and data set ids."""

from __future__ import annotations

import difflib
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import chain
from numbers import Number
from pathlib import Path
from typing import Any
from uuid import UUID

from fedstrata.data.forms import FORMS, WORD_FORMS, extension, known, records
from fedstrata.data.forms.data_sets import HUB_ID, hub_records, saved, saved_records
from fedstrata.data.forms.how import Findings, How, Records
from fedstrata.data.forms.memory import memory_records
from fedstrata.data.forms.plain import document_records
from fedstrata.errors import UserError, did_you_mean, plural
from fedstrata.job.in_memory import PREFIX, InMemory
from fedstrata.job.sentences import shown

HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""A surrogate, as JSON can spell it alone; no tokenizer takes one."""
VALUES = (str, Number, date, time, timedelta, UUID)
"""What a text or a label may be; numbers, truth values, dates with their times, and ids are written as text."""
WORD_END = "\n"
"""Between the words of a value that is a list of words."""


@dataclass(frozen=True)
class Rows:
    """Rows as columns.

    Attributes:
        columns: name of every wanted column -> its values; all columns have the same length.
        dropped: number of rows dropped because a wanted value was missing or blank.
        lacking: column -> how many of these had no value there; a row counts for the first such column alone.
        pools: the name of each row's source; empty where sources have no names.
        classes: column -> its class names in the order that a data set gives them.
        found: what reading has found out by itself, such as a delimiter.
        numbers: of each row its place in its source, dropped ones counted; empty of rows that have none.
    """

    columns: dict[str, list[str]]
    dropped: int
    pools: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=dict)
    found: Findings = field(default_factory=dict, compare=False)
    numbers: array[int] = field(default_factory=lambda: array("q"), compare=False)
    lacking: dict[str, int] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)


def read(
    source: str | list[str] | InMemory, how: How, limit: int | None = None, base_dir: Path | None = None
) -> Rows:
    """Read the wanted columns of a source, every value as text.

    A row in which a wanted value is missing, null, NaN or blank is dropped and counted. Other values are not
    changed; numbers and truth values take Python's spelling.

    Args:
        source: a file of a kind in :data:`fedstrata.data.forms.FORMS`, also compressed as ``.gz``; a folder of
            one kind of them, or one that ``save_to_disk`` wrote; a data set id (``name:config#split``, by default
            the split ``train``); a list of these; or rows in memory. In a folder of txt files each file is one
            row, with the columns ``text``, ``file``, ``folder`` and ``label``, the same.
        how: the wanted columns, and what is said of the files. Where values are lists of words there are equally
            many in each column of a row but the owner's; they become texts with ``WORD_END`` between the words.
            Other lists, of which each wanted column but the owner's has one, as long, are as many rows.
        limit: stop reading after so many rows that have every wanted value.
        base_dir: folder to look in for a path that the working directory does not have.

    Raises:
        UserError: a source is missing, unreadable or malformed, or lacks a wanted column or any full row.
    """
    rows = Rows({column: [] for column in how.wanted}, 0)
    for name, found in _opened(source, how, base_dir):
        if limit is None or len(rows) < limit:
            rows = _append(rows, name, _texts(found if how.words else _entries(found, name, how), how), limit)
    return replace(rows, classes=how.classes, found=how.found)


def _opened(source: str | list[str] | InMemory, how: How, base_dir: Path | None) -> list[tuple[str, Records]]:
    """Each source by its name, and its records; that all exist is settled before any is read."""
    if isinstance(source, InMemory):
        return [(source.kind, memory_records(source, how))]
    return [(name, _open(name, how, base_dir)) for name in _sources(source)]


def _sources(source: str | list[str]) -> list[str]:
    sources = [source] if isinstance(source, str) else source
    if not sources or "" in sources:
        raise UserError(
            f"[data]: {source!r} names no source; expected a file, a folder, a data set id or a list of them"
        )
    return sources


def _append(rows: Rows, name: str, found: Iterator[list[str]], limit: int | None) -> Rows:
    """``rows`` with those of the source called ``name``, which must have one."""
    before, lacking = len(rows), Counter(rows.lacking)
    for number, texts in enumerate(found, before + rows.dropped):
        blank = next((column for column, text in zip(rows.columns, texts, strict=True) if not text.strip()), None)
        if blank is not None:
            lacking[blank] += 1
            continue
        for values, text in zip(rows.columns.values(), texts, strict=True):
            values.append(text)
        rows.numbers.append(number)
        if len(rows) == limit:
            break
    dropped = lacking.total() - rows.dropped
    if len(rows) == before:
        what = f"found {plural(dropped, 'row')}, none" if dropped else "is empty, expected rows"
        raise UserError(f"{name}: {what} with a value in each column of {', '.join(rows.columns)}")
    return replace(rows, dropped=lacking.total(), lacking=dict(lacking))


def _entries(source: Records, name: str, how: How) -> Records:
    """Each record; where its texts and labels are lists, each entry of these as a record of its own."""
    columns = [column for column in how.wanted if column != how.owner]
    for where, row in source:
        lists = [row[column] for column in columns if isinstance(row.get(column), list)]
        if len(columns) == 1 or len(lists) < len(columns):
            yield where, row
            continue
        if len(set(map(len, lists))) > 1:
            raise UserError(
                f"{where}: columns {', '.join(columns)} hold lists of different lengths; expected one label for "
                "each text"
            )
        how.note(name, "lists of texts and of their labels, each entry of which is a row")
        for values in zip(*lists, strict=True) if lists[0] else [[None] * len(columns)]:
            yield where, {**row, **dict(zip(columns, values, strict=True))}


def _texts(source: Records, how: How) -> Iterator[list[str]]:
    """The wanted values of each record as texts; "" for one that is missing."""
    lists = [column for column in how.wanted if how.words and column != how.owner]
    for where, row in source:
        texts = {column: _words(row.get(column), where, column) for column in lists}
        if len({text.count(WORD_END) for text in texts.values() if text}) > 1:
            raise UserError(f"{where}: columns {', '.join(lists)} hold different numbers of words")
        others = {column: row.get(column) for column in how.wanted if column not in texts}
        if how.words:  # in a file of words each of them has its owner
            others = {column: _same(value, where, column) for column, value in others.items()}
        texts |= {column: _text(value, where, column) for column, value in others.items()}
        yield [texts[column] for column in how.wanted]


def _same(value: Any, where: str, column: str) -> Any:
    """The one value that all words of a sentence have, if they have it each; a blank repeats it."""
    if not isinstance(value, list):
        return value
    found = list(dict.fromkeys(text for text in (_text(word, where, column) for word in value) if text.strip()))
    if len(found) > 1:
        raise UserError(
            f"{where}: column {column!r} holds {found[0]!r:.40} and {found[1]!r:.40} in one sentence, "
            "expected one value for all its words"
        )
    return found[0] if found else None


def _text(value: Any, where: str, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, VALUES):  # what else there is in Python has no text, or one that names its address
        kind = type(value).__name__
        several = (
            "; a row with several labels or texts is not read" if isinstance(value, list | set | frozenset) else ""
        )
        raise UserError(
            f"{where}: column {column!r} holds a {kind}, expected a text, a number or a truth value{several}"
        )
    if value.is_nan() if isinstance(value, Decimal) else value != value:  # a missing number, or NaT
        return ""
    text = str(value)
    if not text.isascii() and (half := HALF_CHARACTER.search(text)):
        raise UserError(
            f"{where}: column {column!r} holds {half.group()!a}, half a character, expected Unicode text"
        )
    return text


def _words(value: Any, where: str, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        spans = "; a text with spans of characters is not read" if isinstance(value, str) and " " in value else ""
        raise UserError(f"{where}: column {column!r} holds {shown(value)}, expected a list of words{spans}")
    texts = [_text(word, where, column) for word in value]
    if any(not text.strip() or WORD_END in text for text in texts):
        raise UserError(f"{where}: column {column!r} holds an empty word or one with a line's end in it")
    return WORD_END.join(texts)


def _open(source: str, how: How, base_dir: Path | None) -> Records:
    """The records of one source; whether it exists is settled at once, before any source is read."""
    if source.startswith(PREFIX):
        raise UserError(
            f"{source}: these rows were handed over from Python; run the job from there, with the rows"
        )
    bases = [Path()] if base_dir is None else [Path(), base_dir]
    for path in (base / source for base in bases):
        if os.path.exists(path):
            other = bases[-1] / source  # as of a job that is called from another folder than it was written in
            if os.path.exists(other) and not os.path.samefile(path, other):
                how.note(source, f"that of the working directory, not {other}")
            return _local(path, how)
        if "\0" not in source and os.path.islink(path):
            raise UserError(f"{path}: is a link to {os.readlink(path)}, where there is no file")
    folders = dict.fromkeys((base / source).parent.resolve() for base in bases)
    there = (path for folder in folders for path in folder.glob("*"))
    beside = sorted({path.name for path in there if _like(path, source)})
    close = difflib.get_close_matches(Path(source).name, beside)
    hint = f"; {did_you_mean(Path(source).name, close)}" if close else ""
    places = " or ".join(map(str, folders))
    identity = HUB_ID.fullmatch(source)
    if identity is None or known(Path(source)):
        raise UserError(f"{source}: there is no such file or folder in {places}{hint}")
    if how.documents != "lines":
        raise UserError(
            f"{source}: [data] documents: {how.documents!r} goes with txt files; there is none in {places}{hint}"
        )
    return hub_records(source, identity, how, f"{source}: is neither a file nor a folder in {places}", hint)


def _like(path: Path, source: str) -> bool:
    """Whether a path may be meant by a source that is not there: job files and others beside the data are not."""
    return known(path) or path.suffix == Path(source).suffix or path.is_dir()


def _local(path: Path, how: How) -> Records:
    if not path.is_dir():
        return records(path, how)
    if how.documents != "lines":
        raise UserError(f"{path}: [data] documents: {how.documents!r} goes with files that are named one by one")
    return saved_records(path, how) if saved(path) else _folder(path, how)


def _folder(path: Path, how: How) -> Records:
    files = files_of_a_kind(path, how.words)
    if not how.words and extension(files[0]) == ".txt":
        return document_records(path, files, how)
    return chain.from_iterable(records(file, how) for file in files)


def files_of_a_kind(path: Path, words: bool) -> list[Path]:
    """The files of a folder that is one source, with lists of words or not.

    Raises:
        UserError: there are none, or of several kinds.
    """
    forms = WORD_FORMS if words else FORMS
    files = files_in(path, forms)
    kinds = {forms[extension(file)]: file.relative_to(path).as_posix() for file in files}
    if not files:
        raise UserError(f"{path}: the folder holds no file of a known kind (expected one of: {', '.join(forms)})")
    if len(kinds) > 1:
        found = ", ".join(sorted(kinds.values()))
        raise UserError(f"{path}: the folder holds files of several kinds ({found}); name those to read in a list")
    return files


def files_in(path: Path, forms: Collection[str] = tuple({**FORMS, **WORD_FORMS})) -> list[Path]:
    """Every file of a known kind in a folder and below, sorted, without hidden ones and Excel's locks."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})")

    found = (Path(folder, name) for folder, _, names in os.walk(path, onerror=refuse) for name in names)
    known = (file for file in found if extension(file) in forms)
    return sorted(file for file in known if not re.search(r"(^|/)(\.|~\$)", file.relative_to(path).as_posix()))
