"""Files that a job names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from fedstrata.errors import UserError

LONGEST = 4095
"""Bytes of a path on Linux; other systems take no more."""
LONGEST_NAME = 255
"""Bytes of a name in it."""


def _place(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!a} is no Unicode text, as every name in a job is") from None
    sizes = [len(name.encode(errors="replace")) for name in text.split("/")]
    if max(sizes) > LONGEST_NAME or sum(sizes) + len(sizes) - 1 > LONGEST:
        raise ValueError(
            f"is no path that a system takes ({len(text):,} characters, the longest name in it {max(sizes):,} "
            f"bytes); expected at most {LONGEST:,} bytes and names of at most {LONGEST_NAME}"
        )
    return text


MaybePlace = Annotated[str, AfterValidator(_place)]
"""A path, or a hub id, of a length that a system takes; may be empty."""
Place = Annotated[str, Field(min_length=1), AfterValidator(_place)]
"""The same, not empty."""


def existing_file(where: str, name: str, base_dir: Path | None) -> str:
    """The absolute path of a file: looked up in the working directory, then in a folder.

    Args:
        where: the key that names it.
        name: its path.
        base_dir: the folder of the job file.

    Raises:
        UserError: there is no such file.
    """
    places = [Path(name).expanduser(), *([base_dir / name] if base_dir else [])]
    path = next((place.resolve() for place in places if place.is_file()), None)
    if path is None:
        raise UserError(f"{where}: there is no file {' nor '.join(map(str, dict.fromkeys(places)))}")
    return str(path)
