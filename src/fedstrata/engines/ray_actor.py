"""A worker as a Ray actor: it plays tasks in a thread of its own, and says meanwhile how far it is.

This module is imported on the cluster's machines, which need the same version of the package.
"""

from __future__ import annotations

import importlib
import json
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedstrata.engines.player import Assignment, ClientTask, PartKey, Player, failed
from fedstrata.engines.ray_frames import decode_tensors, encode_answer, encode_events
from fedstrata.engines.seed import load_seed
from fedstrata.errors import UserError
from fedstrata.events import Event

NEWS = 2.0
"""Seconds after which :meth:`RayActor.news` answers although there is none."""

UNSEEN = (
    "[engine] address: this run's clients keep files from round to round, and a machine of the cluster does not "
    "see them; expected an output.dir that all machines share, found {folder}"
)


class RayActor:
    """Plays tasks on a model of its own; see :class:`fedstrata.engines.player.Player`.

    Args:
        content: the seed's, by :func:`fedstrata.engines.seed.dump_seed`.
        arrays: reference to the arrays beside it, by number.
        threads: with which it computes.
        token: a file that the program has written into the run's folder, and what it holds.
    """

    def __init__(self, content: bytes, arrays: Sequence[Any], threads: int, token: tuple[str, str]) -> None:
        self.ray: Any = importlib.import_module("ray")
        self.computing = ThreadPoolExecutor(1, "client")  # torch sets its threads for each thread that computes
        self.events: list[Event] = []
        self.changed = threading.Condition()
        self.begin = content, arrays, threads
        self.token = token
        self.player: Player | None = None

    def about(self) -> str:
        """Where it runs and what it computes with, as JSON."""
        return json.dumps({**about_here(), "folder": self._sees_folder()})

    def play(self, task: Assignment, parts: Sequence[tuple[PartKey, object, Any]]) -> tuple[str, bytes, str, str]:
        """A task's answer and the events that have not been told yet.

        Args:
            task: the task.
            parts: name, tag and reference of what was published and this worker does not have.
        """
        answer = self.computing.submit(self._play, task, parts).result()
        return *answer, self._take()

    def news(self) -> str:
        """The events since the last call, as soon as there is one."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.events), NEWS)
        return self._take()

    def _play(self, task: Assignment, parts: Sequence[tuple[PartKey, object, Any]]) -> tuple[str, bytes, str]:
        try:
            self._check_place(task)
            self.player = self.player or self._make()
            for key, tag, reference in parts:
                self.player.published[key] = tag, decode_tensors(self.ray.get(reference))
            return encode_answer(self.player.run(task))
        except Exception as error:  # it could not be made, or what it predicts cannot travel
            return encode_answer(failed(error))

    def _sees_folder(self) -> bool:
        path, content = self.token
        return Path(path).is_file() and Path(path).read_text("utf-8") == content

    def _check_place(self, task: Assignment) -> None:
        """Refuse to keep hidden states where nobody deletes them when the run has ended.

        Raises:
            UserError: this machine does not see the run's folder.
        """
        caches = isinstance(task, ClientTask) and task.request.plan.freeze_encoder
        if caches and not self._sees_folder():
            raise UserError(UNSEEN.format(folder=Path(self.token[0]).parent))

    def _make(self) -> Player:
        import torch

        content, arrays, threads = self.begin
        torch.set_num_threads(threads)
        return Player(load_seed(content, self.ray.get(arrays[0])), self._tell)

    def _tell(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def _take(self) -> str:
        with self.changed:
            events, self.events = self.events, []
            self.changed.notify_all()
        return encode_events(events)


def about_here() -> dict[str, Any]:
    """This machine's name, the versions that are installed, and what its processor can do."""
    import torch

    versions = {name: version(name) for name in ("fedstrata", "torch", "transformers")}
    able = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    processor = [torch.backends.cpu.get_cpu_capability(), *able]
    return {"machine": socket.gethostname(), "versions": versions, "processor": processor}
