"""Time of a split-learning step compared with an unsplit one, client and server in one process.

    python benchmarks/split.py --json steps.json

For each model: masked language modeling of random texts, the whole model and the model cut above its embeddings
in turn, step by step, with each wire type. A ratio is the median of the ratios within a turn. Bytes are those
of the four messages of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from fedstrata.client.model_pass import WholePass
from fedstrata.client.precision import resolve_precision
from fedstrata.client.trainer import Trainer, drain
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.tokens import Tokens
from fedstrata.exchanges.cut_pass import CutPass
from fedstrata.job.tables import Train
from fedstrata.models.cut import CutLayer
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from fedstrata.server.layers import LayerSettings, ServerLayers
from fedstrata.server.server import Server
from fedstrata.tasks import Examples
from fedstrata.tasks.mlm import MaskedLM
from fedstrata.wire.activations import stream_form
from fedstrata.wire.codec import Wire, make_codec
from fedstrata.wire.store import Store
from fedstrata.wire.stream_ends import PlainClient

SIZES = {"base": (12, 768, 12), "small": (12, 256, 4), "tiny": (2, 32, 2)}
"""Layers, width, heads; the first two are RoBERTa's of the paper."""
VOCABULARY = 50_265
DTYPES = ("fp32", "bf16", "fp16")


def texts(count: int, longest: int) -> Examples:
    """Random texts, half of them of ``longest`` tokens, the others shorter."""
    rng = np.random.default_rng(0)
    lengths = np.where(np.arange(count) % 2, longest, rng.integers(longest // 2, longest + 1, count))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(10, VOCABULARY, int(offsets[-1])).astype(np.int32)
    return Examples(Tokens(ids, offsets, np.arange(count)))


def cases(size: str, examples: Examples, folder: Path) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:
    """Seconds of one step of each kind, and the bytes of a split step."""
    layers, width, heads = SIZES[size]
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    train = Train(
        device="cpu",
        batch_size=len(examples),
        learning_rate=1e-6,
        precision=resolve_precision("auto", "cpu"),  # type: ignore[arg-type]
    )
    task = MaskedLM(mask=4, padding=1, special=np.asarray([0, 1, 2]), vocabulary=VOCABULARY)
    model = transformers.RobertaForMaskedLM(config)
    parts = find_parts(model)
    whole = Plan(tuple(range(layers)), parts.names, parts.names)
    own = ("embeddings", "head")
    cut = Plan(whole.layers, own, own, server=parts.layers(0))
    weights = {part: {n: t.clone() for n, t in part_tensors(model, parts, [part]).items()} for part in parts.names}
    sent: dict[str, int] = {}
    trainer = Trainer(WorkingModel(model, parts), task, train, Streams(0))

    def whole_step() -> float:
        request = Request(0, "a", whole, "train", {}, {})
        started = time.perf_counter()
        drain(trainer.run(request, examples, index, WholePass(trainer.working, whole), {}, _quiet))
        return time.perf_counter() - started

    def cut_step(dtype: str) -> Callable[[], float]:
        form = stream_form((dtype, 1.0), (dtype, 1.0))
        settings = LayerSettings(cut.server, True, 512, form, Store(folder))
        server = Server(parts, weights, Wire(make_codec(dtype)))
        layers = ServerLayers(trainer.working, server, settings, train, trainer.streams)

        def run() -> float:
            request = Request(0, "a", cut, "train", {}, {})
            session = layers.open(request)
            model_pass = CutPass(trainer.working, cut, session, CutLayer(session, PlainClient(form)))
            started = time.perf_counter()
            drain(trainer.run(request, examples, index, model_pass, {}, _quiet))
            layers.wait()
            seconds = time.perf_counter() - started
            sent[dtype] = sum(session.traffic.values())
            return seconds

        return run

    index = np.arange(len(examples))
    return {"whole": whole_step, **{dtype: cut_step(dtype) for dtype in DTYPES}}, sent


def _quiet(step: int, steps: int, loss: float, seen: int) -> None:
    """Ignore progress."""


def main() -> None:
    """Measure, print a table, write the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--size", choices=SIZES, nargs="+", default=["small", "base"])
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--repeat", type=int, default=7)
    chosen = options.parse_args()
    torch.manual_seed(0)
    examples = texts(chosen.batch, chosen.tokens)
    table = Table("model", "wire", "step, s", "/ unsplit", "MB", title=f"a step of {chosen.batch} texts")
    figures = []
    for size in chosen.size:
        with tempfile.TemporaryDirectory() as folder:
            ways, sent = cases(size, examples, Path(folder))
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(chosen.repeat + 1):
                for way, run in ways.items():
                    seconds = run()
                    if turn:  # the first is to warm up
                        taken[way].append(seconds)
        for way, seconds_of in taken.items():
            ratios = [one / other for one, other in zip(seconds_of, taken["whole"], strict=True)]
            figure = {
                "model": size,
                "wire": way,
                "seconds": statistics.median(seconds_of),
                "ratio": statistics.median(ratios),
                "bytes": sent.get(way, 0),
            }
            figures.append(figure)
            table.add_row(
                size, way, f"{figure['seconds']:.3f}", f"{figure['ratio']:.3f}", f"{figure['bytes'] / 1e6:.1f}"
            )
    Console().print(table)
    if chosen.json:
        chosen.json.write_text(json.dumps({"torch": torch.__version__, "steps": figures}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
