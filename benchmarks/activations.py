"""What few bits and few channels cost split learning: bytes of the stream and held-out loss; and what moves.

    python benchmarks/activations.py MODEL TRAIN.txt TEST.txt --seeds 3 --json activations.json

FedBERT (``share``) further pre-trains MODEL on plain text at two clients, its first layer at them, with hidden
states and gradients in each of the forms below. Bytes are those of the ledger, beside fp16's.

Then the same texts are passed through the clients' lower layers epoch by epoch while the whole model is trained,
with masks drawn anew as MLM does and without masks, and the share of the tokens' states is counted that moved by
more than a threshold since the epoch before: what a cache of each example at the server could save of the states
on the way up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForMaskedLM, AutoTokenizer

import fedstrata

FORMS: dict[str, dict[str, Any]] = {
    "fp16": {"activations": "fp16"},
    "int8": {"activations": "int8"},
    "int4": {"activations": "int4"},
    "int8, 25 % of the channels": {"activations": "int8", "activations_density": 0.25},
    "int4, 25 % of the channels": {"activations": "int4", "activations_density": 0.25},
    "int4, gradients 10 % of theirs": {"activations": "int4", "gradients_density": 0.1},
    "int4, 10 % of the channels": {"activations": "int4", "activations_density": 0.1},
}
"""Name -> keys of ``[wire]``."""
THRESHOLDS = (0.01, 0.03, 0.1, 0.3)


def job(options: argparse.Namespace, form: dict[str, Any], seed: int, folder: str) -> dict[str, Any]:
    """The job of one run."""
    return {
        "model": {"name": options.model},
        "task": {"kind": "mlm"},
        "data": {"train": options.train, "test": options.test, "limit": options.rows, "long_text": "pack"},
        "clients": {"count": 2},
        "method": {"name": "fedbert", "mode": "share", "lower": 1, "rounds": 2},
        "train": {
            "steps": options.steps // 4,
            "batch_size": 16,
            "max_tokens": 64,
            "seed": seed,
            "learning_rate": 1e-4,
        },
        "wire": form,
        "server": {"evaluate": "end"},
        "output": {"dir": folder},
    }


def run_form(options: argparse.Namespace, form: dict[str, Any], seed: int) -> tuple[int, float]:
    """Bytes of the stream in training, and the held-out loss."""
    with tempfile.TemporaryDirectory() as folder:
        result = fedstrata.run(job(options, form, seed, f"{folder}/run"))
        stream = ("activations", "gradients")
        moved = [line for line in result.transfers if line["phase"] == "train" and line["part"] in stream]
        return sum(line["bytes"] for line in moved), result.score["loss"]


def moved_shares(options: argparse.Namespace, masks: bool, dropout: bool) -> list[float]:
    """Share of the tokens whose states after the first layer moved by more than each threshold, over 3 epochs."""
    torch.manual_seed(0)
    model: Any = AutoModelForMaskedLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(Path(options.train).read_text("utf-8")[:200_000], return_tensors="pt")["input_ids"][0]
    texts = ids[: 32 * 64].view(32, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before: dict[int, torch.Tensor] = {}
    counts, total = [0] * len(THRESHOLDS), 0
    for epoch in range(4):
        for start in range(0, len(texts), 16):
            batch = texts[start : start + 16]
            drawn = torch.rand(batch.shape) < 0.15
            inputs = torch.where(drawn, tokenizer.mask_token_id, batch) if masks else batch
            model.train(dropout)
            out = model(inputs, labels=torch.where(drawn, batch, -100), output_hidden_states=True)
            states = out.hidden_states[1].detach()
            if epoch:
                change = (states - before[start]).norm(dim=-1) / before[start].norm(dim=-1)
                counts = [n + int((change > t).sum()) for n, t in zip(counts, THRESHOLDS, strict=True)]
                total += change.numel()
            before[start] = states
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [n / total for n in counts]


def main() -> None:
    """Run all forms and seeds, then the count of what moves, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model with an MLM head")
    parser.add_argument("train", help="plain text, a paragraph on each line")
    parser.add_argument("test", help="plain text that is held out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of all clients and rounds together")
    parser.add_argument("--rows", type=int, default=1500, help="lines that are read of each text")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    found: dict[str, Any] = {"forms": {}, "moved": {}}
    for name, form in FORMS.items():
        runs = [run_form(options, form, seed) for seed in range(options.seeds)]
        found["forms"][name] = {"bytes": [size for size, _ in runs], "loss": [loss for _, loss in runs]}
        print(name, found["forms"][name], flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    for masks, dropout in ((True, True), (True, False), (False, True), (False, False)):
        what = f"{'new masks' if masks else 'no masks'}, {'dropout' if dropout else 'no dropout'}"
        found["moved"][what] = moved_shares(options, masks, dropout)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    show(found)


def show(found: dict[str, Any]) -> None:
    """Both tables."""
    table = Table("form", "share of fp16's bytes", "loss", "loss - fp16's")
    first = found["forms"]["fp16"]
    for name, figures in found["forms"].items():
        more = [loss - plain for loss, plain in zip(figures["loss"], first["loss"], strict=True)]
        spread = f" ± {statistics.stdev(more):.4f}" if len(more) > 1 else ""
        share = sum(figures["bytes"]) / sum(first["bytes"])
        table.add_row(
            name,
            f"{share:.1%}",
            f"{statistics.mean(figures['loss']):.4f}",
            f"{statistics.mean(more):+.4f}{spread}",
        )
    moved = Table("moved by more than", *(f"{threshold:.0%}" for threshold in THRESHOLDS))
    for what, shares in found["moved"].items():
        moved.add_row(what, *(f"{share:.1%}" for share in shares))
    console = Console(width=100)
    console.print(table)
    console.print(moved)


if __name__ == "__main__":
    main()
