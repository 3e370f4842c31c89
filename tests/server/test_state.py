"""Kill a run anywhere, start it again: the same weights, records and scores."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedstrata
from fedstrata.errors import UserError
from fedstrata.server.records import FileRecords
from fedstrata.server.state import newest_commit
from fedstrata.wire import files
from fedstrata.wire.files import append_lines, read_lines
from fedstrata.wire.store import write_tensors
from tiny import saved_models

Jobs = Callable[..., dict[str, Any]]


class KilledError(BaseException):
    """Not an Exception: nothing in the program may catch it, as nothing catches SIGKILL."""


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[Any], dict[str, Any]]:
    records = [
        {key: value for key, value in json.loads(line).items() if key != "seconds"}
        for name in ("ledger.jsonl", "rounds.jsonl")
        for line in (folder / name).read_text("utf-8").splitlines()
    ]
    result = json.loads((folder / "result.json").read_text("utf-8"))
    del result["seconds"], result["environment"]
    return saved_models(folder), records, result


def same(one: Path, other: Path) -> None:
    (a, records_a, result_a), (b, records_b, result_b) = outcome(one), outcome(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert records_a == records_b
    assert result_a == result_b


CASES = {
    "fedbfpt": {},
    "fedadam": {"clients": {"fraction": 0.67}},
    "local": {},
    "fedavg": {"wire": {"dtype": "bf16"}},
    "fedbt": {"wire": {"dtype": "int8"}, "clients": {"fraction": 0.67}, "server": {"evaluate": "end"}},
    "fedsplitbert": {"wire": {"dtype": "int8"}},
    "fedfreezebert": {"head": {"kind": "cls"}},
    "fedprox": {"wire": {"codec": "delta", "bits": 1, "density": 0.05}, "clients": {"fraction": 0.67}},
}


@pytest.mark.parametrize("method", CASES)
def test_killed_at_any_write_and_resumed(
    job: Jobs, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th file that is about to get its name is lost, and the process with it; then it is started again."""
    kind = "classify" if method in ("fedbt", "fedsplitbert", "fedfreezebert") else "mlm"
    made = job(method, kind, method={"rounds": 3}, **CASES[method])
    made["output"]["dir"] = str(tmp_path / "whole")
    fedstrata.run(made)
    replace, lock, counts = os.replace, threading.Lock(), {"left": 0}

    def dying(source: Any, target: Any) -> None:
        with lock:  # commits are written in a thread of their own, and a process that is gone writes in none
            counts["left"] -= 1
            if counts["left"] <= 0:
                raise KilledError
            replace(source, target)
            if Path(target).name == "manifest-000001.json":
                counts["left"] = 3  # die soon after: whatever the threads' order, one start finds a round done

    monkeypatch.setattr(files.os, "replace", dying)
    made["output"]["dir"] = str(tmp_path / "broken")
    found: list[int] = []
    done: list[int] = []

    def note(event: Any) -> None:
        done.extend([event.done] if type(event).__name__ == "StageStarted" else [])

    for survives in (3, 2, 5, 9, 18, 8, 4, 1000, 1000):
        counts["left"] = survives
        before = len(done)
        kept = newest_commit(tmp_path / "broken")
        with suppress(KilledError):
            fedstrata.run(made, resume=True, progress=note)
        found += [kept["done"] if kept else 0] * (len(done) - before)
    assert done[0] == 0 < max(done), "what a round left behind was read back"
    assert done == found, "each start goes on from the newest commit"
    same(tmp_path / "whole", tmp_path / "broken")


def spending(event: Any) -> list[int]:
    """The bytes that an event tells."""
    return [event.bytes] if type(event).__name__ == "Replied" else []


def test_killed_in_the_middle_of_a_round(job: Jobs, tmp_path: Path) -> None:
    made = job("fedbfpt", method={"rounds": 3})
    made["output"]["dir"] = str(tmp_path / "whole")
    spent: dict[str, list[int]] = {"whole": [], "broken": []}
    whole = fedstrata.run(made, progress=lambda event: spent["whole"].extend(spending(event)))
    made["output"]["dir"] = str(tmp_path / "broken")
    steps = 0

    def dying(event: Any) -> None:
        nonlocal steps
        steps += type(event).__name__ == "Stepped"
        if steps == 10:
            raise KilledError

    with pytest.raises(KilledError):
        fedstrata.run(made, progress=dying)
    with (tmp_path / "broken" / "ledger.jsonl").open("a") as file:
        file.write('{"round": 1, "cli')
    fedstrata.run(made, resume=True, progress=lambda event: spent["broken"].extend(spending(event)))
    same(tmp_path / "whole", tmp_path / "broken")
    assert spent["whole"][-1] == whole.bytes["up"] + whole.bytes["down"]
    assert 0 < len(spent["broken"]) < 9
    assert spent["broken"] == spent["whole"][-len(spent["broken"]) :], "the bytes told go on too"


def test_a_finished_run_is_not_run_again(job: Jobs) -> None:
    made = job("fedavg")
    first = fedstrata.run(made)
    events: list[Any] = []
    again = fedstrata.run(made, resume=True, progress=events.append)
    assert again == first
    assert [type(event).__name__ for event in events] == ["StageEnded"]


