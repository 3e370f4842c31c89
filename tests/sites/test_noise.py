"""Noise between sites: secret streams, what a site tells, demands and accounts for."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_sites import attacked, header
from test_in_memory import NAMES, Village

import fedstrata
from fedstrata.client import sums
from fedstrata.client.private import Private, private_of
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.privacy_table import Privacy
from fedstrata.job.tables import Train
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.privacy.accounting import Spending, epsilon_of
from fedstrata.reports.live import _word
from fedstrata.reports.report import write_report
from fedstrata.reports.runs import load_run
from fedstrata.reports.tables import client_rows, result_rows, shown_rows
from fedstrata.runs import stages
from fedstrata.sites.messages import ReplyHeader, WelcomeHeader, decode_message
from fedstrata.sites.noise import ASKED, KEY, SecretNoise
from fedstrata.sites.noise_account import (
    ACCOUNT,
    NoiseAccount,
    check_account,
    refusal_of_epsilon,
    refusal_of_level,
)
from fedstrata.sites.noise_tables import Require
from fedstrata.sites.release_log import ReleaseLog, read_log
from fedstrata.sites.run_record import read_record
from fedstrata.sites.service import SiteService
from fedstrata.sites.settings import read_site
from fedstrata.sites.templates import SITE
from fedstrata.wire.codec import WireError

Jobs = Callable[..., dict[str, Any]]
LABELS = ["eye", "heart", "kidney"]
TABLES: dict[str, dict[str, Any]] = {
    "client": {"level": "client", "clip": 0.5, "noise": 1.0, "single_message": True},
    "example": {"level": "example", "clip": 0.5, "epsilon": 6.0},
    "shared": {"level": "client", "clip": 0.125, "noise": 2.0, "sum_only": True, "honest": 3},
}
CLIENT = Privacy(level="client", noise=1.0, single_message=True)


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    return Village(tmp_path, monkeypatch)


def played(village: Village, job: Jobs, level: str, **tables: Any) -> dict[str, Any]:
    made = job("fedavg", "classify", task={"labels": LABELS}, privacy=TABLES.get(level, {}), **tables)
    return village.jobs(made)[1]


def headers(village: Village, kind: Any) -> list[Any]:
    found = [
        decode_message(message, "welcome", "reply", "refusal").header
        for _, way, message in village.post.messages
        if way == "up"
    ]
    return [header for header in found if isinstance(header, kind)]


@pytest.mark.parametrize("level", ["client", "example"])
def test_a_site_tells_nothing_that_no_noise_covers(village: Village, job: Jobs, level: str) -> None:
    made = played(village, job, level)
    before = fedstrata.forecast(
        {
            **made,
            "engine": {},
            "data": {**made["data"], "train": str(village.everything)},
            "clients": {"partition": "column", "column": "site"},
        }
    )["fedavg"]["privacy"]
    result = fedstrata.run(made)
    assert result.privacy is not None
    assert result.privacy["epsilon"] == before["epsilon"]
    for reply in headers(village, ReplyHeader):
        assert (reply.loss, reply.flops, reply.seconds, reply.work.tokens) == (None, 0, 0.0, 0)
        assert reply.examples == (1 if level == "client" else 4)
        assert reply.steps == (1 if level == "client" else 2)
    told = {welcome.examples for welcome in headers(village, WelcomeHeader) if welcome.holds}
    assert told == ({1} if level == "client" else {4})
    lines = (village.folder / "federation" / "sites" / "a" / "state" / ACCOUNT).read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1]


def test_of_sites_that_add_noise_the_reports_name_no_work(village: Village, job: Jobs) -> None:
    """They do not say how much they computed, and "0 TFLOP" would be false."""
    made = played(village, job, "example")
    folder = fedstrata.run(made).folder
    run = load_run(folder)
    assert result_rows([run])[0]["tflops"] is None
    rows = client_rows(run)
    assert {(row["tflops"], row["seconds"]) for row in rows} == {(None, None)}
    assert "TFLOP" not in shown_rows(run, rows * 100)[1]
    page = write_report([folder]).read_text(encoding="utf-8")
    assert "Sites that add noise do not say how much they computed" in page
    assert "0 TFLOP" not in page
    record = read_record(village.folder / "federation")
    assert record is not None
    assert {_word(site.model_dump(), awaited=False) for site in record.sites.values()} == {"round 2: replied"}


@pytest.mark.parametrize(
    ("level", "period"),
    [*((level, 1) for level in TABLES), ("client", 2), ("example", 2)],
)
def test_a_model_that_overflows_is_answered_with_noise_alone(
    village: Village, job: Jobs, caplog: pytest.LogCaptureFixture, level: str, period: int
) -> None:
    """Where a message is no number is hidden by no noise, and a refusal tells as much: both told which words, or
    whether a word, there are at a site, by weights that overflow for it."""
    for name in NAMES if level == "shared" else ():
        village.site(name, "[require]", "[require]\nhonest = 3")
    made = played(village, job, level, wire={"part_period": period})
    file = Path(made["model"]["name"]) / "model.safetensors"
    weights, metadata = load_file(file), {"format": "pt"}
    kept = file.read_bytes()
    for tensor in (tensor for key, tensor in weights.items() if key.endswith("embeddings.LayerNorm.weight")):
        tensor.fill_(1e38)
    save_file(weights, file, metadata)
    try:
        with suppress(UserError):  # such a model has no score
            fedstrata.run({**made, "server": {"evaluate": "end"}})
    finally:
        file.write_bytes(kept)
    sent = [decode_message(m, "welcome", "reply", "refusal") for _, way, m in village.post.messages if way == "up"]
    assert {type(envelope.header) for envelope in sent} == {WelcomeHeader, ReplyHeader}
    replies = [
        envelope for envelope in sent if "embeddings" in envelope.weights or (period > 1 and envelope.weights)
    ]
    assert len(replies) == 6
    for envelope in replies:
        assert all(t.isfinite().all() for own in envelope.weights.values() for t in own.values())
    assert "not finite" in caplog.text


def test_the_seed_of_the_job_does_not_tell_the_noise(village: Village, job: Jobs) -> None:
    """Two runs of one job between sites have noise of their own; a run in one process has that of the job."""
    made = played(village, job, "client")
    models = []
    for i in range(2):
        folder = fedstrata.run({**made, "output": {"dir": str(village.folder / f"run-{i}")}}).folder
        models.append((folder / "model" / "model.safetensors").read_bytes())
    assert models[0] != models[1]


def test_the_same_request_has_the_same_noise_and_another_one_none(tmp_path: Path) -> None:
    request = Request(0, "a", Plan((0,), ("head",)), "train", {"head": 0}, {})
    start = {"model": {"w": torch.ones(3)}, "memory": {}}

    def noise(run: str = "run", rows: bytes = b"rows") -> SecretNoise:
        return SecretNoise(tmp_path / run, rows)

    first = noise()(request, start)("noise")
    again = noise()(replace(request, parts={"head": {}}), start)  # whole instead of a change
    assert again("noise") == first
    assert again("sample") != first
    for other, begun, rows in (
        (replace(request, span=(0.0, 0.5)), start, b"rows"),
        (replace(request, plan=Plan((1,), ("head",))), start, b"rows"),
        (request, {**start, "model": {"w": torch.zeros(3)}}, b"rows"),
        (request, {**start, "memory": {"w": torch.zeros(3)}}, b"rows"),
        (request, start, b"other rows"),
    ):
        with pytest.raises(WireError, match="another request was answered with noise"):
            noise(rows=rows)(other, begun)
    later = noise()(replace(request, round=1), start)
    assert later("noise") != first
    assert (tmp_path / "run" / KEY).stat().st_mode & 0o077 == 0
    elsewhere = noise("other")(request, start)
    assert elsewhere("noise") != first
    with (tmp_path / "run" / ASKED).open("ab") as file:
        file.write(b'{"round": 2, "req')  # the machine stopped here
    noise()(replace(request, round=2), start)
    with pytest.raises(WireError):
        noise()(replace(request, round=2, span=(0.0, 0.5)), start)


@pytest.mark.parametrize(
    ("level", "old", "new", "sentence"),
    [
        ("none", "[require]", '[require]\nlevel = "example"', "only with [privacy] level = 'example'"),
        ("client", "[require]", '[require]\nlevel = "example"', "the job's is 'client'"),
        ("client", "[require]", "[require]\nsum_only = true", "nothing but sums"),
        ("example", "[require]", "[require]\nepsilon = 5.0", "promises it epsilon 5.9"),
        ("shared", "[require]", "[require]\nhonest = 2", "relies on the noise of 3 clients in every sum"),
        ("none", "[require]", "[require]\nepsilon = 5.0", "only in runs with noise, of epsilon 5 at most"),
        ("none", "[limits]", "[limits]\nepsilon = 5.0", "only in runs with noise"),
    ],
)
def test_a_job_that_offers_less_is_refused(
    village: Village, job: Jobs, level: str, old: str, new: str, sentence: str
) -> None:
    for name in NAMES:
        village.site(name, old, new)
    with pytest.raises(UserError) as caught:
        fedstrata.run(played(village, job, level))
    assert "refuses: " in str(caught.value)
    assert sentence in str(caught.value)


def test_a_job_that_offers_enough_is_not(village: Village, job: Jobs) -> None:
    for name in NAMES:
        village.site(name, "[require]", '[require]\nlevel = "client"\nepsilon = 3.3\nhonest = 3\nsum_only = true')
    result = fedstrata.run(played(village, job, "shared"))
    assert result.status == "finished"
    assert result.privacy is not None
    assert 3.1 < result.privacy["epsilon"] < 3.3


def test_other_numbers_of_a_round_do_not_leave_with_the_noise_of_before(
    village: Village, job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU may come to: a server that asks again could take the difference of two sums, which has no noise."""
    for name in NAMES:
        village.site(name, "[require]", "[require]\nhonest = 3")
    made, commit, change = played(village, job, "shared"), stages.state.RunState.commit, sums._change

    def dies(*args: Any) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(stages.state.RunState, "commit", dies)
    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(made)
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    monkeypatch.setattr(sums, "_change", lambda *args: change(*args) + 1e-6)
    with pytest.raises(UserError, match="asked for round 1 again it comes to other numbers, as on a GPU"):
        fedstrata.run(made, resume=True)
    monkeypatch.setattr(sums, "_change", change)
    assert fedstrata.run(made, resume=True).status == "finished"


