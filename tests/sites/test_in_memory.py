"""A run between sites, with everything but the wire: every message goes to a site's program and back as bytes."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedstrata
from deployment import free_port
from fedstrata import UserError
from fedstrata.client import device
from fedstrata.events import Noted, StageEnded
from fedstrata.job.tables import Engine
from fedstrata.plan.messages import NoReply, Request
from fedstrata.runs import stages, train
from fedstrata.sites import engine as between
from fedstrata.sites.activation_client import ActivationClient
from fedstrata.sites.engine import Presence, RemoteEngine
from fedstrata.sites.federation import Federation
from fedstrata.sites.messages import RefusalHeader, decode_message, encode_message
from fedstrata.sites.provision import add_site, init
from fedstrata.sites.remote_run import _files
from fedstrata.sites.service import SiteService
from fedstrata.sites.settings import read_server, read_site
from fedstrata.sites.site import Site
from fedstrata.wire.tensor_file import TensorFile, read_file
from tiny import SENTENCES, saved_tensors, tiny_model, tokenizer

Jobs = Callable[..., dict[str, Any]]
NAMES = ("a", "b", "c")


class Post:
    """A transport that brings every message at once. Sites whose names stand in ``out`` are not there."""

    def __init__(self, hosts: dict[str, SiteService]) -> None:
        self.hosts = hosts
        self.out: set[str] = set()
        self.waiting: dict[str, tuple[str, bytes, int]] = {}
        self.messages: list[tuple[str, str, bytes]] = []

    def online(self) -> dict[str, Presence]:
        return {name: (i, "") for i, name in enumerate(self.hosts) if name not in self.out}

    def send(self, to: Presence, message: TensorFile, seconds: float, answer_bytes: int) -> str:
        name = list(self.hosts)[to[0]]
        self.messages.append((name, "down", bytes(message)))
        self.waiting[str(len(self.messages))] = name, bytes(message), answer_bytes
        return str(len(self.messages))

    def receive(self, numbers: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        for number in reversed(list(numbers)):  # the last one answers first
            name, message, limit = self.waiting.pop(number)
            self.admit(self.hosts[name], message)
            answer = bytes(self.hosts[name].answer(message))
            assert len(answer) - 8 - int.from_bytes(answer[:8], "little") <= limit
            self.messages.append((name, "up", answer))
            yield number, answer

    def admit(self, host: SiteService, message: bytes) -> None:
        """A site takes as many bytes as an honest server sends, or refuses the message anyway."""
        try:
            host.admit(read_file(message).metadata, len(message) - 8 - int.from_bytes(message[:8], "little"))
        except Exception:
            assert host.answer(message).metadata["kind"] == "refusal"

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def plainly(request: Request, port: int, token: str, deadline: float) -> ActivationClient:
    """The way to the server's layers, without TLS."""
    return ActivationClient(f"127.0.0.1:{port}", request, token, None, deadline)


