"""Sweeps in whole: the same numbers as single runs, shared stages, failures, kills."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedstrata
from fedstrata.errors import FULL, UserError
from fedstrata.events import CellEnded, CellEvent, CellStarted, StageEnded, Stepped
from fedstrata.job.toml import read_toml
from fedstrata.reports.sweep import SweepRow
from fedstrata.reports.sweep_files import read_table
from full_disk import full_after
from pages import unnamed_files

Jobs = Callable[..., dict[str, Any]]
KEPT = "kept/**/*.safetensors"


@pytest.fixture
def many(job: Jobs, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two rows that share a pre-training, one that does not; two seeds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else a sweep's share of the cores decides about the last bits
    made = job("fedbt", "mlm", 3, method={"rounds": 2})
    made["stages"] = [
        {"name": "pretrain"},
        {"name": "finetune", "task": {"kind": "classify", "metric": "macro_f1"}},
    ]
    made["train"] |= {"learning_rate": 0.01}
    made["sweep"] = {
        "seeds": [0, 1],
        "parallel": 2,
        "against": "cycle",
        "rows": [
            {"name": "cycle"},
            {"name": "circle", "finetune.method.variant": "circle"},
            {"name": "untrained", "pretrain.method.name": "none"},
        ],
    }
    return made


def numbers(entries: list[SweepRow]) -> list[Any]:
    """All that must not depend on how a sweep was run: everything but the seconds."""
    return [(e.row, e.stage, e.seeds, e.metrics, e.p, e.up_mb, e.down_mb, e.setup_mb, e.tflops) for e in entries]


def test_a_sweep_is_its_single_runs(many: dict[str, Any], tmp_path: Path) -> None:
    told: list[Any] = []
    entries = fedstrata.sweep(many, progress=told.append)
    folder = tmp_path / "run"
    assert [(entry.stage, entry.row) for entry in entries] == [
        (stage, row) for stage in ("pretrain", "finetune") for row in ("cycle", "circle", "untrained")
    ]

    single = {key: value for key, value in many.items() if key != "sweep"}
    over = {"finetune.method.variant": "circle", "train.seed": 1, "output.dir": str(tmp_path / "single")}
    result = fedstrata.run(single, over)
    circle = next(e for e in entries if (e.row, e.stage) == ("circle", "finetune"))
    assert {name: values[1] for name, values in circle.metrics.items()} == result.score
    trained, same, untrained = entries[:3]
    assert untrained.p is not None
    assert 0 < untrained.p < 1
    assert untrained.p_holm == untrained.p, "the only comparison"
    assert trained.p is same.p is None, "nothing is compared with itself or its equal"

    again = StageEnded("pretrain", reused=True)
    reused = [event.cell for event in told if isinstance(event, CellEvent) and event.event == again]
    assert sorted(reused) == ["circle, seed 0", "circle, seed 1"]
    assert circle.method == "fedbt → fedbt"
    spent = [(circle.up_mb, "up"), (circle.down_mb, "down"), (circle.setup_mb, "setup")]
    for mb, kind in spent:
        assert mb == pytest.approx(result.bytes[kind] / 3 / 1e6), "a stage's costs include those of its start"
    assert circle.tflops == pytest.approx(result.flops / 1e12, rel=0.05)
    assert not list(folder.rglob("*.html")), "a page is written on request"
    assert not unnamed_files(folder)
    page = fedstrata.report(folder).read_text("utf-8")
    assert page.count("<svg") == 6, "of each stage the score against MB, TFLOP and rounds"
    assert 'href="cells/circle/seed-1/report.html"' in page
    started = [event for event in told if isinstance(event, CellStarted)]
    assert len(started) == len([event for event in told if isinstance(event, CellEnded)]) == 6
    assert {event.count for event in started} == {6}

    assert not list(folder.rglob("model.safetensors")), "models go when no cell needs them"
    assert json.loads((folder / "table.json").read_text())["against"] == "cycle"
    lines = list(csv.DictReader((folder / "cells.csv").read_text().splitlines()))
    [same] = [
        line
        for line in lines
        if (line["row"], line["stage"], line["seed"], line["metric"]) == ("circle", "finetune", "1", "macro_f1")
    ]
    assert float(same["value"]) == result.score["macro_f1"]

    told.clear()
    same_table = fedstrata.sweep(many, resume=True, progress=told.append)
    assert not told, "nothing is left to run"
    assert same_table == entries
    table = read_table(folder)
    assert (table.against, table.rows) == ("cycle", entries)


def test_a_stage_that_the_seeds_do_not_reach_is_one_run(many: dict[str, Any], tmp_path: Path) -> None:
    """Its one score was counted for each seed, with a deviation of 0 and a test of nothing."""
    many["sweep"] |= {"seed": "finetune.train.seed", "rows": many["sweep"]["rows"][::2]}
    trained, untrained, *later = fedstrata.sweep(many)
    assert {entry.stage for entry in (trained, untrained)} == {"pretrain"}
    assert [(entry.seeds, len(entry.scores), entry.sd, entry.p) for entry in (trained, untrained)] == [
        ((0,), 1, None, None)
    ] * 2
    assert [entry.seeds for entry in later] == [(0, 1), (0, 1)]
    table = (tmp_path / "run" / "table.md").read_text("utf-8")
    assert "±" not in table.partition("### finetune")[0]


def test_scores_of_different_metrics_are_not_tested_against_each_other(job: Jobs) -> None:
    made = job("none", "mlm", task={"kind": "mlm"})
    made["sweep"] = {
        "seeds": [0, 1],
        "against": "loss",
        "rows": [
            {"name": "loss"},
            {"name": "other", "task": {"metric": "perplexity"}},
            {"name": "same", "task": {"mask_probability": 0.5}},
        ],
    }
    loss, other, same = fedstrata.sweep(made)
    assert (loss.metric, other.metric) == ("loss", "perplexity")
    assert other.p is None
    assert same.p is not None
    assert same.p_holm == same.p, "the only comparison"
    assert (loss.base, same.base) == (None, "loss")


def test_a_rows_epsilon_is_the_largest_of_its_runs(job: Jobs, tmp_path: Path) -> None:
    """Each seed deals the rows otherwise, so that another client is protected least."""
    made = job("fedavg", "classify", method={"rounds": 1}, clients={"partition": "dirichlet", "alpha": 0.5})
    made["task"]["labels"] = ["eye", "heart", "kidney"]
    made["sweep"] = {
        "seeds": [0, 1],
        "rows": [{"name": "plain"}, {"name": "noise", "privacy.level": "example", "privacy.noise": 1.0}],
    }
    plain, noise = fedstrata.sweep(made)
    results = [json.loads(path.read_text()) for path in (tmp_path / "run" / "cells").rglob("result.json")]
    spent = [result["privacy"]["epsilon"] for result in results if result["privacy"]]
    assert len(set(spent)) == 2
    assert (plain.epsilon, noise.epsilon) == (None, max(spent))
    assert read_table(tmp_path / "run").rows == [plain, noise]


def test_a_sweep_killed_half_way_ends_in_the_same_table(many: dict[str, Any], tmp_path: Path) -> None:
    del many["sweep"]["rows"][2]
    many["sweep"]["seeds"] = [0]
    whole = fedstrata.sweep(many, {"output.dir": str(tmp_path / "whole")})

    def stop(event: Any) -> None:
        ended = isinstance(event, CellEnded)
        if ended:
            stop.ended = True  # type: ignore[attr-defined]
        elif hasattr(stop, "ended") and isinstance(event, CellEvent) and isinstance(event.event, Stepped):
            raise KeyboardInterrupt  # in the middle of a round of the second cell

    many["sweep"]["parallel"] = 1
    with pytest.raises(KeyboardInterrupt):
        fedstrata.sweep(many, progress=stop)
    assert len(list((tmp_path / "run").glob("cells/*/*/result.json"))) == 1
    with pytest.raises(UserError, match="is not empty; continue its run with --resume"):
        fedstrata.sweep(many)
    resumed = fedstrata.sweep(many, resume=True)
    assert numbers(resumed) == numbers(whole)


def test_a_failing_cell_is_survived_named_and_tried_again(many: dict[str, Any], tmp_path: Path) -> None:
    """One row's data is missing, and the worker of another is killed; the rest ends well."""
    data = Path(many["data"]["train"])
    other = tmp_path / "other.csv"
    many["sweep"] |= {"seeds": [0], "parallel": 1}
    many["sweep"]["rows"][1] = {"name": "broken", "finetune.data.train": str(other)}

    def kill(event: Any) -> None:
        if isinstance(event, CellEvent) and event.cell == "untrained, seed 0":
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                if b"fedstrata.sweeps.work" in process.read_bytes() and _parent(process) == os.getpid():
                    os.kill(int(process.parent.name), signal.SIGKILL)

    entries = fedstrata.sweep(many, progress=kill)
    why = {entry.row: dict(entry.failed) for entry in entries}
    assert why["cycle"] == {}
    assert "other.csv" in why["broken"][0]
    assert why["untrained"][0].startswith("its process ended with code -9")
    assert next(entry for entry in entries if entry.row == "broken").mean is None
    other.write_bytes(data.read_bytes())
    entries = fedstrata.sweep(many, resume=True)
    assert all(not entry.failed and len(entry.seeds) == 1 for entry in entries)


