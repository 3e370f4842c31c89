"""A split step against an unsplit one: same loss, same gradients, same weights, whatever the cut."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.client import trainer as client
from fedstrata.client.answer import ClientRuntime
from fedstrata.client.dropout import DropoutRng
from fedstrata.client.trainer import drain
from fedstrata.errors import UserError
from fedstrata.exchanges.cut_pass import CutPass
from fedstrata.models.cut import CutLayer, check_cut
from fedstrata.models.dropout import drawing
from fedstrata.models.families import SPLITTABLE
from fedstrata.models.parts import find_parts
from fedstrata.plan.plan import Plan
from fedstrata.server import layers as layers_module
from fedstrata.server.layers import LayerSettings, ServerLayers, SplitSession
from fedstrata.server.server import Server
from fedstrata.tasks import Task
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.clm import CausalLM
from fedstrata.tasks.mlm import masked_lm
from fedstrata.wire import activations as wire
from fedstrata.wire.codec import WireError
from fedstrata.wire.rows import RowForm
from fedstrata.wire.store import Store
from fedstrata.wire.stream_ends import PlainClient
from roles import drawn_batches, make_runtime, sentences, train_request, train_round, weights_of
from tiny import tiny_config, tiny_model, tokenizer

CUTS = [(0, 0), (1, 0), (0, 1), (1, 1)]
EXAMPLES = 12


def task_of(head: str) -> Task:
    if head == "classify":
        return Classify(0, ("eye", "heart", "kidney"))
    return CausalLM(0) if head == "clm" else masked_lm(tokenizer(), len(tokenizer()), 0.15, False)


def quiet(kind: str) -> dict[str, float]:
    """The config keys that turn an architecture's dropout off."""
    return {key: 0.0 for key, value in tiny_config(kind).to_dict().items() if "drop" in key and value == 0.1}


def made(kind: str, head: str, dtype: str = "fp32", dropout: bool = False, **train: Any) -> ClientRuntime:
    classes = {"num_labels": 3} if head == "classify" else {}
    model = tiny_model(kind, head, **({} if dropout else quiet(kind)), **classes)
    model.config.pad_token_id = 0
    settings = {"batch_size": 4, "learning_rate": 1e-2, "epochs": 2, **train}
    return make_runtime(model, task_of(head), dtype, **settings)


def split(runtime: ClientRuntime, lower: int = 0, upper: int = 0) -> Plan:
    parts = runtime.working.parts
    server = parts.layers(lower, parts.depth - upper)
    own = tuple(part for part in parts.names if part not in server)
    return Plan(tuple(range(parts.depth)), own, own, server=server)


def layers_of(runtime: ClientRuntime, plan: Plan, folder: Path, copies: bool = True) -> ServerLayers:
    server = Server(runtime.working.parts, weights_of(runtime.working), runtime.wire)
    settings = LayerSettings(plan.server, copies, 64, runtime.stream, Store(folder))
    return ServerLayers(runtime.working, server, settings, runtime.trainer.train, runtime.trainer.streams)


