"""FLOPs of a step, from a plan and shapes. A multiplication with its addition counts as two.

Per layer and forward pass, with T = positions (B*S), P = B*S^2 and 12 H^2 linear elements: 24 T H^2 + 4 P H.
Going back, a linear module costs as much again for the gradient of its input and, if it is trained, as much for
the gradient of its weight; the products of attention cost twice their forward pass. Below the lowest trained part
nothing is computed. Embedding look-ups, norms, activations and the optimizer are left out (under 1 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.plan.parts import Part, Parts
from fedstrata.plan.plan import Plan

ABOVE = ("pooler", "head")
"""Kinds of parts that see only the predicted positions."""


def forward_flops(parts: Parts, plan: Plan, work: Positions) -> int:
    """FLOPs of the forward pass of the plan's local model over ``work``; frozen encoder: of its head."""
    head = _head_layers(parts, work) + len(parts.head_layers) * _attention(parts, work)
    head += sum(_linear(part, work) for part in parts.each if part.kind in ABOVE)
    return head if plan.freeze_encoder else head + _encoder(parts, plan.layers, work)


def encoder_flops(parts: Parts, lengths: Index) -> int:
    """FLOPs of one forward pass of the encoder over texts of these many tokens, without padding."""
    work = Positions(int(lengths.sum()), int((lengths**2).sum()))
    return _encoder(parts, range(parts.depth), work)


def over_kept_states_flops(parts: Parts, plan: Plan, work: Positions, below: Positions) -> int:
    """FLOPs of a plan's training where the states that enter its lowest trained layer are kept.

    Args:
        parts: the model's.
        plan: the client's.
        work: of the steps.
        below: what went through the frozen layers.
    """
    count = plan.frozen_layers(parts)
    above = replace(plan, layers=plan.layers[count:])
    return train_flops(parts, above, work) + _encoder(parts, plan.layers[:count], below)


def train_flops(parts: Parts, plan: Plan, work: Positions) -> int:
    """FLOPs of forward and backward passes of the plan's local model over ``work``."""
    own = replace(plan, layers=plan.local(parts), server=())
    return forward_flops(parts, own, work) + _backward_flops(parts, own, work, _cut(parts, plan))


def server_flops(parts: Parts, plan: Plan, work: Positions) -> int:
    """FLOPs of what a client's training costs the server, whose layers of the plan learn with it."""
    if not plan.server:
        return 0
    whole = replace(plan, train=(*plan.train, *parts.adapted(plan.server)), server=())
    both = forward_flops(parts, whole, work) + _backward_flops(parts, whole, work, _cut(parts, plan))
    return both - train_flops(parts, plan, work)


def _cut(parts: Parts, plan: Plan) -> int | None:
    """In the stack of a split model, the unit above the lower cut; None where the model is not split.

    The gradient by its input is always computed: it is what the server, or the client above it, sends back.
    """
    away = set(parts.depths(plan.server))
    return next((place for place, depth in enumerate(plan.layers, 1) if depth in away), None)


def _linear(part: Part, work: Positions) -> int:
    positions = work.predicted if part.kind in ABOVE else work.tokens
    return 2 * positions * sum(part.linear)


def _encoder(parts: Parts, layers: Iterable[int], work: Positions) -> int:
    of_layers = [part for i in layers for part in _unit(parts, i)]
    stack = sum(_linear(part, work) for part in (*_unit(parts, None), *of_layers))
    return stack + sum(_attention(parts, work) for part in of_layers if part.kind == "layer")


def _head_layers(parts: Parts, work: Positions) -> int:
    """Forward pass of the linear modules of the head's own layers."""
    return 2 * work.tokens * sum(parts.head_layers)


def _attention(parts: Parts, work: Positions) -> int:
    return 4 * work.pairs * parts.hidden


def _unit(parts: Parts, depth: int | None) -> list[Part]:
    """A layer with its adapters, or the embeddings with theirs."""
    own = [parts[parts.layer(depth)]] if depth is not None else [p for p in parts.each if p.kind == "embeddings"]
    return [*own, *parts.adapters_of(depth)]


def _local_stack(parts: Parts, layers: Sequence[int]) -> list[list[Part]]:
    """The units of a local model from the embeddings up, a layer as often as it stands there."""
    return [*(_unit(parts, i) for i in (None, *layers)), *([p] for p in parts.each if p.kind in ABOVE)]


def _backward_flops(parts: Parts, plan: Plan, work: Positions, cut: int | None) -> int:
    """Walks from the head down to the lowest unit in which something is trained, or to a split model's cut."""
    stack = _local_stack(parts, plan.layers)
    learning = [any(part.name in plan.train for part in unit) for unit in stack]
    reached = [i for i, learns in enumerate(learning) if learns or i == cut]
    if not reached:
        return 0
    place = reached[0]
    lowest = stack[place][0]
    trained_kinds = {part.kind for part in parts.each if part.name in plan.train}
    total = sum(
        _part_backward(parts, part, part.name in plan.train, work) for unit in stack[place:] for part in unit
    )
    head, embeddings = "head" in trained_kinds, "embeddings" in trained_kinds
    encoder = lowest.kind not in ABOVE  # something in the encoder learns
    if encoder or head:
        total += (1 + head) * _head_layers(parts, work) + 2 * len(parts.head_layers) * _attention(parts, work)
    # a tied decoder multiplies in the head and learns with the embeddings
    total += (embeddings - head) * 2 * work.predicted * parts.tied
    if place == cut:
        return total
    if encoder and lowest.name not in plan.train:  # frozen, but its adapters learn
        return total - _below_adapters(parts, stack[place], plan, work)
    return total - _input_gradient(parts, lowest, head and not encoder, work)


def _part_backward(parts: Parts, part: Part, learns: bool, work: Positions) -> int:
    """Gradients of one part: by its input, and by its weights where it learns."""
    attention = 2 * _attention(parts, work) if part.kind == "layer" else 0
    return (1 + learns) * _linear(part, work) + attention


def _below_adapters(parts: Parts, unit: Sequence[Part], plan: Plan, work: Positions) -> int:
    """What the walk counted of gradients that nobody needs in the lowest layer whose adapters learn.

    Its frozen modules need none by their input up to the lowest adapter; nor does the A of that adapter, nor its B
    where A stays as it is; and attention only those by the products that an adapter below it moves.
    """
    known = {part.above for part in unit if part.factors != "b" and part.name in plan.train}
    idle = sum(part.lowest.inputs + (part.above not in known) * part.lowest.inner for part in unit)
    layer = unit[0].kind == "layer"
    products = (4 - unit[0].lowest.products) * _attention(parts, work) // 2 if layer else 0
    return 2 * work.tokens * idle + products


def _input_gradient(parts: Parts, lowest: Part, frozen: bool, work: Positions) -> int:
    """What the walk counted of a gradient that nobody needs: by the input of the lowest trained part.

    ``frozen``: nothing in the encoder learns, but the head does.
    """
    qkv = 2 * work.tokens * 3 * parts.hidden**2
    if lowest.norm_first:
        return 0
    if parts.head_layers and frozen:
        bottom = 1 if parts.chained else len(parts.head_layers)  # those that stand on frozen states
        pooler = sum(_linear(part, work) for part in parts.each if part.kind == "pooler")
        return bottom * qkv - (pooler if lowest.kind == "head" else 0)  # the gradient passes through the pooler
    if lowest.kind == "layer":
        return qkv
    return 2 * work.predicted * lowest.linear[0] if lowest.kind in ABOVE else 0