class Village:
    """A federation of three sites, each with every third sentence; and the same rows as one file with a column."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = NAMES) -> None:
        self.folder, self.monkeypatch, self.names = folder, monkeypatch, names
        rows = [(*row, names[i % len(names)]) for i, row in enumerate(SENTENCES)]
        self.everything = self.write("all.csv", ["text", "label", "site"], rows)
        init(folder / "federation", names, stream_port=free_port())
        for name in names:
            self.write(
                f"federation/sites/{name}/train.csv", ["text", "label"], [r[:2] for r in rows if r[2] == name]
            )
        for name in names:  # four rows each, or fewer
            path = folder / "federation" / "sites" / name / "site.toml"
            path.write_text(path.read_text("utf-8").replace("min_examples = 8 ", "min_examples = 1 "), "utf-8")
        self.post = Post({})
        self.start()

        @contextmanager
        def connected(engine: Engine) -> Iterator[Federation]:
            settings = read_server(folder / "federation")
            yield Federation(settings, self.post, dict.fromkeys(names, "token"), False)

        monkeypatch.setattr(stages, "federation", connected)
        monkeypatch.setattr(between, "POLL_SECONDS", 0.01)  # an answer is there at once

    def write(self, name: str, columns: list[str], rows: list[Any]) -> Path:
        path = self.folder / name
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
        return path

    def site(self, name: str, old: str, new: str) -> None:
        """Change a line of a site's settings."""
        path = self.folder / "federation" / "sites" / name / "site.toml"
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new), "utf-8")
        self.start(name)

    def start(self, *names: str) -> None:
        """Start the programs of sites, or start them again."""
        for name in names or self.names:
            settings = read_site(self.folder / "federation" / "sites" / name)
            self.post.hosts[name] = SiteService(settings, reach=plainly, trial=None)

    def jobs(self, config: dict[str, Any], **engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A job in process and between sites."""
        clients = {key: value for key, value in config["clients"].items() if key != "count"}
        data = {**config["data"], "train": str(self.everything)}
        if "test" in clients:
            del data["test"]
        one = {**config, "data": data, "clients": {**clients, "partition": "column", "column": "site"}}
        engine_table = {"name": "flower", "federation": str(self.folder / "federation"), **engine}
        other = {
            **config,
            "data": {k: v for k, v in data.items() if k != "train"},
            "clients": clients,
            "engine": engine_table,
        }
        labels = sorted({str(label) for _, label in SENTENCES})
        if config["task"]["kind"] == "classify":
            one["task"], other["task"] = ({**config["task"], "labels": labels} for _ in range(2))
        return (
            {**one, "output": {"dir": str(self.folder / "here")}},
            {**other, "output": {"dir": str(self.folder / "there")}},
        )


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    return Village(tmp_path, monkeypatch)


def weights(run: Any) -> dict[str, torch.Tensor]:
    return saved_tensors(run.model_folder or run.shared)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def same(one: Any, other: Any) -> None:
    """Two runs came to the same."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (one.score, one.bytes, one.flops) == (other.score, other.bytes, other.flops)
    ledgers = [sorted((r.folder / "ledger.jsonl").read_text("utf-8").splitlines()) for r in (one, other)]
    assert ledgers[0] == ledgers[1]


def test_the_seconds_of_a_run_are_without_the_wait_for_its_sites(
    village: Village, job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of runs compared a minute of training with the hour for which another run waited for a site."""
    _, there = village.jobs(job("fedavg", "classify"))
    hours, now, gather = list[int](), time.monotonic, RemoteEngine.gather

    def late(engine: RemoteEngine) -> list[NoReply]:
        hours.append(1)
        return gather(engine)

    monkeypatch.setattr(time, "monotonic", lambda: now() + 3600 * len(hours))
    monkeypatch.setattr(RemoteEngine, "gather", late)
    run = fedstrata.run(there)
    assert len(hours) == 1
    assert 0 < run.seconds < 3600


CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavg", {"train": {"optimizer_state": "persist", "lr_schedule": "polynomial", "warmup_ratio": 0.2}}),
    ("fedprox", {"train": {"proximal_mu": 0.5}}),
    ("fedavgm", {}),
    ("fedadam", {"clients": {"fraction": 0.67}, "method": {"rounds": 4}}),
    ("fedyogi", {}),
    ("fedadagrad", {}),
    ("fedbfpt", {"task": {"kind": "mlm"}}),
    ("fedbt", {"task": {"kind": "mlm"}, "wire": {"dtype": "fp16"}}),
    ("fedbt", {"method": {"cycle": 2}}),
    ("fedsplitbert", {"clients": {"test": 0.3}, "wire": {"dtype": "int8"}, "method": {"rounds": 3}}),
    ("fedfreezebert", {"head": {"kind": "mean"}, "wire": {"dtype": "bf16"}}),
    (
        "fedavg",
        {
            "wire": {"codec": "delta", "bits": 2, "density": 0.05},
            "clients": {"fraction": 0.34},
            "method": {"rounds": 6},
        },
    ),
    ("fedsplitbert", {"clients": {"test": 0.3}, "wire": {"codec": "delta", "bits": 1, "dtype": "fp16"}}),
    (
        "fedfreezebert",
        {
            "head": {"kind": "cls"},
            "method": {"variant": "centralized"},
            "client": {"may_send": ["hidden_states"]},
        },
    ),
]


@pytest.mark.parametrize(("name", "tables"), CASES)
def test_between_sites_a_run_ends_in_the_same_bits(
    job: Jobs, village: Village, name: str, tables: dict[str, Any]
) -> None:
    tables = dict(tables)
    kind = tables.pop("task", {"kind": "classify"})["kind"]
    here, there = village.jobs(job(name, kind, 3, **tables))
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "hidden_states"]')
    same(fedstrata.run(here), fedstrata.run(there))


def test_a_job_is_the_same_whatever_its_tokenizer_was_called_with() -> None:
    """Rows are tokenized once, so a run that went on, or a second one, was of another job than the first."""
    own: Any = SimpleNamespace(model=tiny_model("bert", "classify"), tokenizer=tokenizer())
    before = {name: bytes(content.numpy()) for name, content in _files(own, "classify").items()}
    own.tokenizer(["a text"], truncation=True, max_length=3, padding="max_length")
    assert {name: bytes(content.numpy()) for name, content in _files(own, "classify").items()} == before


def test_every_stage_is_between_sites(job: Jobs, village: Village) -> None:
    here, there = village.jobs(job("fedbt", "classify"))
    further = {"name": "further", "task": {"kind": "mlm"}, "method": {"name": "fedbfpt", "rounds": 1}}
    for config in (here, there):
        config["stages"] = [further, {"name": "tuned", "task": config.pop("task"), "method": config.pop("method")}]
    one, other = fedstrata.run(here), fedstrata.run(there)
    assert all(torch.equal(weights(one)[key], weights(other)[key]) for key in weights(one))
    assert (one.score, one.bytes) == (other.score, other.bytes)


def test_a_message_holds_what_the_ledger_counts(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedbt", "classify"))
    run = fedstrata.run(there)
    records = lines(run.folder / "transport.jsonl")
    sent = sum(len(message) for _, way, message in village.post.messages if way == "up")
    assert sum(line["bytes"] for line in records if line["direction"] == "up") == sent
    requests = [m for _, way, m in village.post.messages if way == "down" and b'"kind":"request"' in m]
    assert sum(map(len, requests)) - run.bytes["down"] < 12_000 * len(requests)
    assert run.bytes["up"] < sent < run.bytes["up"] + 12_000 * len(village.post.messages)


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("fedsplitbert", {"clients": {"test": 0.3}}),
        ("fedbert", {"method": {"mode": "share"}}),
        ("fedavg", {"wire": {"codec": "delta", "bits": 1, "density": 0.05}, "clients": {"fraction": 0.67}}),
    ],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, name: str, tables: dict[str, Any]
) -> None:
    config = job(name, "classify", 3, **tables)
    config["method"]["rounds"] = 4
    here, there = village.jobs(config)
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    whole = fedstrata.run(here)
    commit = stages.state.RunState.commit
    for killed in (1, 3):

        def dies(*args: Any, at: int = killed) -> None:
            if args[3] == at:
                raise RuntimeError("killed")
            commit(*args)  # the state, the server, what changed, rounds done

        monkeypatch.setattr(stages.state.RunState, "commit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            fedstrata.run(there, resume=True)
        village.start()
    monkeypatch.setattr(stages.state.RunState, "commit", commit)
    same(whole, fedstrata.run(there, resume=True))


@pytest.mark.parametrize("mode", ["share", "parallel"])
def test_a_site_that_answers_without_the_server_s_layers_is_missing(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    class Own:
        """Layers of the site's own in place of the server's."""

        def begin(self, span: Any) -> None:
            """See the class."""

        def forward(self, message: Any) -> Any:
            return {"activations": message["activations"]}

        def backward(self, message: Any) -> Any:
            return message

    def carry_out(site: Site, request: Request, copied: bool) -> Any:
        if site.name == "b":
            site.reach = lambda request: nullcontext(Own())
        return answer(site, request, copied)

    answer = Site._carry_out
    monkeypatch.setattr(Site, "_carry_out", carry_out)
    _, there = village.jobs(job("fedbert", "classify", 2, method={"mode": mode}))
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    run = fedstrata.run(there)
    missing = json.loads((run.folder / "result.json").read_text("utf-8"))["missing"]
    assert {(line["client"], line["reason"]) for line in missing} == {
        ("b", "answers without having held its session on the server's layers")
    }
    assert [line["round"] for line in missing][:2] == [0, 1]


def test_a_site_saves_the_model_that_is_its_own(job: Jobs, village: Village) -> None:
    here, there = village.jobs(job("fedsplitbert", "classify", 3, clients={"test": 0.3}))
    one = fedstrata.run(here)
    run = fedstrata.run(there)
    for name in NAMES:
        home = village.folder / "federation" / "sites" / name / "state"
        [model] = (home / "models").iterdir()
        own, other = load_file(model / "model.safetensors"), saved_tensors(one.folder / "clients" / name / "model")
        assert own.keys() == other.keys()
        assert all(torch.equal(own[key], other[key]) for key in other)
        assert f"The model of the site {name}, which nobody else has." in (model / "README.md").read_text("utf-8")
        assert list((home / "runs").iterdir()) == []
    assert run.model_folder is None
    assert run.scored == f"each site's own model, on its own disk: state/models/{model.name}"
    assert {told["model"] for told in run.clients.values()} == {None}
    assert not (run.folder / "clients").exists()


def test_a_server_killed_at_the_end_does_not_cost_a_site_its_model(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sites have heard farewell, and have nothing of the run any more when it is said again."""

    def dies(*_: Any) -> None:
        raise RuntimeError("killed")

    _, there = village.jobs(job("fedsplitbert", "classify", 3, clients={"test": 0.3}))
    save = train.save_models
    monkeypatch.setattr(train, "save_models", dies)
    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(there)
    homes = [village.folder / "federation" / "sites" / name / "state" / "models" for name in NAMES]
    before = [saved_tensors(model) for home in homes for model in home.iterdir()]
    village.start()
    monkeypatch.setattr(train, "save_models", save)
    fedstrata.run(there, resume=True)
    after = [saved_tensors(model) for home in homes for model in home.iterdir()]
    assert len(after) == len(NAMES)
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


REFUSALS = [
    (
        'payloads = ["weights"]',
        'payloads = ["hidden_states"]',
        "refuses: fedavg sends weights (trained parts of the",
    ),
    (
        "# methods = [",
        "methods = ['fedbt'] # [",
        "refuses: fedavg is not one of the methods it allows (fedbt)",
    ),
    ("min_examples = 1 ", "min_examples = 99 ", "refuses: it has fewer examples than the 99 it wants to train on"),
    (
        "# bytes_per_round = 500_000_000",
        "bytes_per_round = 1000",
        "refuses: round 1 sends 124812 bytes, its limit is 1000",
    ),
    (
        'train = "train.csv"',
        'train = "secret.csv"',
        "failed: its data, model or device cannot be used; its own log",
    ),
    (
        'label = "label"',
        'label = "text"',
        "failed: its data, model or device cannot be used; its own log says why",
    ),
]


@pytest.mark.parametrize(("old", "new", "reason"), REFUSALS)
def test_a_site_decides_and_the_run_goes_on_without_it(
    job: Jobs, village: Village, old: str, new: str, reason: str
) -> None:
    here, there = village.jobs(job("fedavg", "classify"))
    village.site("b", old, new)
    events: list[Any] = []
    run = fedstrata.run(there, progress=events.append)
    rows = [(*row, NAMES[i % 3]) for i, row in enumerate(SENTENCES)]
    village.write("all.csv", ["text", "label", "site"], [row for row in rows if row[2] != "b"])
    without = fedstrata.run(here)
    assert all(torch.equal(weights(run)[key], weights(without)[key]) for key in weights(run))
    missing = lines(run.folder / "missing.jsonl")
    assert [(line["round"], line["client"]) for line in missing] == [(0, "b"), (1, "b")]
    assert all(line["reason"].startswith(reason) for line in missing)
    assert any(getattr(event, "reason", "").startswith(reason) and event.round == -1 for event in events)
    assert [event.round for event in events if type(event).__name__ == "RoundEnded"] == [0, 1]


def test_features_of_some_sites_are_trained_on_without_the_others(job: Jobs, village: Village) -> None:
    config = job("fedfreezebert", "classify", 3, method={"variant": "centralized"}, head={"kind": "cls"})
    here, there = village.jobs({**config, "client": {"may_send": ["hidden_states"]}})
    for name in ("a", "c"):
        village.site(name, 'payloads = ["weights"]', 'payloads = ["hidden_states"]')
    run = fedstrata.run(there)
    rows = [(*row, NAMES[i % 3]) for i, row in enumerate(SENTENCES)]
    village.write("all.csv", ["text", "label", "site"], [row for row in rows if row[2] != "b"])
    without = fedstrata.run(here)
    assert all(torch.equal(weights(run)[key], weights(without)[key]) for key in weights(run))


def test_hidden_states_of_a_call_that_was_killed_are_not_trained_on_without_their_site(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site is away when they are collected again: it is missing, and so are they."""
    config = job("fedfreezebert", "classify", 3, method={"variant": "centralized"}, head={"kind": "cls"})
    here, there = village.jobs({**config, "client": {"may_send": ["hidden_states"]}})
    for name in NAMES:
        village.site(name, 'payloads = ["weights"]', 'payloads = ["hidden_states"]')

    def dies(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(stages.state.RunState, "commit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            fedstrata.run(there)
    village.site("b", 'payloads = ["hidden_states"]', 'payloads = ["weights"]')
    village.start()
    run = fedstrata.run(there, resume=True)
    rows = [(*row, NAMES[i % 3]) for i, row in enumerate(SENTENCES)]
    village.write("all.csv", ["text", "label", "site"], [row for row in rows if row[2] != "b"])
    without = fedstrata.run(here)
    assert all(torch.equal(weights(run)[key], weights(without)[key]) for key in weights(run))


def test_with_fewer_sites_than_the_quorum_nothing_is_trained(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedavg", "classify"), quorum=1.0)
    village.site("b", "min_examples = 1 ", "min_examples = 99 ")
    with pytest.raises(
        UserError, match=r"engine.quorum: is 1 of 3 sites, but b refuses: it has fewer examples"
    ) as said:
        fedstrata.run(there)
    assert str(said.value).endswith(
        "; --resume asks them again, and another job takes another folder (output.dir=...)"
    )
    village.site("b", "min_examples = 99 ", "min_examples = 1 ")
    assert fedstrata.run(there, resume=True).score


def test_a_site_that_is_away_is_missed_by_the_deadline_and_comes_back(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 4}), deadline=1.0)
    events: list[Any] = []

    def watch(event: Any) -> None:
        events.append(event)
        if type(event).__name__ == "Scored":
            village.post.out = {"c"} if event.round in (0, 1) else set()
        village.start("c")  # it knows nothing but what is on its disk

    run = fedstrata.run(there, progress=watch)
    missing = lines(run.folder / "missing.jsonl")
    assert [(line["round"], line["client"], line["reason"]) for line in missing] == [
        (1, "c", "is not connected"),
        (2, "c", "is not connected"),
    ]
    answered = [line["round"] for line in lines(run.folder / "rounds.jsonl") if line["client"] == "c"]
    assert answered == [0, 3]
    assert "Without c in rounds 2, 3: it is not connected." in fedstrata.report(run.folder).read_text("utf-8")


def without_its_disk(village: Village, *rounds: int, name: str = "c") -> Callable[[Any], None]:
    """A site loses its disk after these rounds."""

    def watch(event: Any) -> None:
        if type(event).__name__ == "Scored" and event.round in rounds:
            shutil.rmtree(village.folder / "federation" / "sites" / name / "state")
            village.start(name)

    return watch


def test_a_site_that_lost_its_disk_is_greeted_again(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 4}))
    run = fedstrata.run(there, progress=without_its_disk(village, 0))
    [missing] = lines(run.folder / "missing.jsonl")
    assert (missing["round"], missing["client"]) == (1, "c")
    assert missing["reason"] == "cannot do what it is asked: this run is not known here"
    assert [r["round"] for r in lines(run.folder / "rounds.jsonl") if r["client"] == "c"] == [0, 2, 3]
    assert not (run.folder / "lost.jsonl").exists(), "it kept nothing of this job"


@pytest.mark.parametrize("round", [1, 2])
def test_a_quorum_that_is_lost_stops_the_run_and_resume_goes_on(round: int, job: Jobs, village: Village) -> None:
    """To the same ledger: who was not reached in the first round has not been sent the start model yet."""
    here, there = village.jobs(job("fedavg", "classify", method={"rounds": 3}), deadline=0.5, quorum=1.0)

    def watch(event: Any) -> None:
        if type(event).__name__ == "Scored" and event.round == round - 2:
            village.post.out = {"c"}

    with pytest.raises(
        UserError,
        match=rf"round {round}: c is not connected; fewer clients reply than engine.quorum = 1 of those sampled",
    ):
        fedstrata.run(there, progress=watch)
    village.post.out = set()
    same(fedstrata.run(here), fedstrata.run(there, resume=True))


def test_a_quorum_lost_with_a_site_s_disk_is_there_again_after_resume(job: Jobs, village: Village) -> None:
    """What was committed says that the site has what it was sent; it is not asked to go on from that once more."""
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 4}), quorum=1.0)
    there["wire"] = {"codec": "delta"}
    with pytest.raises(UserError, match=r"round 3: c cannot do what it is asked: this run is not known here"):
        fedstrata.run(there, progress=without_its_disk(village, 1))
    run = fedstrata.run(there, resume=True)
    assert [line["round"] for line in lines(run.folder / "rounds.jsonl") if line["client"] == "c"] == [0, 1, 2, 3]
    assert not (run.folder / "missing.jsonl").exists(), "in the round that was played again nobody is missing"


def test_a_server_killed_after_a_late_site_s_first_answer_takes_that_answer(job: Jobs, village: Village) -> None:
    """Whether the site was asked before is known otherwise after the restart; the answer is the same."""
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 3}), deadline=1.0)

    def watch(event: Any) -> None:
        if type(event).__name__ == "Scored":
            village.post.out = {"c"} if event.round == -1 else set()
            if event.round == 1:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(there, progress=watch)
    run = fedstrata.run(there, resume=True)
    missing = lines(run.folder / "missing.jsonl")
    assert [(line["round"], line["client"], line["reason"]) for line in missing] == [(0, "c", "is not connected")]


def changed(message: bytes, **fields: Any) -> TensorFile:
    """A reply with other fields in its header."""
    envelope = decode_message(message, "reply")
    return encode_message(
        envelope.run, envelope.header.model_copy(update=fields), envelope.weights, envelope.answers
    )


def spoilt(message: bytes) -> TensorFile:
    """A reply whose head is not what the plan sends."""
    envelope = decode_message(message, "reply")
    weights = {**envelope.weights, "head": {name: t[:1] for name, t in envelope.weights["head"].items()}}
    return encode_message(envelope.run, envelope.header, weights, envelope.answers)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (spoilt, "sends what cannot be used: head: "),
        (lambda message: changed(message, loss=float("inf")), "diverged (loss inf)"),
        (lambda message: changed(message, client="a"), "answers as 'a'"),
        (lambda message: message[:-1], "not a welcome or reply or refusal: "),
        (
            lambda message: encode_message("f" * 32, decode_message(message, "reply").header),
            "answers for another run",
        ),
        (
            lambda message: encode_message("", decode_message(message, "reply").header),
            "answers for another run",
        ),
        (  # of a site that has refused so many that it names no run any more
            lambda message: encode_message("", RefusalHeader(reason="failed: why", final=False)),
            "failed: why",
        ),
    ],
)
def test_an_answer_that_makes_no_sense_is_none(
    job: Jobs,
    village: Village,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[bytes], bytes | TensorFile],
    reason: str,
) -> None:
    _, there = village.jobs(job("fedavg", "classify"))
    host, honest = village.post.hosts["b"], village.post.hosts["b"].answer

    def lies(message: bytes) -> bytes:
        reply = bytes(honest(message))
        if b'"kind":"reply"' not in reply:
            return reply
        assert bytes(answer(reply)) != reply
        return bytes(answer(reply))

    monkeypatch.setattr(host, "answer", lies)
    run = fedstrata.run(there)
    assert [line["client"] for line in lines(run.folder / "missing.jsonl")] == ["b", "b"]
    result = json.loads((run.folder / "result.json").read_text())
    assert all(line["reason"].startswith(reason) for line in result["missing"]), result["missing"]
    assert result["status"] == "finished"


def test_a_site_says_in_its_log_where_it_computes(
    job: Jobs, village: Village, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (village.folder / "devices").mkdir()
    (village.folder / "devices" / "nvidia0").touch()
    monkeypatch.setattr(device, "DEVICES", village.folder / "devices")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level("INFO"):
        fedstrata.run(village.jobs(job("fedavg", "classify", method={"rounds": 1}))[1])
    assert "computes on the processor" in caplog.text
    assert "this machine has a GPU that the installed torch cannot use" in caplog.text


CANARY = "zyzzyva"


def test_no_text_and_no_path_leaves_a_site(job: Jobs, village: Village, caplog: pytest.LogCaptureFixture) -> None:
    rows = [(f"{CANARY} {text}", label) for text, label in SENTENCES]
    village.write("federation/sites/a/train.csv", ["text", "label"], rows)
    village.write(f"federation/sites/b/{CANARY}.csv", ["text", "label"], [(text, CANARY) for text, _ in rows])
    village.site("b", 'train = "train.csv"', f'train = "{CANARY}.csv"')  # its labels are none of the job's
    village.site("c", 'train = "train.csv"', f'train = "{CANARY}.csv"')  # there is no such file
    _, there = village.jobs(job("fedavg", "classify"), quorum=0.3)
    events: list[Any] = []
    run = fedstrata.run(there, progress=events.append)
    left = [message for _, way, message in village.post.messages if way == "up"]
    assert len(left) > 5
    assert CANARY in caplog.text, "the sites' own logs say what is wrong"
    home = str(village.folder).encode()
    for what in (CANARY.encode(), home, *(row[0].encode() for row in rows)):
        assert not any(what in message for message in left)
    at_server = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()] + [repr(events).encode()]
    assert not any(CANARY.encode() in content for content in at_server)


JOBS = [
    ("centralized", {}, {}, r"'centralized' sends nothing between clients, so it is not for sites"),
    ("local", {}, {}, r"'local' sends nothing between clients, so it is not for sites"),
    ("fedsplitbert", {}, {}, r"\[clients\] test: is missing; with fedsplitbert each site has a model of its own"),
    ("fedavg", {"task": {"kind": "classify"}}, {"data": {"test": None}}, r"\[task\] labels: is missing; between"),
]


@pytest.mark.parametrize(("name", "tables", "over", "complaint"), JOBS)
def test_a_job_that_is_not_for_sites_is_refused_before_anything_is_sent(
    job: Jobs, village: Village, name: str, tables: dict[str, Any], over: dict[str, Any], complaint: str
) -> None:
    _, there = village.jobs(job(name, "classify", 3))
    if "labels" in complaint:
        there["data"].pop("test")
        there["task"].pop("labels")
    with pytest.raises(UserError, match=complaint):
        fedstrata.run(there)
    assert village.post.messages == []


def test_the_same_file_of_a_job_runs_here_and_there(job: Jobs, village: Village) -> None:
    """With ``[data] train`` and no labels named: at the server they are read from it, and nothing else."""
    here, there = village.jobs(job("fedavg", "classify"))
    there["data"]["train"] = str(village.everything)
    there["clients"] |= {"partition": "column", "column": "site"}
    del here["task"]["labels"], there["task"]["labels"]
    same(fedstrata.run(here), fedstrata.run(there))


def test_all_stages_are_between_sites_or_none(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedbt", "classify"))
    there["stages"] = [{"name": "one"}, {"name": "two", "engine": {"name": "inprocess"}}]
    there["data"]["train"] = str(village.everything)
    del there["engine"]["federation"]
    there["stages"][0]["engine"] = {"federation": str(village.folder / "federation")}
    with pytest.raises(UserError, match=r"\[engine\] name: must be the same in all stages"):
        fedstrata.run(there)


def test_without_test_rows_at_the_server_each_site_keeps_some_aside(job: Jobs, village: Village) -> None:
    here, there = village.jobs(job("fedavg", "classify", 3, clients={"test": 0.1}))
    del there["clients"]["test"]  # holdout is 0.1
    same(fedstrata.run(here), fedstrata.run(there))


def test_a_site_goes_on_with_the_rows_and_files_it_had_or_refuses(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong stands in its own log; the server is told that the site refuses."""
    config = job("fedsplitbert", "classify", 3, clients={"test": 0.3})
    _, there = village.jobs({**config, "method": {**config["method"], "rounds": 3}}, quorum=1.0)

    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == 1:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(there, progress=dying)
    home = village.folder / "federation" / "sites" / "b"
    [run] = (home / "state" / "runs").iterdir()
    rows = home / "train.csv"
    kept = max((run).glob("round-*.safetensors"))
    sentences = {
        rows: r"b refuses: its rows are not those that it began this run with; its own log says more",
        kept: r"b refuses: what it keeps of this run is damaged; its own log says more",
        run / "start" / "model.safetensors": r"b refuses: what it keeps of this run is damaged",
    }
    for path, sentence in sentences.items():
        content = path.read_bytes()
        path.write_bytes(content.replace(b"kidney", b"heart", 1) if path == rows else content[:-4] + b"\0\0\x80\1")
        village.start("b")
        with pytest.raises(UserError, match=sentence) as refused:
            fedstrata.run(there, resume=True)
        assert "heart" not in str(refused.value)
        path.write_bytes(content)
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'{"key": "cut off')
    village.start("b")
    assert fedstrata.run(there, resume=True).status == "finished"


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_keeps_the_sites_that_it_began_with(job: Jobs, village: Village, broken: bool) -> None:
    """Its next stage waited until the deadline for a site that was added meanwhile and could not take part."""
    _, there = village.jobs(job("fedavg", "classify", 2), deadline=3.0)
    method, there["stages"] = there.pop("method"), [{"name": name} for name in ("one", "two")]
    for stage in there["stages"]:
        stage["method"] = {**method, "rounds": 1}

    def edited(event: Any) -> None:
        if isinstance(event, StageEnded) and event.stage == "one":
            add_site(village.folder / "federation", "d")
            if broken:  # as while somebody edits it
                (village.folder / "federation" / "server.toml").write_text("[sites", "utf-8")

    run = fedstrata.run(there, progress=edited)
    assert not list(run.folder.rglob("missing.jsonl"))


def test_a_run_says_that_the_server_s_certificate_ends_soon(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.sites.certificates.SOON", timedelta(days=400))
    settings = read_server(village.folder / "federation")
    secure = Federation(settings, village.post, dict.fromkeys(NAMES, "token"), True)
    monkeypatch.setattr(stages, "federation", lambda engine: nullcontext(secure))
    _, there = village.jobs(job("fedavg", "classify", 2, method={"rounds": 1}))
    events: list[Any] = []
    fedstrata.run(there, progress=events.append)
    noted = [event.sentence for event in events if isinstance(event, Noted)]
    assert any(line.startswith(f"{settings.tls.certificate}: expires on ") for line in noted)
