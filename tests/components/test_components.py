"""Objects of a caller's own, defined here: a method, a task, a codec, an aggregate, a server optimizer."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import fedstrata
from fedstrata import Method, Plan, UserError
from fedstrata.plan import components
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Task, TaskContext, build_task
from fedstrata.tasks.batches import Batch
from fedstrata.tasks.task import Predicted
from fedstrata.wire.codec import Shapes, Spec

Jobs = Callable[..., dict[str, Any]]


class TopLayer(Method):
    """Trains the top layers and the head, from one round to the next one more."""

    layers: int = 1

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        own = (*parts.layers(parts.depth - min(self.layers + round, parts.depth)), "head")
        return Plan(layers=tuple(range(parts.depth)), train=own, send=own)


@dataclass(frozen=True)
class Largest:
    """Sends the largest tenth of each tensor's change, with error feedback; else whole tensors."""

    share: float = 0.1
    name: str = "largest"
    changes: bool = True

    def count(self, shape: tuple[int, ...]) -> int:
        return max(1, int(self.share * torch.Size(shape).numel()))

    def wire_spec(self, shapes: Shapes, change: bool) -> Spec:
        if not change:
            return {name: (torch.float32, shape) for name, shape in shapes.items()}
        values = {f"{name}:values": (torch.float32, (self.count(shape),)) for name, shape in shapes.items()}
        places = {f"{name}:places": (torch.int32, (self.count(shape),)) for name, shape in shapes.items()}
        return values | places

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        if reference is None:
            return {name: tensor.float() for name, tensor in tensors.items()}, {}
        message, left = {}, {}
        for name, tensor in tensors.items():
            change = (tensor - reference[name] + residual.get(name, 0.0)).flatten()
            places = change.abs().topk(self.count(tuple(tensor.shape))).indices
            message[f"{name}:values"], message[f"{name}:places"] = change[places], places.int()
            left[name] = change.index_fill(0, places, 0.0).reshape(tensor.shape)
        return message, left

    def decode(self, message: Tensors, reference: Tensors | None) -> Tensors:
        if reference is None:
            return dict(message)
        whole = {}
        for name, tensor in reference.items():
            flat = tensor.flatten().clone()
            flat[message[f"{name}:places"].long()] += message[f"{name}:values"]
            whole[name] = flat.reshape(tensor.shape)
        return whole


class AddsToTheReference(Largest):
    """Decodes into the tensors that it is given."""

    def decode(self, message: Tensors, reference: Tensors | None) -> Tensors:
        for name in reference or {}:
            reference[name].flatten().add_(0.0)
        return super().decode(message, reference)


class HalvesWhatItSends(Largest):
    """Works in the tensors that it is to send."""

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        return super().encode({name: tensor.mul_(0.5) for name, tensor in tensors.items()}, reference, residual)


@dataclass
class Median:
    """The median over clients, element by element, whatever their weights."""

    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        for name, tensor in tensors.items():
            self.tensors.setdefault(name, []).append(tensor.clone())

    def result(self) -> Tensors:
        return {name: torch.stack(values).median(0).values for name, values in self.tensors.items()}


@dataclass(frozen=True)
class Halfway:
    """Half a step towards the aggregate, and a memory of how many there were."""

    share: float = 0.5

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        moments["steps"] = moments.get("steps", torch.zeros(1)) + 1
        return old + self.share * (aggregate - old)


class HalfwayInPlace:
    """The same as torch's optimizers do it: in the tensor that it is given."""

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        return old.add_((aggregate - old) / 2)


class HalfwayBeside:
    """The same in a new tensor, to the bit."""

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        return old.clone().add_((aggregate - old) / 2)


class Smooth:
    """Classification with label smoothing; all but the loss is the job's own task."""

    def __init__(self, context: TaskContext) -> None:
        self.plain: Task = build_task(context)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # of a copy for a worker, which has nothing yet
            raise AttributeError(name)
        return getattr(self.plain, name)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(**batch.inputs).logits, batch.targets, label_smoothing=0.3)


