"""The first rows of a file or folder of which nothing is known yet: its columns and some of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from statistics import mean
from typing import Any

from fedstrata.data.column_names import CLIENTS, plain_name
from fedstrata.data.forms import FORMS, by_content, extension, known, records
from fedstrata.data.forms.data_sets import saved, saved_columns
from fedstrata.data.forms.how import How, Records, check
from fedstrata.data.forms.objects import holds_object, parquet_columns
from fedstrata.data.forms.plain import document_records, has_columns, shape_of, txt_records
from fedstrata.data.forms.tables import first_cells, first_rows, likeliest_delimiter
from fedstrata.data.forms.text import check_line_ends, full_lines, lines
from fedstrata.data.forms.words import (
    COMMENT,
    TAG_NAMES,
    WORD_NAMES,
    fields_of,
    numbers_sentences,
    plain_letters,
)
from fedstrata.data.header import heads_a_table, is_header
from fedstrata.data.read import WORD_END, files_in, files_of_a_kind, read
from fedstrata.errors import UserError

ROWS = 5_000
"""Rows that are looked at."""
TAG = re.compile(r"[BILUES]-\S+|O")
"""A tag of a word in one of the IOB schemes."""
TABLES = (".csv", ".tsv", ".tab", ".xlsx")
WORD_FILES = (".conll", ".conllu", ".iob", ".iob2", ".bio")


@dataclass(frozen=True)
class Sample:
    """What the first rows of a source show.

    Attributes:
        columns: column -> its values in these rows, as they were read.
        names: names given to the columns of a file without a header line; None where it has them.
        words: a file of a word and its tag per line; the values are then lists, one for each sentence.
        whole: whether these are all the rows.
        lists: columns whose values stood in lists, of which each entry is a row.
    """

    columns: Mapping[str, list[Any]]
    names: list[str] | None = None
    words: bool = False
    whole: bool = True
    lists: Sequence[str] = ()

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)


def sample(path: Path, wanted: Sequence[str] = (), tagged: bool = False) -> Sample:
    """Look at the first rows of a file, or of a folder that is one source of rows.

    Args:
        path: the file or folder.
        wanted: columns that it is known to have.
        tagged: whether it is known to hold words with tags, whatever these look like.

    Raises:
        UserError: it is missing, empty, or of no known kind, or has two columns of one name.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder")
    if path.is_dir():
        return _folder(path, wanted, tagged)
    if not known(path):
        by_content(path, How(()), FORMS)
    kind = _kind(path)
    if kind == ".parquet":
        return _taken(records(path, How(tuple(parquet_columns(path)))), path)
    if named := _of_words(path, tagged):
        return _sentences(path, named)
    first = next(full_lines(path, How(())), (0, ""))[1] if kind == ".txt" else ""
    if kind in TABLES or ("\t" in first and shape_of(path, How(())) == "plain"):
        found = _table(path, wanted)
    else:
        found = _taken(_plain(path), path)
    words = _words_of_table(found, wanted, tagged)
    return _sentences(path, [*words, *(name for name in found.columns if name not in words)]) if words else found


def _kind(path: Path) -> str:
    """A file's extension; one that says nothing counts as ``.txt``, as in a run."""
    return extension(path) if known(path) else ".txt"


def holds_text(path: Path) -> bool:
    """Whether a txt file holds text and no rows of columns, nor words with tags.

    Raises:
        UserError: it cannot be read.
    """
    return not has_columns(path) and not _of_words(path, False)


def _sentences(path: Path, columns: Sequence[str]) -> Sample:
    """Of a file with a word in each line: words, tags, and of the other columns the one that may say whose."""
    for owner in (name for name in columns[2:] if plain_name(name) in CLIENTS):
        with suppress(UserError):  # a sentence has words of two
            return _words_in(path, columns[:2], owner)
    return _words_in(path, columns[:2])


def _words_in(path: Path, columns: Sequence[str], *owner: str) -> Sample:
    rows = read(str(path), How((*columns, *owner), words=True, owner=next(iter(owner), None)), ROWS)
    lists = {name: [value.split(WORD_END) for value in rows.columns[name]] for name in columns}
    return Sample({**rows.columns, **lists}, words=True, whole=len(rows) < ROWS)


