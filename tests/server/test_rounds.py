"""The round loop through whole, tiny runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import fedstrata
from fedstrata.data.batching import batches
from fedstrata.data.tokens import tokenize
from fedstrata.engines.dry import DryEngine
from fedstrata.engines.local import LocalEngine
from fedstrata.errors import UserError
from fedstrata.methods import METHODS
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams
from fedstrata.runs.result import Result
from fedstrata.server.rounds import in_order
from tiny import SENTENCES, saved_tensors

Jobs = Callable[..., dict[str, Any]]


def weights(result: Result) -> dict[str, torch.Tensor]:
    return dict(load_file(result.model_folder / "model.safetensors"))


def equal(one: Result, other: Result) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(job: dict[str, Any], folder: Path, *overrides: str, **options: Any) -> Result:
    return fedstrata.run(job, [*overrides, f"output.dir={folder}"], **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_replies_come_in_order_however_they_arrive() -> None:
    names = ["a", "b", "c", "d"]
    for arrival in (["a", "b", "c", "d"], ["d", "c", "b", "a"], ["b", "d", "a", "c"]):
        replies = (Reply(name, 1) for name in arrival)
        assert [reply.client for reply in in_order(replies, names)] == names


def test_nothing_is_held_back_while_replies_are_in_order() -> None:
    made: list[str] = []

    def replies() -> Iterator[Reply]:
        for name in "abc":
            made.append(name)
            yield Reply(name, 1)

    ordered = in_order(replies(), list("abc"))
    next(ordered)
    assert made == ["a"]


@pytest.mark.parametrize("kind", ["mlm", "classify"])
def test_fedavg_with_one_client_is_centralized_bit_for_bit(job: Jobs, tmp_path: Path, kind: str) -> None:
    one = run(job("fedavg", kind, clients={"count": 1}), tmp_path / "one")
    other = run(job("centralized", kind, clients={"count": 1}), tmp_path / "other")
    assert equal(one, other)
    assert one.score == other.score
    assert other.bytes == {"up": 0, "down": 0, "setup": 0}


def test_fedavg_equals_a_plain_loop(job: Jobs, tmp_path: Path) -> None:
    """Two clients, two rounds, written out in plain PyTorch: copies, HF's own loss, AdamW, a weighted mean."""
    tables = {
        "clients": {"count": 2, "partition": "sizes", "sizes": [4, 8]},
        "train": {"dropout": False, "learning_rate": 1e-3},
    }
    result = run(job("fedavg", "classify", **tables), tmp_path / "run")
    made = job("fedavg", "classify", **tables)
    names = sorted({label for _, label in SENTENCES})
    streams = Streams(0)
    auto = transformers.AutoModelForSequenceClassification
    torch.manual_seed(streams.integer(-1, "server", "init"))
    config = transformers.AutoConfig.from_pretrained(made["model"]["name"], num_labels=3)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = auto.from_pretrained(made["model"]["name"], config=config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model_folder)
    tokens = tokenize([text for text, _ in SENTENCES], tokenizer, 32, "truncate")
    rng = streams.numpy(-1, "server", "split")
    split = rng.permutation(12)
    shards = {"client-0": np.sort(split[:4]), "client-1": np.sort(split[4:])}
    for round in range(2):
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        total = {name: torch.zeros_like(p) for name, p in start.items()}
        for client, shard in shards.items():
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(start[name])
            decayed = [p for p in model.parameters() if p.ndim > 1]
            rest = [p for p in model.parameters() if p.ndim == 1]
            groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=1e-3)
            model.train()
            for index in batches(tokens.lengths[shard], 2, streams.numpy(round, client, "order")):
                rows = [torch.from_numpy(np.asarray(tokens[i], dtype=np.int64)) for i in shard[index]]
                ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
                labels = torch.tensor([names.index(SENTENCES[i][1]) for i in shard[index]])
                optimizer.zero_grad()
                model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
                optimizer.step()
            for name, p in model.named_parameters():
                total[name] += p.detach() * len(shard) / 12
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(total[name])
    got = weights(result)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.detach(), atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("method", ["fedavg", "fedbfpt", "fedadam"])
