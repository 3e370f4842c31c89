"""The plots of a report: each function returns one SVG picture as a string, the same bytes for the same run.

Text stays text in the SVG, so that a browser shapes Arabic labels and a reader can search the page. Where there is
nothing to draw the string is empty.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedstrata.errors import plural
from fedstrata.plan.kinds import LOWER_IS_BETTER
from fedstrata.reports.partition_plot import grouped_words, partition_plot
from fedstrata.reports.parts import STACKED, PartRecord
from fedstrata.reports.picture import COLORS, picture, short_name, small, whole_numbers
from fedstrata.reports.runs import Run, curve, model_parts, parts
from fedstrata.reports.tables import MB, TERA, by_client, result_rows
from fedstrata.reports.tables import figure as amount

MARKS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", ":", "-.")
AXES = {
    "round": ("round\n(0: before training)", 1),
    "bytes": ("MB in total, all clients, up + down\n(without the initial download)", MB),
    "flops": ("TFLOP, all clients\n(work counted, not wall time)", TERA),
}
"""What a score can stand against: the axis's label and its unit."""
PART_COLORS = {
    "embeddings": "#7f7f7f",
    "pooler": "#CC79A7",
    "head": "#D55E00",
    "hidden_states": "#009E73",
    "activations": "#009E73",
    "gradients": "#E69F00",
}
"""Of a kind of part, or of what else is communicated."""
STATES = (
    ("#ffffff", "not sampled"),
    ("#e6e6e6", "not built"),
    ("#9ecae1", "built, frozen"),
    ("#08519c", "trained"),
    ("#c7b8d8", "the server's"),
)
"""Of a part at a client in a round: its color and its name."""
CURVES = "cumulative communication, and against the work done"
ROUNDS_SHOWN = 100
LINES_SHOWN = 60
"""Of more clients the losses of so many are drawn, at equal distances in their order."""


def run_pictures(run: Run) -> Iterator[tuple[str, str, bool]]:
    """The plots of a run's page, in order: plot, caption, and whether it is as wide as the page."""
    curves = f"The score after each round, against {CURVES}."
    yield score_plot([run], "round", "bytes", "flops"), curves, True
    yield loss_plot(run), f"Training loss of the clients, each on its own examples.{_sampled(run)}", False
    if run.work:
        client = next((line["client"] for line in run.work if line["trained"]), run.work[0]["client"])
        yield schedule_plot(run, client), f"Parts at {client}, round by round. {_alike(run)}", False
    setup = amount(result_rows([run])[0]["setup_mb"])
    communication = "Communication by part: training and evaluation together"
    yield bytes_plot(run), f"{communication}, without the initial download, {setup} MB per client.", True
    test, dropped = run.partition.get("test", 0), run.partition.get("left_out", 0)
    held = f"What each client had. {plural(test, 'test example')}; {plural(dropped, 'row')} dropped."
    yield partition_plot(run.partition), held + grouped_words(len(run.partition.get("clients", {}))), True


def _sampled(run: Run) -> str:
    """What the picture of the losses leaves out."""
    trained = len({line["client"] for line in run.work if line["loss"] is not None})
    if trained <= LINES_SHOWN:
        return ""
    return f" Grey: {LINES_SHOWN} of the {trained:,} that trained; the mean is over all of them."


def _alike(run: Run) -> str:
    """Whether the picture of one client stands for all."""
    seen: dict[int, list[list[Any]]] = defaultdict(list)
    for line in run.work:
        seen[line["round"]].append([line["layers"], line["trained"]])
    if all(other == first for first, *others in seen.values() for other in others):
        return "All clients did the same."
    return "Other clients built other deeper layers in the same round."


