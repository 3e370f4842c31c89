"""What one client does in one round, as data; and the form of a method.

A method states its paper in one function, ``plan``; the engine does the rest and never asks which method it runs.
To add a method: one file that subclasses :class:`Method`, and one line in ``fedstrata.methods.METHODS``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field

from fedstrata.plan.kinds import ClientSchedule, Payload, Population
from fedstrata.plan.parts import Parts
from fedstrata.plan.sharing import due, last_sent, turns, without
from fedstrata.plan.streams import SERVER, Streams

Rounds = Annotated[int, Field(ge=1, le=1_000_000)]
"""Number of rounds of a method."""

WORDS = {"population": Population, "exchange": Payload, "client_schedule": ClientSchedule}
"""What a method says in one word -> the words there are."""


@dataclass(frozen=True)
class Plan:
    """What one client does in one round.

    Parts are named as in the *global* model. ``layers[j]`` is the global layer that stands at position ``j`` of
    the client's local model: ``(0, 1, 2)`` is the three lowest; ``(0, 5, 5)`` has layer 5 twice. A trained layer
    stands in it exactly once.

    Attributes:
        layers: global layer index of every local layer, from the embeddings up.
        train: parts whose tensors get gradients; everything else is frozen.
        send: parts that are communicated: up after training, and down, merged, whenever they have changed.
        keep: personal parts: they stay on the client's own disk from round to round and are never sent.
        freeze_encoder: the encoder is frozen in every round and runs without dropout, so that the hidden
            states that the head takes are computed once and cached.
        server: layers that the server holds and trains: adjacent parts. The client's batches pass through them and
            they are never sent.
        between: parts that are sent in turns, each with the first round from which the client's own value of it
            counts. It starts from that where it has one; what it does not send it keeps until the next round.
    """

    layers: tuple[int, ...]
    train: tuple[str, ...]
    send: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    freeze_encoder: bool = False
    server: tuple[str, ...] = ()
    between: tuple[tuple[str, int], ...] = ()

    @property
    def later(self) -> tuple[str, ...]:
        """Trained parts that are sent in a later round."""
        return tuple(part for part, _ in self.between if part not in self.send)

    @property
    def shared(self) -> tuple[str, ...]:
        """Parts that are sent, in this round or in a later one."""
        return (*self.send, *self.later)

    def learning(self, parts: Parts) -> set[str]:
        """The tensors that get gradients: of what is trained what may change, of what is sent what travels.

        So nothing that travels depends on what the others would have become.
        """
        trained, sent = (
            {name for part in own for name in parts.shapes[part]} for own in (self.train, self.shared)
        )
        return trained - parts.fixed - (sent & parts.sharing.omitted)

    def learning_elements(self, parts: Parts) -> int:
        """Number of elements that get gradients."""
        learning = self.learning(parts)
        shapes = (item for part in self.train for item in parts.shapes[part].items())
        return sum(math.prod(shape) for name, shape in shapes if name in learning)

    def local(self, parts: Parts) -> tuple[int, ...]:
        """The layers that the client itself computes with."""
        away = set(parts.depths(self.server))
        return tuple(i for i in self.layers if i not in away)

    def away(self, parts: Parts) -> tuple[str, ...]:
        """The parts that the server holds: its layers, with their adapters."""
        return parts.at_depths_of(self.server)

    def builds(self, parts: Parts) -> tuple[str, ...]:
        """The parts the local model consists of, in the model's order."""
        local = {None, *self.local(parts)}
        return tuple(part.name for part in parts.each if part.depth in local)

    def received(self, parts: Parts) -> tuple[str, ...]:
        """The parts of the local model that come from the server, in the model's order."""
        return tuple(part for part in self.builds(parts) if part not in self.keep)

    def frozen_layers(self, parts: Parts) -> int:
        """Layers of the local model, from the bottom, below which and in which nothing is trained."""
        if any(parts[name].kind == "embeddings" for name in self.train):
            return 0
        trained = set(parts.depths(self.train))
        return next((place for place, i in enumerate(self.layers) if i in trained), len(self.layers))

    def check(self, parts: Parts) -> None:
        """Refuse a plan that the model cannot carry out.

        Raises:
            ValueError: an unknown part or layer, a trained layer that is not built exactly once, a part both
                sent and kept, a sent or kept part that is not built, a part of the encoder trained that is to
                be frozen, or layers of the server that are not adjacent.
        """
        if unknown := [i for i in self.layers if not 0 <= i < parts.depth]:
            raise ValueError(f"plan.layers: {unknown} of a model with {parts.depth} layers")
        if strangers := [name for name in self.server if name not in parts]:
            raise ValueError(f"plan.server: {strangers[0]!r} is no part of the model")
        built = self.builds(parts)
        for field in ("train", "send", "keep"):
            for name in getattr(self, field):
                if name not in built:
                    raise ValueError(f"plan.{field}: {name!r} is not built by layers {self.layers}")
        if twice := [i for i in parts.depths(self.train) if self.layers.count(i) > 1]:
            raise ValueError(f"plan.train: layers {twice} stand in the local model more than once")
        away = set(parts.depths(self.server))
        places = [j for j, i in enumerate(self.layers) if i in away]
        if len(places) != len(self.server) or places != list(range(places[0], places[-1] + 1) if places else []):
            raise ValueError(f"plan.server: {self.server} are not adjacent in layers {self.layers}")
        frozen = {part.name for part in parts.each if part.kind not in ("pooler", "head")}
        if self.freeze_encoder and (trained := frozen & set(self.train)):
            raise ValueError(f"plan.freeze_encoder: {sorted(trained)} of the encoder are trained")
        self._check_sent()

    def _check_sent(self) -> None:
        if idle := {part for part, _ in self.between} - set(self.train):
            raise ValueError(f"plan.between: {sorted(idle)} are not trained")
        if both := set(self.shared) & set(self.keep):
            raise ValueError(f"plan: {sorted(both)} both sent and kept")


