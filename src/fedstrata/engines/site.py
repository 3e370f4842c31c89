"""A client in a place of its own: messages come in, messages go out, its rows stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.core.client import Reply, Request, Told, Worker, finish, handle
from fedstrata.core.parts import Tensors, tensors
from fedstrata.core.store import Store, read_tensors, write_tensors
from fedstrata.tasks import Examples
from fedstrata.wire.messages import of_reply, of_request, reply_in, request_in
from fedstrata.wire.tensors import WireError, check, widen


@dataclass
class Site:
    """One client.

    Attributes:
        name: its name.
        worker: its model, which holds the start model when the site is made.
        train: its training examples.
        test: its test examples; None where it is never scored.
        folder: its own disk.
        allow: what may leave it: ``weights``, ``features``.
        told: called after every step.
    """

    name: str
    worker: Worker
    train: Examples
    test: Examples | None
    folder: Path
    allow: Sequence[str]
    told: Told = lambda step, steps, loss, seen: None

    def __post_init__(self) -> None:
        model, parts = self.worker.model, self.worker.parts
        start = {part: tensors(model, parts, [part]) for part in parts.names}
        self.shared: dict[str, tuple[int, Tensors]] = {
            part: (0, {name: tensor.clone() for name, tensor in own.items()}) for part, own in start.items()
        }
        for path in sorted((self.folder / "held").glob("*@*.safetensors")):
            part, version = path.stem.split("@")
            self.shared[part] = int(version), read_tensors(path)

    def answer(self, message: bytes) -> bytes:
        """The reply to a request.

        Raises:
            WireError: the message is no request that this client can answer, or asks for what may not leave it.
        """
        request = request_in(message)
        self._check(request)
        for part, new in request.parts.items():
            self._hold(part, request.versions[part], widen(new))
        evaluates = request.phase == "evaluate"
        examples = self.test if evaluates else self.train
        assert examples is not None
        reply = finish(
            handle(
                self.worker,
                request,
                self.shared,
                examples,
                np.arange(len(self.train)),
                {self.name: np.arange(len(examples))} if evaluates else None,
                Store(self.folder),
                self.told,
            )
        )
        return of_reply(reply)

    def _check(self, request: Request) -> None:
        parts = self.worker.parts
        if request.client != self.name:
            raise WireError(f"client: is {request.client!r}, this is {self.name!r}")
        try:
            request.plan.check(parts)
        except ValueError as error:
            raise WireError(str(error)) from None
        if strange := (request.versions.keys() | request.parts.keys()) - set(parts.names):
            raise WireError(f"versions: names no part of the model: {', '.join(sorted(strange))}")
        for part, sent in request.parts.items():
            if part not in request.versions:
                raise WireError(f"{part}: comes without its version")
            check(sent, parts.shapes[part], self.worker.dtype if request.versions[part] else "fp32")
        for part, version in request.versions.items():
            held = self.shared[part][0]
            if part not in request.parts and held != version:
                raise WireError(f"{part}: version {version} was never sent, this client holds {held}")
        leaves = "activations" if request.plan.server else "features" if request.phase == "features" else "weights"
        if leaves not in self.allow:
            raise WireError(f"{self.name} lets nothing leave but {', '.join(self.allow)}; asked for {leaves}")
        if request.phase == "evaluate" and self.test is None:
            raise WireError(f"{self.name} has no test rows of its own")

    def _hold(self, part: str, version: int, new: Tensors) -> None:
        """Keep what was sent, so that a site that starts again need not be sent it once more."""
        self.shared[part] = version, new
        path = self.folder / "held" / f"{part}@{version}.safetensors"
        write_tensors(path, new)
        for old in path.parent.glob(f"{part}@*.safetensors"):
            if old != path:
                old.unlink()


@dataclass
class Sites:
    """The engine over sites: a request goes out as a message, its reply comes back as one.

    Attributes:
        names: the sites' names, in canonical order.
        send: brings a message to a site and returns its answer.
    """

    names: Sequence[str]
    send: Callable[[str, bytes], bytes]

    def clients(self) -> Sequence[str]:
        """The sites' names."""
        return self.names

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """One reply per request.

        Raises:
            WireError: an answer is no reply, or another client's.
        """
        for request in requests:
            reply = reply_in(self.send(request.client, of_request(request)))
            if reply.client != request.client:
                raise WireError(f"client {request.client}: answers as {reply.client!r}")
            yield reply
