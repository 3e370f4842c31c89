"""File formats: each is read as records, one at a time."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError, did_you_mean

Records = Iterator[tuple[str, Mapping[str, Any]]]
"""Where a row stands, for error messages, and its values by column."""
Fields = Iterator[tuple[int, list[str]]]
"""Number of a line, and its fields."""
HEADING = re.compile(r"= (?!=).*(?<!=) =")
"""The title of an article in WikiText's form; a section's is ``= = Section = =``."""


def records(
    path: Path, wanted: Sequence[str], names: list[str] | None, words: bool = False, documents: str = "lines"
) -> Records:
    """The records of a file, in the format of its extension, read lazily.

    Args:
        path: csv, tsv, jsonl, json, parquet or txt.
        wanted: columns every file must have; there may be more in a record.
        names: column names of csv, tsv and txt files that have no header line.
        words: each value is a list of words; tsv, txt and conll files then have a word per line.
        documents: what is a row of a plain txt file: see :func:`_plain`.

    Raises:
        UserError: the extension is not known, ``documents`` does not go with the file, or, in reading, the file is
            malformed or lacks a column.
    """
    forms = WORD_FORMS if words else FORMS
    form = forms.get(path.suffix.lower())
    if form is None:
        raise UserError(f"{path}: the extension {path.suffix!r} is not known; {did_you_mean(path.suffix, forms)}")
    if documents == "lines":
        return form(path, wanted, names)
    if form is not _txt or names or _shape(path) != "plain":
        raise UserError(f"{path}: [data] documents: {documents!r} goes with plain txt files without columns alone")
    return _plain(path, wanted, documents)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line of a text file with its number from 1 and its end; nothing but ``\\n`` ends a line.

    Raises:
        UserError: the file cannot be read or is not UTF-8.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield number, raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: is not UTF-8 (byte {error.start + 1} of the line)") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def check(where: Path | str, there: Sequence[str], wanted: Sequence[str], hint: str = "") -> None:
    """Check that every wanted column occurs exactly once.

    Raises:
        UserError: it is not.
    """
    for column in wanted:
        if there.count(column) != 1:
            if column in there:
                raise UserError(f"{where}: has {there.count(column)} columns {column!r}; expected one{hint}")
            raise UserError(f"{where}: has no column {column!r}; {did_you_mean(column, there)}{hint}")


def _csv(path: Path, wanted: Sequence[str], names: list[str] | None) -> Records:
    return _table(_csv_fields(path), path, wanted, names)


def _csv_fields(path: Path) -> Fields:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line for _, line in lines(path)), strict=True)
    start = 1
    try:
        for fields in reader:
            if fields:
                yield start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {start}: is not CSV ({error})") from None


def _tsv(path: Path, wanted: Sequence[str], names: list[str] | None) -> Records:
    bare = ((number, line.rstrip("\r\n")) for number, line in lines(path))
    rows = ((number, line.split("\t")) for number, line in bare if line)
    return _table(rows, path, wanted, names, ragged=True)


def _table(
    rows: Fields, path: Path, wanted: Sequence[str], names: list[str] | None, ragged: bool = False
) -> Records:
    """Records from lines split into fields; without names the first line is the header.

    A ``ragged`` line may be short, as a few are in GLUE's files: what it lacks is missing. Where the user names
    the columns, it may be long: STS-B's own files end some lines with a license.
    """
    header = names or next(rows, (0, []))[1]
    if not header:
        raise UserError(f"{path}: is empty, expected a header line")
    check(path, header, wanted, "" if names else "; a file without a header line needs data.columns")
    for number, fields in rows:
        short, long = len(fields) < len(header), len(fields) > len(header)
        if (short and not ragged) or (long and not (ragged and names)):
            raise UserError(f"{path}, line {number}: found {len(fields)} fields, expected {len(header)}")
        yield f"{path}, line {number}", dict(zip(header, fields, strict=False))


def _json(path: Path, wanted: Sequence[str], _: list[str] | None) -> Records:
    seen: dict[str, None] = {}
    for where, row in _json_values(path):
        if not isinstance(row, dict):
            raise UserError(f"{where}: found {json.dumps(row)[:40]}, expected a JSON object")
        seen.update(dict.fromkeys(row))
        yield where, row
    if seen:
        check(path, list(seen), wanted)


def _json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """One value per line, or the entries of one array."""
    full = _full_lines(path)
    first = next(full, (0, ""))
    if first[1].lstrip().startswith("["):
        text = "".join(line for _, line in lines(path))
        for number, value in enumerate(_parse(path, 1, text), 1):
            yield f"{path}, entry {number}", value
    elif first[1]:
        for number, line in chain([first], full):
            yield f"{path}, line {number}", _parse(path, number, line)


def _parse(path: Path, number: int, text: str) -> Any:
    """The JSON value of a text that starts at a line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise UserError(
            f"{path}, line {line}: is not JSON ({error.msg} at character {error.colno}); "
            "expected one object per line, or one array of objects"
        ) from None


