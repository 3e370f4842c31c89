"""The pictures: the same bytes for the same run, the right axes, nothing from outside."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedstrata.reports import plots
from fedstrata.reports.client_scores import clients_plot, worst_words
from fedstrata.reports.confusion import confusion_plot
from fedstrata.reports.downloads import MOST_ROWS, csv_text, latex_text, links
from fedstrata.reports.page import write_page
from fedstrata.reports.partition_plot import BARS_SHOWN, partition_plot
from fedstrata.reports.picture import COLORS, NAME_LENGTH, short_name
from fedstrata.reports.plots import LINES_SHOWN
from fedstrata.reports.runs import load_run
from fedstrata.reports.summary import summary
from fedstrata.reports.sweep_page import SweepPoint, front, sweep_plot
from fedstrata.reports.tables import ROWS_SHOWN, client_rows, shown_rows

Make = Callable[..., Path]


def test_every_picture_is_an_svg_and_deterministic(run: Make) -> None:
    made = load_run(run(labels=["eye", "heart"]))
    for draw in (
        lambda: plots.score_plot([made], "bytes"),
        lambda: plots.loss_plot(made),
        lambda: plots.schedule_plot(made, "client-0"),
        lambda: plots.bytes_plot(made, "up"),
        lambda: plots.partition_plot(made.partition),
    ):
        picture = draw()
        assert picture.startswith("<svg")
        assert picture == draw()
        assert not re.search(r"<(image|script)\b", picture)


def test_axes_say_what_they_count(run: Make) -> None:
    made = load_run(run())
    words = {"round": "0: before training", "bytes": "MB in total", "flops": "not wall time"}
    for cost in plots.CURVES:
        picture = plots.score_plot([made], cost)
        assert words[cost] in picture
        assert "loss" in picture


def test_nothing_is_drawn_of_nothing(run: Make) -> None:
    folder = run()
    for name in ("result.json", "rounds.jsonl", "ledger.jsonl", "partition.json"):
        (folder / name).unlink()
    made = load_run(folder)
    assert plots.loss_plot(made) == plots.bytes_plot(made, "up") == plots.partition_plot(made.partition) == ""
    assert plots.score_plot([made], "round") == ""


def test_rounds_are_drawn_from_1_and_the_start_model_at_0(run: Make) -> None:
    made = load_run(run())
    # what the decorator turns into an SVG
    scores, costs, losses, schedule, sent = (
        plot.__wrapped__(*arguments)
        for plot, arguments in (
            (plots.score_plot, ([made], "round")),
            (plots.score_plot, ([made], "bytes")),
            (plots.loss_plot, (made,)),
            (plots.schedule_plot, (made, "client-0")),
            (plots.bytes_plot, (made, "up")),
        )
    )
    assert list(scores.axes[0].lines[0].get_xdata()) == [0, 1, 2, 3]
    assert list(costs.axes[0].lines[0].get_xdata()) == [0.0, 12.0, 24.0, 36.0]
    assert list(losses.axes[0].lines[0].get_xdata()) == [1, 2, 3]
    many = load_run(run("many", clients=[f"client-{i}" for i in range(len(COLORS) + 1)]))
    means = plots.loss_plot.__wrapped__(many).axes[0].lines[-1]
    assert (means.get_label(), list(means.get_xdata())) == ("mean, weighted by examples", [1, 2, 3])
    assert schedule.axes[0].get_xlim() == (0.5, 3.5)
    edges = sent.axes[0].patches[0].get_data().edges
    assert [round(edge, 1) for edge in edges] == [0.6, 1.4, 1.6, 2.4, 2.6, 3.4]


def test_what_scores_the_start_model_stands_with_the_first_round(run: Make) -> None:
    made = load_run(run())
    start = {
        "round": -1,
        "client": "client-0",
        "phase": "evaluate",
        "direction": "down",
        "part": "head",
        "bytes": 7,
    }
    more = replace(made, ledger=(*made.ledger, start))
    before, after = (
        next(one.records for one in plots.run_pictures(each) if one.title == "Traffic down by part")
        for each in (made, more)
    )
    grown = {(line["part"], line["round"]): line["bytes"] for line in after}
    for line in before:
        grown[line["part"], line["round"]] -= line["bytes"]
    assert {place: size for place, size in grown.items() if size} == {("head", 1): 7}
    assert more.bytes_by_round - made.bytes_by_round == {-1: 7}


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
        sizes[number] = drawn([one.svg for one in pictures])
        said = " ".join(one.caption for one in pictures)
        assert f"{LINES_SHOWN} of the {number:,} that trained" in said
        assert f"a bar for every {-(-number // BARS_SHOWN)} of {number:,}" in said
        rows, others = shown_rows(made, client_rows(made))
        assert len(rows) == ROWS_SHOWN
        assert f"other {number - ROWS_SHOWN:,} have" in others
    assert sizes[3000] <= sizes[300] + 20


def test_of_sampled_clients_a_page_says_how_many_trained_and_how_many_it_draws(run: Make) -> None:
    """The caption had as many as can be drawn, the first sentence all clients, who trained once was not seen."""
    made = load_run(run(clients=[f"client-{i:03}" for i in range(200)]))
    lines = [line for line in made.rounds if line["client"] == "server" or line["client"] < "client-078"]
    sampled = replace(made, rounds=[line for line in lines if line["client"] == "server" or line["round"] == 1])
    [losses] = [one for one in plots.run_pictures(sampled) if one.title == "Training loss"]
    assert "39 of 78 clients" in losses.svg
    assert "Gray: 39 of the 78 that trained;" in losses.caption
    assert losses.svg.count("<use") > 39 + 2, "a point for each"
    assert summary(sampled).startswith("78 of 200 clients with 12,363 examples trained and sent")


def test_grouped_bars_are_the_means_of_their_clients() -> None:
    clients = {f"c{i}": {"rows": i, "examples": i, "labels": None} for i in range(2 * BARS_SHOWN)}
    axes = partition_plot.__wrapped__({"clients": clients}).axes[0]
    [bars] = axes.patches
    heights = bars.get_data().values
    assert len(heights) == BARS_SHOWN
    assert heights[0] == 2 * BARS_SHOWN - 1.5, "the mean of the two largest"
    assert sum(heights) * 2 == sum(range(2 * BARS_SHOWN))


def test_quintiles_are_in_order_and_a_page_says_what_they_are(run: Make) -> None:
    """Their medians stood in the order of words, like classes: 1.7, 11.57, 3.455."""
    made = load_run(run(labels=["1.7", "11.57", "3.455"], task="regress"))
    shown = {one.title: one for one in plots.run_pictures(made)}
    rows = shown["Rows of each client"]
    assert list(rows.records[0]) == ["client", "1.7", "3.455", "11.57"]
    assert rows.caption.endswith(" Colors: quintiles of the values, by their median.")
    assert "Colors: sentences by the type of entity" in caption_of(run("tag", labels=["O", "eye"], task="tag"))
    assert "Colors" not in caption_of(run("classes", labels=["eye", "heart"]))


def caption_of(folder: Path) -> str:
    """Of the rows of each client."""
    shown = {one.title: one.caption for one in plots.run_pictures(load_run(folder))}
    return shown["Rows of each client"]


def test_downloads_hold_the_figures_of_the_pictures(run: Make) -> None:
    made = load_run(run(labels=["eye", "heart"]))
    shown = {one.title: one for one in plots.run_pictures(made)}
    sent = shown["Traffic up by part"].records
    assert sum(line["bytes"] for line in sent) == made.result["bytes"]["up"]
    files = {link["label"]: link["href"] for link in links("Traffic up", sent, shown["Traffic up by part"].svg)}
    assert files.keys() == {"SVG", "CSV", "LaTeX"}
    text = base64.b64decode(files["CSV"].partition(",")[2]).decode()
    assert sum(int(line["bytes"]) for line in csv.DictReader(io.StringIO(text))) == made.result["bytes"]["up"]
    assert base64.b64decode(files["SVG"].partition(",")[2]).decode() == shown["Traffic up by part"].svg
    latex = base64.b64decode(files["LaTeX"].partition(",")[2]).decode()
    assert latex.count(r" \\") == len(sent) + 1
    assert links("many", [{"a": 1}] * (MOST_ROWS + 1)) == []


def test_downloads_count_rounds_from_1_as_the_pictures_do(run: Make, staged: Make, tmp_path: Path) -> None:
    """Those of the losses and of several runs counted from 0."""
    [losses] = [one for one in plots.run_pictures(load_run(run())) if one.title == "Training loss"]
    assert {line["round"] for line in losses.records} == {1, 2, 3}
    runs = [load_run(folder) for folder in (run("one"), staged("pre", "fine"))]
    text = write_page(runs, tmp_path / "all.html").read_text("utf-8")
    [href] = re.findall(r'download="loss-of-all-runs-against-rounds[^"]*\.csv" href="([^"]+)"', text)
    lines = list(csv.DictReader(io.StringIO(base64.b64decode(href.partition(",")[2]).decode())))
    assert [int(line["round"]) for line in lines if line["run"] == "one"] == [0, 1, 2, 3]
    assert "The score against rounds. Of a run with stages the rounds of the last." in text
    assert "The score against work done. A run with stages starts where its earlier stages ended." in text


def test_latex_takes_what_it_would_read_as_commands() -> None:
    """Among others what stands first in a row: the end of the row before takes a star or a bracket for its own."""
    assert r"50\% \& more\_x" in latex_text([{"a": "50% & more_x"}])
    assert "\n{[}1] a" in latex_text([{"a": "[1] a"}])
    assert "\n{*}a" in latex_text([{"a": "*a"}])
    assert r"a\textbar{}b $>$ c" in latex_text([{"a": "a|b > c"}]), "in LaTeX's first encoding a dash and a mark"
    assert r"$\alpha$=0.1, $\epsilon$ $\leq$ 8 $\Delta$ä" in latex_text([{"a": "α=0.1, ε ≤ 8 Δä"}])


def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers() -> None:
    """A class of the rows called =HYPERLINK(...) was a link in the spreadsheet of whoever opened the table."""
    labels = ["=1+1", "+a", "-a", "@a", "\t=1", "a=b", "-1", "+2.5", "-inf", "1e-3"]
    lines = list(csv.reader(io.StringIO(csv_text([{"true": label, "=x": -0.5} for label in labels]))))
    assert lines[0] == ["true", "'=x"]
    assert [line[0] for line in lines[1:]] == [*(f"'{label}" for label in labels[:5]), *labels[5:]]
    assert {line[1] for line in lines[1:]} == {"-0.5"}


def test_private_parts_are_shown_apart_from_sent_ones(run: Make) -> None:
    folder = run()
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        if line["client"] != "server":
            line["sent"] = ["head"]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = {one.title: one for one in plots.run_pictures(load_run(folder))}["Parts by round"]
    states = {(line["part"], line["round"]): line["state"] for line in shown.records}
    assert states["layer.0", 1] == "trained, kept"
    assert states["head", 1] == "trained, sent"
    assert "trained, kept" in shown.svg


def test_the_worst_client_is_named(run: Make) -> None:
    folder = run(headline="accuracy", clients=["a", "b", "c"])
    result = json.loads((folder / "result.json").read_text())
    for name, value in (("a", 0.9), ("b", 0.2), ("c", 0.4)):
        result["clients"][name]["score"] = {"accuracy": value}
    (folder / "result.json").write_text(json.dumps(result))
    made = load_run(folder)
    assert worst_words(made).endswith("the worst at the bottom: b with 0.200; the mean over the clients is 0.500.")
    axes = clients_plot.__wrapped__(made).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "c", "b"]


def test_the_front_leaves_out_what_another_row_beats() -> None:
    points = [
        SweepPoint("cheap", 0.6, 0, 1, 1),
        SweepPoint("dear", 0.8, 0, 9, 9),
        SweepPoint("beaten", 0.5, 0, 5, 5),
        SweepPoint("same", 0.6, 0, 2, 2),
    ]
    assert [point.row for point in front("accuracy", points, "mb")] == ["cheap", "dear"]
    assert [point.row for point in front("loss", points, "mb")] == ["cheap", "beaten"]


def test_a_matrix_of_few_classes_has_room_for_their_names() -> None:
    """A picture without room for its panel is a warning, and so an error here."""
    for name in ("no", "chronic kidney disease, stage", "w" * 60):
        svg = confusion_plot({"labels": [name, f"{name} 2"], "confusion": [[1, 2], [3, 4]]})
        assert svg.count("<text") == 4 + 4 + 2


def test_small_costs_are_written_with_a_power() -> None:
    points = [SweepPoint("a", 0.5, 0.1, 1.0, 0.00018), SweepPoint("b", 0.6, 0.1, 2.0, 0.00032)]
    svg = sweep_plot("accuracy", points, "tflops")
    assert "0.00018" not in svg
    assert "1e−4" in svg


@pytest.mark.parametrize(("mb", "ticks"), [([1, 200], ["1", "10", "100"]), ([2, 45], ["2", "10", "40"])])
def test_costs_far_apart_are_written_as_numbers(mb: list[float], ticks: list[str]) -> None:
    """A row that sends a hundredth of another's bytes: the axis had $\\mathdefault{10^{0}}$ at its ticks."""
    svg = sweep_plot("accuracy", [SweepPoint(f"row {i}", 0.5, 0.1, cost, 0.1) for i, cost in enumerate(mb)], "mb")
    written = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert not [one for one in written if "$" in one]
    assert set(ticks) <= set(written)


def test_rows_of_a_grid_have_names_of_their_own_in_a_legend() -> None:
    """They share a long beginning and differ at the end."""
    rows = [f"FedSplitBERT with local embeddings, batch_size={size}" for size in (4, 8)]
    names = [short_name(row) for row in rows]
    assert names[0] != names[1]
    assert all(len(name) == NAME_LENGTH and name.startswith("FedSplitBER") for name in names)
    svg = sweep_plot("accuracy", [SweepPoint(row, 0.5, 0.1, 1.0 + i, 0.1) for i, row in enumerate(rows)], "mb")
    assert all(name in svg for name in names)
