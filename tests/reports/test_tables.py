"""The numbers of a report are those of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from fedstrata.reports.page import write_page
from fedstrata.reports.runs import load_run
from fedstrata.reports.tables import client_rows, figure, result_rows, result_table, score_figure

Make = Callable[..., Path]


def shown(*folders: Path) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(result_table([load_run(folder) for folder in folders]))
        return console.export_text()


def test_a_row_is_per_client_and_in_mb(run: Make) -> None:
    [row] = result_rows([load_run(run())])
    assert (row["up_mb"], row["down_mb"], row["total_mb"]) == (9.0, 9.0, 36.0)
    assert row["setup_mb"] == 22.0
    assert (row["tflops"], row["seconds"], row["score"]) == (12.0, 75.5, 2.0)


def test_stages_are_summed_and_scored_by_the_last(staged: Make) -> None:
    [row] = result_rows([load_run(staged("pretrain", "finetune"))])
    assert (row["up_mb"], row["tflops"], row["seconds"], row["rounds"]) == (18.0, 24.0, 151.0, 6)
    assert row["method"] == "fedbfpt → fedbfpt"


def test_client_rows_are_the_clients_own_lines(run: Make) -> None:
    first, second = client_rows(load_run(run()))
    assert (first["client"], first["examples"], first["rounds"]) == ("client-0", 120, 3)
    assert (first["up_mb"], first["tflops"], first["seconds"]) == (9.0, 6.0, 3.75)
    assert second["loss"] == pytest.approx(2.5)


def test_the_terminal_table_fits_80_columns_and_says_its_units(run: Make, staged: Make) -> None:
    text = shown(run("a-run-with-a-rather-long-name"), staged("one", "two"))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("fedbfpt →", "2.000", "9.0", "MB = 1 000 000 bytes", "not wall time"):
        assert word in text.replace("\n", " "), word


def test_a_spread_is_said_to_be_that_of_the_clients(run: Make) -> None:
    """A run of one seed showed a score ± a number, and no word of what that is."""
    clients = {f"client-{i}": {"examples": 120, "score": {"loss": 1.0 + i}} for i in range(2)}
    one, own = run("one"), run("own", method="local", score={"loss": 1.5})
    result = json.loads((own / "result.json").read_text())
    (own / "result.json").write_text(json.dumps({**result, "clients": clients}))
    words = "±: mean and standard deviation over the clients"
    assert words in " ".join(shown(own).split())
    assert "±" not in shown(one)
    pages = [write_page([load_run(folder)], folder / "page.html").read_text("utf-8") for folder in (one, own)]
    assert [words in unescape(page) for page in pages] == [False, True]


def test_a_failed_run_shows_its_status(run: Make) -> None:
    assert "failed" in shown(run(status="failed", score={}))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.0001, "<0.001"), (0.5, "0.500"), (2, "2.00"), (1234.56, "1,234.6")],
)
def test_figures(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_score_figures() -> None:
    assert [score_figure(value) for value in (None, 0.12345, -0.5, 1558.07)] == ["–", "0.123", "-0.500", "1,558.1"]
    assert score_figure(1.01423e304) == "1.01e+304", "the perplexity of a model that has diverged"
