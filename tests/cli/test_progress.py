"""What a run prints while it goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedstrata.cli import progress
from fedstrata.cli.progress import Display, ForecastDisplay
from fedstrata.cli.site_progress import SiteDisplay
from fedstrata.cli.sweep_progress import SweepDisplay
from fedstrata.cli.words import score_lines
from fedstrata.events import (
    Answered,
    Asked,
    Awaited,
    Baseline,
    CellEnded,
    CellEvent,
    CellStarted,
    Counted,
    Declined,
    Encoded,
    Event,
    Missed,
    Replied,
    RoundEnded,
    RunEnded,
    Scored,
    StageStarted,
    Stepped,
    Worked,
)
from fedstrata.reports.times import duration, time_left

STARTED = StageStarted("", "fedavg", 1, 0, {"a": 1}, ("newly initialized: head",))


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)


def printed(
    display: type[Display | ForecastDisplay | SweepDisplay], *events: Event, terminal: bool = False
) -> list[str]:
    console = Console(width=200, file=io.StringIO(), force_terminal=terminal)
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
        RoundEnded(0, 0.0),
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


def test_of_a_site_that_adds_noise_no_time_is_told() -> None:
    assert printed(Display, STARTED, Replied(0, "a", None, 1, 0.0, 3_100_000))[2:] == [
        "round 1/1  a  trained  3.1 MB in total, all clients"
    ]


def test_many_are_plural_and_a_resumed_run_says_so() -> None:
    lines = printed(Display, StageStarted("tune", "fedbt", 12, 2, {"a": 600, "b": 634}, ()))
    assert lines == ["tune: fedbt, 12 rounds, 2 clients, 1,234 examples", "continuing after 2 finished rounds"]


def test_a_perplexity_without_bounds_is_no_line_of_three_hundred_digits() -> None:
    [line] = score_lines(0, {"loss": 1523.394, "perplexity": 1.01423e304}, 2, Baseline())
    assert line == "round 1/2  loss 1523.3940  perplexity 1.014e+304"


def test_a_cell_tells_its_scores() -> None:
    cell = "good, seed 0"
    lines = printed(
        SweepDisplay,
        CellStarted(cell, 0, 2),
        CellEvent(cell, STARTED),
        CellEvent(cell, Scored(-1, {"loss": 2.0})),
        CellEvent(cell, Scored(0, {"loss": 1.0})),
        CellEvent(cell, RoundEnded(0, 0.0)),
        CellEnded(cell, "finished", None, 12.0),
        CellStarted("bad, seed 0", 1, 2, 1),
        CellEnded("bad, seed 0", "failed", "its training diverged", 3.0),
    )
    assert lines == [
        "good, seed 0: started, cell 1 of 2",
        "good, seed 0: before training  loss 2.0000",
        "good, seed 0: round 1/1  loss 1.0000",
        "good, seed 0: finished after 12 s; 1 of 2 cells done, about 0.0 s left",
        "bad, seed 0: started, cell 2 of 2",
        "bad, seed 0: failed after 3.0 s; 2 of 2 cells done: its training diverged",
    ]


def test_a_forecast_is_silent_in_a_log_until_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Counted("plans", 20_000, 100_000), Counted("rounds", 1, 1_000), Counted("clients", 9, 600), STARTED]
    assert printed(ForecastDisplay, *events) == []
    monkeypatch.setattr(ForecastDisplay, "SILENCE", -1.0)
    assert printed(ForecastDisplay, *events) == [
        "fedstrata: 20,000 of 100,000 plans",
        "fedstrata: 1 of 1,000 rounds",
        "fedstrata: the noise of 9 of 600 clients",
    ]


def test_a_run_says_every_million_plans() -> None:
    events = [Counted("plans", done, 3_000_000) for done in (20_000, 1_000_000, 1_020_000, 2_000_000)]
    lines = ["checked 1,000,000 of 3,000,000 plans", "checked 2,000,000 of 3,000,000 plans"]
    assert printed(Display, *events, Encoded(3, 5)) == lines


def test_a_run_says_how_far_the_noise_is_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(Display, Counted("clients", 9, 600)) == []
    monkeypatch.setattr(Display, "SILENCE", -1.0)
    assert printed(Display, Counted("clients", 9, 600)) == ["calibrated the noise of 9 of 600 clients"]


TWO_ROUNDS = (
    StageStarted("", "fedavg", 2, 0, {"a": 1, "b": 1}, (), baseline=Baseline("the mean", "loss", {"loss": 9.0})),
    Stepped(0, "a", 1, 4, 0.9, 8),
    Stepped(0, "b", 2, 4, 0.7, 8),
    Replied(0, "a", 0.5, 1, 2.0, 1_000_000),
    Replied(0, "b", 0.7, 1, 2.0, 2_000_000),
    RoundEnded(0, 4000.0),
    Replied(1, "a", None, 1, 2.0, 3_000_000),
    Scored(1, {"loss": 1.0}),
    RoundEnded(1, 0.0),
)


def test_a_log_says_every_minute_what_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [line for line in printed(Display, *TWO_ROUNDS) if "left" in line]
    monkeypatch.setattr(Display, "SILENCE", -1.0)
    lines = [line for line in printed(Display, *TWO_ROUNDS) if "left" in line]
    assert lines == ["round 1/2  done, about 67 min left"]
    assert not [line for line in printed(Display, *TWO_ROUNDS, terminal=True) if "done" in line]


def test_a_terminal_has_a_bar_per_client_and_a_line_per_reply() -> None:
    console = Console(width=200, file=io.StringIO(), force_terminal=True, highlight=False)
    with Display(console) as shown:
        for event in TWO_ROUNDS[:3]:
            shown(event)
        texts = [(task.description, task.completed) for task in shown.bar.tasks]
        assert texts == [
            ("round 1/2  0.0 MB", 0.375),
            ("a  loss 0.900  step 1 of 4  8000000000/s", 1),
            ("b  loss 0.700  step 2 of 4  8000000000/s", 2),
        ]
        for event in TWO_ROUNDS[3:6]:
            shown(event)
        [only] = shown.bar.tasks
        assert (only.completed, only.total, only.fields["left"]) == (1.0, 2.0, "about 0.0 s left")
    assert isinstance(console.file, io.StringIO)
    assert "round 1/2  a  loss 0.5000  4 examples/s  1.0 MB in total, all clients" in console.file.getvalue()


def test_a_log_that_is_silent_for_long_says_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [STARTED, Awaited(0, ("b", "c"), 60.0)]
    assert len(printed(Display, *waits)) == 2
    monkeypatch.setattr(Display, "SILENCE", -1.0)
    assert "round 1/1  waiting for b, c until " in printed(Display, *waits)[-1]
    assert printed(Display, *waits, terminal=True)[-1] != printed(Display, *waits)[-1]
    assert "round 1/1  a  loss 0.900  step 1 of 4" in printed(Display, STARTED, Stepped(0, "a", 1, 4, 0.9, 8))[-1]


def test_a_resumed_sweep_counts_the_cells_of_before() -> None:
    lines = printed(SweepDisplay, CellStarted("c", 5, 9, 5), CellEnded("c", "finished", None, 1.0))
    assert lines[-1].startswith("c: finished after 1.0 s; 6 of 9 cells done, about ")


def test_durations_are_words() -> None:
    seconds = [0, 9.94, 99, 101, 5999, 6001, 86_400 * 3]
    assert [duration(one) for one in seconds] == [
        "0.0 s",
        "9.9 s",
        "99 s",
        "2 min",
        "1 h 40 min",
        "1 h 40 min",
        "3 days",
    ]


def test_what_is_left_follows_from_what_is_done() -> None:
    lefts = [time_left(70.0, done, 12) for done in (0, 3, 12)]
    assert lefts == ["", "about 90 s left", ""]


SITE = [
    Asked("r", "fedavg", "train", 3, 20),
    Worked(1, 4, 0.9, 8),
    Answered(failed=False),
    Asked("r", "fedavg", "evaluate", 3, 20),
    Answered(failed=False),
    Asked("r", "fedavg", "train", 4, 20),
    Answered(failed=True),
    Declined("r", "refuses: so"),
    Declined("r", "refuses: so"),
    RunEnded("another"),
    RunEnded("r"),
]


def site_lines(terminal: bool) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=terminal, highlight=False)
    with SiteDisplay(console, "clinic") as shown:
        for event in SITE:
            shown(event)
            works = not isinstance(event, Answered | Declined | RunEnded)
            assert shown.bar.live.is_started == (terminal and works)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_site_shows_what_it_works_at() -> None:
    start, end = "clinic: takes part in a run: fedavg, 20 rounds", "clinic: the run is over"
    refused = "clinic: run r: refuses: so"
    line = "clinic: round 4/20  trained in 0.0 s  loss 0.9000  about 0.0 s left"
    shown = site_lines(terminal=True)
    assert "loss 0.900  step 1 of 4" in shown
    assert [shown.count(text) for text in (start, line, refused, end, "trained in")] == [1, 1, 1, 1, 1]
    assert [text for text in site_lines(terminal=False).splitlines() if text] == [start, refused, end]


def test_what_is_left_at_a_site_does_not_grow_by_the_hours_of_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted as if every round took as long."""
    console = Console(width=200, file=io.StringIO(), force_terminal=True, highlight=False)
    with SiteDisplay(console, "clinic") as shown:
        monkeypatch.setattr(progress.time, "monotonic", lambda: -10.0)
        shown(Asked("r", "fedavg", "evaluate", -1, 20))
        shown(Answered(failed=False))
        for round, at in enumerate((0, 60, 120, 180, 40_000)):
            monkeypatch.setattr(progress.time, "monotonic", lambda at=at: at)
            shown(Asked("r", "fedavg", "train", round, 20))
            monkeypatch.setattr(progress.time, "monotonic", lambda at=at: at + 50.0)
            shown(Answered(failed=False))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "round 1/20  trained in 50 s  about 19 min left" in text
    assert "round 4/20  trained in 50 s  about 16 min left" in text
    assert "round 5/20  trained in 50 s  about 15 min left" in text


def test_the_log_of_a_site_has_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiteDisplay, "SILENCE", -1.0)
    lines = [text.partition("  ")[0] for text in site_lines(terminal=False).splitlines() if text]
    assert lines[1:-2] == ["clinic: round 4/20", "clinic: round 4/20"]
