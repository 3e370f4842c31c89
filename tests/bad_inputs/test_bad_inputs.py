"""Every line of the catalogue: bad input gets one sentence and exit code 2, and nothing is lost or left behind.

The catalogue is the text files of this folder. A line is ``what | command | sentence | left``: what is wrong; the
words after ``fedstrata``; the sentence, in which … stands for anything; and patterns of what may be new on disk
afterwards, which is mostly nothing. The command runs in a folder that ``material.py`` fills.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from errno import EACCES, ENOSPC, EROFS
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

import pytest
import typer
from material import make_folder

from fedstrata.cli import main
from fedstrata.cli.common import sentences
from fedstrata.errors import UserError
from full_disk import full_after

RESIDUE = re.compile(
    r"Traceback|instance of|after validation|[Ii]nput should|value_error|pydantic|\b[a-z_]+\.\d+:|Error:|Errno"
)
"""What pydantic, Python and the libraries would say."""


class Case(NamedTuple):
    """A line of the catalogue."""

    what: str
    command: str
    sentence: str
    left: str


def catalogue() -> Iterator[Case]:
    for path in sorted(Path(__file__).parent.glob("*.txt")):
        for line in path.read_text("utf-8").splitlines():
            if line and not line.startswith("#"):
                yield Case(*(field.strip() for field in f"{line} | ".split(" | ")[:4]))


CASES = list(catalogue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad_inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        make_folder(made)
    return made


@pytest.fixture
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder: when a file was last changed, and how big it is."""
    found = ((path.relative_to(folder).as_posix(), path.lstat()) for path in folder.rglob("*"))
    return {name: (0, 0) if S_ISDIR(at.st_mode) else (at.st_mtime_ns, at.st_size) for name, at in found}


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_one_sentence(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = files(folder)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(case.command))
    said = capsys.readouterr().err
    after = files(folder)
    new = sorted(after.keys() - before.keys(), reverse=True)
    for name in new:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert said.startswith("fedstrata: ")
    assert said.count("\n") == 1, said
    assert fnmatch.fnmatchcase(said[11:-1], pattern(case.sentence)), said
    assert not RESIDUE.search(said), said
    assert end.value.code == 2
    assert [name for name in new if not any(fnmatch.fnmatchcase(name, left) for left in case.left.split())] == []
    assert {name: after.get(name) for name in before} == before, "a file was changed or lost"


@pytest.mark.usefixtures("_signals")
def test_a_full_disk_is_the_machines_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(ENOSPC, "No space left on device", str(path))

    monkeypatch.chdir(folder)
    monkeypatch.setattr("fedstrata.runs.folder.write_bytes", full)
    with pytest.raises(SystemExit) as end:
        main(["run", "job.toml"])
    assert capsys.readouterr().err == "fedstrata: out/.fedstrata: No space left on device\n"
    assert end.value.code == 1
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    ("words", "writes"),
    [
        ("run job.toml", "fedstrata.runs.folder.write_bytes"),
        ("report finished", "fedstrata.reports.page.write_bytes"),
        ("export finished --onnx", "fedstrata.runs.handover.written_whole"),
    ],
)
@pytest.mark.parametrize("number", [EACCES, EROFS])
def test_a_place_where_nobody_may_write_can_be_put_right(
    words: str, writes: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``audit``, ``init`` and ``partition`` exited with 2, these with 1, as if a disk were full."""

    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, "Read-only file system", str(path))

    monkeypatch.chdir(folder)
    monkeypatch.setattr(writes, refused)
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    "words",
    [
        "init rows.csv --out half.toml",
        "partition job.toml --picture half.png",
        "federation init half --sites a --host h",
    ],
)
def test_what_a_full_disk_has_no_room_for_is_not_there_and_the_machines_fault(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a job file stayed, which the next ``init`` refused to write over."""
    monkeypatch.chdir(folder)
    with full_after(100), pytest.raises(SystemExit) as end:
        main(words.split())
    assert re.search(r"^fedstrata: .*half.* cannot be written \(File too large\)$", capsys.readouterr().err, re.M)
    assert end.value.code == 1
    assert not list(folder.glob("half*"))


@pytest.mark.parametrize(("cause", "code"), [(OSError(ENOSPC, "No space left on device"), 1), (None, 2)])
def test_a_sentence_about_the_machine_exits_with_1(cause: OSError | None, code: int) -> None:
    with pytest.raises(typer.Exit) as end, sentences():
        raise UserError("the state cannot be written") from cause
    assert end.value.exit_code == code


@pytest.mark.usefixtures("_signals")
def test_a_folder_of_somebody_else_is_refused_before_anything_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(["run", "job.toml", "--resume", "output.dir=models"])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert "models is not a folder that FedStrata has written" in said.err


@pytest.mark.usefixtures("_signals")
def test_a_picture_of_the_partition_is_written_beside_the_job_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("elsewhere").mkdir()
    job = shutil.copy("job.toml", "elsewhere/job.toml")
    with pytest.raises(SystemExit) as end:
        main(["partition", job])
    assert not end.value.code
    assert sorted(path.name for path in Path("elsewhere").iterdir()) == ["job.partition.png", "job.toml"]
    assert not Path("job.partition.png").exists()
    shutil.rmtree("elsewhere")


@pytest.mark.usefixtures("_signals")
def test_every_stage_has_a_picture_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(["partition", "stages.toml", "--picture", "rows.svg"])
    assert not end.value.code
    pictures = sorted(folder.glob("*.svg"))
    assert [path.name for path in pictures] == ["rows.one.svg", "rows.two.svg"]
    for path in pictures:
        path.unlink()


def pattern(sentence: str) -> str:
    return re.sub(r"[\[*?]", r"[\g<0>]", sentence).replace("…", "*")


def test_the_catalogue_is_long_and_says_everything_once() -> None:
    assert len(CASES) >= 150
    assert len({case.what for case in CASES}) == len(CASES)
    assert len({case.command for case in CASES}) == len(CASES)
