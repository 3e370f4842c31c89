"""Ten sites, of which some are killed, stand still or have other clocks, and a server that loses its disk.

``make deploy-test``: each of it ends in the bits of a run in one process, or in a sentence.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_deployment import agrees, answered
from test_flower import job, same

import fedstrata
from deployment import Deployment

pytestmark = pytest.mark.deploy
NAMES = tuple("abcdefghij")
CLOCKS = {"i": 3.0, "j": -200.0}
"""Sites whose clocks are so many seconds ahead, as far as Flower permits."""


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(tmp_path_factory.mktemp("town"), NAMES)
    running.up(clocks=CLOCKS)
    yield running
    running.down()


@pytest.fixture(scope="module")
def config(town: Deployment, model_folder: Callable[..., Path]) -> dict[str, Any]:
    return job(town, model_folder(), "fedavg", "classify", method={"rounds": 4}, train={"epochs": 20})


@pytest.fixture(scope="module")
def alone(town: Deployment, config: dict[str, Any]) -> Path:
    """The folder of the same job in one process."""
    return fedstrata.run(config, {"output.dir": str(town.folder / "alone")}).folder


def log(town: Deployment, name: str) -> str:
    return (town.site(name) / "state" / "logs" / "site.log").read_text("utf-8")


def test_a_site_that_is_killed_during_its_first_message_is_greeted_again(
    town: Deployment, config: dict[str, Any], alone: Path
) -> None:
    process = town.run(config, "first", "engine.deadline=200")
    town.until(lambda: "INFO received" in log(town, "b"), 120, "b is not greeted")
    town.kill("b")
    assert "INFO sent" not in log(town, "b"), "it was killed after its answer"
    town.join("b")
    there = town.finished(process, "first")
    assert not (there / "missing.jsonl").exists()
    same(alone, there)


def test_a_site_that_stands_still_is_missed_and_comes_back(
    town: Deployment, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = town.run(config, "stalled", "engine.deadline=20")
    town.until(lambda: 0 in answered(town, "stalled", "c"), 120, "round 1 does not end")
    with town.paused("c"):
        town.until(lambda: bool(town.lines("stalled", "missing.jsonl")), 90, "c is not missed")
    there = town.finished(process, "stalled")
    missed = town.lines("stalled", "missing.jsonl")
    assert {line["client"] for line in missed} == {"c"}
    assert missed[0]["reason"] == "did not answer in time"
    assert answered(town, "stalled", "c")[-1] == 3
    agrees(config, there, monkeypatch)


def test_a_server_that_loses_its_disk_says_so_and_begins_anew(
    town: Deployment, config: dict[str, Any], alone: Path
) -> None:
    town.run(config, "lost")
    town.until(lambda: 1 in answered(town, "lost", "a"), 120, "round 2 does not end")
    town.kill("lost")
    town.kill("serve")
    shutil.rmtree(town.folder / "lost" / "state")
    for name in ("flower", "logs"):
        shutil.rmtree(town.home / name)
    for name in ("secret", "run.json", "run.lock"):
        (town.home / name).unlink()
    town.serve()
    town.until(lambda: town.out("serve").count("serving at") == 2, 90, "the server does not come back")
    assert town.run(config, "lost", "--resume").wait(120) == 2
    refused = town.out("lost").splitlines()[-1]
    assert "manifest-*.json is missing, while there is" in refused
    assert refused.endswith("; name another folder to begin anew")
    shutil.rmtree(town.folder / "lost")
    there = town.finish(config, "lost", "--resume", "engine.deadline=200")
    assert "lost holds no run to resume, so it begins with round 1" in town.out("lost")
    assert not (there / "missing.jsonl").exists()
    same(alone, there)
    assert json.loads((town.home / "run.json").read_text("utf-8"))["status"] == "finished"


def test_a_server_whose_folder_is_gone(town: Deployment) -> None:
    town.kill("serve")
    town.home.rename(town.folder / "away")
    town.serve()
    assert town.processes.pop("serve").wait(60) == 2
    assert "fedstrata: federation: " in town.out("serve").splitlines()[-1]
    (town.folder / "away").rename(town.home)


def test_a_site_with_another_clock_reads_why_it_is_refused(town: Deployment) -> None:
    town.serve()
    town.kill("a")
    town.join("a", clock=3600.0)
    words = "a: the clock of this machine is 60 min ahead of the server's"
    town.until(lambda: words in town.out("a"), 90, "a does not say that its clock is another")
