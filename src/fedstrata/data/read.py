"""Columns of text from files, folders and data set ids."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from fedstrata.data.forms import FORMS, WORD_FORMS, Records, check, lines, records
from fedstrata.errors import UserError, did_you_mean

HUB_ID = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([^#]+))?(?:#(.+))?")
"""``name`` or ``name:config``, either with ``#split``."""
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""A surrogate, as JSON can spell it alone; no tokenizer takes one."""
WORD_END = "\n"
"""Between the words of a value that is a list of words."""


@dataclass(frozen=True)
class Rows:
    """Rows as columns.

    Attributes:
        columns: name of every wanted column -> its values; all columns have the same length.
        dropped: number of rows dropped because a wanted value was missing or blank.
        pools: the name of each row's source; empty where sources have no names.
        classes: column -> its class names in the order that a data set gives them.
    """

    columns: dict[str, list[str]]
    dropped: int
    pools: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)


def read(
    source: str | list[str],
    columns: Sequence[str],
    *,
    names: list[str] | None = None,
    limit: int | None = None,
    base_dir: Path | None = None,
    words: bool = False,
    documents: str = "lines",
) -> Rows:
    """Read the wanted columns of a source, every value as text.

    A row in which a wanted value is missing, null, NaN or blank is dropped and counted. Other values are not
    changed; numbers and truth values take Python's spelling.

    Args:
        source: a csv, tsv, jsonl, json, parquet or txt file, a folder of one kind of them, a data set id
            (``name:config#split``, by default the split ``train``), or a list of these. In a folder of txt files
            each file is one row, with the columns ``text``, ``file`` and ``folder``.
        columns: names of the wanted columns.
        names: column names of csv, tsv and txt files that have no header line.
        limit: stop reading after so many rows that have every wanted value.
        base_dir: folder to look in for a path that the working directory does not have.
        words: the values are lists of words, equally many in each column of a row, and become texts with
            ``WORD_END`` between the words; CoNLL's form, a word and its tags per line, is read too.
        documents: what is a row of a plain txt file: ``lines``, or texts with ``blank`` lines between them or
            ``headings`` over them.

    Raises:
        UserError: a source is missing, unreadable or malformed, or lacks a wanted column or any full row.
    """
    sources = _sources(source)
    wanted = tuple(dict.fromkeys(columns))
    rows = Rows({column: [] for column in wanted}, 0)
    how = _How(wanted, names, base_dir, words, documents, rows.classes)
    opened = [_open(name, how) for name in sources]
    for name, found in zip(sources, opened, strict=True):
        if limit is None or len(rows) < limit:
            rows = _append(rows, name, _texts(found, wanted, words), limit)
    return rows


def _sources(source: str | list[str]) -> list[str]:
    sources = [source] if isinstance(source, str) else source
    if not sources or "" in sources:
        raise UserError(
            f"[data]: {source!r} names no source; expected a file, a folder, a data set id or a list of them"
        )
    return sources


def _append(rows: Rows, name: str, found: Iterator[list[str]], limit: int | None) -> Rows:
    """``rows`` with those of the source called ``name``, which must have one."""
    before, dropped = len(rows), 0
    for texts in found:
        if not all(text.strip() for text in texts):
            dropped += 1
            continue
        for values, text in zip(rows.columns.values(), texts, strict=True):
            values.append(text)
        if len(rows) == limit:
            break
    if len(rows) == before:
        what = f"found {dropped} rows, none" if dropped else "is empty, expected rows"
        raise UserError(f"{name}: {what} with a value in each column of {', '.join(rows.columns)}")
    return replace(rows, dropped=rows.dropped + dropped)


def _texts(source: Records, wanted: Sequence[str], words: bool) -> Iterator[list[str]]:
    """The wanted values of each record as texts; "" for one that is missing."""
    for where, row in source:
        texts = [(_words if words else _text)(row.get(column), where, column) for column in wanted]
        if words and len({text.count(WORD_END) for text in texts if text}) > 1:
            raise UserError(f"{where}: columns {', '.join(wanted)} hold different numbers of words")
        yield texts


def _text(value: Any, where: str, column: str) -> str:
    if value is None or value != value:  # NaN is a missing number
        return ""
    if isinstance(value, (list, dict, bytes)):
        kind = type(value).__name__
        raise UserError(f"{where}: column {column!r} holds a {kind}, expected a text, a number or a truth value")
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
        raise UserError(f"{where}: column {column!r} holds {value!r:.40}, expected a list of words")
    texts = [_text(word, where, column) for word in value]
    if any(not text.strip() or WORD_END in text for text in texts):
        raise UserError(f"{where}: column {column!r} holds an empty word or one with a line's end in it")
    return WORD_END.join(texts)


@dataclass(frozen=True)
class _How:
    """How sources are read: see :func:`read`; ``classes`` takes a data set's class names as it is read."""

    wanted: tuple[str, ...]
    names: list[str] | None
    base_dir: Path | None
    words: bool
    documents: str
    classes: dict[str, list[str]]


def _open(source: str, how: _How) -> Records:
    """The records of one source; whether it exists is settled at once, before any source is read."""
    bases = [Path()] if how.base_dir is None else [Path(), how.base_dir]
    for path in (base / source for base in bases):
        if os.path.exists(path):
            return _local(path, how)
        if "\0" not in source and os.path.islink(path):
            raise UserError(f"{path}: is a link to {os.readlink(path)}, where there is no file")
    folders = dict.fromkeys((base / source).parent.resolve() for base in bases)
    beside = sorted({path.name for folder in folders for path in folder.glob("*")})
    close = difflib.get_close_matches(Path(source).name, beside)
    hint = f"; {did_you_mean(Path(source).name, close)}" if close else ""
    places = " or ".join(map(str, folders))
    identity = HUB_ID.fullmatch(source)
    if identity is None or Path(source).suffix.lower() in {**FORMS, **WORD_FORMS}:
        raise UserError(f"{source}: there is no such file or folder in {places}{hint}")
    if how.documents != "lines":
        raise UserError(
            f"{source}: [data] documents: {how.documents!r} goes with txt files; there is none in {places}{hint}"
        )
    missing = f"{source}: is neither a file nor a folder in {places}"
    return _hub(source, identity, how.wanted, missing, hint, how.classes)


def _local(path: Path, how: _How) -> Records:
    if not path.is_dir():
        return records(path, how.wanted, how.names, how.words, how.documents)
    if how.documents != "lines":
        raise UserError(f"{path}: [data] documents: {how.documents!r} goes with files that are named one by one")
    return _folder(path, how.wanted, how.names, how.words)


def _folder(path: Path, wanted: Sequence[str], names: list[str] | None, words: bool) -> Records:
    forms = WORD_FORMS if words else FORMS
    files = _files(path, forms)
    kinds = {forms[file.suffix.lower()]: file.relative_to(path).as_posix() for file in files}
    if not files:
        raise UserError(f"{path}: the folder holds no file of a known kind (expected one of: {', '.join(forms)})")
    if len(kinds) > 1:
        found = ", ".join(sorted(kinds.values()))
        raise UserError(f"{path}: the folder holds files of several kinds ({found}); name those to read in a list")
    if FORMS[".txt"] in kinds:
        return _documents(path, files, wanted)
    return chain.from_iterable(records(file, wanted, names, words) for file in files)


def _files(path: Path, forms: Collection[str]) -> list[Path]:
    """Every file of a known kind in a folder and below, sorted, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})")

    found = (Path(folder, name) for folder, _, names in os.walk(path, onerror=refuse) for name in names)
    known = (file for file in found if file.suffix.lower() in forms)
    return sorted(file for file in known if not re.search(r"(^|/)\.", file.relative_to(path).as_posix()))


def _documents(path: Path, files: Sequence[Path], wanted: Sequence[str]) -> Records:
    check(path, ["text", "file", "folder"], wanted, "; a txt file in a folder is one row")
    for file in files:
        below = file.relative_to(path)
        text = "".join(line for _, line in lines(file))
        folder = below.parts[0] if len(below.parts) > 1 else ""
        yield str(file), {"text": text, "file": below.as_posix(), "folder": folder}


def _hub(
    source: str,
    identity: re.Match[str],
    wanted: Sequence[str],
    missing: str,
    hint: str,
    classes: dict[str, list[str]],
) -> Records:
    import datasets  # slow to load and seldom needed

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # do not report downloads
    name, config, split = identity.groups()
    try:
        data = datasets.load_dataset(name, config, split=split or "train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{missing}, nor reachable as a data set id ({reason}){hint}") from None
    check(source, data.column_names, wanted)
    data = data.select_columns(list(wanted))
    kinds = {c: f for c, f in data.features.items() if isinstance(f, datasets.ClassLabel)}
    classes.update({column: list(kind.names) for column, kind in kinds.items()})
    for number, row in enumerate(data, 1):
        for column, kind in kinds.items():  # a class stands by its name; -1 marks a row without one
            row[column] = None if row[column] in (None, -1) else kind.int2str(row[column])
        yield f"{source}, row {number}", row
