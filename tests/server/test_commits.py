"""Commits are written while the next round runs: killed one behind, damaged as well, on a full disk."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.errors import UserError
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.runs import result_file
from fedstrata.runs.result import read_status
from fedstrata.server import records, state
from fedstrata.server.commits import Commit, CommitWriter, part_files
from fedstrata.server.journal import Journal
from fedstrata.server.optimizer import AdaptiveOptimizer
from fedstrata.server.server import Server
from fedstrata.wire import store
from fedstrata.wire.files import read_lines
from tiny import saved_models, tiny_model

Jobs = Callable[..., dict[str, Any]]


class KilledError(BaseException):
    """Not an Exception: nothing in the program may catch it, as nothing catches SIGKILL."""


def same(one: Path, other: Path) -> None:
    a, b = saved_models(one), saved_models(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for name in ("ledger.jsonl", "rounds.jsonl"):
        drop = [{**line, "seconds": 0} for line in read_lines(one / name)]
        assert drop == [{**line, "seconds": 0} for line in read_lines(other / name)]


@pytest.fixture
def keeping(job: Jobs) -> dict[str, Any]:
    """A job with all that clients may keep: personal parts, residuals, the optimizer's state."""
    train = {"optimizer_state": "persist"}
    tables = {"wire": {"dtype": "int8"}, "server": {"optimizer": "momentum"}, "output": {"client_models": True}}
    return job("fedsplitbert", "classify", 2, method={"rounds": 5}, train=train, **tables)


@pytest.mark.parametrize("base", [object, AdaptiveOptimizer])
def test_a_commit_has_the_memory_of_its_own_round(tmp_path: Path, base: type) -> None:
    """That of a caller's own optimizer may change in place while the commit is being written."""
    own = type("Own", (base,), {})()
    model = tiny_model()
    parts = find_parts(model)
    weights = {part: part_tensors(model, parts, [part]) for part in parts.names}
    moments = {name: {"first": torch.zeros_like(tensor)} for name, tensor in weights["layer.0"].items()}
    server = Server(parts, weights, optimizer=own, moments=moments)
    found = {key.name: tensors for key, _, tensors in part_files(tmp_path, server, "layer.0")}
    for memory in moments.values():
        memory["first"].add_(1.0)
    assert len(found["moments-layer.0"]) == len(moments)
    assert not any(tensor.any() for tensor in found["moments-layer.0"].values())