def test_over_all_runs_a_site_spends_no_more_than_its_limit(village: Village, job: Jobs) -> None:
    """The second run would be too much: its rounds are refused as soon as they are."""
    once = epsilon_of([Spending(1.0, 1.0, 2)], 1e-5, "pld")
    for name in NAMES:
        village.site(name, "[limits]", f"[limits]\nepsilon = {once + 0.1}")
    made = played(village, job, "client")
    fedstrata.run(made)
    village.start()
    with pytest.raises(UserError, match=r"over all runs it would have spent epsilon .*, its limit is 6"):
        fedstrata.run({**made, "output": {"dir": str(village.folder / "again")}})


def test_a_round_with_another_noise_is_accounted_for_once_more(tmp_path: Path) -> None:
    account = NoiseAccount(tmp_path, None, 1e-5)
    loud, quiet = Spending(50.0, 1.0, 1), Spending(0.5, 1.0, 1)
    for release in (loud, quiet, loud):
        account.spend("run", 0, CLIENT, release)
    assert account.epsilon() == epsilon_of([loud, quiet], 1e-5, "pld")


def test_a_site_weighs_one_at_level_client_whatever_it_says(village: Village, job: Jobs) -> None:
    for kind in ("welcome", "reply"):
        attacked(village, "b", kind, [header(examples=10**9)] * 9)
    said: list[Any] = []
    run = fedstrata.run(played(village, job, "client"), progress=said.append)
    notes = [event.sentence for event in said if type(event).__name__ == "Noted"]
    assert "b says that it has 1,000,000,000 examples and counts for 1 ([privacy] level = 'client')" in notes
    rounds = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
    assert {line["examples"] for line in rounds if line["client"] != "server"} == {1}