@picture
def score_plot(runs: Sequence[Run], *against: Literal["round", "bytes", "flops"]) -> Figure | None:
    """The headline score against rounds, MB or TFLOP, a panel each; one line per run, all of one headline."""
    curves = [(run, curve(run)) for run in runs if curve(run)]
    if not curves:
        return None
    figure = Figure(figsize=(11, 3.4 + 0.1 * len(curves)), layout="constrained")
    panels = figure.subplots(1, len(against), sharey=True, squeeze=False)[0]
    for axes, cost in zip(panels, against, strict=True):
        label, unit = AXES[cost]
        for i, (run, points) in enumerate(curves):
            x = [point.round + 1 if cost == "round" else getattr(point, cost) / unit for point in points]
            y = [point.score for point in points]
            dash = DASHES[i // len(COLORS) % len(DASHES)]
            axes.plot(x, y, dash, color=COLORS[i % len(COLORS)], marker="o", label=short_name(run.name))
        axes.set_xlabel(label)
        if cost == "round":
            whole_numbers(axes)
    metric = runs[0].result["headline"]
    panels[0].set_ylabel(f"{metric} (lower is better)" if metric in LOWER_IS_BETTER else metric)
    if len(runs) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@picture
def bytes_plot(run: Run) -> Figure | None:
    """MB of all clients per round, up beside down, every bar stacked from the parts that were sent."""
    sent = Counter[tuple[str, str, int]]()
    for line in run.transfers:
        sent[line["direction"], line["part"], max(0, line["round"])] += line["bytes"]  # scoring the start model
    if not sent:
        return None
    rounds = range(1 + max(at for _, _, at in sent))
    sent_parts = {name for _, name, _ in sent}
    colors = {name: color for name, color in part_colors(run).items() if name in sent_parts}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"up": "up: clients to server", "down": "down: server to clients"}
    for axes, (direction, title) in zip(panels, titles.items(), strict=True):
        base = [0.0 for _ in rounds]
        for name, color in colors.items():
            top = [below + sent[direction, name, at] / MB for below, at in zip(base, rounds, strict=True)]
            _bars(axes, base, top, color)
            base = top
        axes.set_title(title)
        axes.set_xlabel("round")
        whole_numbers(axes)
    panels[0].set_ylabel("MB, all clients")
    keys = [Patch(color=color, label=name) for name, color in reversed(colors.items())]
    figure.legend(handles=keys, loc="outside right upper", ncols=1 + len(keys) // 16)
    return figure


@picture
def loss_plot(run: Run) -> Figure | None:
    """Training loss against rounds: a line per client, or grey lines under their mean if there are many."""
    lines = [line for line in run.work if line["loss"] is not None and math.isfinite(line["loss"])]
    if not lines:
        return None
    trained = {line["client"] for line in lines}
    names = [name for name in run.clients if name in trained] or sorted(trained)  # or the server, by its own name
    few = len(names) <= len(COLORS)
    drawn = names[:: math.ceil(len(names) / LINES_SHOWN)]
    each = f"each of {len(names)} clients" if drawn == names else f"{len(drawn)} of {len(names):,} clients"
    losses = by_client(lines)
    figure, axes = small()
    for i, name in enumerate(drawn):
        x, y = zip(*((line["round"] + 1, line["loss"]) for line in losses[name]), strict=True)
        if few:
            axes.plot(x, y, color=COLORS[i], marker="o", label=short_name(name))
        else:
            axes.plot(x, y, color="#bbbbbb", linewidth=0.8, label=None if i else each)
    if not few:
        axes.plot(*_mean_loss(lines), color=COLORS[0], marker="o", label="mean, weighted by examples")
    axes.set_xlabel("round")
    axes.set_ylabel("training loss (lower is better)")
    whole_numbers(axes)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@picture
def schedule_plot(run: Run, client: str) -> Figure | None:
    """Which parts one client trained, built but left frozen, or did not build, round by round."""
    lines = {line["round"]: line for line in run.work if line["client"] == client}
    shown = range(min(ROUNDS_SHOWN, 1 + max(lines, default=-1)))
    rows = model_parts(run)
    if not shown or not rows:
        return None
    cells = [[_state(run.parts[name], lines.get(at)) for at in shown] for name in rows]
    figure, axes = small()
    axes.grid(False)
    axes.pcolormesh(
        [at + 0.5 for at in (*shown, len(shown))],
        [i - 0.5 for i in range(len(rows) + 1)],
        cells,
        cmap=ListedColormap([color for color, _ in STATES]),
        vmin=-0.5,
        vmax=len(STATES) - 0.5,
        edgecolors="white",
        linewidth=1 if len(shown) <= 30 else 0.2,
    )
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("round" if len(shown) < ROUNDS_SHOWN else f"the first {ROUNDS_SHOWN} rounds")
    whole_numbers(axes)
    present = sorted({cell for row in cells for cell in row}, reverse=True)
    keys = [Patch(facecolor=STATES[i][0], edgecolor="#888888", label=STATES[i][1]) for i in present]
    figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return figure


def part_colors(run: Run) -> dict[str, str]:
    """A color for whatever a run communicated: the layers, in order, from light to dark blue."""
    names = parts(run)
    stacked = [name for name in names if name in run.parts and run.parts[name].kind in STACKED]
    blues = matplotlib.colormaps["Blues"]
    ramp = {name: to_hex(blues(0.25 + 0.75 * i / max(1, len(stacked) - 1))) for i, name in enumerate(stacked)}
    kinds = {name: run.parts[name].kind if name in run.parts else name for name in names}
    return {name: ramp.get(name) or PART_COLORS.get(kinds[name], "#000000") for name in names}


def _bars(axes: Axes, base: Sequence[float], top: Sequence[float], color: str) -> None:
    """One bar per round, from 1, from ``base`` to ``top``, as a single shape, which keeps long runs small."""
    edges = [at + side for at in range(1, len(top) + 1) for side in (-0.4, 0.4)]
    heights, floors = ([y for value in line for y in (value, 0)][:-1] for line in (top, base))
    axes.stairs(heights, edges, baseline=floors, fill=True, color=color)


def _state(part: PartRecord, line: dict[str, Any] | None) -> int:
    """The place in ``STATES`` of a part in a client's line of one round."""
    if line is None:
        return 0
    if part.name in line["trained"]:
        return 3
    if part.name in line.get("server", ()):
        return 4
    return 2 if part.depth is None or part.depth in line["layers"] else 1


def _mean_loss(lines: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Rounds, from 1, and the clients' mean loss in each, weighted by their examples."""
    weighted: defaultdict[int, float] = defaultdict(float)
    weights = Counter[int]()
    for line in lines:
        weighted[line["round"]] += line["loss"] * line["examples"]
        weights[line["round"]] += line["examples"]
    rounds = sorted(weights)
    return [at + 1 for at in rounds], [weighted[at] / weights[at] for at in rounds]
