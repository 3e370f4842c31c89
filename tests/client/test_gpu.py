"""What a GPU must not wait for, shown on the meta device, from which nothing can be read; and rounds on a GPU.

Whole runs on a GPU, and on one that is pretended, are in ``tests/runs/test_runs_on_gpu.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.client import trainer
from fedstrata.client.dropout import DropoutRng
from fedstrata.client.model_pass import WholePass
from fedstrata.client.trainer import LOSS_EVERY, newest_loss
from fedstrata.models import attention
from fedstrata.plan.plan import Plan
from fedstrata.plan.sharing import Sharing
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import masked_lm
from fedstrata.wire.packing import pack_codes, unpack_codes
from fedstrata.wire.partial import filled
from roles import make_runtime, sentences, train_request, train_round
from tiny import tiny_model, tokenizer

META = torch.device("meta")
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_loss_elsewhere_is_read_only_every_so_many_steps() -> None:
    here = [torch.tensor(float(step)) for step in range(40)]
    away = [torch.empty((), device=META) for _ in range(40)]
    for count in range(1, 41):
        assert newest_loss(here[:count], -1.0) == count - 1
        if count % LOSS_EVERY == 1:
            with pytest.raises((RuntimeError, NotImplementedError)):
                newest_loss(away[:count], 0.5)
        else:
            assert newest_loss(away[:count], 0.5) == 0.5


def test_the_seconds_of_a_round_end_when_its_losses_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the steps since the last loss that was read are still under way then."""
    clock = [0.0]

    def waiting(tensor: torch.Tensor) -> Any:
        clock[0] += 7.0
        return tolist(tensor)

    tolist = torch.Tensor.tolist
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(torch.Tensor, "tolist", waiting)
    runtime = make_runtime(tiny_model(**QUIET), masked_lm(tokenizer(), len(tokenizer()), 0.3, False))
    assert train_round(runtime, Plan((0, 1, 2), runtime.working.parts.names)).seconds == 7.0


def test_places_of_predictions_go_as_indices() -> None:
    task = masked_lm(tokenizer(), len(tokenizer()), 0.3, False)
    batch = task.batch(sentences(), np.arange(6), np.random.default_rng(0), None)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(META)
    assert isinstance(batch.positions, torch.Tensor)
    assert isinstance(moved.positions, tuple)
    assert [index.device for index in moved.positions] == [META, META]
    assert {len(index) for index in moved.positions} == {int(batch.positions.sum())}
    assert moved.targets.device == META


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "modernbert", "gpt2"])
def test_a_models_passes_read_nothing(kind: str) -> None:
    """Not whether any of a batch's texts is padded, which transformers would ask of the mask."""
    tasks = {"classify": Classify(0, ("eye", "heart", "kidney"))}
    if kind != "gpt2":
        tasks["mlm"] = masked_lm(tokenizer(), len(tokenizer()), 0.3, False)  # type: ignore[assignment]
    for head, task in tasks.items():
        runtime = make_runtime(tiny_model(kind, head=head, pad_token_id=0), task)
        runtime.working.model.to(META)
        batch = task.batch(sentences(), np.arange(6), np.random.default_rng(0)).to(META)
        loss = task.loss(runtime.working.model.train(), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.device == META


@pytest.mark.parametrize(("device", "asked"), [(META, False), (torch.device("cpu"), True)])
def test_only_on_a_processor_a_mask_is_asked_whether_anything_is_padded(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, asked: bool
) -> None:
    seen: list[bool] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(options["allow_is_bidirectional_skip"])
        return sdpa_mask(*arguments, **options)

    sdpa_mask = attention.sdpa_mask
    monkeypatch.setattr(attention, "sdpa_mask", noted)
    task = Classify(0, ("eye", "heart", "kidney"))
    runtime = make_runtime(tiny_model(head="classify", num_labels=3), task)
    runtime.working.model.to(device)
    task.loss(runtime.working.model, task.batch(sentences(), np.arange(6), np.random.default_rng(0)).to(device))
    assert seen == [asked]


def test_packed_numbers_are_read_where_they_are() -> None:
    codes = torch.arange(7, dtype=torch.uint8, device=META)
    assert unpack_codes(pack_codes(codes, 4), 7, 4).device == META


def test_rows_that_travelled_are_put_where_the_part_is() -> None:
    """A client's own are on its GPU, and the part that it received is not."""
    sharing = Sharing(narrowed=frozenset({"table"}), listed=(1, 3))
    whole = filled({"table": torch.ones(2, 4)}, {"table": torch.empty(5, 4, device=META)}, sharing)
    assert (whole["table"].device, whole["table"].shape) == (META, (5, 4))


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_gpu() -> None:
    """From the second step to the next at which the loss is read."""
    for task, head in (
        (masked_lm(tokenizer(), len(tokenizer()), 0.3, False), "mlm"),
        (Classify(0, ("eye", "heart", "kidney")), "classify"),
    ):
        runtime = make_runtime(tiny_model(head=head, num_labels=3), task, batch_size=2, epochs=3, device="cuda")
        runtime.working.model.to("cuda")
        plan = Plan((0, 1, 2), runtime.working.parts.names)
        steps = runtime.trainer.run(
            train_request(plan), sentences(), np.arange(12), WholePass(runtime.working, plan), {}, lambda *_: None
        )
        next(steps)
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(LOSS_EVERY - 2):
                next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum(1 for _ in steps) == 18 - LOSS_EVERY + 1


@needs_gpu
def test_dropout_on_a_gpu_is_a_stream_of_its_own() -> None:
    device, ones = torch.device("cuda", 0), torch.ones(4096, device="cuda")

    def masks(stream: DropoutRng) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            with stream.fork():
                found.append(torch.nn.functional.dropout(ones, 0.5))
            torch.nn.functional.dropout(ones, 0.5)  # what others draw in between
        return found

    before = torch.cuda.get_rng_state(device)
    with DropoutRng(1, device).fork():
        torch.nn.functional.dropout(ones, 0.5)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    first, again, other = masks(DropoutRng(1, device)), masks(DropoutRng(1, device)), masks(DropoutRng(2, device))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


@needs_gpu
def test_a_round_on_a_gpu_is_that_of_the_cpu() -> None:
    task = masked_lm(tokenizer(), len(tokenizer()), 0.3, False)
    losses = []
    for device in ("cpu", "cuda"):
        runtime = make_runtime(tiny_model(**QUIET), task, batch_size=2, device=device)
        runtime.working.model.to(device)
        plan = Plan((0, 1, 2), runtime.working.parts.names)
        losses.append(train_round(runtime, plan, np.arange(12), "a").loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