def test_of_how_much_noise_a_level_is_epsilon_alone_says_and_the_settings_say_so(job: Jobs) -> None:
    """A job that names the level and adds next to nothing passed for one that hides something."""
    least = {"level": "client", "noise": 1e-3, "single_message": True}
    made = load(job("fedavg", "classify", task={"labels": LABELS}, privacy=least))[0]
    require = Require(level="client")
    assert refusal_of_level(require, None, made) is None
    private = private_of(made)
    assert refusal_of_epsilon(require, private, 4, 2) is None
    assert "promises it epsilon" in (refusal_of_epsilon(Require(epsilon=1e5), private, 4, 2) or "")
    [told] = [line for line in SITE.splitlines() if line.startswith("# epsilon = 8.0")]
    assert told.endswith("default: no limit, for level the least noise will do")


def test_sums_of_whole_numbers_are_counted_by_renyi(tmp_path: Path) -> None:
    """And with them all of their level; epsilon by the other accountant would be that of continuous noise."""
    shared, own = Privacy(level="client", noise=1.0, sum_only=True, honest=3), Spending(1.0, 1.0, 1)
    account = NoiseAccount(tmp_path, None, 1e-5)
    for round in range(5):
        account.spend("run", round, shared, own)
    by_renyi = epsilon_of([Spending(1.0, 1.0, 5)], 1e-5, "rdp")
    assert account.epsilon() == by_renyi > epsilon_of([Spending(1.0, 1.0, 5)], 1e-5, "pld")
    private = Private(shared.model_copy(update={"noise": 1.0}), Train(), lambda request, start: str.encode)
    require = Require(epsilon=by_renyi - 0.01, delta=1e-5)
    assert f"epsilon {by_renyi:.3g}" in (refusal_of_epsilon(require, private, 10, 5) or "")
    account.spend("run", 5, CLIENT, own)
    assert account.epsilon() == epsilon_of([Spending(1.0, 1.0, 6)], 1e-5, "rdp")


