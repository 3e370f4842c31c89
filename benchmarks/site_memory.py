"""Peak memory of the server and the sites of a run, beyond what training itself takes.

    python benchmarks/site_memory.py --size mini --json memory.json

One federation on this machine, over loopback, with TLS and keys; see ``sites.py``, whose model, rows and job these
are. *Alone* is the same training of one client in a process of its own, without a server and without messages:
the libraries, the model, gradients, optimizer. A peak is ``VmHWM``, which the system keeps itself: the pages of a
process that were in memory at once, with those of the files that it has mapped. It begins anew when the run does.
Flower's own processes are measured apart, as are those that a site starts to try a run (PSS, so that what they
share with it is not counted twice, polled every 0.1 s). Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import measure
from rich.console import Console
from rich.table import Table

import sites

CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 119)
METHODS = ("fedavg", "fedbfpt")


def train_alone(job: str, rounds: str) -> None:
    """The process of *alone*: some rounds of one client's training, from the same start model each time."""
    import torch

    from fedstrata.client.model_pass import plain_pass
    from fedstrata.client.setup import make_ready, resolve_jobs
    from fedstrata.client.trainer import drain
    from fedstrata.data.prepare import prepare
    from fedstrata.job.file import load
    from fedstrata.plan.messages import Request
    from fedstrata.plan.plan import make_plan

    torch.set_num_threads(1)
    [stage] = resolve_jobs(load(job), None)
    assert stage.model
    assert stage.model.name
    ready = make_ready(stage, prepare(stage), stage.model.name)
    runtime, name = ready.runtime, sites.SITES[0]
    working, trainer = runtime.working, runtime.trainer
    for round in range(int(rounds)):
        plan = make_plan(stage.method, working.parts, stage.task.kind, round, name, trainer.streams)
        request = Request(round, name, plan, "train", {}, {})
        model_pass = plain_pass(working, plan, None, False)
        drain(trainer.run(request, ready.train, ready.shards[name], model_pass, {}, lambda *_: None))
    print(json.dumps({"peak": sites.memory(os.getpid())}))


class Helpers:
    """Watches what the processes that sites start beside Flower's take together, each site by itself."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.joins = {name: pid for name, pid in pids.items() if name.startswith("join")}
        self.known = set(pids.values())
        self.seen: Counter[str] = Counter()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def end(self) -> dict[str, int]:
        """Bytes by name."""
        self.stop.set()
        self.thread.join()
        return {name.replace("join", "trial"): self.seen[name] for name in self.joins}

    def _watch(self) -> None:
        while not self.stop.wait(0.1):
            for name, pid in self.joins.items():
                others = set(measure.descendants(pid)) - self.known
                self.seen[name] = max(self.seen[name], sum(map(measure.memory, others)))


def measure_method(method: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Peaks of one method: alone, and of every process of a run between sites."""
    job = sites.make_job(folder, method, rounds)
    command = [sys.executable, __file__, "alone", str(job), str(rounds)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    with sites.federation(folder) as (home, relay, pids):
        helpers = Helpers(pids)
        words = (f"engine.federation={home}", "engine.name=flower")
        made = sites.run(job, words, pids, relay.total)
        helped = helpers.end()
    figures = sites.told(made, at_once=True)
    peaks = {name: max(made["first_peak"].get(name, 0), value) for name, value in made["later_peak"].items()}
    sites.shutil.rmtree(home)
    return {
        "alone": json.loads(told.splitlines()[-1])["peak"],
        "before": made["before"],
        "peaks": {**peaks, **helped},
        "seconds": {name: figures["rounds"][name] for name in ("round", "work", "beyond")},
        "bytes": {name: figures[name] for name in ("payload", "messages", "wire")},
        "sha256": made["model"],
    }


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    model = figures["model"]
    table = Table("method", "process", "peak, MB", "beyond alone, × model", title=f"model of {model / 1e6:.0f} MB")
    for method, each in figures["methods"].items():
        table.add_row(method, "training alone", f"{each['alone'] / 1e6:.0f}", "")
        for name, peak in each["peaks"].items():
            ours = name.split()[0] in ("run", "join")
            beyond = f"{(peak - each['alone']) / model:.2f}" if ours else "-"
            table.add_row(method, name, f"{peak / 1e6:.0f}", beyond)
    CONSOLE.print(table)


def measures(figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the table of ``speed.py`` takes up: seconds of a round, and memory by that of the model."""
    for method, each in figures["methods"].items():
        yield {"measure": f"sites: {method}", **measure.summary(each["seconds"]["beyond"])}
        for command in ("run", "join"):
            most = max(peak for name, peak in each["peaks"].items() if name.split()[0] == command)
            beyond = (most - each["alone"]) / figures["model"]
            yield {"measure": f"sites memory: {method}, {command}", **measure.summary([beyond])}


def main() -> None:
    """Measure, print a table, write the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", choices=list(sites.SIZES), default="mini")
    options.add_argument("--method", choices=METHODS, action="append", help="default: both")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--sites", type=int, choices=(1, 2), default=2)
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--folder", type=Path, help="where to work; default: the system's folder for such things")
    chosen = options.parse_args()
    sites.SITES = sites.SITES[: chosen.sites]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made, ExitStack() as stack:
        stack.callback(forkserver._forkserver._stop)
        os.environ.update(sites.ALONE, FEDSTRATA_CACHE=str(Path(made) / "cache"))
        folder = Path(made)
        process = sites.PROCESSES.Process(target=sites.make_model, args=(chosen.size, folder / "model"))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit("the model could not be made")
        figures: dict[str, Any] = {
            "machine": measure.machine(),
            "size": chosen.size,
            "sites": chosen.sites,
            "model": (folder / "model" / "model.safetensors").stat().st_size,
            "methods": {},
        }
        for method in chosen.method or METHODS:
            figures["methods"][method] = measure_method(method, chosen.rounds, folder)
    show(figures)
    if chosen.json:
        figures["measures"] = list(measures(figures)) if chosen.size == "base" else []
        chosen.json.write_text(json.dumps(figures, indent=1), "utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["alone"]:
        train_alone(*sys.argv[2:])
    else:
        main()
