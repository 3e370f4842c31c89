"""A client in a place of its own: requests come in, replies go out, its rows stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from fedstrata.client.trainer import StepCallback, Worker, finish, handle
from fedstrata.cost.ledger import size
from fedstrata.models.cut import SplitLink
from fedstrata.models.parts import part_tensors
from fedstrata.plan.kinds import Index, Tensors, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Method
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.tasks import Examples
from fedstrata.wire.codec import WireError, check, dequantize
from fedstrata.wire.store import Store, read_tensors, write_tensors

OLD = 3
"""Versions of a part that stay on disk: a server that starts again may go back to the last it committed, and has
sent two since, to train and to be scored."""


@dataclass
class Site:
    """One client.

    Attributes:
        name: its name.
        method: whose plans it carries out, and no others.
        kind: the task's.
        worker: its model, which holds the start model when the site is made.
        train: examples, of which it trains on
        own: these.
        test: examples, of which it is scored on
        tested: these; none where it is never scored.
        folder: its own disk.
        start: the file with the start model; None where nobody goes back to it.
        limit: most bytes that may leave it in answer to a request; None for no limit.
        told: called after every step.
        reach: makes the way to the server's layers for a request; None where the method has none there.
    """

    name: str
    method: Method
    kind: str
    worker: Worker
    train: Examples
    own: Index
    test: Examples
    tested: Index
    folder: Path
    start: Path | None = None
    limit: int | None = None
    told: StepCallback = lambda step, steps, loss, seen: None
    reach: Callable[[Request], AbstractContextManager[SplitLink]] | None = None
    shared: dict[str, tuple[int, Tensors]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, parts = self.worker.model, self.worker.parts
        plan = self.method.plan(parts, self.kind, 0, self.name, self.worker.streams)
        for part in parts.names:
            if part not in plan.server:
                own = part_tensors(model, parts, [part])
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
                self._hold(part, version, dequantize(request.parts[part]))
            elif self.shared[part][0] != version:
                self.shared[part] = version, self._read(part, version)
        scored = request.phase == "evaluate"
        way = self.reach(request) if self.reach and request.phase != "receive" else nullcontext()
        with way as link:
            reply = finish(
                handle(
                    self.worker,
                    request,
                    self.shared,
                    self.test if scored else self.train,
                    self.own,
                    {self.name: self.tested} if scored else None,
                    Store(self.folder),
                    self.told,
                    link and _Metered(link, self.limit),
                )
            )
        _within(sum(size(sent) for sent in reply.weights.values()), self.limit)
        return reply

    def model(self, rounds: int) -> Weights:
        """What has become of the parts at this client after so many rounds."""
        kept = Store(self.folder).load(rounds)
        shapes = self.worker.parts.shapes
        return {
            part: {name: kept.get(name, own[name]) for name in shapes[part]}
            for part, (_, own) in self.shared.items()
        }

    def _check(self, request: Request) -> None:
        parts, asked = self.worker.parts, request.plan
        if request.client != self.name:
            raise WireError(f"client: is {request.client!r}, this is {self.name!r}")
        try:
            asked.check(parts)
        except ValueError as error:
            raise WireError(str(error)) from None
        mine = self.method.plan(parts, self.kind, max(request.round, 0), self.name, self.worker.streams)
        exchange = self.method.exchange
        fits = {
            "train": exchange != "hidden_states" and asked == mine,
            "hidden_states": exchange == "hidden_states" and not asked.send,
            "evaluate": not (asked.train or asked.send) and (asked.keep, asked.server) == (mine.keep, mine.server),
            "receive": not (asked.train or asked.send),
        }
        if not fits[request.phase]:
            raise WireError(f"plan: is not that of its method to {request.phase} in round {request.round}")
        if strange := (request.versions.keys() | request.parts.keys()) - self.shared.keys():
            raise WireError(f"versions: names no part of this client's model: {', '.join(sorted(strange))}")
        for part, sent in request.parts.items():
            if part not in request.versions:
                raise WireError(f"{part}: comes without its version")
            check(sent, parts.shapes[part], self.worker.dtype if request.versions[part] else "fp32")
        for part, version in request.versions.items():
            held = self.shared[part][0]
            known = {held, *self._on_disk(part), *([0] if self.start else [])}
            if part not in request.parts and version not in known:
                raise WireError(f"{part}: version {version} was never sent, this client holds {held}")
        if request.phase == "evaluate" and not len(self.tested):
            raise WireError(f"{self.name} has no test rows of its own")

    def _hold(self, part: str, version: int, new: Tensors) -> None:
        """Keep what was sent, so that a site that starts again need not be sent it once more."""
        self.shared[part] = version, new
        write_tensors(self._path(part, version), new)
        for old in self._on_disk(part)[:-OLD]:
            self._path(part, old).unlink()

    def _read(self, part: str, version: int) -> Tensors:
        """A version that is not the newest."""
        if version or not self.start:
            return read_tensors(self._path(part, version))
        with safe_open(self.start, "pt") as file:
            return {name: file.get_tensor(name) for name in self.worker.parts.shapes[part]}

    def _on_disk(self, part: str) -> list[int]:
        """Versions of a part, in their order."""
        found = (self.folder / "held").glob(f"{part}@*.safetensors")
        return sorted(int(path.stem.split("@")[1]) for path in found)

    def _path(self, part: str, version: int) -> Path:
        return self.folder / "held" / f"{part}@{version}.safetensors"


class _Metered:
    """A way to the server's layers on which no more leaves than the limit."""

    def __init__(self, link: SplitLink, limit: int | None) -> None:
        self.link, self.limit, self.sent = link, limit, 0

    def begin(self, pace: ScheduleSpan) -> None:
        self.link.begin(pace)

    def forward(self, message: Tensors) -> Tensors:
        return self.link.forward(self._count(message))

    def backward(self, message: Tensors) -> Tensors:
        return self.link.backward(self._count(message))

    def _count(self, message: Tensors) -> Tensors:
        self.sent += size(message)
        _within(self.sent, self.limit)
        return message


def _within(sent: int, limit: int | None) -> None:
    if limit is not None and sent > limit:
        raise WireError(f"its limit is {limit} bytes a round, this one takes {sent} or more")
