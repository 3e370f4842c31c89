"""A client's replies by costs alone: bytes from the wire's specification, FLOPs from lengths and shapes.

Nothing here reads a weight or a text: a method's plans, the model's shapes and the lengths of the examples decide
every byte and, but for the number of masked positions, every FLOP.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstrata.client.feature_cache import fitting, layout
from fedstrata.client.frozen_layers import over_kept_states
from fedstrata.client.poisson import poisson_steps
from fedstrata.client.steps import Step, steps
from fedstrata.cost.flops import encoder_flops, train_flops
from fedstrata.exchanges.exchange import DryContext
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.streams import ORDER


def dry_train(context: DryContext, request: Request) -> Reply:
    """A round of training: the parts that the plan sends, and the FLOPs of its steps."""
    plan, parts, wire = request.plan, context.parts, context.wire
    done, work = round_work(context, request)
    flops = _train_flops(context, request, work)
    return Reply(
        client=request.client,
        examples=len(context.lengths[request.client]),
        weights={part: wire.message(parts.shapes[part], wire.changes) for part in plan.send},
        loss=0.0,
        steps=done,
        work=work,
        flops=flops,
    )


def _train_flops(context: DryContext, request: Request, work: Positions) -> int:
    """FLOPs of a round's steps over ``work``, and of what a client computes once for them."""
    plan, parts, train = request.plan, context.parts, context.train
    if train.cache_frozen_layers and plan.frozen_layers(parts):
        lengths, batches = context.lengths[request.client], batches_of(context, request)
        return over_kept_states(lengths, train, plan, parts, work, batches)
    key = (plan, work)
    if key not in context.memory:
        context.memory[key] = train_flops(parts, plan, work)
    flops: int = context.memory[key]
    return flops + frozen_flops(context, request) if plan.freeze_encoder else flops


def dry_evaluate(context: DryContext, request: Request) -> Reply:
    """A score: nothing is known of it."""
    return Reply(request.client, len(context.lengths[request.client]))


def dry_receive(context: DryContext, request: Request) -> Reply:
    """The parts that came with the request have been taken, and that is all."""
    return Reply(request.client, len(context.lengths[request.client]))


def batches_of(context: DryContext, request: Request) -> list[Index]:
    """Places in the client's lengths of each batch of the round, as the client itself will draw them."""
    return [batch for step in _steps(context, request) for batch in step.batches]


def _steps(context: DryContext, request: Request) -> Iterator[Step]:
    if context.poisson:
        return poisson_steps(context.lengths[request.client], context.train, context.poisson(request))
    order = context.streams.numpy(request.round, request.client, ORDER)
    return steps(context.lengths[request.client], context.train, order)


def round_work(context: DryContext, request: Request) -> tuple[int, Positions]:
    """Steps of the client's round, and the positions that it will compute with."""
    lengths, train = context.lengths[request.client], context.train
    key = (len(lengths), int(lengths[0]) if len(lengths) else 0, "work")
    alike = (
        not context.poisson
        and len(lengths) > 0
        and int(lengths.min()) == int(lengths.max())
        and _every_example(lengths, train)
    )
    if alike and key in context.memory:  # the same whatever the order: texts of one length, all of them used
        return context.memory[key]  # type: ignore[no-any-return]
    done, total = 0, Positions()
    for step in _steps(context, request):
        done += 1
        for batch in step.batches:
            inside = lengths[batch]
            width = train.width or int(inside.max())
            total += Positions(len(batch) * width, len(batch) * width**2, context.predicted(inside, width))
    if alike:
        context.memory[key] = done, total
    return done, total


def frozen_flops(context: DryContext, request: Request) -> int:
    """FLOPs of a frozen encoder: once for what the cache can hold, at every step for the rest."""
    parts, train, lengths = context.parts, context.train, context.lengths[request.client]
    cached = fitting(layout(lengths, max(1, len(parts.head_layers)), parts.hidden)[1], train.feature_cache_bytes)
    passes = [lengths[cached]] if request.first else []
    if not cached.all():
        passes += [lengths[batch][~cached[batch]] for batch in batches_of(context, request)]
    return sum(encoder_flops(parts, encoded_lengths(some, train)) for some in passes)


def encoded_lengths(lengths: Index, train: Train) -> Index:
    """Tokens that a frozen encoder reads of texts of these many."""
    return lengths if train.width is None else np.full_like(lengths, train.width)


def _every_example(lengths: Index, train: Train) -> bool:
    """Of texts of one length every pass is over full batches, or over all: the order cannot change the work."""
    size = train.batch_size
    if train.tokens_per_batch is not None:
        size = max(1, train.tokens_per_batch // (train.width or int(lengths[0])))
    whole = train.epochs * -(-len(lengths) // (size * train.gradient_accumulation))
    return len(lengths) % size == 0 or train.steps is None or train.steps >= whole
