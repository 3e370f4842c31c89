"""A bad server: what it asks for, and what it sends as a model, does not harm a site."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_in_memory import Village
from test_service import answer, text

import fedstrata
from attacks import bad_server
from attacks.bad_site import Attack, header, metadata
from fedstrata.client.steps import steps
from fedstrata.data.tokens import Tokens
from fedstrata.job.privacy_table import Privacy
from fedstrata.job.train_table import Train
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import BATCH, ORDER, Streams
from fedstrata.privacy.accounting import Spending
from fedstrata.sites import trial
from fedstrata.sites.answers import Answers
from fedstrata.sites.approval import job_digest
from fedstrata.sites.message_client import Over
from fedstrata.sites.messages import (
    Envelope,
    FarewellHeader,
    HelloHeader,
    RefusalHeader,
    ReplyHeader,
    RequestHeader,
    StartHeader,
    WelcomeHeader,
    decode_message,
    decode_request,
    encode_message,
)
from fedstrata.sites.noise import add_line
from fedstrata.sites.noise_account import ACCOUNT, NoiseAccount
from fedstrata.sites.permission import Refused
from fedstrata.sites.release_log import Release, ReleaseLog, now
from fedstrata.sites.rows_behind import rows_trained_on
from fedstrata.sites.service import SiteService
from fedstrata.sites.settings import read_site
from fedstrata.sites.trial import try_run
from fedstrata.sites.visit import Visit
from fedstrata.tasks import Examples
from fedstrata.tasks.mlm import MaskedLM
from fedstrata.wire.files import read_lines
from fedstrata.wire.foreign import plain_text

Jobs = Callable[..., dict[str, Any]]
Said = dict[type, list[Envelope]]


ROWS = [(f"the sick organ {i} kidney", ("kidney", "heart")[i % 2]) for i in range(12)]


class Town:
    """Site a with twelve rows, and what an honest server said to it in a run: the attacks are made of that."""

    def __init__(self, village: Village, config: dict[str, Any]) -> None:
        self.village = village
        self.home, self.model = village.folder / "federation" / "sites" / "a", config["model"]["name"]
        self.rows(ROWS)
        _, there = village.jobs(config)
        there["task"]["labels"] = ["kidney", "heart", "eye", "liver"]
        fedstrata.run(there, {"engine.quorum": 0.3})
        self.said: Said = {}
        for name, way, message in village.post.messages:
            if name == "a" and way == "down":
                envelope = decode_message(message, "hello", "start", "request", "farewell")
                self.said.setdefault(type(envelope.header), []).append(envelope)
        [self.hello], [self.start] = self.said[HelloHeader], self.said[StartHeader]

    def rows(self, rows: list[tuple[str, str]]) -> None:
        self.village.write("federation/sites/a/train.csv", ["text", "label"], rows)

    def site(self, *limits: tuple[str, str], tried: bool = False) -> SiteService:
        """Site a as new, with other settings."""
        for path in sorted(self.home.glob("state/**/*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        return self.again(*limits, tried=tried)

    def again(self, *limits: tuple[str, str], tried: bool = False) -> SiteService:
        """Site a, started again on the disk that it has."""
        path = self.home / "site.toml"
        original = path.read_text("utf-8")
        changed = original.replace("min_examples = 1 ", "min_examples = 8 ")
        for old, new in limits:
            assert old in changed
            changed = changed.replace(old, new)
        path.write_text(changed, "utf-8")
        settings = read_site(path)
        path.write_text(original, "utf-8")
        return SiteService(settings, trial=try_run if tried else None)

    def job(self, **tables: dict[str, Any]) -> dict[str, Any]:
        """The job with other keys."""
        job = self.hello.header.job  # type: ignore[attr-defined]
        return {**job, **{name: {**job.get(name, {}), **keys} for name, keys in tables.items()}}

    def begun(self, service: SiteService) -> SiteService:
        """A site that has been greeted and has the start model."""
        assert isinstance(answer(service, self.hello), WelcomeHeader)
        assert isinstance(answer(service, self.start), WelcomeHeader)
        return service

    def request(self, round: int, phase: str = "train") -> Envelope:
        """What the server asked for."""
        requests = self.said[RequestHeader]
        return next(r for r in requests if (r.header.round, r.header.phase) == (round, phase))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[..., Path]) -> Town:
    folder = tmp_path_factory.mktemp("town")
    (folder / "test.csv").write_text(
        "text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS), "utf-8"
    )
    config = {
        "model": {"name": str(model_folder(layers=2))},
        "task": {"kind": "classify"},
        "data": {"test": str(folder / "test.csv")},
        "clients": {},
        "method": {"name": "fedavg", "rounds": 2},
        "train": {"batch_size": 2, "max_tokens": 32, "precision": "fp32", "device": "cpu"},
    }
    with pytest.MonkeyPatch.context() as patch:
        return Town(Village(folder, patch), config)


@pytest.fixture
def town(heard: Town) -> Town:
    heard.rows(ROWS)
    return heard


def kept(service: SiteService) -> list[Path]:
    """What the site keeps of runs."""
    return list((service.settings.folder / "runs").glob("*"))


def releases(service: SiteService) -> list[dict[str, Any]]:
    path = service.settings.folder / "releases.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


FEW = [
    {"steps": 1, "batch_size": 1},
    {"steps": 3, "batch_size": 2},
    {"batch_size": 1, "steps": 12, "lr_schedule": "polynomial", "lr_power": 1e6},
    {"batch_size": 1, "steps": 12, "lr_schedule": "polynomial", "lr_power": 300.0, "warmup_ratio": 0.3},
]


@pytest.mark.parametrize("train", FEW)
def test_a_job_by_which_a_message_is_of_few_rows_is_refused(town: Town, train: dict[str, Any]) -> None:
    service = town.site()
    assert isinstance(answer(service, town.hello, job=town.job(train=train)), WelcomeHeader)
    refusal = answer(service, town.start)
    assert refusal.final
    assert refusal.reason.startswith(
        "refuses: fewer than 8 rows of its own would be behind a message (min_examples)"
    )
    assert "weights" not in {line["payload"] for line in releases(service)}


def test_many_steps_over_few_chunks_of_long_texts_are_few_rows(town: Town) -> None:
    """Two texts of a hundred chunks each are two rows."""
    long = " ".join(["the sick organ kidney heart eye"] * 100)
    town.rows([(long, "kidney"), (long, "heart")])
    service = town.site()
    job = town.job(train={"max_tokens": 16, "batch_size": 4})
    assert isinstance(answer(service, town.hello, job=job, long_text="chunk"), WelcomeHeader)
    reason = answer(service, town.start).reason
    assert reason == "refuses: it has fewer examples than the 8 it wants to train on"


def test_few_masked_tokens_are_few_rows(town: Town) -> None:
    refusal = answer(
        town.site(), town.hello, job=town.job(task={"kind": "mlm", "mask_probability": 1e-9}), labels=None
    )
    assert "task.mask_probability is 1e-09" in refusal.reason


@pytest.mark.parametrize("probability", [0.02, 0.15, 0.9])
def test_rows_without_a_masked_token_are_not_behind_a_message(probability: float) -> None:
    lengths = np.full(12, 5)
    tokens = Tokens(np.tile([2, 10, 11, 12, 3], 12).astype(np.int32), np.arange(13) * 5, np.arange(12))
    task = MaskedLM(mask=4, padding=0, special=np.array([0, 2, 3, 4]), vocabulary=20, probability=probability)
    train, streams, index = Train(batch_size=6), Streams(0), np.arange(12)
    request = Request(0, "a", Plan((0,), ("head",)), "train", {}, {})
    masked: set[int] = set()
    draw = streams.numpy(0, "a", BATCH)
    for step in steps(lengths, train, streams.numpy(0, "a", ORDER)):
        for batch in step.batches:
            chance = draw.random((6, 5))
            inner = chance[:, 1:4]
            rows = np.flatnonzero((inner < probability).any(1))
            rows = rows if len(rows) else [inner.min(1).argmin()]  # at least one token of a batch is masked
            masked |= set(batch[rows].tolist())
            draw.random((6, 5)), draw.integers(0, 20, (6, 5))
    if probability < 0.1:
        assert len(masked) < 8
    assert rows_trained_on(train, streams, Examples(tokens), index, request, task) == len(masked)
    assert rows_trained_on(train, streams, Examples(tokens), index, request) == 12


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ({"optimizer": "sgd", "learning_rate": 1e-2, "proximal_mu": 1e2}, "train.proximal_mu is 1"),
        ({"learning_rate": 1e-3, "weight_decay": 1e3}, "train.weight_decay is 1"),
    ],
)
def test_a_job_in_which_every_step_undoes_the_ones_before_is_refused(
    town: Town, train: dict[str, Any], reason: str
) -> None:
    refusal = answer(town.site(), town.hello, job=town.job(train=train))
    assert reason in refusal.reason
    assert "undo what earlier rows have taught" in refusal.reason


CROWDED = [
    {"optimizer": "sgd", "learning_rate": 1e-4, "weight_decay": 1e3, "proximal_mu": 1e3, "max_grad_norm": 1.0},
    {"learning_rate": 1e-5, "weight_decay": 1e4, "proximal_mu": 1e4, "max_grad_norm": 1e-3},
]
CROWDED_BY_ADAMW = [
    {"learning_rate": 1e-5, "weight_decay": 1e4, "proximal_mu": 1e4},
    {"learning_rate": 1e-5, "weight_decay": 1e3, "proximal_mu": 1e4},
    {"learning_rate": 1e-5, "proximal_mu": 1e4},
]
AS_FAR_AS_ALLOWED = [
    {"optimizer": "sgd", "learning_rate": 1e-3, "weight_decay": 1e-2, "proximal_mu": 1e2, "max_grad_norm": 1.0},
    {"optimizer": "sgd", "learning_rate": 1e-3, "weight_decay": 1.0, "proximal_mu": 1.0, "max_grad_norm": 1e-3},
    {"learning_rate": 1e-5, "weight_decay": 1.0, "proximal_mu": 1e2, "max_grad_norm": 1e-3},
    {"learning_rate": 1e-5, "proximal_mu": 1e2},
    {"learning_rate": 1e-5, "weight_decay": 1e2, "proximal_mu": 1.0},
]


@pytest.mark.parametrize("train", CROWDED)
def test_a_job_whose_clip_leaves_the_gradients_of_the_first_rows_alone_is_refused(
    town: Town, train: dict[str, Any]
) -> None:
    """One row was behind the message, and the site counted twelve: the others moved it by 1/250, or by 1/1,000."""
    refusal = answer(town.site(), town.hello, job=town.job(train={**train, "batch_size": 1}))
    assert "so that the first step's rows alone would be learned from; it takes part up to 0.001" in refusal.reason
    if train.get("optimizer") == "sgd":
        without = {**town.job(train=train), "train": {**train, "max_grad_norm": None}}
        assert isinstance(answer(town.site(), town.hello, job=without), WelcomeHeader)


@pytest.mark.parametrize("train", CROWDED_BY_ADAMW)
def test_a_job_in_which_a_pull_fills_the_steps_of_adamw_is_refused(town: Town, train: dict[str, Any]) -> None:
    """Twelve rows were counted: two moved the message, or, of a MiniLM's layers, one, the others by 1/60."""
    refusal = answer(town.site(), town.hello, job=town.job(train={**train, "batch_size": 1}))
    assert refusal.reason.startswith("refuses: with adamw, train.learning_rate")
    assert "so that the first step's rows alone would be learned from; it takes part up to 0.001" in refusal.reason


