"""Workers on this machine: processes forked from a nursery, with weights and answers in shared memory."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedstrata.engines.frames import receive, send
from fedstrata.engines.nursery import live_apart, run_and_exit, serve
from fedstrata.engines.player import Answer, Assignment, PartKey, Played, with_weights
from fedstrata.engines.seed import Seed, dump_seed
from fedstrata.engines.shared_memory import SharedFile, read_shared, write_shared
from fedstrata.events import Event
from fedstrata.plan.kinds import Tensors

PATIENCE = 10.0
"""Seconds to wait for the processes to end."""
GPUS = "CUDA_VISIBLE_DEVICES"
"""Where CUDA reads which GPUs a process may use, by number or name."""


class _Child:
    """A process that was forked from this one, as :class:`subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = False

    def poll(self) -> int | None:
        """Zero once it has ended."""
        if not self.ended:
            try:
                self.ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # whoever started this program lets the system collect what has ended
                self.ended = True
        return 0 if self.ended else None

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process that forks workers; a fork of this program that has loaded its libraries, or a program anew."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | _Child | None = None

    def fork_now(self) -> None:
        """Fork it from this program, which must have loaded the libraries and computed nothing yet.

        Loading them again would take seconds. Once torch has computed with several threads a fork can hang.
        """
        self.control, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the threads are those of an idle OpenBLAS
            pid = os.fork()
        if not pid:
            self.control.close()
            live_apart()
            run_and_exit(lambda: serve(theirs.detach()))
        theirs.close()
        self.process = _Child(pid)

    def start(self) -> None:
        """Start it as a program of its own, unless it lives."""
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        self.control, theirs = socket.socketpair()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from fedstrata.engines.nursery import live_apart, serve; live_apart(); serve({theirs.fileno()})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not live through a fork
            )

    def load(self, modules: Sequence[str]) -> None:
        """Let it load modules that all workers need, where they are there."""
        self.start()
        with contextlib.suppress(ConnectionError):
            send(self.control, list(modules))

    def fork(self, environment: Mapping[str, str]) -> socket.socket:
        """A new worker's connection."""
        self.start()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):  # a worker that never came is heard of as one that died
            send(self.control, dict(environment), [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Wait for it and its workers to end."""
        if self.process is None:
            return
        self.control.close()
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        self.process.kill()
        self.process = None


def gpu_names(count: int) -> list[str]:
    """What CUDA calls the first ``count`` of the GPUs that this process may use."""
    named = os.environ.get(GPUS)
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


@dataclass
class _Process:
    """A worker process: its connection and GPU, its id once it is known, and the tags of the parts that it has."""

    connection: socket.socket
    gpu: str = ""
    pid: int = 0
    has: dict[PartKey, object] = field(default_factory=dict)


class Processes:
    """Worker processes on this machine; see :class:`fedstrata.engines.pool.Workers`.

    Args:
        nursery: forks them.
        seed: what each is made of.
        threads: of each.
        gpus: how many GPUs they are dealt to, of those that this process may use; 0 on the CPU.
    """

    at_once = 2

    def __init__(self, nursery: Nursery, seed: Seed, threads: int, gpus: int = 0) -> None:
        self.nursery, self.threads, self.gpus = nursery, threads, gpu_names(gpus)
        self.content, arrays = dump_seed(seed)
        self.arrays = write_shared(arrays)
        self.published: dict[PartKey, tuple[object, SharedFile]] = {}
        self.processes: dict[int, _Process] = {}
        self.started = 0
        self.selector = selectors.DefaultSelector()

    def start(self) -> int:
        """Start a worker; its number."""
        number, taken = self.started, [process.gpu for process in self.processes.values()]
        gpu = min(self.gpus, key=taken.count, default="")  # of one that has died its own
        process = _Process(self.nursery.fork({GPUS: gpu} if gpu else {}), gpu)
        with contextlib.suppress(ConnectionError):
            message = (self.content, self.arrays.places, self.threads)
            send(process.connection, message, [self.arrays.descriptor])
        self.processes[number] = process
        self.selector.register(process.connection, selectors.EVENT_READ, number)
        self.started += 1
        return number

    def publish(self, key: PartKey, tag: object, tensors: Tensors) -> None:
        """Make a part's tensors known to all workers, in place of those it had before."""
        old = self.published.get(key)
        self.published[key] = tag, write_shared(tensors)
        if old:
            old[1].close()

    def ask(self, number: int, task: Assignment) -> None:
        """Give a worker a task; that it has died instead is its next message."""
        process = self.processes[number]
        with contextlib.suppress(ConnectionError):
            for key in task.needs:
                tag, file = self.published[key]
                if key not in process.has or process.has[key] != tag:
                    send(process.connection, (key, tag, file.places), [file.descriptor])
                    process.has[key] = tag
            send(process.connection, task)

    def messages(self) -> Iterable[tuple[int, Event | Answer | None]]:
        """Wait for messages: of a worker an event, or its answer; None if it has died."""
        for key, _ in self.selector.select():
            number: int = key.data
            process = self.processes[number]
            try:
                message, files = receive(process.connection)
            except EOFError:
                self._forget(number)
                yield number, None
                continue
            if isinstance(message, int):
                process.pid = message
                continue
            events, answer, places = message if isinstance(message, tuple) else (message, None, [])
            for event in events:
                yield number, event
            if isinstance(answer, Played):
                answer = with_weights(answer, read_shared(files[0], places))
            if answer is not None:
                yield number, answer

    def close(self) -> None:
        """End the workers."""
        for number in list(self.processes):
            self._forget(number)
        self.selector.close()
        for _, file in self.published.values():
            file.close()
        self.published.clear()
        self.arrays.close()

    def _forget(self, number: int) -> None:
        connection = self.processes.pop(number).connection
        self.selector.unregister(connection)
        connection.close()
