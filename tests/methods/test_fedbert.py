"""FedBERT: each mode against a few lines of plain PyTorch, and against the method it claims to equal."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.client import trainer as client_module
from fedstrata.client.setup import make_ready, resolve_auto
from fedstrata.cost.bytes import payload
from fedstrata.data.prepare import prepare
from fedstrata.errors import UserError
from fedstrata.exchanges.activations import notes
from fedstrata.job.file import load
from fedstrata.methods.fedbert import FedBERT
from fedstrata.models.parts import find_parts
from fedstrata.plan.disclosure import CHANGED
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from fedstrata.server.layers import SplitSession
from fedstrata.wire.activations import StreamForm, message_bytes
from fedstrata.wire.rows import RowForm
from fedstrata.wire.store import read_tensors
from roles import drawn_batches
from tiny import model_of, saved_tensors, tiny_model

Jobs = Callable[..., dict[str, Any]]
MODES = ("parallel", "share", "emb-avg", "head-emb-avg")
UNEVEN = {"partition": "sizes", "sizes": [6, 2, 4]}
"""Clients that weigh differently and take 3, 1 and 2 steps a round."""


@pytest.fixture
def split(job: Jobs, tmp_path: Path) -> Jobs:
    """Jobs without dropout in which every client takes two steps a round."""

    def make(mode: str | None, kind: str = "mlm", /, **tables: Any) -> dict[str, Any]:
        name = "fedbert" if mode in MODES else mode or "fedavg"
        tables["method"] = {"rounds": 2, **({"mode": mode} if mode in MODES else {}), **tables.get("method", {})}
        learning = {
            "optimizer_state": "persist",
            "dropout": False,
            "learning_rate": 1e-2,
            **tables.get("train", {}),
        }
        made = job(name, kind, 3, **{**tables, "train": learning})
        made["output"] = {"dir": str(tmp_path / f"{mode}-{len(list(tmp_path.iterdir()))}")}
        return made

    return make


def weights(result: fedstrata.Result) -> dict[str, torch.Tensor]:
    return saved_tensors(model_of(result))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    "train",
    [{}, {"epochs": 2, "lr_schedule": "polynomial", "warmup_ratio": 0.25}, {"epochs": 2, "proximal_mu": 1.0}],
)
def test_parallel_is_fedavg_whose_optimizers_go_on(split: Jobs, train: dict[str, Any]) -> None:
    assert same(
        weights(fedstrata.run(split("parallel", train=train, clients=UNEVEN))),
        weights(fedstrata.run(split("fedavg", train=train, clients=UNEVEN))),
    )


@pytest.mark.parametrize("kind", ["mlm", "classify"])
@pytest.mark.parametrize(
    "train", [{}, {"epochs": 2, "lr_schedule": "polynomial", "warmup_ratio": 0.25, "lr_decay": 0.5}]
)
@pytest.mark.parametrize("mode", MODES)
def test_with_one_client_every_mode_is_centralized(
    split: Jobs, mode: str, train: dict[str, Any], kind: str
) -> None:
    one = {"clients": {"count": 1}, "train": train}
    assert same(
        weights(fedstrata.run(split(mode, kind, **one))), weights(fedstrata.run(split("centralized", kind, **one)))
    )


@pytest.mark.parametrize("mode", ["share", "head-emb-avg"])
def test_with_one_client_the_proximal_term_is_fedavgs(split: Jobs, mode: str) -> None:
    one = {"clients": {"count": 1}, "train": {"epochs": 2, "proximal_mu": 1.0}}
    assert same(weights(fedstrata.run(split(mode, **one))), weights(fedstrata.run(split("fedavg", **one))))


def adam(module: torch.nn.Module, names: set[str]) -> torch.optim.Optimizer:
    own = [p for name, p in module.named_parameters() if name in names]
    groups = [{"params": [p for p in own if p.ndim > 1]}]
    groups += [{"params": [p for p in own if p.ndim == 1], "weight_decay": 0.0}]  # type: ignore[dict-item]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def reference(made: dict[str, Any], mode: str) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The mode in plain PyTorch: whole models whose layers are one module, an optimizer for each side.

    Returns:
        The mean model, and each client's own.
    """
    [job] = load(made)
    job = resolve_auto(job)
    data = prepare(job)
    ready = make_ready(job, data, made["model"]["name"])
    trainer, parts = ready.runtime.trainer, ready.runtime.working.parts
    clients = {client: copy.deepcopy(ready.runtime.working.model) for client in ready.shards}
    common = next(iter(clients.values())).bert.encoder
    for model in clients.values():
        model.bert.encoder = common
    names = {part: set(parts.shapes[part]) for part in parts.names}
    theirs = names["embeddings"] | names["head"]
    below = adam(next(iter(clients.values())), set().union(*names.values()) - theirs)
    above = {client: adam(model, theirs) for client, model in clients.items()}
    averaged = names["embeddings"] | (names["head"] if mode == "head-emb-avg" else set())
    for round in range(2):
        queues = {
            client: drawn_batches(trainer, index, ready.train, round, client)
            for client, index in ready.shards.items()
        }
        steps = range(max(map(len, queues.values())))
        turns = [client for step in steps for client in clients if step < len(queues[client])]
        order = list(clients) if mode == "share" else turns
        for place, client in enumerate(order):
            if mode == "share" and place + round:  # takes over what the one before has come to
                before = clients[order[place - 1]]
                clients[client].load_state_dict(before.state_dict())
            model = clients[client].train()
            for _ in range(len(queues[client]) if mode == "share" else 1):
                batch = queues[client].pop(0)
                trainer.task.loss(model, batch).backward()
                for optimizer in (above[client], below):
                    optimizer.step()
                    optimizer.zero_grad()
        if mode != "share":
            for name in averaged:
                total = sum(
                    len(ready.shards[client]) * model.get_parameter(name).detach().double()
                    for client, model in clients.items()
                )
                mean = (total / sum(map(len, ready.shards.values()))).float()
                for model in clients.values():
                    model.get_parameter(name).detach().copy_(mean)
    last = clients[list(clients)[-1]]
    return dict(last.named_parameters()), [dict(model.named_parameters()) for model in clients.values()]


