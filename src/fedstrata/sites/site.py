"""A client in a place of its own: requests come in, replies go out, its rows stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from fedstrata.client.answer import ClientData, ClientRuntime, Work, answer_request
from fedstrata.client.trainer import StepCallback, drain
from fedstrata.exchanges import EXCHANGES
from fedstrata.models.cut import SplitLink
from fedstrata.models.parts import part_tensors
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Method, make_plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.wire.codec import WireError, check, payload_bytes, wire_spec
from fedstrata.wire.store import read_tensors, write_tensors

KEPT_VERSIONS = 5
"""Versions of a part that stay on disk: a server that starts again may go back to the last but one it committed,
and has sent four since, to train and to be scored."""

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
    shared: dict[str, tuple[int, Tensors]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        working = self.runtime.working
        streams = self.runtime.trainer.streams
        plan = make_plan(self.method, working.parts, self.task, 0, self.name, streams)
        away = plan.away(working.parts)
        for part in working.parts.names:
            if part not in away:
                own = part_tensors(working.model, working.parts, [part])
                self.shared[part] = 0, {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
        for part in self.shared:
            if versions := self._on_disk(part):
                self.shared[part] = versions[-1], read_tensors(self._path(part, versions[-1]))

    def answer(self, request: Request) -> Reply:
        """The reply to a request.

        Raises:
            WireError: the request does not fit this client, its method or its limit.
        """
        self._check(request)
        for part, version in request.versions.items():
            if part in request.parts:
                self._hold(part, version, self.runtime.wire.decode(request.parts[part]))
            elif self.shared[part][0] != version:
                self.shared[part] = version, self._read(part, version)
        reach = self.reach(request) if self.reach and request.phase != "receive" else nullcontext()
        with reach as link:
            work = Work(
                runtime=self.runtime,
                request=request,
                shared=self.shared,
                data=self.data,
                callback=self.callback,
                link=link and _Metered(link, self.limit),
            )
            reply = drain(answer_request(work, EXCHANGES[self.method.exchange].handlers))
        _within(sum(map(payload_bytes, reply.weights.values())), self.limit)
        return reply

    def model(self, rounds: int) -> Weights:
        """The parts at this client after ``rounds`` rounds: personal ones, else the shared ones received."""
        personal = self.data.store.load(rounds)
        shapes = self.runtime.working.parts.shapes
        return {
            part: {name: personal.get(name, own[name]) for name in shapes[part]}
            for part, (_, own) in self.shared.items()
        }

    def _check(self, request: Request) -> None:
        """Refuse a request that its own method would not make.

        Raises:
            WireError: it is for another client, by another plan, or of parts or versions that do not fit.
        """
        parts, streams = self.runtime.working.parts, self.runtime.trainer.streams
        if request.client != self.name:
            raise WireError(f"client: is {request.client!r}, this is {self.name!r}")
        try:
            request.plan.check(parts)
        except ValueError as error:
            raise WireError(str(error)) from None
        plan = make_plan(self.method, parts, self.task, max(request.round, 0), self.name, streams)
        if not EXCHANGES[self.method.exchange].fits(request, plan):
            raise WireError(f"plan: is not that of its method to {request.phase} in round {request.round + 1}")
        if strange := (request.versions.keys() | request.parts.keys()) - self.shared.keys():
            raise WireError(f"versions: names no part of this client's model: {', '.join(sorted(strange))}")
        for part, message in request.parts.items():
            self._check_part(request, part, message)
        for part, version in request.versions.items():
            held = self.shared[part][0]
            known = {held, *self._on_disk(part), *([0] if self.start else [])}
            if part not in request.parts and version not in known:
                raise WireError(f"{part}: version {version} was never sent, this client holds {held}")
        if request.phase == "evaluate" and not len(self.data.tests.get(self.name, ())):
            raise WireError(f"{self.name} has no test rows of its own")

    def _check_part(self, request: Request, part: str, message: Tensors) -> None:
        if part not in request.versions:
            raise WireError(f"{part}: comes without its version")
        shapes = self.runtime.working.parts.shapes[part]
        if request.versions[part]:
            self.runtime.wire.check(message, shapes)
        else:
            check(message, wire_spec(shapes, "fp32"))

    def _hold(self, part: str, version: int, new: Tensors) -> None:
        """Keep what was sent, so that a site that starts again need not be sent it once more."""
        self.shared[part] = version, new
        path = self._path(part, version)
        self.data.store.note(self.folder / "held" / part, path, write_tensors(path, new))
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

    def __init__(self, link: SplitLink, limit: int | None) -> None:
        self.link, self.limit, self.sent = link, limit, 0

    def begin(self, span: ScheduleSpan) -> None:
        self.link.begin(span)

    def forward(self, message: Tensors) -> Tensors:
        return self.link.forward(self._count(message))

    def backward(self, message: Tensors) -> Tensors:
        return self.link.backward(self._count(message))

    def _count(self, message: Tensors) -> Tensors:
        self.sent += payload_bytes(message)
        _within(self.sent, self.limit)
        return message


def _within(sent: int, limit: int | None) -> None:
    if limit is not None and sent > limit:
        raise WireError(f"its limit is {limit} bytes a round, this one takes {sent} or more")
