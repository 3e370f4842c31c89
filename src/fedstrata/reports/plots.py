"""The plots of a report: each function returns one SVG picture as a string, the same bytes for the same run.

Text stays text in the SVG, so that a browser shapes Arabic labels and a reader can search the page. Where there is
nothing to draw the string is empty.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedstrata.plan.kinds import LOWER_IS_BETTER
from fedstrata.reports.client_scores import client_scores, clients_plot, worst_words
from fedstrata.reports.confusion import confusion_plot, confusion_records
from fedstrata.reports.partition_plot import STAND_FOR, counted, grouped_words, partition_plot, partition_records
from fedstrata.reports.parts import STACKED, PartRecord
from fedstrata.reports.picture import COLORS, HEIGHT, WIDTH, Shown, picture, short_name, small, whole_numbers
from fedstrata.reports.runs import Run, curve
from fedstrata.reports.tables import MB, TERA, by_client, result_rows
from fedstrata.reports.tables import figure as amount

Cost = Literal["round", "bytes", "flops"]
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
    ("#08519c", "trained, sent"),
    ("#c7b8d8", "the server's"),
    ("#e08214", "trained, kept"),
)
"""Of a part at a client in a round: its color and its name."""
CURVES: dict[Cost, str] = {"round": "rounds", "bytes": "cumulative communication", "flops": "work done"}
"""What the score is drawn against, in words."""
DIRECTIONS = {"up": "up to the server", "down": "down to the clients"}
ROUNDS_SHOWN = 100
LINES_SHOWN = 60
"""Of more clients the losses of so many are drawn, at equal distances in their order."""


def run_pictures(run: Run) -> Iterator[Shown]:
    """The pictures of a run's page, in order."""
    metric, points = run.result["headline"], curve(run)
    records = [{**point._asdict(), "round": point.round + 1, "metric": metric} for point in points]
    for cost, what in CURVES.items():
        title = f"{metric} against {what}"
        yield Shown(title, score_plot([run], cost), f"The score after each round, against {what}.", records)
    told = ("client", "examples", "loss")
    losses = [{"round": line["round"] + 1, **{key: line[key] for key in told}} for line in run.work]
    said = f"Training loss of the clients, each on its own examples.{_sampled(run)}"
    yield Shown("Training loss", loss_plot(run), said, losses)
    if run.work:
        client = next((line["client"] for line in run.work if line["trained"]), run.work[0]["client"])
        caption = f"Parts at {client}, round by round. {_alike(run)}"
        yield Shown("Parts by round", schedule_plot(run, client), caption, _schedule_records(run, client))
    setup = amount(result_rows([run])[0]["setup_mb"])
    for direction, words in DIRECTIONS.items():
        caption = f"MB {words} by part, all clients, without the initial download, {setup} MB per client."
        sent = [line for line in _traffic(run) if line["direction"] == direction]
        yield Shown(f"Traffic {direction} by part", bytes_plot(run, direction), caption, sent)
    clients = run.partition.get("clients", {})
    what = "Rows" if any(client["labels"] for client in clients.values()) else "Examples"
    said = f"What each client had. {counted(run.partition)}.{_stand_for(run)}{grouped_words(len(clients))}"
    yield Shown(f"{what} of each client", partition_plot(run.partition), said, partition_records(run.partition))
    yield Shown(f"{metric} by client", clients_plot(run), worst_words(run), client_scores(run))
    said = "Confusion matrix of the final model on the test rows: a row per true class, shares of the row."
    yield Shown("Confusion matrix", confusion_plot(run.classes), said, confusion_records(run.classes))


def _stand_for(run: Run) -> str:
    """What the colors of the partition are, where its labels are not the rows' own."""
    labels = {label for client in run.partition.get("clients", {}).values() for label in client["labels"] or {}}
    words = STAND_FOR.get(run.result["task"]) if len(labels) > 1 else None
    return f" Colors: {words}." if words else ""


def _traffic(run: Run) -> list[dict[str, Any]]:
    """Bytes by round, direction and part, all clients together; rounds from 1."""
    sent = Counter[tuple[str, str, int]]()
    for (way, part, at), size in run.traffic.items():
        sent[way, part, max(0, at) + 1] += size  # what scores the start model stands with the first round
    return [{"direction": way, "part": part, "round": at, "bytes": n} for (way, part, at), n in sent.items()]


def _schedule_records(run: Run, client: str) -> list[dict[str, Any]]:
    """State of each part at a client by round."""
    lines = [line for line in run.work if line["client"] == client]
    return [
        {"round": line["round"] + 1, "part": name, "state": STATES[_state(run.parts[name], line)][1]}
        for line in lines
        for name in run.model_parts
    ]


def _sampled(run: Run) -> str:
    """What the picture of the losses leaves out."""
    names, drawn = _loss_clients(run)
    if drawn == names:
        return ""
    return f" Gray: {len(drawn)} of the {len(names):,} that trained; the mean is over all of them."


