"""What a site's reply is checked for before the run sees it: a reply that fails counts as none."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from fedstrata.errors import plural
from fedstrata.exchanges.hidden_states import PART
from fedstrata.job.metrics import RANGES
from fedstrata.job.tables import Task
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.server.server import HUGE, Server
from fedstrata.tasks.classify import positive_classes
from fedstrata.wire.codec import SCALE, WireError
from fedstrata.wire.foreign import plain_text
from fedstrata.wire.int8 import LEVELS
from fedstrata.wire.on_disk import let_go

MARGIN = 10.0
"""A reply's weight may be larger than ``HUGE`` where the server's own part has one a tenth as large."""
MOST_LOSS = 1e12
"""Largest training loss, and largest number to learn: its square is finite."""
MOST_STATE = 1e6
"""Largest number of a hidden state: more than ten times what fp16 holds."""
LONGEST_METRIC = 200
"""Most characters of a metric's name with its pool."""
MOST_SCORE = 1e300
"""Largest number of a metric that nobody here knows: the sum over all sites is finite."""
ROUNDING = 1e-6
"""By which a metric that was summed may leave its range."""


def check_reply(
    server: Server,
    request: Request,
    reply: Reply,
    metrics: Collection[str] | None,
    told: bool = True,
    needed: Collection[str] = (),
) -> None:
    """Refuse a reply that must not be used.

    Args:
        server: what the reply must hold.
        request: what was asked.
        reply: the reply; tensors are looked at, not decoded.
        metrics: metrics of the run's task; None for a task of the caller's own, whose metrics nobody here knows.
        told: whether clients tell their training loss, as they do where no noise hides it.
        needed: metrics that every score has, see :func:`needed_metrics`.

    Raises:
        WireError: it diverged, or does not hold what was asked for and no more.
    """
    if request.phase == "train":
        _check_loss(reply.loss)
    if request.phase == "train" and not request.sums:  # of a masked sum its receiver knows what it must hold
        if told and reply.loss is None:
            raise WireError("does not tell its training loss")
        _check_trained(server, request, reply)
    else:
        asked = {"hidden_states": {PART}, "train": set(request.plan.send)}.get(request.phase, set())
        _check_parts(reply.weights.keys(), asked)
        _check_states(reply.weights.get(PART, {}), reply.examples)
    _check_scores(reply.scores, request, metrics, needed)


def _check_loss(loss: float | None) -> None:
    """Refuse a training loss that would stop the run; beside a masked sum too, where an honest site tells none."""
    if loss is not None and not abs(loss) <= MOST_LOSS:  # also where it is not a number
        raise WireError(f"diverged (loss {loss:.3g}); a smaller train.learning_rate helps")


def _check_trained(server: Server, request: Request, reply: Reply) -> None:
    _check_parts(reply.weights.keys(), request.plan.send)
    try:
        server.check(request.plan, reply)
        for part, message in reply.weights.items():
            _check_size(part, message, server.weights[part])
            let_go(message.values())
    except WireError as error:
        raise WireError(f"sends what cannot be used: {error}") from None


def _check_parts(found: Collection[str], asked: Collection[str]) -> None:
    if strange := sorted(set(found) - set(asked)):
        raise WireError(f"sends what it was not asked for: {plain_text(strange[0], 100)}")
    if lacking := sorted(set(asked) - set(found)):
        raise WireError(f"sends what cannot be used: {lacking[0]}: is missing")


def _check_states(message: Tensors, examples: int) -> None:
    """Refuse hidden states of other than the site's examples, and numbers by which a training overflows."""
    if "labels" in message and message["labels"].shape[:1] != (examples,):
        found = message["labels"].numel()
        raise WireError(f"sends what cannot be used: hidden states of {found} texts, and has {examples} examples")
    for name, tensor in message.items():
        most = MOST_LOSS if name == "labels" else MOST_STATE
        if tensor.is_floating_point() and (largest := _reach(name, tensor)) > most:
            raise WireError(
                f"sends what cannot be used: {name} hold a number of {largest:.3g}, at most {most:.3g} is taken"
            )
        let_go([tensor])