class Heard:
    """A link that listens."""

    def __init__(self, link: SplitSession) -> None:
        self.link = link
        self.begin = link.begin
        self.messages: list[tuple[str, dict[str, torch.Tensor]]] = []

    def forward(self, message: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._pass("forward", message)

    def backward(self, message: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._pass("backward", message)

    def _pass(self, way: str, message: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        reply = getattr(self.link, way)(message)
        self.messages += [(way + " up", message), (way + " down", reply)]
        return reply  # type: ignore[no-any-return]


def train_split(runtime: ClientRuntime, plan: Plan, folder: Path) -> tuple[float, dict[str, torch.Tensor], Heard]:
    """Round 0 of client "a" over the cut: the mean loss, all weights after it, and the messages."""
    layers = layers_of(runtime, plan, folder)
    layers.begin(0)
    link = Heard(layers.open(train_request(plan)))
    model_pass = CutPass(runtime.working, plan, link, CutLayer(link, PlainClient(runtime.stream)))
    index = np.arange(EXAMPLES)
    reply, _ = drain(runtime.trainer.run(train_request(plan), sentences(), index, model_pass, {}, lambda *_: None))
    layers.wait()
    return reply.loss, dict(runtime.working.model.named_parameters()), link


def train_whole(runtime: ClientRuntime) -> tuple[float, dict[str, torch.Tensor]]:
    parts = runtime.working.parts
    reply = train_round(runtime, Plan(tuple(range(parts.depth)), parts.names, parts.names))
    return reply.loss, dict(runtime.working.model.named_parameters())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        *((kind, head) for kind in SPLITTABLE if kind != "gpt2" for head in ("mlm", "classify")),
        ("gpt2", "clm"),
        ("gpt2", "classify"),
    ],
)
def test_a_split_round_is_an_unsplit_one_to_the_bit(
    kind: str, head: str, cut: tuple[int, int], tmp_path: Path
) -> None:
    whole = train_whole(made(kind, head))
    runtime = made(kind, head)
    start = copy.deepcopy(dict(runtime.working.model.named_parameters()))
    loss, weights, _ = train_split(runtime, split(runtime, *cut), tmp_path)
    assert loss == whole[0]
    assert equal(weights, whole[1])
    assert not any(
        torch.equal(weights[name], start[name]) for name in start if "layer" in name and "weight" in name
    )


def test_a_split_round_is_plain_pytorch(tmp_path: Path) -> None:
    """The reference: embeddings, layers and classifier of BERT called by hand, three optimizers, no cut."""
    model = tiny_model("bert", "classify", num_labels=3, **quiet("bert"))
    runtime = made("bert", "classify", epochs=1)
    batches = drawn_batches(runtime.trainer, np.arange(EXAMPLES))

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        rest = [p for p in module.parameters() if p.ndim == 1]
        groups = [
            {"params": [p for p in module.parameters() if p.ndim > 1]},
            {"params": rest, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, foreach=False)

    client = nn.ModuleList([model.bert.embeddings, model.bert.pooler, model.classifier])
    optimizers = [adam(client), adam(model.bert.encoder)]
    losses = []
    for batch in batches:
        mask = batch.inputs["attention_mask"]
        sent = model.bert.embeddings(batch.inputs["input_ids"])
        state = sent.detach().requires_grad_()
        away = (1 - mask[:, None, None].float()) * torch.finfo(torch.float32).min
        out = state
        for layer in model.bert.encoder.layer:
            out = layer(out, away)
        received = out.detach().requires_grad_()
        loss = nn.functional.cross_entropy(model.classifier(model.bert.pooler(received)), batch.targets)
        losses.append(loss.item())
        loss.backward()
        out.backward(received.grad)
        sent.backward(state.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    loss, weights, _ = train_split(runtime, split(runtime), tmp_path)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)


@contextmanager
def other_dice(model: Any, server: DropoutRng) -> Iterator[None]:
    """Inside, dropout from the first layer to the last draws from another stream than the rest."""
    inside = ExitStack()
    stack = model.bert.encoder.layer
    before = stack[0].register_forward_pre_hook(lambda *_: inside.enter_context(drawing(server.words)) and None)
    after = stack[-1].register_forward_hook(lambda *_: inside.close())
    yield
    before.remove()
    after.remove()


def test_with_dropout_and_the_same_streams_too(tmp_path: Path) -> None:
    whole, runtime = made("bert", "mlm", dropout=True), made("bert", "mlm", dropout=True)
    seed = runtime.trainer.streams.integer(0, "a", "dropout of the server")
    with other_dice(whole.working.model, DropoutRng(seed, torch.device("cpu"))):
        expected = train_whole(whole)
    loss, weights, _ = train_split(runtime, split(runtime), tmp_path)
    assert loss == expected[0]
    assert equal(weights, expected[1])
    assert loss != train_whole(made("bert", "mlm", dropout=True))[0], "the streams matter"


def test_what_crosses_the_cut_is_hidden_states_and_gradients_alone(tmp_path: Path) -> None:
    runtime = made("bert", "classify")
    batches = drawn_batches(runtime.trainer, np.arange(EXAMPLES))
    _, _, link = train_split(runtime, split(runtime), tmp_path)
    assert [way for way, _ in link.messages] == ["forward up", "forward down", "backward up", "backward down"] * 6
    for (way, message), batch in zip(link.messages, [b for b in batches for _ in range(4)], strict=True):
        what = "activations" if "forward" in way else "gradients"
        assert set(message) == {what} | ({"lengths"} if way == "forward up" else set())
        tokens = int(batch.inputs["attention_mask"].sum())
        assert message[what].shape == (tokens, 32)
        assert message[what].dtype == torch.float32
        assert tokens < batch.inputs["input_ids"].numel()
        assert not message[what].requires_grad
        if way == "forward up":
            assert message["lengths"].tolist() == batch.inputs["attention_mask"].sum(1).tolist()
    counted = link.link.traffic
    texts, tokens = 2 * EXAMPLES, 2 * int(sentences().tokens.lengths.sum())
    assert dict(counted) == wire.message_bytes(tokens, texts, 32, PLAIN, 6)
    assert sum(counted.values()) == 4 * tokens * 32 * 4 + 4 * texts


def test_the_gradient_that_comes_back_is_of_the_weights_before_the_step(tmp_path: Path) -> None:
    runtime, whole = (made("bert", "classify", epochs=1, steps=1, learning_rate=1.0) for _ in range(2))
    batch = drawn_batches(whole.trainer, np.arange(EXAMPLES))[0]
    states: list[torch.Tensor] = []
    whole.working.model.bert.embeddings.register_forward_hook(lambda *call: states.append(call[2]))
    loss = whole.trainer.task.loss(whole.working.model, batch)
    (gradient,) = torch.autograd.grad(loss, states)
    _, _, link = train_split(runtime, split(runtime), tmp_path)
    lengths = batch.inputs["attention_mask"].sum(1)
    assert torch.equal(link.messages[3][1]["gradients"], wire.pack(gradient, lengths))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_the_bits_cost_half_the_bytes_and_little_else(dtype: str, tmp_path: Path) -> None:
    exact = made("bert", "classify")
    loss, *_ = train_split(exact, split(exact), tmp_path / "exact")
    runtime = made("bert", "classify", dtype)
    rounded, _, link = train_split(runtime, split(runtime), tmp_path / "rounded")
    assert rounded == pytest.approx(loss, rel=0.05)
    assert rounded != loss
    tokens = 2 * int(sentences().tokens.lengths.sum())
    steps = 6 if dtype == "fp16" else 0
    assert sum(link.link.traffic.values()) == 4 * tokens * 32 * 2 + 4 * 2 * EXAMPLES + 2 * 4 * steps


FP16 = RowForm("fp16")
PLAIN = wire.StreamForm(RowForm(), RowForm())


def test_small_gradients_survive_fp16() -> None:
    small = torch.full((1, 3, 4), 1e-12)
    small[0, 0, 0] = 3e-10
    lengths = torch.tensor([3])
    message = wire.encode_gradients(small, lengths, FP16)
    assert torch.equal(small.half(), torch.zeros_like(small).half()), "without a scale they are gone"
    back = wire.decode_gradients(message, 3, 4, FP16)
    torch.testing.assert_close(back, small[0], rtol=1e-3, atol=0)
    nothing = wire.encode_gradients(torch.zeros(1, 3, 4), lengths, FP16)
    assert torch.equal(wire.decode_gradients(nothing, 3, 4, FP16), torch.zeros(3, 4))


def test_packing_leaves_padding_out_and_comes_back() -> None:
    states = torch.arange(24.0).reshape(2, 3, 4)
    lengths = torch.tensor([3, 1])
    packed = wire.pack(states, lengths)
    assert torch.equal(packed, torch.cat([states[0], states[1, :1]]))
    back = wire.unpack(packed, lengths)
    assert torch.equal(back[0], states[0])
    assert torch.equal(back[1], torch.cat([states[1, :1], torch.zeros(2, 4)]))
    assert wire.unpack(packed, lengths, 5).shape == (2, 5, 4)


def _states(tokens: int = 5, **changes: Any) -> dict[str, torch.Tensor]:
    return {"activations": torch.zeros(tokens, 32), "lengths": torch.tensor([3, 2], dtype=torch.int32), **changes}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (_states(4), "activations"),
        (_states(lengths=torch.tensor([3, 2])), "lengths"),
        (_states(lengths=torch.tensor([5, 0], dtype=torch.int32)), "from 1 to 64"),
        (_states(lengths=torch.tensor([70], dtype=torch.int32)), "from 1 to 64"),
        (_states(activations=torch.full((5, 32), torch.nan)), "not finite"),
        (_states(activations=torch.zeros(5, 32).half()), "float16"),
        (_states(input_ids=torch.zeros(5)), "input_ids"),
        ({}, "lengths"),
    ],
)
def test_nothing_that_comes_is_trusted(message: dict[str, torch.Tensor], complaint: str, tmp_path: Path) -> None:
    runtime = made("bert", "classify")
    plan = split(runtime)
    layers = layers_of(runtime, plan, tmp_path)
    link = layers.open(train_request(plan))
    with pytest.raises(WireError, match=complaint):
        link.forward(message)
    link.forward(_states())
    with pytest.raises(WireError, match="gradients"):
        link.backward({"gradients": torch.zeros(4, 32)})
    with pytest.raises(WireError, match="scale"):
        link.backward({"gradients": torch.zeros(5, 32), "scale": torch.ones(1)})


