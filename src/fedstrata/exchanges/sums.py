"""Rounds of masked sums: the exchange of weights where the server sees sums of the clients' changes alone.

for every round:
    the clients send keys, and shares of their secrets for one another
    they train, and send their changes as integers behind masks, which the server adds
    they sign the list of those whose changes have arrived
    the shares of enough of them open the sum; its mean moves the server's weights

Only changes against what the clients received are summed, so their mean is added to the server's own weights.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from fedstrata.client.sum_rules import Begun, SumRules, agreed_on, session
from fedstrata.client.sums import MASKED
from fedstrata.cost.ledger import Entry
from fedstrata.errors import UserError
from fedstrata.events import Missed, Noted
from fedstrata.exchanges.exchange import PlainHalf, SumSigning
from fedstrata.plan.kinds import Phase, Tensors
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import SERVER
from fedstrata.privacy.fixed_point import WIDTHS, capped
from fedstrata.privacy.opening import Opening
from fedstrata.privacy.shamir import SECRET_BYTES, SHARE_BYTES
from fedstrata.privacy.sum_terms import (
    ATTEMPT_BYTES,
    MOST,
    SIGNATURE_BYTES,
    Message,
    named,
    share_bytes,
)
from fedstrata.server.cohort import in_order
from fedstrata.server.rounds import Rounds
from fedstrata.wire.codec import WireError, check, payload_bytes
from fedstrata.wire.partial import filled, travelling

LEDGER = "masked sum"
"""Under which the ledger counts keys, shares and signatures."""
Take = Callable[[Reply], None]
"""Takes a client's answer to a step."""


class SummedHalf(PlainHalf):
    """The server's half where the clients' changes are summed behind masks.

    Args:
        signing: what the clients' signatures are bound to.
    """

    def __init__(self, signing: SumSigning) -> None:
        self.signing = signing

    def train(self, loop: Rounds, round: int) -> list[str]:
        """One round; see the module.

        Raises:
            UserError: too few clients are left at some step.
        """
        try:
            return self._train(loop, round)
        except WireError as error:
            raise UserError(
                f"round {round + 1}: {error}; --resume asks the clients again, with new keys"
            ) from None

    def _train(self, loop: Rounds, round: int) -> list[str]:
        clients = sample_clients(loop.engine.clients(), loop.settings.fraction, round, loop.streams)
        loop.expect(clients)
        plans = {client: loop.plan(round, client) for client in clients}
        loop.personal = any(plan.keep for plan in plans.values())
        attempt = secrets.token_bytes(ATTEMPT_BYTES)
        told = getattr(loop.engine, "run", None)  # where the clients are sites
        agreed = agreed_on(told.agreement, told.start_digest) if told else b""
        span = (round / loop.method.rounds, (round + 1) / loop.method.rounds)
        begun = Begun(lambda name: plans[name].received(loop.server.parts), loop.server.received, span)
        named_by = session(self.signing.run, agreed, round, attempt)
        opening = Opening(named_by, self.signing.signer, begun.by)
        steps = _Steps(loop, round, plans, attempt)

        def take_keys(reply: Reply) -> None:
            weight = 1 if self.signing.equal_weights else capped(reply.examples)
            self.check_keys(opening, reply.sums)
            opening.take_keys(reply.client, reply.sums, weight)

        steps.ask("sum_keys", clients, lambda name: {}, take_keys)
        rules = SumRules(loop.method, loop.task, loop.streams, least=self.signing.least)
        question = opening.close_roster(rules.groups(loop.server.parts, round, tuple(opening.entries)))
        steps.ask("sum_shares", list(opening.entries), lambda name: question, _take(opening.take_shares))
        steps.train(opening, span)
        whose = named(opening.survivors)
        steps.ask_late(
            "sum_survivors", opening.survivors, lambda name: {"survivors": whose}, _take(opening.take_signature)
        )
        signers = [name for name in opening.survivors if name in opening.signatures]
        steps.ask_late("sum_open", signers, lambda name: opening.open_question(), _take(opening.take_opened))
        self.open(loop, round, opening)
        return loop.server.merge()

    def check_keys(self, opening: Opening, answer: Message) -> None:
        """See :meth:`fedstrata.privacy.opening.Opening.check_keys`."""
        opening.check_keys(answer)

    def open(self, loop: Rounds, round: int, opening: Opening) -> None:
        """Give the opened sums' means to the server's aggregate; tell of the parts that stay closed."""
        server, roster, result = loop.server, opening.roster, opening.result()
        for place, (words, names) in result.items():
            mean = torch.from_numpy(roster.fixed.mean(words, roster.total(names)))
            start, sharing = 0, server.parts.sharing
            for part in roster.groups[place].parts:
                held, moved = travelling(server.weights[part], sharing), Tensors()
                order = sharing.travelling(server.parts.shapes[part])  # that of restored weights is another
                for name in order:
                    old = held[name]
                    change = mean[start : start + old.numel()].reshape(old.shape)
                    moved[name] = (old.double() + change).float()
                    start += old.numel()
                server.aggregate.add(filled(moved, server.weights[part], sharing), 1, SERVER)
        tell_closed(loop, round, opening, set(result))


