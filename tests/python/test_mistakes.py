"""Mistakes in Python: one sentence before anything is trained or written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import fedstrata
from fedstrata.errors import UserError
from fedstrata.events import StageStarted
from fedstrata.methods.fedavg import FedAvg
from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import Streams

Job = Callable[..., dict[str, Any]]


class Forgetful(fedstrata.Method):
    """A method without ``return``."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> fedstrata.Plan:
        return None  # type: ignore[return-value]


class Wrong(fedstrata.Method):
    """A method with a part, or a layer, that no model has."""

    layer: int = 0
    part: str = "nose"

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> fedstrata.Plan:
        return fedstrata.Plan(layers=(0, 1, self.layer), train=(self.part,), send=(self.part,))


class Optimizer:
    """A server optimizer by its looks."""

    def step(self, old: Any, aggregate: Any, moments: Any) -> Any:
        return aggregate


@pytest.mark.parametrize(
    ("components", "sentence"),
    [
        ({"method": FedAvg}, r"method: FedAvg is a class; expected an object of it, such as FedAvg\(\)"),
        ({"server_optimizer": Optimizer}, "server_optimizer: Optimizer is a class"),
        ({"method": len}, "method: len has no plan; expected an object with plan, presets"),
        ({"method": "fedavg"}, "method: an object of str has no plan"),
        ({"codec": Optimizer()}, "codec: an object of Optimizer has no name"),
        ({"aggregate": Optimizer()}, "aggregate: found an object of Optimizer; expected what makes one"),
        ({"task": 3}, "task: found an object of int"),
        ({"method": Forgetful()}, "Forgetful.plan: gave None for client-0 in round 1; expected a Plan"),
        ({"method": Wrong(layer=2)}, "Wrong.plan: client-0, round 1: plan.train: 'nose' .* its parts are: emb"),
        ({"method": Wrong(layer=9, part="head")}, r"Wrong.plan: .* \[9\] of a model with 3 layers"),
        ({"callbacks": Optimizer()}, "callbacks: expected a list of them, found an object of Optimizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_components(job: Job, components: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        fedstrata.run(job(), **components)
    assert not (tmp_path / "run").exists()
    if "callbacks" not in components and not isinstance(components.get("method"), fedstrata.Method):
        with pytest.raises(UserError, match=sentence):
            fedstrata.forecast(job(), **components)


def test_rows_that_are_none(job: Job) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}

    with pytest.raises(UserError, match=r"\[data\] train: is a generator, which is read once only"):
        fedstrata.run(job(data={"train": rows()}))
    with pytest.raises(UserError, match=r"\[data\] train: is an empty list"):
        fedstrata.run(job(data={"train": []}))
    with pytest.raises(
        UserError, match=r"\[data\] train: is a dict_values, a view of a dictionary; expected a list"
    ):
        fedstrata.run(job(data={"train": {1: {"text": "a"}}.values()}))
    one, two = [{"text": "a", "label": "x"}], [{"text": "b", "label": "y"}]
    by_number = {0: one, 1: two}  # as groupby names them
    with pytest.raises(UserError, match=r"\[data\] train: names a client 0; expected a text, such as 'client-0'"):
        fedstrata.run(job(data={"train": by_number}))


def test_one_name_in_place_of_a_list(job: Job) -> None:
    with pytest.raises(UserError, match=r"methods: found 'fedavg'; expected a list of names"):
        fedstrata.forecast(job(), methods="fedavg")
    with pytest.raises(UserError, match=r"attacks: found 'layers'; expected a list of names, .*layers"):
        fedstrata.audit(job(), attacks="layers")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"count": "3"}, "--examples: expected a number from 1 to 20,000,000, found '3'"),
        ({"count": 3.5}, "--examples: .* found 3.5"),
        ({"count": True}, "--examples: .* found True"),
        ({"tokens": [8]}, r"--tokens: expected a number from 1 to 1,000,000, found \[8\]"),
        ({"bandwidth": "10"}, "--bandwidth: expected a number above 0, found '10'"),
        ({"gflops": True}, "--gflops: expected a number above 0, found True"),
        ({"client": 3}, "no client 3.*expected one of: client-0"),
        ({"units": 3}, "--units: no paper 3; expected one of: fedbfpt"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_what_is_asked_of_a_forecast(job: Job, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fedstrata.forecast(job(), **asked)


def test_what_is_asked_of_a_forecast_may_be_numpys(job: Job) -> None:
    plain = fedstrata.forecast(job(), count=9, tokens=8, bandwidth=10.0)
    assert fedstrata.forecast(job(), count=np.int64(9), tokens=np.int32(8), bandwidth=np.float32(10)) == plain


def test_a_name_that_is_none(job: Job) -> None:
    with pytest.raises(UserError, match="--attacks: 3 is no attack; expected one of: embeddings"):
        fedstrata.audit(job(), attacks=[3])
    with pytest.raises(UserError, match=r"'a\\x00b': has a NUL character; expected the path of a file"):
        fedstrata.run("a\0b")


@pytest.mark.parametrize(
    "found",
    [np.array([1, 2]), pandas.DataFrame({"a": [1]}), torch.ones(2)],
    ids=["array", "frame", "tensor"],
)
def test_arrays_in_place_of_words(job: Job, found: Any) -> None:
    """Arrays have no truth value, and equal nothing as a whole."""
    shown = rf"found a \w+\.{type(found).__name__}"
    one, two = {"name": "one"}, {"name": "two"}
    for mistake, over, sentence in (
        ({"start": found}, {}, f"start: the first stage starts from .* {shown}"),
        ({"stages": [one, {**two, "start": found}]}, {}, rf"stage 'two': start: must name .* \(one\), {shown}"),
        ({"stages": [one, {"name": found}]}, {}, r"stage name a \w+\.\w+: must be unique"),
        ({"stages": [{"name": found}, one]}, {}, r"stage name a \w+\.\w+: must be unique"),
        ({}, {"method.name": found}, r"\[method\] name: a \w+\.\w+ is not a method"),
        ({}, {"engine.workers": found}, rf"\[engine\] workers: must be 'auto' or a whole number .* {shown}"),
    ):
        with pytest.raises(UserError, match=sentence):
            fedstrata.run({**job(), **mistake}, over)
    with pytest.raises(UserError, match=rf"job: {shown}; expected the path of a job file"):
        fedstrata.run(found)
    with pytest.raises(UserError, match=rf"overrides: {shown}; expected key=value, or a key and its value"):
        fedstrata.run(job(), [found])
    with pytest.raises(UserError, match=rf"overrides: {shown} for a key"):
        fedstrata.run(job(), [(found, 1)])
    with pytest.raises(UserError, match=r"row .name=\"a \w+\.\w+\".: job: \[model\] name: must be a string"):
        fedstrata.sweep({**job(), "sweep": {"grid": {"model.name": [found]}}})


def test_overrides_that_are_none(job: Job) -> None:
    with pytest.raises(UserError, match="overrides: found 3; expected a mapping or a list of key=value"):
        fedstrata.run(job(), 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"overrides: found a numpy\.int64; expected key=value"):
        fedstrata.run(job(), np.array([1, 2]))  # type: ignore[arg-type]
    pairs: Any = [["method.rounds", 0]]
    with pytest.raises(UserError, match=r"\[method\] rounds: must be 1 or more"):
        fedstrata.run(job(), pairs)


def test_overrides_that_are_read_once_only_count_all_the_same(job: Job, tmp_path: Path) -> None:
    """They were checked, and then gone: what came out was of the job without them."""
    once: Any = zip(["method.rounds"], [5], strict=True)
    assert len(fedstrata.forecast(job(), once)["fedavg"]["rounds"]) == 5
    names: Any = iter(["fedavg", "fedbt"])
    assert list(fedstrata.forecast(job(), methods=names)) == ["fedavg", "fedbt"]
    audited, swept = tmp_path / "audited", tmp_path / "swept"
    attacks: Any = iter(["layers"])
    once = iter([f"output.dir={audited}", "method.rounds=1"])
    found = fedstrata.audit(job(), once, attacks=attacks)
    assert (audited / "audit.json").exists()
    assert found["stages"][0]["findings"]
    once = iter([("output.dir", str(swept)), ("method.rounds", 1)])
    fedstrata.sweep({**job(), "sweep": {"seeds": [0]}}, once)
    assert (swept / "table.json").exists()
    assert not (tmp_path / "run").exists()


def test_an_empty_table_of_test_rows(job: Job) -> None:
    with pytest.raises(UserError, match=r"\[data\] test: is an empty table"):
        fedstrata.run(job(data={"test": {}}))


def test_a_name_that_no_system_takes(job: Job) -> None:
    with pytest.raises(UserError, match=r"\[model\] name: is no path that a system takes \(5,000 characters"):
        fedstrata.run(job(), {"model.name": "x" * 5000})


def test_one_override_may_be_a_word(job: Job) -> None:
    assert fedstrata.run(job(), "method.rounds=1").folder.name == "run"
    with pytest.raises(UserError, match="'rounds': an override has the form"):
        fedstrata.run(job(), "rounds")


@pytest.mark.parametrize("rows", ["frame", "dicts", "by client"])
def test_a_sweep_reads_files_only(job: Job, sentences_csv: Path, tmp_path: Path, rows: str) -> None:
    frame = pandas.read_csv(sentences_csv)
    source = {"frame": frame, "dicts": frame.to_dict("records"), "by client": {"a": frame, "b": frame}}[rows]
    with pytest.raises(UserError, match=r"\[data\] train: found rows in memory"):
        fedstrata.sweep({**job(data={"train": source}), "sweep": {"seeds": [0]}})
    assert not (tmp_path / "run").exists()


def test_a_sweep_is_of_named_methods_and_different_seeds(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sweep: found a Job, which is one run"):
        fedstrata.sweep(fedstrata.Job(**job()), {"sweep.seeds": [0]})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"\[method\]: found an object of Wrong"):
        fedstrata.sweep({**job(), "method": Wrong(), "sweep": {"seeds": [0]}})
    with pytest.raises(UserError, match=r"seeds: names a seed more than once, found \[0, 1, 0\]"):
        fedstrata.sweep({**job(), "sweep": {"seeds": [0, 1, 0]}})
    assert not (tmp_path / "run").exists()


def test_a_ledger_without_lines_has_its_columns(job: Job) -> None:
    ledger = fedstrata.run(job("centralized")).ledger
    assert list(ledger.columns) == ["round", "client", "phase", "direction", "part", "bytes"]
    assert ledger[ledger["direction"] == "up"].empty


def test_a_runs_own_job_file_plays_it_again(job: Job, tmp_path: Path) -> None:
    first = fedstrata.run(job())
    again = fedstrata.run(first.folder / "job.toml", {"output.dir": str(tmp_path / "again")})
    assert again.score == first.score
    assert again.bytes == first.bytes
    for more, sentence in (
        ('changes = [{round = 1, key = "train.learning_rate", was = 1e-4, now = 1e-5}]', "was changed on the way"),
        ("changes = 3", "was changed on the way"),
        ('components = {aggregate = "mine.Mean 0123"}', "had components of its own"),
    ):
        (tmp_path / "own.toml").write_text(f"{more}\n{(first.folder / 'job.toml').read_text()}")
        with pytest.raises(UserError, match=f"own.toml: its run .*{sentence}.* does not repeat it"):
            fedstrata.run(tmp_path / "own.toml")
    stages = [{"name": "one"}, {"name": "two", "train": {"seed": 1}}]
    two = fedstrata.run({**job(), "stages": stages}, {"output.dir": str(tmp_path / "two")})
    with pytest.raises(UserError, match=r"job.toml: is the record of stage 'two' of a run"):
        fedstrata.run(two.folder / "stages" / "two" / "job.toml")
    text = (first.folder / "job.toml").read_text().replace("format = 3", "format = 99")
    (tmp_path / "newer.toml").write_text(text)
    with pytest.raises(UserError, match=r"newer.toml: format: is 99; this version reads jobs of runs of format 3"):
        fedstrata.run(tmp_path / "newer.toml")


def test_a_runs_own_job_file_plays_it_again_where_the_model_reads_less_than_the_default(
    job: Job, tmp_path: Path
) -> None:
    made = job()
    del made["train"]["max_tokens"]
    first = fedstrata.run(made)
    again = fedstrata.run(first.folder / "job.toml", {"output.dir": str(tmp_path / "again")})
    assert again.score == first.score
    with pytest.raises(UserError, match="max_tokens: is 128, but the model reads at most 66"):
        fedstrata.run(first.folder / "job.toml", {"output.dir": str(tmp_path / "new"), "train.max_tokens": 128})


@pytest.mark.parametrize("folders", [None, 3, Optimizer(), [Optimizer()]])
def test_a_report_of_what_is_no_folder_is_a_sentence(folders: Any) -> None:
    with pytest.raises(UserError, match=r"report: found an object of \w+; expected .* such as result.folder"):
        fedstrata.report(folders)


def test_two_threads_do_not_run_at_once(job: Job, tmp_path: Path) -> None:
    """Both drew from one random state, and came to other bits without a word."""
    said = list[str]()

    def other() -> None:
        try:
            fedstrata.run(job(output={"dir": str(tmp_path / "other")}))
            said.append("ran")
        except UserError as error:
            said.append(str(error))

    def beside(event: Any) -> None:
        if isinstance(event, StageStarted):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    fedstrata.run(job(), callbacks=[beside])
    assert len(said) == 1
    assert said[0].startswith("another thread of this process is at a run")
    assert not (tmp_path / "other").exists()
    other()
    assert said[1] == "ran"
