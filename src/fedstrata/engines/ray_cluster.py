"""Workers as actors on a Ray cluster that exists: ``[engine] name = "pool"`` with an ``address``.

Weights are put into Ray's object store once per version; each machine fetches them once for all its workers. A
cluster is trusted wholly: whoever reaches its ports can run code on its machines, and on the one that runs this.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstrata.engines.player import Answer, Assignment, ClientTask, PartKey, Played
from fedstrata.engines.ray_actor import UNSEEN, RayActor, about_here
from fedstrata.engines.ray_frames import WorkerError, decode_answer, decode_events, encode_tensors
from fedstrata.engines.seed import Seed, dump_seed
from fedstrata.errors import UserError, first_words, plural
from fedstrata.events import Event
from fedstrata.plan.kinds import Tensors

ANSWER = 15.0
"""Seconds in which a cluster must answer."""
PLACE = 300.0
"""Seconds in which it must find a place for a worker."""
_own: list[str] = []
"""Address of the cluster that :func:`connect` has connected to."""
TURN = 1.0
"""Seconds between looks at what is late."""
LATE = (
    "[engine] address: the cluster has found no place for a worker of {what} for {seconds:.0f} s; it needs less "
    "with fewer engine.workers and --resume, or with fewer engine.threads in another folder"
)


def connect(address: str) -> Any:
    """Ray, connected to a cluster.

    Args:
        address: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.

    Raises:
        UserError: Ray is not installed, or no cluster answers there.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anybody
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError("[engine] address: needs the extra 'ray': pip install 'fedstrata[ray]'") from None
    if ray.is_initialized() and (address == "auto" or address in _own):
        return ray
    if ray.is_initialized() and not _own:
        raise UserError(
            f"[engine] address: is {address!r}, but this program is connected to a Ray cluster already; expected "
            "'auto', which is that one"
        )
    disconnect(ray)
    where = _address(address)
    _check_open(address, where)
    try:
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # of any kind, by what is wrong
        raise _no_cluster(address, first_words(error)) from None
    _own.append(address)
    return ray


def disconnect(ray: Any) -> None:
    """Leave the cluster, unless the caller was connected to it before."""
    if _own:
        _own.clear()
        ray.shutdown()


def cluster_size(address: str, kind: str) -> int:
    """How many CPUs or GPUs a cluster has: ``kind`` is Ray's name of them."""
    return int(connect(address).cluster_resources().get(kind, 0))


def _address(address: str) -> str:
    """Of ``auto`` the address that the cluster on this machine has."""
    if address != "auto":
        return address
    services = importlib.import_module("ray._private.services")
    try:
        found = os.environ.get("RAY_ADDRESS") or services.canonicalize_bootstrap_address("auto")
    except Exception as error:
        raise _no_cluster(address, first_words(error)) from None
    if not found:
        raise _no_cluster(address, "none runs on this machine")
    return str(found)


def _check_open(address: str, where: str) -> None:
    """Whether anybody listens there: Ray itself waits a minute, or ends the program."""
    host, _, port = where.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, getattr(error, "strerror", None) or str(error)) from None


def _no_cluster(address: str, why: str) -> UserError:
    return UserError(
        f"[engine] address: no Ray cluster answers at {address!r} ({why}); expected one that runs, as after "
        "'ray start --head'"
    )


@dataclass
class _Worker:
    """An actor: what is awaited of it, what it has, and whether it is known to be fit."""

    actor: Any
    about: Any
    started: float
    has: dict[PartKey, object] = field(default_factory=dict)
    folder: bool | None = None