@pytest.mark.parametrize("train", AS_FAR_AS_ALLOWED)
def test_of_a_job_as_far_as_that_is_allowed_all_rows_are_learned_from(town: Town, train: dict[str, Any]) -> None:
    service = town.site()
    table = {**train, "batch_size": 1, "dropout": False}
    assert isinstance(answer(service, town.hello, job=town.job(train=table)), WelcomeHeader)
    assert isinstance(answer(service, town.start), WelcomeHeader)
    site, request = service.runs[town.hello.run].site, decode_request(town.request(0))
    assert site is not None
    labels = site.data.train.labels
    assert labels is not None

    def message() -> torch.Tensor:
        weights = site.answer(request).weights
        return torch.cat([tensor.double().flatten() for own in weights.values() for tensor in own.values()])

    before, moved = message(), []
    for row in range(len(ROWS)):
        labels[row] = 1 - labels[row]
        moved.append(float((message() - before).norm()))
        labels[row] = 1 - labels[row]
    assert min(moved) > 0.01 * max(moved)


def test_a_job_whose_dropout_leaves_nothing_of_most_rows_is_refused(town: Town) -> None:
    """The site counted twelve rows; by a seed of the server's, adapters were moved by one of them alone."""
    adapter: dict[str, Any] = {"kind": "lora", "rank": 2, "dropout": 0.9999}
    refusal = answer(town.site(), town.hello, job=town.job(adapter=adapter))
    assert "adapter.dropout is 0.9999, so that few of its rows may be learned from" in refusal.reason
    for job in (
        town.job(adapter=adapter, train={"dropout": False}),
        town.job(adapter={**adapter, "dropout": 0.5}),
    ):
        assert isinstance(answer(town.site(), town.hello, job=job), WelcomeHeader)
    usual = with_file(town, "config.json", lambda t: t.update(hidden_dropout_prob=0.5, classifier_dropout=None))
    assert isinstance(answer(town.site(), town.hello, usual), WelcomeHeader)


@pytest.mark.parametrize(
    ("train", "rows"),
    [
        ({"proximal_mu": 1.0, "betas": [0.0, 0.999]}, 1),
        ({"proximal_mu": 1.0, "betas": [0.5, 0.999]}, 7),  # 0.5 ** 7 is below a hundredth
        ({"proximal_mu": 1.0, "betas": [0.5, 0.999], "lr_schedule": "polynomial"}, 11),  # the last steps are short
        ({"proximal_mu": 1.0}, 12),
        ({"proximal_mu": 1.0, "betas": [0.0, 0.999], "optimizer": "sgd"}, 12),
        ({"betas": [0.0, 0.999]}, 12),
        ({"weight_decay": 5e3}, 7),
        ({"weight_decay": 1e3, "epochs": 9}, 12),
    ],
)
def test_rows_that_later_steps_have_undone_are_not_behind_a_message(train: dict[str, Any], rows: int) -> None:
    """A step of AdamW is as long as the rate says: FedProx's pull takes back in one what all before taught."""
    tokens = Tokens(np.tile([2, 10, 3], 12).astype(np.int32), np.arange(13) * 3, np.arange(12))
    asked = Request(0, "a", Plan((0,), ("head",)), "train", {}, {})
    made = Train(batch_size=1, learning_rate=1e-4, **train)
    assert rows_trained_on(made, Streams(0), Examples(tokens), np.arange(12), asked) == rows


def test_where_the_first_of_very_many_steps_is_the_longest_the_others_do_not_count() -> None:
    """The longest was looked for among the last 100,000 steps: 101 rows counted where one had been learned."""
    tokens = Tokens(np.tile([2, 10, 3], 101).astype(np.int32), np.arange(102) * 3, np.arange(101))
    made = Train(batch_size=1, epochs=1000, steps=100_100, lr_schedule="polynomial", lr_power=7e5)
    asked = Request(0, "a", Plan((0,), ("head",)), "train", {}, {}, span=(0.0, 1.0))
    assert rows_trained_on(made, Streams(0), Examples(tokens), np.arange(101), asked) == 1


def test_rounds_beyond_those_of_the_job_are_refused(town: Town) -> None:
    """Bytes, rounds and epsilon are told, and agreed to, of the job's rounds."""
    service = town.begun(town.site())
    for round in (2, 50, 10**9, -1):
        assert "round: is " in answer(service, town.request(1), round=round).reason
    assert isinstance(answer(service, town.request(1)), ReplyHeader)
    idle = town.request(0).header.plan.model_copy(update={"train": (), "send": ()})  # type: ignore[attr-defined]
    assert "expected -1 to 1" in answer(service, town.request(0), round=2, phase="receive", plan=idle).reason


def test_a_job_without_leave_does_not_come_into_the_place_of_one_that_has_it(town: Town) -> None:
    digest = job_digest(town.hello.header, town.hello.weights["files"])  # type: ignore[arg-type]
    runs = ('runs = "any"', f'runs = "listed"\njobs = ["{digest}"]')
    service = town.site(runs)
    assert isinstance(answer(service, town.hello), WelcomeHeader)
    folder = service.settings.folder / "runs" / town.hello.run
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = with_file(town, "tokenizer.json", lambda table: table.update(normalizer={"type": "Lowercase"}))
    assert "is none of those that it has listed" in answer(service, town.hello, other).reason
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert kept(service) == [folder], "and nothing beside it"


def test_a_tokenizer_that_the_trial_refuses_does_not_come_into_the_place_of_another(town: Town) -> None:
    town.rows([("a" * 60 + " b", "kidney")] * 12)
    service = town.site(tried=True)
    assert isinstance(answer(service, town.hello), WelcomeHeader)
    assert "has begun with another tokenizer" in answer(service, town.hello, panicking(town)).reason
    service.trial = refused
    lower = town.job(train={"learning_rate": 1e-6})
    assert "trying it failed" in answer(service, town.hello, job=lower).reason
    assert isinstance(answer(service, town.start), WelcomeHeader)


def refused(*_: Any) -> Any:
    """A trial that fails."""
    raise Refused("trying it failed")


NOISE = {"level": "client", "noise": 2.0, "single_message": True}


@pytest.mark.parametrize("tables", [{"privacy": {**NOISE, "noise": 0.1}}, {"train": {"learning_rate": 1e-30}}])
def test_with_noise_a_run_has_one_job(town: Town, tables: dict[str, dict[str, Any]]) -> None:
    """Another one would get another answer with the same noise, or another noise for the same answer."""
    service = town.site()
    job = town.job(privacy=NOISE)
    assert isinstance(answer(service, town.hello, job=job), WelcomeHeader)
    changed = {**job, **{name: {**job[name], **keys} for name, keys in tables.items()}}
    for _ in range(2):
        assert "this run has begun with another job" in answer(service, town.hello, job=changed).reason
    assert isinstance(answer(service, town.hello, job=job), WelcomeHeader), "the server may greet again"
    plain = town.job()
    assert "this run has begun with another job" in answer(service, town.hello, job=plain).reason


