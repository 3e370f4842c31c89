"""The pictures: the same bytes for the same run, the right axes, nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedstrata.reports import plots
from fedstrata.reports.partition_plot import BARS_SHOWN, partition_plot
from fedstrata.reports.picture import COLORS
from fedstrata.reports.plots import LINES_SHOWN
from fedstrata.reports.runs import load_run
from fedstrata.reports.tables import ROWS_SHOWN, client_rows, shown_rows

Make = Callable[..., Path]


def test_every_picture_is_an_svg_and_deterministic(run: Make) -> None:
    made = load_run(run(labels=["eye", "heart"]))
    for draw in (
        lambda: plots.score_plot([made], "round", "bytes", "flops"),
        lambda: plots.loss_plot(made),
        lambda: plots.schedule_plot(made, "client-0"),
        lambda: plots.bytes_plot(made),
        lambda: plots.partition_plot(made.partition),
    ):
        picture = draw()
        assert picture.startswith("<svg")
        assert picture == draw()
        assert not re.search(r"<(image|script)\b", picture)


def test_axes_say_what_they_count(run: Make) -> None:
    picture = plots.score_plot([load_run(run())], "round", "bytes", "flops")
    for words in ("MB", "TFLOP", "not wall time", "0: before training", "loss"):
        assert words in picture, words


def test_nothing_is_drawn_of_nothing(run: Make) -> None:
    folder = run()
    for name in ("result.json", "rounds.jsonl", "ledger.jsonl", "partition.json"):
        (folder / name).unlink()
    made = load_run(folder)
    assert plots.loss_plot(made) == plots.bytes_plot(made) == plots.partition_plot(made.partition) == ""
    assert plots.score_plot([made], "round") == ""


def test_rounds_are_drawn_from_1_and_the_start_model_at_0(run: Make) -> None:
    made = load_run(run())
    # what the decorator turns into an SVG
    scores, losses, schedule, sent = (
        plot.__wrapped__(*arguments)
        for plot, arguments in (
            (plots.score_plot, ([made], "round", "bytes")),
            (plots.loss_plot, (made,)),
            (plots.schedule_plot, (made, "client-0")),
            (plots.bytes_plot, (made,)),
        )
    )
    assert list(scores.axes[0].lines[0].get_xdata()) == [0, 1, 2, 3]
    assert list(scores.axes[1].lines[0].get_xdata()) == [0.0, 12.0, 24.0, 36.0]
    assert list(losses.axes[0].lines[0].get_xdata()) == [1, 2, 3]
    many = load_run(run("many", clients=[f"client-{i}" for i in range(len(COLORS) + 1)]))
    means = plots.loss_plot.__wrapped__(many).axes[0].lines[-1]
    assert (means.get_label(), list(means.get_xdata())) == ("mean, weighted by examples", [1, 2, 3])
    assert schedule.axes[0].get_xlim() == (0.5, 3.5)
    edges = sent.axes[0].patches[0].get_data().edges
    assert [round(edge, 1) for edge in edges] == [0.6, 1.4, 1.6, 2.4, 2.6, 3.4]


def drawn(path: list[str]) -> int:
    """How many shapes and lines a picture has."""
    return sum(picture.count("<path") + picture.count("<use") for picture in path)


def test_a_page_does_not_grow_with_the_number_of_clients(run: Callable[..., Path]) -> None:
    """Pictures and table show so many clients at most, and say what they leave out."""
    sizes = {}
    for number in (300, 3000):
        names = [f"client-{i:04}" for i in range(number)]
        labels = {name: {"rows": i, "examples": i, "labels": {"a": i, "b": 1}} for i, name in enumerate(names)}
        made = replace(load_run(run(f"many-{number}", clients=names)), partition={"clients": labels})
        pictures = list(plots.run_pictures(made))
        sizes[number] = drawn([svg for svg, _, _ in pictures])
        said = " ".join(caption for _, caption, _ in pictures)
        assert f"{LINES_SHOWN} of the {number:,} that trained" in said
        assert f"a bar for every {-(-number // BARS_SHOWN)} of {number:,}" in said
        rows, others = shown_rows(made, client_rows(made))
        assert len(rows) == ROWS_SHOWN
        assert f"other {number - ROWS_SHOWN:,} have" in others
    assert sizes[3000] <= sizes[300] + 20


def test_grouped_bars_are_the_means_of_their_clients() -> None:
    clients = {f"c{i}": {"rows": i, "examples": i, "labels": None} for i in range(2 * BARS_SHOWN)}
    axes = partition_plot.__wrapped__({"clients": clients}).axes[0]
    [bars] = axes.patches
    heights = bars.get_data().values
    assert len(heights) == BARS_SHOWN
    assert heights[0] == 2 * BARS_SHOWN - 1.5, "the mean of the two largest"
    assert sum(heights) * 2 == sum(range(2 * BARS_SHOWN))
