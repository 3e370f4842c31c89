"""Mistakes in a method of one's own: one sentence before anything is trained, from a run and from a forecast."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import Field

import fedstrata
from fedstrata import Method, Plan, UserError
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import Streams

Job = Callable[..., dict[str, Any]]
WHOLE = (0, 1, 2)
HEAD = ("head",)


class Given(Method):
    """Plans and words as a test gives them."""

    plans: ClassVar[list[Any]] = []
    words: ClassVar[dict[str, Any]] = {}

    @property
    def exchange(self) -> Any:
        return self.words.get("exchange", "weights")

    @property
    def client_schedule(self) -> Any:
        return self.words.get("client_schedule", "parallel")

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        return Plan(**self.plans[round % len(self.plans)])


def refused(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *plans: dict[str, Any], **words: str) -> str:
    """The sentence that a run and a forecast refuse these plans with."""
    monkeypatch.setattr(Given, "plans", list(plans))
    monkeypatch.setattr(Given, "words", words)
    with pytest.raises(UserError) as of_forecast:
        fedstrata.forecast(job, method=Given(rounds=2))
    with pytest.raises(UserError) as of_run:
        fedstrata.run(job, method=Given(rounds=2))
    assert str(of_run.value) == str(of_forecast.value)
    assert not Path(job["output"]["dir"]).exists()
    return str(of_run.value)


@pytest.mark.parametrize(
    ("field", "found", "items"),
    [
        ("layers", [0, 1, 2], "whole numbers"),
        ("layers", range(3), "whole numbers"),
        ("layers", tuple(np.arange(3)), "whole numbers"),
        ("layers", (0.0, 1.0), "whole numbers"),
        ("train", ["head"], "names of parts"),
        ("train", "head", "names of parts"),
        ("send", {"head"}, "names of parts"),
        ("keep", ["head"], "names of parts"),
        ("server", [1], "names of parts"),
    ],
    ids=str,
)
def test_a_field_is_a_tuple(job: Job, monkeypatch: pytest.MonkeyPatch, field: str, found: Any, items: str) -> None:
    said = refused(job(), monkeypatch, {"layers": WHOLE, "train": HEAD, field: found})
    assert said == f"Given.plan: client-0, round 1: plan.{field}: found {found!r}; expected a tuple of {items}"


def test_a_plan_trains_something(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"layers": WHOLE, "train": HEAD, "send": HEAD}
    said = refused(job(), monkeypatch, plain, {**plain, "train": ()})
    assert said == "Given.plan: client-0, round 2: plan.train: is empty; expected a part that the client trains"


def test_keys_of_another_method_are_no_settings_of_an_object(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They changed nothing, and names of methods to compare were answered with the one object's costs."""
    monkeypatch.setattr(Given, "plans", [{"layers": WHOLE, "train": HEAD, "send": HEAD}])
    beside = {"overrides": ["method.rounds=7"], "methods": ["fedavg", "fedbt"]}
    for name, value in beside.items():
        with pytest.raises(UserError, match=r"^method: an object of Given stands in place of \[method\]"):
            fedstrata.forecast(job(), method=Given(rounds=2), **{name: value})
    with pytest.raises(UserError, match="expected no keys method"):
        fedstrata.run(job(), {"method": {"rounds": 7}}, method=Given(rounds=2))
    [costs] = fedstrata.forecast(job("fedbt"), ["train.epochs=2"], method=Given(rounds=2)).values()
    assert len(costs["rounds"]) == 2


@pytest.mark.parametrize(
    ("plan", "exchange", "sentence"),
    [
        ({"server": ("layer.1",)}, "weights", "plan.server: goes with exchange 'activations', and the method's"),
        ({}, "activations", "plan.server: is empty; with exchange 'activations' expected the layers"),
        ({"freeze_encoder": True}, "weights", "plan.freeze_encoder: goes with a head of the job; expected [head]"),
        ({}, "hidden_states", "plan.freeze_encoder: is False; exchange 'hidden_states' sends those"),
    ],
    ids=["a cut that no batch passes", "nothing cut", "a frozen encoder under a head of its own", "not frozen"],
)
def test_a_plan_goes_with_what_its_method_sends(
    job: Job, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], exchange: str, sentence: str
) -> None:
    small = job("fedavg", "classify", client={"may_send": ["weights", "activations", "hidden_states"]})
    said = refused(small, monkeypatch, {"layers": WHOLE, "train": HEAD, **plan}, exchange=exchange)
    assert said.startswith(f"Given.plan: client-0, round 1: {sentence}")


@pytest.mark.parametrize("layers", [(0, 1), (2, 1, 0)], ids=str)
def test_a_frozen_encoder_is_whole(job: Job, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]) -> None:
    """The hidden states were those of all layers, whatever the plan said."""
    short = {"layers": layers, "train": HEAD, "send": HEAD, "freeze_encoder": True}
    said = refused(job("fedavg", "classify", head={"kind": "cls"}), monkeypatch, short)
    assert said.startswith(
        f"Given.plan: client-0, round 1: plan.layers: is {layers}; with freeze_encoder expected all 3"
    )