def test_a_run_has_one_start_model(town: Town) -> None:
    """Of another one it was told, it said that it had it, and went on from the first."""
    service = town.begun(town.site())
    for host in (service, town.again()):
        said = "refuses: this run has begun with another start model, and has one alone"
        assert answer(host, town.hello, start="f" * 32).reason == said
        assert answer(host, town.hello).holds
        assert isinstance(answer(host, town.request(0)), ReplyHeader)


def test_a_round_that_leaves_with_other_noise_is_spent_again(town: Town) -> None:
    """A damaged log is moved away, and with it what has left: the run may be begun anew, with a new secret."""
    service, job = town.site(), town.job(privacy=NOISE)

    def answered(service: SiteService) -> Any:
        assert isinstance(answer(service, town.hello, job=job), WelcomeHeader)
        assert isinstance(answer(service, town.start), WelcomeHeader)
        assert isinstance(answer(service, town.request(0)), ReplyHeader)
        return read_lines(service.settings.folder / ACCOUNT)

    [first] = answered(service)
    assert isinstance(answer(service, town.said[FarewellHeader][0]), WelcomeHeader)
    for path in service.settings.folder.glob("releases.*"):
        path.unlink()
    one, other = answered(town.again())
    assert one == first
    assert {key for key in one if one[key] != other[key]} == {"secret"}


def test_a_message_with_noise_has_its_epsilon_in_the_log_wherever_the_site_ended(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended after it had kept its answer, and before the line: the answer left later, as if without noise."""
    service, job, append = town.site(), town.job(privacy=NOISE), ReleaseLog.append

    def full(log: ReleaseLog, release: Release, head: bool = True) -> None:
        if release.payload == "weights":
            raise OSError(errno.ENOSPC, "No space left on device")
        append(log, release, head)

    assert isinstance(answer(service, town.hello, job=job), WelcomeHeader)
    assert isinstance(answer(service, town.start), WelcomeHeader)
    with monkeypatch.context() as patch:
        patch.setattr(ReleaseLog, "append", full)
        reason = "failed: OSError (No space left on device); its own log says more"
        assert answer(service, town.request(0)).reason == reason
    service = town.again()
    for _ in range(2):
        assert isinstance(answer(service, town.request(0)), ReplyHeader)
    first, again = [line for line in releases(service) if line["payload"] == "weights"]
    assert first["epsilon"] > 0
    assert "epsilon" not in again, "the same bytes"
    assert service.gate.log.noisy == {(town.hello.run, 0)}


def test_no_more_runs_than_it_takes_part_in_however_many_it_has_greeted(town: Town) -> None:
    service = town.site(("# max_runs = 20", "max_runs = 1"))
    runs = [letter * 32 for letter in "abc"]
    greeted = [answer(service, town.hello, run=run) for run in reversed(runs)]
    assert [type(one) for one in greeted] == [WelcomeHeader, RefusalHeader, RefusalHeader]
    said = []
    for run in reversed(runs):
        answer(service, town.start, run=run)
        said.append(answer(service, town.request(0), run=run))
        said.append(answer(service, town.hello, run=run))
    assert isinstance(said[0], ReplyHeader)
    assert [type(one) for one in said[1::2]] == [WelcomeHeader, RefusalHeader, RefusalHeader]
    assert all("max_runs" in refusal.reason for refusal in said[3::2])
    assert all("is not known here" in refusal.reason for refusal in said[2::2])
    assert {line["run"] for line in releases(service) if line["payload"] == "weights"} == {runs[-1]}


def test_receipts_count_as_bytes_that_leave(town: Town) -> None:
    service = town.begun(town.site(("# bytes_per_run = 10_000_000_000", "bytes_per_run = 200_000")))
    idle = town.request(0).header.plan.model_copy(update={"train": (), "send": ()})  # type: ignore[attr-defined]
    assert isinstance(answer(service, town.request(0), phase="receive", plan=idle), ReplyHeader)
    service.gate.log.run_bytes[town.hello.run] = 199_990
    assert "bytes_per_run" in answer(service, town.request(0), phase="receive", plan=idle, round=1).reason


def test_work_that_comes_to_nothing_counts_as_seconds(town: Town) -> None:
    service = town.site()
    service.callback = lambda step, *_: 1 // (2 - step)  # type: ignore[assignment,return-value]
    town.begun(service)
    assert answer(service, town.request(0)).reason.startswith("failed: ZeroDivisionError")
    [run] = service.runs.values()
    assert run.answers.seconds > 0
    assert Answers(run.folder).seconds == run.answers.seconds, "after a restart as well"


def test_seconds_count_of_runs_that_fail_in_turns(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each greeting forgot the other run, and with it how long the site had worked for it."""
    service = town.site(("# seconds_per_run = 86_400", "seconds_per_run = 5"))
    service.callback = lambda step, *_: 1 // (2 - step)  # type: ignore[assignment,return-value]
    clock = iter(range(10**6))
    monkeypatch.setattr("fedstrata.sites.gate.time.monotonic", lambda: next(clock))
    said: dict[str, list[str]] = {"a" * 32: [], "b" * 32: []}
    for run in [*said] * 3:
        assert isinstance(answer(service, town.hello, run=run), WelcomeHeader)
        assert isinstance(answer(service, town.start, run=run), WelcomeHeader)
        said[run].append(answer(service, town.request(0), run=run).reason)
    for first, *_, last in said.values():
        assert first.startswith("failed: ZeroDivisionError")
        assert last.endswith("as long as its limit allows, 5 s (seconds_per_run)")


def test_a_request_by_which_a_message_is_of_few_rows_is_refused(town: Town) -> None:
    """The job is fine at its beginning; the request's place in the schedule leaves nothing but its first steps."""
    service = town.site()
    train = {"batch_size": 1, "steps": 12, "lr_schedule": "polynomial", "lr_power": 6.0}
    answer(service, town.hello, job=town.job(train=train))
    assert isinstance(answer(service, town.start), WelcomeHeader)
    refusal = answer(service, town.request(1))
    assert "fewer than 8 rows of its own" in refusal.reason


@pytest.mark.parametrize("span", [(0.0, 1.0), (0.5, 0.5), (0.999, 1.0), (0.5, 0.0), (0.0, 0.4)])
def test_a_request_at_another_place_in_the_schedule_is_refused(town: Town, span: tuple[float, float]) -> None:
    """The owner agreed to a schedule; at its end next to nothing is learned, and at its beginning much."""
    service = town.begun(town.site())
    reason = answer(service, town.request(0), span=span).reason
    assert reason == f"cannot do what it is asked: span: is {span[0]} to {span[1]}; expected 0.0 to 0.5"
    assert isinstance(answer(service, town.request(0)), ReplyHeader)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"client": "z"}, "cannot do what it is asked: client: is 'z', this is 'a'"),
        ({"round": 10**9}, "cannot do what it is asked: round: is 1000000000; expected 0 to 1"),
    ],
)
def test_for_a_request_that_is_none_of_the_run_s_no_rows_are_counted(
    town: Town, change: dict[str, Any], reason: str
) -> None:
    """By other names and rounds a server could ask again and again whether the rows were enough."""
    service = town.site()
    train = {"batch_size": 1, "steps": 12, "lr_schedule": "polynomial", "lr_power": 6.0}
    answer(service, town.hello, job=town.job(train=train))
    assert isinstance(answer(service, town.start), WelcomeHeader)
    assert answer(service, town.request(0), span=(0.0, 1.0), **change).reason == reason


