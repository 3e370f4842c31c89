"""Which of the files that somebody names for a first job hold training rows, whose, and which may be for tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fedstrata.data.forms import extension, known
from fedstrata.data.forms.data_sets import saved
from fedstrata.data.read import files_in
from fedstrata.data.sample import holds_text
from fedstrata.errors import UserError

TEST_NAMES = ("test", "testing", "dev", "devel", "valid", "validation", "val", "eval")
TRAIN_NAMES = ("train", "training")
PART = re.compile(r"-\d{5}-of-\d{5}$")
"""The end of the name of a file that is a part of a data set, as the hub cuts them: no client's."""


def files_to_try(data: Sequence[Path]) -> tuple[Path | dict[str, Path], list[Path]]:
    """What to train on, a file or one for each client; and files that may hold test rows.

    Raises:
        UserError: test rows lie among others, or two clients would have the same name.
    """
    if len(data) > 1:
        return _by_client(list(data)), []
    only = data[0]
    if not only.is_dir():
        return only, _test_beside(only) if _word(only) in TRAIN_NAMES else []
    if saved(only):
        return only, [only / name for name in TEST_NAMES if saved(only / name)]
    found = files_in(only)
    files = [file for file in found if file.parent == only] or found
    texts = {file for file in files if extension(file) == ".txt"}
    texts = texts if any(map(holds_text, sorted(texts))) else set()
    purposes = {file: _purpose(file, only, file in texts) for file in files}
    train = [file for file in files if purposes[file] in TRAIN_NAMES]
    test = [file for name in TEST_NAMES for file in files if purposes[file] == name]
    if len(train) == 1:
        return train[0], [file for file in test if file.suffix == train[0].suffix]
    others = [file for file in files if file not in test]
    tables = [file for file in others if file not in texts and file.parent == only]
    parts = len(others) > 1 and all(PART.search(file.stem) for file in others)
    alike = len({file.suffix for file in tables}) == 1 and not parts
    if len(tables) == len(others) > 0 and alike and (tables[1:] or test):
        return _by_client(tables) if tables[1:] else tables[0], test
    if test and (train or tables):
        raise UserError(
            f"{only}: holds test rows among others ({test[0].relative_to(only)}); expected files or a folder "
            "without them, and them by --test"
        )
    return only, []


def _by_client(files: Sequence[Path]) -> dict[str, Path]:
    """Each file by its name, as a client's."""
    words = {_word(file): file for file in files}
    tests = [words[name] for name in TEST_NAMES if name in words]
    if tests and words.keys() & {*TRAIN_NAMES}:
        raise UserError(
            f"{tests[0]}: has a name of test rows, but each of several files is one client's; expected --test FILE"
        )
    plain = [file.name if file.is_dir() else file.stem for file in files]  # a folder's name has no extension
    names = ["".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") for name in plain]
    if len(set(names)) < len(names) or not all(names):
        raise UserError(
            "several files have the same name; each is a client's, so rename one of them, or name their folders"
        )
    return dict(zip(names, files, strict=True))


def _purpose(file: Path, folder: Path, text: bool) -> str:
    """What a file in a folder is for, by its name or the folders on the way; a text's name may say anything."""
    own = file.stem.lower() if text else _word(file)
    names = (own, *(name.lower() for name in file.relative_to(folder).parts[:-1]))
    return next((name for name in names if name in (*TRAIN_NAMES, *TEST_NAMES)), "")


def _word(file: Path) -> str:
    """The part of a file's name that may say what it is for."""
    words = file.name.partition(".")[0].lower().replace("-", "_").split("_")
    return next((word for word in words if word in (*TRAIN_NAMES, *TEST_NAMES)), "")


def _test_beside(train: Path) -> list[Path]:
    """Files of the same kind beside one of training rows that may hold test rows; ``test`` before ``dev``."""
    beside = [file for file in sorted(train.parent.iterdir()) if file.suffix == train.suffix and known(file)]
    return [file for name in TEST_NAMES for file in beside if _word(file) == name]