@pytest.mark.parametrize("mode", MODES[1:])
def test_one_set_of_layers_equals_plain_pytorch(split: Jobs, mode: str) -> None:
    made = split(mode, clients=UNEVEN)
    result = fedstrata.run(made)
    expected, each = reference(made, mode)
    got = weights(result)
    heads = [name for name in got if name.startswith("cls")]
    for name in got.keys() - (heads if mode == "emb-avg" else []):
        assert torch.equal(got[name], expected[name]), name
    if mode == "emb-avg":
        own = [
            read_tensors(path) for path in sorted(result.folder.glob("state/clients/*/round-000001.safetensors"))
        ]
        assert len(own) == 3
        for kept, model in zip(own, each, strict=True):
            assert kept.keys() == {name for name in heads if "decoder" not in name}
            assert all(torch.equal(kept[name], model[name]) for name in kept)
        assert not torch.equal(own[0]["cls.predictions.bias"], own[1]["cls.predictions.bias"])


@pytest.mark.parametrize("mode", ["emb-avg", "head-emb-avg"])
def test_a_clients_own_work_runs_beside_the_next_ones_batch(
    split: Jobs, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client's step but a round's last is held back until the layers have begun with another's batch."""
    expected = weights(fedstrata.run(split(mode)))
    begun, begins = [0], threading.Condition()
    tails, per_round = [0], 3 * 2
    forward, step = SplitSession.forward, client_module.step_halves

    def counted(self: SplitSession, message: Any) -> Any:
        if self.optimizer is not None:
            with begins:
                begun[0] += 1
                begins.notify_all()
        return forward(self, message)

    def held(*arguments: Any) -> None:
        tails[0] += 1
        if tails[0] % per_round:
            with begins:
                assert begins.wait_for(lambda: begun[0] > tails[0], 30)
        step(*arguments)

    monkeypatch.setattr(SplitSession, "forward", counted)
    monkeypatch.setattr(client_module, "step_halves", held)
    assert same(weights(fedstrata.run(split(mode))), expected)
    assert tails[0] == begun[0] == 2 * per_round


def test_a_run_has_its_own_threads_whatever_ran_before_it(split: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a client's own work runs beside the next one's batch, in a thread that outlives a run."""
    seen, step = set[int](), client_module.step_halves

    def noted(*arguments: Any) -> None:
        seen.add(torch.get_num_threads())
        step(*arguments)

    monkeypatch.setattr(client_module, "step_halves", noted)
    for threads in (1, 2, 1):
        seen.clear()
        fedstrata.run(split("emb-avg", engine={"threads": threads}))
        assert seen == {threads}


def test_the_modes_differ(split: Jobs) -> None:
    made = [weights(fedstrata.run(split(mode)))["bert.encoder.layer.1.output.dense.weight"] for mode in MODES]
    assert sum(torch.equal(one, other) for one in made for other in made) == len(MODES), "each only itself"


def test_the_plan_is_the_papers() -> None:
    parts = find_parts(tiny_model(layers=4))
    for mode, sent, kept in (
        ("parallel", ("embeddings", "head"), ()),
        ("share", ("embeddings", "head"), ()),
        ("emb-avg", ("embeddings",), ("head",)),
        ("head-emb-avg", ("embeddings", "head"), ()),
    ):
        plan = FedBERT(mode=mode).plan(parts, "mlm", 0, "a", Streams(0))
        plan.check(parts)
        assert plan == Plan((0, 1, 2, 3), ("embeddings", "head"), sent, kept, server=parts.layers(0))
    plan = FedBERT(lower=1, upper=2).plan(parts, "mlm", 0, "a", Streams(0))
    assert plan.server == ("layer.1",)
    assert plan.local(parts) == (0, 2, 3)
    assert plan.send == ("embeddings", "layer.0", "layer.2", "layer.3", "head")
    plan = FedBERT(mode="emb-avg").plan(find_parts(tiny_model(head="classify")), "classify", 0, "a", Streams(0))
    assert (plan.send, plan.keep) == (("embeddings",), ("pooler", "head"))


def test_the_servers_layers_are_not_in_the_initial_download(job: Jobs) -> None:
    forecast = fedstrata.forecast(job("fedbert"))["fedbert"]
    sizes = {part["name"]: part["bytes"] for part in forecast["parts"]}
    assert forecast["setup"]["down_bytes"] == sizes["embeddings"] + sizes["head"]


def test_golden_bytes_of_a_batch() -> None:
    """The paper's RoBERTa-base, 16 texts of 512 tokens; the lengths come on top."""
    assert sum(message_bytes(16 * 512, 16, 768, StreamForm(RowForm(), RowForm())).values()) == 100_663_296 + 16 * 4


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(split: Jobs, mode: str) -> None:
    train = {"dropout": True, "lr_schedule": "polynomial"}
    whole = fedstrata.run(split(mode, train=train, method={"rounds": 3}))
    made = split(mode, train=train, method={"rounds": 3})

    def dying(event: Any) -> None:
        if getattr(event, "round", -1) == 1 and getattr(event, "client", "") == "client-1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made, progress=dying)
    again = fedstrata.run(made, resume=True)
    assert same(weights(again), weights(whole))
    assert (again.score, again.bytes, again.flops) == (whole.score, whole.bytes, whole.flops)
    left = {path.name for path in (again.folder / "state").rglob("*")}
    assert "layers" not in left
    assert "optimizer" not in left


@pytest.mark.parametrize(
    ("mode", "kind", "lower"), [("share", "mlm", 0), ("parallel", "classify", 0), ("head-emb-avg", "classify", 1)]
)
def test_sending_only_what_changed_at_all_changes_no_bit(split: Jobs, mode: str, kind: str, lower: int) -> None:
    tables = {"method": {"lower": lower}, "train": {"epochs": 2}}
    runs = [fedstrata.run(split(mode, kind, **tables, wire=w)) for w in ({}, {"activations_changed": 0.0})]
    plain, changed = runs
    assert same(weights(plain), weights(changed))
    assert plain.score == changed.score
    before, after = (
        {
            (line["direction"], line["part"]): line["bytes"]
            for line in lines(run.folder, "ledger.jsonl")
            if (line["round"], line["client"], line["phase"]) == (1, "client-0", "train")
        }
        for run in runs
    )
    for way in ("up", "down"):
        assert (after[way, "activations"] < before[way, "activations"]) == (way == "down"), "all states moved"
    assert after["up", "gradients"] < before["up", "gradients"]


@pytest.mark.parametrize("mode", ["share", "parallel"])
def test_the_numbers_of_examples_tell_no_place_in_the_data(
    split: Jobs, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """They count in each session from the first text that comes, and so name no row, nor the same one twice."""
    told, forward = dict[tuple[int, str], list[int]](), SplitSession.forward

    def noted(session: SplitSession, message: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "examples" in message:
            request = session.request
            told.setdefault((request.round, request.client), []).extend(message["examples"].tolist())
        return forward(session, message)

    monkeypatch.setattr(SplitSession, "forward", noted)
    fedstrata.run(split(mode, "classify", wire={"activations_changed": 0.0}, train={"epochs": 2}))
    assert len(told) == 6
    for numbers in told.values():
        assert len(numbers) == 2 * len(set(numbers)), "each text comes twice"
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers))


@pytest.mark.parametrize("state", ["persist", "reset"])
def test_a_run_that_sends_changes_and_was_killed_goes_on_to_the_same_bits(split: Jobs, state: str) -> None:
    """What both ends keep ends with the round, so that a round that runs again begins with nothing, as before."""
    tables = {
        "train": {"epochs": 3, "learning_rate": 1e-3, "optimizer_state": state},
        "wire": {"activations_changed": 0.1, "activations": "int8"},
    }
    whole = fedstrata.run(split("share", "classify", **tables))
    made = split("share", "classify", **tables)

    def dying(event: Any) -> None:
        if (getattr(event, "round", -1), getattr(event, "client", ""), getattr(event, "step", 0)) == (
            1,
            "client-1",
            4,
        ):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made, progress=dying)
    again = fedstrata.run(made, resume=True)
    assert same(weights(again), weights(whole))
    assert (again.score, again.bytes) == (whole.score, whole.bytes)
    [up] = {
        sum(e["bytes"] for e in run.transfers if (e["direction"], e["part"]) == ("up", "activations"))
        for run in (whole, again)
    }
    assert up < fedstrata.forecast(made)["fedbert"]["clients"]["up_bytes"], "some were left out"
    left = {path.name for path in (again.folder / "state").rglob("*")}
    assert "layers" not in left


def test_what_sending_changes_tells_and_takes_is_said_before_the_run(split: Jobs) -> None:
    [once] = load(split("share", wire={"activations_changed": 0.1}, train={"feature_cache_gb": 1e-6}))
    [often] = load(split("share", wire={"activations_changed": 0.1}, train={"epochs": 2}))
    parts = find_parts(tiny_model())
    told = " ".join(notes(once, parts, 3, 600))
    assert "an epoch moves at most" in told
    assert f"the server is also told {CHANGED}" in told
    assert "both ends keep up to 0.001 of 0.0256 MB of hidden states" in told
    assert "so all hidden states are sent" in told
    told = " ".join(notes(often, parts, 3, 600))
    assert "both ends keep up to 0.0256 MB of hidden states" in told
    assert "so all hidden states are sent" not in told


def test_an_epoch_and_a_batch_are_told_before_they_are_sent(split: Jobs) -> None:
    made = split("share", "classify")
    parts = find_parts(tiny_model("bert", "classify", num_labels=3))
    told = fedstrata.forecast(made)["fedbert"]["split"]
    result = fedstrata.run(made)
    crossed = [
        line["bytes"]
        for line in lines(result.folder, "ledger.jsonl")
        if line["part"] in ("activations", "gradients") and line["client"] == "client-0" and line["round"] == 0
    ]
    assert sum(crossed) == told["epoch_bytes"]
    assert 0 < told["batch_bytes"] < told["epoch_bytes"]
    assert told["fedavg_round_bytes"] == 2 * payload(parts, parts.names)


def test_the_servers_work_is_not_the_clients(split: Jobs) -> None:
    result = fedstrata.run(split("share", "classify"))
    records = [line for line in lines(result.folder, "rounds.jsonl") if line["client"] != "server"]
    whole = fedstrata.run(split("fedavg", "classify"))
    assert result.flops == whole.flops
    assert all(0 < line["flops"] < line["server_flops"] for line in records)


def test_the_page_tells_whose_the_layers_are(split: Jobs) -> None:
    result = fedstrata.run(split("share", "classify"))
    page = fedstrata.report(result.folder).read_text("utf-8")
    assert "trained and sent embeddings, pooler, head, the server layers 0–2, by fedbert" in page
    assert "Clients and server together computed" in page
    [parts] = [
        picture for picture in page.split("<svg") if "the server&#39;s" in picture or "the server's" in picture
    ]
    assert "layer.1" in parts
    assert "activations" not in parts
    assert page.count(">gradients<") == 2, "in the pictures of what crossed the wire, each way"


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"wire": {"dtype": "int8"}}, r"\[wire\] dtype: 'int8' is for weights"),
        (
            {"method": {"lower": 2, "upper": 1}},
            r"\[method\] lower, upper: are 2 and 1, but the model has 3 layers",
        ),
        ({"client": {"may_send": ["weights"]}}, r"\[client\] may_send: .* hidden states of every batch"),
        ({"method": {"mode": "sharing"}}, r"\[method\] mode: 'sharing' is invalid; did you mean 'share'"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(split: Jobs, tables: dict[str, Any], complaint: str) -> None:
    made = split("share", "classify", **tables)
    with pytest.raises(UserError, match=complaint):
        fedstrata.run(made)
    assert not Path(made["output"]["dir"], "result.json").exists()


@pytest.mark.parametrize(
    ("dtype", "rate", "complaint"),
    [
        ("fp16", 1e3, "round 1, client client-1: its reply cannot be used: .* not finite; if its numbers outgrew"),
        ("fp32", 1e20, "round 1: a message cannot be used: .* not finite; if its numbers outgrew the wire"),
    ],
)
def test_numbers_that_outgrow_the_wire_end_the_run_in_a_sentence(
    split: Jobs, dtype: str, rate: float, complaint: str
) -> None:
    made = split("share", "classify", wire={"dtype": dtype}, train={"learning_rate": rate})
    with pytest.raises(UserError, match=complaint):
        fedstrata.run(made)
    assert json.loads(Path(made["output"]["dir"], "result.json").read_text())["status"] == "failed"


def test_a_head_over_four_layers_cannot_be_split(job: Jobs) -> None:
    with pytest.raises(UserError, match="takes the hidden states of four layers"):
        fedstrata.run(job("fedbert", "classify", 4, head={"kind": "psum"}))
