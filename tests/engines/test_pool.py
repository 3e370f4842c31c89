"""The pool: clients side by side in worker processes, with the bits of one process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w
import torch

import fedstrata
from fedstrata import UserError
from fedstrata.data.prepare import prepare
from fedstrata.engines import choice, processes
from fedstrata.engines.frames import HEADER, receive, send
from fedstrata.engines.processes import Nursery, Processes
from fedstrata.events import Scored, StageStarted, Stepped
from fedstrata.job.file import load
from fedstrata.models.parts import find_parts
from fedstrata.runs.components import Components
from fedstrata.runs.engines import choose_engine
from fedstrata.server.state import newest_commit
from tiny import saved_models, tiny_model

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("_one_nursery")]
Jobs = Callable[..., dict[str, Any]]
CLIENT = "client-2"
Case = tuple[str, str, dict[str, Any], int]

CASES: list[Case] = [
    ("fedavg", "mlm", {"wire": {"dtype": "int8"}, "clients": {"fraction": 0.67}}, 1),
    ("fedbfpt", "mlm", {"train": {"optimizer_state": "persist"}}, 2),
    ("fedsplitbert", "classify", {"clients": {"fraction": 0.67}}, 3),
    ("fedfreezebert", "classify", {"head": {"kind": "mean"}}, 2),
    ("fedavg", "classify", {"clients": {"count": 4, "test": 0.3}, "wire": {"dtype": "bf16"}}, 3),
]


@pytest.fixture(scope="module")
def shared_nursery() -> Iterator[Nursery]:
    """One nursery for all tests here: the libraries are loaded once."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def _one_nursery(shared_nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    class Borrowed:
        load, fork = shared_nursery.load, shared_nursery.fork

        def close(self) -> None:
            """It goes on to the next test."""

    monkeypatch.setattr(processes, "Nursery", Borrowed)


def play(made: dict[str, Any], folder: Path, workers: int = 0, **more: Any) -> Any:
    table = ["engine.name=pool", f"engine.workers={workers}"] if workers else ["engine.name=inprocess"]
    return fedstrata.run(made, [f"output.dir={folder}", *table], **more)


def same_run(one: Path, other: Path) -> None:
    """The same models and bytes; a ledger's lines stand in another order where clients are played side by side."""
    first, second = saved_models(one), saved_models(other)
    assert first.keys() == second.keys()
    assert first
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    lines = [sorted((run / "ledger.jsonl").read_text().splitlines()) for run in (one, other)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [(None, 2, ["0", "1"]), ("2,5", 2, ["2", "5"]), ("GPU-8a, GPU-3f", 1, ["GPU-8a"]), ("", 0, [])],
)
def test_workers_are_dealt_to_the_gpus_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, names: list[str]
) -> None:
    """By their own names: number 0 of those that a user was given may be another's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert processes.gpu_names(count) == names


def test_a_worker_that_has_died_is_replaced_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, ends = list[str](), list[socket.socket]()

    class Recorder(Nursery):
        def fork(self, environment: Mapping[str, str]) -> socket.socket:
            forked.append(environment["CUDA_VISIBLE_DEVICES"])
            ours, theirs = socket.socketpair()
            ends.append(theirs)
            return ours

    monkeypatch.setattr(processes, "dump_seed", lambda seed: (b"", {}))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    workers = Processes(Recorder(), cast("Any", None), 1, gpus=2)
    for _ in range(2):
        workers.start()
    ends[1].close()  # it dies
    assert list(workers.messages()) == [(1, None)]
    for _ in range(2):
        workers.start()
    workers.close()
    for end in ends:
        end.close()
    assert forked == ["0", "1", "1", "0"]


@pytest.mark.parametrize(("name", "kind", "tables", "workers"), CASES)
def test_workers_give_the_bits_of_one_process(
    job: Jobs, tmp_path: Path, name: str, kind: str, tables: dict[str, Any], workers: int
) -> None:
    made, told = job(name, kind, **tables), dict[str, list[Any]]()
    if "test" in made["clients"]:
        del made["data"]["test"]
    play(made, tmp_path / "one", progress=told.setdefault("one", []).append)
    play(made, tmp_path / "pool", workers, progress=told.setdefault("pool", []).append)
    same_run(tmp_path / "one", tmp_path / "pool")
    for kind_of_event in (Scored, Stepped):
        one, pool = ([event for event in told[run] if isinstance(event, kind_of_event)] for run in ("one", "pool"))
        key = str if kind_of_event is Stepped else lambda event: 0
        assert sorted(one, key=key) == sorted(pool, key=key)


def test_workers_have_no_dropout_where_it_is_off(
    job: Jobs, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The head of GPT-2 for tags has a rate that is in no config, so a worker's has to be set as well."""
    rows = [{"words": ["a", "kidney", "fails"], "tags": ["O", "B-organ", "O"]}] * 6
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    data = {"train": str(file), "test": str(file), "text": "words", "label": "tags"}
    made = job("fedavg", "tag", data=data, train={"dropout": False, "learning_rate": 0.01})
    made["model"] = {"name": str(model_folder("gpt2", head="clm"))}
    play(made, tmp_path / "one")
    play(made, tmp_path / "pool", 2)
    same_run(tmp_path / "one", tmp_path / "pool")