def _loss_clients(run: Run) -> tuple[list[str], list[str]]:
    """The clients whose losses are told, or the server by its own name; and those of them that are drawn."""
    trained = {line["client"] for line in run.work if line["loss"] is not None and math.isfinite(line["loss"])}
    names = [name for name in run.clients if name in trained] or sorted(trained)
    return names, names[:: max(1, math.ceil(len(names) / LINES_SHOWN))]


def _alike(run: Run) -> str:
    """Whether the picture of one client stands for all."""
    seen: dict[int, list[list[Any]]] = defaultdict(list)
    for line in run.work:
        seen[line["round"]].append([line["layers"], line["trained"]])
    if all(other == first for first, *others in seen.values() for other in others):
        return "All clients did the same."
    return "Other clients built other deeper layers in the same round."


@picture
def score_plot(runs: Sequence[Run], against: Cost) -> Figure | None:
    """The headline score against rounds, MB or TFLOP; one line per run, all of one headline."""
    curves = [(run, curve(run)) for run in runs if curve(run)]
    if not curves:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT + (0.12 * len(curves) if len(runs) > 1 else 0)), layout="constrained")
    axes = figure.add_subplot()
    label, unit = AXES[against]
    for i, (run, points) in enumerate(curves):
        x = [point.round + 1 if against == "round" else getattr(point, against) / unit for point in points]
        y = [point.score for point in points]
        dash = DASHES[i // len(COLORS) % len(DASHES)]
        axes.plot(x, y, dash, color=COLORS[i % len(COLORS)], marker="o", label=short_name(run.name))
    axes.set_xlabel(label)
    if against == "round":
        whole_numbers(axes)
    else:
        axes.ticklabel_format(axis="x", scilimits=(-3, 5))
    metric = runs[0].result["headline"]
    axes.set_ylabel(f"{metric} (lower is better)" if metric in LOWER_IS_BETTER else metric)
    if len(runs) > 1:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


@picture
def bytes_plot(run: Run, direction: str) -> Figure | None:
    """MB of all clients per round, one way, every bar stacked from the parts that were sent."""
    traffic = _traffic(run)
    if not any(line["direction"] == direction for line in traffic):
        return None
    rounds = range(max(line["round"] for line in traffic))
    sent = {(line["part"], line["round"] - 1): line["bytes"] for line in traffic if line["direction"] == direction}
    named = {part for part, _ in sent}
    colors = {name: color for name, color in part_colors(run).items() if name in named}
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.12 * math.ceil(len(colors) / 3)), layout="constrained")
    axes = figure.add_subplot()
    base = [0.0 for _ in rounds]
    for name, color in colors.items():
        top = [below + sent.get((name, at), 0) / MB for below, at in zip(base, rounds, strict=True)]
        _bars(axes, base, top, color)
        base = top
    axes.set_ylim(0, 1.05 * _highest(traffic) / MB)  # the same both ways
    axes.set_xlabel("round")
    whole_numbers(axes)
    axes.set_ylabel(f"MB {DIRECTIONS[direction]}")
    keys = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return figure


def _highest(traffic: Sequence[Mapping[str, Any]]) -> int:
    """The most bytes that went one way in a round."""
    sums = Counter[tuple[str, int]]()
    for line in traffic:
        sums[line["direction"], line["round"]] += line["bytes"]
    return max(sums.values())


@picture
def loss_plot(run: Run) -> Figure | None:
    """Training loss against rounds: a line per client, or gray lines under their mean if there are many."""
    lines = [line for line in run.work if line["loss"] is not None and math.isfinite(line["loss"])]
    if not lines:
        return None
    names, drawn = _loss_clients(run)
    few = len(names) <= len(COLORS)
    each = f"each of {len(names)} clients" if drawn == names else f"{len(drawn)} of {len(names):,} clients"
    losses = by_client(lines)
    figure, axes = small()
    for i, name in enumerate(drawn):
        x, y = zip(*((line["round"] + 1, line["loss"]) for line in losses[name]), strict=True)
        if few:
            axes.plot(x, y, color=COLORS[i], marker="o", label=short_name(name))
        else:
            alone = "." if len(x) == 1 else None  # a line of one point would not be seen
            axes.plot(x, y, color="#bbbbbb", linewidth=0.8, marker=alone, label=None if i else each)
    if not few:
        axes.plot(*_mean_loss(lines), color=COLORS[0], marker="o", label="mean, weighted by examples")
    axes.set_xlabel("round")
    axes.set_ylabel("training loss (lower is better)")
    whole_numbers(axes)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@picture
def schedule_plot(run: Run, client: str) -> Figure | None:
    """Which parts one client trained, built but left frozen, or did not build, round by round."""
    lines = {line["round"]: line for line in run.work if line["client"] == client}
    shown = range(min(ROUNDS_SHOWN, 1 + max(lines, default=-1)))
    rows = run.model_parts
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
    names = run.named_parts
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
        return 3 if part.name in line["sent"] else 5
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
