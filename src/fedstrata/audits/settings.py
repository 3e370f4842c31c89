"""How a client's round is played: its own steps, one step, and one step with a single text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedstrata.audits.bench import Bench
from fedstrata.audits.play import Played, play
from fedstrata.audits.public import NAME
from fedstrata.client.steps import steps
from fedstrata.errors import plural
from fedstrata.job.tables import Train
from fedstrata.plan.streams import ORDER

WORK = 2e12
"""Most FLOPs of one play: an audit is to take minutes. The steps of a longer round are cut, and this is said."""
STATES = 512
"""Texts of the client whose hidden states are played, and a third of the public ones."""


@dataclass(frozen=True)
class Setting:
    """One way to play.

    Attributes:
        name: for people.
        train: how the client trains.
        cut: steps of the job's own round, where fewer are played; else 0.
    """

    name: str
    train: Train
    cut: int = 0


def settings(bench: Bench) -> Iterator[Setting]:
    """The settings of a stage, the cheapest first; after the second one the cost of a step is known."""
    train = bench.job.train
    if bench.exchange.payload == "hidden_states":
        yield Setting("all texts", train)
        return
    own = own_steps(bench)
    single = train.model_copy(
        update={"steps": 1, "batch_size": 1, "tokens_per_batch": None, "gradient_accumulation": 1}
    )
    if train.batch_size > 1 and bench.exchange.payload == "weights":
        yield Setting("1 step, 1 text", single)
    yield Setting("1 step", train.model_copy(update={"steps": 1}))
    if own > 1:
        most = max(1, int(WORK / max(1, _step_flops(bench))))
        played = min(own, most)
        yield Setting(plural(played, "step"), train.model_copy(update={"steps": played}), own if own > most else 0)


def own_steps(bench: Bench) -> int:
    """Steps of the client's round as the job has it."""
    lengths = bench.ready.train.tokens.lengths[bench.index]
    order = bench.ready.runtime.trainer.streams.numpy(0, bench.client, ORDER)
    first = next(steps(lengths, bench.job.train, order), None)
    return first.total if first else 0


def _step_flops(bench: Bench) -> float:
    """About the FLOPs of one step: 6 for each weight and token of the longest texts (Kaplan et al. 2020)."""
    train, parts = bench.job.train, bench.parts
    longest = int(np.quantile(bench.ready.train.tokens.lengths[bench.index], 0.9))
    tokens = train.tokens_per_batch or train.batch_size * longest
    weights = sum(sum(part.linear) for part in parts.each if part.kind != "head")
    return 6.0 * weights * tokens * train.gradient_accumulation


def played_pair(bench: Bench, setting: Setting) -> tuple[Played, Played]:
    """The client's round, and the same with public text."""
    train, public = setting.train, np.arange(len(bench.public))
    if bench.exchange.payload == "hidden_states":
        client = play(bench, bench.client, bench.ready.train, bench.index[:STATES], train)
        return client, play(bench, NAME, bench.public, public[: 3 * STATES], train)
    features = bench.folder / "features" / bench.job.stage
    client = play(bench, bench.client, bench.ready.train, bench.index, train, features=features / "client")
    shadow = public[: max(len(bench.index), train.batch_size)]
    per_epoch = max(1, math.ceil(len(shadow) / (train.batch_size * train.gradient_accumulation)))
    epochs = max(train.epochs, math.ceil(client.reply.steps / per_epoch))
    enough = train.model_copy(update={"steps": client.reply.steps, "epochs": epochs})
    return client, play(bench, NAME, bench.public, shadow, enough, features=features / "public")
