"""The pool on a Ray cluster: two actors on this machine, with the bits of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import fedstrata
from fedstrata import UserError
from fedstrata.engines import ray_cluster
from fedstrata.engines.player import ClientTask, Failed, Played, failed
from fedstrata.engines.ray_actor import RayActor
from fedstrata.engines.ray_cluster import RayWorkers
from fedstrata.engines.ray_frames import (
    decode_answer,
    decode_events,
    encode_answer,
    encode_events,
)
from fedstrata.events import Encoded, StageStarted, Stepped
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.tasks.task import Predicted
from fedstrata.wire.codec import WireError
from tiny import saved_models

Jobs = Callable[..., dict[str, Any]]
CLIENT = "client-2"


# ---- frames


def test_a_reply_travels_without_a_pickle() -> None:
    weights = {"layer.0": {"w": torch.randn(3, 4), "e": torch.empty(0)}, "head": {}, "a/b": {"x|y": torch.ones(1)}}
    reply = Reply("c", 3, weights, loss=0.25, steps=2, work=Positions(1, 2, 3), flops=7, scores={"c": {"f1": 0.5}})
    kind, frame, beside = encode_answer(Played(reply, (("a", "b", "c"),)))
    found = decode_answer(kind, frame, beside)
    assert isinstance(found, Played)
    assert found.notes == (("a", "b", "c"),)
    assert {**vars(found.reply), "weights": None} == {**vars(reply), "weights": None}
    assert list(found.reply.weights) == list(weights)
    for part, tensors in weights.items():
        assert found.reply.weights[part].keys() == tensors.keys()
        assert all(torch.equal(found.reply.weights[part][name], tensor) for name, tensor in tensors.items())


def test_predictions_travel_with_their_arrays() -> None:
    answer = [
        Predicted(np.array([1, 2]), np.array([0.5, 1.5], np.float32), 0.25),
        Predicted([["B-a", "O"], []], [["O", "O"], []], origin=np.array([[4, 1], [4, 2]])),
        Predicted(torch.tensor([3]), None, 1.0),
    ]
    found = decode_answer(*encode_answer(answer))
    assert isinstance(found, list)
    np.testing.assert_array_equal(found[0].truth, [1, 2])
    assert (found[0].truth.dtype, found[0].guess.dtype, found[0].loss) == (np.int64, np.float32, 0.25)
    assert found[0].origin is None
    np.testing.assert_array_equal(found[1].origin, [[4, 1], [4, 2]])
    assert (found[1].truth, found[1].guess) == ([["B-a", "O"], []], [["O", "O"], []])
    assert (found[2].truth.tolist(), found[2].guess) == ([3], None)


@pytest.mark.parametrize("error", [UserError("train: too high"), ValueError("no"), KeyError("x")])
def test_an_error_travels_as_its_text(error: Exception) -> None:
    found = decode_answer(*encode_answer(failed(error)))
    assert isinstance(found, Failed)
    kind, _, beside = encode_answer(found)
    assert (kind, json.loads(beside)[0]) == ("failed", isinstance(error, UserError))
    assert str(error) in json.loads(beside)[1]


SENT = encode_answer(Played(Reply("c", 1, {"head": {"w": torch.ones(5)}})))


@pytest.mark.parametrize(
    ("kind", "frame", "beside"),
    [
        ("played", b"", "[]"),
        ("played", b"\x80\x05.", "[]"),
        ("played", SENT[1], "[[1]]"),
        ("played", SENT[1][:-9], SENT[2]),
        ("played", SENT[1], SENT[2].replace('"head", "w"', '"other", "w"')),
        ("played", encode_answer([])[1], SENT[2]),
        ("predicted", b"\x08" + bytes(7) + b"{}      ", "[[1, 2, 3]]"),
        ("predicted", encode_answer([Predicted(np.ones(1), 0)])[1], '[[{"array": "7"}, 0, null, 0]]'),
        ("failed", b"", "{"),
        ("other", b"", "[]"),
    ],
)
def test_what_is_no_answer_is_refused(kind: str, frame: bytes, beside: str) -> None:
    with pytest.raises(WireError, match="a worker's answer cannot be used"):
        decode_answer(kind, frame, beside)


def test_events_travel_as_numbers() -> None:
    told = [Stepped(1, "a", 2, 3, 0.5, 4), Encoded(1, 2)]
    assert decode_events(encode_events(list(told))) == told


# ---- what is refused before anything is trained


@pytest.mark.parametrize(
    "address", ["", "here", "ray://", "http://head:1", "head:port", "a b:1", "x@head:1", "[::1]"]
)
def test_an_address_has_a_form(job: Jobs, address: str) -> None:
    with pytest.raises(UserError, match=r"engine.*address: must be 'auto', 'HOST:PORT' or 'ray://HOST:PORT'"):
        fedstrata.run(job(engine={"name": "pool", "address": address}))


@pytest.mark.parametrize("name", ["auto", "inprocess"])
def test_an_address_goes_with_a_pool(job: Jobs, name: str) -> None:
    with pytest.raises(UserError, match=r"address: goes with name = 'pool'"):
        fedstrata.run(job(engine={"name": name, "address": "auto"}))


def test_without_ray(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"^\[engine\] address: needs the extra 'ray': pip install"):
        fedstrata.run(job(engine={"name": "pool", "address": "auto"}))


def test_hidden_states_are_kept_only_where_the_run_can_delete_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    token = tmp_path / "token"
    actor = RayActor(b"", [], 1, (str(token), "of this run"))
    actor.player = cast("Any", SimpleNamespace(run=lambda task: []))
    for plan, content, kind in (
        (Plan((0,), ("head",)), "of another", "predicted"),
        (Plan((0,), ("head",), freeze_encoder=True), "of another", "failed"),
        (Plan((0,), ("head",), freeze_encoder=True), "of this run", "predicted"),
    ):
        token.write_text(content, "utf-8")
        task = ClientTask(Request(0, "a", plan, "train", {}, {}), np.arange(1), {}, tmp_path)
        found = actor.play(task, [])
        assert found[0] == kind
        assert ("an output.dir that all machines share" in found[2]) == (kind == "failed")
    actor.computing.shutdown()


# ---- a cluster


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, and a cluster of two CPUs on this machine, which other programs may connect to."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return pytest.importorskip("ray", reason="needs the extra 'ray'")


@pytest.fixture(scope="module")
def cluster(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of two CPUs on this machine; its processes end with the one that begins it."""
    port, folder = free_port(), tmp_path_factory.mktemp("ray")
    own = Path(tempfile.mkdtemp(prefix="ray"))  # whose sockets need a short path
    begin = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    begin += ["--object-store-memory=100000000", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    begin += [f"--ray-client-server-port={free_port()}", f"--temp-dir={own}"]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "ray.scripts.scripts", *begin]
        head = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + 120
    while "Ray runtime started" not in (text := (folder / "log.txt").read_text()):
        assert head.poll() is None and time.monotonic() < until, text  # noqa: PT018
        time.sleep(0.1)
    yield f"127.0.0.1:{port}"
    below = descendants(head.pid)
    head.terminate()
    with suppress(subprocess.TimeoutExpired):
        head.wait(10)
    for pid in (head.pid, *below):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(own, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """The processes below one."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in listed.read_text().split()] if listed.exists() else []
    return [*children, *(below for child in children for below in descendants(child))]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def play(made: dict[str, Any], folder: Path, address: str = "", **more: Any) -> Any:
    table = {"name": "pool", "workers": 2, "address": address} if address else {"name": "inprocess"}
    return fedstrata.run({**made, "engine": table, "output": {"dir": str(folder)}}, **more)


def same_run(one: Path, other: Path) -> None:
    """The same models, scores and bytes."""
    first, second = saved_models(one), saved_models(other)
    assert first.keys() == second.keys()
    assert first
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    lines = [sorted((run / "ledger.jsonl").read_text().splitlines()) for run in (one, other)]
    assert lines[0] == lines[1]
    scores = [json.loads((run / "result.json").read_text())["score"] for run in (one, other)]
    assert scores[0] == scores[1]


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "mlm", {"wire": {"dtype": "int8"}, "clients": {"fraction": 0.67}}),
    ("fedsplitbert", "classify", {"train": {"optimizer_state": "persist"}}),
    ("fedbfpt", "mlm", {}),
]


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_actors_give_the_bits_of_one_process(
    job: Jobs, tmp_path: Path, cluster: str, name: str, kind: str, tables: dict[str, Any]
) -> None:
    made, told = job(name, kind, **tables), list[Any]()
    play(made, tmp_path / "one")
    play(made, tmp_path / "ray", cluster, progress=told.append)
    same_run(tmp_path / "one", tmp_path / "ray")
    [line] = [event.engine for event in told if isinstance(event, StageStarted)]
    assert line == f"pool, 2 workers × 1 thread (on a Ray cluster, {cluster})"
    steps = [(event.round, event.client, event.step) for event in told if isinstance(event, Stepped)]
    assert steps
    assert len(steps) == len(set(steps))
    assert not list((tmp_path / "ray").glob(".workers-*"))
    assert f'address = "{cluster}"' in (tmp_path / "ray" / "job.toml").read_text()


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Kills the actor that was given a client's second round, so many times."""

    def order(times: int) -> list[int]:
        ask, killed = RayWorkers.ask, list[int]()

        def watched(self: RayWorkers, number: int, task: Any) -> None:
            ask(self, number, task)
            request = getattr(task, "request", None)
            if request and (request.round, request.client) == (1, CLIENT) and len(killed) < times:
                self._known(number)
                killed.append(number)
                self.ray.kill(self.workers[number].actor)

        monkeypatch.setattr(RayWorkers, "ask", watched)
        return killed

    return order


def test_a_dead_actor_is_replaced_and_its_client_played_again(
    job: Jobs, tmp_path: Path, cluster: str, kill: Callable[[int], list[int]]
) -> None:
    made = job("fedsplitbert", "classify", wire={"dtype": "int8"})
    play(made, tmp_path / "one")
    killed = kill(2)
    play(made, tmp_path / "ray", cluster)
    assert len(set(killed)) == 2
    same_run(tmp_path / "one", tmp_path / "ray")


def test_three_deaths_end_the_run_which_another_engine_may_resume(
    job: Jobs, tmp_path: Path, cluster: str, kill: Callable[[int], list[int]]
) -> None:
    made = job("fedavg", "classify")
    play(made, tmp_path / "one")
    kill(3)
    with pytest.raises(UserError, match=f"^round 2, client {CLIENT}: its worker died, 3 times over; "):
        play(made, tmp_path / "ray", cluster)
    play(made, tmp_path / "ray", resume=True)
    same_run(tmp_path / "one", tmp_path / "ray")


def test_an_error_in_an_actor_is_the_sentence_of_one_process(job: Jobs, tmp_path: Path, cluster: str) -> None:
    made, said = job("fedsplitbert", "classify", train={"learning_rate": 1e30, "optimizer": "sgd"}), []
    for address in ("", cluster):
        with pytest.raises(UserError) as error:
            play(made, tmp_path / f"run-{bool(address)}", address)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "diverged" in said[0]


def test_files_of_clients_need_a_folder_that_all_machines_see(
    job: Jobs, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster.secrets, "token_hex", lambda size: f"{size}" * size)
    check = RayWorkers._check
    monkeypatch.setattr(RayWorkers, "_check", lambda self, about: check(self, {**about, "folder": False}))
    play(job("fedavg"), tmp_path / "fine", cluster)
    with pytest.raises(
        UserError, match=r"^\[engine\] address: this run's clients keep files .* all machines share"
    ):
        play(job("fedsplitbert", "classify"), tmp_path / "run", cluster)
    assert not list(tmp_path.glob("*/.workers-*"))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("versions", {"fedstrata": "0"}, "other versions"), ("processor", ["NONE"], "another processor")],
)
def test_machines_that_compute_otherwise_are_refused(
    job: Jobs, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, what: str
) -> None:
    check, seen = RayWorkers._check, list[int]()

    def otherwise(self: RayWorkers, about: dict[str, Any]) -> bool:
        seen.append(1)
        return check(self, {**about, key: value} if len(seen) == 2 else about)

    monkeypatch.setattr(RayWorkers, "_check", otherwise)
    with pytest.raises(UserError, match=rf"^\[engine\] address: .* has {what} "):
        play(job("fedavg"), tmp_path / "run", cluster)


def test_a_cluster_that_is_not_there_or_too_small(job: Jobs, tmp_path: Path, ray: Any, cluster: str) -> None:
    gone = f"127.0.0.1:{free_port()}"
    for address in (gone, f"ray://{gone}"):
        with pytest.raises(UserError, match=rf"^\[engine\] address: no Ray cluster answers at '{address}' \("):
            play(job(), tmp_path / "run", address)
    with pytest.raises(UserError, match=r"^\[engine\] workers: the Ray cluster has 2 CPUs, which is too little"):
        play(job(engine={}), tmp_path / "run", cluster, overrides=["engine.workers=3"])
    play(job(), tmp_path / "run", cluster)
    assert not ray.is_initialized(), "the connection ends with the run"
