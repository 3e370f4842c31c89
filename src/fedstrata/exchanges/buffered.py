"""Asynchronous rounds: the exchange of weights where a round ends with its first answers.

for every round:
    those of the sampled clients are asked that have answered what they were asked before
    the first ``buffer`` answers that arrive, to requests of this round or of earlier ones, end it
    late ones count as :mod:`fedstrata.server.late` says; the aggregate moves the model

Who is in a round is all that the order of arrival decides: its answers are summed in the order of the clients.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedstrata.errors import UserError
from fedstrata.exchanges.exchange import PlainHalf
from fedstrata.plan.arrivals import MOST_STALENESS, Cohort, overdue
from fedstrata.plan.messages import BufferedEngine, NoReply, Request
from fedstrata.server.reply_records import name_outliers
from fedstrata.server.rounds import OUTGREW, Rounds
from fedstrata.wire.codec import WireError


class BufferedHalf(PlainHalf):
    """The server's half of asynchronous rounds.

    Args:
        buffer: answers that end a round.
    """

    def __init__(self, buffer: int) -> None:
        self.buffer, self.begun = buffer, False

    def train(self, loop: Rounds, round: int) -> list[str]:
        """One round; see the module.

        Raises:
            UserError: too few answer, or an answer cannot be used.
        """
        try:
            return self._train(loop, round)
        except WireError as error:
            raise UserError(f"round {round + 1}: a message cannot be used: {error}; {OUTGREW}") from None

    def _train(self, loop: Rounds, round: int) -> list[str]:
        server, engine, late = loop.server, loop.engine, loop.server.late
        assert isinstance(engine, BufferedEngine)
        if not self.begun:
            engine.ask_again(_unanswered(loop))
            loop.participated |= late.asked.keys()
            self.begun = True
        _give_up(loop, engine, round)
        names = engine.clients()
        cohort = Cohort(names, loop.settings.fraction, self.buffer, loop.streams)
        plans = {name: loop.plan(round, name) for name in cohort.asked(round, late.asked)}
        requests = [loop.request(round, name, plan, "train") for name, plan in plans.items()]
        for request in requests:
            late.ask(request)
        count = min(self.buffer, len(late.asked))
        loop.expect(list(late.asked), count)
        arrivals = engine.arrive(round, requests, count)
        loop.records.append("arrivals", [arrival.record() for arrival in arrivals])
        asked = {arrival.client: late.asked.pop(arrival.client) for arrival in arrivals}
        for answer in engine.answers():
            if isinstance(answer, NoReply):
                loop.miss(round, answer)
            else:
                own = asked[answer.client]
                loop.take(round, loop.plan(own.round, answer.client), answer, own)
        server.keep_late()
        changed = server.merge()
        loop.records.append("outliers", name_outliers(round, server, loop.tell))
        return changed


class BoundHalf(PlainHalf):
    """The most that asynchronous rounds can cost whose order of arrival is not known.

    Every sampled client answers, and is sent every part anew that can have changed. No order costs a client more:
    it is asked once in a round at most, only where it is sampled, and a part that no plan has sent stays as it is.
    """

    def train(self, loop: Rounds, round: int) -> list[str]:
        """A round in which all that can be sent is sent."""
        server = loop.server
        none = tuple(-1 if server.versions[name] else 0 for name in server.parts.names)
        server.client_versions |= dict.fromkeys(server.client_versions, none)
        return loop.train_clients(round)


def _give_up(loop: Rounds, engine: BufferedEngine, round: int) -> None:
    """Wait no more for clients that were asked too many rounds ago; they can be asked anew."""
    late = loop.server.late
    given_up = overdue({client: asked.round for client, asked in late.asked.items()}, round)
    loop.spare = len(given_up)
    for client in given_up:
        del late.asked[client]
        engine.give_up(client)
        loop.miss(round, NoReply(client, f"has not answered within {MOST_STALENESS} rounds"))


def _unanswered(loop: Rounds) -> Iterator[Request]:
    """The requests that a run that goes on has still to be answered, with all that a client may need for them."""
    late = loop.server.late
    for client, asked in late.asked.items():
        yield Request(
            round=asked.round,
            client=client,
            plan=loop.plan(asked.round, client),
            phase="train",
            versions=dict(asked.versions),
            parts={part: late.message(part, version) for part, version in asked.versions.items() if version},
            first=asked.first,
            span=asked.span,
        )
