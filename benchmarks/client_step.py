"""Time of one client step with every method, compared with a plain step of BERT-FL.

    python benchmarks/client_step.py --json step.json

The plain step is Hugging Face's own loss at every position, fp32, AdamW on the whole model. All cases run in
turn, one step each, repeatedly; a ratio is the median of the ratios within a turn, so a machine that slows down
slows both sides. Wall time and FLOPs are reported separately. Methods whose clients take the same step share
one row: they differ at the server, or in the data they use. The utilization is the step's FLOPs per second by
those of a large matrix product of the same precision on the same device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from measure import machine, summary
from rich.console import Console
from rich.table import Table

from fedstrata.client.model_pass import WholePass
from fedstrata.client.precision import resolve_precision
from fedstrata.client.trainer import Trainer, drain
from fedstrata.client.working_model import WorkingModel
from fedstrata.cost.flops import train_flops
from fedstrata.data.tokens import Tokens
from fedstrata.job.tables import Train
from fedstrata.methods import METHODS
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.methods.fedbt import FedBT
from fedstrata.models.parts import find_parts
from fedstrata.plan.messages import Positions, Request
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Examples, Task
from fedstrata.tasks.classify import Classify
from fedstrata.tasks.mlm import MaskedLM

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16), "small": (12, 256, 4)}
"""Layers, width, heads."""
CLASSES = 13  # ChemProt's
EQUAL = "fedavg, full head, fp32"
"""The row that FedBFPT at the paper's settings is also compared with: same code, same settings."""
SCHEDULE = ", FedBT 34.31 %"
PRINTED = {4: 37.49, 6: 46.70, 8: 56.05}
"""Local layers of 12 -> percent of BERT-FL's time for an epoch, FedBFPT Tables 2 and 5. FedBT's 34.31 % (Table 1)
is the 6-layer figure over a whole schedule, in which the trained layer rises."""


PRODUCT = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices whose product stands for what a device can do."""


@dataclass(frozen=True)
class Case:
    """One row: how to take one step, and its FLOPs."""

    methods: tuple[str, ...]
    name: str
    against: str
    step: Callable[[], float]
    flops: int
    bf16: bool = False
    equal: str | None = None
    printed: float | None = None

    @property
    def label(self) -> str:
        """What stands for the row in a measure: the first of several methods."""
        return self.name if "," in self.name or not self.methods else self.methods[0]


def text(batch: int, tokens: int) -> Examples:
    """Two batches of random ids, all of full length."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 30000, 2 * batch * tokens).astype(np.int32)
    offsets = np.arange(2 * batch + 1, dtype=np.int64) * tokens
    return Examples(Tokens(ids, offsets, np.arange(2 * batch)), rng.integers(0, CLASSES, 2 * batch))


def wait(device: str) -> None:
    """Until the device has computed all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak(device: str, bf16: bool) -> float:
    """FLOPs per second of a large matrix product, median of five."""
    size = PRODUCT[device]
    one, other = torch.randn(2, size, size, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    found = []
    for _ in range(6):
        wait(device)
        started = time.perf_counter()
        one @ other
        wait(device)
        found.append(2 * size**3 / (time.perf_counter() - started))
    return statistics.median(found[1:])


def models(size: str, device: str) -> dict[str, Any]:
    """An MLM model and a classifier of that shape, random weights."""
    layers, width, heads = SIZES[size]
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        num_labels=CLASSES,
    )  # fmt: skip
    return {
        "mlm": transformers.BertForMaskedLM(config).to(device),
        "classify": transformers.BertForSequenceClassification(config).to(device),
    }


def tasks(full_head: bool) -> dict[str, Task]:
    """The two tasks over BERT's vocabulary."""
    mlm = MaskedLM(103, 0, np.asarray([0, 100, 101, 102, 103]), 30522, 0.15, full_head=full_head)
    return {"mlm": mlm, "classify": Classify(0, tuple(map(str, range(CLASSES))))}


