"""The process from which worker processes are forked, with the libraries loaded once for all of them.

It never computes, so it has no threads whose state a fork could tear. A worker ends when the connection to the
program that asked for it does, however that ended; so does this process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from fedstrata.engines.frames import receive, send
from fedstrata.events import Event

EVERY = 0.1
"""Seconds between two messages with events of a worker that is at a task; each wakes the program."""
GRACE = 5.0
"""Seconds that workers have to end by themselves."""


def live_apart() -> None:
    """Take no signals and no input that are meant for the program, and hear of one's own children's end."""
    os.setsid()  # a Ctrl-C is for the program, which then ends its workers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # whatever a library prints is no output of the program


def run_and_exit(work: Callable[[], None]) -> NoReturn:
    """The rest of a forked process: nothing of the program that it was forked from is run at its end."""
    code = 1
    try:
        work()
        code = 0
    except ConnectionError:
        pass  # the program that it works for is gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def serve(descriptor: int) -> None:
    """Load modules and fork workers as messages ask for it, until the program that sends them is gone.

    Args:
        descriptor: this process's end of the connection to it.
    """
    control = socket.socket(fileno=descriptor)
    importlib.import_module("fedstrata.engines.player")
    children: set[int] = set()
    with contextlib.suppress(EOFError):
        while True:
            message, files = receive(control)
            if not files:
                for name in message:
                    with contextlib.suppress(ImportError):
                        importlib.import_module(name)
                gc.freeze()
                continue
            if not (child := os.fork()):
                control.close()
                os.environ.update(message)
                run_and_exit(partial(_work, socket.socket(fileno=files[0])))
            os.close(files[0])
            children.add(child)
            children -= _ended(children)
    until = time.monotonic() + GRACE
    while children and time.monotonic() < until:
        children -= _ended(children)
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _ended(children: set[int]) -> set[int]:
    """Those of the children that have ended."""
    return {child for child in children if os.waitpid(child, os.WNOHANG)[0]}


class _Events:
    """Events that wait to be sent: with the next answer, or alone if it is not soon."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.waiting, self.sent = list[Event](), time.monotonic()

    def tell(self, event: Event) -> None:
        self.waiting.append(event)
        if time.monotonic() - self.sent > EVERY:
            send(self.connection, self.taken())

    def taken(self) -> list[Event]:
        taken, self.waiting, self.sent = self.waiting, [], time.monotonic()
        return taken


def _work(connection: socket.socket) -> None:
    """Answer tasks one after another."""
    import torch

    from fedstrata.engines.player import Played, Player, failed, without_weights
    from fedstrata.engines.seed import load_seed
    from fedstrata.engines.shared_memory import read_shared, write_shared

    inbox: queue.SimpleQueue[tuple[Any, list[int]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    (content, places, threads), [file] = inbox.get()
    torch.set_num_threads(threads)
    events = _Events(connection)
    try:
        seed = load_seed(content, read_shared(file, places))
        player = Player(seed, events.tell)
    except Exception as error:
        send(connection, ([], failed(error), []))
        return
    send(connection, os.getpid())  # ready
    while True:
        message, files = inbox.get()
        if isinstance(message, tuple):
            key, tag, places = message
            player.published[key] = tag, read_shared(files[0], places)
            continue
        answer = player.run(message)
        if isinstance(answer, Played):
            answer, tensors = without_weights(answer)
            shared = write_shared(tensors)
            send(connection, (events.taken(), answer, shared.places), [shared.descriptor])
            shared.close()
        else:
            send(connection, (events.taken(), answer, []))


def _listen(connection: socket.socket, inbox: queue.SimpleQueue[tuple[Any, list[int]]]) -> None:
    """Take messages as they come; end this process, whatever it is at, when there can be no more.

    A message that cannot be read ends it too, with a traceback: nobody else would answer for it.
    """

    def take() -> None:
        with contextlib.suppress(EOFError):
            while True:
                inbox.put(receive(connection))

    run_and_exit(take)
