"""The fast step against the plain one: every trick gives the same loss and the same update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.client.answer import ClientData, ClientRuntime, Work, answer_request
from fedstrata.client.model_pass import WholePass
from fedstrata.client.trainer import drain
from fedstrata.exchanges import EXCHANGES
from fedstrata.models.parts import part_tensors
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.tasks import Batch, Task
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import masked_lm
from fedstrata.wire.codec import Wire, dequantize, make_codec, quantize
from fedstrata.wire.store import Store
from roles import drawn_batches, make_runtime, sentences, train_request, train_round, weights_of
from tiny import tiny_model, tokenizer, words

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KIND = {**QUIET, "num_labels": 3}


def mlm(full: bool = False) -> Task:
    return masked_lm(tokenizer(), 5 + len(words()), 0.15, full)


def roles(task: Task | None = None, model: Any = None, **train: Any) -> ClientRuntime:
    return make_runtime(
        model or tiny_model(**QUIET), task or mlm(), **{"batch_size": 4, "learning_rate": 1e-3, **train}
    )


def train(
    runtime: ClientRuntime, plan: Plan, index: list[int] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Train round 0 as client "a"; the mean loss and all weights after."""
    reply = train_round(runtime, plan, np.arange(12) if index is None else np.asarray(index))
    return reply.loss, {name: p.detach().clone() for name, p in runtime.working.model.named_parameters()}


def full_plan(runtime: ClientRuntime) -> Plan:
    parts = runtime.working.parts
    return Plan(tuple(range(parts.depth)), parts.names, parts.names)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-3) -> None:
    """The updates differ by less than ``tolerance`` of their length: Adam blows up rounding in single elements."""
    start = dict(
        tiny_model(head="mlm" if "cls.predictions.bias" in one else "classify", **KIND).named_parameters()
    )
    moved, moved_other = (
        torch.cat([(weights[name].detach() - start[name].detach()).flatten() for name in one])
        for weights in (one, other)
    )
    assert moved.norm() > 0
    assert (moved - moved_other).norm() < tolerance * moved.norm()