def _words_of_table(rows: Sample, wanted: Sequence[str], tagged: bool) -> tuple[str, str] | None:
    """The columns of words and tags in a table with a word per row and a column that numbers the sentences."""
    numbers = next((name for name in rows.columns if numbers_sentences(name)), None)
    tags = [name for name in rows.columns if _tags(rows.columns[name])]
    tags += [name for name in rows.columns if tagged and (name in wanted[1:] or plain_letters(name) in TAG_NAMES)]
    words = [name for name in rows.columns if name not in (numbers, *tags)]
    words = [name for name in words if name in wanted or plain_letters(name) in WORD_NAMES] or words
    if numbers is None or not tags or not words:
        return None
    return words[0], next((name for name in tags if name in wanted), tags[-1])


def _tags(values: Sequence[Any]) -> bool:
    """Whether a column holds the tags of words."""
    found = {str(value) for value in values if value is not None}
    return found > {"O"} and all(map(TAG.fullmatch, found))


def _plain(path: Path) -> Records:
    """The records of a file that is no table by its extension, with all columns it shows."""
    if _kind(path) != ".txt":
        return records(path, How(()))
    if shape_of(path, How(())) != "plain":
        return txt_records(path, How(()))
    check_line_ends(path, How(()))
    for wanted in (("text", "label"), ("text",)):
        with suppress(UserError):
            if next(txt_records(path, How(wanted)), None):
                return txt_records(path, How(wanted))
    raise UserError(f"{path}: is empty, expected rows")


def _folder(path: Path, wanted: Sequence[str], tagged: bool) -> Sample:
    if saved(path):
        from fedstrata.data.forms.data_sets import saved_records

        return _taken(saved_records(path, How(tuple(saved_columns(path)))), path)
    files = files_in(path)
    if files and not tagged and all(extension(file) == ".txt" for file in files):
        return _taken(document_records(path, files, How(())), path)
    if not files:
        raise UserError(f"{path}: the folder holds no file of a known kind")
    first = sample(files[0], wanted, tagged)
    files = files_of_a_kind(path, first.words)
    return replace(first, whole=first.whole and len(files) == 1)


def _taken(rows: Records, path: Path) -> Sample:
    taken = [row for _, row in islice(rows, ROWS + 1)]
    if not taken:
        raise UserError(f"{path}: is empty, expected rows")
    names = dict.fromkeys(name for row in taken for name in row if name)  # pandas leaves its index without one
    columns = {name: [row.get(name) for row in taken[:ROWS]] for name in names}
    lists = _lists_of_texts(columns)
    return Sample(_entries(columns, lists) if lists else columns, whole=len(taken) <= ROWS, lists=lists)


