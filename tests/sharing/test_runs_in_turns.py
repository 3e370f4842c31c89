"""Whole runs that leave something out, or send parts in turns: forecast, resuming, sites; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import NAMES, Village, same

import fedstrata
from fedstrata.errors import UserError
from tiny import saved_models

Jobs = Callable[..., dict[str, Any]]
OWN = {"clients": {"test": 0.3}}
SPLIT = {"client": {"may_send": ["weights", "activations", "hidden_states"]}}
DELTA = {"codec": "delta", "bits": 4, "density": 0.25}
ROWS = {"privacy": {"omit": ["unlisted_rows", "position_rows"], "public_vocabulary": "VOCABULARY"}}
BIAS = {"privacy": {"omit": ["decoder_bias"]}}
EMBEDDINGS = {"privacy": {"omit": ["embeddings"]}}
SUMS = {"privacy": {**ROWS["privacy"], "sum_only": True}}
SHARED = {"level": "client", "clip": 0.125, "noise": 2.0, "sum_only": True, "honest": 3}


def turns(period: int, rounds: int, **wire: Any) -> dict[str, Any]:
    return {"wire": {"part_period": period, **wire}, "method": {"rounds": rounds}}


LORA = {"adapter": {"kind": "lora", "rank": 2, "merge": "freeze_a"}}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "mlm", {**ROWS, "wire": {"dtype": "int8"}, "method": {"rounds": 3}}),
    ("fedavg", "mlm", {**ROWS, "wire": DELTA, "method": {"rounds": 4}, "clients": {"fraction": 0.67}}),
    ("fedavg", "mlm", {**ROWS, "wire": {"dtype": "fp16"}, "server": {"optimizer": "adam"}}),
    ("fedprox", "mlm", {**BIAS, "train": {"proximal_mu": 0.5, "optimizer_state": "persist"}}),
    ("fedbfpt", "mlm", {**ROWS, "method": {"rounds": 3}}),
    ("fedbt", "classify", {**EMBEDDINGS, "method": {"variant": "all"}}),
    ("fedavg", "classify", {**LORA, **BIAS}),
    ("fedsplitbert", "classify", {**ROWS, **OWN}),
    ("fedfreezebert", "classify", {**EMBEDDINGS, "head": {"kind": "hsum"}, "layers": 4}),
    ("fedbert", "mlm", {**ROWS, "method": {"mode": "share", "lower": 1, "upper": 1}}),
    ("fedbert", "mlm", {**EMBEDDINGS, "method": {"mode": "share"}}),
    ("local", "mlm", ROWS),
    ("fedavg", "mlm", {**turns(3, 5, dtype="int8"), "clients": {"fraction": 0.67}}),
    ("fedavg", "mlm", {**turns(2, 4, **DELTA), **ROWS}),
    ("fedadam", "classify", {**turns(2, 4), **LORA, "train": {"optimizer_state": "persist"}}),
    ("fedsplitbert", "classify", {**turns(2, 4), **OWN}),
    ("fedbt", "classify", {"wire": {"part_period": 3}, "method": {"variant": "all", "rounds": 4}}),
    ("fedavg", "mlm", {**turns(2, 4), **SUMS}),
    ("fedavg", "mlm", {**turns(2, 4), "privacy": {**ROWS["privacy"], **SHARED}}),
]


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    path = tmp_path / "public.txt"
    path.write_text("the\nkidney\nheart of\n", "utf-8")
    return str(path)


def made(job: Jobs, name: str, kind: str, tables: dict[str, Any], vocabulary: str) -> dict[str, Any]:
    tables = {**SPLIT, **{key: dict(t) if isinstance(t, dict) else t for key, t in tables.items()}}
    config = job(name, kind, tables.pop("layers", 3), **tables)
    if "public_vocabulary" in config.get("privacy", {}):
        config["privacy"]["public_vocabulary"] = vocabulary
    if "test" in config["clients"]:
        del config["data"]["test"]
    return config


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_a_run_costs_what_was_forecast_and_ends_in_the_same_bits_when_killed(
    job: Jobs, name: str, kind: str, tables: dict[str, Any], tmp_path: Path, vocabulary: str
) -> None:
    config = made(job, name, kind, tables, vocabulary)
    costs = fedstrata.forecast(config)[name]["clients"]
    run = fedstrata.run(config)
    assert run.bytes == {"up": costs["up_bytes"], "down": costs["down_bytes"], "setup": costs["setup_bytes"]}
    if kind != "mlm":  # the number of masked positions is drawn
        assert run.flops == costs["train_flops"]

    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 1:
            raise KeyboardInterrupt

    again = {**config, "output": {"dir": str(tmp_path / "again")}}
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(again, progress=dying)
    resumed = fedstrata.run(again, resume=True)
    one, other = saved_models(run.folder), saved_models(resumed.folder)
    assert one
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (run.score, run.bytes, run.flops) == (resumed.score, resumed.bytes, resumed.flops)
    assert not list((run.folder / "state").rglob("between/*"))


SITES = [
    ("fedavg", {**ROWS, "wire": DELTA, "method": {"rounds": 3}}),
    ("fedbert", {**BIAS, **SPLIT}),
    ("fedavg", {**turns(2, 4, dtype="int8"), **EMBEDDINGS}),
    ("fedavg", {**turns(2, 4), **SUMS}),
]


@pytest.mark.parametrize(("name", "tables"), SITES)
def test_between_sites_a_run_ends_in_the_same_bits(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tables: dict[str, Any], vocabulary: str
) -> None:
    village = Village(tmp_path, monkeypatch)
    here, there = village.jobs(made(job, name, "mlm", tables, vocabulary))
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    run = fedstrata.run(there)
    same(fedstrata.run(here), run)


def test_a_site_that_starts_again_between_two_rounds_goes_on_with_its_own_values(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    village = Village(tmp_path, monkeypatch)
    here, there = village.jobs(job("fedavg", "mlm", **turns(3, 5)))

    def restart(event: Any) -> None:
        if type(event).__name__ == "Scored":
            village.start()

    same(fedstrata.run(here), fedstrata.run(there, progress=restart))


REFUSED = [
    ("fedavg", {**turns(2, 2), "train": {"proximal_mu": 0.1}}, r"part_period: does not go with train.proximal_mu"),
    ("fedbfpt", turns(2, 3), r"part_period: 'fedbfpt' as set here sends other parts from round to round"),
    (
        "fedbfpt",
        {**turns(2, 4), "clients": {"count": 6, "fraction": 0.17}},  # nobody is asked twice
        r"part_period: 'fedbfpt' as set here sends other parts from round to round",
    ),
    ("fedbert", {**turns(2, 2), **SPLIT}, r"part_period: goes with methods that send weights; 'fedbert'"),
    ("centralized", turns(2, 2), r"part_period: goes with methods whose clients send parts"),
    ("local", turns(2, 2), r"part_period: .*sends 0 parts"),
    ("fedavg", turns(6, 6), r"part_period: is 6, but 'fedavg' as set here sends 5 parts"),
    (
        "fedfreezebert",
        {**turns(2, 2), "task": {"kind": "classify"}, "head": {"kind": "mean"}},
        r"sends 1 part, so that there would be .* expected: 1$",
    ),
    ("fedavg", {**turns(2, 2), "adapter": {"kind": "lora", "merge": "alternate"}}, r"which takes turns by itself"),
    ("fedavg", {**turns(2, 2), "adapter": {"kind": "lora", "merge": "exact"}}, r"needs both factors"),
    ("fedavg", {"privacy": {"omit": ["decoder_bias", "decoder_bias"]}}, r"names 'decoder_bias' more than once"),
    ("fedavg", {"privacy": {"omit": ["unlisted_rows"]}}, r"public_vocabulary: goes with 'unlisted_rows'"),
    (
        "fedavg",
        {"privacy": {"omit": ["unlisted_rows"], "public_vocabulary": "nowhere.txt"}},
        r"public_vocabulary: there is no file nowhere.txt",
    ),
    (
        "fedavg",
        {
            "privacy": {"omit": ["position_rows"]},
            "adapter": {"kind": "lora", "merge": "plain", "targets": ["position_embeddings"]},
        },
        r"omit: 'position_rows' goes with embeddings that are trained themselves",
    ),
]


@pytest.mark.parametrize(("name", "tables", "said"), REFUSED)
def test_what_does_not_go_together_is_refused(job: Jobs, name: str, tables: dict[str, Any], said: str) -> None:
    config = job(name, "mlm", **tables)
    for tried in (fedstrata.run, fedstrata.forecast):
        with pytest.raises(UserError, match=said):
            tried(config)


def test_a_vocabulary_of_other_words_or_bytes_is_refused(job: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "words"
    config = job(privacy={"omit": ["unlisted_rows"], "public_vocabulary": str(path)})
    for content, said in ((b"xyzzy\n", r"no line of .* is a token or word"), (b"\xff\xfe", r"is not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            fedstrata.run(config)


def test_a_run_goes_on_with_the_vocabulary_that_it_began_with(job: Jobs, vocabulary: str) -> None:
    config = made(job, "fedavg", "mlm", {**ROWS, "output": {"keep_state": True}}, vocabulary)
    fedstrata.run(config)
    Path(vocabulary).write_text("the\n", "utf-8")
    with pytest.raises(UserError, match=r"public_vocabulary: lists other tokens than when its run began"):
        fedstrata.run(config, {"method.rounds": 3}, resume=True)


def test_a_run_says_what_it_leaves_out_and_when_parts_are_sent(job: Jobs, vocabulary: str, tmp_path: Path) -> None:
    said: list[str] = []

    def listen(event: Any) -> None:
        said.extend(getattr(event, "notes", ()))

    omit = {"omit": ["unlisted_rows", "decoder_bias", "position_rows"], "public_vocabulary": vocabulary}
    fedstrata.run(job("fedavg", "mlm", **turns(2, 2), privacy=omit), progress=listen)
    text = "\n".join(said)
    assert "the MLM decoder's bias: neither trained nor sent" in text
    assert "listed and travel" in text
    assert "each part is sent in every 2 rounds (round 1 layer.0" in text
    said.clear()
    fedstrata.run(
        job("fedavg", "classify", privacy={"omit": ["decoder_bias"]}),
        {"output.dir": str(tmp_path / "other")},
        progress=listen,
    )
    assert "'decoder_bias' changes nothing; this model, with this task, has none" in "\n".join(said)