def test_a_full_disk_is_told_with_the_file_and_leaves_no_half_reason(many: dict[str, Any], tmp_path: Path) -> None:
    many["sweep"] |= {"seeds": [0], "parallel": 1}
    many["sweep"]["rows"][0]["pretrain.data.train"] = "none.csv"
    with ExitStack() as disk:

        def fill(event: Any) -> None:
            if isinstance(event, CellStarted):
                disk.enter_context(full_after(0))

        with pytest.raises(OSError, match=r"failed\.txt") as raised:
            fedstrata.sweep(many, progress=fill)
    assert raised.value.errno in FULL
    assert not list((tmp_path / "run").rglob("*failed.txt*"))


def test_a_file_that_is_changed_meanwhile_is_the_next_sweeps(job: Jobs, tmp_path: Path) -> None:
    """It was read again for each cell, so that one table had cells of two jobs; rows beside the file are found."""
    made = job("fedavg", "classify", method={"rounds": 1}, train={"learning_rate": 1e-4})
    made["data"] = {"train": "sentences.csv"}
    file = tmp_path / "sweep.toml"
    file.write_text(tomli_w.dumps({**made, "sweep": {"seeds": [0, 1]}}), "utf-8")

    def change(event: Any) -> None:
        if isinstance(event, CellEnded):
            file.write_text(file.read_text("utf-8").replace("0.0001", "0.7"), "utf-8")

    fedstrata.sweep(file, progress=change)
    assert "0.7" in file.read_text("utf-8")
    rates = [read_toml(path)["train"]["learning_rate"] for path in (tmp_path / "run").glob("cells/*/*/job.toml")]
    assert rates == [1e-4, 1e-4]


def test_run_says_that_a_sweep_is_many_runs(many: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"holds a \[sweep\], which is many runs"):
        fedstrata.run(many)


def _parent(process: Path) -> int:
    return int(process.with_name("stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("method", "tables"),
    [
        ("fedsplitbert", {}),
        ("fedavg", {"adapter": {"kind": "lora", "rank": 2}}),
        ("fedavg", {"adapter": {"kind": "lora", "rank": 2, "init": "svd"}}),
    ],
    ids=["personal parts", "adapters", "moved base"],
)
def test_no_model_stays_of_a_finished_cell(job: Jobs, tmp_path: Path, method: str, tables: dict[str, Any]) -> None:
    made = job(method, "classify", method={"rounds": 1}, **tables)
    made["sweep"] = {"seeds": [0], "rows": [{"name": "one"}]}
    fedstrata.sweep(made)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert fedstrata.sweep(made, resume=True)[0].seeds == (0,)
    kept = {**made, "output": {"dir": str(tmp_path / "kept"), "keep_state": True}}
    fedstrata.sweep(kept)
    left = [path.relative_to(tmp_path / "kept" / "cells" / "one" / "seed-0") for path in tmp_path.glob(KEPT)]
    assert {path.parts[0] for path in left} == {"state"}