def plain(model: nn.Module, batches: list[Batch], rate: float = 1e-3, rates: Sequence[float] = ()) -> list[float]:
    """The reference: Hugging Face's own loss over the whole head, torch's plain AdamW over everything."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=rate, foreach=False
    )
    model.train()
    losses = []
    for i, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rates[i] if rates else rate
        labels = batch.targets
        if batch.positions is not None:
            labels = torch.full_like(batch.inputs["input_ids"], -100)
            labels[batch.positions] = batch.targets
        optimizer.zero_grad()
        loss = model(**batch.inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["mlm", "classify"])
def test_a_round_equals_plain_pytorch(kind: str) -> None:
    task = mlm() if kind == "mlm" else Classify(0, ("eye", "heart", "kidney"))
    model = tiny_model(head=kind, num_labels=3, **QUIET) if kind == "classify" else tiny_model(**QUIET)
    reference = copy.deepcopy(model)
    made = roles(task, model, epochs=2)
    batches = drawn_batches(made.trainer, np.arange(12))
    assert len(batches) == 6
    loss, weights = train(made, full_plan(made))
    assert loss == pytest.approx(np.mean(plain(reference, batches)), rel=1e-5)
    same(weights, dict(reference.named_parameters()))


def test_what_others_do_between_two_steps_is_not_the_clients_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seconds = roles(), [0.0]
    monkeypatch.setattr("fedstrata.client.trainer.time", SimpleNamespace(perf_counter=lambda: sum(seconds)))
    plan = full_plan(made)
    model_pass, stepped = WholePass(made.working, plan), lambda *_: seconds.append(1.0)
    steps = made.trainer.run(train_request(plan), sentences(), np.arange(12), model_pass, {}, stepped)
    try:
        while True:
            next(steps)
            seconds.append(100.0)
    except StopIteration as end:
        reply, _ = end.value
    assert (reply.steps, reply.seconds) == (3, 3.0)


def test_the_learning_rate_decays_with_every_local_epoch() -> None:
    model = tiny_model(**QUIET)
    reference = copy.deepcopy(model)
    made = roles(mlm(), model, epochs=2, lr_decay=0.1)
    batches = drawn_batches(made.trainer, np.arange(12))
    _, weights = train(made, full_plan(made))
    plain(reference, batches, rates=[1e-3] * 3 + [1e-4] * 3)
    same(weights, dict(reference.named_parameters()))


def test_masked_head_equals_full_head() -> None:
    one, two = roles(mlm(full=False)), roles(mlm(full=True))
    loss, weights = train(one, full_plan(one))
    loss_full, weights_full = train(two, full_plan(two))
    assert loss == pytest.approx(loss_full, rel=1e-6)
    same(weights, weights_full)


def test_padding_to_the_batch_equals_padding_to_the_maximum() -> None:
    """Same batches, same masks: padding must neither be attended to nor predicted."""
    made = roles(Classify(0, ("eye", "heart", "kidney")), tiny_model(head="classify", num_labels=3, **QUIET))
    examples, index = sentences(), np.arange(12)
    narrow = made.trainer.task.batch(examples, index, np.random.default_rng(0))
    wide = made.trainer.task.batch(examples, index, np.random.default_rng(0), 32)
    assert narrow.inputs["input_ids"].shape[1] < wide.inputs["input_ids"].shape[1] == 32
    losses, grads = [], []
    for batch in (narrow, wide):
        made.working.model.zero_grad()
        loss = made.trainer.task.loss(made.working.model, batch)
        loss.backward()
        losses.append(loss.item())
        grads.append(
            {name: p.grad.clone() for name, p in made.working.model.named_parameters() if p.grad is not None}
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-6, rtol=1e-4)


def test_batches_by_length_hold_the_same_examples_with_less_padding() -> None:
    drawn = {}
    for by_length in (True, False):
        made = roles(group_by_length=by_length, batch_size=2)
        batches = drawn_batches(made.trainer, np.arange(12))
        seen = sorted(int(batch.inputs["attention_mask"][i].sum()) for batch in batches for i in range(2))
        drawn[by_length] = seen, sum(batch.work.tokens for batch in batches)
    assert drawn[True][0] == drawn[False][0]
    assert drawn[True][1] < drawn[False][1]


def test_bf16_agrees_with_fp32_within_its_rounding() -> None:
    one, two = roles(), roles(precision="bf16")
    loss, weights = train(one, full_plan(one))
    loss_bf16, weights_bf16 = train(two, full_plan(two))
    assert loss != loss_bf16, "bf16 was not used"
    assert loss == pytest.approx(loss_bf16, rel=1e-2)
    start = dict(tiny_model(**QUIET).named_parameters())
    moved = torch.cat([(weights[name] - start[name]).flatten() for name in weights])
    moved_bf16 = torch.cat([(weights_bf16[name] - start[name]).flatten() for name in weights])
    assert torch.cosine_similarity(moved, moved_bf16, 0) > 0.9
    assert all(tensor.dtype == torch.float32 for tensor in weights_bf16.values())


def test_no_graph_below_the_lowest_trained_part_and_the_same_update() -> None:
    made = roles()
    plan = Plan((0, 1, 2), ("layer.1", "head"), ("layer.1", "head"))
    outputs: dict[str, torch.Tensor] = {}
    for i, layer in enumerate(made.working.model.bert.encoder.layer):
        layer.register_forward_hook(lambda _m, _i, out, i=i: outputs.update({f"layer.{i}": out}))
    whole = roles()
    _, frozen = train(made, plan, [0, 1, 2])
    assert not outputs["layer.0"].requires_grad
    assert outputs["layer.1"].requires_grad
    everything = full_plan(whole)
    batches = drawn_batches(whole.trainer, np.arange(3))
    whole.working.trainable(everything)
    own = part_tensors(whole.working.model, whole.working.parts, plan.train)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [whole.working.model.get_parameter(n) for n in own if own[n].ndim > 1],
                "weight_decay": 0.01,
            },
            {
                "params": [whole.working.model.get_parameter(n) for n in own if own[n].ndim == 1],
                "weight_decay": 0.0,
            },
        ],
        lr=1e-3,
    )
    whole.working.model.train()
    for batch in batches:
        whole.trainer.task.loss(whole.working.model, batch).backward()
        optimizer.step()
    same(frozen, dict(whole.working.model.named_parameters()))
    for name, p in made.working.model.named_parameters():
        moved = not torch.equal(p, tiny_model(**QUIET).get_parameter(name))
        assert moved == (name in own), name


def test_optimizer_state_only_for_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = roles()
    kept: list[torch.optim.Optimizer] = []
    original = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *args: Any) -> Any:
        kept.append(self)
        return original(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(made, Plan((0, 1, 2), ("layer.1", "head")))
    held = {id(p) for p in kept[-1].state}
    names = {name for name, p in made.working.model.named_parameters() if id(p) in held}
    assert names == {name for part in ("layer.1", "head") for name in made.working.parts.shapes[part]}


def test_a_shallower_local_model_trains_the_layer_of_the_whole_one() -> None:
    made = roles()
    before = {name: p.detach().clone() for name, p in made.working.model.named_parameters()}
    _, after = train(made, Plan((0, 2), ("layer.0", "head")))
    own = {name for part in ("layer.0", "head") for name in made.working.parts.shapes[part]}
    assert {name for name in after if not torch.equal(before[name], after[name])} == own


def test_fedprox_is_half_mu_times_the_squared_distance_over_what_is_sent() -> None:
    """One step from the received weights has no pull; the second step's gradient gains mu (w - w_t)."""
    mu = 10.0
    made, reference = roles(proximal_mu=mu, batch_size=6), tiny_model(**QUIET)
    plan = Plan((0, 1, 2), ("layer.1", "head"), ("layer.1",), ("head",))
    shared = set(made.working.parts.shapes["layer.1"])
    batches = drawn_batches(made.trainer, np.arange(12))
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    own = [name for part in plan.train for name in made.working.parts.shapes[part]]
    for name, p in reference.named_parameters():
        p.requires_grad_(name in own)
    optimizer = torch.optim.AdamW(
        [
            {"params": [reference.get_parameter(n) for n in own if start[n].ndim > 1], "weight_decay": 0.01},
            {"params": [reference.get_parameter(n) for n in own if start[n].ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    for batch in batches:
        optimizer.zero_grad()
        made.trainer.task.loss(reference, batch).backward()
        for name in own:
            p = reference.get_parameter(name)
            if name in shared:
                p.grad += mu * (p.detach() - start[name])
        optimizer.step()
    weights = train(made, plan)[1]
    same(weights, dict(reference.named_parameters()))
    _, without = train(roles(batch_size=6), plan)
    name = "bert.encoder.layer.1.output.dense.weight"
    pulled, unpulled = ((w[name] - start[name]).norm() for w in (weights, without))
    assert pulled < unpulled


def test_dropout_comes_from_the_clients_own_stream() -> None:
    noisy = roles(model=tiny_model())
    start = {name: p.detach().clone() for name, p in noisy.working.model.named_parameters()}

    def restart() -> None:
        noisy.working.load(
            {
                part: (None, {n: start[n] for n in noisy.working.parts.shapes[part]})
                for part in noisy.working.parts.names
            }
        )

    first = train(noisy, full_plan(noisy))[0]
    restart()
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    again = train(noisy, full_plan(noisy))[0]
    assert first == again
    assert torch.equal(state, torch.random.get_rng_state()), "the global stream was touched"
    restart()
    other = train_round(noisy, full_plan(noisy), client="b").loss
    assert other != first


def test_steps_and_epochs_bound_the_round() -> None:
    told: list[tuple[int, int]] = []
    made = roles(epochs=3, steps=4, batch_size=5)
    reply = train_round(made, full_plan(made), callback=lambda s, t, *_: told.append((s, t)))
    assert reply.steps == 4
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    free = roles(epochs=3, batch_size=5)
    assert train_round(free, full_plan(free)).steps == 9


def test_a_loaded_part_is_copied_once() -> None:
    made = roles()
    one = {
        n: torch.full_like(t, 1.0)
        for n, t in part_tensors(made.working.model, made.working.parts, ["layer.0"]).items()
    }
    made.working.load({"layer.0": (5, one)})
    assert all(t.eq(1).all() for t in part_tensors(made.working.model, made.working.parts, ["layer.0"]).values())
    two = {n: torch.full_like(t, 2.0) for n, t in one.items()}
    made.working.load({"layer.0": (5, two)})
    assert all(
        t.eq(1).all() for t in part_tensors(made.working.model, made.working.parts, ["layer.0"]).values()
    ), "same tag, same tensors"
    train(made, Plan((0, 1, 2), ("layer.0",)))
    made.working.load({"layer.0": (5, one)})
    assert all(
        t.eq(1).all() for t in part_tensors(made.working.model, made.working.parts, ["layer.0"]).values()
    ), "trained since"


@pytest.fixture
def ask(tmp_path: Any) -> Callable[..., Any]:
    made = roles()
    start = {part: (0, tensors) for part, tensors in weights_of(made.working).items()}
    data = ClientData(sentences(), np.arange(12), sentences(), {}, Store(tmp_path))

    def call(plan: Plan, round: int, phase: Any = "train", dtype: str = "fp32") -> Any:
        versions = {part: 0 for part in plan.builds(made.working.parts) if part not in plan.keep}
        request = Request(round, "a", plan, phase, versions, {})
        runtime = replace(made, wire=Wire(make_codec(dtype)), dtype=dtype)
        work = Work(runtime, request, start, data, lambda *_: None)
        return drain(answer_request(work, EXCHANGES["weights"].handlers))

    return call


def test_a_client_sends_what_the_plan_sends_and_keeps_the_rest(ask: Callable[..., Any], tmp_path: Any) -> None:
    plan = Plan((0, 1, 2), ("layer.1", "layer.2", "head"), ("layer.1",), ("layer.2", "head"))
    reply = ask(plan, 0)
    assert set(reply.weights) == {"layer.1"}
    kept = Store(tmp_path).load(1)
    assert {name.split(".")[0] for name in kept} == {"bert", "cls"}
    assert not any("layer.1." in name for name in kept)
    start, after = (ask(plan, round, "evaluate").scores["a"]["loss"] for round in (-1, 0))
    assert after < start, "the kept parts are those of the round before"
    again = ask(plan, 1)
    assert ask(plan, 1).loss == again.loss, "a round that is run again starts from the round before"


def test_a_client_sends_in_the_wire_type(ask: Callable[..., Any]) -> None:
    reply = ask(Plan((0,), ("layer.0",), ("layer.0",)), 0, dtype="bf16")
    assert {t.dtype for t in reply.weights["layer.0"].values()} == {torch.bfloat16}


def test_what_a_message_left_out_is_kept_for_the_next(ask: Callable[..., Any], tmp_path: Any) -> None:
    """Two rounds send together what they made, but for the rest; a round that is run again sends the same."""
    plan, name = Plan((0,), ("layer.0",), ("layer.0",)), "bert.encoder.layer.0.output.dense.weight"
    before = weights_of(roles().working)["layer.0"][name]
    exact = [ask(plan, round).weights["layer.0"][name] - before for round in (0, 1)]
    sent = [dequantize(ask(plan, round, dtype="int8").weights["layer.0"])[name] for round in (0, 1)]
    rest = Store(tmp_path).residual.load(2)
    assert rest.keys() == roles().working.parts.shapes["layer.0"].keys()
    assert torch.allclose(sum(sent) + rest[name], sum(exact), atol=1e-6)
    assert rest[name].abs().max() < 1e-4, "half a step of the change, not of the weights"
    alone = dequantize(quantize({name: exact[1]}, "int8"))[name]
    assert not sent[1].equal(alone), "the second message holds the first one's rest"
    assert dequantize(ask(plan, 1, dtype="int8").weights["layer.0"])[name].equal(sent[1])


def test_floats_leave_nothing_on_the_client_s_disk(ask: Callable[..., Any], tmp_path: Any) -> None:
    ask(Plan((0,), ("layer.0",), ("layer.0",)), 0, dtype="fp16")
    assert not list(tmp_path.iterdir())
