"""The board on a tiny model: what is missing is run, kept and not run again, wherever a call was ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from board import rows, running
from board.cells import read_lines
from board.page import read_facts, write_page
from board.protocol import Group, Protocol, Row
from board.running import Board

import fedstrata
from fedstrata.events import CellEnded
from fedstrata.reports.runs import load_run
from fedstrata.sweeps.cells import cells
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def make(job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Board]:
    """Boards of two clients over the sentences, in one folder."""
    data = [{"text": text, "label": label} for text, label in SENTENCES]

    def parts(_: Path, folds: int) -> rows.Parts:
        return rows.Parts(data, data[::2], [data[i * 12 // folds : (i + 1) * 12 // folds] for i in range(folds)])

    monkeypatch.setattr(rows, "TASKS", {"tiny": parts})
    content = job("fedavg", "classify", train={"steps": 1}, engine={"name": "inprocess", "threads": 1})
    model, content["task"]["metric"] = content.pop("model")["name"], "accuracy"
    keys = {"method.name": "fedavg"}
    table = (
        Row("centralized", {"method.name": "centralized"}, (1e-3,), (1.0,)),
        Row("FedAvg", keys, (1e-3, 3e-3), (1.0,)),
        Row("diverges", {**keys, "train.optimizer": "sgd"}, (1e30,), (1.0,)),
    )
    fields: dict[str, Any] = {
        "clients": 2,
        "seeds": (0, 1),
        "alpha": 0.05,
        "test_power": 0.8,
        "hours": 1.0,
        "parallel": 1,
        "margins": {"accuracy": 0.01},
        "planning": {"accuracy": {"row": 0.3, "seed": 0.01}},
        "tuning": {"first_share": 0.5, "keep": 1, "seeds": [100, 101]},
        "confirmation": {"seeds": [2, 3, 4]},
        "partitions": {"iid": {"clients": {"partition": "iid"}}},
        "slices": (Group("tiny", "iid", table),),
        "jobs": {"tiny": content},
    }
    said: list[str] = []

    def board(**changes: Any) -> Board:
        protocol = Protocol(**{**fields, **changes})
        return Board(protocol, tmp_path, model, tmp_path / "work", tmp_path / "records", said.append)

    return board


def in_process(played: list[str]) -> Callable[..., None]:
    """A sweep that runs its cells here, one after another, and notes their folders."""

    def sweep(job: dict[str, Any], keys: Any, *, resume: bool, progress: Callable[[Any], None]) -> None:
        for cell in cells(job, keys)[2]:
            played.append(cell.folder.parent.name)
            content = {key: value for key, value in job.items() if key != "sweep"}
            status, message = "finished", None
            try:
                fedstrata.run(content, [*keys.items(), *cell.pairs], resume=resume)
            except fedstrata.UserError as error:
                status, message = "failed", str(error)
            progress(CellEnded(str(cell), status, message, 1.0))

    return sweep


def test_what_is_missing_is_run_and_kept(
    make: Callable[..., Board], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []
    monkeypatch.setattr(running.fedstrata, "sweep", in_process(played))
    board = make()
    [part] = board.protocol.slices
    assert board.run(part)
    lines = read_lines(board.records)
    stages = [(line.cell.row, line.cell.stage) for line in lines]
    assert {stage: stages.count(stage) for stage in dict.fromkeys(stages)} == {
        ("centralized", "first"): 1,
        ("FedAvg", "first"): 2,
        ("diverges", "first"): 1,
        ("centralized", "second"): 1,
        ("FedAvg", "second"): 1,
        ("diverges", "second"): 1,
        ("centralized", "test"): 2,
        ("FedAvg", "test"): 2,
    }
    assert [line.diverged for line in lines if line.cell.row == "diverges"] == [True, True]
    by_folder = {line.digest: line for line in lines}
    for folder in (tmp_path / "work" / "cells").glob("tiny/*/cells/*/*"):
        assert not (folder / "state").exists()
        run = load_run(folder)
        line = next(line for digest, line in by_folder.items() if digest in str(folder))
        assert run.job["train"]["seed"] == line.cell.seed
        name = f"fold-{line.cell.seed}" if line.cell.stage == "test" else "dev"
        assert run.job["data"]["test"].endswith(f"{name}.jsonl")
        if not line.diverged:
            up, down = (run.result["bytes"][way] // len(run.clients) for way in ("up", "down"))
            assert (line.up[-1], line.down[-1]) == (up, down)
            assert line.scores[-1] == run.result["score"]["accuracy"]
            assert line.flops[-1] == run.result["flops"]
    assert read_facts(board.records)["tiny"]["rows"] == {"train": 12, "dev": 6, "fold-0": 6, "fold-1": 6}
    text = "".join(path.read_text("utf-8") for path in board.records.glob("*"))
    assert not [sentence for sentence, _ in SENTENCES if sentence in text]
    count = len(played)
    assert make().run(part)
    assert len(played) == count
    # a line that was half written when its writer was killed: its cell is read again, or run again
    path = board.records / "tiny.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert make().run(part)
    assert {line.digest: replace(line, seconds=0.0) for line in read_lines(board.records)} == {
        digest: replace(line, seconds=0.0) for digest, line in by_folder.items()
    }
    page = write_page(board.protocol, board.records, tmp_path / "board.md").read_text("utf-8")
    assert "| diverges | not run" in page


def test_a_row_is_confirmed_with_other_seeds_and_folds(
    make: Callable[..., Board], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []
    monkeypatch.setattr(running.fedstrata, "sweep", in_process(played))
    [part] = make().protocol.slices
    fedavg = part.rows[1]
    other = replace(fedavg, name="other", set={**fedavg.set, "train.optimizer": "sgd"})
    first = Group("tiny", "iid", (fedavg, other))
    board = make(slices=(first, replace(first, confirms=True)))
    assert all(map(board.run, board.protocol.slices))
    lines = read_lines(board.records)
    again = [line for line in lines if line.cell.stage == "confirm"]
    assert [(line.cell.row, line.cell.seed) for line in again] == [
        (row, seed) for row in ("FedAvg", "other") for seed in (2, 3, 4)
    ]
    tests = {line.cell.row: line for line in lines if line.cell.stage == "test"}
    assert [line.cell.choice for line in again] == [tests[line.cell.row].cell.choice for line in again]
    assert [line.counts["scored"] for line in again] == [4] * 6
    for folder in (tmp_path / "work" / "cells").glob("tiny/*/cells/confirm*/*"):
        run = load_run(folder)
        place = Path(run.job["data"]["test"])
        assert (place.parent.name, place.name) == ("tiny-confirm", f"fold-{run.job['train']['seed'] - 2}.jsonl")
    assert read_facts(board.records).keys() == {"tiny", "tiny-confirm"}
    count = len(played)
    later = make(slices=board.protocol.slices)
    assert all(map(later.run, later.protocol.slices))
    assert len(played) == count
    page = write_page(board.protocol, board.records, tmp_path / "board.md").read_text("utf-8")
    assert page.count("## tiny, iid") == 1
    row = page.partition("## Confirmation")[2].partition("| other |")[2].partition("\n")[0]
    assert "not run" not in row


def test_the_hours_end_it_and_the_next_call_goes_on(make: Callable[..., Board], tmp_path: Path) -> None:
    board = make(hours=1e-9)
    [part] = board.protocol.slices
    assert not board.run(part)
    [line] = read_lines(board.records)
    assert (line.cell.row, line.cell.stage) == ("centralized", "first")
    later = make()
    missing = [cell for cell, _ in later.missing(part)]
    assert line.cell not in missing
    assert len(missing) == 4  # the second stage of centralized, the first of the others
    assert json.loads((tmp_path / "records" / "rows.json").read_text("utf-8")).keys() == {"tiny"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--slices", "1,99"], "--slices: '99' is no slice; expected numbers from 1 to"),
        (["--data", "nowhere"], "nowhere: expected one folder or file called 'SST-2' in it or below, found none"),
        (
            ["--data", "nowhere", "--model", "nothing"],
            "nothing: is no folder of a model (No such file or directory",
        ),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str, tmp_path: Path, model_folder: Any) -> None:
    if "--model" not in words and "--data" in words:
        words = [*words, "--model", str(model_folder())]
    places = [
        "--work",
        str(tmp_path / "work"),
        "--records",
        str(tmp_path / "records"),
        "--page",
        str(tmp_path / "a.md"),
    ]
    script = Path(__file__).parent.parent / "benchmarks" / "board.py"
    done = subprocess.run([sys.executable, script, *words, *places], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.md"))
