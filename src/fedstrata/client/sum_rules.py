"""What a client knows of a run's masked sums."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan, make_plan
from fedstrata.plan.streams import Streams
from fedstrata.privacy.sum_terms import LEAST, MOST, Group, Signer, Unsigned, digest, groups_of
from fedstrata.wire.on_disk import content, let_go


@dataclass(frozen=True)
class SumRules:
    """What a client knows of a run's masked sums.

    Attributes:
        method: makes the plans of all clients.
        task: the task's kind.
        streams: all randomness of the plans.
        run: names the run in every signature.
        agreement: of the job as the client was told it, and of the start model that it has, see :func:`agreed_on`;
            all signatures are bound to it, so that clients who differ in these take part in no sum together.
        signer: signs for the client and knows the others' registered keys.
        least: fewest clients whose sum is opened.
    """

    method: Method
    task: str
    streams: Streams
    run: bytes = b""
    agreement: bytes = b""
    signer: Signer = field(default_factory=Unsigned)
    least: int = LEAST

    def received(self, parts: Parts, round: int, name: str) -> tuple[str, ...]:
        """The parts of a client's model that come from the server in a round, in the model's order."""
        return make_plan(self.method, parts, self.task, round, name, self.streams).received(parts)

    def groups(self, parts: Parts, round: int, names: tuple[str, ...]) -> tuple[Group, ...]:
        """The sums of a round among some clients."""
        sends = dict[str, list[str]]()
        for name in names:
            plan = make_plan(self.method, parts, self.task, round, name, self.streams)
            sends[name] = [part for part in parts.names if part in plan.send]
        return groups_of(sends, self.least)


@dataclass(frozen=True)
class Begun:
    """What the clients of a round begin their training with.

    Attributes:
        received: client -> the parts of its model that come from the server, in the model's order.
        tensors: part -> its tensors, as they were received.
        span: the round's place in the schedule of the learning rate.
    """

    received: Callable[[str], Sequence[str]]
    tensors: Callable[[str], Tensors]
    span: tuple[float, float]

    def by(self, one: str, other: str) -> bytes:
        """A digest of all that two clients both begin with, the same in either order."""
        theirs = set(self._received(other))
        both = [part for part in self._received(one) if part in theirs]
        said = [each for part in both for each in (part.encode(), self._digest(part))]
        return digest(b"begun", struct.pack(">2d", *self.span), *said)

    @cached_property
    def _received(self) -> Callable[[str], Sequence[str]]:
        return cache(self.received)

    @cached_property
    def _digest(self) -> Callable[[str], bytes]:
        tensors = self.tensors  # a function that held this object would keep a client's model in memory
        return cache(lambda part: tensors_digest(tensors(part)))


def tensors_digest(tensors: Tensors) -> bytes:
    """SHA-256 of tensors, their names and shapes."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\0".encode())
        hashed.update(content(tensor.detach().cpu().contiguous()))
        let_go([tensor])
    return hashed.digest()


def agreed_on(job: str, start: str) -> bytes:
    """What clients of a sum must have in common, from digests of the job and of the start model."""
    return f"{job} {start}".encode()


def session(run: bytes, agreement: bytes, round: int, attempt: bytes) -> bytes:
    """What every key and signature of an attempt is bound to."""
    return digest(b"fedstrata session", run, agreement, round.to_bytes(8, "big"), attempt)


def sum_rules_of(job: Job) -> SumRules | None:
    """What a client of a job knows of its masked sums; None where parts travel as they are."""
    if not job.privacy.sum_only:
        return None
    return SumRules(job.method, job.task.kind, Streams(job.train.seed), least=least_of(job))


def least_of(job: Job) -> int:
    """Fewest clients whose sum is opened: no fewer than share the noise."""
    return max(LEAST, job.privacy.honest or 1)


def check_senders(job: Job, round: int, plans: Mapping[str, Plan]) -> None:
    """Refuse a round of masked sums in which a part is sent by so few that their sum would tell of each.

    Args:
        job: the job.
        round: 0-based.
        plans: client of the round -> its plan.

    Raises:
        UserError: there is such a part, nothing is sent, or there are too many clients.
    """
    if not job.privacy.sum_only:
        return
    sends = {name: plan.send for name, plan in plans.items()}
    if not any(sends.values()):
        raise UserError(
            f"[privacy] sum_only: in round {round + 1} nobody sends anything that could be summed; expected false"
        )
    if len(sends) > MOST:
        raise UserError(
            f"[privacy] sum_only: takes at most {MOST} clients a round, found {len(sends)}, because the work of "
            "each grows with their number; a smaller clients.fraction helps"
        )
    for group in groups_of(sends):
        if len(group.senders) < least_of(job):
            raise UserError(
                f"[privacy] sum_only: in round {round + 1} only {_some(group.senders)} would send "
                f"{group.parts[0]}, and a sum of fewer than {least_of(job)} clients is not opened; more clients, "
                "a larger clients.fraction, or the same layers and ranks for all help"
            )


def _some(clients: Sequence[str], shown: int = 4) -> str:
    """Names of clients in a sentence, the first few of many."""
    more = [f"{len(clients) - shown:,} more"] if len(clients) > shown else []
    *first, last = [*clients[:shown], *more]
    return f"{', '.join(first)} and {last}" if first else last
