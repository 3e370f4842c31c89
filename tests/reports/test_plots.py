"""The pictures: the same bytes for the same run, the right axes, nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fedstrata.reports import plots
from fedstrata.reports.runs import load_run

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
    many = load_run(run("many", clients=[f"client-{i}" for i in range(len(plots.COLORS) + 1)]))
    means = plots.loss_plot.__wrapped__(many).axes[0].lines[-1]
    assert (means.get_label(), list(means.get_xdata())) == ("mean, weighted by examples", [1, 2, 3])
    assert schedule.axes[0].get_xlim() == (0.5, 3.5)
    edges = sent.axes[0].patches[0].get_data().edges
    assert [round(edge, 1) for edge in edges] == [0.6, 1.4, 1.6, 2.4, 2.6, 3.4]
