"""Where a run's seconds go.

    python benchmarks/profile_run.py [JOB] [KEY=VALUE ...] [--json FILE]

Without a job: a few clients with a small model on made-up text. The job runs in this process (``engine.name`` is
set to ``inprocess``), its functions wrapped from outside; a second run, with torch.profiler on for its first 50
steps, divides the time of operators by their kinds. A row is time in it and not in a row within it; "other" is the
rest, so the rows add up to the wall time. (Not named ``profile.py``: that would hide Python's own module of that
name, which torch imports by way of cProfile, from every script in this folder.)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROWS: dict[str, tuple[str, ...]] = {
    "reading rows": ("fedstrata.runs.job:prepare",),
    "tokenizing": ("fedstrata.client.setup:examples",),
    "start model": ("fedstrata.models.checkpoints:load", "fedstrata.models.checkpoints:parts_of"),
    "batches": ("fedstrata.client.trainer:Trainer._steps",),
    "forward": ("fedstrata.client.trainer:Trainer._backward",),  # the backward pass within it is the next row
    "backward": ("torch.autograd:backward",),
    "optimizer": ("fedstrata.client.trainer:step_halves", "fedstrata.client.trainer:make_optimizer"),
    "copies of weights": (
        "fedstrata.client.working_model:WorkingModel.load",
        "fedstrata.runs.stages:start_weights",
    ),
    "encode, decode": (
        "fedstrata.wire.codec:Wire.encode",
        "fedstrata.wire.codec:Wire.decode",
        "fedstrata.client.answer:encoded_parts",
    ),
    "merge, with its checks": (
        "fedstrata.server.server:Server.accumulate",
        "fedstrata.server.server:Server.merge",
    ),
    "fingerprints": ("fedstrata.server.state:fingerprint", "fedstrata.runs.stages:fingerprints"),
    "state on disk": ("fedstrata.server.state:RunState.commit", "fedstrata.runs.train:save_models"),
    "records": ("fedstrata.server.records:FileRecords.append",),
    "plans": ("fedstrata.runs.stages:check_plans", "fedstrata.server.rounds:Rounds.plan"),
    "scoring": ("fedstrata.client.scorer:Scorer.run",),
    "training, the rest": ("fedstrata.client.trainer:Trainer.run",),
    "page": ("fedstrata.reports.report:write_report",),
}
"""Row -> the functions whose time it is, as ``module:name``; those that are not found are named at the end."""
KINDS = {
    "matrix products": ("addmm", "::mm", "bmm", "matmul", "linear"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "casts and copies": ("copy_", "::to", "_to_copy", "clone", "contiguous"),
    "dropout": ("dropout", "bernoulli"),
    "optimizer": ("adam", "sgd"),
    "norms and activations": ("layer_norm", "gelu", "softmax", "tanh"),
    "embeddings": ("embedding",),
    "filling and adding": ("fill_", "zero_", "::add", "::mul", "::div", "::sum"),
}
"""Kind -> what is in the names of its operators, the first that fits."""
STEPS = 50
"""Steps after which torch's profiler is stopped: it holds an event of every operator in memory."""