class OwnScore(Smooth):
    """A fixed accuracy, and the number of texts in place of a loss."""

    def score(self, model: torch.nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        return {"accuracy": 0.125, "loss": float(sum(len(batch.targets) for batch in batches))}


class OwnMetrics(Smooth):
    """The same by way of predictions."""

    def metrics(self, predicted: Iterable[Predicted]) -> dict[str, float]:
        found = list(predicted)
        texts = sum(len(batch.guess) for batch in found)
        return {**self.plain.metrics(found), "accuracy": 0.125, "loss": float(texts)}  # type: ignore[attr-defined]


OWN: dict[str, dict[str, Any]] = {
    "method": {"method": TopLayer(rounds=2)},
    "task": {"task": Smooth},
    "codec": {"codec": Largest()},
    "aggregate": {"aggregate": Median},
    "server optimizer": {"server_optimizer": Halfway()},
    "all": {
        "method": TopLayer(rounds=2),
        "task": Smooth,
        "codec": Largest(),
        "aggregate": Median,
        "server_optimizer": Halfway(),
    },
}


def weights(folder: Path) -> Tensors:
    tensors: Tensors = load_file(folder / "model" / "model.safetensors")
    return tensors


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_a_run_with_own_components_is_forecast_to_the_byte(job: Jobs, tmp_path: Path, own: dict[str, Any]) -> None:
    small = job("fedavg", "classify")
    result = fedstrata.run(small, **own)
    [costs] = fedstrata.forecast(small, **own).values()
    assert result.status == "finished"
    assert costs["clients"]["up_bytes"] == result.bytes["up"]
    assert costs["clients"]["down_bytes"] == result.bytes["down"]
    assert costs["clients"]["train_flops"] == result.flops
    plain = fedstrata.run(job("fedavg", "classify", output={"dir": str(tmp_path / "plain")}))
    differ = [not tensor.equal(weights(plain.folder)[name]) for name, tensor in weights(result.folder).items()]
    assert any(differ)


def test_own_method_trains_what_its_plan_says(job: Jobs) -> None:
    result = fedstrata.run(job("fedavg", "classify"), method=TopLayer(rounds=2))
    sent = {(line["round"], line["part"]) for line in result.transfers if line["direction"] == "up"}
    assert sent == {(0, "layer.2"), (0, "head"), (1, "layer.1"), (1, "layer.2"), (1, "head")}


@pytest.mark.parametrize("task", [OwnScore, OwnMetrics])
@pytest.mark.parametrize("where", ["the server's rows", "the clients' rows"])
def test_a_task_s_own_scores_stand(job: Jobs, tmp_path: Path, task: type[Smooth], where: str) -> None:
    """Of a wrapped task whose own predictions would say otherwise."""
    small = job("fedavg", "classify", output={"predictions": True})
    if where == "the clients' rows":
        small["data"].pop("test")
        small["clients"] = {"count": 2, "test": 0.5}
    for engine in ("inprocess", "pool"):
        result = fedstrata.run(small, {"engine.name": engine, "output.dir": str(tmp_path / engine)}, task=task)
        texts = 12 if where == "the server's rows" else 3
        assert {name: result.score[name] for name in ("accuracy", "loss")} == {"accuracy": 0.125, "loss": texts}
        told = task is OwnMetrics and where == "the server's rows"
        assert (result.folder / "predictions.jsonl").exists() == told


def test_own_codec_sends_a_fifth_of_the_bytes_and_comes_close(job: Jobs, tmp_path: Path) -> None:
    """A tenth of the values and as many places; of what is left out nothing is lost, so all of them sum up."""
    dense = fedstrata.run(job("fedavg", "classify", output={"dir": str(tmp_path / "dense")}))
    sparse = fedstrata.run(job("fedavg", "classify"), codec=Largest())
    assert sparse.bytes["up"] == pytest.approx(0.2 * dense.bytes["up"], rel=0.02)
    whole = fedstrata.run(
        job("fedavg", "classify", output={"dir": str(tmp_path / "whole")}), codec=Largest(share=1.0)
    )
    for name, tensor in weights(whole.folder).items():
        torch.testing.assert_close(tensor, weights(dense.folder)[name], atol=1e-6, rtol=1e-5)


def test_a_codec_of_changes_has_a_reference_from_the_first_message_up(job: Jobs) -> None:
    """As the guide on codecs says."""
    known = []

    @dataclass(frozen=True)
    class Watched(Largest):
        def encode(
            self, tensors: Tensors, reference: Tensors | None, residual: Tensors
        ) -> tuple[Tensors, Tensors]:
            known.append(reference is not None)
            return super().encode(tensors, reference, residual)

    fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), codec=Watched())
    parts = 5  # embeddings, three layers, head; what goes down after the round is scored as it was received
    assert known[: 3 * parts] == [True] * 3 * parts