@pytest.mark.parametrize(
    "what", ["weights", "config", "tokenizer", "mask_token", "truncation_side", "split_special_tokens"]
)
def test_another_start_model_cannot_be_resumed_with(job: Jobs, what: str) -> None:
    made = job("fedavg")
    folder = Path(made["model"]["name"])

    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 1:
            raise KilledError

    with pytest.raises(KilledError):
        fedstrata.run(made, progress=dying)
    if what == "weights":
        tensors = load_file(folder / "model.safetensors")
        tensors["bert.embeddings.LayerNorm.bias"] += 1
        write_tensors(folder / "model.safetensors", tensors)
    elif what == "config":
        words = (folder / "config.json").read_text("utf-8")
        assert '"hidden_act": "gelu"' in words
        (folder / "config.json").write_text(words.replace('"hidden_act": "gelu"', '"hidden_act": "relu"'), "utf-8")
    elif what == "tokenizer":
        words = (folder / "tokenizer.json").read_text("utf-8")
        (folder / "tokenizer.json").write_text(words.replace('"kidney"', '"kidneys"'), "utf-8")
    else:
        path = folder / "tokenizer_config.json"
        value = {"mask_token": "[UNK]", "truncation_side": "left", "split_special_tokens": True}[what]
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), what: value}), "utf-8")
    with pytest.raises(UserError, match="other weights, or another config or tokenizer"):
        fedstrata.run(made, resume=True)


def test_only_current_files_are_held_and_in_the_end_none(job: Jobs, tmp_path: Path) -> None:
    held: list[str] = []

    def look(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 3:
            state = tmp_path / "run" / "state"
            while not (state / "manifest-000003.json").exists() or [*state.glob("*@1.*")]:
                time.sleep(0.01)  # the commit of the round before is being written
            held[:] = sorted(path.name for path in state.glob("*@*"))

    fedstrata.run(job("fedavg", method={"rounds": 4}), progress=look)
    names = ("embeddings", "head", "layer.0", "layer.1", "layer.2")
    assert held == [f"{part}@{version}.safetensors" for part in names for version in (2, 3)], "of two commits"
    left = sorted(path.name for path in (tmp_path / "run" / "state").iterdir())
    assert left == ["journal.jsonl", "manifest-000004.json", "rows.json"], "by which it is known to be finished"


def test_records_are_read_back(tmp_path: Path) -> None:
    append_lines(tmp_path / "a.jsonl", [{"word": "Arabic: كلمة"}])
    append_lines(tmp_path / "a.jsonl", [{"n": 2}])
    assert read_lines(tmp_path / "a.jsonl") == [{"word": "Arabic: كلمة"}, {"n": 2}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_after_a_mark_there_may_be_pieces_of_lines(tmp_path: Path) -> None:
    """A machine that stops may have written a line's end and not its beginning, or zeros."""
    records = FileRecords(tmp_path)
    records.append("missing", [{"client": "a"}])
    marks = records.marks()
    records.append("missing", [{"client": "b"}, {"client": "c"}])
    assert records.lines_after("missing", marks) == [{"client": "b"}, {"client": "c"}]
    assert records.lines_after("missing", {}) == records.lines("missing")
    assert records.lines_after("ledger", marks) == []
    with records.path("missing").open("ab") as file:
        file.write(b'12\n{"client": "d"\n\xff\0\0')
    assert records.lines_after("missing", marks) == [{"client": "b"}, {"client": "c"}]


DELTA = {"codec": "delta", "bits": 1, "density": 0.1}


@pytest.mark.parametrize(
    ("lost", "wire"),
    [("server", {"dtype": "int8"}), ("clients", {"dtype": "int8"}), ("held", DELTA), ("changes", DELTA)],
)
def test_what_messages_left_out_outlives_a_kill(
    job: Jobs, tmp_path: Path, lost: str, wire: dict[str, Any]
) -> None:
    """A run, killed and resumed, is the unbroken one; without its residuals it would not be."""
    made = job("fedavg", method={"rounds": 4}, wire=wire, server={"evaluate": "end"})

    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 2:
            raise KilledError

    whole, broken, bare = (str(tmp_path / name) for name in ("whole", "broken", "bare"))
    fedstrata.run(made, {"output.dir": whole})
    with pytest.raises(KilledError):
        fedstrata.run(made, {"output.dir": broken}, progress=dying)
    shutil.copytree(broken, bare)
    residuals = {
        "server": "state/residual-*",
        "clients": "state/clients/*/residual/round-*",
        "held": "state/held-*",
        "changes": "state/changes-*",
    }
    found = list(Path(bare).glob(residuals[lost]))
    assert len(found) >= 3, "of every client, of every part"
    for path in found:
        path.unlink()
    fedstrata.run(made, {"output.dir": broken}, resume=True)
    same(Path(whole), Path(broken))
    if lost != "clients":  # after the first round nothing had been left out yet
        fedstrata.run(made, {"output.dir": bare}, resume=True)
        same(Path(whole), Path(bare))
        return
    with pytest.raises(UserError, match=r"residual.*is damaged or missing, and no intact state before it is left"):
        fedstrata.run(made, {"output.dir": bare}, resume=True)