def test_same_seed_same_bits_whatever_the_order_of_visits(
    job: Jobs, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(job(method), tmp_path / "first")
    assert equal(first, run(job(method), tmp_path / "second"))
    assert not equal(first, run(job(method), tmp_path / "third", "train.seed=1"))
    visit = LocalEngine.exchange

    def backwards(self: LocalEngine, requests: Iterable[Request]) -> Iterator[Reply]:
        return visit(self, reversed(list(requests)))

    monkeypatch.setattr(LocalEngine, "exchange", backwards)
    assert equal(first, run(job(method), tmp_path / "backwards"))


def test_bytes_are_those_of_the_parts_that_crossed(job: Jobs, tmp_path: Path) -> None:
    result = run(job("fedbfpt", method={"rounds": 3}), tmp_path / "run")
    ledger = lines(tmp_path / "run" / "ledger.jsonl")
    model = weights(result)
    layer = 4 * sum(t.numel() for n, t in model.items() if n.startswith("bert.encoder.layer.0."))
    head = 4 * sum(t.numel() for n, t in model.items() if n.startswith("cls.predictions.") and "decoder" not in n)
    whole = 4 * sum(t.numel() for n, t in model.items() if "decoder" not in n)
    assert result.bytes["up"] == 3 * 3 * (layer + head)
    assert result.bytes["setup"] == 3 * whole
    assert result.bytes["down"] == 3 * 2 * (layer + head), (
        "nothing new in round 0, then the merged parts of the last"
    )
    assert {entry["part"] for entry in ledger if entry["phase"] == "train"} == {"layer.0", "layer.1", "head"}


def test_a_client_that_was_away_gets_what_changed_meanwhile(job: Jobs, tmp_path: Path) -> None:
    tables = {"clients": {"fraction": 0.34}, "method": {"rounds": 6}}
    run(job("fedavg", **tables), tmp_path / "run")
    ledger = [entry for entry in lines(tmp_path / "run" / "ledger.jsonl") if entry["phase"] == "train"]
    for round in range(1, 6):
        down = [entry for entry in ledger if entry["round"] == round and entry["direction"] == "down"]
        assert len({entry["client"] for entry in down}) == 1
        assert len(down) == 5, "embeddings, three layers, head"


def test_clients_that_keep_their_parts_are_scored_each(job: Jobs, tmp_path: Path) -> None:
    result = run(job("local", "classify"), tmp_path / "run")
    scores = [made["score"]["accuracy"] for made in result.clients.values()]
    assert len(scores) == 3
    assert result.score["accuracy"] == pytest.approx(np.mean(scores))
    assert result.bytes == {"up": 0, "down": 0, "setup": 0}
    own = [saved_tensors(tmp_path / "run" / "clients" / name / "model") for name in result.clients]
    assert not torch.equal(own[0]["classifier.weight"], own[1]["classifier.weight"])
    single = run(job("single", "classify"), tmp_path / "single")
    assert all(torch.equal(own[0][name], tensor) for name, tensor in weights(single).items())
    assert list(single.clients) == ["client-0"]


def test_a_client_first_met_in_an_evaluation_is_sent_the_start_model_once(job: Jobs, tmp_path: Path) -> None:
    """With a third of three clients per round, all are scored after round 0 and only one was trained."""
    run(job("fedsplitbert", "classify", clients={"fraction": 0.34}, method={"rounds": 4}), tmp_path / "run")
    setup = [entry for entry in lines(tmp_path / "run" / "ledger.jsonl") if entry["phase"] == "setup"]
    assert len(setup) == len({(entry["client"], entry["part"]) for entry in setup})
    assert {entry["client"] for entry in setup} == {"client-0", "client-1", "client-2"}


@pytest.mark.parametrize(("mode", "turns"), [("parallel", 1), ("share", 3)])
def test_each_turn_has_its_share_of_the_runs_schedule(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, mode: str, turns: int
) -> None:
    """Clients side by side train in the same part of the run, clients in sequence one after another."""
    asked: list[Request] = []
    answer = DryEngine.exchange

    def note(request: Request) -> Request:
        asked.append(request)
        return request

    def noting(self: DryEngine, requests: Iterable[Request]) -> Iterator[Reply]:
        return answer(self, map(note, requests))

    monkeypatch.setattr(DryEngine, "exchange", noting)
    fedstrata.forecast(job("fedbert", method={"mode": mode}))
    spans = [request.span for request in asked if request.phase == "train"]
    every = [(i / (2 * turns), (i + 1) / (2 * turns)) for i in range(2 * turns)]
    assert spans == [pytest.approx(span) for span in every for _ in range(3 // turns)]


def test_a_diverging_client_ends_the_run_with_a_sentence(job: Jobs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"client-0: .*(diverged|not finite).*"):
        run(job("fedavg"), tmp_path / "run", "train.learning_rate=1e30")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


def test_the_records_of_a_model_that_diverged_are_json(job: Jobs, tmp_path: Path) -> None:
    """One step goes well, and what it leads to has no loss: no score is recorded, as NaN is no JSON."""
    made = {"optimizer": "sgd", "learning_rate": 1e30, "weight_decay": 0.0, "steps": 1}
    with pytest.raises(UserError, match=r"round 1: the model's loss on the test rows is (nan|inf)"):
        run(job("fedavg", "classify", train=made), tmp_path / "run")
    texts = (tmp_path / "run" / "rounds.jsonl").read_text("utf-8").splitlines()
    texts.append((tmp_path / "run" / "result.json").read_text("utf-8"))
    assert json.loads(f"[{','.join(texts)}]", parse_constant=pytest.fail)[-1]["score"] == {}


class Toy(Method):
    """Trains and sends the head; keeps the top layer at home."""

    def plan(self, parts: Any, task: str, round: int, client: str, streams: Streams) -> Plan:
        top = f"layer.{parts.depth - 1}"
        return Plan(tuple(range(parts.depth)), (top, "head"), ("head",), (top,))


def test_a_new_method_is_one_class_and_one_entry(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "toy", Toy)
    result = run(job("toy", "classify"), tmp_path / "run")
    ledger = lines(tmp_path / "run" / "ledger.jsonl")
    assert {entry["part"] for entry in ledger if entry["phase"] != "setup"} == {"head"}
    kept = {entry["phase"] for entry in ledger if entry["part"] == "layer.2"}
    assert kept == {"setup"}, "what is kept is part of the start model and never crosses the wire again"
    assert {entry["phase"] for entry in ledger} == {"setup", "train", "evaluate"}
    assert all(made["score"] for made in result.clients.values())