def test_an_optimizer_may_move_a_tensor_in_place(job: Jobs, tmp_path: Path) -> None:
    """The changes that travel were then reckoned against weights that had moved already."""
    found = [
        fedstrata.run(
            job("fedavg", wire={"codec": "delta"}, output={"dir": str(tmp_path / type(own).__name__)}),
            server_optimizer=own,
        )
        for own in (HalfwayBeside(), HalfwayInPlace())
    ]
    beside, inside = (weights(result.folder) for result in found)
    assert all(torch.equal(beside[name], inside[name]) for name in beside)


def test_own_aggregate_is_the_median(job: Jobs, tmp_path: Path) -> None:
    """Of three clients in one round; their own models are those of three runs of one client each."""
    one_round = {"rounds": 1}
    result = fedstrata.run(job("fedavg", "classify", method=one_round), aggregate=Median)
    seen: list[Tensors] = []

    class Watching(Median):
        def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
            seen.append({name: tensor.clone() for name, tensor in tensors.items()})
            super().add(tensors, weight, client)

    fedstrata.run(
        job("fedavg", "classify", method=one_round, output={"dir": str(tmp_path / "seen")}), aggregate=Watching
    )
    sent = {name: [tensors[name] for tensors in seen if name in tensors] for tensors in seen for name in tensors}
    for name, tensor in weights(result.folder).items():
        if name in sent:
            assert tensor.equal(torch.stack(sent[name]).median(0).values), name


@dataclass(frozen=True)
class Halves:
    """Whole tensors in 16 bits, under any name."""

    name: str
    changes: bool = False

    def wire_spec(self, shapes: Shapes, change: bool) -> Spec:
        return {name: (torch.float16, shape) for name, shape in shapes.items()}

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        return {name: tensor.half() for name, tensor in tensors.items()}, {}

    def decode(self, message: Tensors, reference: Tensors | None) -> Tensors:
        return {name: tensor.float() for name, tensor in message.items()}


def test_a_codec_s_name_changes_nothing(job: Jobs, tmp_path: Path) -> None:
    """One that was called fp32 was taken for lossless: the model was scored with what clients had received."""
    first, second = (
        fedstrata.run(job("fedavg", "classify", output={"dir": str(tmp_path / name)}), codec=Halves(name))
        for name in ("halves", "fp32")
    )
    assert first.score == second.score
    assert all(tensor.equal(weights(second.folder)[name]) for name, tensor in weights(first.folder).items())


@pytest.mark.parametrize("other", [Largest(share=0.2), None])
def test_a_run_goes_on_with_the_same_components_only(job: Jobs, other: Any) -> None:
    small = job("fedavg", "mlm", method={"rounds": 3})

    def stop(event: Any) -> None:
        if type(event).__name__ == "Scored" and event.round == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(small, codec=Largest(), progress=stop)
    with pytest.raises(UserError, match="components"):
        fedstrata.run(small, resume=True, **({"codec": other} if other else {}))
    resumed = fedstrata.run(small, resume=True, codec=Largest())
    unbroken = fedstrata.run({**small, "output": {"dir": small["output"]["dir"] + "-2"}}, codec=Largest())
    assert all(t.equal(weights(unbroken.folder)[name]) for name, t in weights(resumed.folder).items())


def test_a_run_of_an_own_method_gets_more_rounds(job: Jobs, tmp_path: Path) -> None:
    small = job("fedavg", "classify", output={"keep_state": True})
    fedstrata.run(small, method=TopLayer(rounds=1))
    more = fedstrata.run(small, method=TopLayer(rounds=2), resume=True)
    unbroken = fedstrata.run({**small, "output": {"dir": str(tmp_path / "unbroken")}}, **OWN["method"])
    assert all(t.equal(weights(unbroken.folder)[name]) for name, t in weights(more.folder).items())
    with pytest.raises(UserError, match=r"method\.layers = 1, the job now says 2"):
        fedstrata.run(small, method=TopLayer(rounds=2, layers=2), resume=True)
    assert components.identity(TopLayer()) == components.identity(TopLayer(layers=1, rounds=9))
    assert components.identity(TopLayer()) != components.identity(TopLayer(layers=2))


