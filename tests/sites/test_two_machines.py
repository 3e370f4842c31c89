"""The tutorial "Between two machines", followed on this machine, with a working folder for each of the two."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployment import COMMAND, free_port
from fedstrata.job.file import load
from fedstrata.sites.settings import read_server, read_site
from pages import DOCS, commands_of, page_blocks

PAGE = DOCS / "tutorials" / "two-machines.md"
KEEP_RUNNING = {"serve": "serving at", "join": "connected"}
"""Command -> what it prints once it is up."""


class Reader:
    """Follows the page: what it types at each of the two machines, in that one's working folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        words = {"distilbert-base-uncased": str(model), "fed.example.org": "127.0.0.1"}
        self.blocks = page_blocks(PAGE, words)
        self.folders = {name: folder / name for name in ("north", "south")}
        self.folders["north"].mkdir()
        self.running: list[subprocess.Popen[bytes]] = []
        self.printed = ""

    def follow(self, last: str) -> None:
        """Do what the page says, down to the first command that begins with ``last``, that one included."""
        for block in self.blocks:
            machine, _, file = block.title.partition(": ")
            if file:
                (self.folders[machine] / file).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                self.wait([sys.executable, "-c", block.text], machine)
            elif machine:
                for words in commands_of(block.text):
                    self.type(words, machine)
                    if shlex.join(words).startswith(last):
                        return

    def type(self, words: list[str], machine: str) -> None:
        """One command; ``scp`` copies to the other machine's working folder."""
        if words[0] == "scp":
            assert words[1::2] == ["-r", "south.example.org:site"]
            shutil.copytree(self.folders[machine] / words[2], self.folders["south"])
        elif words[:2] == ["rm", "-r"]:
            shutil.rmtree(self.folders[machine] / words[2])
        elif words[1] in KEEP_RUNNING:
            self.start(words[1:], machine)
        elif words[1:3] == ["federation", "init"]:
            ports = ["--port", str(free_port()), "--stream-port", str(free_port())]
            self.wait([*COMMAND, *words[1:], *ports], machine)
            settings = self.folders[machine] / "federation" / "server.toml"
            text = re.sub(r"message_port = \d+", f"message_port = {free_port()}", settings.read_text("utf-8"))
            settings.write_text(text, encoding="utf-8")
        else:
            self.wait([*COMMAND, *words[1:]], machine)

    def spawn(self, words: list[str], machine: str, out: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with out.open("wb") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            return subprocess.Popen(words, **streams, env=environment, cwd=self.folders[machine])

    def wait(self, words: list[str], machine: str) -> None:
        out = self.folders[machine] / "command.out"
        process = self.spawn(words, machine, out)
        code = process.wait(240)
        self.printed = out.read_text("utf-8", errors="replace")
        assert code == 0, self.printed

    def start(self, words: list[str], machine: str) -> None:
        out = self.folders[machine] / f"{words[0]}.out"
        self.running.append(self.spawn([*COMMAND, *words], machine, out))
        end = time.monotonic() + 120
        while KEEP_RUNNING[words[0]] not in out.read_text("utf-8", errors="replace"):
            assert time.monotonic() < end, out.read_text("utf-8", errors="replace")
            time.sleep(0.1)


@contextmanager
def reader(folder: Path, model: Path) -> Iterator[Reader]:
    one = Reader(folder, model)
    try:
        yield one
    finally:
        for process in reversed(one.running):
            process.terminate()
            process.wait(30)


def test_what_the_page_saves_is_valid(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Everything but the processes: settings, rows and job."""
    with reader(tmp_path, model_folder("distilbert", head="none")) as one:
        one.follow("rm -r")
        one.running.clear()
        for block in one.blocks:
            machine, _, file = block.title.partition(": ")
            if file:
                (one.folders[machine] / file).write_text(block.text, encoding="utf-8")
        assert not (one.folders["north"] / "federation" / "sites" / "south").exists()
        assert read_site(one.folders["south"] / "site.toml").name == "south"
        assert set(read_server(one.folders["north"] / "federation").sites) == {"north", "south"}
        [job] = load(one.folders["north"] / "job.toml", ["engine.name=flower", "engine.federation=x"])
        for rows in one.folders["south"] / "train.csv", one.folders["north"] / job.data.test:
            labels = {line.rsplit(",", 1)[1] for line in rows.read_text("utf-8").splitlines()[1:]}
            assert labels == set(job.task.labels)


@pytest.mark.deploy
def test_the_page_works_with_two_working_folders(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    with reader(tmp_path, model_folder("distilbert", head="none")) as one:
        one.follow("fedstrata site log")
        assert "round 2  weights" in one.printed, one.printed
        assert "after training  over" in one.printed, one.printed
        assert "5 messages" in one.printed
        assert (one.folders["north"] / "runs" / "first" / "model").exists()
        assert (one.folders["north"] / "runs" / "first" / "report.html").exists()
