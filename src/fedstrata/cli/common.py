"""What the commands share: arguments, errors as sentences, how a run is stopped."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fedstrata.errors import FORBIDDEN, UserError
from fedstrata.wire.foreign import visible

JobFile = Annotated[Path, typer.Argument(help="Job file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the job file to set, such as method.rounds=10."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS and keys: for local tests, on one machine.")
]


class PlainConsole(Console):
    """A console that prints words as they are: ``[x]`` is no style, ``:x:`` no picture, nothing a command."""

    def render_str(self, text: str, **options: Any) -> Text:
        """As the base class, of what is visible."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """As the base class; texts of tables and bars are made visible here, as they come ready."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def plain_console(stderr: bool = False) -> Console:
    """The console of a command."""
    return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


def names_of(given: Sequence[str] | None) -> list[str]:
    """The names that an option was given, as ``a,b`` or several times."""
    return [name.strip() for words in given or () for name in words.split(",") if name.strip()]


def print_json(record: Any, **options: Any) -> None:
    """Print a record as JSON; where nobody reads on, as after ``| head -1``, the command ends as rich ends one."""
    try:
        print(json.dumps(record, **options), flush=True)
    except BrokenPipeError:
        raise typer.Exit(1) from None


def note_sweep(job: Path, seen: str = "") -> None:
    """Say on stderr that a ``[sweep]`` is left out, where the job file has one, but for what was ``seen``."""
    from fedstrata.job.file import sweep_table

    if sweep_table(job)[1]:
        note = (
            f"note: the [sweep] of {job} is left out{seen}: this is about its job alone, without a row's changes"
        )
        plain_console(stderr=True).print(note, soft_wrap=True)


_signals: list[int] = []
"""Signals that asked the command to stop, as long as :func:`check_stopped` has not answered them."""


@contextmanager
def sentences() -> Iterator[Console]:
    """Errors as one sentence and an exit code: 2 for the user's, 130 if stopped, 1 for the machine's."""
    console = plain_console()
    try:
        yield console
    except UserError as error:
        _fail(str(error), _code(error.__cause__))
    except KeyboardInterrupt as stop:
        _fail("; ".join(["stopped", *map(str, stop.args)]), 130)
    except OSError as error:
        _fail(f"{error.filename or 'system error'}: {error.strerror or error}", _code(error))


NO_MEMORY = re.compile(r"^MemoryError|OutOfMemoryError|out of memory|can't allocate memory|_STATUS_ALLOC_FAILED")
"""What Python or torch say where there is none left, of the machine or a GPU."""


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Whoever stops what writes into ``folder`` is told how it goes on, if there is anything to go on from.

    So is whom memory runs out for; torch says it by errors of several kinds.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not NO_MEMORY.search(said := f"{type(error).__name__}: {error}"):
            raise
        whose = "the GPU's memory" if "CUDA" in said else "memory"
        raise UserError(
            f"{whose} ran out; a run takes less with fewer engine.workers and --resume, or with a smaller "
            "train.batch_size in another folder"
        ) from None
    except KeyboardInterrupt:
        if folder.is_dir() and any(folder.iterdir()):
            hint = "the same command with --resume continues after the last finished round"
            raise KeyboardInterrupt(hint) from None
        raise


def stop_on_signals() -> None:
    """Let a termination signal or a terminal that is closed end a command as Ctrl-C does.

    They are remembered for :func:`check_stopped`.
    """
    _signals.clear()
    hangup = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
    for number in (signal.SIGTERM, signal.SIGINT, *hangup):  # ignored: by a shell with "&", or by nohup
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def check_stopped() -> None:
    """Stop a command that goes on although a signal asked it to stop; called with each event.

    Python discards what the signal's handler raises while a ``__del__`` runs.
    """
    if _signals and threading.current_thread() is threading.main_thread():
        _signals.clear()
        raise KeyboardInterrupt


def _code(error: BaseException | None) -> int:
    """The exit code where this is the system's own error, or None: 1 where a disk is full, say."""
    return 1 if isinstance(error, OSError) and error.errno not in FORBIDDEN else 2


def _fail(sentence: str, code: int) -> None:
    print(f"fedstrata: {visible(sentence)}", file=sys.stderr)
    raise typer.Exit(code)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _signals.append(number)
    raise KeyboardInterrupt