def test_when_its_seconds_are_over_a_site_counts_no_rows(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    service = town.begun(town.site(("# seconds_per_run = 86_400", "seconds_per_run = 5")))
    [run] = service.runs.values()
    run.answers.spend(0, "", 6.0)
    monkeypatch.setattr("fedstrata.sites.gate.rows_behind", lambda *_: pytest.fail("it has"))
    assert answer(service, town.request(0)).reason.endswith("its limit allows, 5 s (seconds_per_run)")


def test_a_site_scores_the_model_and_no_other_heap_of_its_layers(town: Town) -> None:
    """A model of one layer a hundred thousand times kept it busy for days, which no limit of seconds ended."""
    service = town.site(("min_examples = 8 ", "min_examples = 2 "))
    assert isinstance(answer(service, town.hello, share=0.4), WelcomeHeader)
    assert isinstance(answer(service, town.start), WelcomeHeader)
    asked, wrong = town.request(0), "plan: is not that of its method to evaluate in round 1"
    whole = asked.header.plan.model_copy(update={"train": (), "send": ()})  # type: ignore[attr-defined]
    changes: list[dict[str, Any]] = [{"layers": layers} for layers in ((0, 1) * 50_000, (0, 1, 1), (1, 0), (0, 0))]
    for change in [*changes, {"freeze_encoder": True}]:
        plan = whole.model_copy(update=change)
        assert wrong in answer(service, asked, phase="evaluate", plan=plan).reason, str(change)[:100]
    assert answer(service, asked, phase="evaluate", plan=whole).scores


def test_the_count_of_rows_that_are_too_few_is_work(town: Town) -> None:
    """Asked again and again, a site counted without end, whatever its seconds."""
    service = town.site()
    train = {"batch_size": 1, "steps": 12, "lr_schedule": "polynomial", "lr_power": 6.0}
    answer(service, town.hello, job=town.job(train=train))
    assert isinstance(answer(service, town.start), WelcomeHeader)
    assert "fewer than 8 rows of its own" in answer(service, town.request(1)).reason
    [run] = service.runs.values()
    assert run.answers.seconds > 0


def test_of_a_request_repeated_no_rows_are_counted(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    service = town.begun(town.site())
    assert isinstance(answer(service, town.request(0)), ReplyHeader)
    monkeypatch.setattr("fedstrata.sites.gate.rows_behind", lambda *_: pytest.fail("it has"))
    assert isinstance(answer(service, town.request(0)), ReplyHeader)


def test_a_request_repeated_gets_the_same_bytes_and_another_one_none(town: Town) -> None:
    service = town.begun(town.site())
    asked = bytes(encode_message(town.hello.run, town.request(0).header, town.request(0).weights))
    first = bytes(service.answer(asked))
    assert decode_message(first, "reply")
    assert bytes(service.answer(asked)) == first
    for host in (service, town.again()):  # in the same program, and after it was started again
        assert bytes(host.answer(asked)) == first, "its seconds too: it is the stored one"
        weights = {part: dict(own) for part, own in town.request(1).weights.items()}
        other = answer(host, town.request(0), weights, versions=town.request(1).header.versions)  # type: ignore[attr-defined]
        assert (
            other.reason
            == "refuses: it has answered another request for weights of round 1, and answers one alone"
        )
    left = [line for line in releases(service) if line["payload"] == "weights"]
    assert len(left) == 4
    assert len({line["sha256"] for line in left}) == 1


OVER = "refuses: the server has said that this run is over, and it answers no round of it any more"


def test_a_run_that_is_over_does_not_begin_anew_with_another_job(town: Town) -> None:
    """Its folder is gone, and with it what kept it to one job; of `max_runs` it counted once for both."""
    service, job = town.site(), town.job(privacy=NOISE)
    other = town.job(privacy={**NOISE, "noise": 0.5})
    assert isinstance(answer(service, town.hello, job=job), WelcomeHeader)
    assert isinstance(answer(service, town.start), WelcomeHeader)
    assert isinstance(answer(service, town.request(0)), ReplyHeader)
    for _ in range(2):  # a server that was killed at the end says it twice
        assert isinstance(answer(service, town.said[FarewellHeader][0]), WelcomeHeader)
        assert isinstance(answer(service, town.hello, job=other), WelcomeHeader)
        assert isinstance(answer(service, town.start), WelcomeHeader)
    for host in (service, town.again()):
        assert answer(host, town.request(1)).reason == OVER
    assert [line["noise"] for line in read_lines(service.settings.folder / ACCOUNT)] == [2.0]


def test_work_of_which_nothing_came_counts_when_a_run_is_said_to_be_over(town: Town) -> None:
    service = town.site()
    service.callback = lambda step, *_: 1 // (2 - step)  # type: ignore[assignment,return-value]
    town.begun(service)
    assert answer(service, town.request(0)).reason.startswith("failed: ZeroDivisionError")
    assert isinstance(answer(service, town.said[FarewellHeader][0]), WelcomeHeader)
    assert answer(town.begun(town.again()), town.request(0)).reason == OVER


def split_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Jobs) -> tuple[Village, list[Any]]:
    """A run of FedBERT between sites, and what its server has said to site a."""
    village = Village(tmp_path, monkeypatch)
    _, there = village.jobs(job("fedbert", "classify", 3, method={"mode": "share"}))
    for name in village.names:
        village.site(name, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    fedstrata.run(there)
    return village, [m for name, way, m in village.post.messages if (name, way) == ("a", "down")]


def test_sessions_of_a_round_are_of_one_request_when_the_run_is_said_to_be_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Jobs
) -> None:
    """It got the hidden states of any text from as many models as it liked."""

    class Lost:
        """Takes the first batch, and no more."""

        def begin(self, span: Any) -> None:
            """See the class."""

        def forward(self, message: Any) -> Any:
            raise ConnectionError

    village, heard = split_run(tmp_path, monkeypatch, job)
    hello, start, asked = (decode_message(m, "hello", "start", "request") for m in heard[:3])
    settings, run = village.post.hosts["a"].settings, "e" * 32
    host = SiteService(settings, reach=lambda *_: nullcontext(Lost()), trial=None)  # type: ignore[arg-type,return-value]
    said = []
    for end in (0.5, 0.4):
        assert isinstance(answer(host, hello, run=run), WelcomeHeader)
        assert isinstance(answer(host, start, run=run), WelcomeHeader)
        said.append(answer(host, asked, run=run, span=(0.0, end)).reason)
        assert isinstance(answer(host, decode_message(heard[-1], "farewell"), run=run), WelcomeHeader)
    assert said == ["failed: ConnectionError; its own log says more", OVER]
    left = [line["run"] for line in releases(host) if line["payload"] == "activations"]
    assert left.count(run) == 1


def test_a_site_waits_for_the_server_s_layers_no_longer_than_it_works_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Jobs
) -> None:
    """A server that took a batch and said nothing held a site for as long as it had told it to wait: for years."""
    (village, heard), waits = split_run(tmp_path, monkeypatch, job), list[float]()
    hello, start, asked = (decode_message(m, "hello", "start", "request") for m in heard[:3])
    village.site("a", "# seconds_per_run = 86_400", "seconds_per_run = 60")
    settings, (port, token, _) = village.post.hosts["a"].settings, hello.header.stream  # type: ignore[attr-defined]

    def reach(request: Request, port: int, token: str, deadline: float) -> Any:
        waits.append(deadline)
        raise ConnectionError

    host = SiteService(settings, reach=reach, trial=None)
    for said in (1e9, 30.0):
        changed = {"run": "e" * 32, "stream": (port, token, said)}
        assert isinstance(answer(host, hello, **changed), WelcomeHeader)
        answer(host, start, run="e" * 32)
        assert "ConnectionError" in answer(host, asked, run="e" * 32).reason
    assert waits == [60.0, 30.0]
    for wrong in (float("inf"), -1.0, 1e300):
        assert "stream" in answer(host, hello, run="e" * 32, stream=(port, token, wrong)).reason


