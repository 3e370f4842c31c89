"""The benchmarks run and say what they promise; how fast anything is, no test asserts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fedstrata.client.trainer import Trainer
from fedstrata.job.file import load
from fedstrata.methods import METHODS

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_client_step_has_a_ratio_for_every_method(tmp_path: Path) -> None:
    made = tmp_path / "step.json"
    words = ["--size", "small", "--batch", "2", "--tokens", "16", "--repeat", "1", "--json", str(made)]
    subprocess.run([sys.executable, FOLDER / "client_step.py", *words], check=True, capture_output=True)
    report = json.loads(made.read_text("utf-8"))
    steps = report["steps"]
    assert {name for step in steps for name in step["methods"]} == set(METHODS) - {
        "none",
        "fedfreezebert",
        "fedbert",
    }
    plain = [step for step in steps if step["name"].startswith("plain")]
    assert [step["clock_ratio"] for step in plain] == [1.0, 1.0]
    printed = {step["name"]: step["printed_percent"] for step in steps if step["printed_percent"]}
    assert printed == {
        f"fedbfpt, {n} local layers, full head, fp32": p for n, p in ((4, 37.49), (6, 46.7), (8, 56.05))
    }
    assert all("clock_ratio_equal_settings" in step for step in steps if step["name"] in printed)
    flops = {step["name"]: step["flop_ratio"] for step in steps}
    assert flops["fedavg, full head, fp32"] == 1.0
    assert flops["fedbfpt fedbt"] < flops["fedbfpt, 6 local layers, full head, fp32"] < 1.0
    assert all(step["utilization"] > 0 for step in steps)
    alike = [step["utilization"] * step["seconds"] / step["flop_ratio"] for step in plain]
    others = [step for step in steps if step["name"].endswith("fp32")]
    assert len(others) == 5
    for step in others:  # of the same peak: FLOPs per second are as the ratios of FLOPs and seconds say
        found = step["utilization"] * step["seconds"] / step["flop_ratio"]
        assert found == pytest.approx(alike[0], rel=1e-9)
    ratios = {step["name"].split(" ")[0]: step["clock_ratio"] for step in reversed(steps)}
    measured = {row["measure"].partition(": ")[2]: row["median"] for row in report["measures"]}
    assert measured["fedbfpt / plain mlm"] == ratios["fedbfpt"]
    assert measured["fedbfpt / fedavg"] == pytest.approx(ratios["fedbfpt"] / ratios["fedavg"])
    trend = tmp_path / "trend.jsonl"
    subprocess.run([sys.executable, FOLDER / "trend.py", made, "--trend", trend, "--add"], check=True)
    assert len(trend.read_text("utf-8").splitlines()) == len(report["measures"]) == len(measured)


def test_client_step_leaves_its_models_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A working model without a device takes a model to the processor, the plain steps' own too."""
    module, devices = module_of("client_step"), list[str]()

    def working(model: Any, parts: Any, device: str = "cpu", bf16: bool = False) -> None:
        devices.append(device)

    models = module.models
    monkeypatch.setattr(module, "models", lambda size, device: models(size, "cpu"))
    monkeypatch.setattr(module, "resolve_precision", lambda precision, device: "bf16")
    monkeypatch.setattr(module, "plain", lambda *arguments: None)
    monkeypatch.setattr(module, "WorkingModel", working)
    module.cases("small", 2, 8, "cuda")
    assert set(devices) == {"cuda"}


def test_frozen_has_both_ratios_for_every_head(tmp_path: Path) -> None:
    made = tmp_path / "frozen.json"
    words = ["--size", "tiny", "--examples", "20", "--batch", "4", "--tokens", "16", "--repeat", "1"]
    subprocess.run([sys.executable, FOLDER / "frozen.py", *words, "--json", made], check=True, capture_output=True)
    heads = json.loads(made.read_text("utf-8"))["heads"]
    assert [head["head"] for head in heads] == ["cls", "mean", "psum", "hsum"]
    for head in heads:
        assert head["computed_ratio"] == head["computed"] / head["kept"] > 0
        assert head["padded_ratio"] == head["padded"] / head["kept"] > 0


