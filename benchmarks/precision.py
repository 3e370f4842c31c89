"""bf16 against fp32: the time of a client's step over widths, tokens in a batch and threads.

    python benchmarks/precision.py --json precision.json

Two layers of BERT with random weights and a classifier, all of them trained, one client, steps of fp32 and bf16 in
turn; printed is the median time in bf16 as a share of that in fp32. From this grid comes what
``train.precision = "auto"`` takes, in :mod:`fedstrata.client.precision`. Steps of more than
1024 x 768 x 768 are left out: they take seconds, and bf16 wins there wherever it wins at all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from fedstrata.client.model_pass import WholePass
from fedstrata.client.trainer import Trainer
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.tokens import Tokens
from fedstrata.job.tables import Train
from fedstrata.models.parts import find_parts
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Examples
from fedstrata.tasks.classify import Classify

WIDTHS = (64, 128, 256, 384, 768, 1024)
SHAPES = ((8, 16), (8, 48), (8, 128), (32, 64), (32, 128))
"""Texts and tokens of each."""
MOST_WORK = 1024 * 768**2


def steps(width: int, texts: int, tokens: int, precision: str) -> Iterator[float]:
    """Seconds of one step after the other, without end."""
    config = transformers.BertConfig(
        vocab_size=1000, num_hidden_layers=2, hidden_size=width, num_attention_heads=width // 32, num_labels=4,
        intermediate_size=4 * width,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    parts, rng = find_parts(model), np.random.default_rng(0)
    ids = rng.integers(5, 1000, texts * tokens).astype(np.int32)
    offsets = np.arange(texts + 1, dtype=np.int64) * tokens
    examples = Examples(Tokens(ids, offsets, np.arange(texts)), rng.integers(0, 4, texts))
    plan = Plan((0, 1), parts.names, parts.names)
    train = Train(device="cpu", batch_size=texts, epochs=1000, precision=precision)  # type: ignore[arg-type]
    working = WorkingModel(model, parts, bf16=precision == "bf16")
    trainer = Trainer(working, Classify(0, tuple("abcd")), train, Streams(0))
    request = Request(0, "a", plan, "train", {}, {})
    running = trainer.run(request, examples, np.arange(texts), WholePass(working, plan), {}, lambda *_: None)
    while True:
        started = time.perf_counter()
        next(running)
        yield time.perf_counter() - started


def ratio(width: int, texts: int, tokens: int, repeat: int) -> tuple[float, float]:
    """Median seconds of a step in fp32 and in bf16."""
    both = [steps(width, texts, tokens, precision) for precision in ("fp32", "bf16")]
    taken = [[next(one) for one in both] for _ in range(repeat + 2)][2:]
    fp32, bf16 = (statistics.median(column) for column in zip(*taken, strict=True))
    return fp32, bf16


def main() -> None:
    """Measure the grid, print it, write it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    options.add_argument("--repeat", type=int, default=5)
    chosen = options.parse_args()
    figures, table = [], Table("threads", "width", *(f"{texts} x {tokens}" for texts, tokens in SHAPES))
    for threads, width in itertools.product(chosen.threads, chosen.widths):
        torch.set_num_threads(threads)
        row = []
        for texts, tokens in SHAPES:
            if texts * tokens * width**2 > MOST_WORK:
                row.append("")
                continue
            fp32, bf16 = ratio(width, texts, tokens, chosen.repeat)
            row.append(f"{bf16 / fp32:.2f}")
            figures.append(
                {"threads": threads, "width": width, "texts": texts, "tokens": tokens, "fp32": fp32, "bf16": bf16}
            )
        table.add_row(str(threads), str(width), *row)
        print(threads, width, *row, flush=True)
    Console().print(table)
    if chosen.json:
        chosen.json.write_text(json.dumps({"torch": torch.__version__, "steps": figures}, indent=1))


if __name__ == "__main__":
    main()