class Method(BaseModel, ABC):
    """A method: its options as fields, and the plan it makes of them.

    Attributes:
        rounds: number of rounds.
        population: whom the engine asks.
        preset: settings of other tables of the job that this method's name stands for; the user's own win.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    population: ClassVar[Population] = "each"
    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    rounds: Rounds = 5

    @property
    def exchange(self) -> Payload:
        """What leaves the clients. With ``hidden_states`` they send them once and the server trains."""
        return "weights"

    @property
    def client_schedule(self) -> ClientSchedule:
        """Client schedule within a round."""
        return "parallel"

    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of other tables that the method with these options stands for; the user's own win."""
        return self.preset

    @abstractmethod
    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The plan of ``client`` for ``round`` (0-based).

        Args:
            parts: the model's parts.
            task: the task's kind, such as ``mlm`` or ``classify``.
            round: 0-based round.
            client: the client's name.
            streams: random streams; draw only from ``streams.numpy(round, client, use)``.
        """


def options_of(method: Method) -> dict[str, Any]:
    """A method's options as JSON has them; of a method of the caller's own also functions, by their names.

    A set is in the same order in every process.
    """
    options = method.model_dump(mode="json", fallback=lambda own: getattr(own, "__qualname__", type(own).__name__))
    return {
        name: sorted(value, key=repr) if isinstance(getattr(method, name), Set) else value
        for name, value in options.items()
    }


def wrong_word(method: Method) -> str | None:
    """What is wrong with a word that says how a method of the caller's own is played; None where nothing is."""
    for name, words in WORDS.items():
        if (word := getattr(method, name)) not in (known := get_args(words)):
            return f"{type(method).__name__}.{name}: is {word!r}; expected one of: {', '.join(known)}"
    if method.client_schedule == "interleaved" and method.exchange != "activations":
        return (
            f"{type(method).__name__}.client_schedule: 'interleaved' goes with exchange 'activations', and the "
            f"method's is {method.exchange!r}"
        )
    return None


