"""Text files whose extension does not say what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fedstrata.data.forms.how import How, Records, check
from fedstrata.data.forms.objects import holds_object, json_records
from fedstrata.data.forms.tables import csv_records, find_delimiter, tsv_records
from fedstrata.data.forms.text import check_line_ends, full_lines, lines
from fedstrata.errors import UserError

HEADING = re.compile(r"= (?!=).*(?<!=) =")
"""The title of an article in WikiText's form; a section's is ``= = Section = =``."""
LABELED = re.compile(r"([A-Za-z]\w*):(\w+)[ \t]+(\S.*)")
"""A line ``LABEL:fine text``, as in TREC's questions."""
FASTTEXT = re.compile(r"((?:__label__\S+[ \t]+)+)(\S.*)")
"""A line of fastText's: a label or several, and a text."""
SAMPLE = 20
"""Lines that must all have that form."""


def txt_records(path: Path, how: How) -> Records:
    """Of a txt file by what it holds: JSON lines, fastText's, PubMed-RCT's or TREC's form, a table, or lines."""
    shape = shape_of(path, how)
    if shape == "json":
        how.note(path, "JSON lines")
        return json_records(path, how)
    check_line_ends(path, how)
    if shape == "pubmed":
        how.note(path, "sentences in PubMed-RCT's form")
        return _pubmed_rct(path, how)
    if shape == "fasttext" and not (how.names or how.delimiter):  # else they are what the user says
        how.note(path, "lines in fastText's form")
        return _fasttext(path, how)
    if how.delimiter not in (None, "\t"):
        return csv_records(path, how)
    first = next(full_lines(path, how), (0, ""))[1]
    beside = set(how.wanted) != {"text"}  # plain lines may hold tabs too, but no column beside text
    if how.names or how.delimiter or ("\t" in first and (beside or "text" in first.split("\t"))):
        how.note(path, "fields between tabs")
        return tsv_records(path, how)
    if beside and _labeled(path, how):
        how.note(path, "lines LABEL:fine text")
        return _label_lines(path, how)
    if beside and find_delimiter(path, how):
        how.note(path, "CSV")
        return csv_records(path, how)
    return plain_records(path, how)


def shape_of(path: Path, how: How) -> str:
    """What a txt file holds, by its first two lines: ``json``, ``fasttext``, ``pubmed`` or ``plain``."""
    first, second = [*(line for _, line in islice(full_lines(path, how), 2)), "", ""][:2]
    if holds_object(first):
        return "json"
    if FASTTEXT.fullmatch(first.strip()):
        return "fasttext"
    return "pubmed" if re.fullmatch(r"###\S+\s*", first) and "\t" in second else "plain"


def has_columns(path: Path) -> bool:
    """Whether a txt file holds rows of several columns, and no text: JSON lines, or a form with labels or tabs."""
    how = How(())
    if shape_of(path, how) != "plain" or _labeled(path, how):
        return True
    sample = [line.rstrip("\r\n").split("\t") for _, line in islice(full_lines(path, how), SAMPLE)]
    alike = len({len(fields) for fields in sample}) == 1
    return alike and len(sample) > 1 and len(sample[0]) > 1 and all(map(str.strip, sample[0]))


def plain_records(path: Path, how: How) -> Records:
    """Rows of plain text, with the one column ``text``.

    With ``how.documents`` a row is: ``lines``, each of them; ``blank``, rows with blank lines between them;
    ``headings``, articles under a line ``= Title =`` with none right above it, and what stands before the first.
    A row's lines have ``\\n`` between them, its blank ones are left out.
    """
    check(path, ["text"], how.wanted, "; plain lines of a txt file have no other column")
    started, row, gap = 0, list[str](), True
    for number, line in lines(path, how):
        blank = not line.strip()
        begins = {"lines": True, "blank": gap, "headings": gap and HEADING.fullmatch(line.strip())}
        gap = blank
        if row and begins[how.documents]:
            yield f"{path}, line {started}", {"text": "\n".join(row)}
            row = []
        if not blank:
            started = started if row else number
            row.append(line.rstrip("\r\n"))
    if row:
        yield f"{path}, line {started}", {"text": "\n".join(row)}


def _fasttext(path: Path, how: How) -> Records:
    """Of lines ``__label__LABEL text``; several labels are a list."""
    check(path, ["text", "label"], how.wanted)
    for number, line in full_lines(path, how):
        if not (found := FASTTEXT.fullmatch(line.strip())):
            raise UserError(f"{path}, line {number}: found {line[:40]!r}, expected __label__LABEL and a text")
        labels = [word.removeprefix("__label__") for word in found[1].split()]
        yield f"{path}, line {number}", {"text": found[2], "label": labels if labels[1:] else labels[0]}


def _pubmed_rct(path: Path, how: How) -> Records:
    check(path, ["text", "label", "document"], how.wanted)
    document = ""
    for number, line in full_lines(path, how):
        label, tab, text = line.partition("\t")
        if line.startswith("###"):
            document = line[3:].strip()
        elif not tab:
            raise UserError(f"{path}, line {number}: found no tab, expected a label, a tab and a sentence")
        else:
            yield f"{path}, line {number}", {"text": text, "label": label, "document": document}


def _labeled(path: Path, how: How) -> bool:
    """Whether the first lines are ``LABEL:fine text``."""
    sample = [line for _, line in islice(full_lines(path, how), SAMPLE)]
    return bool(sample) and all(map(LABELED.fullmatch, sample))


def _label_lines(path: Path, how: How) -> Records:
    """Of lines ``LABEL:fine text``: ``label`` is the word before the colon, ``fine`` the whole label."""
    check(path, ["text", "label", "fine"], how.wanted)
    for number, line in full_lines(path, how):
        if not (found := LABELED.fullmatch(line)):
            raise UserError(f"{path}, line {number}: found {line[:40]!r}, expected LABEL:fine and a text")
        label, fine, text = found.groups()
        yield f"{path}, line {number}", {"text": text, "label": label, "fine": f"{label}:{fine}"}


def document_records(path: Path, files: list[Path], how: How) -> Records:
    """Of a folder of txt files, each of them a row; the label of a file is the folder that it lies in."""
    check(path, ["text", "file", "folder", "label"], how.wanted, "; a txt file in a folder is one row")
    if "label" in how.wanted:
        deep = any(len(file.relative_to(path).parts) > 2 for file in files)
        how.note(path, f"labels are the names of the folders in it{', not of those further down' if deep else ''}")
    for file in files:
        yield str(file), dict(_document(path, file, how))


def _document(path: Path, file: Path, how: How) -> Iterator[tuple[str, str]]:
    below = file.relative_to(path)
    folder = below.parts[0] if len(below.parts) > 1 else ""
    yield "text", "".join(line for _, line in lines(file, how))
    yield "file", below.as_posix()
    yield from (("folder", folder), ("label", folder))
