"""Each client's score, the worst one named."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from fedstrata.plan.kinds import LOWER_IS_BETTER
from fedstrata.reports.picture import COLORS, WIDTH, picture, short_name
from fedstrata.reports.runs import Run, headline
from fedstrata.reports.tables import score_figure

CLIENTS_SHOWN = 60
"""Clients whose scores are drawn; of more the worst."""


def client_scores(run: Run) -> list[dict[str, Any]]:
    """The headline score of each client that has one, the worst last."""
    metric = run.result["headline"]
    values = {name: headline(run, one.get("score")) for name, one in run.result["clients"].items()}
    known = [(name, value) for name, value in values.items() if value is not None]
    order = sorted(known, key=lambda item: item[1], reverse=metric not in LOWER_IS_BETTER)
    return [{"client": name, metric: value} for name, value in order]


def worst_words(run: Run) -> str:
    """Whose score is the worst, beside the mean over the clients."""
    metric, scores = run.result["headline"], client_scores(run)
    if not scores:
        return ""
    worst, mean = scores[-1], sum(line[metric] for line in scores) / len(scores)
    figures = f"{score_figure(worst[metric])}; the mean over the clients is {score_figure(mean)}"
    return f"{metric} of each client, the worst at the bottom: {worst['client']} with {figures}."


@picture
def clients_plot(run: Run) -> Figure | None:
    """The headline score of each client, the worst at the bottom; of very many the worst alone."""
    metric, scores = run.result["headline"], client_scores(run)[-CLIENTS_SHOWN:]
    if not scores:
        return None
    figure = Figure(figsize=(WIDTH, max(1.6, 0.5 + 0.2 * len(scores))), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(scores), 0, -1)
    axes.plot([line[metric] for line in scores], places, "o", color=COLORS[0])
    axes.plot([scores[-1][metric]], [1], "o", color=COLORS[1])
    axes.set_yticks(list(places), [short_name(line["client"]) for line in scores])
    axes.set_xlabel(f"{metric} (lower is better)" if metric in LOWER_IS_BETTER else metric)
    return figure