class RayWorkers:
    """Ray actors; see :class:`fedstrata.engines.pool.Workers`.

    Args:
        ray: connected, see :func:`connect`.
        seed: what each worker is made of.
        threads: of each.
        gpu: each has a GPU.
        folder: the run's, in which workers of clients that keep something write.
    """

    at_once = 1  # an actor with several threads keeps no order

    def __init__(self, ray: Any, seed: Seed, threads: int, gpu: bool, folder: Path) -> None:
        self.ray, self.threads, self.folder = ray, threads, folder.absolute()
        content, arrays = dump_seed(seed, mapped=False)
        self.begin = content, [ray.put({number: tensor.numpy() for number, tensor in arrays.items()})], threads
        self.token = self.folder / f".workers-{secrets.token_hex(8)}", secrets.token_hex(16)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.token[0].write_text(self.token[1], "utf-8")
        self.actor = ray.remote(RayActor).options(
            num_cpus=threads, num_gpus=int(gpu), max_concurrency=3, max_restarts=0
        )
        self.what = plural(threads, "CPU") + (" and a GPU" if gpu else "")
        self.published: dict[PartKey, tuple[object, Any]] = {}
        self.workers: dict[int, _Worker] = {}
        self.awaited: dict[Any, tuple[int, str]] = {}
        self.fit: dict[str, Any] = {}
        self.started = 0

    def start(self) -> int:
        """Start a worker; its number."""
        number, self.started = self.started, self.started + 1
        path, content = self.token
        actor = self.actor.remote(*self.begin, (str(path), content))
        worker = self.workers[number] = _Worker(actor, actor.about.remote(), time.monotonic())
        self.awaited[worker.about] = number, "about"
        return number

    def publish(self, key: PartKey, tag: object, tensors: Tensors) -> None:
        """Make a part's tensors known to all workers, in place of those it had before."""
        self.published[key] = tag, self.ray.put(encode_tensors(tensors))

    def ask(self, number: int, task: Assignment) -> None:
        """Give a worker a task; that it has died instead is its next message."""
        worker = self.workers[number]
        if isinstance(task, ClientTask):
            task = replace(task, folder=task.folder.absolute())
        missing = [
            (key, *self.published[key]) for key in task.needs if worker.has.get(key) != self.published[key][0]
        ]
        worker.has |= {key: tag for key, tag, _ in missing}
        self.awaited[worker.actor.play.remote(task, missing)] = number, "play"
        if isinstance(task, ClientTask):
            self.awaited[worker.actor.news.remote()] = number, "news"

    def messages(self) -> Iterable[tuple[int, Event | Answer | None]]:
        """Wait for messages: of a worker an event, or its answer; None if it has died."""
        ready, _ = self.ray.wait(list(self.awaited), num_returns=1, timeout=TURN)
        for reference in ready:
            if reference in self.awaited:  # else its worker has been forgotten meanwhile
                number, kind = self.awaited.pop(reference)
                yield from self._message(number, kind, reference)
        late = time.monotonic() - PLACE
        if any(worker.folder is None and worker.started < late for worker in self.workers.values()):
            raise UserError(LATE.format(what=self.what, seconds=PLACE))

    def close(self) -> None:
        """End the workers and the connection."""
        for number in list(self.workers):
            self._forget(number)
        self.published.clear()
        self.token[0].unlink(missing_ok=True)
        self.begin = b"", [], 0
        disconnect(self.ray)

    def _message(self, number: int, kind: str, reference: Any) -> Iterable[tuple[int, Event | Answer | None]]:
        worker, errors = self.workers[number], self.ray.exceptions
        try:
            self._known(number)
            found = self.ray.get(reference)
        except errors.RayTaskError as error:  # of the actor itself, or of its making
            raise WorkerError(str(error)) from None
        except errors.RayError as error:
            if worker.folder is None:
                raise UserError(
                    f"[engine] address: a worker could not be started ({first_words(error)}); expected this "
                    "version of fedstrata on every machine of the cluster"
                ) from None
            self._forget(number)
            yield number, None
            return
        if kind == "news":
            yield from ((number, event) for event in decode_events(found))
            if any(awaited == (number, "play") for awaited in self.awaited.values()):
                self.awaited[worker.actor.news.remote()] = number, "news"
        elif kind == "play":
            *answer, events = found
            yield from ((number, event) for event in decode_events(events))
            yield number, self._answer(worker, decode_answer(*answer))

    def _known(self, number: int) -> None:
        """Wait until it is known what a worker is."""
        worker = self.workers[number]
        if worker.folder is None:
            worker.folder = self._check(json.loads(self.ray.get(worker.about)))

    def _answer(self, worker: _Worker, answer: Answer) -> Answer:
        if isinstance(answer, Played) and answer.notes and not worker.folder:
            raise UserError(UNSEEN.format(folder=self.folder))
        return answer

    def _check(self, about: dict[str, Any]) -> bool:
        """Whether a worker sees the run's folder; it must have the versions and the processor of the others.

        Raises:
            UserError: it has not.
        """
        self.fit = self.fit or {**about, "versions": about_here()["versions"]}
        for key, what in (("versions", "other versions"), ("processor", "another processor")):
            if about[key] != self.fit[key]:
                raise UserError(
                    f"[engine] address: {about['machine']} has {what} ({_shown(about[key])}) than "
                    f"{self.fit['machine'] if key == 'processor' else 'this program'} ({_shown(self.fit[key])}), "
                    "so the result would depend on where a client trains; expected machines of one kind"
                )
        return bool(about["folder"])

    def _forget(self, number: int) -> None:
        worker = self.workers.pop(number)
        self.awaited = {ref: to for ref, to in self.awaited.items() if to[0] != number}
        with contextlib.suppress(Exception):  # it is dead, or the cluster is
            self.ray.kill(worker.actor)


def _shown(found: Any) -> str:
    if isinstance(found, dict):
        return ", ".join(f"{name} {value}" for name, value in found.items())
    return " ".join(found)
