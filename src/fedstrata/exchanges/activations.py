"""The exchange of activations: split learning. A client's batches pass through layers that the server holds.

Hidden states go up and come back, gradients likewise, for every batch: messages in
:mod:`fedstrata.wire.activations`, the cut model in :mod:`fedstrata.models.cut`, the server's layers in
:mod:`fedstrata.server.layers`. The client's own parts are sent as under ``weights``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.client.answer import Work, evaluate_with, receive, train_with
from fedstrata.client.steps import steps
from fedstrata.cost.bytes import payload
from fedstrata.exchanges.cut_pass import own_parts, pass_of
from fedstrata.exchanges.dry import batches_of, dry_evaluate, dry_receive, dry_train
from fedstrata.exchanges.exchange import (
    DryContext,
    Exchange,
    PlainHalf,
    ServerContext,
    Traffic,
    fits_plan,
)
from fedstrata.job.tables import Job
from fedstrata.models.cut import SplitLink
from fedstrata.plan.disclosure import CHANGED, SENT
from fedstrata.plan.kinds import Index, Phase, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import ORDER, SERVER
from fedstrata.server.layers import LayerSettings, ServerLayers
from fedstrata.wire.activations import message_bytes, stream_form
from fedstrata.wire.row_cache import needed, room_words

# The client's half; its pass is in cut_pass


def train(work: Work) -> Generator[None, None, Reply]:
    """The phase ``train``: others may use the model between this client's steps, so its parameters are its own."""
    working = work.runtime.working
    working.swap_parameters(own_parts(work.request.plan, working.parts))
    return (yield from train_with(pass_of)(work))


# The server's half


class ActivationsHalf(PlainHalf):
    """The loop of weights, around layers that the server holds."""

    def __init__(self, layers: ServerLayers) -> None:
        self.layers = self._layers = layers  # the base class's may be None
        self.interleaved = not layers.settings.copies

    def connect(self, request: Request) -> AbstractContextManager[SplitLink | None]:
        """A session on the server's layers."""
        return self._layers.connect(request) if request.plan.server else nullcontext()

    def begin_group(self, round: int) -> None:
        """Load the layers."""
        self._layers.begin(round)

    def end_group(self, round: int) -> Weights:
        """What the one set of layers has become; nothing where there are copies."""
        return self._layers.end(round)

    def collect(self, round: int, client: str, phase: Phase, plan: Plan) -> tuple[Weights, Traffic]:
        """The client's copy of the layers, and the bytes of its messages."""
        if not plan.server:
            return {}, ()
        copies, traffic = self._layers.collect(client)
        return copies, [(way, what, size) for (way, what), size in traffic.items()]


def server_half(context: ServerContext) -> PlainHalf:
    """The half that holds the plan's layers, of the server's own model."""
    runtime = context.runtime
    settings = LayerSettings(
        names=context.plan.away(context.server.parts),
        copies=context.method.client_schedule == "parallel",
        max_positions=context.max_positions,
        form=runtime.stream,
        store=context.store.below("layers"),
    )
    layers = ServerLayers(
        runtime.working, context.server, settings, runtime.trainer.train, runtime.trainer.streams
    )
    return ActivationsHalf(layers)


# Without tensors


@dataclass
class DryActivationsHalf(PlainHalf):
    """The server's layers by their traffic alone."""

    context: DryContext

    def collect(self, round: int, client: str, phase: Phase, plan: Plan) -> tuple[Weights, Traffic]:
        """The bytes of a client's batches."""
        context = self.context
        if phase == "train":
            lengths = context.lengths[client]
            request = Request(round, client, plan, phase, {}, {})
            batches = [lengths[batch] for batch in batches_of(context, request)]
        else:
            batches = [context.tests()[client]]
        through = np.concatenate(batches)
        form = context.stream if phase == "train" else context.stream.plain
        sizes = message_bytes(int(through.sum()), len(through), context.parts.hidden, form, len(batches))
        return {}, [
            (way, what, size) for (way, what), size in sizes.items() if phase == "train" or what == "activations"
        ]


def cut_traffic(context: DryContext, lengths: Index) -> dict[str, Any]:
    """What a client sends to the server's layers and gets back, in bytes.

    Args:
        context: how it trains.
        lengths: tokens of each of its examples, ``[n]``.

    Returns:
        ``batch_bytes``: of its largest batch; ``epoch_bytes``: of all its examples once; ``fedavg_round_bytes``:
        the whole model up and down, to compare with; ``at_most``: the bytes of batch, epoch and all the stage's
        rounds are upper bounds, since only what changed is sent; ``cache_bytes``: what both ends then need on
        their disks during a round to keep all its hidden states; ``cache_limit``: what they take at most.
    """
    order = context.streams.numpy(0, SERVER, ORDER)
    train = context.train.model_copy(update={"epochs": 1, "steps": None})
    parts = context.parts
    sizes = [
        sum(message_bytes(int(lengths[batch].sum()), len(batch), parts.hidden, context.stream).values())
        for step in steps(lengths, train, order)
        for batch in step.batches
    ]
    changed = context.stream.changed is not None
    return {
        "batch_bytes": max(sizes),
        "epoch_bytes": sum(sizes),
        "fedavg_round_bytes": 2 * payload(parts, parts.names, context.dtype),
        "at_most": changed,
        "cache_bytes": needed(int(lengths.sum()), parts.hidden) if changed else 0,
        "cache_limit": context.train.feature_cache_bytes,
    }


def notes(job: Job, parts: Parts, clients: int, tokens: int) -> list[str]:
    """What leaves the clients, and how much of it beside FedAvg."""
    lines = [f"each client sends the server {SENT['activations']}"]
    if tokens:
        epoch = sum(message_bytes(tokens, 0, parts.hidden, stream_form(*job.wire.stream), 0).values())
        whole = 2 * clients * payload(parts, parts.names, job.wire.dtype)
        at_most = "at most " if job.wire.activations_changed is not None else ""
        lines.append(
            f"an epoch moves {at_most}{epoch / 1e6:.4g} MB through the cut, {epoch / whole:.3g} times the "
            f"{whole / 1e6:.4g} MB of a round of FedAvg"
        )
    if job.wire.activations_changed is not None:
        lines += _changed_notes(job, needed(tokens, parts.hidden) // max(1, clients))
    return lines


def _changed_notes(job: Job, cached: int) -> list[str]:
    """What sending changes alone tells and takes, where a client's hidden states are so many bytes."""
    lines = [f"[wire] activations_changed: the server is also told {CHANGED}"]
    if cached:
        lines.append(f"of each client {room_words(cached, job.train.feature_cache_bytes)}")
    if job.train.epochs == 1:
        lines.append(
            "[wire] activations_changed: a round passes every text once ([train] epochs = 1), and what was sent "
            "is forgotten after it; so all hidden states are sent, and only what nobody reads is left out"
        )
    return lines


EXCHANGE = Exchange(
    payload="activations",
    permission=SENT["activations"],
    handlers={"train": train, "evaluate": evaluate_with(pass_of), "receive": receive},
    sends=lambda plan: bool(plan.server),
    fits=fits_plan,
    server=server_half,
    dry_handlers={"train": dry_train, "evaluate": dry_evaluate, "receive": dry_receive},
    dry_server=DryActivationsHalf,
    forecast=cut_traffic,
    notes=notes,
)
