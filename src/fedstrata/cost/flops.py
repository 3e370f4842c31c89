"""FLOPs of a step, from a plan and shapes. A multiplication with its addition counts as two.

Per layer and forward pass, with T = positions (B*S), P = B*S^2 and 12 H^2 linear elements: 24 T H^2 + 4 P H.
Going back, a linear module costs as much again for the gradient of its input and, if it is trained, as much for
the gradient of its weight; the products of attention cost twice their forward pass. Below the lowest trained part
nothing is computed. Embedding look-ups, norms, activations and the optimizer are left out (under 1 %).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan


@dataclass(frozen=True)
class Positions:
    """What went through the model, padding included; additive over batches.

    Attributes:
        tokens: positions through the layers, B * S.
        pairs: positions attended to, B * S * S.
        predicted: positions through pooler and head: masked ones, all, or one per example.
    """

    tokens: int = 0
    pairs: int = 0
    predicted: int = 0

    def __add__(self, other: Positions) -> Positions:
        return Positions(self.tokens + other.tokens, self.pairs + other.pairs, self.predicted + other.predicted)


def forward_flops(parts: Parts, plan: Plan, work: Positions) -> int:
    """FLOPs of the forward pass of the plan's local model over ``work``; of its head alone with ``features``."""
    head = _own(parts, work) + len(parts.own) * _attention(parts, work)
    head += _linear(parts, "pooler", work) + _linear(parts, "head", work)
    return head if plan.features else head + _encoder(parts, plan.layers, work)


def encoder_flops(parts: Parts, lengths: npt.NDArray[np.int64]) -> int:
    """FLOPs of one forward pass of the encoder over texts of these many tokens, without padding."""
    work = Positions(int(lengths.sum()), int((lengths**2).sum()))
    return _encoder(parts, range(parts.depth), work)


def _encoder(parts: Parts, layers: Iterable[int], work: Positions) -> int:
    stack = sum(_linear(parts, f"layer.{i}", work) + _attention(parts, work) for i in layers)
    return stack + _linear(parts, "embeddings", work)


def train_flops(parts: Parts, plan: Plan, work: Positions) -> int:
    """FLOPs of forward and backward passes of the plan's local model over ``work``."""
    plan = replace(plan, layers=plan.local, server=())
    return forward_flops(parts, plan, work) + _backward_flops(parts, plan, work)


def server_flops(parts: Parts, plan: Plan, work: Positions) -> int:
    """FLOPs of what a client's training costs the server, whose layers of the plan learn with it."""
    if not plan.server:
        return 0
    whole = replace(plan, train=(*plan.train, *plan.server), server=())
    return train_flops(parts, whole, work) - train_flops(parts, plan, work)


def _linear(parts: Parts, part: str, work: Positions) -> int:
    positions = work.predicted if part in ("pooler", "head") else work.tokens
    return 2 * positions * sum(parts.linear.get(part, ()))


def _own(parts: Parts, work: Positions) -> int:
    """Forward pass of the linear modules of the head's own layers."""
    return 2 * work.tokens * sum(parts.own)


def _attention(parts: Parts, work: Positions) -> int:
    return 4 * work.pairs * parts.hidden


def _backward_flops(parts: Parts, plan: Plan, work: Positions) -> int:
    """Walks from the head down to the lowest trained part."""
    stack = ["embeddings", *(f"layer.{i}" for i in plan.layers), "pooler", "head"]
    stack = [name for name in stack if name in parts.names]
    trained = [name in plan.train for name in stack]
    if not any(trained):
        return 0
    lowest = trained.index(True)
    total = 0
    for name, learns in list(zip(stack, trained, strict=True))[lowest:]:
        if name == "embeddings":
            total += 2 * _linear(parts, name, work)  # only ELECTRA's projection
            continue
        total += _linear(parts, name, work)
        if learns:
            total += _linear(parts, name, work)
        if name.startswith("layer."):
            total += 2 * _attention(parts, work)
    below = stack[lowest] not in ("pooler", "head")  # something in the encoder learns
    if below or "head" in plan.train:
        total += (1 + ("head" in plan.train)) * _own(parts, work) + 2 * len(parts.own) * _attention(parts, work)
    if "head" in stack and ("embeddings" in plan.train) != ("head" in plan.train):
        sign = 1 if "embeddings" in plan.train else -1
        total += sign * 2 * work.predicted * parts.tied
    if stack[lowest] in parts.norm_first:
        return total
    if parts.own and not below and "head" in plan.train:
        if stack[lowest] == "head":
            total += _linear(parts, "pooler", work)  # the gradient passes through it, frozen or not
        bottom = 1 if parts.chained else len(parts.own)
        return total - 2 * work.tokens * bottom * 3 * parts.hidden**2  # Q, K and V of what stands on frozen states
    if stack[lowest].startswith("layer."):
        total -= 2 * work.tokens * 3 * parts.hidden**2  # no gradient for the input of its Q, K and V
    elif stack[lowest] in ("pooler", "head"):
        total -= 2 * work.predicted * parts.linear[stack[lowest]][0]
    return total