def plain(model: Any, task: Task, examples: Examples, device: str) -> Callable[[], float]:
    """A plain training step."""
    count = len(examples) // 2
    batch = task.batch(examples, np.arange(count), np.random.default_rng(1))
    labels = batch.targets
    if batch.positions is not None:
        labels = torch.full_like(batch.inputs["input_ids"], -100)
        labels[batch.positions] = batch.targets
    inputs, labels = {name: tensor.to(device) for name, tensor in batch.inputs.items()}, labels.to(device)

    def step() -> float:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        model.train()
        seconds = 0.0
        for _ in range(2):  # the first one makes the optimizer's state
            wait(device)
            started = time.perf_counter()
            model(**inputs, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wait(device)
            seconds = time.perf_counter() - started
        return seconds

    return step


def ours(trainer: Trainer, plan: Plan, examples: Examples) -> Callable[[], float]:
    """A step of the client code; the second of a round."""

    def step() -> float:
        at: list[float] = []

        def stepped(*_: object) -> None:
            wait(trainer.train.device)
            at.append(time.perf_counter())

        model_pass, request = WholePass(trainer.working, plan), Request(0, "a", plan, "train", {}, {})
        index = np.arange(len(examples))
        drain(trainer.run(request, examples, index, model_pass, {}, stepped))
        return at[1] - at[0]

    return step


def cases(size: str, batch: int, tokens: int, device: str) -> list[Case]:
    """The plain steps, then every method's."""
    examples, made = text(batch, tokens), models(size, device)
    fast = resolve_precision("auto", device) == "bf16"
    parts = {kind: find_parts(model) for kind, model in made.items()}
    whole = {kind: Plan(tuple(range(p.depth)), p.names, p.names) for kind, p in parts.items()}
    everywhere = Positions(batch * tokens, batch * tokens**2, batch * tokens)
    masked = Positions(batch * tokens, batch * tokens**2, int(0.15 * batch * tokens))
    each = Positions(batch * tokens, batch * tokens**2, batch)
    rows = []
    for kind, work in (("mlm", everywhere), ("classify", each)):
        step = plain(made[kind], tasks(True)[kind], examples, device)
        rows.append(Case((), f"plain {kind}", f"plain {kind}", step, train_flops(parts[kind], whole[kind], work)))

    def add(
        name: str,
        kind: str,
        method: Method,
        round: int = 0,
        full: bool = False,
        bf16: bool = fast,
        printed: float | None = None,
    ) -> None:
        """``name`` begins with the methods it stands for, up to the first comma."""
        plan = method.plan(parts[kind], kind, round, "a", Streams(0))
        mu = dict(method.preset.get("train", {})).get("proximal_mu", 0.0)
        train = Train(
            device=device,
            steps=2,
            batch_size=batch,
            learning_rate=1e-6,
            precision="bf16" if bf16 else "fp32",
            proximal_mu=mu,
        )
        working = WorkingModel(made[kind], parts[kind], device, bf16)
        trainer = Trainer(working, tasks(full)[kind], train, Streams(0))
        work = each if kind == "classify" else everywhere if full else masked
        flops = train_flops(parts[kind], plan, work)
        methods = tuple(name.split(",")[0].split())
        equal = EQUAL if printed else None
        rows.append(
            Case(methods, name, f"plain {kind}", ours(trainer, plan, examples), flops, bf16, equal, printed)
        )

    alike: dict[object, list[str]] = {}
    for name, method in METHODS.items():
        plan = method().plan(parts["mlm"], "mlm", 0, "a", Streams(0))
        if not plan.train or plan.freeze_encoder or plan.server:
            continue  # no step, or one that benchmarks/frozen.py or split.py times
        alike.setdefault((plan.layers, plan.train, str(method.preset.get("train"))), []).append(name)
    for names in alike.values():
        add(" ".join(names), "mlm", METHODS[names[0]]())
    layers = SIZES[size][0]
    for depth in (layers // 3, layers // 2, 2 * layers // 3):
        add(
            f"fedbfpt, {depth} local layers, full head, fp32",
            "mlm",
            FedBFPT(local_layers=depth),
            full=True,
            bf16=False,
            printed=PRINTED.get(depth),
        )
    add("fedbfpt, fp32", "mlm", FedBFPT(), bf16=False)
    add(EQUAL, "mlm", METHODS["fedavg"](), full=True, bf16=False)
    add("fedavg, classify", "classify", METHODS["fedavg"]())
    for round in (0, 2, 5):
        add(f"fedbt, classify, round {round}", "classify", FedBT(), round)
    return rows


def measure(rows: list[Case], repeat: int) -> dict[str, list[float]]:
    """Seconds of every case in every turn, after one warmup turn that is not counted."""
    seconds: dict[str, list[float]] = {case.name: [] for case in rows}
    for turn in range(-1, repeat):
        for case in rows:
            taken = case.step()
            if turn >= 0:
                seconds[case.name].append(taken)
    return seconds


def measures(rows: list[Case], seconds: dict[str, list[float]], about: str) -> list[dict[str, Any]]:
    """The ratios of wall time, for :mod:`trend`: to the plain step, and to FedAvg's at equal settings."""
    label = {case.name: case.label for case in rows}
    fedavg = next(case.name for case in rows if case.label == "fedavg")
    pairs = [(case.name, case.against) for case in rows if case.name != case.against]
    pairs += [(case.name, case.equal) for case in rows if case.equal]
    pairs += [(case.name, fedavg) for case in rows if case.label == "fedbfpt"]
    made = []
    for own, base in pairs:
        values = [one / other for one, other in zip(seconds[own], seconds[base], strict=True)]
        measure = f"step, {about}: {label[own]} / {label[base]}"
        made.append({"measure": measure, **summary(values), "values": values})
    return made


def main() -> None:
    """Measure, print a table, write the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--size", choices=SIZES, default="base")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--device", choices=PRODUCT, default="cpu")
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        options.error("--device: there is no GPU that torch can use")
    torch.manual_seed(0)
    rows = cases(chosen.size, chosen.batch, chosen.tokens, chosen.device)
    peaks = {bf16: peak(chosen.device, bf16) for bf16 in {case.bf16 for case in rows}}
    seconds = measure(rows, chosen.repeat)
    flops = {case.name: case.flops for case in rows}
    table = Table(
        "step",
        "seconds (median)",
        "clock ratio",
        "clock, equal settings",
        "FLOP ratio",
        "utilization",
        "printed",
        title=f"BERT-{chosen.size}, {chosen.batch} x {chosen.tokens}",
    )
    figures = []
    for case in rows:
        pairs = zip(seconds[case.name], seconds[case.against], strict=True)
        figure = {
            "name": case.name,
            "methods": case.methods,
            "against": case.against,
            "seconds": statistics.median(seconds[case.name]),
            "clock_ratio": statistics.median(own / base for own, base in pairs),
            "flop_ratio": case.flops / flops[case.against],
            "utilization": case.flops / statistics.median(seconds[case.name]) / peaks[case.bf16],
            "printed_percent": case.printed,
        }
        if case.equal:
            alike = zip(seconds[case.name], seconds[case.equal], strict=True)
            figure["clock_ratio_equal_settings"] = statistics.median(own / base for own, base in alike)
        figures.append(figure)
        table.add_row(
            case.name,
            f"{figure['seconds']:.3f}",
            f"{figure['clock_ratio']:.3f}",
            f"{figure['clock_ratio_equal_settings']:.3f}" if case.equal else "",
            f"{figure['flop_ratio']:.3f}",
            f"{figure['utilization']:.2f}",
            f"{case.printed} %{SCHEDULE if case.printed == PRINTED[6] else ''}" if case.printed else "",
        )
    Console(width=None if sys.stdout.isatty() else 119).print(table)
    if chosen.json:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), **vars(chosen)}
        about["peak_flops"] = {"bf16" if bf16 else "fp32": value for bf16, value in peaks.items()}
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        batch = f"{chosen.batch} x {chosen.tokens}"
        shape = f"BERT-{chosen.size}, {batch}, {chosen.device}, threads {about['threads']}"
        report = {
            "machine": machine(),
            "commit": asked.stdout.strip(),
            "about": {**about, "json": None},
            "steps": figures,
            "measures": measures(rows, seconds, shape),
        }
        chosen.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
