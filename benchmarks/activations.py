"""What the codecs of activations cost split learning: bytes of the stream and held-out loss; and what moves.

    python benchmarks/activations.py MODEL TRAIN TEST --task classify --seeds 3 --json activations.json
    python benchmarks/activations.py MODEL TRAIN.txt TEST.txt --forms "fp16;int4" --moved

FedBERT (``share``) trains MODEL at two clients, in two rounds of several epochs each, with hidden states and
gradients in each of the forms below. Bytes are those of the ledger, beside fp16's with all tokens. A form is equal
to fp16 where the upper end of the one-sided 95 % interval of its loss less fp16's, paired by seeds, stays below
the margin. Thresholds and densities are to be chosen on other rows than those that the verdict is about.

With ``--moved`` the same texts are passed through the model's first layer epoch by epoch while all of it is
trained, and the share of the tokens is counted whose hidden states, and whose gradients by them, moved by more
than a threshold since the epoch before: what a cache of each example can save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy import stats
from transformers import AutoModelForMaskedLM, AutoTokenizer

import fedstrata

INT4 = {"activations": "int4"}
FORMS: dict[str, dict[str, Any]] = {
    "fp16": {"activations": "fp16"},
    "int8": {"activations": "int8"},
    "int4": INT4,
    "int4, 50 % of the channels": {**INT4, "activations_density": 0.5},
    "int4, 25 % of the channels": {**INT4, "activations_density": 0.25},
    "int4, 10 % of the channels": {**INT4, "activations_density": 0.1},
    "fp16, changed 0": {"activations": "fp16", "activations_changed": 0.0},
    "int8, changed 0.1": {"activations": "int8", "activations_changed": 0.1},
    "int4, changed 0.05": {**INT4, "activations_changed": 0.05},
    "int4, changed 0.1": {**INT4, "activations_changed": 0.1},
    "int4, changed 0.2": {**INT4, "activations_changed": 0.2},
    "int4, changed 0.1, gradients 50 %": {**INT4, "activations_changed": 0.1, "gradients_density": 0.5},
    "int4, changed 0.2, gradients 50 %": {**INT4, "activations_changed": 0.2, "gradients_density": 0.5},
    "int4, changed 0.2, gradients 25 %": {**INT4, "activations_changed": 0.2, "gradients_density": 0.25},
}
"""Name -> keys of ``[wire]``; "changed": ``activations_changed``."""
MARGIN = 0.02
"""Nats by which an equal form's held-out loss may be above fp16's."""
THRESHOLDS = (0.01, 0.03, 0.1, 0.3, 1.0)


def job(options: argparse.Namespace, form: dict[str, Any], seed: int, folder: str) -> dict[str, Any]:
    """The job of one run."""
    rows = {"train": options.train, "test": options.test, "limit": options.rows}
    if options.task == "mlm":
        rows["long_text"] = "pack"
    return {
        "model": {"name": options.model},
        "task": {"kind": options.task},
        "data": {**rows, **({"text": options.text, "label": options.label} if options.task != "mlm" else {})},
        "clients": {"count": 2},
        "method": {"name": "fedbert", "mode": "share", "lower": options.lower, "rounds": 2},
        "train": {
            "epochs": options.epochs,
            "batch_size": options.batch,
            "max_tokens": options.tokens,
            "seed": seed,
            "learning_rate": options.rate,
            "dropout": options.dropout,
        },
        "wire": form,
        "server": {"evaluate": "end"},
        "output": {"dir": folder},
    }


def run_form(options: argparse.Namespace, form: dict[str, Any], seed: int) -> dict[str, float]:
    """Bytes of the stream in training, the held-out loss and the seconds of a run."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = fedstrata.run(job(options, form, seed, f"{folder}/run"))
        seconds = time.perf_counter() - started
        stream = ("activations", "gradients")
        moved = [line for line in result.transfers if line["phase"] == "train" and line["part"] in stream]
        ways = {
            f"{way} {part}": sum(
                line["bytes"] for line in moved if (line["direction"], line["part"]) == (way, part)
            )
            for way in ("up", "down")
            for part in stream
        }
        return {"bytes": sum(ways.values()), **ways, "loss": result.score["loss"], "seconds": round(seconds, 1)}