def test_a_round_is_accounted_for_once(tmp_path: Path) -> None:
    release = Spending(1.0, 1.0, 1)
    account = NoiseAccount(tmp_path, 5.0, 1e-5)
    for _ in range(3):
        NoiseAccount(tmp_path, 5.0, 1e-5).spend("run", 0, CLIENT, release)
    assert account.epsilon() == epsilon_of([release], 1e-5, "pld")
    with pytest.raises(WireError, match="its limit is 5"):
        account.spend("run", 1, CLIENT, release)
    assert account.epsilon() == epsilon_of([release], 1e-5, "pld")
    account = NoiseAccount(tmp_path, None, 1e-5)
    account.spend("run", 1, Privacy(level="example", noise=5.0), Spending(5.0, 0.1, 1))
    both = epsilon_of([Spending(0.5, 1.0, 1), Spending(5.0, 0.1, 1)], 1e-5, "pld")
    assert account.epsilon() == both


def test_at_both_levels_all_is_counted_for_one_example(tmp_path: Path) -> None:
    """Where it is added, one clipped change stands in the place of another: up to two clips away."""
    account, client = NoiseAccount(tmp_path, None, 1e-5), Spending(2.0, 1.0, 1)
    for round in range(3):
        account.spend("run", round, CLIENT, client)
    alone = account.epsilon()
    account.spend("other", 0, Privacy(level="example", noise=1e3), Spending(1e3, 1.0, 1))
    replaced = epsilon_of([Spending(client.noise / 2, 1.0, 3)], 1e-5, "pld")
    assert account.epsilon() >= replaced > alone


def test_a_server_cannot_say_that_a_site_takes_part_less_often_than_it_may(village: Village, job: Jobs) -> None:
    """The noise of a site is for every round, whatever the server counted."""
    made = played(village, job, "example", method={"rounds": 4}, clients={"fraction": 0.4})
    result = fedstrata.run(made)
    assert result.privacy is not None
    asked = {own["rounds"] for own in result.privacy["clients"].values()}
    assert max(asked) < 4
    assert result.privacy["epsilon"] < 5.5
    path = village.folder / "federation" / "sites" / "a" / "state" / ACCOUNT
    told = [line for line in map(json.loads, path.read_text().splitlines()) if line]
    assert {line["noise"] for line in told} == {own["noise"] for own in result.privacy["clients"].values()}
    state = path.parent
    log = ReleaseLog(state)
    releases = [release for release, _ in read_log(state)]
    left = [release for release in releases if release.payload == "weights"]
    [spent] = {release.epsilon for release in left}
    assert spent is not None
    assert 0 < spent < 5.5
    assert all(release.epsilon is None for release in releases if release.payload != "weights")
    assert log.noisy == {(line["run"], line["round"]) for line in told}
    check_account(state, log.noisy)
    content = path.read_bytes()
    for less in (b"", content[content.index(b"\n") + 1 :]):
        path.write_bytes(less)
        with pytest.raises(UserError, match=r"noise\.jsonl: lacks round \d of run .* nothing leaves this site"):
            check_account(state, log.noisy)
    path.unlink()
    with pytest.raises(UserError, match="lacks round"):
        SiteService(read_site(state.parent))


def test_a_round_that_fails_is_spent_by_all_that_were_asked(village: Village, job: Jobs) -> None:
    """The first of them does not answer, and the messages of the others, which have left, are not looked at."""
    made = played(village, job, "example", method={"rounds": 2})
    made["engine"] |= {"deadline": 2.0, "quorum": 1.0}

    def goes(event: Any) -> None:
        if type(event).__name__ == "StageStarted":
            village.post.out = {"a"}

    with pytest.raises(UserError, match=r"round 1: a .* than engine\.quorum"):
        fedstrata.run(made, progress=goes)
    told = json.loads((Path(made["output"]["dir"]) / "result.json").read_text("utf-8"))["privacy"]["clients"]
    assert {name: own["rounds"] for name, own in told.items()} == {"a": 1, "b": 1, "c": 1}
    for name in "bc":
        state = village.folder / "federation" / "sites" / name / "state"
        assert told[name]["epsilon"] >= NoiseAccount(state, None, 1e-5).epsilon() > 0


