"""How a client's round is played: its own steps, one step, and one step with a single text."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.audits.bench import Bench
from fedstrata.audits.play import Played, play
from fedstrata.audits.public import NAME
from fedstrata.client.steps import steps
from fedstrata.errors import plural
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index
from fedstrata.plan.streams import ORDER
from fedstrata.tasks import Examples

WORK = 2e12
"""Most FLOPs of one play: an audit is to take minutes. The steps of a longer round are cut, and this is said."""
STATES = 512
"""Texts of the client whose hidden states are played, and a third of the public ones."""
DRAWS = 64
"""Most draws of who takes part at level ``example``; where one text is expected, a third of them have one."""


@dataclass(frozen=True)
class Setting:
    """One way to play.

    Attributes:
        name: for people.
        train: how the client trains.
        cut: steps of the job's own round, where fewer are played; else 0.
        worst: the worst case: it is drawn until a single text of the client takes part.
    """

    name: str
    train: Train
    cut: int = 0
    worst: bool = False


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
        yield Setting("1 step, 1 text", single, worst=True)
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
    """The client's round, and the same with public text, of which some takes part: thresholds come from it."""
    train, public = setting.train, np.arange(len(bench.public))
    if bench.exchange.payload == "hidden_states":
        client = play(bench, bench.client, bench.ready.train, bench.index[:STATES], train)
        return client, play(bench, NAME, bench.public, public[: 3 * STATES], train)
    features = bench.folder / "features" / bench.job.stage
    texts = range(1, 2) if setting.worst else range(sys.maxsize)
    own = bench.ready.train, bench.index, train, features / "client"
    client = _drawn(bench, bench.client, *own, texts)
    shadow = public[: max(len(bench.index), train.batch_size)]
    per_epoch = max(1, math.ceil(len(shadow) / (train.batch_size * train.gradient_accumulation)))
    epochs = max(train.epochs, math.ceil(client.reply.steps / per_epoch))
    enough = train.model_copy(update={"steps": client.reply.steps, "epochs": epochs})
    others = bench.public, shadow, enough, features / "public"
    return client, _drawn(bench, NAME, *others, texts if setting.worst else range(1, sys.maxsize))


def _drawn(
    bench: Bench, name: str, examples: Examples, index: Index, train: Train, features: Path, texts: range
) -> Played:
    """A round; where the draw of level ``example`` is not as wanted, it is played again with other random streams.

    Args:
        bench: the stage.
        name: under which the streams of the first draw are drawn.
        examples: all texts.
        index: those that may take part.
        train: how it is trained.
        features: as in :func:`fedstrata.audits.play.play`.
        texts: how many texts may take part; after :data:`DRAWS` plays it may be another number.
    """
    played = play(bench, name, examples, index, train, features=features)
    draws = DRAWS if bench.job.privacy.level == "example" and len(index) else 1
    for draw in range(2, draws + 1):
        if played.texts in texts:
            break
        played = play(bench, f"{name}, draw {draw}", examples, index, train, features=features)
    return played
