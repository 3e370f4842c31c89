"""Which of the files that somebody names for a first job hold training rows, whose, and which may be for tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from fedstrata.data.forms import extension, known
from fedstrata.data.forms.data_sets import saved
from fedstrata.data.read import files_in
from fedstrata.data.sample import holds_text
from fedstrata.errors import UserError

TEST_NAMES = ("test", "testing", "dev", "devel", "valid", "validation", "val", "eval")
TRAIN_NAMES = ("train", "training")
PART = re.compile(r"[-.]\d{5}-of-(\d{5})(-[0-9a-f]{16})?(?=\.|$)")
"""In a file's name, which part of a data set it is, as the hub cuts them: no client's."""
Source = Path | list[Path]
"""A file or folder of rows, or the parts of a data set."""
Sources = Source | dict[str, Source]
"""One source, or that of each client by its name."""


def files_to_try(data: Sequence[Path]) -> tuple[Sources, list[Sources]]:
    """What to train on, and what may hold test rows, the likeliest first.

    Raises:
        UserError: test rows lie among others, or two clients would have the same name.
    """
    if len(data) > 1:
        return _of_clients(data)
    only = data[0]
    if not only.is_dir():
        return only, _test_beside(only) if _word(only) in TRAIN_NAMES else []
    if saved(only):
        return only, [only / name for name in TEST_NAMES if saved(only / name)]
    return _in_folder(only)


def _in_folder(only: Path) -> tuple[Sources, list[Sources]]:
    found = files_in(only)
    files = [file for file in found if file.parent == only] or found
    texts = {file for file in files if extension(file) == ".txt"}
    texts = texts if any(map(holds_text, sorted(texts))) else set()
    sources: dict[str, list[Source]] = {}
    for source in _whole(files):
        first = files_of(source)[0]
        sources.setdefault(_purpose(first, only, first in texts), []).append(source)
    train = [source for name in TRAIN_NAMES for source in sources.get(name, ())]
    test = [source for name in TEST_NAMES for source in sources.get(name, ())]
    if len(train) == 1 and train != [found]:  # else the folder names them all
        return train[0], [*test]
    others = [*sources.get("", ()), *train]
    tables = [one for one in others if not texts & {*files_of(one)} and files_of(one)[0].parent == only]
    alike = len({extension(files_of(source)[0]) for source in tables}) == 1
    if len(tables) == len(others) > 0 and alike and (tables[1:] or test):
        return _by_client(tables) if tables[1:] else tables[0], [*test]
    if test and (train or tables):
        raise UserError(
            f"{only}: holds test rows among others ({files_of(test[0])[0].relative_to(only)}); expected files or "
            "a folder without them, and them by --test, or the folder of each client"
        )
    return only, []


def files_of(source: Sources) -> list[Path]:
    """All files and folders of a source, or of those of all clients."""
    if isinstance(source, dict):
        return [path for one in source.values() for path in files_of(one)]
    return source if isinstance(source, list) else [source]


def incomplete(source: Sources) -> list[str]:
    """A sentence on each data set of which some parts are not read: they are missing, or were not named."""
    folders = [path for path in files_of(source) if path.is_dir() and not saved(path)]
    files = [path for path in files_of(source) if path.is_file()] + [
        file for one in folders for file in files_in(one)
    ]
    each = [(found, PART.search(found[0].name)) for found in _parts(files)]
    return [
        f"{found[0]}: of {int(part[1])} parts {len(found)} {'is' if len(found) == 1 else 'are'} read"
        for found, part in each
        if part and len(found) < int(part[1])
    ]


def folder_lines(source: Sources, texts: bool, label: str | None) -> list[str]:
    """What becomes of the folders in a folder that is one source, where somebody may mean something else by them.

    Args:
        source: the training rows.
        texts: each file in it is one text, whose label is a folder.
        label: the column of the label.
    """
    if not isinstance(source, Path) or not source.is_dir() or saved(source):
        return []
    below = [file.relative_to(source).parts[:-1] for file in files_in(source)]
    folders = sorted({parts[0] for parts in below if parts})
    named = f"{', '.join(folders[:3])}{', …' if folders[3:] else ''}"
    if texts:
        deep = any(parts[1:] for parts in below)
        return [f"labels  the folders {named} in {source}, not those further down"] if deep and label else []
    if not folders[1:]:
        return []
    return [
        f"clients the rows of {named} in {source} are dealt together, at random; to make each folder a client, "
        f"name it: fedstrata init {shlex.quote(str(source))}/*"
    ]


def _whole(files: Sequence[Path]) -> list[Source]:
    """Files, of which the parts of one data set are a single source."""
    return [_one(found) for found in _parts(files)]


def _parts(files: Sequence[Path]) -> list[list[Path]]:
    """Files by the data set of which they are parts; most are one alone."""
    parts: dict[Path, list[Path]] = {}
    for file in files:
        parts.setdefault(file.with_name(PART.sub(r"-of-\1", file.name)), []).append(file)
    return [*parts.values()]


def _of_clients(data: Sequence[Path]) -> tuple[Sources, list[Sources]]:
    """Each of several files or folders as a client's, and the test rows that lie in these folders."""
    clients, test = _by_client(data), dict[str, Source]()
    for name, folder in zip(clients, data, strict=True):
        train, beside = files_to_try([folder]) if folder.is_dir() else (folder, [])
        if beside:
            clients[name], test[name] = _one(train), _one(beside[0])
    return clients, [test] if test else []


def _one(source: Sources) -> Source:
    """A source without clients."""
    files = files_of(source)
    return files if files[1:] else files[0]


def _by_client(sources: Sequence[Source]) -> dict[str, Source]:
    """Each file or folder, or the parts of a data set, by its name, as a client's."""
    first = [files_of(source)[0] for source in sources]
    words = {_word(file): file for file in first}
    tests = [words[name] for name in TEST_NAMES if name in words]
    if tests and words.keys() & {*TRAIN_NAMES}:
        raise UserError(
            f"{tests[0]}: has a name of test rows, but each of several files is one client's; expected --test FILE"
        )
    plain = [file.name if file.is_dir() else _bare(file) for file in first]  # a folder's name has no extension
    names = ["".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") for name in plain]
    if len(set(names)) < len(names) or not all(names):
        raise UserError(
            "several files have the same name; each is a client's, so rename one of them, or name their folders"
        )
    return dict(zip(names, sources, strict=True))


def _bare(file: Path) -> str:
    """A file's name without the number of a part, and without what says how it is read."""
    name = PART.sub("", file.name)
    return name[: name.lower().rindex(extension(file))] if known(file) else Path(name).stem


def _purpose(file: Path, folder: Path, text: bool) -> str:
    """What a file in a folder is for, by its name or the folders on the way; a text's name may say anything."""
    own = file.stem.lower() if text else _word(file)
    names = (own, *(name.lower() for name in file.relative_to(folder).parts[:-1]))
    return next((name for name in names if name in (*TRAIN_NAMES, *TEST_NAMES)), "")


def _word(file: Path) -> str:
    """The part of a file's name that may say what it is for."""
    words = re.split(r"[._-]", file.name.lower())
    return next((word for word in words if word in (*TRAIN_NAMES, *TEST_NAMES)), "")


def _test_beside(train: Path) -> list[Sources]:
    """What lies beside a file of training rows and may hold test rows; ``test`` before ``dev``."""
    beside = [file for file in sorted(train.parent.iterdir()) if known(file)]
    return [one for name in TEST_NAMES for one in _whole([file for file in beside if _word(file) == name])]
