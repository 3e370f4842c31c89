"""File formats: each is read as records, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fedstrata.data.forms.how import How, Records
from fedstrata.data.forms.objects import json_records, parquet_records
from fedstrata.data.forms.plain import plain_records, shape_of, txt_records
from fedstrata.data.forms.tables import csv_records, excel_records, find_delimiter, tsv_records
from fedstrata.data.forms.text import binary, check_line_ends
from fedstrata.data.forms.words import conll_records, csv_words, excel_words
from fedstrata.errors import UserError, did_you_mean

Form = Callable[[Path, How], Records]
FORMS: Mapping[str, Form] = {
    ".csv": csv_records,
    ".tsv": tsv_records,
    ".tab": tsv_records,
    ".jsonl": json_records,
    ".ndjson": json_records,
    ".json": json_records,
    ".parquet": parquet_records,
    ".xlsx": excel_records,
    ".txt": txt_records,
}
"""File extension -> function of a path and how to read it that yields records."""
WORD_FORMS: Mapping[str, Form] = {
    **{suffix: FORMS[suffix] for suffix in (".jsonl", ".ndjson", ".json", ".parquet")},
    **dict.fromkeys((".conll", ".conllu", ".iob", ".iob2", ".bio", ".tsv", ".tab", ".txt"), conll_records),
    ".csv": csv_words,
    ".xlsx": excel_words,
}
"""The same for files whose values are lists of words."""
SAMPLE = 1 << 16
"""Bytes of a file of unknown extension that are looked at."""


def extension(path: Path) -> str:
    """The extension that says what a file holds: of ``a.CSV.gz`` it is ``.csv``."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def known(path: Path) -> bool:
    """Whether a path has the extension of a file that can be read."""
    return extension(path) in {**FORMS, **WORD_FORMS}


def records(path: Path, how: How) -> Records:
    """The records of a file, in the format of its extension, read lazily.

    Raises:
        UserError: the extension is not known and the content is no text, ``documents`` does not go with the file,
            or, in reading, the file is malformed or lacks a column.
    """
    forms = WORD_FORMS if how.words else FORMS
    form = forms.get(extension(path)) or by_content(path, how, forms)
    if how.documents == "lines":
        return form(path, how)
    if form is not txt_records or how.names or how.delimiter or shape_of(path, how) != "plain":
        raise UserError(
            f"{path}: [data] documents: {how.documents!r} goes with plain txt files without columns alone"
        )
    check_line_ends(path, how)
    return plain_records(path, how)


def by_content(path: Path, how: How, forms: Mapping[str, Form]) -> Form:
    """The form of a file whose extension says nothing.

    Raises:
        UserError: its content is no text, or cannot be read.
    """
    if extension(path) == ".arrow":
        raise UserError(
            f"{path}: is one file of a data set; expected the data set's folder, as save_to_disk writes it, or a "
            "Parquet file, as to_parquet does"
        )
    try:
        with binary(path) as file:
            sample = file.read(SAMPLE)
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if b"\0" in sample and how.encoding is None and not sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            f"{path}: the extension {extension(path)!r} is not known and the content is no text; "
            f"{did_you_mean(extension(path), forms)}"
        )
    how.note(path, f"extension {extension(path)!r} is not known, read as text")
    if not how.words:
        return txt_records
    with suppress(UserError):
        if shape_of(path, how) == "json":
            return json_records
    return conll_records if find_delimiter(path, how) in (None, "\t") else csv_words