def moved_shares(options: argparse.Namespace, masks: bool, dropout: bool) -> dict[str, list[float]]:
    """Share of the tokens that moved by more than each threshold since the epoch before, over 3 epochs."""
    torch.manual_seed(0)
    model: Any = AutoModelForMaskedLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(Path(options.train).read_text("utf-8")[:100_000], return_tensors="pt")["input_ids"][0]
    texts = ids[: 32 * 32].view(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    before: dict[tuple[str, int], torch.Tensor] = {}
    counts = {what: torch.zeros(len(THRESHOLDS)) for what in ("states", "gradients")}
    for epoch in range(4):
        for start in range(0, len(texts), 8):
            batch = texts[start : start + 8]
            drawn = torch.rand(batch.shape) < 0.15
            inputs = torch.where(drawn, tokenizer.mask_token_id, batch) if masks else batch
            model.train(dropout)
            out = model(inputs, labels=torch.where(drawn, batch, -100), output_hidden_states=True)
            states = out.hidden_states[options.lower]
            states.retain_grad()
            out.loss.backward()
            for what, rows in (("states", states.detach()), ("gradients", states.grad)):
                if epoch:
                    old = before[what, start]
                    change = (rows - old).norm(dim=-1) / old.norm(dim=-1)
                    counts[what] += torch.stack([(change > t).float().mean() for t in THRESHOLDS]) / 12
                before[what, start] = rows
            optimizer.step()
            optimizer.zero_grad()
    return {what: shares.tolist() for what, shares in counts.items()}


def main() -> None:
    """Run the forms and seeds that the JSON file lacks, then count what moves, and print both tables."""
    options = parsed()
    path: Path | None = options.json
    found: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {"forms": {}, "moved": {}}

    def keep() -> None:
        if path:
            path.write_text(json.dumps(found, indent=1))

    for seed in range(options.seeds):
        for name in options.forms:
            runs = found["forms"].setdefault(name, {})
            if str(seed) not in runs:
                runs[str(seed)] = run_form(options, FORMS[name], seed)
                print(name, seed, runs[str(seed)], flush=True)
                keep()
    if options.moved:
        for masks, dropout in ((True, True), (True, False), (False, True), (False, False)):
            what = f"{'new masks' if masks else 'no masks'}, {'dropout' if dropout else 'no dropout'}"
            found["moved"][what] = moved_shares(options, masks, dropout)
            keep()
    show(found)


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model, for mlm with a head")
    parser.add_argument("train", help="rows with columns text and label; for mlm plain text")
    parser.add_argument("test", help="the same, held out")
    parser.add_argument("--task", choices=("mlm", "classify"), default="mlm")
    parser.add_argument("--text", default="text", help="the text's column")
    parser.add_argument("--label", default="label", help="the label's column")
    parser.add_argument("--forms", default="", help="names of forms with ; between them; default: all")
    parser.add_argument("--lower", type=int, default=0, help="layers at the client below the server's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="of each client in each of two rounds")
    parser.add_argument("--rows", type=int, default=320, help="that are read of each file")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of a text")
    parser.add_argument("--rate", type=float, default=1e-4, help="the learning rate")
    parser.add_argument(
        "--dropout", action="store_true", help="with the model's dropout, under which all states move"
    )
    parser.add_argument("--moved", action="store_true", help="count what moves, too (mlm)")
    parser.add_argument("--json", type=Path, help="also keep the figures there, and go on from them")
    options = parser.parse_args()
    options.forms = [name.strip() for name in options.forms.split(";")] if options.forms else list(FORMS)
    if unknown := set(options.forms) - FORMS.keys():
        parser.error(f"--forms: {', '.join(sorted(unknown))}: expected some of: {'; '.join(FORMS)}")
    return options


def show(found: dict[str, Any]) -> None:
    """Both tables."""
    table = Table("form", "share of fp16's bytes", "loss", "loss - fp16's", f"equal within {MARGIN}")
    first = found["forms"].get("fp16", {})
    for name, runs in found["forms"].items():
        seeds = sorted(first.keys() & runs.keys())
        if not seeds:
            continue
        more = [runs[seed]["loss"] - first[seed]["loss"] for seed in seeds]
        share = sum(runs[s]["bytes"] for s in seeds) / sum(first[s]["bytes"] for s in seeds)
        mean, words = statistics.mean(more), f"{statistics.mean(more):+.4f}"
        verdict = ""
        if len(more) > 1:
            spread = statistics.stdev(more)
            upper = mean + float(stats.t.ppf(0.95, len(more) - 1)) * spread / len(more) ** 0.5
            words += f" ± {spread:.4f}"
            verdict = f"{'yes' if upper < MARGIN else 'no'} (upper end {upper:+.4f})"
        table.add_row(
            name, f"{share:.1%}", f"{statistics.mean(runs[s]['loss'] for s in seeds):.4f}", words, verdict
        )
    moved = Table("moved by more than", "", *(f"{threshold:.0%}" for threshold in THRESHOLDS))
    for what, each in found["moved"].items():
        for rows, shares in each.items():
            moved.add_row(what, rows, *(f"{share:.1%}" for share in shares))
    console = Console(width=110)
    console.print(table)
    if found["moved"]:
        console.print(moved)


if __name__ == "__main__":
    main()
