"""What a run will cost, told before it: the ledger's own lines, and FLOPs, from plans and shapes.

Nothing here reads a weight or a text: a method's plans, the model's shapes and the lengths of the examples decide
every byte and, but for the number of masked positions, every FLOP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstrata.client.feature_cache import fitting, layout, message_form
from fedstrata.client.trainer import steps
from fedstrata.cost.bytes import payload
from fedstrata.cost.flops import encoder_flops, server_flops, train_flops
from fedstrata.cost.ledger import SETUP, Entry
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.server.server import shared, stale_parts
from fedstrata.wire.activations import message_bytes


@dataclass(frozen=True)
class CostContext:
    """What the costs of a run depend on beside its method.

    Attributes:
        task: the task's kind.
        parts: the model's parts.
        streams: the run's randomness.
        dtype: the wire type.
        fraction: share of the clients asked per round.
        each_round: score after every round, or only after the last.
        own_tests: clients test on rows of their own.
        train: how the clients train.
    """

    task: str
    parts: Parts
    streams: Streams
    dtype: str = "fp32"
    fraction: float = 1.0
    each_round: bool = True
    own_tests: bool = False
    train: Train = field(default_factory=Train)

    def plan(self, method: Method, round: int, client: str) -> Plan:
        """The client's plan for a round."""
        return method.plan(self.parts, self.task, round, client, self.streams)


def asked(method: Method, setting: CostContext, clients: Sequence[str]) -> list[list[str]]:
    """The clients asked in each round."""
    return [sample_clients(clients, setting.fraction, round, setting.streams) for round in range(method.rounds)]


def transfers(
    method: Method,
    setting: CostContext,
    clients: Sequence[str],
    lengths: Mapping[str, Index] | None = None,
    tests: Mapping[str, Index] | None = None,
) -> Iterator[Entry]:
    """The lines that the ledger of a run will hold, in their order, but that clients who train at once mix theirs.

    Args:
        method: makes the plans.
        setting: what else the costs depend on.
        clients: their names.
        lengths: client -> tokens of its examples; needed where clients send features or activations.
        tests: client -> tokens of the examples that it is scored on; needed where clients send activations.
    """
    parts = setting.parts
    versions = dict.fromkeys(parts.names, 0)
    held: dict[str, dict[str, int]] = {}

    def request(round: int, client: str, plan: Plan, phase: str) -> Iterator[Entry]:
        if client not in held and shared(parts, plan):
            for part in parts.names:
                if part not in plan.server:
                    yield Entry(SETUP, client, "setup", "down", part, payload(parts, [part]))
        mine = held.setdefault(client, dict.fromkeys(parts.names, 0))
        for part in stale_parts(parts, plan, mine, versions):
            mine[part] = versions[part]
            yield _entry(round, client, phase, "down", part)

    def _entry(round: int, client: str, phase: str, direction: str, part: str) -> Entry:
        return Entry(round, client, phase, direction, part, payload(parts, [part], setting.dtype))  # type: ignore[arg-type]

    def crossing(round: int, client: str, phase: str, batches: Sequence[Index]) -> Iterator[Entry]:
        through = np.concatenate(batches)
        made = message_bytes(int(through.sum()), len(through), parts.hidden, setting.dtype, len(batches))
        for (way, what), n in made.items():
            if phase == "train" or what == "activations":
                yield Entry(round, client, phase, way, what, n)  # type: ignore[arg-type]

    def evaluate(round: int) -> Iterator[Entry]:
        everyone = {client: setting.plan(method, max(round, 0), client) for client in clients}
        if setting.own_tests or (any(plan.keep for plan in everyone.values()) and round >= 0):
            whole = tuple(range(parts.depth))
            for client, plan in everyone.items():
                scoring = replace(plan, layers=whole, train=(), send=())
                yield from request(round, client, scoring, "evaluate")
            for client in clients if method.exchange == "activations" else ():
                assert tests is not None
                yield from crossing(round, client, "evaluate", [tests[client]])

    if setting.each_round or method.rounds == 0:
        yield from evaluate(-1)
    if method.exchange == "hidden_states":
        assert lengths is not None
        whole = tuple(range(parts.depth))
        for client in clients:
            yield from request(0, client, Plan(whole, (), keep=("head",)), "hidden_states")
            yield Entry(
                0, client, "hidden_states", "up", "hidden_states", features(parts, lengths[client], setting.dtype)
            )
        for round in range(method.rounds):
            for part in setting.plan(method, round, SERVER).train:
                versions[part] += 1
            if setting.each_round or round == method.rounds - 1:
                yield from evaluate(round)
        for client in clients:
            yield from request(method.rounds - 1, client, Plan(whole, ()), "train")
        return
    for round, chosen in enumerate(asked(method, setting, clients)):
        for group in [[client] for client in chosen] if method.client_schedule == "sequential" else [chosen]:
            plans = {client: setting.plan(method, round, client) for client in group}
            for client, plan in plans.items():
                yield from request(round, client, plan, "train")
                for part in plan.send:
                    yield _entry(round, client, "train", "up", part)
                if plan.server:
                    assert lengths is not None
                    order = setting.streams.numpy(round, client, "order")
                    batches = [lengths[client][batch] for _, batch in steps(lengths[client], setting.train, order)]
                    yield from crossing(round, client, "train", batches)
            for part in {part: None for plan in plans.values() for part in plan.send}:
                versions[part] += 1
        if setting.each_round or round == method.rounds - 1:
            yield from evaluate(round)