def test_whoever_deletes_a_run_s_folder_does_not_get_a_round_twice(town: Town) -> None:
    service = town.begun(town.site())
    assert isinstance(answer(service, town.request(0)), ReplyHeader)
    for path in sorted((service.settings.folder / "runs").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    service = town.begun(town.again())
    refusal = answer(service, town.request(0))
    assert refusal.reason == "refuses: it has answered round 1 of this run, and does not keep the answer"


def test_an_answer_that_is_damaged_on_the_disk_does_not_leave(town: Town) -> None:
    service = town.begun(town.site())
    assert isinstance(answer(service, town.request(0)), ReplyHeader)
    [path] = (service.settings.folder / "runs").rglob("0-weights.answer")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "its answer to round 1 is damaged" in answer(service, town.request(0)).reason


ENDS = [
    (("# max_rounds = 10_000", "max_rounds = 1"), "refuses: the run has 2 rounds, its limit is 1 (max_rounds)"),
    (("# bytes_per_run = 10_000_000_000", "bytes_per_run = 100_000"), "refuses: the run sends "),
    (
        ("# disk_per_run = 20_000_000_000", "disk_per_run = 60_000"),
        "refuses: the run would take more of its disk than",
    ),
]


@pytest.mark.parametrize(("limit", "reason"), ENDS)
def test_a_run_beyond_a_limit_is_refused_before_it_begins(town: Town, limit: tuple[str, str], reason: str) -> None:
    service = town.site(limit)
    said = [answer(service, town.hello)]
    if isinstance(said[0], WelcomeHeader):
        said.append(offered(service, town.start))
    assert said[-1].reason.startswith(reason), said
    assert said[-1].final


def offered(service: SiteService, envelope: Envelope) -> Any:
    """As it comes: its size is known before its content."""
    message = encode_message(envelope.run, envelope.header, envelope.weights)
    try:
        service.admit(message.metadata, len(message) - len(message.head))
    except Exception as error:
        return decode_message(service.refuse(envelope.run, error), "refusal").header
    return decode_message(service.answer(message), "welcome", "reply", "refusal").header


def test_the_bytes_of_a_day_are_those_of_all_runs(town: Town) -> None:
    service = town.begun(town.site())
    answer(service, town.request(0))
    size = sum(line["bytes"] for line in releases(service))
    service = town.again(("# bytes_per_day = 10_000_000_000", f"bytes_per_day = {size * 3 // 2}"))
    other = "b" * 32
    assert isinstance(answer(service, town.hello, run=other), WelcomeHeader)
    assert isinstance(answer(service, town.start, run=other), WelcomeHeader)
    refusal = answer(service, town.request(0), run=other)
    assert "bytes a day (bytes_per_day)" in refusal.reason
    assert sum(line["payload"] == "weights" for line in releases(service)) == 1


def test_a_site_whose_bytes_of_the_day_have_left_does_not_train_in_vain_and_is_back_the_next_day(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trained, refused what came of it, and refused every later round until it was started again."""
    service = town.begun(town.site())
    answer(service, town.request(0))
    size = sum(line["bytes"] for line in releases(service))
    service = town.again(("# bytes_per_day = 10_000_000_000", f"bytes_per_day = {size * 3 // 2}"))
    trained: list[int] = []
    service.callback = lambda step, *_: trained.append(step)
    before = {path: path.stat().st_mtime_ns for path in service.settings.folder.rglob("runs/**/*")}
    refusal = answer(service, town.request(1))
    assert "bytes a day (bytes_per_day)" in refusal.reason
    assert not refusal.final, "the server asks again in later rounds"
    assert not trained
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing of the round is kept"
    monkeypatch.setattr("fedstrata.sites.gate.now", lambda: now() + timedelta(days=1))
    assert isinstance(answer(service, town.request(1)), ReplyHeader)
    assert trained


def test_no_more_runs_than_it_takes_part_in(town: Town) -> None:
    service = town.begun(town.site(("# max_runs = 20", "max_runs = 1")))
    assert isinstance(answer(service, town.request(0)), ReplyHeader)
    service = town.again(("# max_runs = 20", "max_runs = 1"))
    assert "as many runs as its limit allows, 1 (max_runs)" in answer(service, town.hello, run="b" * 32).reason
    assert isinstance(answer(service, town.hello), WelcomeHeader), "the one that it takes part in goes on"


def test_work_ends_with_its_seconds(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds pass between two looks at the clock."""
    service = town.begun(town.site(("# seconds_per_run = 86_400", "seconds_per_run = 5")))
    clock = iter(range(0, 10**6, 2))
    monkeypatch.setattr("fedstrata.sites.gate.time.monotonic", lambda: next(clock))
    refusal = answer(service, town.request(0))
    assert (
        refusal.reason == "refuses: it has worked for this run as long as its limit allows, 5 s (seconds_per_run)"
    )
    assert "weights" not in {line["payload"] for line in releases(service)}


def test_every_message_that_leaves_has_its_line(town: Town) -> None:
    service = town.begun(town.site())
    sent = [
        bytes(service.answer(encode_message(e.run, e.header, e.weights))) for e in (town.hello, town.request(0))
    ]
    sent.append(bytes(service.answer(b"nonsense")))
    lines = releases(service)
    for message in sent:
        digest = hashlib.sha256(message).hexdigest()
        [line] = [line for line in lines if line["sha256"] == digest]
        assert line["bytes"] == len(message)
    [weights] = [line for line in lines if line["payload"] == "weights"]
    assert (weights["run"], weights["round"], weights["rows"]) == (town.hello.run, 0, 12)
    assert {"embeddings", "head"} <= set(weights["parts"])
    assert {line["payload"] for line in lines} == {"examples", "weights", "refusal"}
    content = (service.settings.folder / "releases.jsonl").read_text()
    assert not any(word in content for word in ("kidney", "sick", str(service.settings.folder)))


def test_a_run_that_is_told_how_many_examples_there_are_is_one_of_those_it_takes_part_in(town: Town) -> None:
    service = town.begun(town.site(("# max_runs = 20", "max_runs = 1")))
    for host in (service, town.again(("# max_runs = 20", "max_runs = 1"))):
        assert "max_runs" in answer(host, town.hello, run="b" * 32).reason
        assert isinstance(answer(host, town.hello), WelcomeHeader)


def test_no_other_tokenizer_counts_the_examples_of_a_run_anew(town: Town) -> None:
    """Each number told in how many texts a word stands: one that has it is made longer, and falls into chunks."""
    service, job = town.site(), town.job(train={"max_tokens": 16})
    asked = {"job": job, "long_text": "chunk"}

    def longer(word: str) -> dict[str, Any]:
        many = {"type": "Replace", "pattern": {"String": word}, "content": "eye " * 100}
        return with_file(town, "tokenizer.json", lambda table: table.update(normalizer=many))

    assert not answer(service, town.hello, longer("organ 7 "), **asked).holds
    assert answer(service, town.start).examples > 12
    for host in (service, town.again()):
        for changes in ({}, {**asked, "long_text": "truncate"}, {**asked, "share": 0.3}):
            refusal = answer(host, town.hello, longer("organ 7 "), **{**asked, **changes})
            assert isinstance(refusal, RefusalHeader) == bool(changes)
        refusal = answer(host, town.hello, longer("organ 8 "), **asked)
        assert "has begun with another tokenizer" in refusal.reason
    lower = {**job, "train": {**job["train"], "learning_rate": 1e-6}, "method": {**job["method"], "rounds": 3}}
    assert isinstance(answer(service, town.hello, longer("organ 7 "), **{**asked, "job": lower}), WelcomeHeader)


def after_a_farewell(town: Town, service: SiteService) -> None:
    answer(service, Envelope(town.hello.run, FarewellHeader(save=False), {}))


def after_another_greeting(town: Town, service: SiteService) -> None:
    answer(service, town.hello, run="d" * 32)


@pytest.mark.parametrize("then", [after_a_farewell, after_another_greeting])
def test_so_it_stays_when_the_run_s_folder_is_empty(town: Town, then: Callable[[Town, SiteService], None]) -> None:
    """What it was told was forgotten with its folder, so that any number of tokenizers were tried in its name."""
    service = town.begun(town.site())
    then(town, service)
    assert not (service.settings.folder / "runs" / town.hello.run / "hello").exists()
    many = {"type": "Replace", "pattern": {"String": "organ 7 "}, "content": "eye " * 100}
    files = with_file(town, "tokenizer.json", lambda table: table.update(normalizer=many))
    for host in (service, town.again()):
        assert "has begun with another tokenizer" in answer(host, town.hello, files).reason
        assert isinstance(answer(host, town.hello), WelcomeHeader)
        assert answer(host, town.start).examples == 12


def test_a_site_that_was_killed_before_it_told_its_examples_tells_them_of_one_tokenizer_alone(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again it told them for the start model, and wrote down no tokenizer: then any other was taken."""

    def dies(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SiteService, "_say", dies)
        with pytest.raises(KeyboardInterrupt):
            answer(town.site(), town.hello)
    service = town.again()
    assert answer(service, town.start).examples == 12
    many = {"type": "Replace", "pattern": {"String": "organ 7 "}, "content": "eye " * 100}
    files = with_file(town, "tokenizer.json", lambda table: table.update(normalizer=many))
    assert "has begun with another tokenizer" in answer(service, town.hello, files).reason


def test_a_run_that_is_told_what_came_of_a_trial_is_one_of_those_it_takes_part_in(town: Town) -> None:
    """Each told whether any text has many of one letter, and only numbers of examples counted as a run."""
    town.rows([("a" * 60 + " b", "kidney")] * 12)
    service = town.site(("# max_runs = 20", "max_runs = 1"), tried=True)
    assert "failed (PanicException)" in answer(service, town.hello, panicking(town)).reason
    for host in (service, town.again(("# max_runs = 20", "max_runs = 1"), tried=True)):
        assert "has begun with another tokenizer" in answer(host, town.hello).reason
        assert "max_runs" in answer(host, town.hello, run="b" * 32).reason
        assert "failed (PanicException)" in answer(host, town.hello, panicking(town)).reason


def test_refusals_do_not_fill_the_disk(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a line of the log for good, and a server can have as many that differ as it likes."""
    monkeypatch.setattr("fedstrata.sites.service.MOST_REFUSALS", 5)
    service = town.site()
    said = [answer(service, town.start, run=f"{number:032x}") for number in range(20)]
    assert all("this run is not known here" in refusal.reason for refusal in said[:5])
    assert {refusal.reason for refusal in said[5:]} == {
        "failed: it has refused 5 messages within 24 hours; its own log says why"
    }
    assert not any(refusal.final for refusal in said)
    again = town.again()
    assert answer(again, town.start, run="f" * 32) == said[-1], "after a restart as well"
    assert len(releases(again)) == 6, "the same words have one line"
    assert isinstance(answer(again, town.hello), WelcomeHeader), "others are answered"
    monkeypatch.setattr("fedstrata.sites.release_log.DAY", timedelta(0))
    assert "this run is not known here" in answer(again, town.start, run="e" * 32).reason


def test_a_run_that_leaves_the_site_nothing_of_its_own_saves_no_model(town: Town) -> None:
    """A server said farewell to one run after the other, each of which left a model that no limit counted."""
    service = town.begun(town.site())
    for answered in (False, True):
        if answered:
            assert isinstance(answer(town.begun(service), town.request(0)), ReplyHeader)
        assert isinstance(answer(service, town.said[FarewellHeader][0], save=True), WelcomeHeader)
        assert not (service.settings.folder / "models").exists()


def test_whose_rows_were_too_few_for_a_run_takes_part_in_it_with_more(town: Town) -> None:
    """Nothing had left, and it refused for good: its rows were not those that it had begun the run with."""
    town.rows(ROWS[:5])
    service = town.site()
    assert isinstance(answer(service, town.hello), WelcomeHeader)
    assert answer(service, town.start).reason == "refuses: it has fewer examples than the 8 it wants to train on"
    town.rows(ROWS)
    for start in (lambda: service, town.again):  # in the same program, and after it was started again
        host = start()
        assert isinstance(answer(host, town.hello), WelcomeHeader)
        assert isinstance(answer(host, town.request(0)), ReplyHeader)
    town.rows(ROWS[1:])
    assert answer(town.again(), town.request(1)).reason.startswith("refuses: its rows are not those that it began")


def test_a_start_model_that_was_being_written_is_sent_again(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that was killed between the file and its note refused the run, as if its disk were damaged."""
    service = town.site()
    assert isinstance(answer(service, town.hello), WelcomeHeader)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedstrata.sites.service.write_journal", killed)
        with pytest.raises(KeyboardInterrupt):
            answer(service, town.start)
    service = town.again()
    assert not answer(service, town.hello).holds
    assert answer(service, town.start).holds
    [run] = kept(service)
    (run / "journal.jsonl").unlink()
    assert "what it keeps of this run is damaged" in answer(town.again(), town.hello).reason


DAMAGES = {
    "hello": (b"5e-05", b"6e-05"),
    "start/tokenizer.json": (b'"kidney"', b'"kydney"'),
    "start/config.json": (b'"num_attention_heads": 2', b'"num_attention_heads": 4'),
    "digest": (b"sha256:", b"sha255:"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_job_that_is_damaged_on_the_disk_is_not_gone_on_with(town: Town, name: str) -> None:
    service = town.begun(town.site())
    path = kept(service)[0] / name
    before, (old, new) = path.read_bytes(), DAMAGES[name]
    assert before.count(old) == 1
    path.write_bytes(before.replace(old, new))
    service = town.again()
    refusal = answer(service, town.request(0))
    assert refusal.reason.endswith("the job that it keeps of this run is damaged; its own log says more")
    assert not refusal.final
    path.write_bytes(before)
    assert isinstance(answer(town.again(), town.request(0)), ReplyHeader)
    path.write_bytes(before.replace(old, new))
    assert answer(town.again(), town.hello).holds, "the server begins with it again"


# The model's files


def with_file(town: Town, name: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    files = dict(town.hello.weights["files"])
    table = json.loads(files[name].numpy().tobytes()) if name in files else {}
    changed = change(table)
    return {"files": {**files, name: text(json.dumps(table if changed is None else changed))}}


CONFIGS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("config.json", lambda t: t.update(attn_implementation="someone/kernel"), "key 'attn_implementation'"),
    ("config.json", lambda t: t.update(_attn_implementation="sdpa"), "key '_attn_implementation'"),
    ("config.json", lambda t: t.update(_name_or_path="another"), "key '_name_or_path'"),  # a key that BERT knows
    ("config.json", lambda t: t.update(quantization_config={"quant_method": "gptq"}), "key 'quantization_config'"),
    ("config.json", lambda t: t.update(chunk_size_feed_forward=5), "key 'chunk_size_feed_forward'"),
    ("config.json", lambda t: t.update(classifier_dropout=0.99), "'classifier_dropout' is 0.99, so that few rows"),
    ("config.json", lambda t: t.update(hidden_dropout_prob=1), "'hidden_dropout_prob' is 1, so that few rows"),
    (
        "config.json",
        lambda t: t.update(hidden_size=3, num_attention_heads=1, classifier_dropout=0.5),
        "so that few rows may be learned from; at most 0.5 is taken, and less where hidden_size is below 24",
    ),
    ("config.json", lambda t: t.update(conv_kernel_size="someone/kernel"), "'conv_kernel_size' is not taken"),
    ("config.json", lambda t: t.update(use_kernels=True), "key 'use_kernels'"),
    ("config.json", lambda t: t.update(id2label={"0": {"auto_map": {"AutoConfig": "a.B"}}}), "code of its own"),
    ("config.json", lambda t: t.update(auto_map={"AutoModel": "evil--code.Model"}), "code of its own"),
    (
        "config.json",
        lambda t: t.update(model_type="fedstrata_headed", encoder={"model_type": "bert"}),
        "model_type",
    ),
    ("config.json", lambda t: t.update(model_type="../../x"), "model_type '../../x' is none that transformers"),
    ("config.json", lambda t: t.update(hidden_act="/etc/passwd"), "'hidden_act' is not taken"),
    ("config.json", lambda t: t.update(num_hidden_layers=20_000), "has 20000 layers, at most 512"),
    ("config.json", lambda t: t.update(num_hidden_layers=-1), "num_hidden_layers is no whole number above 0"),
    ("config.json", lambda t: t.update(hidden_size=10**12), "'hidden_size' is not taken"),
    ("config.json", lambda t: t.update(vocab_size=1e400), "cannot be read"),
    ("config.json", lambda t: t.update(text_config={"model_type": "bert"}), "key 'text_config'"),
    ("config.json", lambda t: t.update(id2label=dict.fromkeys(map(str, range(100_001)), "x")), "more than 100000"),
    ("config.json", lambda t: [1, 2], "is no table"),
    ("tokenizer_config.json", lambda t: t.update(tokenizer_file="/etc/passwd"), "key 'tokenizer_file'"),
    ("tokenizer_config.json", lambda t: t.update(added_tokens_decoder={"0": {"auto_map": 1}}), "code of its own"),
    ("tokenizer_config.json", lambda t: t.update(tokenizer_class="BertJapaneseTokenizer"), "no fast tokenizer"),
    ("tokenizer_config.json", lambda t: t.update(tokenizer_class="os.system"), "no fast tokenizer"),
    ("tokenizer_config.json", lambda t: t.update(backend="sentencepiece"), "backend is another"),
    ("special_tokens_map.json", lambda t: t.update(tokenizer_file="/etc/passwd"), "key 'tokenizer_file'"),
    ("special_tokens_map.json", lambda t: t.update(tokenizer_object=1), "key 'tokenizer_object'"),
    ("tokenizer.json", lambda t: t.update(script="x"), "key 'script'"),
    ("tokenizer.json", lambda t: t.update(normalizer={"pattern": {"Regex": "a" * 3000}}), "regular expression"),
]


@pytest.mark.parametrize(("name", "change", "reason"), CONFIGS)
def test_config_and_tokenizer_hold_what_is_taken_and_no_more(
    town: Town, name: str, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    service = town.site()
    refusal = answer(service, town.hello, with_file(town, name, change))
    assert refusal.reason.startswith("refuses: the model"), refusal
    assert reason in refusal.reason
    assert kept(service) == []
    assert isinstance(answer(service, town.hello), WelcomeHeader), "it goes on"


def test_a_file_nested_too_deep_or_too_large_is_refused(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    service, files = town.site(), town.hello.weights["files"]
    deep = text('{"model": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "tokenizer.json" in answer(service, town.hello, {"files": {**files, "tokenizer.json": deep}}).reason
    large = torch.zeros(1 << 24, dtype=torch.uint8)
    reason = answer(service, town.hello, {"files": {**files, "special_tokens_map.json": large}}).reason
    assert "has 16777216 bytes, at most 1048576 are taken" in reason
    for name in ("x" * 5000, "\u202ea", "\N{SNOWMAN}" * 500):
        said = answer(service, town.hello, {"files": {**files, name: files["config.json"]}}).reason
        assert said.startswith("refuses: the model comes with code of its own (")
        assert said.isascii()
    lacking = {name: content for name, content in files.items() if name != "tokenizer.json"}
    assert "comes without tokenizer.json" in answer(service, town.hello, {"files": lacking}).reason


JOBS = [
    ({"method": {"rounds": 1_000_000}}, "refuses: the run has 1000000 rounds, its limit is 10000 (max_rounds)"),
    ({"method": {"rounds": 10**9}}, "failed: its data, model or device cannot be used"),
    ({"train": {"epochs": 1_000_000}}, "refuses: a round has 1000000 epochs, its limit is 1000"),
    ({"train": {"epochs": 10**9}}, "failed: its data, model or device cannot be used"),
]


@pytest.mark.parametrize(("tables", "reason"), JOBS)
def test_a_job_out_of_bounds_is_refused_before_anything_is_built(
    town: Town, tables: dict[str, Any], reason: str
) -> None:
    service = town.site()
    assert answer(service, town.hello, job=town.job(**tables)).reason.startswith(reason)
    assert kept(service) == []


# What is tried in a process of its own


def test_what_a_run_would_do_is_known_before_it_is_agreed_to(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    service = town.site(tried=True)
    with caplog.at_level("INFO"):
        assert isinstance(answer(service, town.hello), WelcomeHeader)
    lines = [message.partition("proposed: ")[2] for message in caplog.messages if "proposed: " in message]
    assert lines[0].startswith("fedavg, 2 rounds, a model of ")
    assert "of 12 rows of its own, 6 steps in a round; at least 12 rows behind each message" in lines
    answer(service, town.start)
    answer(service, town.request(0))
    sent = [line["bytes"] for line in releases(service) if line["payload"] == "weights"]
    [said] = [float(line.split()[2]) for line in lines if line.startswith("at most ")]
    assert 0 < sent[0] - said * 1e6 < 12_000, "what it says is what leaves, and a header"


@pytest.mark.parametrize(
    ("limits", "tables", "share", "reason"),
    [
        (
            (("min_examples = 8 ", "min_examples = 1 "), ("[require]", "[require]\nepsilon = 0.1")),
            {"privacy": {"level": "example", "clip": 1.0, "noise": 1.0}},
            0.0,
            "it takes part up to 0.1",
        ),
        (
            (("min_examples = 8 ", "min_examples = 4 "),),
            {},
            0.2,
            "fewer test rows than the 4 it wants behind a score",
        ),
    ],
)
def test_a_look_at_a_run_says_that_the_site_would_refuse_it(
    town: Town, limits: tuple[tuple[str, str], ...], tables: dict[str, Any], share: float, reason: str
) -> None:
    changes = {"job": town.job(**tables), "share": share}
    service = town.site(*limits)
    assert isinstance(answer(service, town.hello, **changes), WelcomeHeader)
    assert reason in answer(service, town.start).reason
    said = looked_at(town, service, **changes)
    assert any(line.startswith("fedavg, 2 rounds") for line in said)
    assert said[-1].startswith("this site would refuse: "), said
    assert said[-1].endswith(reason)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (6.0, "this site would refuse: round 1: over all runs it would have spent epsilon 6.57, its limit is 6"),
        (7.0, "noise: over all runs it has spent epsilon 4.38, with this one 8.39; its limit is 7, so it takes"),
        (9.0, "noise: over all runs it has spent epsilon 4.38, with this one 8.39; its limit is 9"),
        (None, "noise: over all runs it has spent epsilon 4.38, with this one 8.39"),
    ],
)
def test_a_look_at_a_run_counts_what_other_runs_have_spent(town: Town, limit: float | None, told: str) -> None:
    """It said that `join` takes part, which was then refused the first round."""
    said = list[str]()
    limits = [] if limit is None else [("[limits]", f"[limits]\nepsilon = {limit}")]
    settings = town.site(("min_examples = 8 ", "min_examples = 1 "), *limits).settings
    table = Privacy(level="client", noise=1.0, single_message=True)
    NoiseAccount(settings.folder, None, 1e-5).spend("e" * 32, 0, table, Spending(1.0, 1.0, 1))
    noise = {"level": "client", "clip": 1.0, "noise": 1.0, "single_message": True}
    header = town.hello.header.model_copy(update={"job": town.job(privacy=noise)})
    with pytest.raises(Over):
        Visit(settings, said.append).answer(bytes(encode_message("f" * 32, header, town.hello.weights)))
    assert any(line.startswith(told) for line in said), said
    assert any("would refuse" in line for line in said) == (limit == 6.0)


def looked_at(town: Town, service: SiteService, run: str = "f" * 32, **changes: Any) -> list[str]:
    """What ``join --dry-run`` says of a run, by default a new one."""
    said, header = list[str](), town.hello.header.model_copy(update=changes)
    with pytest.raises(Over):
        Visit(service.settings, said.append).answer(bytes(encode_message(run, header, town.hello.weights)))
    return said


def test_a_look_at_a_run_that_has_begun_or_is_over_refuses_what_join_does(town: Town) -> None:
    """It said that `join` takes part, where no round would have been answered."""
    service, run = town.begun(town.site()), town.hello.run
    assert "take" in looked_at(town, service, run)[-1]
    said = "this site would refuse: this run has begun with another"
    assert looked_at(town, service, run, start="e" * 32)[-1].startswith(f"{said} start model")
    assert looked_at(town, service, run, long_text="truncate")[-1].startswith(f"{said} tokenizer")
    assert isinstance(answer(service, town.request(0)), ReplyHeader)
    assert isinstance(answer(service, town.said[FarewellHeader][0]), WelcomeHeader)
    assert looked_at(town, service, run)[-1] == OVER.replace("refuses", "this site would refuse")


def test_a_look_at_a_run_counts_the_bytes_that_have_left_today(town: Town) -> None:
    service = town.site(("[limits]", "[limits]\nbytes_per_day = 200_000"))
    fields = "e" * 32, 0, "weights", ("head",), 150_000, 12, "0" * 64
    assert not any("refuse: " in line for line in looked_at(town, service))
    service.gate.log.append(Release(now().isoformat(), *fields))
    refused = "this site would refuse: its limit is 200000 bytes a day (bytes_per_day), and this would be more"
    assert looked_at(town, service)[-1] == refused


@pytest.mark.parametrize("limit", [60_000, 110_000, 150_000, 200_000])
def test_a_look_at_a_run_of_masked_sums_refuses_what_join_does(town: Town, limit: int) -> None:
    """It counted eight bytes of an integer, and `join` the four that it takes at least."""
    service = town.site(("[limits]", f"[limits]\nbytes_per_round = {limit}"))
    job = town.job(privacy={"sum_only": True})
    assert isinstance(answer(service, town.hello, job=job), WelcomeHeader)
    told = answer(service, town.start)
    reason = told.reason if isinstance(told, RefusalHeader) else ""
    refused = [line for line in looked_at(town, service, job=job) if "would refuse" in line]
    assert ("its limit is" in reason) == bool(refused) == (limit < 91_000)


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({}, "the server sees each message of this site by itself, without noise"),
        ({"sum_only": True}, "the server sees sums of the sites' changes alone, without noise"),
        (
            {"level": "client", "epsilon": 4.0, "single_message": True, "delta": 1e-3},
            r"the server sees each .* by itself, with noise at level 'client': epsilon [56]\.\d+ of this site at "
            r"most \(delta 1e-05\)",
        ),
        (
            {"level": "client", "noise": 2.0, "clip": 0.125, "sum_only": True, "honest": 2},
            r"the server sees sums .*, with noise .*: epsilon 3\.\d+ of this site at most \(delta 1e-05\), if "
            "that of 2 sites is in every sum",
        ),
    ],
)
def test_who_says_yes_to_a_run_knows_its_noise_and_whether_messages_are_summed(
    town: Town, privacy: dict[str, Any], said: str
) -> None:
    """By the site's own delta, whatever the job's is."""
    service = town.site(("# honest = 3", "honest = 3"))
    lines = looked_at(town, service, job=town.job(privacy=privacy))
    assert any(re.fullmatch(said, line) for line in lines), lines


@pytest.mark.parametrize(
    ("tables", "mb", "sent"),
    [
        ({}, "0.091 MB in a round, 0.182 MB in all", "embeddings, layer.0, layer.1, pooler, head"),
        (
            {"privacy": {"omit": ["embeddings"]}},
            "0.073 MB in a round, 0.146 MB in all",
            "layer.0, layer.1, pooler, head",
        ),
        (
            {"wire": {"part_period": 2}},
            "0.091 MB in a round, 0.143 MB in all",
            "embeddings, layer.0, layer.1, pooler, head",
        ),
    ],
)
def test_a_look_at_a_run_tells_of_what_travels(town: Town, tables: dict[str, Any], mb: str, sent: str) -> None:
    """It told of parts that are left out, counted their bytes, and refused by these what `join` takes part in."""
    service = town.site(("[limits]", "[limits]\nbytes_per_round = 80_000"))
    job = town.job(**tables)
    said = looked_at(town, service, job=job)
    assert f"at most {mb}" in said
    assert any(line.startswith("leaves this site: ") and line.endswith(f" ({sent})") for line in said)
    answer(service, town.hello, job=job)
    refused = isinstance(answer(service, town.start), RefusalHeader)
    assert (
        refused == any(line.startswith("this site would refuse: ") for line in said) == ("privacy" not in tables)
    )


def test_a_look_at_a_run_says_that_its_disk_is_too_small(town: Town) -> None:
    service = town.site(("# disk_per_run = 20_000_000_000", "disk_per_run = 1000"))
    refusal = answer(service, town.hello).reason
    assert looked_at(town, service)[-1] == refusal.replace("refuses", "this site would refuse")


@pytest.mark.parametrize("here", [False, True])
def test_a_look_at_a_run_counts_the_start_model_on_the_disk(town: Town, here: bool) -> None:
    """It said that `join` takes part, which had no room; the site's own copy was written beyond the limit."""
    own = [('# path = "minilm"', f"path = {town.model!r}\n#")] if here else []
    message = encode_message(town.start.run, town.start.header, town.start.weights)
    size = len(message) - len(message.head)
    service = town.site(("# disk_per_run = 20_000_000_000", f"disk_per_run = {size}"), *own)
    told = answer(service, town.hello)
    told = told if here else offered(service, town.start)
    assert looked_at(town, service)[-1] == told.reason.replace("refuses", "this site would refuse")
    assert "would take more of its disk" in told.reason
    roomy = town.site(("# disk_per_run = 20_000_000_000", f"disk_per_run = {size + 1_000_000}"), *own)
    assert looked_at(town, roomy)[-1].startswith("fedstrata join takes part in it")
    assert answer(roomy, town.hello).holds == here


def test_a_look_at_a_run_says_that_nothing_is_left_to_spend(town: Town) -> None:
    """The other limits are met, so that join greets back, and refuses each round of the run."""
    limits = (
        ("min_examples = 8 ", "min_examples = 1 "),
        ("# epsilon = 20.0", "epsilon = 20.0"),
    )
    job = town.job(privacy={"level": "example", "clip": 1.0, "noise": 1.0})
    assert looked_at(town, town.site(*limits), job=job)[-1].startswith("fedstrata join takes part in it")
    service = town.site(*limits)
    spent = {"run": "e" * 32, "round": 0, "level": "example", "by": "pld", "noise": 0.2, "rate": 1.0, "count": 9}
    add_line(service.settings.folder / ACCOUNT, spent)
    said = looked_at(town, service, job=job)
    assert answer(service, town.hello, job=job).examples == 0
    answer(service, town.start)
    assert answer(service, town.request(0)).reason.partition(": ")[2] == said[-1].partition(": ")[2]
    assert said[-1].startswith("this site would refuse: round 1: over all runs it would have spent epsilon ")
    assert read_lines(service.settings.folder / ACCOUNT) == [spent], "a look spends nothing"


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (header(version="99.1"), "this site would refuse: its FedStrata is "),
        (metadata(header="[" * 100), "this site would refuse: not a hello: more than 16 brackets"),
        (metadata(run="\x1b[31m" + "0" * 32), "this site would refuse: run: must be 32 hexadecimal digits"),
        (header(job={"task": 5}), "this site cannot take part: job: task: must be a table ([task]), found 5"),
        (
            bad_server.changed("hello", lambda _, weights: weights.update(files={"\x1b[31m": torch.zeros(1)})),
            "this site would refuse: the model comes with code of its own (",
        ),
    ],
)
def test_a_look_at_a_run_that_is_none_is_a_line(town: Town, attack: Attack, says: str) -> None:
    """It ended with a traceback, or was tried again and again for five minutes."""
    service, said = town.site(), list[str]()
    with pytest.raises(Over):
        Visit(service.settings, said.append).answer(attack(bytes(encode_message("f" * 32, town.hello.header))))
    assert said[-1].startswith(says)
    assert all(line == plain_text(line) for line in said)


def test_what_a_run_of_masked_sums_would_send_is_no_more_than_is_said(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for tables in ({}, {"privacy": {"sum_only": True}}):
        caplog.clear()
        with caplog.at_level("INFO"):
            answer(town.site(tried=True), town.hello, job=town.job(**tables))
        found = [message.partition("proposed: ")[2] for message in caplog.messages if "proposed: " in message]
        said += [float(line.split()[2]) for line in found if line.startswith("at most ")]
    assert said[1] == pytest.approx(2 * said[0], rel=0.02), "eight bytes a number at most, where fp32 has four"


def test_a_tokenizer_that_panics_ends_a_process_and_not_the_site(town: Town) -> None:
    rows = [("a" * 60 + " b", "kidney")] * 12
    town.rows(rows)
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    service = town.site(tried=True)
    files = with_file(town, "tokenizer.json", lambda t: t.update(pre_tokenizer=split))
    refusal = answer(service, town.hello, files)
    assert refusal.reason.startswith("refuses: trying its model and tokenizer failed (PanicException)"), refusal
    assert kept(service) == []
    untried = town.site()
    assert isinstance(answer(untried, town.hello, files), WelcomeHeader)
    assert answer(untried, town.start).reason == "failed: PanicException; its own log says more"
    assert isinstance(answer(service, town.hello, run="f" * 32), WelcomeHeader), "it goes on"


@pytest.mark.parametrize(
    ("approve", "reason"),
    [('runs = "listed"', "is none of those that it has listed"), ('runs = "ask"', "is not there for sha256:")],
)
def test_a_job_that_cannot_get_leave_is_not_tried_on_the_rows(town: Town, approve: str, reason: str) -> None:
    """By what came of it a tokenizer of the server's told of the texts: this one fails on many of one letter."""
    town.rows([("a" * 60 + " b", "kidney")] * 12)
    service = town.site(('runs = "any"', approve), tried=True)
    assert reason in answer(service, town.hello, panicking(town)).reason
    assert kept(service) == []


def test_before_a_yes_nobody_is_told_what_came_of_a_trial(town: Town) -> None:
    town.rows([("a" * 60 + " b", "kidney")] * 12)
    service, asked, says = town.site(('runs = "any"', 'runs = "ask"'), tried=True), list[Sequence[str]](), [False]
    service.ask = lambda lines: asked.append(lines) or says[0]  # type: ignore[func-returns-value]
    assert answer(service, town.hello, panicking(town)).reason == "refuses: its owner has said no to this job"
    assert (
        "after a yes the server is told why: trying its model and tokenizer failed (PanicException)" in asked[0][0]
    )
    says[0] = True
    assert "failed (PanicException)" in answer(service, town.hello, panicking(town)).reason
    assert isinstance(answer(service, town.hello, run="f" * 32), WelcomeHeader)
    assert asked[-1][0].startswith("fedavg, 2 rounds")


def test_what_is_wrong_with_its_rows_a_site_says_to_its_owner_alone(town: Town) -> None:
    town.rows([("the kidney", "kidney")] * 12 + [("the spleen", "spleen")] * 12)
    service, asked = town.site(('runs = "any"', 'runs = "ask"'), tried=True), list[Sequence[str]]()
    service.ask = lambda lines: not asked.append(lines)  # type: ignore[func-returns-value]
    assert "spleen" not in answer(service, town.hello).reason
    assert "is told so, but not why: [task] labels: the train rows also hold 'spleen'" in asked[0][0]


def panicking(town: Town) -> dict[str, Any]:
    """Files of a model with a tokenizer that ends the process on a text with many of one letter."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    return with_file(town, "tokenizer.json", lambda table: table.update(pre_tokenizer=split))


def test_a_process_that_does_not_end_or_dies_is_ended(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    service = town.site(tried=True)
    monkeypatch.setattr(trial, "SECONDS", 0.0)
    assert "did not end within 0 s" in answer(service, town.hello).reason
    monkeypatch.setattr(trial, "SECONDS", 60.0)
    monkeypatch.setattr(trial, "MEMORY_SHARE", 1e-9)
    reason = answer(service, town.hello).reason
    assert "of memory to train, more than it gives a run" in reason
    assert kept(service) == []
    monkeypatch.setattr(trial, "MEMORY_SHARE", 0.5)
    assert isinstance(answer(service, town.hello), WelcomeHeader)


ENDLESS = """
import multiprocessing, os, sys
from pathlib import Path
from types import SimpleNamespace
from fedstrata.privacy.accounting import Spending
from fedstrata.sites import trial
from fedstrata.sites.limit_tables import Limits
multiprocessing.get_context = lambda kind, get=multiprocessing.get_context: get("fork")
def propose(*_):
    Path(sys.argv[1]).write_text(str(os.getpid()))
    while True:
        pass
trial.propose = propose
trial.try_run(SimpleNamespace(limits=Limits()), None, Path())
"""
"""A program that tries a run without end, and writes down in which process."""


def test_a_process_that_does_not_end_is_ended_where_the_site_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path / "pid")])
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", 60)
    finally:
        process.kill()
        process.wait()
    pid = int((tmp_path / "pid").read_text())
    try:
        until(lambda: not running(pid), 60)
    finally:
        if running(pid):
            os.kill(pid, signal.SIGKILL)


def until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process works; one that has ended and that nobody has waited for has no command any more."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_bytes() != b""


def test_a_model_larger_than_the_memory_is_refused(town: Town) -> None:
    big = with_file(town, "config.json", lambda t: t.update(vocab_size=9_000_000, hidden_size=65536))
    reason = answer(town.site(tried=True), town.hello, big).reason
    assert "MB of memory to train, more than it gives a run" in reason


def test_a_small_model_with_buffers_larger_than_the_memory_is_refused(town: Town) -> None:
    kept = ("vocab_size", "pad_token_id", "id2label", "label2id")
    gpt = {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 3_000_000}
    masks = with_file(town, "config.json", lambda t: {**gpt, **{key: t[key] for key in kept}})
    reason = answer(town.site(tried=True), town.hello, masks).reason
    assert "MB of memory to train, more than it gives a run" in reason


def test_its_own_rows_that_cannot_be_read_are_its_own_affair(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    service = town.site(tried=True)
    (town.home / "train.csv").unlink()
    assert (
        answer(service, town.hello).reason
        == "failed: its data, model or device cannot be used; its own log says why"
    )
    assert "train.csv" in caplog.text


def test_hidden_states_are_sent_once_and_of_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Jobs
) -> None:
    """In every round, of any layers, a server could ask for others of the same texts."""
    tables = {"head": {"kind": "cls"}, "method": {"variant": "centralized"}}
    village = Village(tmp_path, monkeypatch)
    _, there = village.jobs(job("fedfreezebert", "classify", 3, client={"may_send": ["hidden_states"]}, **tables))
    for name in village.names:
        village.site(name, 'payloads = ["weights"]', 'payloads = ["hidden_states"]')
    fedstrata.run(there)
    heard = [m for name, way, m in village.post.messages if (name, way) == ("a", "down")]
    hello, start, asked = (decode_message(m, "hello", "start", "request") for m in heard[:3])
    host, run = village.post.hosts["a"], "e" * 32
    assert isinstance(answer(host, hello, run=run), WelcomeHeader)
    assert isinstance(answer(host, start, run=run), WelcomeHeader)
    plan = asked.header.plan  # type: ignore[attr-defined]
    for changes in ({"round": 1}, {"plan": plan.model_copy(update={"layers": ()})}):
        assert "not that of its method" in answer(host, asked, run=run, **changes).reason
    assert isinstance(answer(host, asked, run=run), ReplyHeader)