def test_an_encoder_is_frozen_throughout_or_not_at_all(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hidden states are computed once."""
    frozen = {"layers": WHOLE, "train": HEAD, "send": HEAD, "freeze_encoder": True}
    trained = {"layers": WHOLE, "train": ("layer.2", "head"), "send": ("layer.2", "head")}
    said = refused(job("fedavg", "classify", head={"kind": "cls"}), monkeypatch, frozen, trained)
    assert said.startswith("Given.plan: some plans freeze the encoder and others train 'layer.2'; expected")


def test_the_server_holds_the_same_layers_throughout(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of the other cut went through the first plan's layers, without a word."""
    first, second = (
        {"layers": WHOLE, "train": HEAD, "send": HEAD, "server": (layer,)} for layer in ("layer.1", "layer.2")
    )
    said = refused(job("fedavg", "classify"), monkeypatch, first, second, exchange="activations")
    assert said == (
        "Given.plan: the server holds layer.1 in some plans and layer.2 in others; expected the same layers in "
        "server in all plans"
    )


@pytest.mark.parametrize("sent", [("layer.2", "head"), ("layer.2",)], ids=["sent", "not sent"])
def test_a_part_is_kept_throughout_or_not_at_all(
    job: Job, monkeypatch: pytest.MonkeyPatch, sent: tuple[str, ...]
) -> None:
    """A client that was not sampled since was scored with another head than its saved model had."""
    kept = {"layers": WHOLE, "train": ("layer.2", "head"), "send": ("layer.2",), "keep": HEAD}
    said = refused(job(), monkeypatch, {"layers": WHOLE, "train": sent, "send": sent}, kept)
    assert said.startswith("Given.plan: some plans keep 'head' and others take it from the server; expected it in")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"exchange": "gradients"}, "exchange: is 'gradients'; expected one of: weights, hidden_states, activ"),
        ({"client_schedule": "serial"}, "client_schedule: is 'serial'; expected one of: parallel, sequential, "),
        ({"client_schedule": "interleaved"}, "client_schedule: 'interleaved' goes with exchange 'activations'"),
    ],
    ids=str,
)
def test_words_that_nothing_goes_by(
    job: Job, monkeypatch: pytest.MonkeyPatch, words: dict[str, str], sentence: str
) -> None:
    said = refused(job(), monkeypatch, {"layers": WHOLE, "train": HEAD}, **words)
    assert said.startswith(f"job: Given.{sentence}")


def test_a_client_keeps_the_same_parts_in_all_rounds(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that the round before had not built its disk held nothing, and the run ended in a KeyError."""
    own = ("layer.2", "head")
    even = {"layers": WHOLE, "train": own, "keep": own}
    odd = {"layers": (0, 1), "train": HEAD, "keep": HEAD}
    said = refused(job("fedavg", "classify"), monkeypatch, even, odd)
    assert said.startswith(
        "Given.plan: client-0 keeps 'layer.2' in some rounds only; expected the same parts in keep"
    )


class Drawn(Given):
    """A layer drawn from numpy's own random numbers."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        layer = parts.layer(int(np.random.randint(1 << 30)) % parts.depth)
        return Plan(layers=WHOLE, train=(layer,), send=(layer,))


def test_a_plan_is_the_same_at_every_call(job: Job) -> None:
    """The forecast, the server and a resumed run each made plans of their own."""
    np.random.seed(1)
    for ask in (fedstrata.forecast, fedstrata.run):
        with pytest.raises(
            UserError, match=r"^Drawn\.plan: client-., round .: asked twice, it gives two plans; exp"
        ):
            ask(job("fedavg", "classify"), method=Drawn(rounds=4))


class Shares(Given):
    """Has a table whose keys are no clients."""

    shares: dict[str, float] = Field(default_factory=lambda: {"low": 0.5, "high": 0.25})


class DeeperByClient(FedBFPT):
    """Has FedBFPT's options, one of which goes by client."""


def test_a_table_of_options_need_not_go_by_client(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys were refused, as the names of clients that there are not."""
    monkeypatch.setattr(Given, "plans", [{"layers": WHOLE, "train": HEAD, "send": HEAD}])
    assert fedstrata.forecast(job("fedavg", "classify"), method=Shares(rounds=1))
    with pytest.raises(UserError, match=r"\[method\] local_layers: no client 'nobody'"):
        fedstrata.forecast(job("fedavg", "mlm"), method=DeeperByClient(rounds=1, local_layers={"nobody": 1}))


class AnyOptions(Given):
    """Has options that TOML cannot write as they are."""

    listed: tuple[int | None, ...] = (1, None)
    names: frozenset[str] = frozenset({"a", "b", "c", "d"})
    rate: Callable[[int], float] = abs


def test_options_of_any_type_are_recorded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ended in the serializer; the order of a set was another one in the process that resumed."""
    monkeypatch.setattr(Given, "plans", [{"layers": WHOLE, "train": HEAD, "send": HEAD}])
    small = job("fedavg", "classify")
    result = fedstrata.run(small, method=AnyOptions(rounds=1))
    recorded = tomllib.loads((result.folder / "job.toml").read_text("utf-8"))["method"]
    assert recorded["listed"] == [1, "none"]
    assert recorded["names"] == ["a", "b", "c", "d"]
    assert recorded["rate"] == "abs"
    assert fedstrata.run(small, method=AnyOptions(rounds=1), resume=True).score == result.score
