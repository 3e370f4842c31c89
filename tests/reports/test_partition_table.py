from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedstrata.plan.kinds import Index
from fedstrata.reports.partition import label_counts, partition_picture, partition_table

SHARDS = {"bern": np.array([0, 1, 2]), "oslo": np.array([3]), "rom": np.array([4, 5, 6, 7])}
LABELS = ["no", "yes", "no", "yes", "no", "no", "no", "maybe"]


def many(clients: int, labels: int, length: int = 9) -> tuple[dict[str, Index], list[str]]:
    """Clients of 20 rows, and labels of which the later ones are the rarer."""
    shards = {f"client-{i:02}": np.arange(20 * i, 20 * i + 20) for i in range(clients)}
    draws = np.random.default_rng(0).geometric(0.2, 20 * clients) - 1
    draws[:labels] = range(labels)  # every label at least once
    return shards, [f"{'role' * length}"[: length - 2] + f"{min(draw, labels - 1):02}" for draw in draws]


def printed(table: Table, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def figures(line: str) -> list[str]:
    return [word for word in line.split() if not set(word) & set("█▏▎▍▌▋▊▉")]


def test_the_table_holds_rows_shares_and_counts() -> None:
    head, rule, *rows, gap, foot = printed(partition_table(SHARDS, LABELS))
    assert head.split() == ["client", "rows", "%", "maybe", "no", "yes"]
    assert [figures(row) for row in rows] == [
        ["bern", "3", "37.5", "0", "2", "1"],
        ["oslo", "1", "12.5", "0", "0", "1"],
        ["rom", "4", "50.0", "1", "3", "0"],
    ]
    assert figures(foot) == ["all", "8", "100.0", "1", "5", "2"]
    assert (set(rule), gap) == ({"─"}, "")


def test_bars_are_in_proportion_to_the_largest_client() -> None:
    rows = printed(partition_table(SHARDS, None))[2:5]
    assert [row.split()[-1] for row in rows] == ["█" * 6, "█" * 2, "█" * 8]


def test_without_labels_there_are_no_counts() -> None:
    head, _, row, *_ = printed(partition_table(SHARDS, None))
    assert head.split() == ["client", "rows", "%"]
    assert figures(row) == ["bern", "3", "37.5"]


def test_an_empty_client_is_shown_as_such() -> None:
    table = partition_table({"a": np.array([0]), "b": np.array([], dtype=np.int64)}, ["x"])
    assert figures(printed(table)[3]) == ["b", "0", "0.0", "0"]
    assert figures(printed(partition_table({"a": np.array([], dtype=np.int64)}, None))[2]) == ["a", "0", "0.0"]


@pytest.mark.parametrize("length", [2, 9, 200])
def test_fifty_clients_and_23_labels_fit_80_columns(length: int) -> None:
    shards, labels = many(50, 23, length)
    lines = printed(partition_table(shards, labels), width=200)
    assert max(map(len, lines)) <= 80
    assert printed(partition_table(shards, labels)) == lines
    start = next(i for i, line in enumerate(lines) if line.startswith("client-00"))
    assert start <= 4, "a long label takes three lines at the most"
    assert [line.split()[0] for line in lines[start : start + 50]] == list(shards)
    counts = [list(map(int, figures(line)[3:])) for line in lines[start : start + 50]]
    assert {sum(row) for row in counts} == {20}
    assert figures(lines[-1])[3:] == [str(sum(column)) for column in zip(*counts, strict=True)]


def test_long_names_and_wide_letters_stay_within_80_columns() -> None:
    shards = {"x" * 50: np.arange(900_000), "心臓" * 12: np.arange(900_000, 900_009)}
    labels = [f"腎臓の病気{i % 9}" for i in range(900_009)]
    table = partition_table(shards, labels)
    assert table.columns[0].width == 20
    assert Console(width=200).measure(table).maximum <= 80


def test_rare_labels_are_counted_together() -> None:
    heads, counts = label_counts(SHARDS, LABELS, 2)
    assert heads == ["no", "other"]
    assert counts.tolist() == [[2, 1], [0, 1], [3, 1]]
    assert label_counts(SHARDS, LABELS, 3)[0] == ["maybe", "no", "yes"]
    assert label_counts(SHARDS, None, 3)[1].shape == (3, 0)


def bars(figure: Figure) -> list[list[float]]:
    """Widths of the bars, client by client."""
    axes = figure.axes[0]
    return [
        list(row) for row in zip(*([bar.get_width() for bar in group] for group in axes.containers), strict=True)
    ]


def test_the_picture_stacks_the_counts_from_the_top() -> None:
    figure = partition_picture(SHARDS, LABELS)
    axes = figure.axes[0]
    assert bars(figure) == [[0, 2, 1], [0, 0, 1], [1, 3, 0]]
    assert [[bar.get_x() for bar in group] for group in axes.containers] == [[0, 0, 0], [0, 0, 1], [2, 0, 4]]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(SHARDS)
    assert axes.yaxis_inverted()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["maybe", "no", "yes"]


def test_the_picture_without_labels_has_one_bar_each() -> None:
    figure = partition_picture(SHARDS, None)
    assert bars(figure) == [[3], [1], [4]]
    assert not figure.legends


def test_the_picture_tells_every_label_by_its_color() -> None:
    figure = partition_picture(*many(50, 23))
    assert len(figure.axes[0].containers) == 23
    assert len({group[0].get_facecolor() for group in figure.axes[0].containers}) == 23
    assert np.sum(bars(figure)) == 1000


def test_the_picture_takes_any_label(tmp_path: Path) -> None:
    labels = ["_hidden", "$x^", "long " * 40, "عربي", *LABELS[4:]]
    figure = partition_picture(SHARDS, labels)
    figure.savefig(tmp_path / "rows.png", dpi=50)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[:2] == ["$x^", "_hidden"]
    assert max(map(len, texts)) == 40
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("clients", [3, 1000])
def test_the_picture_spells_out_what_turns_the_direction_of_writing(clients: int) -> None:
    """An SVG held it, and a browser turned round what stood beside it."""
    shards, labels = many(clients, 3)
    named = {f"\u202e{name}": rows for name, rows in shards.items()}
    figure = partition_picture(named, [f"\u2066{label}" for label in labels])
    texts = [text.get_text() for text in (*figure.axes[0].get_yticklabels(), *figure.legends[0].get_texts())]
    assert all(text.isascii() for text in texts)
    assert sum(text.startswith("\\u2066") for text in texts) == 3


@pytest.mark.parametrize("labeled", [True, False])
def test_the_picture_of_very_many_clients_has_a_bar_for_several(labeled: bool) -> None:
    """A bar and a name for each of 5,000 took more than 100 seconds and 1.3 GB."""
    shards, labels = many(1000, 3)
    figure = partition_picture(shards, [f"${label}" for label in labels] if labeled else None)
    [axes] = figure.axes
    assert axes.get_xlabel() == "clients, from the largest to the smallest"
    assert axes.get_ylabel() == "rows"
    assert len(axes.patches) == (3 if labeled else 1)
    assert not any(text.get_parse_math() for legend in figure.legends for text in legend.get_texts())
    assert max(figure.get_size_inches()) < 10
    figure.savefig(io.BytesIO(), format="png", dpi=150)
