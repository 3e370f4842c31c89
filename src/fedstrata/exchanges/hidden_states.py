"""The exchange of hidden states: clients send a frozen encoder's output for their texts once, with the labels; the
server trains the head on them, and hands it out at the end.

What a message holds is in :mod:`fedstrata.exchanges.hidden_states_form`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedstrata.client.answer import Work, evaluate_with, feature_cache, load_parts, receive
from fedstrata.client.feature_cache import layout
from fedstrata.cost.flops import encoder_flops, train_flops
from fedstrata.cost.ledger import Entry
from fedstrata.errors import UserError
from fedstrata.events import Stepped
from fedstrata.exchanges.dry import dry_evaluate, dry_receive, encoded_lengths, round_work
from fedstrata.exchanges.exchange import (
    DryContext,
    Exchange,
    PlainHalf,
    ServerContext,
    fits_plan,
    nothing_more,
)
from fedstrata.exchanges.hidden_states_form import (
    decode_hidden_states,
    encode_hidden_states,
    hidden_states_spec,
    some_texts,
)
from fedstrata.exchanges.weights import pass_of
from fedstrata.plan.disclosure import SENT
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.server.rounds import Rounds
from fedstrata.server.trainer import NAME, ServerTrainer
from fedstrata.wire.codec import (
    SizedTensors,
    WireError,
    payload_bytes,
    spec_bytes,
)

PART = "hidden_states"
"""Under which they stand in messages and in the ledger."""


# The client's half


def send_hidden_states(work: Work) -> Generator[None, None, Reply]:
    """The phase ``hidden_states``: the frozen encoder's output for every training text of the client."""
    load_parts(work)
    runtime, index = work.runtime, work.data.index
    cache = feature_cache(work)
    assert cache is not None
    parts = runtime.working.parts
    yield from ()
    return Reply(
        work.request.client,
        len(index),
        weights={PART: encode_hidden_states(cache, index, runtime.dtype)},
        flops=encoder_flops(parts, cache.stored) + encoder_flops(parts, cache.missing(index)),
    )


def fits(request: Request, plan: Plan) -> bool:
    """Clients never train; what they send is no part of the model, and of all their layers, once."""
    if request.phase == "hidden_states":
        asked = request.plan
        return request.round == 0 and asked == Plan(plan.layers, (), keep=asked.keep, freeze_encoder=True)
    return request.phase != "train" and fits_plan(request, plan)


# The server's half


class Training(Protocol):
    """Trains on what the clients sent."""

    def begin(self) -> None:
        """Clients are about to send."""

    def take(self, client: str, message: Tensors, most: int) -> None:
        """Check what a client sent and keep it, of ``most`` texts at most: for so many it counts."""

    def train(self, loop: Rounds, plan: Plan, round: int) -> tuple[Reply, Weights]:
        """One round; its record, and the new tensors of the parts that the plan trains."""


@dataclass
class HiddenStatesHalf(PlainHalf):
    """Collects every client's hidden states before the first round, then trains."""

    training: Training

    def train(self, loop: Rounds, round: int) -> list[str]:
        """One round of training at the server."""
        if round == 0:
            self._collect(loop)
        plan = loop.plan(round, NAME)
        reply, weights = self.training.train(loop, plan, round)
        loop.record(round, plan, reply)
        loop.replied(round, reply)
        for part, new in weights.items():
            loop.server.replace(part, new)
        return list(plan.train)

    def _collect(self, loop: Rounds) -> None:
        """Collect every client's hidden states once; the head is trained later, on the server."""
        clients = loop.engine.clients()
        loop.expect(clients)
        self.training.begin()
        plan = collecting_plan(loop.server.parts)
        requests = (loop.request(0, client, plan, "hidden_states") for client in clients)
        for reply in loop.replies(0, requests, clients):
            message = reply.weights.get(PART, {})
            loop.ledger([Entry(0, reply.client, "hidden_states", "up", PART, payload_bytes(message))])
            try:
                self.training.take(reply.client, message, reply.examples)
            except WireError as error:
                reason = f"its hidden states cannot be used: {error}"
                if not loop.settings.sites:
                    raise UserError(f"client {reply.client}: {reason}") from None
                loop.miss(0, NoReply(reply.client, f"sends what cannot be used: {error}"))
                continue
            loop.record_collected(0, plan, reply)

    def finish(self, loop: Rounds, round: int) -> None:
        """Every client gets the parts it lacks: what the server has learned."""
        plan = Plan(_whole(loop.server.parts), train=(), freeze_encoder=True)
        clients = loop.engine.clients()
        loop.expect(clients)
        requests = (loop.request(round, client, plan, "receive") for client in clients)
        list(loop.replies(round, requests, clients))


