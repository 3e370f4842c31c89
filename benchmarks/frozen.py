"""Time of an epoch over a frozen encoder, with and without the feature cache.

    python benchmarks/frozen.py --json frozen.json

For each head, in turn and over and over: an epoch on kept states; one that runs the encoder over each batch's
texts, those of one length together, as ``feature_cache_gb = 0`` does; and one that runs it over padded batches, as
a plain loop would. A ratio is the median of the ratios within a turn. The first epoch also fills the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from fedstrata.client.feature_cache import FeatureCache
from fedstrata.client.model_pass import plain_pass
from fedstrata.client.precision import resolve_precision
from fedstrata.client.trainer import Trainer, drain
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.tokens import Tokens
from fedstrata.job.tables import Train
from fedstrata.models.heads import BRANCHES, KEY, HeadConfig, HeadedModel
from fedstrata.models.parts import find_parts
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Examples
from fedstrata.tasks.classify import Classify

SIZES = {"base": (12, 768, 12), "small": (6, 384, 12), "tiny": (4, 32, 2)}
"""Layers, width, heads."""
CLASSES, VOCABULARY = 3, 30_522


def texts(count: int, longest: int) -> Examples:
    """Random texts of 5 to ``longest`` tokens, most of them short, like tweets."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(2.0, longest / 6, count), 5, longest).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(1000, VOCABULARY, int(offsets[-1])).astype(np.int32)
    return Examples(Tokens(ids, offsets, np.arange(count)), rng.integers(0, CLASSES, count))


def cases(
    head: str, size: str, examples: Examples, batch: int, folder: Path
) -> tuple[float, dict[str, Callable[[], float]]]:
    """Seconds to fill the cache, and for one epoch of each kind."""
    layers, width, heads = SIZES[size]
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=CLASSES,
    )
    setattr(config, KEY, asdict(HeadConfig(head)))
    train = Train(
        device="cpu",
        batch_size=batch,
        learning_rate=1e-6,
        precision=resolve_precision("auto", "cpu"),  # type: ignore[arg-type]
        feature_cache_gb=1000,
    )
    model, task = HeadedModel.from_config(config), Classify(0, tuple("abc"))
    trainer = Trainer(
        WorkingModel(model, find_parts(model), bf16=train.precision == "bf16"), task, train, Streams(0)
    )
    plan, index = Plan(tuple(range(layers)), ("head",), ("head",), freeze_encoder=True), np.arange(len(examples))
    started = time.perf_counter()
    cached = FeatureCache(trainer.working, task, train, examples, index, folder / head)
    filled = time.perf_counter() - started
    nowhere = train.model_copy(update={"feature_cache_gb": 0.0})
    uncached = FeatureCache(trainer.working, task, nowhere, examples, index, folder / head)

    def epoch(cache: FeatureCache | None) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            model_pass, request = plain_pass(trainer.working, plan, cache), Request(0, "a", plan, "train", {}, {})
            drain(trainer.run(request, examples, index, model_pass, {}, _quiet))
            return time.perf_counter() - started

        return run

    return filled, {"kept": epoch(cached), "computed": epoch(uncached), "padded": epoch(None)}


def _quiet(step: int, steps: int, loss: float, seen: int) -> None:
    """Ignore progress."""


def main() -> None:
    """Measure, print a table, write the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--size", choices=SIZES, default="base")
    options.add_argument("--examples", type=int, default=256)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--repeat", type=int, default=3)
    chosen = options.parse_args()
    torch.manual_seed(0)
    examples = texts(chosen.examples, chosen.tokens)
    mean = examples.tokens.lengths.mean()
    table = Table(
        "head",
        "kept, s",
        "computed, s",
        "padded, s",
        "computed / kept",
        "padded / kept",
        "to fill, s",
        title=f"an epoch, BERT-{chosen.size}, {len(examples)} texts of {mean:.0f} tokens",
    )
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for head in BRANCHES:
            filled, ways = cases(head, chosen.size, examples, chosen.batch, Path(folder))
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(-1, chosen.repeat):
                for name, epoch in ways.items():
                    taken = epoch()
                    if turn >= 0:
                        seconds[name].append(taken)
            figure = {"head": head, "fill": filled}
            figure |= {name: statistics.median(each) for name, each in seconds.items()}
            for name in ("computed", "padded"):
                pairs = zip(seconds[name], seconds["kept"], strict=True)
                figure[f"{name}_ratio"] = statistics.median(slow / fast for slow, fast in pairs)
            figures.append(figure)
            table.add_row(
                head,
                *(f"{figure[name]:.3f}" for name in ("kept", "computed", "padded")),
                *(f"{figure[name]:.1f}" for name in ("computed_ratio", "padded_ratio", "fill")),
            )
    Console().print(table)
    if chosen.json:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), **vars(chosen)}
        chosen.json.write_text(json.dumps({"about": {**about, "json": None}, "heads": figures}, indent=1))


if __name__ == "__main__":
    main()
