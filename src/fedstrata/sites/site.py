"""A client in a place of its own: requests come in, replies go out, its rows stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from safetensors import safe_open

from fedstrata.client.answer import ClientData, ClientRuntime, Work, answer_request
from fedstrata.client.private import spending
from fedstrata.client.trainer import StepCallback, drain
from fedstrata.exchanges import EXCHANGES
from fedstrata.models.cut import SplitLink
from fedstrata.plan.kinds import Phase, Tensors, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Method, make_plan
from fedstrata.plan.schedule import ScheduleSpan, check_span
from fedstrata.privacy.accounting import epsilon_of
from fedstrata.sites.noise import SecretNoise, own_rows
from fedstrata.sites.noise_account import NoiseAccount
from fedstrata.wire.chain import check_received, receive, steps_of
from fedstrata.wire.codec import WireError, check, payload_bytes, wire_spec
from fedstrata.wire.on_disk import on_disk
from fedstrata.wire.store import read_tensors, write_tensors

KEPT_VERSIONS = 5
"""Versions of a part that stay on disk: a server that starts again may go back to the last but one it committed,
and has sent four since, to train and to be scored."""

NEEDS_PARTS: Collection[Phase] = ("train", "evaluate", "hidden_states")
"""Phases that begin with parts of the server's: each must be named, or what an earlier request left is taken."""

Reach = Callable[[Request], AbstractContextManager[SplitLink]]
"""Opens the way to the server's layers for a request."""


