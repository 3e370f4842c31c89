"""Bad sites and bad servers as programs of their own, over Flower: the others outlive whatever they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_deployment import agrees, answered
from test_flower import job, same
from test_mishaps import log

import fedstrata
from attacks.bad_server import ATTACKS, PANIC_TEXT
from attacks.bad_site import IN_TURN, REPLIES
from deployment import JOIN, RUN, Deployment, attacker
from tiny import SENTENCES

pytestmark = pytest.mark.deploy
NAMES = ("a", "b", "c")
EARLIER = {"a head of nested brackets": "its head cannot be read"}
"""What is refused before it is a message: the recorded reason."""


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(tmp_path_factory.mktemp("attacked"), NAMES)
    for name in NAMES:
        running.set(name, "min_examples = 1 ", "min_examples = 4 ")
    running.up()
    yield running
    running.down()


@pytest.fixture(scope="module")
def config(town: Deployment, model_folder: Callable[..., Path]) -> dict[str, Any]:
    return job(town, model_folder(), "fedavg", "classify")


def with_a_long_word(town: Deployment, name: str) -> None:
    """A site has a text more, on which the library of tokenizers may panic."""
    rows = [row for i, row in enumerate(SENTENCES) if NAMES[i % len(NAMES)] == name]
    town.write(town.site(name) / "train.csv", ["text", "label"], [*rows, (PANIC_TEXT, rows[0][1])])


def test_sites_outlive_a_bad_server_and_say_what_they_refused(town: Deployment, config: dict[str, Any]) -> None:
    names, turns = list(ATTACKS), []
    while names:
        turns.append(dict(zip(NAMES, names, strict=False)))
        del names[: len(NAMES)]
    for i, attacks in enumerate(turns):
        before = {name: log(town, name) for name in NAMES}
        rows = {name: (town.site(name) / "train.csv").read_bytes() for name in NAMES}
        for name, attack in attacks.items():
            if attack == "a tokenizer that panics":
                with_a_long_word(town, name)
        town.write_job(config)
        words = [json.dumps(attacks), *RUN.split()[1:], f"output.dir=bad-{i}", "engine.deadline=60"]
        run = town.spawn(f"bad-{i}", *words, command=attacker("bad_server"))
        assert run.wait(240) == 2, town.out(f"bad-{i}")
        assert "engine.quorum" in town.out(f"bad-{i}").splitlines()[-1]
        for name, attack in attacks.items():
            assert ATTACKS[attack][2] in log(town, name).removeprefix(before[name]), attack
            assert town.processes[name].poll() is None
            (town.site(name) / "train.csv").write_bytes(rows[name])
        del town.processes[f"bad-{i}"]
    there = town.finish(config, "good")
    assert not (there / "missing.jsonl").exists()
    same(fedstrata.run(config, {"output.dir": str(town.folder / "alone")}).folder, there)


def test_a_bad_site_costs_nobody_but_itself(
    town: Deployment, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its replies is attacked in another way; then it is honest again."""
    town.kill("b")
    connected = town.out("b").count("b: connected")
    town.spawn("b", *JOIN.format("b").split()[1:], command=attacker("bad_site"))
    town.until(lambda: town.out("b").count("b: connected") > connected, 120, "b does not connect")
    longer = {**config, "method": {"name": "fedavg", "rounds": len(IN_TURN) + 1}}
    there = town.finish(longer, "bad-site", "engine.deadline=20")
    missing = town.lines("bad-site", "missing.jsonl")
    assert [(line["round"], line["client"]) for line in missing] == [(i, "b") for i in range(len(IN_TURN))]
    for line, attack in zip(missing, IN_TURN, strict=True):
        assert line["reason"].startswith(EARLIER.get(attack, REPLIES[attack][1])), attack
    assert answered(town, "bad-site", "a") == answered(town, "bad-site", "c") == list(range(len(IN_TURN) + 1))
    assert answered(town, "bad-site", "b") == [len(IN_TURN)]
    agrees(longer, there, monkeypatch)
