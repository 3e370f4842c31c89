"""Reads TOML files: jobs, settings of sites and servers, and what a run left behind."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or is not TOML.
    """
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: has a NUL character; expected the path of a file")
    try:
        if Path(path).is_fifo() or Path(path).is_char_device():  # a second reading would wait, or find it empty
            raise UserError(f"{path}: is a pipe or a device, and it is read more than once; expected a file")
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # Windows may put a mark before it
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 (byte {error.start}), as TOML must be") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: is not TOML: {error}") from None
    except ValueError:
        raise UserError(f"{path}: holds a number of thousands of digits") from None
    except RecursionError:
        raise UserError(f"{path}: is not usable TOML: its tables or lists are nested too deep") from None
