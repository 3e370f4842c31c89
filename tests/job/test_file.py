"""Job files: what is accepted, and one clear sentence for everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.tables import method_name
from fedstrata.methods import METHODS

JOB: dict[str, Any] = {
    "model": {"name": "folder"},
    "task": {"kind": "classify"},
    "data": {"train": "train.csv"},
    "method": {"name": "fedavg"},
}


def test_the_example_of_the_design_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        """
        [model]
        name = "bert-base-uncased"
        [task]
        kind = "classify"
        labels = ["NEG", "NEU", "POS"]
        metric = "macro_f1"
        [data]
        train = "train.jsonl"
        test = "test.jsonl"
        text = "text"
        label = "label"
        [clients]
        count = 6
        partition = "iid"
        [method]
        name = "fedavg"
        rounds = 5
        [train]
        epochs = 1
        batch_size = 32
        learning_rate = 5e-5
        max_tokens = 128
        seed = 0
        precision = "auto"
        proximal_mu = 0.0
        [server]
        optimizer = "sgd"
        [wire]
        dtype = "fp32"
        [engine]
        name = "inprocess"
        [output]
        dir = "runs/try"
        """,
        "utf-8",
    )
    [job] = load(path, ["method.rounds=10", "output.dir=runs/other", "train.epochs=2"])
    assert (job.method.rounds, job.output.dir, job.train.epochs) == (10, "runs/other", 2)
    assert job.task.labels == ["NEG", "NEU", "POS"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_defaults(name: str) -> None:
    [job] = load(JOB, [f"method.name={name}"])
    assert method_name(job.method) == name
    assert job.dump()["method"]["name"] == name
    assert load(job.dump())[0] == job, "a resolved job is a job"


def test_a_method_that_is_not_registered_has_the_name_of_its_class() -> None:
    class Own(METHODS["fedavg"]):  # type: ignore[misc]
        """As FedAvg."""

    assert method_name(Own()) == "Own"


@pytest.mark.parametrize("table", ["model", "task", "method"])
def test_a_missing_table_is_named(table: str) -> None:
    with pytest.raises(UserError, match=rf"\[{table}\] is missing"):
        load({key: value for key, value in JOB.items() if key != table})


def test_a_byte_order_mark_before_a_job_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + tomli_w.dumps(JOB).encode())
    assert load(path) == load(JOB)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UserError, match=r"\[data\] train: is missing"):
        load({**JOB, "data": {"text": "body"}})
    with pytest.raises(UserError, match=r"\[data\] train: is missing"):
        load({key: value for key, value in JOB.items() if key != "data"})


def test_between_sites_a_job_needs_no_rows_of_its_own() -> None:
    sites = {**JOB, "engine": {"name": "flower", "federation": "federation"}}
    [job] = load({key: value for key, value in sites.items() if key != "data"})
    assert job.data == load({**sites, "data": {}})[0].data
    assert load(job.dump()) == [job]


def test_values_have_toml_form_and_a_bare_word_is_a_string() -> None:
    [job] = load(JOB, ["data.train=['a.csv', \"b.csv\"]", "model.name=org/model", "train.dropout=false"])
    assert job.data.train == ["a.csv", "b.csv"]
    assert job.model is not None
    assert job.model.name == "org/model"
    assert job.train.dropout is False


def test_a_preset_lies_under_the_users_own_words() -> None:
    assert load(JOB, ["method.name=fedprox"])[0].train.proximal_mu == 0.01
    assert load(JOB, ["method.name=fedprox", "train.proximal_mu=1.0"])[0].train.proximal_mu == 1.0
    assert load(JOB, ["method.name=fedadam"])[0].server.optimizer == "adam"
    assert load(JOB, ["method.name=fedadam", "server.optimizer=yogi"])[0].server.optimizer == "yogi"


STAGED = {
    **JOB,
    "stages": [
        {"name": "pretrain", "task": {"kind": "mlm"}, "method": {"name": "fedbfpt", "local_layers": 2}},
        {"name": "finetune", "train": {"epochs": 3}},
    ],
}


def test_stages_lie_over_the_common_tables() -> None:
    first, second = load(STAGED)
    assert (first.stage, first.task.kind, method_name(first.method)) == ("pretrain", "mlm", "fedbfpt")
    assert (second.stage, second.task.kind, method_name(second.method)) == ("finetune", "classify", "fedavg")
    assert (first.train.epochs, second.train.epochs) == (1, 3)
    assert first.model is not None
    assert second.model is None, "it starts from the stage before"


def test_overrides_reach_every_stage_or_the_one_named() -> None:
    first, second = load(STAGED, ["train.seed=7", "pretrain.method.rounds=9", "model.name=other"])
    assert (first.train.seed, second.train.seed) == (7, 7)
    assert (first.method.rounds, second.method.rounds) == (9, 5)
    assert first.model is not None
    assert (first.model.name, second.model) == ("other", None)


@pytest.mark.parametrize("order", [1, -1])
def test_another_method_drops_the_options_of_the_first(order: int) -> None:
    first, _ = load(STAGED, ["pretrain.method.name=fedavg", "pretrain.method.rounds=3"][::order])
    assert method_name(first.method) == "fedavg"
    assert first.method.rounds == 3


def test_named_sources_replace_those_below_and_a_word_of_one_adds_it() -> None:
    job = {**STAGED, "data": {"train": {"north": "n.csv", "south": "s.csv"}}}
    job["stages"] = [STAGED["stages"][0], {**STAGED["stages"][1], "data": {"train": {"east": "e.csv"}}}]
    assert [stage.data.train for stage in load(job)] == [job["data"]["train"], {"east": "e.csv"}]
    for words in (['data.train={west = "w.csv"}'], {"data.train": {"west": "w.csv"}}):
        assert [stage.data.train for stage in load(job, words)] == [{"west": "w.csv"}] * 2, "not north too"
    one, _ = load(job, ["pretrain.data.train.north=other.csv", "pretrain.data.train.west=w.csv"])
    assert one.data.train == {"north": "other.csv", "south": "s.csv", "west": "w.csv"}
    ranked = {**JOB, "adapter": {"kind": "lora", "rank": {"default": 4, "north": 16}}}
    assert load(ranked, ["adapter.rank={default = 8}"])[0].adapter.rank == {"default": 8}
    named = load(ranked, ["adapter.rank.St._Mary_s=2"])[0].adapter.rank
    assert named == {"default": 4, "north": 16, "St._Mary_s": 2}, "a client's name has dots"
    scratch = {**JOB, "model": {"config": {"model_type": "bert", "num_hidden_layers": 2}}}
    [made] = load(scratch, ["model.config={vocab_size = 99}"])
    assert made.model is not None
    assert made.model.config == {"model_type": "bert", "num_hidden_layers": 2, "vocab_size": 99}, "this is a table"


def test_words_of_a_sweep_are_left_out_with_it() -> None:
    """A forecast of such a job takes the words that its run does."""
    words = ["sweep.seeds=[1]", "train.seed=7"]
    assert [stage.train.seed for stage in load({**JOB, "sweep": {"seeds": [0]}}, words)] == [7]
    with pytest.raises(UserError, match="sweep: no such key"):
        load(JOB, words)


def test_a_mistake_in_a_stage_names_the_stage() -> None:
    with pytest.raises(UserError, match=r"stage 'pretrain': \[method\] local_layers"):
        load(STAGED, ["pretrain.method.local_layers=0"])


def test_a_tilde_in_the_output_folder_is_the_users_home() -> None:
    [job] = load(JOB, ["output.dir=~/runs"])
    assert job.output.dir == str(Path("~/runs").expanduser())