@dataclass
class ServerTraining:
    """Trains the model in memory."""

    context: ServerContext
    trainer: ServerTrainer

    def begin(self) -> None:
        """See :class:`Training`."""
        self.trainer.begin()

    def take(self, client: str, message: Tensors, most: int) -> None:
        """See :class:`Training`.

        Raises:
            WireError: the message is not usable.
        """
        model, context = self.trainer.trainer.working.model, self.context
        width, dtype = model.config.hidden_size, context.runtime.dtype
        states = decode_hidden_states(message, model.branches, width, context.classes, dtype)
        longest = self.trainer.trainer.train.max_tokens
        if int(states["tokens"].max()) > longest:  # all others of its batch would be filled up to it
            raise WireError(f"tokens: must be at most {longest} (max_tokens)")
        self.trainer.take(client, some_texts(states, most))

    def train(self, loop: Rounds, plan: Plan, round: int) -> tuple[Reply, Weights]:
        """See :class:`Training`."""
        server, working, rounds = loop.server, self.trainer.trainer.working, loop.method.rounds
        working.load(
            {part: (("server", server.versions[part]), server.weights[part]) for part in server.parts.names}
        )

        def stepped(step: int, steps: int, loss: float, seen: int) -> None:
            loop.tell(Stepped(round, NAME, step, steps, loss, seen))

        reply = self.trainer.train(plan, round, stepped, (round / rounds, (round + 1) / rounds))
        tensors = {part: working.tensors([part]) for part in plan.train}
        return reply, {
            part: {name: t.to("cpu", copy=True) for name, t in own.items()} for part, own in tensors.items()
        }


@dataclass
class DryTraining:
    """Trains nothing; steps and FLOPs follow from the lengths of the clients' texts."""

    context: DryContext

    def begin(self) -> None:
        """Nothing is there."""

    def take(self, client: str, message: Tensors, most: int) -> None:
        """Nothing to keep."""

    def train(self, loop: Rounds, plan: Plan, round: int) -> tuple[Reply, Weights]:
        """The parts become new versions of themselves."""
        context, parts = self.context, self.context.parts
        branches = max(1, len(parts.head_layers))
        each = [layout(context.lengths[client], branches, parts.hidden)[0] for client in loop.engine.clients()]
        texts = replace(context, lengths={NAME: np.concatenate(each)})
        steps, work = round_work(texts, Request(round, NAME, plan, "train", {}, {}))
        flops = train_flops(parts, plan, work)
        reply = Reply(NAME, len(texts.lengths[NAME]), loss=0.0, steps=steps, work=work, flops=flops)
        return reply, {part: loop.server.weights[part] for part in plan.train}


def server_half(context: ServerContext) -> HiddenStatesHalf:
    """The half that trains on the server's own model."""
    trainer = ServerTrainer(context.runtime.trainer, context.clients, context.store.below("received"))
    return HiddenStatesHalf(ServerTraining(context, trainer))


# Without tensors


def dry_send(context: DryContext, request: Request) -> Reply:
    """The bytes of a client's hidden states, and the FLOPs of computing them."""
    lengths, parts = context.lengths[request.client], context.parts
    size = spec_bytes(hidden_states_spec(lengths, max(1, len(parts.head_layers)), parts.hidden, context.dtype))
    return Reply(
        request.client,
        len(lengths),
        weights={PART: SizedTensors({}, size)},
        flops=encoder_flops(parts, encoded_lengths(lengths, context.train)),
    )


def collecting_plan(parts: Parts) -> Plan:
    """The plan of a client that sends its texts' hidden states: it trains nothing, and no head is sent to it."""
    return Plan(_whole(parts), train=(), keep=_heads(parts), freeze_encoder=True)


def _whole(parts: Parts) -> tuple[int, ...]:
    return tuple(range(parts.depth))


def _heads(parts: Parts) -> tuple[str, ...]:
    return tuple(part.name for part in parts.each if part.kind == "head")


EXCHANGE = Exchange(
    payload="hidden_states",
    permission=SENT["hidden_states"],
    handlers={"hidden_states": send_hidden_states, "evaluate": evaluate_with(pass_of), "receive": receive},
    sends=lambda plan: True,
    fits=fits,
    server=server_half,
    dry_handlers={"hidden_states": dry_send, "evaluate": dry_evaluate, "receive": dry_receive},
    dry_server=lambda context: HiddenStatesHalf(DryTraining(context)),
    forecast=nothing_more,
    notes=lambda job, parts, clients, tokens: [f"each client sends the server {SENT['hidden_states']}"],
)