@pytest.mark.parametrize("damaged", ["", "manifest-000002.json", "*@2.safetensors"])
def test_killed_while_a_commit_is_one_round_behind(
    keeping: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    """The manifest of three rounds is lost while the fourth is played; the one before it may be damaged too."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fedstrata.run(keeping, {"output.dir": str(whole)})
    write = state.write_sealed

    def dying(path: Path, table: Any) -> None:
        if path.name == "manifest-000003.json":
            raise KilledError
        write(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(state, "write_sealed", dying)
        with pytest.raises(KilledError):
            fedstrata.run(keeping, {"output.dir": str(broken)})
    left = broken / "state"
    assert sorted(path.name for path in left.glob("manifest*")) == ["manifest-000001.json", "manifest-000002.json"]
    assert list(left.glob("clients/*/round-000003.safetensors")), "the round after it was played"
    for path in left.glob(damaged) if damaged else ():
        path.write_bytes(path.read_bytes()[:-3])
    said: list[Any] = []
    fedstrata.run(keeping, {"output.dir": str(broken)}, resume=True, progress=said.append)
    [begun] = [event.done for event in said if type(event).__name__ == "StageStarted"]
    assert begun == (1 if damaged else 2)
    same(whole, broken)


def test_what_an_unfinished_commit_has_written_does_not_count_as_the_newest(
    keeping: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice: files of a later version must not drive out those that the commits on disk need."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fedstrata.run(keeping, {"output.dir": str(whole)})
    write = state.write_sealed

    def dying(path: Path, table: Any) -> None:
        if path.name == "manifest-000004.json":
            raise KilledError
        write(path, table)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(state, "write_sealed", dying)
            with pytest.raises(KilledError):
                fedstrata.run(keeping, {"output.dir": str(broken)}, resume=True)
        newest = broken / "state" / "manifest-000003.json"
        newest.write_bytes(newest.read_bytes()[:-3])
    fedstrata.run(keeping, {"output.dir": str(broken)}, resume=True)
    same(whole, broken)


def test_a_full_disk_ends_the_run_with_a_sentence_and_it_goes_on_later(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job("fedavg", method={"rounds": 4})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fedstrata.run(made, {"output.dir": str(whole)})
    write = state.write_tensors

    def full(path: Path, tensors: Any) -> str:
        if path.name == "head@2.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    for rounds in (4, 2):  # found by the next commit, or at the end
        shorter = {**made, "method": {**made["method"], "rounds": rounds}}
        place = {"output.dir": str(tmp_path / f"full-{rounds}")}
        with monkeypatch.context() as patch:
            patch.setattr(state, "write_tensors", full)
            words = r"state of its run cannot be written \(No space left on device\)"
            with pytest.raises(UserError, match=words) as found:
                fedstrata.run(shorter, place)
        assert isinstance(found.value.__cause__, OSError)  # by which the command line exits with 1
        assert not (tmp_path / f"full-{rounds}" / "state" / "manifest-000002.json").exists()
    fedstrata.run(made, {"output.dir": str(tmp_path / "full-4")}, resume=True)
    broken = tmp_path / "full-4"
    same(whole, broken)


def test_an_interrupted_run_leaves_no_commit_half_written(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer comes to its end before the run gives its folder back."""
    write = state.write_tensors

    def slow(path: Path, tensors: Any) -> str:
        time.sleep(0.02)
        return write(path, tensors)

    def interrupt(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(state, "write_tensors", slow)
    made = job("fedavg", method={"rounds": 4})
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made, progress=interrupt)
    assert (tmp_path / "run" / "state" / "manifest-000002.json").exists()


def test_a_commit_is_written_behind_the_run_and_after_the_one_before_it(tmp_path: Path) -> None:
    gate, written = threading.Event(), list[int]()

    def write(commit: Commit) -> None:
        assert gate.wait(10)
        written.append(commit.manifest["done"])

    writer = CommitWriter(tmp_path, write)
    first, second = (Commit({"done": done}, (), (), (), {}) for done in (1, 2))
    writer.begin(first)
    assert written == [], "the run goes on meanwhile"
    gate.set()
    writer.begin(second)
    assert written[:1] == [1]
    writer.close()
    assert written == [1, 2]


def test_a_clients_files_are_flushed_by_whoever_notes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of many clients each costs a flush at the commit, behind the run; without a journal at once."""
    flushed: list[bool] = []
    write = store.write_views
    monkeypatch.setattr(store, "write_views", lambda p, c, now=True: flushed.append(now) or write(p, c, now))
    journal = Journal(tmp_path)
    store.Store(tmp_path / "noted", journal.note).save(0, {"a": torch.zeros(2)})
    store.Store(tmp_path / "alone").save(0, {"a": torch.zeros(2)})
    assert flushed == [False, True]
    assert journal.take_unflushed() == [tmp_path / "noted" / "round-000000.safetensors"]
    assert journal.take_unflushed() == []


def test_clients_that_hold_the_same_are_one_line_and_older_lines_are_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note_clients({f"c{i}": (1, 2) for i in range(1000)} | {"other": (0, 2)})
    lines = journal.take()
    assert len(lines) == 2
    again = Journal(tmp_path)
    again.read([{"client": "c5", "versions": [9, 9]}, *lines, {"client": "other", "versions": [3, 2]}])
    assert again.clients["c5"] == (1, 2)
    assert again.clients["other"] == (3, 2)
    assert len(again.clients) == 1001


@pytest.mark.parametrize("status_fits", [True, False])
def test_a_disk_that_is_full_amid_a_record_is_told_and_nothing_else(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status_fits: bool
) -> None:
    def full(path: Path, content: bytes) -> None:
        """Takes half of it, and cannot cut it off again."""
        with path.open("ab") as file:
            file.write(content if path.name != "ledger.jsonl" else content[:-5])
        if path.name == "ledger.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def no_room(folder: Path, result: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "result.json")

    monkeypatch.setattr(records, "append_bytes", full)
    if not status_fits:
        monkeypatch.setattr(result_file, "write_summary", no_room)
    folder = tmp_path / "run"
    with pytest.raises(OSError, match="No space left") as found:
        fedstrata.run(job("fedavg"))
    assert found.value.filename == str(folder / "ledger.jsonl")
    assert found.value.__context__ is None
    assert read_status(folder) == ("failed" if status_fits else None)


def test_a_record_without_lines_may_be_gone_when_a_run_goes_on(job: Jobs, tmp_path: Path) -> None:
    """Whoever copies a folder may leave empty files behind."""

    def dies(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 1:
            raise KilledError

    fedstrata.run(made := job("fedavg"), {"output.dir": str(tmp_path / "whole")})
    with pytest.raises(KilledError):
        fedstrata.run(made, progress=dies)
    empty = [path for path in (tmp_path / "run").glob("*.jsonl") if not path.stat().st_size]
    for path in empty:
        path.unlink()
    assert empty
    fedstrata.run(made, resume=True)
    same(tmp_path / "whole", tmp_path / "run")