@pytest.mark.parametrize("make", [dict, fedstrata.Job], ids=["content", "object"])
def test_a_method_that_the_job_itself_holds_is_compared_too(
    job: Jobs, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: Any) -> None:
        if type(event).__name__ == "Scored" and event.round == 0:
            raise KeyboardInterrupt

    small = make(**{**job("fedavg", "classify"), "method": TopLayer(rounds=2)})
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(small, progress=stop)
    with monkeypatch.context() as changed:
        real = inspect.getsource
        changed.setattr(inspect, "getsource", lambda kind: real(kind).replace("min(", "max("))
        with pytest.raises(UserError, match=r"its run began with components\.method = .*TopLayer"):
            fedstrata.run(small, resume=True)
    result = fedstrata.run(small, resume=True)
    recorded = tomllib.loads((result.folder / "job.toml").read_text("utf-8"))["components"]
    assert recorded == {"method": components.identity(TopLayer(rounds=2))}


def test_identity_follows_source_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    same = components.identity(Largest())
    assert same == components.identity(Largest())
    assert same.startswith(f"{Largest.__module__}.Largest ")
    assert components.identity(replace(Largest(), share=0.2)) != same
    real = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda kind: real(kind).replace("0.0", "1.0"))
    assert components.identity(Largest()) != same


def test_identity_follows_settings_of_any_plain_kind() -> None:
    class Scheduled:
        def __init__(self, shares: Any) -> None:
            self.shares = shares

    plain = (None, 1, "1", [1, 2], [2, 1], {"a": [1]}, {"a": [2]})
    assert len({components.identity(Scheduled(shares)) for shares in plain}) == len(plain)
    assert components.identity(Scheduled(object())) == components.identity(Scheduled(object()))


def test_identity_follows_the_source_of_a_base_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Smaller(Largest):
        share = 0.01

    same = components.identity(Smaller())
    real = inspect.getsource
    changed = {Largest: real(Largest).replace("0.0", "1.0")}
    assert changed[Largest] != real(Largest)
    monkeypatch.setattr(inspect, "getsource", lambda kind: changed.get(kind) or real(kind))
    assert components.identity(Smaller()) != same


def test_between_sites_a_class_has_to_be_installed() -> None:
    with pytest.raises(UserError, match=r"codec: Largest is not installed.*'fedstrata\.codecs'"):
        components.installed_name("codec", Largest())


def test_unknown_components_are_refused(job: Jobs) -> None:
    with pytest.raises(TypeError, match="optimiser"):
        fedstrata.run(job("fedavg", "mlm"), optimiser=Halfway())


@dataclass(frozen=True, slots=True)
class Slotted:
    share: Any


def surrounded(share: Any) -> Callable[[TaskContext], Any]:
    def build(context: TaskContext) -> Any:
        return share

    return build


def with_share(context: TaskContext, share: Any) -> Any:
    return share


@pytest.mark.parametrize(
    "made",
    [Slotted, surrounded, lambda share: partial(with_share, share=share), lambda share: partial(Slotted, share)],
    ids=["slots", "surroundings", "keyword", "argument"],
)
def test_identity_follows_settings_wherever_they_are(made: Callable[[Any], Any]) -> None:
    numbers = (1, 2, np.int64(3), np.float32(0.5), Fraction(1, 3), Fraction(2, 3), 2j)
    shares = (*numbers, {"a"}, {"b"}, Largest(0.1), Largest(0.2))
    identities = {components.identity(made(share)) for share in shares}
    assert len(identities) == len(shares)
    assert identities == {components.identity(made(share)) for share in shares}


@pytest.mark.parametrize(("codec", "method"), [(AddsToTheReference(), "decode"), (HalvesWhatItSends(), "encode")])
def test_a_codec_that_changes_what_it_is_given_is_refused(job: Jobs, codec: Any, method: str) -> None:
    """The run went on with the changed weights, without a word."""
    sentence = f"codec 'largest': {method} changes in place what it is given; expected new tensors"
    with pytest.raises(UserError, match=sentence):
        fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), codec=codec)


class Counts(Largest):
    """Sends less of a change with every message, by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["sent"] = 0  # of a frozen data class

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        self.__dict__["sent"] += 1
        return super().encode(
            {name: t / self.__dict__["sent"] for name, t in tensors.items()}, reference, residual
        )


class Draws(Largest):
    """Rounds at random."""

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        return super().encode({name: t + torch.rand(()) for name, t in tensors.items()}, reference, residual)


class DrawsFromNumpy(Largest):
    """Rounds at random, by numpy."""

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        return super().encode({name: t + np.random.rand() for name, t in tensors.items()}, reference, residual)


class Momentum:
    """Remembers the last change in itself, as torch's optimizers do."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, ...], torch.Tensor] = {}

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        key = tuple(old.shape)
        self.last[key] = 0.9 * self.last.get(key, torch.zeros(())) + aggregate - old
        return old + self.last[key]


