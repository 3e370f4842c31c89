"""The confusion matrix of a final model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from fedstrata.reports.picture import WIDTH, picture, short_name

LARGEST = 40
"""Classes of a matrix that is drawn."""
NUMBERED = 8
"""Up to so many classes each cell has its number."""
INCHES = 0.09
"""Width of a letter of a class's name."""


@picture
def confusion_plot(classes: Mapping[str, Any]) -> Figure | None:
    """Of each true class (a row) which share was taken for which class (a column).

    Args:
        classes: ``labels`` and ``confusion``, counts ``[true][predicted]``; empty for nothing.
    """
    matrix, labels = classes.get("confusion"), classes.get("labels", [])
    if not matrix or len(labels) > LARGEST:
        return None
    shares = [[n / max(1, sum(row)) for n in row] for row in matrix]
    names = [short_name(label) for label in labels]
    below = INCHES * max(map(len, names))  # the columns' names stand upright
    figure = Figure(figsize=(WIDTH, min(WIDTH, 1.0 + below + 0.3 * len(labels))), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(False)
    edges = [i - 0.5 for i in range(len(labels) + 1)]
    axes.pcolormesh(edges, edges, shares, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_yticks(range(len(labels)), names)
    axes.set_xticks(range(len(labels)), names, rotation=90)
    axes.set_ylabel("true class")
    axes.set_xlabel("predicted class")
    for i, row in enumerate(matrix if len(labels) <= NUMBERED else ()):
        for j, n in enumerate(row):
            dark = shares[i][j] > 0.5
            axes.text(j, i, f"{n:,}", ha="center", va="center", color="white" if dark else "black")
    return figure


def confusion_records(classes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line per true and predicted class with its count."""
    labels, matrix = classes.get("labels", []), classes.get("confusion") or []
    return [
        {"true": labels[i], "predicted": labels[j], "examples": n}
        for i, row in enumerate(matrix)
        for j, n in enumerate(row)
    ]