def make_plan(method: Method, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
    """A method's plan as the job has it carried out: less what is left out of messages, and parts in turns.

    Args: as :meth:`Method.plan`.
    """
    plan, sharing = adapted_plan(method, parts, task, round, client, streams), parts.sharing
    gone = {part for part in plan.send if sharing.leaves_out(parts.shapes[part])}
    if gone:
        plan = replace(plan, train=without(plan.train, gone), send=without(plan.send, gone))
    if sharing.period == 1 or not plan.send:
        return plan
    own, period = _part_turns(method, parts, task, streams), sharing.period
    return replace(
        plan,
        send=tuple(part for part in plan.send if due(own[part], period, round, method.rounds)),
        between=tuple((part, last_sent(own[part], period, round) + 1) for part in plan.send),
    )


def _part_turns(method: Method, parts: Parts, task: str, streams: Streams) -> Mapping[str, int]:
    """Part -> its turn, the same for all clients: first come those that the plan of the server's name sends."""
    key = (repr(method), task, streams)
    if key not in parts.turns:
        sent = adapted_plan(method, parts, task, 0, SERVER, streams).send
        sizes = {part.name: parts.sharing.elements(part.shapes) for part in parts.each}
        order = sorted(sizes, key=lambda part: (part not in sent, -sizes[part]))
        parts.turns[key] = turns({part: sizes[part] for part in order}, parts.sharing.period)
    return parts.turns[key]


def adapted_plan(method: Method, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
    """A method's plan as the model carries it out: with adapters, what it says of a layer holds for its adapter.

    Methods plan by the parts without adapters. A client trains the adapters up to its own rank. Where factors
    alternate it trains and sends B when the layer is sent for the first time, A for the second, and so on, the
    same for all clients; personal adapters are trained whole. Args: as :meth:`Method.plan`.
    """
    plan = method.plan(parts.without_adapters, task, round, client, streams)
    if parts.without_adapters is parts:
        return plan
    train, send, keep = map(parts.adapted, (plan.train, plan.send, plan.keep))
    rank = parts.rank_of(client)
    turns = _turns(method, parts, task, round, streams) if parts.alternate else {}

    def rests(name: str) -> bool:
        """This adapter is not this client's to train, or not in this round."""
        part = parts[name]
        if part.kind != "adapter":  # the head has no depth either, as the adapter of a table
            return False
        above = rank is not None and part.above >= rank
        return above or (name in send and turns.get(part.depth, part.factors) != part.factors)

    return replace(
        plan,
        train=tuple(name for name in train if not rests(name)),
        send=tuple(name for name in send if not rests(name)),
        keep=keep,
    )


def _turns(method: Method, parts: Parts, task: str, round: int, streams: Streams) -> Mapping[int | None, str]:
    """Depth -> the factors whose turn it is in ``round``, by how often its layer was sent in earlier rounds.

    The rounds' parity would not do: a method that comes back to a layer every other round would only ever train
    one of the two. Counted are the plans of the server's own name, so that all clients agree; of a layer that
    these have not sent yet, while those of deeper clients may, every round counts.
    """
    key = (repr(method), task, streams)
    sent = parts.sent_before.setdefault(key, [Counter()])
    while len(sent) <= round + 1:
        plan = method.plan(parts.without_adapters, task, len(sent) - 1, SERVER, streams)
        layers = (parts[name] for name in plan.send if parts[name].kind in ("layer", "embeddings"))
        sent.append(sent[-1] + Counter(part.depth for part in layers))
    depths = {part.depth for part in parts.each if part.kind == "adapter"}
    before = {depth: sent[round][depth] if depth in sent[round + 1] else round for depth in depths}
    return {depth: "a" if count % 2 else "b" for depth, count in before.items()}
