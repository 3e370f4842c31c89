"""The default engine: every client in this process, one model for all of them, nothing serialized."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from fedstrata.client.answer import ClientData, ClientRuntime, Connect, Handlers, Work, answer_request
from fedstrata.client.trainer import drain
from fedstrata.events import Event, Stepped
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.wire.chain import receive


@dataclass
class LocalEngine:
    """Plays the clients one after another.

    Attributes:
        runtimes: models with trainers, which take requests in turn; with interleaved clients the first alone.
        handlers: the client's half of the exchange.
        data: client -> what it has; the order is the canonical one.
        shared: part -> (version, tensors) as up-to-date clients hold them. One copy serves all clients: a request
            only ever needs the current version of a part, and what a client lacks of it comes with the request.
        connect: opens a client's way to the server's layers.
        interleaved: clients take turns step by step.
        tell: receives an event after every step.
    """

    runtimes: Sequence[ClientRuntime]
    handlers: Handlers
    data: Mapping[str, ClientData]
    shared: dict[str, tuple[int, Tensors]]
    connect: Connect
    interleaved: bool
    tell: Callable[[Event], None]

    def clients(self) -> list[str]:
        """The clients' names."""
        return list(self.data)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Answer each request before the next one is made; interleaved clients step by step."""
        if not self.interleaved:
            for runtime, request in zip(cycle(self.runtimes), requests, strict=False):
                yield drain(self._answer(runtime, request))
            return
        working = [self._answer(self.runtimes[0], request) for request in requests]
        while working:
            for answer in list(working):
                try:
                    next(answer)
                except StopIteration as end:
                    working.remove(answer)
                    yield end.value

    def _answer(self, runtime: ClientRuntime, request: Request) -> Generator[None, None, Reply]:
        for part, message in request.parts.items():
            if self.shared[part][0] != request.versions[part]:
                self.shared[part] = request.versions[part], receive(runtime.wire, message, self.shared[part])
        with self.connect(request) as link:
            work = Work(
                runtime=runtime,
                request=request,
                shared=self.shared,
                data=self.data[request.client],
                callback=partial(self._stepped, request),
                link=link,
            )
            return (yield from answer_request(work, self.handlers))

    def _stepped(self, request: Request, step: int, steps: int, loss: float, seen: int) -> None:
        self.tell(Stepped(request.round, request.client, step, steps, loss, seen))