LORA = {"kind": "lora", "dropout": 0.1}
ADAPTED: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {"adapter": {**LORA, "rank": {"default": 2, CLIENT: 4}}, "wire": {"codec": "delta", "bits": 4}}),
    ("fedsplitbert", {"adapter": {**LORA, "merge": "freeze_a", "init": "svd"}, "clients": {"fraction": 0.67}}),
]


@pytest.mark.parametrize(("name", "tables"), ADAPTED)
def test_workers_have_the_same_adapters(job: Jobs, tmp_path: Path, name: str, tables: dict[str, Any]) -> None:
    pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    made = job(name, "classify", method={"rounds": 3}, **tables)
    play(made, tmp_path / "one")
    play(made, tmp_path / "pool", 2)
    same_run(tmp_path / "one", tmp_path / "pool")
    assert list(tmp_path.glob("pool/**/adapter_model.safetensors"))


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[int]]:
    """Kills the worker that was given a client's second round, so many times."""

    def order(client: str, times: int) -> list[int]:
        messages, killed = Processes.messages, list[int]()

        def watched(self: Processes) -> Iterator[tuple[int, Any]]:
            for number, message in messages(self):
                begun = isinstance(message, Stepped) and (message.round, message.client) == (1, client)
                if begun and message.step == 1 and len(killed) < times:
                    killed.append(self.processes[number].pid)
                    os.kill(killed[-1], signal.SIGKILL)
                yield number, message

        monkeypatch.setattr(Processes, "messages", watched)
        return killed

    return order


LONG = {"epochs": 25}
"""So long that a worker is killed in the middle of its task."""


def test_a_killed_worker_is_replaced_and_its_client_played_again(
    job: Jobs, tmp_path: Path, kill: Callable[[str, int], list[int]]
) -> None:
    made = job("fedsplitbert", "classify", wire={"dtype": "int8"}, train={"optimizer_state": "persist", **LONG})
    play(made, tmp_path / "one")
    killed = kill(CLIENT, 2)
    play(made, tmp_path / "pool", 2)
    assert len(set(killed)) == 2
    same_run(tmp_path / "one", tmp_path / "pool")