def through_cut(setting: CostContext, lengths: Index) -> dict[str, int]:
    """What a client sends to the server's layers and gets back of them, in bytes.

    Args:
        setting: how it trains.
        lengths: tokens of each of its examples, ``[n]``.

    Returns:
        ``batch``: of its largest batch; ``epoch``: of all its examples once.
    """
    order = setting.streams.numpy(0, SERVER, "order")
    train = replace(setting.train, epochs=1, steps=None)
    batches = [lengths[batch] for _, batch in steps(lengths, train, order)]
    each = [
        sum(message_bytes(int(batch.sum()), len(batch), setting.parts.hidden, setting.dtype).values())
        for batch in batches
    ]
    return {"batch": max(each), "epoch": sum(each)}


def features(parts: Parts, lengths: Index, dtype: str) -> int:
    """Bytes of what a client sends of texts of these many tokens for the model's head."""
    held = message_form(lengths, max(1, len(parts.head_layers)), parts.hidden, dtype)
    return sum(kind.itemsize * math.prod(shape) for kind, shape in held.values())


def work(
    lengths: Index, train: Train, streams: Streams, round: int, client: str, predicted: Callable[[Index, int], int]
) -> Positions:
    """Positions that a client will compute with in one round.

    Args:
        lengths: tokens of each of its examples, ``[n]``.
        train: how it trains.
        streams: the run's randomness, which makes the batches.
        round: the round.
        client: its name.
        predicted: lengths of a batch and its width -> positions through the head.
    """
    total = Positions()
    for _, batch in steps(lengths, train, streams.numpy(round, client, "order")):
        inside = lengths[batch]
        width = train.width or int(inside.max())
        total += Positions(len(batch) * width, len(batch) * width**2, predicted(inside, width))
    return total


def flops(
    method: Method,
    setting: CostContext,
    holdings: Mapping[str, Index],
    predicted: Callable[[Index, int], int],
    only: Collection[str],
) -> tuple[dict[tuple[int, str], int], int]:
    """FLOPs of the training steps of the clients in ``only``: by (round, client), and in all at the server."""
    train = setting.train
    if method.exchange == "hidden_states":
        return {(0, client): encoder_flops(setting.parts, _read(holdings[client], train)) for client in only}, 0
    made: dict[tuple[int, str], int] = {}
    elsewhere = 0
    met: set[str] = set()
    for round, chosen in enumerate(asked(method, setting, list(holdings))):
        for client in chosen:
            if client in only:
                plan = setting.plan(method, round, client)
                done = work(holdings[client], train, setting.streams, round, client, predicted)
                made[round, client] = train_flops(setting.parts, plan, done)
                elsewhere += server_flops(setting.parts, plan, done)
                if plan.freeze_encoder:
                    first = client not in met
                    made[round, client] += _frozen(setting, holdings[client], train, round, client, first)
                met.add(client)
    return made, elsewhere


def _frozen(setting: CostContext, lengths: Index, train: Train, round: int, client: str, first: bool) -> int:
    """FLOPs of an encoder that stays as it is: once for what can be kept, at every step for what cannot."""
    parts = setting.parts
    kept = fitting(layout(lengths, max(1, len(parts.head_layers)), parts.hidden)[1], train.feature_cache_bytes)
    passes = [lengths[kept]] if first else []
    for _, batch in steps(lengths, train, setting.streams.numpy(round, client, "order")):
        passes.append(lengths[batch][~kept[batch]])
    return sum(encoder_flops(parts, _read(each, train)) for each in passes)


def _read(lengths: Index, train: Train) -> Index:
    """Tokens that a frozen encoder reads of texts of these many."""
    return lengths if train.width is None else np.full_like(lengths, train.width)
