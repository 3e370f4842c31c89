"""Tables: fields between commas, tabs or what else stands between them, and Excel's sheets."""

from __future__ import annotations

import csv
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fedstrata.data.forms.how import How, Records, check
from fedstrata.data.forms.text import lines, whole
from fedstrata.errors import UserError, plural

Fields = Iterator[tuple[int, list[Any]]]
"""Number of a line, and its fields."""
DELIMITERS = ",;\t|"
"""Tried in this order."""
SAMPLE = 20
"""Rows that must all have as many fields as there are names, or as the first one."""
QUOTED = re.compile(r'".*"')
DOUBLED = re.compile(r'"(?:[^"]|"")*"')
NO_HEADER = "a file without a header line needs data.columns"
RETURN = "a carriage return stands alone outside quotes; expected lines that end in a line feed"
EXCEL = "reading Excel files needs openpyxl: pip install 'fedstrata[excel]'"
ERRORS = ("#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#N/A")
"""What a cell of Excel shows where its formula has no value."""
Merged = dict[str, dict[str, Any]]
"""Where a row stands -> column -> the value of a cell above that is merged with the one there."""


def csv_records(path: Path, how: How) -> Records:
    """Of a file in CSV form; the delimiter is ``how.delimiter``, or the one with which the header fits."""
    delimiter = how.delimiter or find_delimiter(path, how)
    if delimiter is None:  # the columns that the likeliest one makes are named in the refusal
        delimiter = likeliest_delimiter(path, how)
    if delimiter != (how.delimiter or ","):
        how.note(path, f"delimiter {delimiter!r}")
    return _table(_csv_fields(path, how, delimiter), path, how, delimiter)


def likeliest_delimiter(path: Path, how: How) -> str:
    """The delimiter that makes the most fields of a file's first line, and rather as many of the next."""

    def fields(delimiter: str) -> tuple[bool, int]:
        counts = [len(row) for row in first_rows(path, how, delimiter, SAMPLE)]
        return len(set(counts)) == 1 < counts[0], counts[0]

    return max(DELIMITERS, key=fields)


def find_delimiter(path: Path, how: How) -> str | None:
    """The delimiter with which a file's header has every wanted column, or its rows as many as there are names."""
    for delimiter in DELIMITERS:
        if how.names:
            fits = {len(row) for row in first_rows(path, how, delimiter, SAMPLE)} == {len(how.names)}
        else:
            fits = set(how.wanted) <= set(first_rows(path, how, delimiter, 1)[0])
        if fits:
            return delimiter
    return None


def first_rows(path: Path, how: How, delimiter: str, count: int) -> list[list[str]]:
    """The fields of a CSV file's first rows, at least one; none where the delimiter makes no CSV of them."""
    rows = list[list[str]]()
    with suppress(UserError):
        rows = [fields for _, fields in islice(_csv_fields(path, how, delimiter), count)]
    return rows or [[]]


def _csv_fields(path: Path, how: How, delimiter: str) -> Fields:
    csv.field_size_limit(2**31 - 1)
    numbered = lines(path, how)
    first = next(numbered, (0, ""))
    excel = re.fullmatch(r"sep=.\r?\n", first[1], re.IGNORECASE)  # a line for Excel alone
    start = before = 1 if excel else 0
    rest = numbered if excel else chain([first], numbered)
    reader = csv.reader((line for _, line in rest), delimiter=delimiter, strict=True)
    try:
        for fields in reader:
            if fields:
                yield start + 1, fields
            start = before + reader.line_num
    except csv.Error as error:
        what = RETURN if "universal-newline" in str(error) else error
        raise UserError(f"{path}, line {start + 1}: is not CSV ({what})") from None


def tsv_records(path: Path, how: How) -> Records:
    """Of a file with tabs between fields; quotes mean nothing unless they evidently stand around fields."""
    if how.delimiter not in (None, "\t"):
        return csv_records(path, how)
    if quotes := _quotes(path, how):
        how.note(path, quotes)
        return _table(_csv_fields(path, how, "\t"), path, how, "\t")
    return _table(_tsv_fields(path, how), path, how, ragged=True)