def test_nothing_is_told_of_a_site_that_never_came(village: Village, job: Jobs) -> None:
    """It was told as if it had a single example, and had spent more than those that took part."""
    made = played(village, job, "example", method={"rounds": 2})
    made["engine"] |= {"deadline": 0.6, "quorum": 0.3}
    village.post.out = {"c"}
    told: list[str] = []
    result = fedstrata.run(made, progress=lambda event: told.extend(getattr(event, "notes", ())))
    assert result.privacy is not None
    assert result.privacy["clients"].keys() == {"a", "b"}
    assert result.privacy["epsilon"] == max(own["epsilon"] for own in result.privacy["clients"].values()) > 0
    assert any("that is without c: epsilon of a site is known once" in line for line in told)


@pytest.mark.parametrize("away", ["at the beginning", "when it is resumed"])
def test_epsilon_of_a_site_that_was_away_is_by_its_own_examples(
    village: Village, job: Jobs, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    """It was told as if the site had a single one, and so it was where it had taken part before a resume."""
    made = played(village, job, "example", method={"rounds": 3}, clients={"fraction": 0.67})
    made["engine"] |= {"deadline": 0.6, "quorum": 0.3}
    commit = stages.state.RunState.commit

    def dies(*args: Any) -> None:
        commit(*args)
        if args[3] == 2:
            village.post.out = {"c"}
            raise RuntimeError("killed")

    def comes(event: Any) -> None:
        if type(event).__name__ == "StageStarted" and away == "at the beginning":
            village.post.out = set()

    if away == "at the beginning":
        village.post.out = {"c"}
        result = fedstrata.run(made, progress=comes)
    else:
        monkeypatch.setattr(stages.state.RunState, "commit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            fedstrata.run(made)
        monkeypatch.setattr(stages.state.RunState, "commit", commit)
        result = fedstrata.run(made, resume=True)
    state = village.folder / "federation" / "sites" / "c" / "state"
    assert result.privacy is not None
    told = result.privacy["clients"]["c"]
    assert (told["rate"], result.clients["c"]["examples"]) == (0.5, 4)
    assert told["epsilon"] >= NoiseAccount(state, None, 1e-5).epsilon() > 0


def test_a_job_may_save_some_of_its_epsilon_for_later_runs(village: Village, job: Jobs) -> None:
    """The site took the noise of its rounds alone, so that its messages told more than server and page said."""
    made = played(village, job, "example")
    made["privacy"] = {**made["privacy"], "participations": 40}
    told = fedstrata.run(made).privacy
    assert told is not None
    path = village.folder / "federation" / "sites" / "a" / "state" / ACCOUNT
    spent = {json.loads(line)["noise"] for line in path.read_text().splitlines()}
    assert spent == {told["clients"]["a"]["noise"]}
    assert told["epsilon"] == NoiseAccount(path.parent, None, 1e-5).epsilon() < 2


@pytest.mark.parametrize(
    "damage",
    [b"garbage", b"{}", b"[1]", b"\0\0", b"\xff", b'{"noise": 0.0, ', b'{"count": -5, ', b'{"rate": "1", ', b"["],
)
def test_an_account_that_is_damaged_is_named(village: Village, job: Jobs, damage: bytes) -> None:
    """It ended `join` with a traceback, and noise of 0 counted as nothing spent."""
    played(village, job, "client")
    settings = read_site(village.folder / "federation" / "sites" / "a")
    account = NoiseAccount(settings.folder, 9.0, 1e-5)
    account.spend("run", 0, CLIENT, Spending(1.0, 1.0, 1))
    account.spend("run", 1, CLIENT, Spending(1.0, 1.0, 1))
    first, second = account.path.read_bytes().splitlines()
    if damage.endswith(b", "):
        changed = json.loads(first) | json.loads(damage[:-2] + b"}")
        damage = json.dumps(changed).encode()
    account.path.write_bytes(damage + b"\n" + second + b"\n")
    for use in (account.epsilon, lambda: SiteService(settings)):
        with pytest.raises(UserError, match=r"noise\.jsonl: a line is not as it was written; .* nothing leaves"):
            use()
