"""Files that a job names."""

from __future__ import annotations

from pathlib import Path

from fedstrata.errors import UserError


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
