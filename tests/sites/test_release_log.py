"""The release log: what is changed, cut or put in is found."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedstrata import UserError
from fedstrata.cli import app
from fedstrata.sites.gate import PAYLOADS
from fedstrata.sites.provision import init
from fedstrata.sites.release_lines import log_lines, verified_lines
from fedstrata.sites.release_log import DAY, HEAD, LOG, Release, ReleaseLog, now, read_log, release_of

RUN = "a" * 32


def release(number: int, **changes: object) -> Release:
    made = release_of(iter([b"bytes ", str(number).encode()]), RUN, number, "weights", ("head", "layer.0"), 12)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_docstring_names_every_payload() -> None:
    """Who read a log by it did not know what a sum was."""
    assert {f"``{payload}``" for payload in PAYLOADS.values()} <= set(
        (Release.__doc__ or "").split("payload:")[1].replace(",", " ").split()
    )


def test_a_clock_that_was_wrong_for_a_while_changes_no_other_day(tmp_path: Path) -> None:
    log, today = ReleaseLog(tmp_path), now()
    for number, days in enumerate([-3, -2, 400, -1.5, -0.5, -20_000, 0]):
        log.append(release(number, time=(today + timedelta(days=days)).isoformat(), bytes=10**number))
    assert log.bytes_today(today + timedelta(days=9)) == 100
    for known in (log, ReleaseLog(tmp_path)):
        assert known.bytes_today(today) == 1_010_100, (
            "those of the day, and those that a clock ahead has put after it"
        )
        assert known.bytes_today(today - timedelta(days=2)) == 1_011_110


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The folder of a log with five lines."""
    log = ReleaseLog(tmp_path)
    for number in range(5):
        log.append(release(number, epsilon=0.5 if number == 4 else None))
    return tmp_path


