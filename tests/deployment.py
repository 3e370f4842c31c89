"""A federation of real processes on this machine: a server, sites, and runs between them."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomlkit

from fedstrata.sites.provision import init
from tiny import SENTENCES

SERVE, JOIN = "fedstrata serve federation", "fedstrata join federation/sites/{}/site.toml"
RUN = "fedstrata run job.toml --engine flower --federation federation"
TRIED = {SERVE, *map(JOIN.format, "abc"), "fedstrata join site.toml", RUN, f"{RUN} --resume"}
TRIED |= {f"{SERVE} --page"}
TRIED |= {"fedstrata site log site.toml", "fedstrata site log site.toml --verify"}
"""What the pages tell to type; a site's settings are read from another folder here than ``site.toml``'s own."""
CLOCK = """
import datetime
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=SECONDS)
datetime.datetime = Shifted
"""
"""A ``sitecustomize`` for a machine whose clock is another; gRPC compares ``time.time`` with the machine's own."""
COMMAND = [sys.executable, "-c", "from fedstrata.cli import main; main()"]


def attacker(module: str) -> list[str]:
    """The command of a bad site or server, by its module's name in ``tests/attacks``."""
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    return [sys.executable, "-c", f"{path}from attacks.{module} import main; main()"]


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


class Deployment:
    """Sites that hold the sentences in turn; ``everything`` is all rows in one file, with a column ``site``."""

    def __init__(self, folder: Path, names: Sequence[str] = ("a", "b", "c")) -> None:
        self.folder, self.names = folder, names
        self.home = folder / "federation"
        self.port = free_port()
        init(self.home, names, port=self.port, stream_port=free_port(), message_port=free_port())
        rows = [(*row, names[i % len(names)]) for i, row in enumerate(SENTENCES)]
        self.everything = self.write(folder / "all.csv", ["text", "label", "site"], rows)
        for name in names:
            self.write(
                self.site(name) / "train.csv", ["text", "label"], [row[:2] for row in rows if row[2] == name]
            )
            self.set(name, "# threads = 4", "threads = 1")
            self.set(name, "min_examples = 8 ", "min_examples = 1 ")
        settings = (self.home / "server.toml").read_text("utf-8")
        settings = settings.replace("# page_port = 9443", f"page_port = {free_port()}")
        (self.home / "server.toml").write_text(settings, "utf-8")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def write(self, path: Path, columns: list[str], rows: Sequence[Any]) -> Path:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
        return path

    def site(self, name: str) -> Path:
        return self.home / "sites" / name

    def set(self, name: str, old: str, new: str) -> None:
        """Change a site's settings; it reads them when it starts."""
        path = self.site(name) / "site.toml"
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new), "utf-8")

    def spawn(
        self, name: str, *words: str, clock: float = 0.0, command: Sequence[str] = COMMAND
    ) -> subprocess.Popen[bytes]:
        """Start a program, on a machine whose clock is so many seconds ahead."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if clock:
            shim = self.folder / f"clock-{name}"
            shim.mkdir(exist_ok=True)
            (shim / "sitecustomize.py").write_text(CLOCK.replace("SECONDS", str(clock)), "utf-8")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(shim), os.environ.get("PYTHONPATH")]))
        with (self.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                cwd=self.folder,
            )
        self.processes[name] = process
        return process

    def out(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text("utf-8", errors="replace")

    def serve(self, *words: str) -> None:
        self.spawn("serve", *SERVE.split()[1:], *words)

    def join(self, name: str, *words: str, clock: float = 0.0) -> None:
        self.spawn(name, *JOIN.format(name).split()[1:], *words, clock=clock)

    def up(self, *words: str, page: bool = False, clocks: Mapping[str, float] = {}) -> None:
        """Start the server, with its page if so, and the sites, some of which have other clocks."""
        try:
            self.serve(*words, *(["--page"] if page else []))
            for name in self.names:
                self.join(name, *words, clock=clocks.get(name, 0.0))
            for name in self.names:
                self.until(
                    lambda name=name: f"{name}: connected" in self.out(name), 120, f"{name} does not connect"
                )
        except BaseException:
            self.down()  # a fixture that fails has nobody else who ends them
            raise

    def until(self, holds: Callable[[], bool], seconds: float, complaint: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            outputs = "\n".join(f"--- {name}\n{self.out(name)[-1500:]}" for name in self.processes)
            assert time.monotonic() < end, f"{complaint}\n{outputs}"
            time.sleep(0.1)

    def write_job(self, job: Mapping[str, Any]) -> None:
        (self.folder / "job.toml").write_text(tomlkit.dumps(dict(job)), "utf-8")

    def run(self, job: Mapping[str, Any], out: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a run between the sites."""
        self.write_job(job)
        return self.spawn(out, *RUN.split()[1:], f"output.dir={out}", *words)

    def finish(self, job: Mapping[str, Any], out: str, *words: str) -> Path:
        """A run between the sites, to its end."""
        return self.finished(self.run(job, out, *words), out)

    def finished(self, process: subprocess.Popen[bytes], out: str) -> Path:
        """The folder of a run that has begun, once it has ended."""
        assert process.wait(240) == 0, self.out(out)
        return self.folder / out

    def lines(self, out: str, name: str) -> list[dict[str, Any]]:
        path = self.folder / out / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.endswith("}")]

    def kill(self, name: str) -> None:
        """As if its machine lost power: the program, and what it had started."""
        process = self.processes.pop(name)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Inside, a program stands still."""
        os.kill(self.processes[name].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.processes[name].pid, signal.SIGCONT)

    def down(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"{name} does not stop\n{self.out(name)[-3000:]}") from None
