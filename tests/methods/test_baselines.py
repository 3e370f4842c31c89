"""The names that preset FedAvg, the runs without a wire, and the menu itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import transformers

import fedstrata
from fedstrata.cost.bytes import payload
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.tables import Job as ResolvedJob
from fedstrata.job.tables import method_name
from fedstrata.methods import METHODS
from fedstrata.methods.fedavg import FedAvg
from fedstrata.models.checkpoints import parts_of
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams
from tiny import tiny_model

Job = Callable[..., dict[str, Any]]
NAMES = [
    "fedavg",
    "fedprox",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "centralized",
    "single",
    "local",
    "none",
    "fedbfpt",
    "fedbt",
    "fedsplitbert",
]
POPULATION = {"centralized": "pooled", "single": "one"}
RULES = {"fedavgm": "momentum", "fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}


def resolved(source: dict[str, Any], overrides: Any = ()) -> ResolvedJob:
    (made,) = load(source, overrides)
    return made


def test_the_menu() -> None:
    assert set(NAMES) <= METHODS.keys()
    for name, method in METHODS.items():
        assert name == name.lower()
        assert method.__doc__
        assert method_name(method()) == name, "two names share a class"


@pytest.mark.parametrize("name", NAMES)
def test_whom_a_method_asks(name: str) -> None:
    assert METHODS[name].population == POPULATION.get(name, "each")


@pytest.mark.parametrize("name", ["fedprox", *sorted(RULES)])
@pytest.mark.parametrize("kind", ["mlm", "classify"])
def test_presets_of_fedavg_plan_as_fedavg(name: str, kind: str) -> None:
    parts = find_parts(tiny_model(head=kind))
    for round in range(2):
        made = METHODS[name]().plan(parts, kind, round, "a", Streams(0))
        assert made == METHODS["fedavg"]().plan(parts, kind, round, "a", Streams(0))


@pytest.mark.parametrize("name", ["centralized", "single", "local"])
@pytest.mark.parametrize("kind", ["mlm", "classify"])
def test_without_a_wire_everything_is_kept_and_nothing_sent(name: str, kind: str) -> None:
    parts = find_parts(tiny_model(head=kind))
    for round, client in ((0, "a"), (4, "b")):
        made = METHODS[name]().plan(parts, kind, round, client, Streams(0))
        made.check(parts)
        assert made == Plan(layers=(0, 1, 2), train=parts.names, send=(), keep=parts.names)


@pytest.mark.parametrize("name", NAMES)
def test_presets(job: Job, name: str) -> None:
    made = resolved(job(name))
    assert made.server.optimizer == RULES.get(name, "sgd")
    assert made.train.proximal_mu == (0.01 if name == "fedprox" else 0.0)
    assert type(made.method) is METHODS[name]
    assert made.method.rounds == (0 if name == "none" else 2)
    assert made.dump()["method"]["name"] == name


def test_a_preset_leaves_the_users_other_keys_alone(job: Job) -> None:
    made = resolved(job("fedprox", train={"learning_rate": 0.5}))
    assert (made.train.proximal_mu, made.train.learning_rate, made.train.batch_size) == (0.01, 0.5, 2)


@pytest.mark.parametrize("mu", [0.0, 0.05])
def test_the_users_value_wins_over_a_preset(job: Job, mu: float) -> None:
    assert resolved(job("fedprox", train={"proximal_mu": mu})).train.proximal_mu == mu
    assert resolved(job("fedprox"), [f"train.proximal_mu={mu}"]).train.proximal_mu == mu
    assert resolved(job("fedadam", server={"optimizer": "yogi"})).server.optimizer == "yogi"
    assert resolved(job("fedadam"), {"server.optimizer": "sgd"}).server.optimizer == "sgd"


def test_a_method_chosen_on_the_command_line_brings_its_preset(job: Job) -> None:
    made = resolved(job("fedbfpt", method={"local_layers": 2}), ["method.name=fedprox"])
    assert made.train.proximal_mu == 0.01
    assert made.method == METHODS["fedprox"](rounds=2)


def test_any_method_takes_any_server_optimizer(job: Job) -> None:
    made = resolved(job("fedbfpt", server={"optimizer": "adam"}, train={"proximal_mu": 0.1}))
    assert (made.server.optimizer, made.train.proximal_mu) == ("adam", 0.1)


class Toy(Method):
    """One layer of the user's choice."""

    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {"wire": {"dtype": "fp16"}}

    layer: int = 0
    way: Literal["up", "down"] = "up"

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        own = (f"layer.{self.layer}",)
        return Plan(tuple(range(parts.depth)), own, own)


def test_a_method_is_one_class_and_one_line(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "toy", Toy)
    made = resolved(job("toy"), ["method.layer=2"])
    assert made.method == Toy(rounds=2, layer=2)
    assert made.wire.dtype == "fp16"
    dumped = made.dump()
    assert dumped["method"] == {"name": "toy", "rounds": 2, "layer": 2, "way": "up"}
    again = {key: value for key, value in dumped.items() if key != "stage"}
    assert resolved(again).method == made.method
    parts = find_parts(tiny_model())
    assert made.method.plan(parts, "mlm", 0, "a", Streams(0)).send == ("layer.2",)
    with pytest.raises(UserError, match=r"\[method\].*layr: no such key; did you mean 'layer'"):
        load(job("toy", method={"layr": 1}))


def test_a_method_that_is_not_on_the_menu_is_unknown(job: Job) -> None:
    with pytest.raises(UserError, match="'toy' is not a method"):
        load(job("toy"))


SMALL = {
    "DistilBERT": (transformers.DistilBertConfig(), 6, 267_942_120),
    "TinyBERT-6": (transformers.BertConfig(num_hidden_layers=6), 6, 267_948_264),
    "TinyBERT-4": (
        transformers.BertConfig(hidden_size=312, intermediate_size=1200, num_hidden_layers=4),
        4,
        57_525_576,
    ),
}


@pytest.mark.parametrize(("config", "depth", "sent"), SMALL.values(), ids=SMALL)
def test_small_models_are_sent_whole_as_what_they_are(config: Any, depth: int, sent: int, tmp_path: Path) -> None:
    """By their own config; FedBFPT's published DistilBERT row is a BERT of 12 layers, by the wrong class."""
    config.save_pretrained(tmp_path)
    parts = parts_of(str(tmp_path), "mlm")
    assert parts.depth == depth
    assert payload(parts, FedAvg().plan(parts, "mlm", 0, "a", Streams(0)).send) == sent


def test_a_distilbert_stays_one(job: Job, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """From its own weights: nothing is new, and what comes out loads as a DistilBERT again."""
    made = job("fedavg", "mlm", 3)
    made["model"]["name"] = str(model_folder("distilbert"))
    notes: list[str] = []
    result = fedstrata.run(made, progress=lambda event: notes.extend(getattr(event, "notes", ())))
    assert [note for note in notes if "the server can read" not in note] == []
    model = transformers.AutoModelForMaskedLM.from_pretrained(result.model_folder)
    assert type(model).__name__ == "DistilBertForMaskedLM"
    start = transformers.AutoModelForMaskedLM.from_pretrained(made["model"]["name"])
    changed = [name for name, p in model.named_parameters() if not p.equal(start.get_parameter(name))]
    assert len(changed) == len(list(model.named_parameters()))
