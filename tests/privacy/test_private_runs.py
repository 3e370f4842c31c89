"""Runs with noise: epsilon before and after, on any engine, across stages and resumes; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.errors import UserError
from fedstrata.events import Counted
from fedstrata.reports.report import write_report
from tiny import saved_models

Jobs = Callable[..., dict[str, Any]]
LABELS = ["eye", "heart", "kidney"]
CLIENT = {"level": "client", "clip": 0.5, "noise": 0.01, "single_message": True}
EXAMPLE = {"level": "example", "clip": 0.5, "noise": 0.8}


def private(
    job: Jobs, name: str, privacy: dict[str, Any], kind: str = "classify", **tables: Any
) -> dict[str, Any]:
    labels = {"task": {"labels": LABELS}} if kind == "classify" else {}
    return job(name, kind, **{**labels, "privacy": privacy, **tables})


def lines(folder: Path, name: str = "rounds") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE], ids=["client", "example"])
@pytest.mark.parametrize(
    ("name", "kind"), [("fedavg", "classify"), ("fedbfpt", "mlm"), ("fedsplitbert", "classify")]
)
def test_before_is_after_and_engines_agree(job: Jobs, tmp_path: Path, privacy: Any, name: str, kind: str) -> None:
    made = private(job, name, privacy, kind)
    before = fedstrata.forecast(made)[name]
    result = fedstrata.run(made)
    assert result.privacy is not None
    assert before["privacy"] == result.privacy
    assert result.privacy["epsilon"] > 0
    assert all(line["loss"] is None for line in lines(result.folder) if line["client"] != "server")
    sent = sum(line["bytes"] for line in result.transfers if line["direction"] == "up" and line["round"] >= 0)
    assert sent == before["clients"]["up_bytes"]
    if kind != "mlm":  # whose number of masked positions is drawn
        assert result.flops == before["clients"]["train_flops"]
    if name == "fedavg":
        pool = {**made, "output": {"dir": str(tmp_path / "pool")}, "engine": {"name": "pool", "workers": 2}}
        assert_same(saved_models(result.folder), saved_models(fedstrata.run(pool).folder))
    page = write_report([result.folder]).read_text("utf-8")
    assert f"epsilon {result.privacy['epsilon']:.3g}" in page
    assert "no noise covers" in page
    assert result.privacy["noise_from"] == "train.seed"
    assert "nobody who knows or guesses" in page


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_message_of_a_client_is_its_change_clipped_and_noised(job: Jobs, tmp_path: Path) -> None:
    """One client, one round: without noise the model moves by the clip, with noise by the noise."""

    def saved(name: str, privacy: dict[str, Any], method: str = "fedavg") -> dict[str, torch.Tensor]:
        made = private(job, method, privacy, clients={"count": 1}, output={"dir": str(tmp_path / name)})
        made["method"]["rounds"] = int(method != "none")
        made["train"] |= {"learning_rate": 1.0, "optimizer": "sgd"}
        made["model"] = {"name": str(model)}
        return saved_models(fedstrata.run(made).folder)

    model = private(job, "fedavg", {})["model"]["name"]
    table = {"level": "client", "clip": 0.25, "single_message": True}
    before = saved("before", {}, "none")
    norms = {}
    for name, privacy in {
        "free": {},
        "clipped": {**table, "noise": 1e-3},
        "noised": {**table, "noise": 2.0},
    }.items():
        after = saved(name, privacy)
        change = torch.cat([(after[key] - before[key]).double().flatten() for key in after])
        norms[name], count = float(change.norm()), len(change)
    assert norms["free"] > 0.5
    assert norms["clipped"] == pytest.approx((0.25**2 + (0.25e-3) ** 2 * count) ** 0.5, rel=0.02)
    assert norms["noised"] == pytest.approx(0.25 * 2.0 * count**0.5, rel=0.02)


def test_every_message_weighs_the_same_at_level_client(job: Jobs) -> None:
    made = private(job, "fedavg", CLIENT, clients={"count": 2, "partition": "sizes", "sizes": [0.75, 0.25]})
    result = fedstrata.run(made)
    assert {line["examples"] for line in lines(result.folder) if line["client"] != "server"} == {1}


@pytest.mark.parametrize("level", ["client", "example"])
def test_noise_follows_from_epsilon_for_the_rounds_that_a_client_takes_part_in(job: Jobs, level: str) -> None:
    table = {"level": level, "epsilon": 4.0, "delta": 1e-4}
    if level == "client":
        table["single_message"] = True
    made = private(job, "fedavg", table, method={"rounds": 3}, clients={"count": 4, "fraction": 0.5})
    told = fedstrata.run(made).privacy
    assert told is not None
    assert 3.8 < told["epsilon"] <= 4.0
    rounds = {own["rounds"] for own in told["clients"].values()}
    assert len(rounds) > 1  # sampled: some take part less often, and spend less
    least = min(told["clients"].values(), key=lambda own: own["rounds"])
    assert least["epsilon"] < 3.9
    with pytest.raises(UserError, match=r"participations: is 1, but a client may be asked in \d rounds"):
        fedstrata.forecast({**made, "privacy": {**table, "participations": 1}})


def test_a_run_tells_of_how_many_clients_the_noise_is_known(job: Jobs) -> None:
    """An event for each pair of examples and rounds: noise for another one has to be searched for."""
    table = {"level": "example", "epsilon": 4.0}
    told: list[Any] = []
    made = private(job, "fedavg", table, clients={"count": 4, "fraction": 0.5})
    result = fedstrata.run(made, progress=told.append)
    assert result.privacy is not None
    spent = {(own["rate"], own["releases"]) for own in result.privacy["clients"].values()}
    counted = [event for event in told if isinstance(event, Counted) and event.what == "clients"]
    assert len(counted) == len(spent) > 1
    assert [event.done for event in counted] == sorted({event.done for event in counted})
    assert {event.total for event in counted} == {4}
    assert counted[0].done == 1


def test_a_resumed_run_spends_what_one_that_was_not_interrupted_spends(job: Jobs, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    made = private(job, "fedavg", EXAMPLE, method={"rounds": 3}, server={"evaluate": "end"})
    seen = []

    def progress(event: Any) -> None:
        if type(event).__name__ == "Replied":
            seen.append(event)
            if len(seen) == 5:  # in the second round: a third of its messages have left
                raise Stop

    with pytest.raises(Stop):
        fedstrata.run(made, progress=progress)
    part = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    result = fedstrata.run(made, resume=True)
    whole = fedstrata.run({**made, "output": {"dir": str(tmp_path / "whole")}})
    assert result.privacy == whole.privacy
    assert part["epsilon"] <= whole.privacy["epsilon"]
    assert_same(saved_models(result.folder), saved_models(whole.folder))


def test_a_round_is_not_made_again_at_another_rate(job: Jobs) -> None:
    made = private(job, "fedavg", EXAMPLE, output={"keep_state": True})
    fedstrata.run(made)
    with pytest.raises(UserError, match="spend its epsilon twice"):
        fedstrata.run(
            {**made, "train": {**made["train"], "learning_rate": 1e-6}, "method": {"name": "fedavg", "rounds": 3}},
            resume=True,
        )
    more = fedstrata.run({**made, "method": {"name": "fedavg", "rounds": 3}}, resume=True)
    assert {own["rounds"] for own in more.privacy["clients"].values()} == {3}


def test_more_rounds_than_the_noise_was_calibrated_for_are_refused(job: Jobs) -> None:
    made = private(job, "fedavg", {"level": "example", "epsilon": 8.0}, output={"keep_state": True})
    fedstrata.run(made)
    with pytest.raises(UserError, match="calibrated for the rounds that it began with"):
        fedstrata.run({**made, "method": {"name": "fedavg", "rounds": 3}}, resume=True)


def test_examples_of_stages_take_part_as_they_were_forecast(job: Jobs) -> None:
    """Each stage throws coins of its own."""
    stages = [{"name": "a"}, {"name": "b"}]
    made = {**private(job, "fedavg", EXAMPLE), "stages": stages}
    (before,) = fedstrata.forecast(made).values()
    assert fedstrata.run(made).flops == before["clients"]["train_flops"]


def test_stages_add_up_or_say_why_not(job: Jobs, tmp_path: Path) -> None:
    made = private(job, "fedavg", EXAMPLE)
    stages = [{"name": "a", "method": {"rounds": 1}}, {"name": "b", "method": {"rounds": 2}}]
    before = fedstrata.forecast({**made, "stages": stages})
    result = fedstrata.run({**made, "stages": stages})
    single = fedstrata.run(
        {**made, "method": {"name": "fedavg", "rounds": 3}, "output": {"dir": str(tmp_path / "b")}}
    )
    assert (
        result.privacy["epsilon"] == single.privacy["epsilon"] == next(iter(before.values()))["privacy"]["epsilon"]
    )
    stages[0]["privacy"] = {"level": "none", "clip": 1.0, "noise": None}
    partly = fedstrata.forecast(
        {**made, "privacy": {}, "stages": [stages[1] | {"privacy": EXAMPLE}, {"name": "c"}]}
    )
    told = next(iter(partly.values()))["privacy"]
    assert told["epsilon"] is None
    assert "stage 'c' has no noise" in told["why"]


@pytest.mark.parametrize(
    "first",
    [
        {"method": {"name": "centralized"}},
        {"clients": {"count": 6}},
        {"train": {"seed": 1}},
        {"data": {"limit": 8}},
        {"clients": {"partition": "label_sorted"}},
    ],
)
def test_stages_that_deal_the_same_rows_otherwise_have_no_epsilon_together(job: Jobs, first: Any) -> None:
    """A row may be at the client that spends most in each of them, whatever the clients are called."""
    made = {**private(job, "fedavg", EXAMPLE), "stages": [{"name": "a", **first}, {"name": "b"}]}
    [before] = fedstrata.forecast(made).values()
    assert before["privacy"]["epsilon"] is None
    assert "deal the same rows" in before["privacy"]["why"]
    assert fedstrata.run(made).privacy == before["privacy"]


@pytest.mark.parametrize("source", ["list", "copy", "part"])
def test_so_have_stages_that_deal_the_same_texts_from_other_sources(
    job: Jobs, sentences_csv: Path, tmp_path: Path, source: str
) -> None:
    """The same file under another name, and a file with some of its texts and other labels."""
    lines = sentences_csv.read_text("utf-8").splitlines(keepends=True)
    copy = tmp_path / "copy.csv"
    copy.write_text("".join(lines if source == "copy" else [lines[0], *lines[:4:-1]]), "utf-8")
    train = [str(sentences_csv)] if source == "list" else str(copy)
    made = {**private(job, "fedavg", EXAMPLE), "stages": [{"name": "a"}, {"name": "b"}]}
    made["stages"][0] |= {"data": {"train": train}, "clients": {"count": 2}}
    [before] = fedstrata.forecast(made).values()
    assert before["privacy"]["epsilon"] is None
    assert "deal the same rows" in before["privacy"]["why"]
    assert fedstrata.run(made).privacy == before["privacy"]


@pytest.mark.parametrize(("count", "none"), [(2, True), (3, False)])
def test_so_have_stages_of_a_source_that_is_not_there(job: Jobs, count: int, none: bool) -> None:
    """A forecast knows no text then: clients of other numbers would have others."""
    made = private(job, "fedavg", EXAMPLE, data={"train": "nowhere.csv", "test": None})
    made["data"].pop("test")
    made["stages"] = [{"name": "a", "clients": {"count": count}}, {"name": "b"}]
    [before] = fedstrata.forecast(made).values()
    assert (before["privacy"]["epsilon"] is None) is none


@pytest.mark.parametrize(
    "first",
    [
        {"clients": {"fraction": 0.5}},
        {"task": {"kind": "mlm", "labels": None}},
        {"data": {"train": "others.csv"}, "clients": {"count": 2}},
    ],
)
def test_stages_whose_clients_keep_their_rows_add_up(job: Jobs, sentences_csv: Path, first: Any) -> None:
    """Also where a stage has rows of its own, which are in no other."""
    others = sentences_csv.with_name("others.csv")
    others.write_text(sentences_csv.read_text("utf-8").replace(".", " there."), "utf-8")
    first = {**first, "data": {"train": str(others)}} if "data" in first else first
    made = private(job, "fedavg", EXAMPLE)
    [alone] = fedstrata.forecast(made).values()
    [before] = fedstrata.forecast({**made, "stages": [{"name": "a", **first}, {"name": "b"}]}).values()
    assert before["privacy"]["epsilon"] > alone["privacy"]["epsilon"]


def test_a_run_that_is_stopped_counts_the_round_that_had_begun(job: Jobs, tmp_path: Path) -> None:
    """Of all whom it asks a message may have left: between sites they train at the same time."""
    made = private(job, "fedavg", EXAMPLE, clients={"count": 4, "fraction": 0.5})

    def stop(event: Any) -> None:
        if type(event).__name__ == "Stepped":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made, progress=stop)
    told = json.loads((tmp_path / "run" / "result.json").read_text("utf-8"))["privacy"]["clients"]
    assert sorted(own["rounds"] for own in told.values()) == [0, 0, 1, 1]
    whole = fedstrata.run(made, resume=True).privacy
    assert whole is not None
    assert all(own["epsilon"] <= whole["clients"][name]["epsilon"] for name, own in told.items())


REFUSED: dict[str, tuple[tuple[str, str], dict[str, Any], str]] = {
    "activations": (("fedbert", "classify"), {}, "hidden states of every batch"),
    "hidden states": (
        ("fedfreezebert", "classify"),
        {"method": {"variant": "centralized"}, "client": {"may_send": ["hidden_states"]}},
        "hidden states of its texts leave",
    ),
    "own tests": (("fedavg", "classify"), {"clients": {"test": 0.2}, "data": {"test": None}}, "no noise covers"),
    "labels of rows": (("fedavg", "classify"), {"task": {"labels": None}}, "would tell of them"),
    "tokens": (
        ("fedavg", "classify"),
        {"train": {"tokens_per_batch": 64, "batch_size": None}},
        "drawn one by one",
    ),
    "accumulation": (("fedavg", "classify"), {"train": {"gradient_accumulation": 2}}, "whole step"),
    "norm": (("fedavg", "classify"), {"train": {"max_grad_norm": 1.0}}, "every single example"),
    "blocks": (("fedavg", "mlm"), {"data": {"long_text": "pack"}}, "all blocks after it begin elsewhere"),
    "single": (
        ("fedavg", "classify"),
        {"privacy": {**CLIENT, "single_message": False}},
        "single_message = true says",
    ),
    "pooled": (("centralized", "classify"), {"privacy": CLIENT}, "they send nothing"),
    "local": (("local", "classify"), {"privacy": CLIENT}, "they send nothing"),
    "neither": (("fedavg", "classify"), {"privacy": {"level": "example"}}, "found neither of epsilon and noise"),
    "none": (("fedavg", "classify"), {"privacy": {"epsilon": 8.0}}, "goes with level = 'example' or 'client'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_break_the_promise_is_refused(job: Jobs, case: str) -> None:
    (name, kind), tables, sentence = REFUSED[case]
    made = private(job, name, EXAMPLE, kind)
    for table, keys in tables.items():
        whole = keys if table == "privacy" else {**made.get(table, {}), **keys}
        made[table] = {key: value for key, value in whole.items() if value is not None}
    for played in (fedstrata.forecast, fedstrata.run):
        with pytest.raises(UserError, match=sentence):
            played(made)