def test_split_has_a_ratio_for_every_wire_type(tmp_path: Path) -> None:
    made = tmp_path / "partition.json"
    words = ["--size", "tiny", "--batch", "4", "--tokens", "16", "--repeat", "1", "--json", made]
    subprocess.run([sys.executable, FOLDER / "split.py", *words], check=True, capture_output=True)
    steps = {step["wire"]: step for step in json.loads(made.read_text("utf-8"))["steps"]}
    assert list(steps) == ["whole", "fp32", "bf16", "fp16"]
    assert steps["whole"]["ratio"] == 1.0
    assert steps["whole"]["bytes"] == 0
    lengths = 4 * 4
    assert steps["fp32"]["bytes"] - lengths == 2 * (steps["bf16"]["bytes"] - lengths)
    assert all(step["ratio"] > 0 for step in steps.values())


def test_sites_has_a_ratio_for_every_wire_type_and_number_of_sites(tmp_path: Path) -> None:
    made = tmp_path / "sites.json"
    words = ["--quick", "--only", "split", "--json", made]
    subprocess.run([sys.executable, FOLDER / "sites.py", *words], check=True, capture_output=True)
    steps = json.loads(made.read_text("utf-8"))["split"]
    assert {(step["wire"], step["sites"]) for step in steps} == {(w, n) for w in ("bf16", "fp32") for n in (1, 2)}
    assert all(step["ratio"] > 0 for step in steps)


def module_of(name: str) -> ModuleType:
    """A benchmark as a module; those beside it are found as when it is run."""
    found = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(FOLDER)
        found.loader.exec_module(module)
    return module


def test_the_job_of_rounds_between_sites_is_one(tmp_path: Path) -> None:
    """A job file inside a string: no linter reads it, and the rounds themselves take minutes."""
    module = module_of("sites")
    (job,) = load(module.make_job(tmp_path, "fedbfpt", 2))
    assert (job.clients.partition, job.method.rounds) == ("column", 2)