class Clock:
    """Time by row, each moment in the innermost one alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.stack: list[str] = []
        self.since = time.perf_counter()
        self.missing: list[str] = []

    def switch(self) -> None:
        """What has passed since the last switch belongs to the innermost row."""
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def inside(self, row: str) -> Iterator[None]:
        """A row, within those that are open."""
        self.switch()
        self.stack.append(row)
        self.calls[row] += 1
        try:
            yield
        finally:
            self.switch()
            self.stack.pop()

    def wrap(self, row: str, place: str) -> None:
        """Count a function's time; not on other threads, whose time passes beside it."""
        module_name, _, path = place.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
            *outer, leaf = path.split(".")
            for name in outer:
                owner = getattr(owner, name)
            function = getattr(owner, leaf)
        except (ImportError, AttributeError):
            self.missing.append(place)
            return
        setattr(
            owner, leaf, self._generator(row, function) if is_generator(function) else self._plain(row, function)
        )

    def _plain(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            beside = threading.current_thread() is not threading.main_thread()
            if beside or not self.stack or self.stack[-1] in (row, "scoring", "start model"):
                return function(*arguments, **named)
            with self.inside(row):
                return function(*arguments, **named)

        return wrapped

    def _generator(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            steps = function(*arguments, **named)
            while True:
                try:
                    with self.inside(row):
                        item = next(steps)
                except StopIteration as end:
                    return end.value
                yield item

        return wrapped


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether calling a function only begins it."""
    code = getattr(function, "__code__", None)
    return bool(code and code.co_flags & 0x20)


def kinds_of(profiler: Any) -> dict[str, float]:
    """Seconds of processor time by kind of operator; with several threads their sum."""
    found: Counter[str] = Counter()
    for event in profiler.key_averages():
        name = event.key.lower()
        if not name.startswith("aten::"):
            continue
        kind = next(
            (kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other operators"
        )
        found[kind] += event.self_cpu_time_total / 1e6
    return dict(found.most_common())


def operators_of(run: Callable[[], Any]) -> tuple[dict[str, float], int]:
    """What :func:`kinds_of` finds in a run until its first ``STEPS`` steps are done, and how many there were."""
    import torch

    from fedstrata.client.trainer import Trainer

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    gradients, begun = Trainer._step_gradients, 0

    def counted(*given: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == STEPS + 1:
            profiler.stop()
        return gradients(*given)

    Trainer._step_gradients = counted
    profiler.start()
    try:
        run()
    finally:
        Trainer._step_gradients = gradients
        if begun <= STEPS:
            profiler.stop()
    return kinds_of(profiler), min(begun, STEPS)


def made_up_job(folder: Path) -> Path:
    """The default job, written into a folder."""
    from workloads import WORKLOADS, prepare

    from fedstrata.models.quiet import quiet

    with quiet():
        prepare(WORKLOADS["quick"], folder / "work")
    return folder / "work" / "job.toml"


def profile(job: Path, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Run the job twice, with the clock and with torch's profiler."""
    clock = Clock()
    started = time.perf_counter()
    with clock.inside("imports"):
        import fedstrata

        importlib.import_module("fedstrata.runs.stages")
        importlib.import_module("fedstrata.reports.report")
    imported = time.perf_counter() - started
    for row, places in ROWS.items():
        for place in places:
            clock.wrap(row, place)
    overrides = [*overrides, "engine.name=inprocess"]  # what happens in other processes cannot be seen from here
    words = [*overrides, f"output.dir={folder / 'clock'}"]
    with clock.inside("other"):
        fedstrata.run(job, words)
        fedstrata.report(folder / "clock")
    wall = time.perf_counter() - started
    clock.seconds["other"] += wall - sum(clock.seconds.values())
    rows, calls = dict(clock.seconds.most_common()), dict(clock.calls)
    operators, steps = operators_of(lambda: fedstrata.run(job, [*overrides, f"output.dir={folder / 'profiler'}"]))
    return {
        "wall": wall,
        "imports": imported,
        "rows": rows,
        "calls": calls,
        "not_found": clock.missing,
        "operators": operators,
        "operators_steps": steps,
    }


def main() -> None:
    """Profile, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("job", nargs="?", type=Path)
    options.add_argument("overrides", nargs="*", help="laid over the job")
    options.add_argument("--json", type=Path, help="write the figures here")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.job is not None:
            found = profile(chosen.job.resolve(), chosen.overrides, folder)
        else:  # made in another process, so that imports count
            import subprocess

            code = "import sys, profile_run, pathlib; profile_run.made_up_job(pathlib.Path(sys.argv[1]))"
            here = str(Path(__file__).resolve().parent)
            subprocess.run(
                [sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r}); {code}", name], check=True
            )
            found = profile(folder / "work" / "job.toml", chosen.overrides, folder)
    from rich.console import Console
    from rich.table import Table

    from fedstrata.errors import plural

    table = Table("where", "seconds", "share", "calls", title=f"{found['wall']:.1f} s")
    for row, seconds in found["rows"].items():
        table.add_row(row, f"{seconds:.2f}", f"{seconds / found['wall']:.1%}", str(found["calls"].get(row, "")))
    steps = plural(found["operators_steps"], "step")
    operators = Table("operators", "seconds", "share", title=f"the first {steps}")
    total = sum(found["operators"].values())
    for kind, seconds in found["operators"].items():
        operators.add_row(kind, f"{seconds:.2f}", f"{seconds / total:.1%}")
    console = Console(highlight=False)
    console.print(table)
    console.print(operators)
    if found["not_found"]:
        console.print(f"not found in this version, so within other rows: {', '.join(found['not_found'])}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