def _lists_of_texts(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The columns of lists of texts and of as long lists, as of an abstract's sentences and their labels."""
    filled = {name: [value for value in values if value is not None] for name, values in columns.items()}
    lists = [name for name, values in filled.items() if values and all(isinstance(one, list) for one in values)]
    sizes = {name: [len(value or ()) for value in columns[name]] for name in lists}
    for name in lists:
        texts = list(chain.from_iterable(filled[name]))
        alike = [other for other in lists if sizes[other] == sizes[name]]
        if texts and all(isinstance(text, str) for text in texts) and not holds_words(filled[name]) and alike[1:]:
            return alike
    return []


def _entries(columns: Mapping[str, Sequence[Any]], lists: Sequence[str]) -> dict[str, list[Any]]:
    """Columns in which each entry of these lists is a row, as :func:`fedstrata.data.read.read` has them."""
    sizes = [len(value or ()) for value in columns[lists[0]]]
    rows = {name: [[value] * size for value, size in zip(columns[name], sizes, strict=True)] for name in columns}
    rows |= {name: [value or [] for value in columns[name]] for name in lists}
    return {name: list(chain.from_iterable(values)) for name, values in rows.items()}


def holds_words(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether lists hold words, and no sentences."""
    found = [word for word in chain.from_iterable(lists) if word is not None]
    texts = [word for word in found if isinstance(word, str)]
    return len(texts) == len(found) > 0 and mean(len(word.split()) for word in texts) <= 2


def _table(path: Path, wanted: Sequence[str]) -> Sample:
    """Of a file with fields between delimiters, or a sheet; a first line unlike the others is a header."""
    kind = _kind(path)
    between = likeliest_delimiter(path, How(())) if kind == ".csv" else "\t"
    if kind == ".csv":
        rows = first_rows(path, How(()), between, ROWS)
    elif kind == ".xlsx":
        rows = first_cells(path, ROWS) or [[]]
    else:
        rows = [line.split(between) for _, line in islice(full_lines(path, How(())), ROWS)] or [[]]
    titles = [field.strip().strip('"') for field in rows[0]]
    if len(rows) > 2 and heads_a_table(titles, [field.strip().strip('"') for field in rows[1]]):
        title = next(filter(None, titles))
        raise UserError(f"{path}: the first line, {title[:40]!r}, is a title; expected the names of the columns")
    named = not titles or _named(titles, rows, wanted) or (kind == ".xlsx" and len(titles) < max(map(len, rows)))
    if named:
        check(path, titles, [title for title in titles if title])
    names = None if named else [f"column{number}" for number in range(1, len(titles) + 1)]
    found = _taken(records(path, How((), names=names, delimiter=None if between == "," else between)), path)
    return Sample(found.columns, names, whole=found.whole)


def _named(titles: Sequence[str], rows: Sequence[Sequence[str]], wanted: Sequence[str]) -> bool:
    """Whether the first row is a header; columns in which nothing stands, as Excel leaves them, say nothing."""
    filled = {place for row in rows for place, field in enumerate(row) if field.strip()}
    places = [place for place in range(len(titles)) if place in filled]
    below = [[row[place] if place < len(row) else "" for place in places] for row in rows[1:]]
    return is_header([titles[place] for place in places], below, wanted)


def _of_words(path: Path, tagged: bool) -> list[str]:
    """Of a file with a word and its tag in each line, by its extension or first lines, both columns and others."""
    if _kind(path) not in (*WORD_FILES, ".txt", ".tsv", ".tab"):
        return []
    full = (line for _, line in full_lines(path, How(())) if not COMMENT.fullmatch(line.strip()))
    first = list(islice(full, 200))
    header = fields_of(first[0], How(())) if first else []
    names, usual = _named_words(header), ["text", "label"]
    if extension(path) in WORD_FILES:
        return names or usual
    if len(header) > 2 and any(map(numbers_sentences, header)) and not TAG.fullmatch(header[-1]):
        return []  # a table, unless the first line is a word such as Sentinel
    if tagged and not holds_object("".join(first[:1])):
        return names or usual
    fields = [line.split() for line in first[1:]]
    fields = [line for line in fields if line and line[0] != "-DOCSTART-"]
    place = header.index(names[1]) if names else -1
    short = bool(fields) and all(max(2, place + 1) <= len(line) <= 6 for line in fields)
    return (names or usual) if short and _tags_of_words(path, [line[place] for line in fields]) else []


def _tags_of_words(path: Path, last: Sequence[str]) -> bool:
    """Whether last fields are tags: of an IOB scheme; or a few and O, with blank lines between the lines."""
    if all(map(TAG.fullmatch, last)):
        return True
    few = "O" in last and 5 * len(set(last)) <= len(last)
    return few and any(not line.strip() for _, line in islice(lines(path, How(())), len(last)))


def _named_words(header: Sequence[str]) -> list[str]:
    """The columns of words, of tags and the others, where a first line names the former as usual."""
    words = [name for name in header if plain_letters(name) in WORD_NAMES]
    tags = [name for name in header if plain_letters(name) in TAG_NAMES]
    both = [*words[:1], *tags[-1:]]
    return [*both, *(name for name in header if name not in both)] if words and tags else []
