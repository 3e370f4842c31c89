"""Files of words and their tags: a word per line, sentences apart by a blank line or by a column."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fedstrata.data.forms.how import How, Records, check
from fedstrata.data.forms.tables import csv_records, excel_records, tsv_records
from fedstrata.data.forms.text import check_line_ends, full_lines, lines
from fedstrata.errors import UserError, plural

WORD_NAMES = {"word", "words", "token", "tokens", "text"}
TAG_NAMES = {"tag", "tags", "label", "labels", "ner", "nertag", "nertags", "entity", "iob", "bio"}
"""How the first and the last field of a header line are called."""
LOOKED_AT = 200
"""Lines by which a column is told that numbers the words."""
COMMENT = re.compile(r"# ?(\w+ = .*|new(doc|par)\b.*)")
"""A line of CoNLL-U that says something of the sentence or document below it, such as ``# sent_id = 0``."""

NO_WORD = re.compile(r"\d+-\d+|\d+\.\d+")
"""The number of a line of CoNLL-U without a word of its own: of several written as one, or of one left unsaid."""


def conll_records(path: Path, how: How) -> Records:
    """A word per line with its columns between blanks, a blank line between sentences; the last column is the tag.

    Without names the first wanted column is the first in the file, or the one after the numbers of the words, and
    the second the last. A header line is recognized by the wanted columns, or by usual names of words and tags.
    """
    check_line_ends(path, how)
    full = (line for _, line in full_lines(path, how) if not COMMENT.fullmatch(line.strip()))
    header = fields_of(next(full, ""), how)
    if set(how.wanted) <= set(header) and any(map(numbers_sentences, header)):
        return _sentences(tsv_records(path, how), path, how)
    return _conll(path, how, header if _is_header(header, how) else [])


def csv_words(path: Path, how: How) -> Records:
    """Of a CSV file with a word per line and a column that numbers the sentences."""
    return _sentences(csv_records(path, how), path, how)


def excel_words(path: Path, how: How) -> Records:
    """Of an Excel file with a word per row and a column that numbers the sentences."""
    return _sentences(excel_records(path, how), path, how)


def fields_of(line: str, how: How) -> list[str]:
    """The fields of a line of a word: between tabs, or between blanks."""
    between = how.delimiter or ("\t" if "\t" in line else None)
    return [field.strip() for field in line.split(between)]


def plain_letters(name: str) -> str:
    """The letters of a name, as the usual names have them."""
    return re.sub(r"[^a-z]", "", name.lower())


def numbers_sentences(name: str) -> bool:
    """Whether a column numbers the sentences, by its name."""
    return plain_letters(name).startswith("sent")


def _is_header(fields: list[str], how: How) -> bool:
    if len(fields) < 2:
        return False
    usual = plain_letters(fields[0]) in WORD_NAMES and plain_letters(fields[-1]) in TAG_NAMES
    return usual or fields == how.names or (len(how.wanted) > 1 and set(how.wanted) <= set(fields))


def _counts_words(path: Path, how: How) -> bool:
    """Whether the first of three or more columns numbers the words of each sentence from 1, by the first lines."""
    last, found = 0, False
    for _, line in islice(lines(path, how), LOOKED_AT):
        if not line.strip() or line.startswith("-DOCSTART-") or (not last and COMMENT.fullmatch(line.strip())):
            last = 0
            continue
        fields = fields_of(line, how)
        if len(fields) > 2 and NO_WORD.fullmatch(fields[0]):
            continue
        if len(fields) < 3 or fields[0] != str(last + 1):
            return False
        last, found = last + 1, True
    return found


def _conll(path: Path, how: How, header: list[str]) -> Records:
    if header:
        how.note(path, f"header line {' '.join(header)!r}")
    numbered = not header and _counts_words(path, how)
    counted = numbered and not how.names
    if counted:
        how.note(path, "the first column numbers the words, which stand in the second")
    started, sentence, skip = 0, list[list[str]](), bool(header)
    there = _with_words(path, how) if numbered else lines(path, how)
    for number, line in chain(there, [(0, "")]):
        if not sentence and COMMENT.fullmatch(line.strip()):
            how.note(path, "comments before sentences, such as '# sent_id = 0', are left out")
            continue
        if skip and line.strip():
            skip = False
            continue
        fields = fields_of(line, how)
        if line.strip() and not line.startswith("-DOCSTART-"):
            started = started if sentence else number
            sentence.append(fields)
            if len(fields) < 2 or len(fields) != len(sentence[0]) or not all(fields):
                raise UserError(
                    f"{path}, line {number}: found {line.strip()!r}, expected a word and its tag, with as many "
                    "columns in every line of a sentence"
                )
        elif sentence:
            columns = [list(column) for column in zip(*sentence, strict=True)]
            names = _columns(len(columns), how, header, int(counted))
            if len(names) != len(columns):
                raise UserError(
                    f"{path}, line {started}: found {plural(len(columns), 'column')}, expected {len(names)}"
                )
            check(path, names, how.wanted)
            yield f"{path}, line {started}", dict(zip(names, columns, strict=True))
            sentence = []


def _with_words(path: Path, how: How) -> Iterator[tuple[int, str]]:
    """The lines of a file that numbers its words, but for those that have none of their own."""
    for number, line in lines(path, how):
        if NO_WORD.fullmatch(fields_of(line, how)[0] if line.strip() else ""):
            how.note(path, "lines with numbers such as 1-2 or 8.1, which have no word of their own, are left out")
        else:
            yield number, line


def _columns(count: int, how: How, header: list[str], word: int) -> list[str]:
    """The names of a file's columns; ``word`` is the place of the word where none are known."""
    if how.names or set(how.wanted) <= set(header):
        return how.names or header
    last = [*how.wanted[1:2], f"column {count}"][0]
    names = [f"column {i}" for i in range(1, count)]
    return [*names[:word], how.wanted[0], *names[word + 1 :], last]


def _sentences(rows: Records, path: Path, how: How) -> Records:
    """Rows of a word each, joined to sentences by a column that numbers them; a blank there repeats the last.

    Raises:
        UserError: there is no such column, or the words of a sentence stand in two places.
    """
    started, current = "", ""
    words: dict[str, list[Any]] = {}
    seen = set[str]()
    for where, row in rows:
        column = next((name for name in row if numbers_sentences(name) and name not in how.wanted), None)
        if column is None:
            raise UserError(
                f"{path}: has no column that numbers the sentences; expected a word per line and a column such as "
                f"sentence_id beside {', '.join(how.wanted)}, found {', '.join(row)}"
            )
        number = str(row[column] if row.get(column) is not None else "").strip() or current
        if not number:
            raise UserError(f"{where}: column {column!r} is blank, expected the number of the first sentence")
        if number != current:
            if number in seen:
                raise UserError(
                    f"{where}: sentence {number!r} of column {column!r} goes on after another one; expected all "
                    "words of a sentence together, and a number of its own for each"
                )
            if words:
                yield started, words
            seen.add(number)
            started, current, words = where, number, {name: [] for name in how.wanted}
        for name in how.wanted:
            words[name].append(row.get(name))
    if words:
        yield started, words