def test_a_client_whose_workers_die_ends_the_run_which_another_engine_may_resume(
    job: Jobs, tmp_path: Path, kill: Callable[[str, int], list[int]]
) -> None:
    made = job("fedsplitbert", "classify", train=LONG)
    play(made, tmp_path / "one")
    kill(CLIENT, 3)
    said = (
        f"round 2, client {CLIENT}: its worker died, 3 times over; unless a traceback says why, it takes less "
        "memory with fewer engine.workers"
    )
    with pytest.raises(UserError, match=rf"^{said} and --resume, or with a smaller train.batch_size in another "):
        play(made, tmp_path / "pool", 2)
    with pytest.raises(UserError, match=r"train\.batch_size"):
        play({**made, "train": {**made["train"], "batch_size": 1}}, tmp_path / "pool", 1, resume=True)
    play(made, tmp_path / "pool", resume=True)
    same_run(tmp_path / "one", tmp_path / "pool")


def test_an_error_in_a_worker_is_the_sentence_of_one_process(job: Jobs, tmp_path: Path) -> None:
    made = job("fedsplitbert", "classify", train={"learning_rate": 1e30, "optimizer": "sgd"})
    said = []
    for workers in (0, 2):
        with pytest.raises(UserError) as error:
            play(made, tmp_path / str(workers), workers)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "diverged" in said[0]


def test_an_explicit_pool_says_why_it_stays_in_one_process(job: Jobs, tmp_path: Path) -> None:
    told = list[Any]()
    play(job("centralized"), tmp_path / "run", 2, progress=told.append)
    said = next(event.engine for event in told if isinstance(event, StageStarted))
    assert said == "inprocess, 1 thread (one client trains at a time)"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_process_behind(job: Jobs, tmp_path: Path, how: signal.Signals) -> None:
    made = job("fedavg", "classify", train={"epochs": 10_000})
    made["engine"] = {"name": "pool", "workers": 2}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(made))
    command = [sys.executable, "-m", "fedstrata", "run", str(tmp_path / "job.toml")]
    # one core by OMP_NUM_THREADS: the nursery is then a program of its own; two: a fork of this one
    cores = {"OMP_NUM_THREADS": "1" if how is signal.SIGINT else "2"}
    with (tmp_path / "log.txt").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | cores, start_new_session=True)
    rounds = tmp_path / "run" / "rounds.jsonl"
    wait_until(lambda: (rounds.exists() and len(descendants(run.pid)) >= 3) or run.poll() is not None)
    below = descendants(run.pid)
    assert len(below) == 3, (tmp_path / "log.txt").read_text()
    run.send_signal(how)
    assert run.wait(60) == (130 if how is signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: not any(map(alive, below)))


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """The processes below one."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in listed.read_text().split()] if listed.exists() else []
    return [*children, *(below for child in children for below in descendants(child))]


def alive(pid: int) -> bool:
    """Whether a process runs: it is there, and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("long_text", "wanted"), [("chunk", "pool"), ("truncate", "inprocess")])
def test_long_texts_count_as_the_chunks_that_are_trained(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_text: str, wanted: str
) -> None:
    """Three texts of 30,000 letters: three examples, or some hundred each."""
    monkeypatch.setattr(choice, "cores", lambda: 2)
    (tmp_path / "long.csv").write_text("text\n" + 3 * f"{'the eye of a child ' * 1_600}\n")
    made = load(job("fedavg", data={"train": str(tmp_path / "long.csv"), "long_text": long_text}))[0]
    parts = find_parts(tiny_model())
    found = choose_engine(made, prepare(made), parts, tmp_path / "run", Components())
    assert (found.name, found.threads) == (wanted, 1)


def test_workers_of_two_threads_give_the_bits_of_one_process_of_two(job: Jobs, tmp_path: Path) -> None:
    """Gradients of norms are added up in as many pieces as there are threads: one thread has other bits."""
    made = job("fedavg", "classify", method={"rounds": 1})
    for run, threads, workers in (("one", 1, 0), ("two", 2, 0), ("pool", 2, 2)):
        play({**made, "engine": {"threads": threads}}, tmp_path / run, workers)
        assert f"threads = {threads}\n" in (tmp_path / run / "job.toml").read_text()
    same_run(tmp_path / "two", tmp_path / "pool")
    with pytest.raises(AssertionError):
        same_run(tmp_path / "one", tmp_path / "two")


