"""Masks and dropout are drawn anew in every round, each from the stream of its round and client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedstrata.client.dropout import DropoutRng
from fedstrata.client.model_pass import WholePass
from fedstrata.data.batching import batches
from fedstrata.models.cut import through
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from fedstrata.server.layers import LayerSettings, ServerLayers
from fedstrata.server.server import Server
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import masked_lm
from fedstrata.wire.store import Store
from roles import drawn_batches, make_runtime, sentences, train_request, train_round, weights_of
from tiny import tiny_model, tokenizer

ALONE = np.arange(1)
"""A client with one text: no order of batches or rows plays a part."""
PLACES = [(0, "a"), (1, "a"), (5, "a"), (1, "b")]
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_masks_come_from_the_stream_of_round_and_client() -> None:
    task = masked_lm(tokenizer(), len(tokenizer()), 0.15, False)
    runtime = make_runtime(tiny_model(), task, batch_size=1, epochs=8)
    drawn = []
    for round, client in PLACES:
        rng = Streams(0).numpy(round, client, "batch")
        own = drawn_batches(runtime.trainer, ALONE, round=round, client=client)
        assert len(own) == 8
        for batch in own:
            expected = task.batch(sentences(), ALONE, rng, None)
            assert torch.equal(batch.inputs["input_ids"], expected.inputs["input_ids"])
            assert torch.equal(batch.targets, expected.targets)
        drawn.append(torch.cat([batch.inputs["input_ids"] for batch in own]).tolist())
    assert all(drawn.count(ids) == 1 for ids in drawn), "no two of them alike"


def test_a_round_trains_on_the_masks_of_its_own_stream() -> None:
    """Two steps' losses, without dropout, against a plain loop."""
    task = masked_lm(tokenizer(), len(tokenizer()), 0.15, False)
    losses = set()
    for round, client in PLACES:
        runtime = make_runtime(tiny_model(**QUIET), task, batch_size=1)
        reply = train_round(runtime, Plan((0, 1, 2), ("head",)), ALONE, client, round=round)
        batch = task.batch(sentences(), ALONE, Streams(0).numpy(round, client, "batch"), None)
        assert reply.loss == task.loss(tiny_model(**QUIET).train(), batch).item()
        losses.add(reply.loss)
    assert len(losses) == len(PLACES)


def test_the_order_comes_from_the_stream_of_round_and_client() -> None:
    runtime = make_runtime(tiny_model(), masked_lm(tokenizer(), len(tokenizer()), 0.15, False), batch_size=2)
    examples, orders = sentences(), []
    for round, client in PLACES:
        request = train_request(Plan((), ()), round, client)
        drawn = runtime.trainer._steps(request, examples, np.arange(12))
        order = [chosen.tolist() for _, batches in drawn for chosen, _ in batches]
        rng = Streams(0).numpy(round, client, "order")
        assert order == [chosen.tolist() for chosen in batches(examples.tokens.lengths, 2, rng)]
        orders.append(order)
    assert all(orders.count(order) == 1 for order in orders)


def test_a_score_draws_the_same_masks_every_time_and_no_dropout() -> None:
    runtime = make_runtime(tiny_model(), masked_lm(tokenizer(), len(tokenizer()), 0.15, False), batch_size=2)
    model_pass, scores = WholePass(runtime.working, Plan((0, 1, 2), ())), []
    for _ in range(2):
        runtime.working.model.train()
        scores.append(runtime.scorer.run(sentences(), None, model_pass))
    assert scores[0] == scores[1]


def test_dropout_comes_from_the_stream_of_round_and_client() -> None:
    """One step's loss against the model called by hand, with dropout from that stream."""
    task = Classify(0, ("eye", "heart", "kidney"))
    losses = set()
    for round, client in PLACES:
        model = tiny_model(head="classify", num_labels=3)
        batch = task.batch(sentences(), ALONE, np.random.default_rng(0), None)
        runtime = make_runtime(model, task, batch_size=1)
        with DropoutRng(Streams(0).integer(round, client, "dropout"), torch.device("cpu")).fork():
            expected = task.loss(model.train(), batch).item()
        reply = train_round(runtime, Plan((0, 1, 2), ("head",)), ALONE, client, round=round)
        assert reply.loss == expected
        losses.add(reply.loss)
    assert len(losses) == len(PLACES)


def test_dropout_in_the_servers_layers_comes_from_a_stream_of_its_own(tmp_path: Path) -> None:
    runtime = make_runtime(tiny_model(), masked_lm(tokenizer(), len(tokenizer()), 0.15, False), batch_size=1)
    working, trainer = runtime.working, runtime.trainer
    plan = Plan((0, 1, 2), ("embeddings", "head"), server=working.parts.layers(0))
    server = Server(working.parts, weights_of(working))
    settings = LayerSettings(plan.server, True, 64, runtime.stream, Store(tmp_path))
    layers = ServerLayers(working, server, settings, trainer.train, trainer.streams)
    lengths = torch.tensor([5], dtype=torch.int32)
    states = torch.rand(5, 32, generator=torch.Generator().manual_seed(0))
    seen = []
    for round, client in PLACES:
        with layers.connect(train_request(plan, round, client)) as session:
            out = session.forward({"activations": states, "lengths": lengths})["activations"]
        with DropoutRng(Streams(0).integer(round, client, "dropout of the server"), torch.device("cpu")).fork():
            stack = [layer.train() for layer in working.model.bert.encoder.layer]
            expected = through(working.model.config, stack, states[None], torch.ones(1, 5, dtype=torch.long))
        assert torch.equal(out, expected[0].detach())
        seen.append(out.tolist())
    assert all(seen.count(one) == 1 for one in seen)