def _check_size(part: str, message: Tensors, own: Tensors) -> None:
    """Refuse numbers that no model holds that learns: they overflow in the mean, or one of them rules it."""
    for name, tensor in message.items():
        if tensor.is_floating_point() and (largest := _reach(name, tensor)) > HUGE:
            most = max(HUGE, MARGIN * max(map(_largest, own.values())))
            if largest > most:
                raise WireError(f"{part}: {name} has a number of {largest:.3g}, at most {most:.3g} is taken")


def _reach(name: str, tensor: torch.Tensor) -> float:
    """The largest number that a tensor of a message may stand for: a scale is for whole numbers of int8."""
    return _largest(tensor) * (LEVELS if name.endswith(SCALE) else 1)


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    least, most = torch.aminmax(tensor)
    return max(-float(least), float(most))


def needed_metrics(task: Task, labels: Sequence[str] | None) -> set[str]:
    """The metrics that every score has: those that are known here; of classes ``f1`` only where some are positive.

    Args:
        task: the job's ``[task]``.
        labels: class names in order; None where the task has none.
    """
    kind = TASK_KINDS[task.kind]
    needed = {name for name in kind.metrics if name in RANGES} | ({"loss"} if kind.classes else set())
    if kind.target == "class" and not positive_classes(labels or (), task.positive, False):
        needed.discard("f1")
    return needed


def _check_scores(
    scores: Mapping[str, Mapping[str, float]],
    request: Request,
    metrics: Collection[str] | None,
    needed: Collection[str],
) -> None:
    """A site scores itself, with numbers that its task's metrics can have, and with all of them."""
    asked = {request.client} if request.phase == "evaluate" else set()
    if scores.keys() != asked:
        whose = ", ".join(plain_text(name, 100) for name in sorted(scores)) or "nobody"
        raise WireError(f"scores {whose}, but was asked for a score of {', '.join(asked) or 'nobody'}")
    for score in scores.values():
        for name, value in score.items():
            kind = name.partition(".")[0]  # METRIC.POOL is a metric on some of the rows
            if plain_text(name, LONGEST_METRIC) != name:
                raise WireError(f"its score has a metric {plain_text(name, 100)!r}, which is no plain name")
            if metrics is not None and kind not in metrics:
                raise WireError(f"its score has a metric {plain_text(name, 100)!r}, which the task has not")
            least, most = RANGES[kind] if metrics is not None and kind in RANGES else (-MOST_SCORE, MOST_SCORE)
            if not math.isfinite(value) or not least - ROUNDING <= value <= most + ROUNDING:
                raise WireError(f"its score of {plain_text(name, 100)} is {value}, which cannot be: it diverged")
        if lacking := sorted(set(needed) - score.keys()):
            raise WireError(f"its score lacks {', '.join(lacking)}")


def weight_notes(examples: Mapping[str, int], most: Mapping[str, int], level: str = "none") -> list[str]:
    """Whose word on its own examples is not taken, and who would outweigh all others, a sentence each.

    Args:
        examples: site -> its examples, as it said at the greeting.
        most: site -> most examples for which it counts.
        level: of the job's noise; at ``client`` every site counts as one.
    """
    why = "[privacy] level = 'client'" if level == "client" else "[limits] max_weight in server.toml"
    counted = {name: min(number, most.get(name, number)) for name, number in examples.items()}
    lines = [
        f"{name} says that it has {plural(examples[name], 'example')} and counts for {number:,} ({why})"
        for name, number in counted.items()
        if number < examples[name]
    ]
    everyone = sum(counted.values())
    if len(counted) > 2 and 2 * max(counted.values()) > everyone:
        name = max(counted, key=lambda name: counted[name])
        lines.append(
            f"{name} says that it has {counted[name] / everyone:.0%} of all examples, so it outweighs all others "
            "together in a mean; [limits] max_weight in server.toml bounds what a site counts for"
        )
    return lines