class DrySummedHalf(SummedHalf):
    """The same in a forecast: every message of its size, and nothing to open."""

    def check_keys(self, opening: Opening, answer: Message) -> None:
        """Zeros, as many as keys are."""

    def open(self, loop: Rounds, round: int, opening: Opening) -> None:
        """See :meth:`SummedHalf.open`."""
        for group in opening.roster.groups:
            for part in group.parts:
                loop.server.aggregate.add(loop.server.weights[part], 1, SERVER)


def _take(take: Callable[[str, Message], None]) -> Take:
    return lambda reply: take(reply.client, reply.sums)


def tell_closed(loop: Rounds, round: int, opening: Opening, opened: set[int]) -> None:
    """Tell of the parts whose sum was not opened, because too few clients are in it."""
    for place, group in enumerate(opening.roster.groups):
        if place not in opened:
            left = len(group.among(opening.survivors))
            for part in group.parts:
                reason = f"stays as it was: its sum would be that of {left} clients, fewer than {group.least}"
                loop.records.append("missing", [{"round": round, "client": part, "reason": reason}])
                loop.tell(Noted(f"round {round + 1}: {part} {reason}"))


class _Steps:
    """The steps of one attempt over the loop's engine, each message of them in the ledger."""

    def __init__(self, loop: Rounds, round: int, plans: Mapping[str, Plan], attempt: bytes) -> None:
        self.loop, self.round, self.plans, self.attempt = loop, round, plans, attempt

    def ask(self, phase: Phase, names: Sequence[str], question: Callable[[str], Message], take: Take) -> None:
        """Ask for a step before the sum; who does not answer, or not with what it must, is missing."""
        for reply in self.loop.replies(self.round, self._requests(phase, names, question), names):
            self._take(reply, take, self.loop.miss)

    def ask_late(self, phase: Phase, names: Sequence[str], question: Callable[[str], Message], take: Take) -> None:
        """Ask for a step after the numbers have arrived, which count even if their sender is gone."""
        requests = self._requests(phase, names, question)
        for reply in in_order(self.loop.engine.exchange(requests), names):
            if isinstance(reply, NoReply):
                self._late(self.round, reply)
            else:
                self._take(reply, take, self._late)

    def train(self, opening: Opening, span: tuple[float, float]) -> None:
        """The clients train; the server adds what it cannot read."""
        loop, round = self.loop, self.round
        names = opening.members

        def requests() -> Iterable[Request]:
            for name in names:
                question = self._question(opening.train_question(name))
                request = loop.request(round, name, self.plans[name], "train")
                self._count(name, "down", question)
                yield replace(request, span=span, sums=question)

        for reply in loop.replies(round, requests(), names):
            try:
                take_numbers(opening, self.plans[reply.client], reply, loop)
            except WireError as error:
                loop.miss(round, NoReply(reply.client, f"sends what cannot be used: {error}"))
                continue
            loop.record(round, self.plans[reply.client], reply)
            loop.ledger(
                Entry(round, reply.client, "train", "up", part, payload_bytes(tensors))
                for part, tensors in reply.weights.items()
            )
            loop.replied(round, reply)

    def _late(self, round: int, missing: NoReply) -> None:
        self.loop.server.forget(missing.client)
        self.loop.tell(Missed(round, missing.client, f"{missing.reason}, after its changes had arrived"))

    def _take(self, reply: Reply, take: Take, miss: Callable[[int, NoReply], None]) -> None:
        self._count(reply.client, "up", reply.sums)
        try:
            take(reply)
        except WireError as error:
            miss(self.round, NoReply(reply.client, f"sends what cannot be used: {error}"))

    def _requests(
        self, phase: Phase, names: Sequence[str], question: Callable[[str], Message]
    ) -> Iterable[Request]:
        for name in names:
            sums = self._question(question(name))
            self._count(name, "down", sums)
            yield Request(self.round, name, self.plans[name], phase, {}, {}, sums=sums)

    def _question(self, question: Message) -> Message:
        return {"attempt": self.attempt, **question}

    def _count(self, name: str, way: str, message: Message) -> None:
        size = sum(map(len, message.values()))
        self.loop.ledger([Entry(self.round, name, "train", way, LEDGER, size)])  # type: ignore[arg-type]


def most_sum_bytes(parts: Parts, request: Request) -> int:
    """Most bytes beside the header in the answer to a request of a masked sum."""
    sent = len(request.plan.send)
    if request.phase == "train":
        return WIDTHS[-1] * sum(map(parts.travelling, request.plan.send))
    return MOST * (share_bytes(sent) + SHARE_BYTES * len(parts.names)) + SIGNATURE_BYTES + SECRET_BYTES * sent


def take_numbers(opening: Opening, plan: Plan, reply: Reply, loop: Rounds) -> None:
    """Check a client's numbers and add them.

    Raises:
        WireError: they are not what its plan sends.
    """
    roster, parts = opening.roster, loop.server.parts
    if reply.weights.keys() != set(plan.send):
        raise WireError("its parts are not those of its plan")
    for part in plan.send:
        check(reply.weights[part], {MASKED: (torch.uint8, (parts.travelling(part) * roster.fixed.width,))})
    numbers = {}
    for place in roster.own_groups(reply.client):
        own = [reply.weights[part][MASKED] for part in roster.groups[place].parts]
        numbers[place] = [] if any(tensor.is_meta for tensor in own) else [tensor.numpy() for tensor in own]
    opening.take_masked(reply.client, numbers)
