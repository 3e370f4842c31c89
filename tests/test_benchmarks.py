"""The benchmarks run and say what they promise; how fast anything is, no test asserts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from fedstrata.job.file import load
from fedstrata.methods import METHODS

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_client_step_has_a_ratio_for_every_method(tmp_path: Path) -> None:
    made = tmp_path / "step.json"
    words = ["--size", "small", "--batch", "2", "--tokens", "16", "--repeat", "1", "--json", str(made)]
    subprocess.run([sys.executable, FOLDER / "client_step.py", *words], check=True, capture_output=True)
    steps = json.loads(made.read_text("utf-8"))["steps"]
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


def test_the_job_of_rounds_between_sites_is_one(tmp_path: Path) -> None:
    """A job file inside a string: no linter reads it, and the rounds themselves take minutes."""
    found = importlib.util.spec_from_file_location("sites_benchmark", FOLDER / "sites.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    (job,) = load(module.make_job(tmp_path, "fedbfpt", 2))
    assert (job.clients.partition, job.method.rounds) == ("column", 2)