@pytest.mark.run
def test_scale_has_every_figure_of_a_run_and_a_line_for_it(tmp_path: Path) -> None:
    module = module_of("scale")
    found = module.run(module.CASES["10"], tmp_path)
    assert sorted(found) == ["disk", "memory", "page", "round", "start"]
    assert min(found.values()) > 0
    assert found["disk"] > (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    assert json.loads((tmp_path / "run" / "result.json").read_text("utf-8"))["rounds"] == module.ROUNDS
    runs = [
        {"start": 1.0, "round": 2.0, "memory": 3e9, "disk": 4e6, "page": seconds} for seconds in (5.0, 6.0, 7.0)
    ]
    told = module.table({"runs": {"1000/100": runs}, "forecast": [8.0]})
    row = (
        "| 1,000 | 100 |  | 1.0 (1.0 to 1.0) | 2.00 (2.00 to 2.00) | 20.0 (20.0 to 20.0) | 3.00 (3.00 to 3.00) | "
    )
    assert f"{row}4 (4 to 4) | 6.0 (5.0 to 7.0) |" in told
    assert told.endswith(": 8.0 s.")


@pytest.mark.run
def test_peers_take_the_same_batches_to_nearly_the_same_weights(tmp_path: Path) -> None:
    made = tmp_path / "peers.json"
    words = ["--quick", "--peers", "fedstrata fp32,careful loop", "--out", made]
    subprocess.run([sys.executable, FOLDER / "peers.py", *words], check=True, capture_output=True)
    report = json.loads(made.read_text("utf-8"))
    found = report["workloads"]["quick"]
    assert found["failed"] == {}
    assert {peer: len(runs) for peer, runs in found["runs"].items()} == {"fedstrata fp32": 1, "careful loop": 1}
    assert found["apart"]["fedstrata fp32"] < 1e-3  # one wrong batch would make it about 1
    assert all(run["seconds"] > 0 and run["peak"] > 0 for runs in found["runs"].values() for run in runs)


def test_final_weights_are_compared_with_the_careful_loop_where_it_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of("peers")
    record = {"seconds": 1.0, "peak": 1, "score": 0.5}
    monkeypatch.setattr(module, "run_peer", lambda *arguments: record)
    chosen = argparse.Namespace(model=None, data=None, repeats=1, here=True, limit=1)
    found = module.run_workload(module.WORKLOADS["quick"], ["fedstrata"], chosen, tmp_path)
    assert (found["runs"], found["apart"]) == ({"fedstrata": [record]}, {})


def test_a_peer_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    measure = module_of("measure")
    (tmp_path / "log").mkdir()
    words = [sys.executable, "-c", "raise ValueError('no such client')"]
    found = measure.measure(words, {}, tmp_path / "log", 60)
    assert found.failed == "ended with 1: ValueError: no such client"
    slow = measure.measure([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log", 0.5)
    assert slow.failed == "did not end within 0.5 s"


def test_processes_that_a_peer_leaves_behind_are_ended_and_counted(tmp_path: Path) -> None:
    """Ray and NVFlare start processes that outlive the one that started them."""
    measure = module_of("measure")
    child = "x = bytearray(300_000_000); import time; time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(4)"
    before = set(measure.descendants(os.getpid()))  # of other tests
    found = measure.measure([sys.executable, "-c", parent], {}, tmp_path, 60)
    assert found.failed == "wrote no result: nothing was printed"
    assert found.peak > 300_000_000
    after = set(measure.descendants(os.getpid())) - before
    assert not [pid for pid in after if measure.memory(pid) > 300_000_000]


def test_pip_refuses_for_a_reason() -> None:
    reason = module_of("environments").reason
    said = (
        "ERROR: Ignored the following versions that require a different python version: 1.0\nERROR: No matching\n"
    )
    assert "installs under Python" in reason(said)
    assert reason("ERROR: No matching distribution\n") == "does not install: No matching distribution"


def line(median: float, date: str, **changes: Any) -> dict[str, Any]:
    spread = {"median": median, "min": median - 0.1, "max": median + 0.1}
    return {"measure": "run / loop", "machine": {"cores": 2}, "date": date, **spread, **changes}


@pytest.mark.parametrize(
    ("median", "verdict"),
    [(1.0, "within the spread"), (1.15, "within the spread"), (1.3, "worse"), (0.7, "better")],
)
def test_trend_compares_with_the_newest_line_of_the_same_kind_of_machine(median: float, verdict: str) -> None:
    old = [line(1.0, "2"), line(9.0, "1"), line(9.0, "3", machine={"cores": 8}), line(9.0, "3", measure="other")]
    ((found, _, before),) = module_of("trend").compare([line(median, "4")], old)
    assert (found, before) == (verdict, old[0])


def test_trend_knows_measures_of_which_more_is_better() -> None:
    trend = module_of("trend")
    old, new = line(1.0, "1", measure="merge / copy"), line(2.0, "2", measure="merge / copy")
    assert [found for found, _, _ in trend.compare([new], [old])] == ["better"]
    assert [found for found, _, _ in trend.compare([new], [])] == ["new"]


def test_trend_keeps_a_line_per_ratio(tmp_path: Path) -> None:
    ratio = {"measure": "run / loop", "median": 0.5, "min": 0.4, "max": 0.6, "values": [0.4, 0.5, 0.6]}
    report = {"commit": "abc", "machine": {"cores": 2}, "measures": [ratio, {**ratio, "measure": "import"}]}
    (tmp_path / "report.json").write_text(json.dumps(report), "utf-8")
    trend = tmp_path / "trend.jsonl"
    words = [sys.executable, FOLDER / "trend.py", tmp_path / "report.json", "--trend", trend]
    for _ in range(2):
        subprocess.run([*words, "--add"], check=True)
    kept = [json.loads(text) for text in trend.read_text("utf-8").splitlines()]
    assert [row["measure"] for row in kept] == ["run / loop"] * 2
    ratio |= {"median": 0.8, "min": 0.7, "max": 0.9}
    (tmp_path / "report.json").write_text(json.dumps(report), "utf-8")
    assert subprocess.run(words).returncode == 1


def test_trend_refuses_a_file_without_measures(tmp_path: Path) -> None:
    (tmp_path / "sites.json").write_text(json.dumps({"machine": {"cores": 2}, "rounds": {}}), "utf-8")
    words = [sys.executable, FOLDER / "trend.py", tmp_path / "sites.json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sites.json: has no measures of a commit; expected what peers.py, speed.py or" in done.stderr


def test_the_table_has_every_target_and_its_figures_come_from_files() -> None:
    speed = module_of("speed")
    target = speed.Target("a run", "1.2", 0.75, "10: seconds / careful loop", bound="the cores")
    assert speed.cells(target, None)[2] == "–"
    assert speed.cells(target, {"median": 0.7, "min": 0.6, "max": 0.8})[2:] == [
        "0.7 (0.6 to 0.8)",
        "≤ 0.75",
        "met",
    ]
    assert speed.cells(target, {"median": 0.8, "min": 0.8, "max": 0.8})[2:] == ["0.8", "≤ 0.75", "the cores"]
    page = speed.PAGE.read_text("utf-8")
    made = speed.fill(page, speed.NAME, speed.table([{"measures": []}]))
    assert all(target.about in made for target in speed.TARGETS)
    assert speed.fill(made, speed.NAME, speed.table([{"measures": []}])) == made


@pytest.mark.run
def test_the_profile_adds_up_and_finds_every_function(tmp_path: Path) -> None:
    made = tmp_path / "profile.json"
    subprocess.run([sys.executable, FOLDER / "profile_run.py", "--json", made], check=True, capture_output=True)
    found = json.loads(made.read_text("utf-8"))
    assert found["not_found"] == []
    assert sum(found["rows"].values()) == pytest.approx(found["wall"])
    assert {"imports", "tokenizing", "forward", "backward", "optimizer", "scoring", "page"} <= found["rows"].keys()
    assert found["operators"]["matrix products"] > 0


def test_the_profiler_sees_the_first_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held the events of every step in memory, 24 GB of 1,000 clients'."""
    profile = module_of("profile_run")
    monkeypatch.setattr(profile, "STEPS", 2)
    monkeypatch.setattr(profile, "kinds_of", lambda profiler: {e.key: e.count for e in profiler.key_averages()})
    monkeypatch.setattr(Trainer, "_step_gradients", lambda *given: torch.ones(4, 4) @ torch.ones(4, 4))
    for steps, seen in ((1, 1), (2, 2), (5, 2)):
        calls, told = profile.operators_of(lambda: [Trainer._step_gradients() for _ in range(steps)])  # noqa: B023
        assert (calls["aten::mm"], told) == (seen, seen)


def test_tables_of_privacy_come_from_their_results() -> None:
    audit, epsilon, tables = (module_of(name) for name in ("audit", "epsilon", "tables"))
    page = audit.PAGE.read_text("utf-8")
    for name, text in audit.tables(audit.read(audit.FILE)).items():
        assert tables.fill(page, name, text) == page
    scores, page = epsilon.read(epsilon.RESULTS), epsilon.PAGE.read_text("utf-8")
    assert tables.fill(page, epsilon.NOISE, epsilon.table(scores)) == page
    assert tables.fill(page, epsilon.OMITTED, epsilon.table_of_omissions(scores)) == page


def test_a_cell_of_the_audit_says_how_many_seeds_hold_chance() -> None:
    audit = module_of("audit")
    low, high = {"auc": [0.5, 0.4, 0.6, 0.5]}, {"auc": [0.9, 0.8, 1.0, 0.5]}
    assert audit.cell([low, high], noised=True) == "AUC 0.70 (0.50–0.90), 1 of 2 at chance"
    assert audit.cell([{"precision": [None, 0.0, 1.0, 0.2], "recall": [0.0, 0.0, 0.1, 0.3]}], noised=False) == (
        "R 0.00 [0.30]"
    )
    assert (audit.cell([{}], noised=False), audit.cell([], noised=False)) == ("nothing", "–")


def test_a_later_round_of_an_audit_has_a_row_of_its_own() -> None:
    settings = ("1 step", "1 step of round 2")
    findings = [
        {"channel": "adapters", "attack": "span check", "setting": setting, "figures": figures}
        for setting, figures in zip(settings, ({}, {"auc": [0.75, 0.5, 1.0, 0.5]}), strict=True)
    ]
    line = {"model": "demo:minilm", "task": "classify", "row": "FedAvg, LoRA 8", "seed": 0, "findings": findings}
    assert module_of("audit").of_rounds([line]).splitlines()[-2:] == [
        "| FedAvg, LoRA 8 | adapters | span check | – | nothing | – |",
        "| FedAvg, LoRA 8, round 2 | adapters | span check | – | AUC 0.75 | – |",
    ]


def test_noise_is_tuned_before_it_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon = module_of("epsilon")
    monkeypatch.setattr(epsilon, "TRIED_THERE", {("sst2", 6, "head", "client"): (5.0, 27.0)})
    scores: dict[Any, float] = {}
    for cell in epsilon.cells(["sst2"], scores):
        better = {("none", 0.1): 0.9, ("example", 0.3): 0.8}.get((cell.level, cell.rate), 0.7)
        scores[cell] = better if cell.level != "client" else cell.clip
    head = [cell for cell in scores if cell.method == "head" and cell.clients == 60]
    assert {cell.rate for cell in head if not cell.tuning and cell.level == "none"} == {0.1}
    assert {cell.rate for cell in head if not cell.tuning and cell.level == "example"} == {0.3}
    assert {(cell.rate, cell.clip) for cell in head if not cell.tuning and cell.level == "client"} == {(0.1, 9.0)}
    own = [cell for cell in scores if (cell.method, cell.clients, cell.level) == ("head", 6, "client")]
    assert [cell.clip for cell in own if cell.tuning] == [5.0, 27.0], "what is tried there, in place of the others"
    assert {cell.clip for cell in own if not cell.tuning} == {27.0}
    assert {cell.seed for cell in scores if not cell.tuning} == {0, 1, 2}
    tests = [cell for cell in scores if not cell.tuning and cell.method in epsilon.METHODS]
    assert len(tests) == 3 * 4 * 3 * len(epsilon.COLUMNS)
    assert "| 0.1; 0.3; 9* |" in epsilon.table(scores)


def test_seeds_of_settings_that_tuning_no_longer_chooses_are_not_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A star asks for more to be tried: then the seeds of what was best before stood in one mean with new ones."""
    epsilon = module_of("epsilon")
    scores: dict[Any, float] = {}
    for cell in epsilon.cells(["sst2"], scores):
        scores[cell] = cell.rate
    before = epsilon.by_seed("sst2", 60, "head", "none", None, scores)
    monkeypatch.setitem(epsilon.TRIED["head"], "none", (0.03, 0.1, 0.3, 0.9))
    for cell in epsilon.candidates("sst2", 60, "head", "none", scores):
        scores[cell] = cell.rate
    found = epsilon.best("sst2", 60, "head", "none", scores)
    scores[epsilon.replace(found, seed=0)] = 0.9
    assert before == dict.fromkeys((0, 1, 2), 0.3)
    assert epsilon.by_seed("sst2", 60, "head", "none", None, scores) == {0: 0.9}
