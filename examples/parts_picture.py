"""Draws README's picture from the methods' own plans for a 12-layer BERT.

python examples/parts_picture.py docs/parts.svg
"""

from __future__ import annotations

import sys

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.methods.fedbt import FedBT
from fedstrata.plan.parts import Part, Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams

BERT = Parts(
    each=(
        Part("embeddings", "embeddings", None, {}),
        *(Part(f"layer.{i}", "layer", i, {}) for i in range(12)),
        Part("head", "head", None, {}),
    ),
    stack="bert.encoder.layer",
    tied=0,
    hidden=768,
)
COLUMNS: list[tuple[str, Method, str, list[int]]] = [
    ("FedAvg", FedAvg(), "mlm", [0]),
    ("FedBFPT, rounds 1 – 10", FedBFPT(rounds=10), "mlm", list(range(10))),
    ("FedBT fine-tuning, rounds 1 – 10", FedBT(), "classify", list(range(10))),
]
COLORS = {"trained and sent": "#0b6e99", "built, frozen": "#bcd3dd", "not built": "#ffffff"}
EDGE = "#8a9aa3"


def state(plan: Plan, part: str) -> str:
    """What a client does with a part."""
    if part in plan.train:
        return "trained and sent"
    return "built, frozen" if part in plan.builds(BERT) else "not built"


def main(path: str) -> None:
    """One column per round, one row per part, the embeddings at the bottom."""
    matplotlib.rcParams.update({"svg.hashsalt": "fedstrata", "svg.fonttype": "none"})
    figure = Figure(figsize=(9, 3.6))
    axes = figure.add_axes((0.09, 0.14, 0.89, 0.76))
    x = 0.0
    for title, method, task, rounds in COLUMNS:
        for i, round in enumerate(rounds):
            plan = method.plan(BERT, task, round, "client-0", Streams(0))
            for y, part in enumerate(BERT.names):
                color = COLORS[state(plan, part)]
                axes.add_patch(Rectangle((x + i, y), 0.92, 0.9, facecolor=color, edgecolor=EDGE, linewidth=0.5))
        axes.text(x + len(rounds) / 2, len(BERT.names) + 0.25, title, ha="center", fontsize=9)
        x += len(rounds) + 1.2
    axes.set(xlim=(-0.2, x - 1), ylim=(-0.2, len(BERT.names) + 1))
    axes.set_yticks([y + 0.45 for y in range(len(BERT.names))], BERT.names, fontsize=7)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    handles = [Patch(facecolor=color, edgecolor=EDGE, label=label) for label, color in COLORS.items()]
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
