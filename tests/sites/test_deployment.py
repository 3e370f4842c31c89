"""What happens to a federation in a bad week: ``make deploy-test``, about six minutes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_flower import job, over_flower, same

import fedstrata
from deployment import Deployment
from fedstrata.engines.local import LocalEngine
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.runs import train as training
from tiny import saved_tensors

pytestmark = pytest.mark.deploy
ModelFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(tmp_path_factory.mktemp("deployment"))
    for name in ("a", "b"):
        running.set(name, 'payloads = ["weights"]', 'payloads = ["weights", "activations", "hidden_states"]')
    running.set("c", 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    running.up()
    yield running
    running.down()


@pytest.mark.parametrize(
    ("name", "kind", "tables"),
    [
        ("fedbfpt", "mlm", {}),
        ("fedsplitbert", "classify", {"clients": {"test": 0.3}, "wire": {"dtype": "fp16"}}),
        ("fedbert", "mlm", {"method": {"mode": "share"}, "wire": {"dtype": "bf16"}}),
        ("fedbert", "classify", {"method": {"mode": "parallel"}}),
    ],
)
def test_a_run_between_sites_ends_in_the_same_bits(
    deployment: Deployment, model_folder: ModelFolder, name: str, kind: str, tables: dict[str, Any]
) -> None:
    over_flower(deployment, model_folder(), name, kind, tables)


STAGES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {},
    "fedavgm": {},
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
    "fedbt": {},
    "fedfreezebert": {"head": {"kind": "mean"}},
}


def test_every_method_that_sends_weights_ends_in_the_same_bits(
    deployment: Deployment, model_folder: ModelFolder
) -> None:
    """Stage after stage in one run; FedBFPT and FedSplitBERT have theirs above."""
    config = job(deployment, model_folder(), "fedavg", "classify", train={"optimizer_state": "persist"})
    del config["method"]
    config["stages"] = [
        {"name": f"stage-{name}", "method": {"name": name, "rounds": 2}, **tables}
        for name, tables in STAGES.items()
    ]
    there = deployment.finish(config, "every")
    here = fedstrata.run(config, {"output.dir": str(deployment.folder / "here-every")})
    for name in STAGES:
        same(here.folder / "stages" / f"stage-{name}", there / "stages" / f"stage-{name}")


def test_a_site_that_lets_no_hidden_states_leave_is_trained_without(
    deployment: Deployment, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(deployment, model_folder(), "fedfreezebert", "classify", method={"variant": "centralized"})
    config |= {"head": {"kind": "cls"}, "client": {"may_send": ["hidden_states"]}}
    there = deployment.finish(config, "hidden-states")
    reasons = {
        (line["client"], line["reason"].split(" (")[0])
        for line in deployment.lines("hidden-states", "missing.jsonl")
    }
    assert reasons == {("c", "refuses: fedfreezebert sends hidden_states")}
    assert "c  refuses: fedfreezebert sends hidden_states" in deployment.out("hidden-states")
    agrees(config, there, monkeypatch)


def test_without_tls_on_one_machine(model_folder: ModelFolder, tmp_path: Path) -> None:
    plain = Deployment(tmp_path)
    try:
        plain.up("--insecure")
        over_flower(plain, model_folder(), "fedbt", "classify", {}, "--insecure")
    finally:
        plain.down()


def agrees(config: dict[str, Any], there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In process, with the same clients missing in the same exchanges, a run comes to the same weights."""
    lines = (there / "missing.jsonl").read_text("utf-8").splitlines()
    gaps = {(line["round"], line["client"]) for line in map(json.loads, lines)}

    class Gaps(LocalEngine):
        def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
            for request in requests:
                if (request.round, request.client) in gaps:
                    yield NoReply(request.client, "is missing there")
                else:
                    yield from super().exchange([request])

    monkeypatch.setattr(training, "LocalEngine", Gaps)
    here = fedstrata.run(config, {"output.dir": str(there.with_name(f"here-{there.name}"))})
    kind = "model" if here.model else "shared"  # of models of their own, what the sites have in common
    one, other = (saved_tensors(folder / kind) for folder in (here.folder, there))
    assert all(torch.equal(one[key], other[key]) for key in one)


def answered(deployment: Deployment, out: str, name: str) -> list[int]:
    return [line["round"] for line in deployment.lines(out, "rounds.jsonl") if line["client"] == name]


def test_a_site_and_then_the_server_lose_power(
    deployment: Deployment, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(deployment, model_folder(), "fedbfpt", "mlm", train={"epochs": 100}, method={"rounds": 8})
    out = "bad-week"
    words = ("engine.deadline=40",)
    deployment.run(config, out, *words)
    deployment.until(lambda: 1 in answered(deployment, out, "a"), 120, "round 1 does not end")
    deployment.kill("b")
    deployment.until(lambda: len(deployment.lines(out, "missing.jsonl")) > 0, 120, "b is not missed")
    deployment.join("b")
    missed = deployment.lines(out, "missing.jsonl")[0]
    assert missed["client"] == "b"
    with deployment.paused(
        "a"
    ):  # its round takes longer; on a fast machine the run would be over before b is back
        deployment.until(lambda: deployment.out("b").count("b: connected") == 2, 90, "b is not taken in again")
    deployment.until(
        lambda: any(round > missed["round"] for round in answered(deployment, out, "b")),
        150,
        "b does not come back",
    )
    deployment.kill(out)
    deployment.kill("serve")
    deployment.serve()
    deployment.until(lambda: deployment.out("serve").count("serving at") == 2, 60, "the server does not come back")
    there = deployment.finish(config, out, "--resume", *words)
    assert json.loads((there / "result.json").read_text())["status"] == "finished"
    assert answered(deployment, out, "a") == list(range(8)), "the others did not miss a round"
    agrees(config, there, monkeypatch)


def late(deployment: Deployment, out: str, name: str) -> list[int]:
    """By how many versions of the model a site's answers were late."""
    return [line["staleness"] for line in deployment.lines(out, "rounds.jsonl") if line["client"] == name]


def test_asynchronous_rounds_go_on_without_a_site_that_stands_still(
    deployment: Deployment, model_folder: ModelFolder
) -> None:
    """Its answer is merged when it comes, and the recorded arrivals in one process come to the same bits."""
    tables = {"train": {"epochs": 5, "optimizer_state": "persist"}, "method": {"rounds": 12}}
    config = job(deployment, model_folder(), "fedavg", "classify", **tables)
    out = "asynchronous"
    process = deployment.run(config, out, "engine.buffer=2")
    for name in ("b", "c"):  # two answers make a round, so one of them may come in the second
        deployment.until(lambda name=name: answered(deployment, out, name) != [], 120, f"{name} does not answer")
    with deployment.paused("c"):
        then = max(answered(deployment, out, "b"))
        deployment.until(lambda: max(answered(deployment, out, "b")) > then + 2, 60, "the others do not go on")
    with deployment.paused("a"):  # so that the next round cannot end without c
        deployment.until(lambda: max(late(deployment, out, "c")) > 1, 60, "the late answer is not merged")
    there = deployment.finished(process, out)
    assert deployment.lines(out, "missing.jsonl") == []
    replayed = {"engine.buffer": 2, "engine.arrivals": str(there / "arrivals.jsonl")}
    here = fedstrata.run(config, {**replayed, "output.dir": str(deployment.folder / "here-asynchronous")})
    same(here.folder, there)
