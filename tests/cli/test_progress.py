"""What a run prints while it goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedstrata.cli.progress import Display, ForecastDisplay, SweepDisplay
from fedstrata.events import CellEvent, CellStarted, Counted, Encoded, Event, Missed, Replied, Scored, StageStarted

STARTED = StageStarted("", "fedavg", 1, 0, {"a": 1}, ("newly initialized: head",))


def printed(display: type[Display | ForecastDisplay | SweepDisplay], *events: Event) -> list[str]:
    console = Console(width=200, file=io.StringIO())
    with display(console) as shown:
        for event in events:
            shown(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_rounds_count_from_1_and_nouns_are_in_number() -> None:
    lines = printed(
        Display,
        STARTED,
        Scored(-1, {"accuracy": 0.25}),
        Replied(0, "a", 0.5, 1, 2.0, 3_100_000),
        Missed(-1, "b", "is not connected"),
        Missed(0, "b", "is not connected"),
        Scored(0, {"accuracy": 0.5}),
    )
    assert lines == [
        "fedavg, 1 round, 1 client, 1 example",
        "note: newly initialized: head",
        "before training  accuracy 0.2500",
        "round 1/1  a  loss 0.5000  2.0 s  3.1 MB in total, all clients",
        "before training  b  is not connected",
        "round 1/1  b  is not connected",
        "round 1/1  accuracy 0.5000",
    ]


def test_many_are_plural_and_a_resumed_run_says_so() -> None:
    lines = printed(Display, StageStarted("tune", "fedbt", 12, 2, {"a": 600, "b": 634}, ()))
    assert lines == ["tune: fedbt, 12 rounds, 2 clients, 1,234 examples", "continuing after 2 finished rounds"]


def test_a_cell_tells_its_scores() -> None:
    cell = "good, seed 0"
    lines = printed(
        SweepDisplay,
        CellStarted(cell, 0, 2),
        CellEvent(cell, STARTED),
        CellEvent(cell, Scored(-1, {"loss": 2.0})),
        CellEvent(cell, Scored(0, {"loss": 1.0})),
    )
    assert lines == [
        "good, seed 0: started, cell 1 of 2",
        "good, seed 0: before training  loss 2.0000",
        "good, seed 0: round 1/1  loss 1.0000",
    ]


def test_a_forecast_is_silent_in_a_log_until_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Counted("plans", 20_000, 100_000), Counted("rounds", 1, 1_000), STARTED]
    assert printed(ForecastDisplay, *events) == []
    monkeypatch.setattr(ForecastDisplay, "SILENCE", -1.0)
    assert printed(ForecastDisplay, *events) == [
        "fedstrata: 20,000 of 100,000 plans",
        "fedstrata: 1 of 1,000 rounds",
    ]


def test_a_run_says_every_million_plans() -> None:
    events = [Counted("plans", done, 3_000_000) for done in (20_000, 1_000_000, 1_020_000, 2_000_000)]
    lines = ["checked 1,000,000 of 3,000,000 plans", "checked 2,000,000 of 3,000,000 plans"]
    assert printed(Display, *events, Encoded(3, 5)) == lines