class Computed(Largest):
    """Computes something once."""

    @cached_property
    def third(self) -> torch.Tensor:
        return torch.ones(()) / 3

    def encode(self, tensors: Tensors, reference: Tensors | None, residual: Tensors) -> tuple[Tensors, Tensors]:
        return super().encode({name: t * self.third for name, t in tensors.items()}, reference, residual)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"codec": Counts()}, "codec 'largest': encode changes its own 'sent', which workers and a resumed"),
        ({"codec": Draws()}, "codec 'largest': encode draws from torch's own random numbers, which differ"),
        ({"codec": DrawsFromNumpy()}, "codec 'largest': encode draws from numpy's own random numbers, which"),
        ({"server_optimizer": Momentum()}, r"server_optimizer: Momentum\.step changes its own 'last', .*moments"),
    ],
    ids=["a number", "random numbers", "numpy's", "tensors"],
)
def test_what_an_object_remembers_by_itself_is_refused(job: Jobs, own: dict[str, Any], sentence: str) -> None:
    """Workers had copies of it and a resumed run a new one, so both came to other weights, without a word."""
    with pytest.raises(UserError, match=sentence):
        fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), **own)


class CountsSteps(Smooth):
    """A loss that falls with the number of its calls."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self.steps = 0

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        self.steps += 1
        return super().loss(model, batch) / self.steps


class DropsWords(Smooth):
    """Batches of which torch's own random numbers take a part away."""

    def batch(self, *given: Any) -> Batch:
        made = self.plain.batch(*given)
        kept = torch.rand(made.inputs["input_ids"].shape) > 0.5
        return replace(made, inputs={**made.inputs, "input_ids": made.inputs["input_ids"] * kept})


class WeighsOnce(Smooth):
    """Makes its weights when they are first needed."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self.weights: torch.Tensor | None = None

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if self.weights is None:
            self.weights = torch.ones(3)
        return functional.cross_entropy(model(**batch.inputs).logits, batch.targets, weight=self.weights)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (CountsSteps, "^task: CountsSteps changes its own 'steps', which workers and a resumed run do not have"),
        (DropsWords, r"^task: DropsWords\.batch draws from torch's own random .*; expected its argument draw"),
    ],
)
def test_what_a_task_remembers_by_itself_is_refused(job: Jobs, own: Any, sentence: str) -> None:
    """The weights depended on the number of workers, and on whether the run was resumed."""
    with pytest.raises(UserError, match=sentence):
        fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), task=own)


def test_a_task_may_compute_something_when_it_is_first_needed(job: Jobs) -> None:
    assert fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), task=WeighsOnce).status == "finished"


def test_what_an_object_computes_once_is_not(job: Jobs) -> None:
    assert fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), codec=Computed()).status == "finished"


class Wide(Median):
    """Reckons in fp64."""

    def result(self) -> Tensors:
        return {name: tensor.double() for name, tensor in super().result().items()}


class WideStep:
    """Steps in fp64."""

    def step(self, old: torch.Tensor, aggregate: torch.Tensor, moments: Tensors) -> torch.Tensor:
        return (old.double() + aggregate.double()) / 2


class NoBiases(Median):
    """Leaves out what was sent."""

    def result(self) -> Tensors:
        return {name: tensor for name, tensor in super().result().items() if not name.endswith("bias")}


class OneNumber(Median):
    """Has one number for each tensor."""

    def result(self) -> Tensors:
        return {name: tensor.mean() for name, tensor in super().result().items()}


@pytest.mark.parametrize("own", [{"aggregate": Wide}, {"server_optimizer": WideStep()}], ids=["aggregate", "step"])
def test_a_model_stays_in_fp32(job: Jobs, own: dict[str, Any]) -> None:
    """It was saved in fp64, twice as large."""
    result = fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), **own)
    assert {tensor.dtype for tensor in weights(result.folder).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            NoBiases,
            r"^aggregate: NoBiases\.result has no bert\.embeddings\.LayerNorm\.bias; expected a tensor for",
        ),
        (
            OneNumber,
            r"^aggregate: OneNumber\.result gives bert\.embeddings\.\S+ the shape \(\); expected \(\d+, 32\)",
        ),
    ],
)
def test_a_result_has_the_tensors_that_were_sent(job: Jobs, own: Any, sentence: str) -> None:
    """The run ended in a KeyError, or went on with what torch had broadcast."""
    with pytest.raises(UserError, match=sentence):
        fedstrata.run(job("fedavg", "classify", method={"rounds": 1}), aggregate=own)