def _tsv_fields(path: Path, how: How) -> Fields:
    for number, line in lines(path, how):
        bare = line.rstrip("\r\n")
        if number == 1 and "\r" in bare:  # the whole file, as Excel for Mac may write it
            raise UserError(f"{path}, line 1: is no line of fields ({RETURN})")
        if bare:
            yield number, bare.split("\t")


def _quotes(path: Path, how: How) -> str:
    """What quotes are evidently there for, in words; empty where they mean nothing.

    They hold lines together, as in Excel's files, where no row is short then, and some are without them. They are
    around all fields, as R writes them, where they are in the first line and all rows are whole then. They are
    around those that have some themselves, as pandas writes them, where these are doubled.
    """
    with suppress(UserError):
        rows = _tsv_fields(path, how)
        _, first = next(rows, (0, list[str]()))
        whole = len(how.names or first)
        all_quoted = len(first) > 1 and all(map(QUOTED.fullmatch, first))
        if all_quoted or len(first) < whole or any(len(fields) < whole for _, fields in rows):
            quoted = (fields for _, fields in _csv_fields(path, how, "\t"))
            if all(len(fields) == whole and (all_quoted or "\t" not in "".join(fields)) for fields in quoted):
                return "fields in quotes" if all_quoted else "quoted fields with line breaks"
        elif _doubled(path, how, whole):
            return "fields in quotes where they hold some"
    return ""


def _doubled(path: Path, how: How, whole: int) -> bool:
    """Whether all rows are whole, and quotes stand around every field that has some, doubled in at least one."""
    inside = False
    for _, fields in _tsv_fields(path, how):
        quoted = [field for field in fields if '"' in field]
        if len(fields) != whole or not all(map(DOUBLED.fullmatch, quoted)):
            return False
        inside = inside or any('"' in field[1:-1] for field in quoted)
    return inside


def excel_records(path: Path, how: How) -> Records:
    """Of the first sheet of an Excel file that is not hidden; a formula counts as the value that was saved for it.

    Raises:
        UserError: besides what is wrong with the table, a wanted column holds formulas without saved values.
    """
    merged: Merged | None = None
    for where, row in _table(_without_errors(path, how), path, how, ragged=True, place="row"):
        if merged is None and any(row.get(column) is None for column in how.wanted or row):
            _check_saved(path, how)
            merged = _merged(path, how)
        values = {name: value for name, value in (merged or {}).get(where, {}).items() if row.get(name) is None}
        if values:
            how.note(path, "merged cells of a column count in each of their rows")
        yield where, {**row, **values}


def _without_errors(path: Path, how: How) -> Fields:
    """The rows of a sheet, in which what could not be computed is missing."""
    for number, cells in _excel_rows(path, how):
        row = [None if cell in ERRORS else cell for cell in cells]
        if row != cells:
            how.note(path, "errors such as #REF! count as blank cells")
        yield number, row


def _merged(path: Path, how: How) -> Merged:
    """The values of cells that are merged with those below them, which look blank; without those of the header."""
    found: Merged = {}
    with zipfile.ZipFile(whole(path)) as book:
        if not any(b"mergeCell " in book.read(name) for name in book.namelist() if "/worksheets/" in name):
            return found  # mostly: to know where they are takes the whole book into memory
    header = how.names or list(map(str, next(_excel_rows(path, how), (0, []))[1]))
    with suppress(UserError), _sheet(path, how, data_only=True) as sheet:
        for cells in sheet.merged_cells.ranges:
            name = header[cells.min_col - 1] if cells.min_col == cells.max_col <= len(header) else ""
            value = sheet.cell(*cells.top[0]).value
            if name in (how.wanted or header) and value not in (name, *ERRORS):
                for number in range(cells.min_row + 1, cells.max_row + 1):
                    found.setdefault(f"{path}, row {number}", {})[name] = value
    return found