def test_a_line_has_what_left_and_follows_on_the_one_before(written: Path) -> None:
    chain = "0" * 64
    lines = [json.loads(line) for line in (written / "releases.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        theirs = line.pop("chain")
        content = json.dumps(line, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256(f"{chain}\n{content}".encode()).hexdigest()  # as the docs say
        assert theirs == chain
        assert line["sha256"] == hashlib.sha256(f"bytes {number}".encode()).hexdigest()
        assert (line["bytes"], line["rows"], line["round"], line["parts"]) == (7, 12, number, ["head", "layer.0"])
        assert set(line) - {"epsilon"} == {
            *("time", "run", "round", "payload", "parts", "bytes", "rows", "sha256"),
        }
    assert [line.get("epsilon") for line in lines] == [None] * 4 + [0.5]
    assert oct((written / "releases.jsonl").stat().st_mode)[-3:] == "600"


def test_it_goes_on_where_it_ended(written: Path) -> None:
    log = ReleaseLog(written)
    assert (log.count, log.run_bytes[RUN]) == (5, 35)
    assert log.answered == {(RUN, number, "weights") for number in range(5)}
    assert log.bytes_today(now()) == 35
    assert log.bytes_today(now() + DAY + timedelta(seconds=1)) == 0
    log.append(release(5))
    assert [each.round for each, _ in read_log(written)] == list(range(6))
    assert len(ReleaseLog(written).answered) == 6


def edited(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "releases.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return damage


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (
        edited(lambda lines: [lines[0].replace(b'"rows": 12', b'"rows": 99'), *lines[1:]]),
        "line 1 is not as it was",
    ),
    (edited(lambda lines: lines[:2] + lines[3:]), "line 3 is not as it was"),
    (edited(lambda lines: [lines[1], lines[0], *lines[2:]]), "line 1 is not as it was"),
    (edited(lambda lines: [*lines[:3], lines[2], *lines[3:]]), "line 4 is not as it was"),
    (edited(lambda lines: lines[:3]), "it ends after line 3, and once had 5 lines"),
    (edited(lambda lines: [*lines[:4], lines[4][:40]]), "line 5 is not as it was"),
    (edited(lambda lines: [*lines, b"nonsense\n"]), "line 6 is not as it was"),
    (edited(lambda lines: [*lines[:4], b"[" * 5000 + b"\n"]), "line 5 is not as it was"),
    (edited(lambda lines: []), "it ends after line 0, and once had 5 lines"),
    (lambda folder: (folder / "releases.jsonl").unlink(), "it ends after line 0, and once had 5 lines"),
    (lambda folder: (folder / "releases.head").unlink(), "which says how far it goes, is missing or damaged"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_what_is_changed_or_cut_is_found(written: Path, damage: Callable[[Path], None], sentence: str) -> None:
    damage(written)
    with pytest.raises(UserError, match=sentence):
        list(read_log(written))
    with pytest.raises(UserError, match=f"{sentence}.*nothing leaves this site until"):
        ReleaseLog(written)


def test_a_machine_that_stopped_while_a_line_was_written(written: Path) -> None:
    """The line has no end, so its message never left; a line beyond the head was written, and may have left."""
    path, head = written / "releases.jsonl", (written / "releases.head").read_bytes()
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1][:50])
    assert ReleaseLog(written).count == 5
    assert path.read_bytes() == whole
    ReleaseLog(written).append(release(5))
    (written / "releases.head").write_bytes(head)
    assert ReleaseLog(written).count == 6


def test_batches_write_how_far_it_goes_later(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    log.append(release(0), head=False)
    log.append(release(1), head=False)
    assert ReleaseLog(tmp_path).count == 2


def test_it_is_shown_and_checked(tmp_path: Path) -> None:
    init(tmp_path / "federation", ["a"])
    site = tmp_path / "federation" / "sites" / "a"
    runner = CliRunner()
    assert "0 messages, 0 bytes in all" in runner.invoke(app, ["site", "log", str(site)]).output
    log = ReleaseLog(site / "state")
    log.append(release(0))
    log.append(release(-1, payload="examples", parts=()))
    shown = runner.invoke(app, ["site", "log", str(site / "site.toml")]).output
    assert "round 1  weights  7 bytes  12 rows" in shown
    assert "2 messages, 15 bytes in all" in shown
    checked = runner.invoke(app, ["site", "log", str(site), "--verify"])
    assert checked.exit_code == 0
    assert f"2 messages, each as it was written; last chain {log.chain}" in checked.output
    path = site / "state" / "releases.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"rows": 12', b'"rows": 13', 1))
    broken = runner.invoke(app, ["site", "log", str(site), "--verify"])
    assert broken.exit_code == 2
    assert list(tmp_path.rglob("*.part")) == []
    with pytest.raises(UserError, match="line 1 is not"):
        list(log_lines(site / "state"))
    with pytest.raises(UserError, match="line 1 is not"):
        list(verified_lines(site / "state"))


def test_a_run_is_over_after_its_training(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    log.append(release(-1, payload="examples"))
    log.append(release(-1, payload="over"))
    first, last, _ = log_lines(tmp_path)
    assert "  before training  examples  " in first
    assert "  after training  over  " in last


def test_a_refusal_is_of_no_round(tmp_path: Path) -> None:
    """One in the middle of a run was said to have left before its training."""
    log = ReleaseLog(tmp_path)
    log.append(release(-1, payload="refusal"))
    line, _ = log_lines(tmp_path)
    assert "  -  refusal  " in line


def test_a_damaged_end_without_a_log_is_no_empty_log(written: Path) -> None:
    (written / LOG).unlink()
    (written / HEAD).write_text("x")
    with pytest.raises(UserError, match="which says how far it goes, is missing or damaged"):
        list(read_log(written))
    (written / HEAD).unlink()
    assert list(read_log(written)) == []


@pytest.mark.parametrize("name", [LOG, HEAD])
def test_a_folder_in_the_logs_place_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"^{tmp_path / name}: is a folder"):
        list(read_log(tmp_path))


def test_a_line_that_does_not_fit_on_the_disk_is_not_there(written: Path) -> None:
    """Not even its first half, after which no other line could be read."""
    log, before = ReleaseLog(written), (written / LOG).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match=LOG):
            log.append(release(5), head=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (written / LOG).read_bytes() == before
    log.append(release(5))
    assert [found for found, _ in read_log(written)][5].round == 5
