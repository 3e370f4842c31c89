"""Sites that have lost what they kept of a run: with each reply a site says what it had answered before.

A site that lost its disk is greeted again and goes on, without its optimizer's moments, what its messages left
out, its own parts. Who had answered a round that it does not know any more has lost them, and that is said once,
as a line of ``lost.jsonl`` and an event. What a site claims of itself changes nothing but this line about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedstrata.events import Event, Noted
from fedstrata.plan.kinds import SUM_PHASES
from fedstrata.plan.messages import Request
from fedstrata.server.records import Records

Span = tuple[int, int]
"""The first and the last round that a site has answered by training, 0-based; (-1, -1) for none."""
NOTHING: Span = (-1, -1)


class Losses:
    """What the server has of each site, compared with what the site still knows.

    Args:
        records: the run's: whose replies were taken is read from ``rounds``, what was said from ``lost``.
        keeps: what the job keeps at a site from round to round; where that is nothing, nothing is said.
        tell: receives events.
    """

    def __init__(self, records: Records, keeps: Sequence[str], tell: Callable[[Event], None]) -> None:
        self.records, self.keeps, self.tell = records, keeps, tell
        self.taken: dict[str, Span] = {}
        said = {line["client"]: line["round"] for line in records.lines("lost")}
        for line in records.lines("rounds") if keeps else ():
            round = line.get("asked", line["round"])
            if round > said.get(line["client"], -1):
                self._take(line["client"], round)

    def hear(self, request: Request, known: Span) -> None:
        """A site has replied, and says what it had answered before; a loss is recorded and told.

        Of the steps of a masked sum the one in which the site trains tells: those after it are of the same round.
        """
        if request.phase in SUM_PHASES:
            return
        name = request.client
        first, last = self.taken.get(name, NOTHING)
        if self.keeps and last >= 0 and (known[0] > first or known[1] < last):
            what = " and ".join(self.keeps)
            self.records.append("lost", [{"round": last, "client": name, "what": list(self.keeps)}])
            self.tell(Noted(f"{name} lost what it kept ({what}) after round {last + 1}, and went on without it"))
            del self.taken[name]
        if request.phase == "train":
            self._take(name, request.round)

    def _take(self, name: str, round: int) -> None:
        self.taken[name] = self.taken.get(name, (round, round))[0], round