def _parquet(path: Path, wanted: Sequence[str], _: list[str] | None) -> Records:
    from pyarrow import ArrowException, parquet  # here, as it is slow to load and seldom needed

    try:
        with parquet.ParquetFile(path) as file:
            check(path, file.schema_arrow.names, wanted)
            batches = file.iter_batches(columns=list(wanted))
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", row
    except (ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: is not a readable Parquet file ({reason})") from None


def _txt(path: Path, wanted: Sequence[str], names: list[str] | None) -> Records:
    """A txt file by what it holds: JSON lines, PubMed-RCT's form, fields between tabs, or plain lines."""
    shape = _shape(path)
    if shape != "plain":
        return _json(path, wanted, names) if shape == "json" else _pubmed_rct(path, wanted)
    first = next(_full_lines(path), (0, ""))[1]
    if names or ("\t" in first and (set(wanted) != {"text"} or "text" in first.split("\t"))):
        return _tsv(path, wanted, names)  # plain lines may hold tabs too, but no column beside text
    return _plain(path, wanted)


def _shape(path: Path) -> str:
    """What a txt file holds, by its first two lines: ``json``, ``pubmed`` or ``plain``."""
    first, second = [*(line for _, line in islice(_full_lines(path), 2)), "", ""][:2]
    with suppress(UserError):
        if isinstance(_parse(path, 1, first), dict):
            return "json"
    return "pubmed" if re.fullmatch(r"###\S+\s*", first) and "\t" in second else "plain"


def _plain(path: Path, wanted: Sequence[str], documents: str = "lines") -> Records:
    """Rows of plain text.

    Args:
        path: a txt file.
        wanted: ``text`` alone.
        documents: ``lines``, each a row; ``blank``, rows with blank lines between them; ``headings``, articles
            under a line ``= Title =`` with none right above it, and what stands before the first. A row's lines
            have ``\\n`` between them, its blank ones are left out.
    """
    check(path, ["text"], wanted, "; plain lines of a txt file have no other column")
    started, row, gap = 0, list[str](), True
    for number, line in lines(path):
        blank = not line.strip()
        begins = {"lines": True, "blank": gap, "headings": gap and HEADING.fullmatch(line.strip())}
        gap = blank
        if row and begins[documents]:
            yield f"{path}, line {started}", {"text": "\n".join(row)}
            row = []
        if not blank:
            started = started if row else number
            row.append(line.rstrip("\r\n"))
    if row:
        yield f"{path}, line {started}", {"text": "\n".join(row)}


def _pubmed_rct(path: Path, wanted: Sequence[str]) -> Records:
    check(path, ["text", "label", "document"], wanted)
    document = ""
    for number, line in _full_lines(path):
        label, tab, text = line.partition("\t")
        if line.startswith("###"):
            document = line[3:].strip()
        elif not tab:
            raise UserError(f"{path}, line {number}: found no tab, expected a label, a tab and a sentence")
        else:
            yield f"{path}, line {number}", {"text": text, "label": label, "document": document}


def _conll(path: Path, wanted: Sequence[str], names: list[str] | None) -> Records:
    """A word per line with its columns between blanks, a blank line between sentences; the last column is the tag.

    Without names the first wanted column is the first in the file and the second the last.
    """
    started, sentence = 0, list[list[str]]()
    for number, line in chain(lines(path), [(0, "")]):
        fields = line.split("\t") if "\t" in line else line.split()
        fields = [field.strip() for field in fields]
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
            last = [*wanted[1:2], f"column {len(columns)}"][0]
            there = names or [wanted[0], *(f"column {i}" for i in range(2, len(columns))), last]
            if len(there) != len(columns):
                raise UserError(f"{path}, line {started}: found {len(columns)} columns, expected {len(there)}")
            check(path, there, wanted)
            yield f"{path}, line {started}", dict(zip(there, columns, strict=True))
            sentence = []


def _full_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line that is not blank, with its number and without its line break."""
    return ((number, line.rstrip("\r\n")) for number, line in lines(path) if line.strip())


FORMS = {".csv": _csv, ".tsv": _tsv, ".jsonl": _json, ".json": _json, ".parquet": _parquet, ".txt": _txt}
"""File extension -> function of a path, the wanted columns and column names (or None) that yields records."""
WORD_FORMS = {
    **{suffix: FORMS[suffix] for suffix in (".jsonl", ".json", ".parquet")},
    **dict.fromkeys((".conll", ".iob", ".iob2", ".bio", ".tsv", ".txt"), _conll),
}
"""The same for files whose values are lists of words."""
