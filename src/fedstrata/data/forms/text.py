"""Lines of text files: plain or compressed, in UTF-8 or the encoding that they are found to have."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from fedstrata.data.forms.how import How
from fedstrata.errors import UserError

GZIP = b"\x1f\x8b"
WESTERN = "cp1252"
"""What Windows writes in Western Europe and America where it does not write UTF-8."""
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order mark -> encoding."""


def lines(path: Path, how: How) -> Iterator[tuple[int, str]]:
    """Every line of a text file with its number from 1 and its end; nothing but ``\\n`` ends a line.

    The encoding is ``how.encoding``, else that of the byte order mark, else UTF-8, else cp1252 if the file is
    likely to be in it.

    Raises:
        UserError: the file cannot be read, is not text, or is in another encoding.
    """
    try:
        with binary(path) as file:
            encoding = how.encoding or _marked(path, file, how)
            if encoding is not None and "\n".encode(encoding) != b"\n":
                yield from _wide_lines(path, file.read(), encoding)
            else:
                yield from _lines(path, file, encoding, how)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def full_lines(path: Path, how: How) -> Iterator[tuple[int, str]]:
    """Every line that is not blank, with its number and without its line break."""
    return ((number, line.rstrip("\r\n")) for number, line in lines(path, how) if line.strip())


def check_line_ends(path: Path, how: How) -> None:
    """Refuse a file of rows whose lines all end in a carriage return alone: it would be a single row.

    Raises:
        UserError: it is one.
    """
    _, first = next(lines(path, how), (1, ""))
    if "\n" not in first and "\r" in first.rstrip("\r"):
        raise UserError(f"{path}: its lines end in a carriage return; expected lines that end in a line feed")


def check_file(path: Path) -> None:
    """Refuse what is neither a file nor a folder, and would be waited for, or read, without an end.

    Raises:
        UserError: it is a pipe or a device.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: is a pipe or a device, and rows are read more than once; expected a file")


def binary(path: Path) -> BinaryIO:
    """A file's bytes, decompressed where they are gzip's."""
    check_file(path)
    file = path.open("rb")
    if file.peek(2)[:2] != GZIP:
        return file
    file.close()
    return cast(BinaryIO, gzip.open(path))


def whole(path: Path) -> Path | BinaryIO:
    """A file for libraries that go to and fro in it: its path, or its bytes where they were compressed."""
    try:
        with binary(path) as file:
            return io.BytesIO(file.read()) if isinstance(file, gzip.GzipFile) else path
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _marked(path: Path, file: BinaryIO, how: How) -> str | None:
    """The encoding that a byte order mark tells; None where there is none."""
    head = file.peek(4)[:4]  # type: ignore[attr-defined]  # both kinds of files are buffered
    encoding = next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), None)
    if encoding not in (None, "utf-8"):
        how.note(path, f"encoding {encoding}")
    return encoding


def _wide_lines(path: Path, content: bytes, encoding: str) -> Iterator[tuple[int, str]]:
    """Of an encoding in which a line's end is more than a byte."""
    try:
        text = re.sub("^\ufeff", "", content.decode(encoding), flags=re.MULTILINE)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not {encoding} (byte {error.start + 1} of the file)") from None
    return enumerate(io.StringIO(text, newline="\n"), 1)


def _lines(path: Path, file: BinaryIO, encoding: str | None, how: How) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(file, 1):
        line = raw.removeprefix(codecs.BOM_UTF8)  # files that were joined have it again
        if b"\0" in line and encoding is None:
            raise UserError(
                f"{path}, line {number}: holds a zero byte, expected text; UTF-16 needs [data] encoding = 'utf-16'"
            )
        try:
            text = line.decode(encoding or "utf-8")
        except UnicodeDecodeError as error:
            if encoding is not None or not _western(path):
                hint = "" if how.encoding else "; [data] encoding names another, such as 'cp1252'"
                name = "UTF-8" if encoding in (None, "utf-8") else encoding
                raise UserError(
                    f"{path}, line {number}: is not {name} (byte {error.start + 1} of the line){hint}"
                ) from None
            encoding = WESTERN
            how.note(path, f"encoding {WESTERN}, as it is not UTF-8")
            text = line.decode(encoding)
        yield number, text


def _western(path: Path) -> bool:
    """Whether a file that is not UTF-8 is likely to be text in cp1252.

    It is not if a line is good UTF-8 beyond ASCII, or if characters beyond ASCII mostly stand in runs, as letters
    of Arabic or Cyrillic texts do.
    """
    beyond = runs = 0
    with binary(path) as file:
        for raw in file:
            if raw.isascii():
                continue
            with suppress(UnicodeDecodeError):
                raw.decode()
                return False
            try:
                raw.decode(WESTERN)
            except UnicodeDecodeError:
                return False
            beyond += len(re.findall(rb"[\x80-\xff]", raw))
            runs += sum(map(len, re.findall(rb"[\x80-\xff]{3,}", raw)))
    return 5 * runs <= beyond