def test_the_layers_step_while_the_client_goes_on_and_nothing_overtakes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers' step is held back until the client has made its own; the next batch waits for it."""
    whole = train_whole(made("bert", "mlm"))
    runtime = made("bert", "mlm")
    seen: list[str] = []
    client_done = threading.Event()
    real_here, real_there = client.step_halves, layers_module.step

    def here(*arguments: Any) -> None:
        real_here(*arguments)
        seen.append("client")
        client_done.set()

    def there(optimizer: Any, rate: float) -> None:
        assert client_done.wait(30)
        client_done.clear()
        real_there(optimizer, rate)
        seen.append("layers")

    monkeypatch.setattr(client, "step_halves", here)
    monkeypatch.setattr(layers_module, "step", there)
    loss, weights, _ = train_split(runtime, split(runtime), tmp_path)
    assert seen == ["client", "layers"] * 6
    assert loss == whole[0]
    assert equal(weights, whole[1])


def test_other_architectures_are_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="'modernbert' cannot be split; expected one of: bert, roberta"):
        check_cut(find_parts(tiny_model("modernbert")))


def test_layers_of_the_server_stand_together() -> None:
    parts = made("bert", "mlm").working.parts
    Plan((0, 1, 2), ("embeddings", "head"), server=("layer.1", "layer.2")).check(parts)
    with pytest.raises(ValueError, match="are not adjacent"):
        Plan((0, 1, 2), ("head",), server=("layer.0", "layer.2")).check(parts)
    with pytest.raises(ValueError, match="is not built"):
        Plan((0, 1, 2), ("layer.1",), server=("layer.1",)).check(parts)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(("way", "sent"), [("forward", 3e38), ("backward", 3e38)])