def _check_saved(path: Path, how: How) -> None:
    """Refuse formulas that a program has written and none has computed: their cells look blank."""
    saved = dict(_excel_rows(path, how))
    found: dict[str, dict[int, bool]] = {}
    header = list[str]()
    for number, cells in _excel_rows(path, how, formulas=True):
        header = header or how.names or list(map(str, cells))
        values = dict(zip(header, saved.get(number, []), strict=False))
        for column, cell in zip(header, cells, strict=False):
            if column in how.wanted and str(cell).startswith("=") and values.get(column) != cell:
                found.setdefault(column, {})[number] = values.get(column) is None
    for column, blank in found.items():
        if all(blank.values()):  # a program that computes them saves blanks of some alone
            raise UserError(
                f"{path}, row {min(blank)}: column {column!r} holds a formula without a saved value; open the "
                "file in Excel or LibreOffice and save it"
            )


def first_cells(path: Path, count: int) -> list[list[str]]:
    """The cells of an Excel file's first rows, as texts."""
    rows = islice(_excel_rows(path, How(())), count)
    return [["" if cell is None else str(cell) for cell in cells] for _, cells in rows]


def _excel_rows(path: Path, how: How, formulas: bool = False) -> Fields:
    with _sheet(path, how, read_only=True, data_only=not formulas) as sheet:
        for number, cells in enumerate(sheet.iter_rows(values_only=True), 1):
            row = list(cells)
            while row and row[-1] is None:
                row.pop()
            if row:
                yield number, row


@contextmanager
def _sheet(path: Path, how: How, **options: bool) -> Iterator[Any]:
    """The first sheet that is not hidden, of a book that openpyxl loads with ``options``."""
    try:
        import openpyxl  # an extra, slow to load
    except ImportError:
        raise UserError(f"{path}: {EXCEL}") from None
    source = whole(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and the like, which are not read
            book = openpyxl.load_workbook(source, **options)
    except Exception as error:  # zip files, XML and their content raise errors of every kind
        raise UserError(f"{path}: is not a readable Excel file ({str(error).partition(chr(10))[0]})") from None
    try:
        if not book.worksheets:
            raise UserError(f"{path}: holds no sheet of cells; expected a table")
        sheet = next((one for one in book.worksheets if one.sheet_state == "visible"), book.worksheets[0])
        if len(book.worksheets) > 1:
            which = "first" if sheet is book.worksheets[0] else "first that is not hidden"
            how.note(path, f"{which} of {len(book.worksheets)} sheets, {sheet.title!r}")
        yield sheet
    finally:
        book.close()


def _table(
    rows: Fields, path: Path, how: How, delimiter: str = ",", ragged: bool = False, place: str = "line"
) -> Records:
    """Records from rows of fields; without names the first row is the header.

    A ``ragged`` row may be short, as a few are in GLUE's files: what it lacks is missing. Where the user names
    the columns, it may be long: STS-B's own files end some lines with a license.
    """
    named = next(rows, (0, []))
    header = how.names or ["" if name is None else str(name) for name in named[1]]
    if not header:
        raise UserError(f"{path}: is empty, expected a header line")
    between = "" if delimiter == "," else f"; its fields are separated by {delimiter!r}"
    check(path, header, how.wanted, between if how.names else f"{between}; {NO_HEADER}")
    for number, fields in _after_header(named, rows, path, how):
        if len(header) > 1 and fields == header:
            how.note(path, "the header line stands again among the rows, and is left out there")
            continue
        short, long = len(fields) < len(header), len(fields) > len(header)
        if (short and not ragged) or (long and not (ragged and how.names)):
            raise UserError(
                f"{path}, {place} {number}: found {plural(len(fields), 'field')}, expected {len(header)}{between}"
            )
        lacking = [None] * (len(header) - len(fields))
        yield f"{path}, {place} {number}", dict(zip(header, [*fields, *lacking], strict=False))


def _after_header(first: tuple[int, Sequence[Any]], rest: Fields, path: Path, how: How) -> Fields:
    """All rows but a header; a first row that repeats the names which the user gives is one, too."""
    number, fields = first
    if how.names and fields and [str(name) for name in fields] == how.names:
        how.note(path, "first line taken as the header line that [data] columns repeats")
    elif how.names and fields:
        yield number, list(fields)
    yield from rest
