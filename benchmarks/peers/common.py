"""What every peer reads and writes, so that all of them train the same model on the same batches.

The folder of a workload (made by ``benchmarks/workloads.py``) is named by ``$WORK``; results go to ``$OUT``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

WORK, OUT = Path(os.environ["WORK"]), Path(os.environ["OUT"])
WORKLOAD = json.loads((WORK / "workload.json").read_text("utf-8"))
"""kind, device, clients, rounds, steps, batch_size, learning_rate, max_tokens, pad_id, mask_id, vocabulary, …"""
DEVICE = WORKLOAD["device"]
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def load_model() -> Any:
    """The start model, with its head, on the device."""
    auto = {"classify": transformers.AutoModelForSequenceClassification, "mlm": transformers.AutoModelForMaskedLM}
    return auto[WORKLOAD["kind"]].from_pretrained(WORK / "start").to(DEVICE)


def to_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch on the device, from pinned memory, so that nothing waits for the copy."""
    if DEVICE == "cpu":
        return batch
    pinned = {name: tensor if tensor.is_cuda else tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in pinned.items()}


def autocast() -> torch.autocast:
    """bf16 on a GPU, as FedStrata has it there by default."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE != "cpu")


@cache
def arrays(which: str) -> dict[str, np.ndarray]:
    """``ids``, ``offsets`` and ``labels`` of the training or test examples, tokenized beforehand."""
    with np.load(WORK / f"{which}.npz") as found:
        return dict(found)


@cache
def plan() -> dict[str, Any]:
    """``batches``: [round][client] -> its steps, each a list of examples; ``plans``, and ``of`` whom they are."""
    found: dict[str, Any] = json.loads((WORK / "plan.json").read_text("utf-8"))
    return found


def tensors(which: str, index: Iterable[int]) -> dict[str, torch.Tensor]:
    """Examples as a batch padded to its longest."""
    held = arrays(which)
    rows = [held["ids"][held["offsets"][i] : held["offsets"][i + 1]] for i in index]
    ids = np.full((len(rows), max(map(len, rows))), WORKLOAD["pad_id"], np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    if WORKLOAD["kind"] == "classify":
        batch["labels"] = torch.from_numpy(held["labels"][list(index)])
    return batch


def mask_tokens(batch: dict[str, torch.Tensor], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """BERT's masking: 15 % of the tokens are predicted; of these 80 % are masked and 10 % replaced."""
    ids = batch["input_ids"].clone()
    special = (batch["attention_mask"] == 0) | torch.isin(ids, torch.tensor(WORKLOAD["special_ids"]))
    chosen = (torch.rand(ids.shape, generator=rng) < 0.15) & ~special
    labels = ids.masked_fill(~chosen, -100)
    draw = torch.rand(ids.shape, generator=rng)
    ids[chosen & (draw < 0.8)] = WORKLOAD["mask_id"]
    other = chosen & (draw >= 0.9)
    ids[other] = torch.randint(WORKLOAD["vocabulary"], (int(other.sum()),), generator=rng)
    return {**batch, "input_ids": ids, "labels": labels}


def groups(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """AdamW's groups as usual: no decay on biases and norms."""
    held = list(parameters)
    return [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in held if p.ndim <= 1], "weight_decay": 0.0},
    ]


def train_client(model: Any, round: int, client: int) -> None:
    """A client's steps on the whole model, in place: AdamW anew, ready batches of similar length."""
    optimizer = torch.optim.AdamW(groups(model.parameters()), lr=WORKLOAD["learning_rate"], fused=True)
    model.train()
    for index in plan()["batches"][round][client]:
        with autocast():
            loss = model(**to_device(tensors("train", index))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.inference_mode()
@autocast()
def score(model: Any) -> float:
    """Accuracy on the test examples, or the loss at masked positions; batches of one length after the other."""
    model.eval()
    lengths = np.diff(arrays("test")["offsets"])
    order = np.argsort(lengths, kind="stable")
    size, total, count = 2 * WORKLOAD["batch_size"], 0.0, 0
    rng = torch.Generator().manual_seed(0)
    for start in range(0, len(order), size):
        batch = tensors("test", order[start : start + size])
        if WORKLOAD["kind"] == "mlm":
            batch = mask_tokens(batch, rng)
            predicted = int((batch["labels"] != -100).sum())
            if predicted:
                total += float(model(**to_device(batch)).loss) * predicted
            count += predicted
        else:
            labels = batch.pop("labels")
            total += int((model(**to_device(batch)).logits.argmax(-1).cpu() == labels).sum())
            count += len(labels)
    return total / count


def finish(model: Any, started: float | None = None, **more: Any) -> None:
    """Score the final model, save its weights, write the result."""
    seconds = None if started is None else time.perf_counter() - started
    result = {"score": score(model), "train_seconds": seconds, **more}
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, OUT / "final.safetensors")
    (OUT / "result.json").write_text(json.dumps(result), "utf-8")