def test_numbers_that_outgrow_the_layers_do_not_reach_other_clients(
    way: str, sent: float, copies: bool, tmp_path: Path
) -> None:
    """Finite on the wire; what the layers would make of them is not, and all clients may share the layers."""
    runtime = made("bert", "classify")
    plan = split(runtime)
    layers = layers_of(runtime, plan, tmp_path, copies)
    layers.begin(0)
    link = layers.open(train_request(plan))
    before = copy.deepcopy(layers.replicas[0].held)
    if way == "backward":
        link.forward(_states(activations=torch.randn(5, 32)))
    name = {"forward": "activations", "backward": "gradients"}[way]
    message = {name: torch.full((5, 32), sent) * torch.randn(5, 32).sign()}
    if way == "forward":
        message["lengths"] = torch.tensor([3, 2], dtype=torch.int32)
    with pytest.raises(WireError, match=f"{name}: the server's layers make of them what is not finite"):
        getattr(link, way)(message)
    layers.wait()
    assert equal(layers.replicas[0].held, before)
    link.forward(_states(activations=torch.randn(5, 32)))
    link.backward({"gradients": torch.randn(5, 32)})
    layers.wait()
    assert all(bool(tensor.isfinite().all()) for tensor in layers.replicas[0].held.values())
    assert not equal(layers.replicas[0].held, before)
