"""Sites that lose their disks: where a job keeps something at them the server says so, once for each time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bad_sites import attacked
from test_in_memory import NAMES, Village, lines, same, weights, without_its_disk

import fedstrata
from attacks.bad_site import Attack, with_metadata
from fedstrata.runs import stages

Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    return Village(tmp_path, monkeypatch)


KEEPING: list[tuple[str, dict[str, Any], list[str]]] = [
    ("fedavg", {"train": {"optimizer_state": "persist"}, "wire": {"dtype": "int8"}}, ["moments", "unsent"]),
    ("fedavg", {"wire": {"part_period": 2}}, ["parts that wait"]),
    ("fedsplitbert", {"clients": {"test": 0.3}}, ["parts of its own"]),
    ("fedbert", {"method": {"mode": "share"}, "train": {"optimizer_state": "persist"}}, ["moments"]),
]


@pytest.mark.parametrize(("name", "tables", "what"), KEEPING)
def test_the_server_says_that_a_site_has_lost_what_it_kept(
    job: Jobs, village: Village, name: str, tables: dict[str, Any], what: list[str]
) -> None:
    """Once for each time; two others have lost nothing."""
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    tables = {**tables, "method": {**tables.get("method", {}), "rounds": 8}}
    _, there = village.jobs(job(name, "classify", 3, **tables))
    events: list[Any] = []
    lose = without_its_disk(village, 1, 4)

    def watch(event: Any) -> None:
        events.append(event)
        lose(event)

    run = fedstrata.run(there, progress=watch)
    lost = json.loads((run.folder / "result.json").read_text("utf-8"))["lost"]
    assert lost == lines(run.folder / "lost.jsonl")
    assert [(line["client"], line["round"]) for line in lost] == [("c", 1), ("c", 4)]
    assert all(word in kept for word, kept in zip(what, lost[0]["what"], strict=True)), lost
    kept = " and ".join(lost[0]["what"])
    said = [event.sentence for event in events if "lost what it kept" in getattr(event, "sentence", "")]
    assert said == [f"c lost what it kept ({kept}) after round {at}, and went on without it" for at in (2, 5)]
    page = fedstrata.report(run.folder).read_text("utf-8")
    assert f"c lost what it kept ({kept}) after rounds 2, 5, and went on without it." in page


@pytest.mark.parametrize("killed", ["in the round", "before", "after"])
def test_a_loss_is_said_although_the_server_is_killed(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """Before the loss, before the round in which it shows is committed, or after."""
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 5}, train={"optimizer_state": "persist"}))
    at, lose = {"before": 1, "in the round": 3, "after": 4}[killed], without_its_disk(village, 0)
    commit = stages.state.RunState.commit

    def dies(*args: Any) -> None:
        if args[3] == at:
            raise RuntimeError("killed")
        commit(*args)

    monkeypatch.setattr(stages.state.RunState, "commit", dies)
    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(there, progress=lambda event: None if killed == "before" else lose(event))
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    village.start()
    run = fedstrata.run(there, resume=True, progress=lose if killed == "before" else lambda event: None)
    assert [(line["client"], line["round"]) for line in lines(run.folder / "lost.jsonl")] == [("c", 0)]


def test_where_the_server_trains_sites_keep_nothing_that_they_could_lose(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the run is resumed, and the moments of the server's own optimizer persist."""
    tables = {"head": {"kind": "cls"}, "client": {"may_send": ["hidden_states"]}}
    tables |= {"method": {"variant": "centralized"}, "train": {"optimizer_state": "persist"}}
    _, there = village.jobs(job("fedfreezebert", "classify", 2, **tables))
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "hidden_states"]')
    commit = stages.state.RunState.commit

    def dies(*args: Any) -> None:
        commit(*args)
        if args[3] == 1:
            raise RuntimeError("killed")

    monkeypatch.setattr(stages.state.RunState, "commit", dies)
    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(there)
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    run = fedstrata.run(there, resume=True)
    assert not (run.folder / "lost.jsonl").exists()


def test_a_disk_lost_between_two_stages_is_no_loss_of_the_second(job: Jobs, village: Village) -> None:
    config = job("fedavg", "classify", train={"optimizer_state": "persist"})
    here, there = village.jobs(config)
    for tables in (here, there):
        tables["stages"] = [{"name": name} for name in ("one", "two")]

    def watch(event: Any) -> None:
        if type(event).__name__ == "StageEnded" and event.stage == "one":
            shutil.rmtree(village.folder / "federation" / "sites" / "c" / "state")
            village.start("c")

    run = fedstrata.run(there, progress=watch)
    assert not list(run.folder.rglob("lost.jsonl"))
    one = fedstrata.run(here)
    assert all(torch.equal(weights(one)[key], weights(run)[key]) for key in weights(one))


def test_in_asynchronous_rounds_a_loss_is_said_too(job: Jobs, village: Village) -> None:
    _, there = village.jobs(
        job("fedavg", "classify", 1, method={"rounds": 8}, train={"optimizer_state": "persist"}), buffer=2
    )
    run = fedstrata.run(there, progress=without_its_disk(village, 2))
    [lost] = lines(run.folder / "lost.jsonl")
    taken = [line["asked"] for line in lines(run.folder / "rounds.jsonl") if line["client"] == "c"]
    assert lost["client"] == "c"
    assert lost["round"] == max(asked for asked in taken if asked <= 2)
    assert max(taken) > 2, "it takes part again"


def test_what_a_site_says_of_its_own_losses_concerns_it_alone(job: Jobs, village: Village) -> None:
    """It makes up that it has lost all, each time, and what it cannot know; the model is that of an honest run."""
    here, there = village.jobs(
        job("fedavg", "classify", method={"rounds": 4}, train={"optimizer_state": "persist"})
    )

    def claims(known: str) -> Attack:
        return lambda message: with_metadata(
            message, lambda found: found.update(answers=re.sub(r"\[.*?\]", known, found["answers"]))
        )

    attacked(village, "b", "reply", [claims("[-1,-1]"), claims("[-1,-1]"), claims("[-1,-1]"), claims("[0,999]")])
    run = fedstrata.run(there)
    assert [(line["client"], line["round"]) for line in lines(run.folder / "lost.jsonl")] == [("b", 0), ("b", 1)]
    same(fedstrata.run(here), run)