@dataclass
class Site:
    """One client.

    Attributes:
        name: its name.
        method: whose plans it carries out, and no others.
        task: the task's kind.
        runtime: its model, which holds the start model when the site is made, with trainer and scorer.
        data: its examples; without test rows of its own it is never scored.
        folder: its own disk.
        start: the file with the start model; None where nobody goes back to it.
        limit: most bytes that may leave it in reply to a request; None for no limit.
        callback: called after every step.
        reach: opens the way to the server's layers; None where the method has none there.
        account: of what noise has spent over all runs; None where nobody keeps it.
        leaving: told of a request and of every message of its activations, before it leaves.
    """

    name: str
    method: Method
    task: str
    runtime: ClientRuntime
    data: ClientData
    folder: Path
    start: Path | None = None
    limit: int | None = None
    callback: StepCallback = lambda step, steps, loss, seen: None
    reach: Reach | None = None
    leaving: Callable[[Request, Tensors], None] = lambda request, message: None
    shared: dict[str, tuple[int, Tensors]] = field(default_factory=dict)
    account: NoiseAccount | None = None

    def __post_init__(self) -> None:
        working = self.runtime.working
        if self.runtime.private:
            self._noise = SecretNoise(self.folder, own_rows(self.data.train, self.data.index))
            self.runtime.private.draw, self.runtime.private.at_site = self._noise, True
        streams = self.runtime.trainer.streams
        plan = make_plan(self.method, working.parts, self.task, 0, self.name, streams)
        away = plan.away(working.parts)
        held = [part for part in working.parts.names if part not in away]
        own = on_disk({part: working.tensors([part]) for part in held}, self.folder)
        self.shared |= {part: (0, tensors) for part, tensors in own.items()}
        for part in self.shared:
            if versions := self._on_disk(part):
                self.shared[part] = versions[-1], read_tensors(self._path(part, versions[-1]))

    def answer(self, request: Request) -> Reply:
        """The reply to a request: :meth:`take` it, then :meth:`carry_out`."""
        self.take(request)
        return self.carry_out(request)

    def take(self, request: Request) -> None:
        """Check a request and take over the parts that came with it.

        Raises:
            WireError: the request does not fit this client or its method.
        """
        self.check_plan(request)
        self._check_versions(request)
        if request.phase == "evaluate":
            self._check_score()
        for part, version in request.versions.items():
            if part in request.parts:
                self.shared[part] = version, self._received(part, request.parts[part])
            elif self.shared[part][0] != version:
                self.shared[part] = version, self._read(part, version)

    def carry_out(self, request: Request, copied: bool = True) -> Reply:
        """The reply to a request that has been taken; ``copied`` is that of :class:`fedstrata.client.answer.Work`.

        Raises:
            WireError: more would leave than the limit.
        """
        private, count = self.runtime.private, len(self.data.index)
        if private and self.account and request.phase == "train":
            release = spending(private.table, private.train, count, 1)
            self.account.spend(self.folder.name, request.round, private.table, release, self._noise.name)
        with self._holding(request.parts):
            reply, passed = self._carry_out(request, copied)
            reply = private.told_outside(reply) if private else reply
        _within(passed + sum(map(payload_bytes, reply.weights.values())), self.limit)
        return reply

    @cached_property
    def epsilon(self) -> float | None:
        """Privacy loss of one message with noise; None without noise."""
        private = self.runtime.private
        if private is None or self.account is None:
            return None
        one = spending(private.table, private.train, len(self.data.index), 1)
        return epsilon_of([one], self.account.delta, private.table.counted_by)

    def _carry_out(self, request: Request, copied: bool) -> tuple[Reply, int]:
        """The reply, and the bytes that have left for the server's layers on the way to it."""
        reach = self.reach(request) if self.reach and request.phase != "receive" else nullcontext()
        with reach as opened:
            link = _Metered(opened, self.limit, partial(self.leaving, request)) if opened else None
            work = Work(
                runtime=self.runtime,
                request=request,
                shared=self.shared,
                data=self.data,
                callback=self.callback,
                copied=copied,
                link=link,
            )
            reply = drain(answer_request(work, EXCHANGES[self.method.exchange].handlers))
            return reply, link.sent if link else 0

    @property
    def examples(self) -> int:
        """The number of its examples as the server is told; 1 where noise hides whether it has any."""
        private = self.runtime.private
        return 1 if private and private.table.level == "client" else len(self.data.index)

    def model(self, rounds: int) -> Weights:
        """The parts at this client after ``rounds`` rounds: personal ones, else the shared ones received."""
        personal = self.data.store.load(rounds)
        shapes = self.runtime.working.parts.shapes
        return {
            part: {name: personal.get(name, own[name]) for name in shapes[part]}
            for part, (_, own) in self.shared.items()
        }

    def check_plan(self, request: Request) -> None:
        """Refuse a request before anything is computed for it.

        Raises:
            WireError: it is for another client, of another round or place in the schedule, or by another plan.
        """
        parts, streams = self.runtime.working.parts, self.runtime.trainer.streams
        if request.client != self.name:
            raise WireError(f"client: is {request.client!r}, this is {self.name!r}")
        self._check_round(request)
        try:
            request.plan.check(parts)
            check_span(request.phase, request.span, request.round, self.method)
        except ValueError as error:
            raise WireError(str(error)) from None
        plan = make_plan(self.method, parts, self.task, max(request.round, 0), self.name, streams)
        if not EXCHANGES[self.method.exchange].fits(request, plan):
            raise WireError(f"plan: is not that of its method to {request.phase} in round {request.round + 1}")

    def _check_versions(self, request: Request) -> None:
        """Every part that the work begins with must be named, in a version that is here or comes along.

        Raises:
            WireError: a part is not named, or its version is not here.
        """
        if strange := (request.versions.keys() | request.parts.keys()) - self.shared.keys():
            raise WireError(f"versions: names no part of this client's model: {', '.join(sorted(strange))}")
        if alone := request.parts.keys() - request.versions.keys():
            raise WireError(f"{min(alone)}: comes without its version")
        for part, version in request.versions.items():
            before: int | None = version
            if part in request.parts:
                before = self._check_part(part, version, request.parts[part])
            held = self.shared[part][0]
            known = {None, held, *self._on_disk(part), *([0] if self.start else [])}
            if before not in known:
                raise WireError(f"{part}: version {before} was never sent, this client holds {held}")
        needed = set(request.plan.received(self.runtime.working.parts)) if request.phase in NEEDS_PARTS else set()
        if without := needed - request.versions.keys():
            raise WireError(f"versions: lacks {', '.join(sorted(without))}, from which the client is to start")

    def _check_round(self, request: Request) -> None:
        """What is told of a run before it, of bytes and of epsilon, is that of its rounds and no more.

        Raises:
            WireError: the round is none of them.
        """
        before = -1 if request.phase in ("evaluate", "receive") else 0
        if not before <= request.round < self.method.rounds:
            raise WireError(f"round: is {request.round}; expected {before} to {self.method.rounds - 1}")

    def _check_score(self) -> None:
        """It is scored on test rows of its own, and not where noise is to cover what it tells.

        Raises:
            WireError: it has none, or there is noise.
        """
        if not len(self.data.tests.get(self.name, ())):
            raise WireError(f"{self.name} has no test rows of its own")
        if self.runtime.private:
            raise WireError(f"{self.name} tells no score of its own rows: no noise covers it")

    def _check_part(self, part: str, version: int, message: Tensors) -> int | None:
        """Check a part; the version that it is a change against, None where it is whole."""
        shapes = self.runtime.working.parts.shapes[part]
        if version:
            return check_received(self.runtime.wire, message, shapes, version)
        check(message, wire_spec(shapes, "fp32"))
        return None

    def _received(self, part: str, message: Tensors) -> Tensors:
        """The part that a message leads to from whichever version it is a change against."""
        held = self.shared[part]
        if (steps := steps_of(message)) and steps[0].before != held[0]:
            held = steps[0].before, self._read(part, steps[0].before)
        return receive(self.runtime.wire, message, held)

    @contextmanager
    def _holding(self, received: Iterable[str]) -> Iterator[None]:
        """Keep what was sent on the disk, so that a site that starts again need not be sent it once more.

        It is written while the site works, and is there before the reply leaves.
        """
        paths = {part: self._path(part, self.shared[part][0]) for part in received}
        with ThreadPoolExecutor(1, "held parts") as thread:
            written = {part: thread.submit(write_tensors, paths[part], self.shared[part][1]) for part in paths}
            yield
        for part, checksum in written.items():
            self.data.store.note(self.folder / "held" / part, paths[part], checksum.result())
            for old in self._on_disk(part)[:-KEPT_VERSIONS]:
                self._path(part, old).unlink()

    def _read(self, part: str, version: int) -> Tensors:
        """A version that is not the newest."""
        if version or not self.start:
            return read_tensors(self._path(part, version))
        with safe_open(self.start, "pt") as file:
            return {name: file.get_tensor(name) for name in self.runtime.working.parts.shapes[part]}

    def _on_disk(self, part: str) -> list[int]:
        """Versions of a part, ascending."""
        found = (self.folder / "held").glob(f"{part}@*.safetensors")
        return sorted(int(path.stem.split("@")[1]) for path in found)

    def _path(self, part: str, version: int) -> Path:
        return self.folder / "held" / f"{part}@{version}.safetensors"


class _Metered:
    """A way to the server's layers on which no more leaves than the limit."""

    def __init__(self, link: SplitLink, limit: int | None, leaving: Callable[[Tensors], None]) -> None:
        self.link, self.limit, self.leaving, self.sent = link, limit, leaving, 0

    def begin(self, span: ScheduleSpan) -> None:
        self.link.begin(span)

    def forward(self, message: Tensors) -> Tensors:
        return self.link.forward(self._count(message))

    def backward(self, message: Tensors) -> Tensors:
        return self.link.backward(self._count(message))

    def _count(self, message: Tensors) -> Tensors:
        self.sent += payload_bytes(message)
        _within(self.sent, self.limit)
        self.leaving(message)
        return message


def _within(sent: int, limit: int | None) -> None:
    if limit is not None and sent > limit:
        raise WireError(f"its limit is {limit} bytes a round, this one takes {sent} or more")