def test_the_seconds_of_a_result_are_the_clock_and_not_the_sum_of_what_ran_side_by_side(
    job: Jobs, tmp_path: Path
) -> None:
    result = play(job("fedavg", "classify"), tmp_path / "run", 3)
    commit = newest_commit(tmp_path / "run")
    assert commit is not None
    assert result.seconds == commit["seconds"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert result.seconds != sum(line["seconds"] for line in lines)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["seconds"] == result.seconds


def test_an_answer_that_was_read_whole_is_sent_although_the_reader_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program may close between a worker's last byte and its next call; no traceback then."""
    ours, theirs = socket.socketpair()

    def read_at_once(connection: socket.socket, buffers: Any, descriptors: Any) -> int:
        sent = send_fds(connection, buffers, descriptors)
        for descriptor in receive(theirs)[1]:
            os.close(descriptor)
        theirs.close()
        return sent

    send_fds = socket.send_fds
    monkeypatch.setattr(socket, "send_fds", read_at_once)
    with ours, Path(os.devnull).open() as file:
        send(ours, "an answer", [file.fileno()])


@pytest.mark.parametrize(("error", "told"), [("BrokenPipeError", False), ("ZeroDivisionError", True)])
def test_a_worker_whose_program_is_gone_ends_without_a_traceback(error: str, told: bool) -> None:
    program = (
        f"from fedstrata.engines.nursery import run_and_exit\ndef work():\n    raise {error}\nrun_and_exit(work)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == told
    assert told or not done.stderr


@pytest.mark.parametrize("unreadable", ["(int, ('x',))", "(open, ('/nowhere/at/all',))"])
def test_a_worker_that_cannot_read_a_message_says_so_and_ends(unreadable: str) -> None:
    """Else it would wait for ever, and the program for it; or end without a word."""
    program = f"""
import queue, socket, sys, threading
from fedstrata.engines.frames import send
from fedstrata.engines.nursery import _listen
class Unreadable:
    def __reduce__(self):
        return {unreadable}
ours, theirs = socket.socketpair()
send(ours, Unreadable())
thread = threading.Thread(target=_listen, args=(theirs, queue.SimpleQueue()), daemon=True)
thread.start()
thread.join()
sys.exit(7)  # as the thread that computes, which nobody tells
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_files_that_a_process_may_not_open_are_missed_where_they_come() -> None:
    program = """
import os, resource, socket
from fedstrata.engines.frames import receive, send
ours, theirs = socket.socketpair()
file = os.open(os.devnull, os.O_RDONLY)
send(ours, "an answer", [file])
resource.setrlimit(resource.RLIMIT_NOFILE, (file + 1, file + 1))
try:
    receive(theirs)
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "Too many open files\n"


def test_files_of_a_message_that_breaks_off_are_closed() -> None:
    """Else the memory that a worker has written when it is killed would stay for as long as the run."""
    ours, theirs = socket.socketpair()
    reader, file = os.pipe()
    os.set_blocking(reader, False)
    socket.send_fds(ours, [HEADER.pack(1000, 1) + b"half"], [file])
    os.close(file)
    ours.close()
    with theirs, pytest.raises(EOFError):
        receive(theirs)
    assert os.read(reader, 1) == b"", "nobody has the other end any more"
    os.close(reader)


def test_children_that_the_system_collects_by_itself_count_as_ended() -> None:
    """As where whoever started the program ignores SIGCHLD, which is handed down."""
    program = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from fedstrata.engines.nursery import _ended, live_apart
from fedstrata.engines.processes import _Child
pid = os.fork()
if not pid:  # as the nursery
    live_apart()
    worker = os.fork()
    if not worker:
        os._exit(0)
    while not _ended({worker}):
        time.sleep(0.01)
    os._exit(0)
child = _Child(pid)
while child.poll() is None:
    time.sleep(0.01)
child.kill()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
