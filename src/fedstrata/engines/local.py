"""The default engine: every client in this process, one model for all of them, nothing serialized."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedstrata.client.trainer import Worker, finish, handle
from fedstrata.events import Event, Stepped
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.server.layers import ServerLayers
from fedstrata.tasks import Examples
from fedstrata.wire.codec import dequantize
from fedstrata.wire.store import Store


@dataclass
class LocalEngine:
    """Plays the clients one after another.

    Attributes:
        worker: the one model.
        examples: training examples of all clients.
        shards: client -> its examples; the order is the canonical one.
        test: test examples, for phase ``evaluate``.
        tests: client -> whose test examples it is scored on -> those; empty where all of ``test`` serves everyone.
        folder: where each client's own disk stands.
        shared: part -> (version, tensors) as up-to-date clients hold them. One copy serves all clients: a request
            only ever needs the current version of a part, and what a client lacks of it comes with the request.
        tell: receives an event after every step.
        layers: what the server holds of the model, where batches pass through it.
    """

    worker: Worker
    examples: Examples
    shards: Mapping[str, Index]
    test: Examples
    tests: Mapping[str, Mapping[str, Index]]
    folder: Path
    shared: dict[str, tuple[int, Tensors]]
    tell: Callable[[Event], None]
    layers: ServerLayers | None = None

    def clients(self) -> list[str]:
        """The names of the shards."""
        return list(self.shards)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Answer each request before the next one is made; where all visit one set of layers, step by step."""
        if self.layers is None or self.layers.copies:
            for request in requests:
                yield finish(self._answer(request))
            return
        working = [self._answer(request) for request in requests]
        while working:
            for work in list(working):
                try:
                    next(work)
                except StopIteration as end:
                    working.remove(work)
                    yield end.value

    def _answer(self, request: Request) -> Generator[None, None, Reply]:
        for part, tensors in request.parts.items():
            if self.shared[part][0] != request.versions[part]:
                self.shared[part] = request.versions[part], dequantize(tensors)
        link = self.layers.visit(request) if self.layers and request.plan.server else None
        reply = yield from handle(
            self.worker,
            request,
            self.shared,
            self.test if request.phase == "evaluate" else self.examples,
            self.shards[request.client],
            self.tests.get(request.client),
            Store(self.folder / request.client),
            partial(self._told, request),
            link,
        )
        if self.layers and link:
            self.layers.leave(link)
        return reply

    def _told(self, request: Request, step: int, steps: int, loss: float, seen: int) -> None:
        self.tell(Stepped(request.round, request.client, step, steps, loss, seen))
