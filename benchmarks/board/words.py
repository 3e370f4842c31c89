"""The board's questions, answered from the figures that there are; without them the answer is that it is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from board.confirmation import Confirmation, shown
from board.protocol import BOUND, DENOMINATOR, Protocol
from board.statistics import equivalence, planned_power
from board.table import Entry, Table, paired

LIMITS = (0.01, 0.001, 0.0001)
"""Shares of FedAvg's bytes at which the best is named."""
OPEN = "Open: the runs that would answer it have not been made."


def answers(
    protocol: Protocol,
    tables: Sequence[Table],
    again: Sequence[Confirmation] = (),
    facts: Mapping[str, Any] | None = None,
) -> list[tuple[str, list[str]]]:
    """Question -> a sentence for each table that says something about it, each sentence once.

    Args:
        protocol: names the rows and tests.
        tables: of the first study.
        again: the confirmation.
        facts: of each task's rows, for the power of a test.
    """
    questions: list[tuple[str, Callable[[Protocol, Table], str | None]]] = [
        ("Is FedBFPT's trade worth its megabytes when all are tuned?", fedbfpt),
        ("When does FedBT win?", fedbt),
        ("What does splitting cost?", splitting),
        *(
            (f"What is the best there is at {percent(limit)} of FedAvg's bytes?", _at(limit, again))
            for limit in LIMITS
        ),
    ]
    found = []
    for question, answer in questions:
        said: dict[str, list[str]] = {}  # a sentence that is true of several tables stands once
        for table in tables:
            if text := answer(protocol, table):
                said.setdefault(text, []).append(title(table))
        found.append((question, [f"{'; '.join(names)}: {text}" for text, names in said.items()] or [OPEN]))
    for limit in LIMITS[:2]:
        question = f"On how many tasks is a score shown to be equal or better at {percent(limit)} or less?"
        found.append((question, _on_tasks(protocol, tables, again, facts or {}, limit)))
    return found


def title(table: Table) -> str:
    """A table by its task and partition, and by its start model where there are several."""
    model = f" ({table.model})" if table.model and not table.sole_model else ""
    return f"{table.group.task}, {table.group.partition}{model}"


def percent(share: float) -> str:
    """A share with two digits that count, such as ``0.016 %``; three where it is just above one of the limits."""
    if share >= 0.995:
        return f"{100 * share:.0f} %"
    text = f"{100 * share:.2g}"
    return f"{100 * share:.3g} %" if share > float(text) / 100 in LIMITS else f"{text} %"


def score(value: float) -> str:
    """A score as tables print it."""
    return f"{value:.4f}"


def fedbfpt(protocol: Protocol, table: Table) -> str | None:
    """What FedBFPT makes of its bytes, and who does better with no more of them."""
    entry, base = table.entry("FedBFPT"), table.entry(DENOMINATOR)
    if entry is None or base is None or entry.share is None:
        return None
    gain = "" if entry.gain is None else f" makes {percent(entry.gain)} of the centralized gain and"
    said = f"FedBFPT{gain} sends {percent(entry.share)} of FedAvg's bytes"
    rivals = [other for other in _cheaper(table, entry) if not other.row.name.startswith("FedBFPT")]
    surely = [other for other in rivals if _surely(protocol, table, other, entry)]
    if not surely:
        open_rows = [other.row.name for other in table.entries if not other.whole]
        rest = f" ({', '.join(open_rows)}: not run)" if open_rows else ""
        return f"{said}; no other row that has run is shown to do better with as few{rest}."
    best = max(surely, key=lambda other: other.gain or 0)
    assert best.mean is not None
    assert entry.mean is not None
    return (
        f"{said}; not worth it: {best.row.name} comes to {score(best.mean)} where FedBFPT comes to "
        f"{score(entry.mean)}, with {percent(best.bytes / entry.bytes)} of FedBFPT's bytes."
    )


def fedbt(protocol: Protocol, table: Table) -> str | None:
    """Whether one of FedBT's rows is on the front."""
    mine = [entry for entry in table.whole if entry.row.name.startswith("FedBT")]
    if not mine or table.entry(DENOMINATOR) is None:
        return None
    front = table.front()
    won = [entry.row.name for entry in mine if entry in front]
    if won:
        return f"{' and '.join(won)}: no other row that has run has a better mean score with as few bytes."
    beaten = [
        f"{entry.row.name} is beaten by {max(_cheaper(table, entry), key=lambda o: o.gain or 0).row.name}"
        for entry in mine
    ]
    return f"not here; {', '.join(beaten)}."


def splitting(protocol: Protocol, table: Table) -> str | None:
    """FedBERT's bytes and score beside FedAvg's."""
    mine = [entry for entry in table.whole if entry.row.name.startswith("FedBERT") and entry.test]
    said = [
        f"{entry.row.name} sends {percent(entry.share or 0)} of FedAvg's bytes; its score differs by "
        f"{entry.test.mean:+.4f} ({entry.test.verdict})"
        for entry in mine
        if entry.test
    ]
    return "; ".join(said) + "." if said else None


def _at(limit: float, again: Sequence[Confirmation]) -> Callable[[Protocol, Table], str | None]:
    def answer(protocol: Protocol, table: Table) -> str | None:
        if table.entry(DENOMINATOR) is None:
            return None
        fitting = [entry for entry in table.whole if entry.row.name != BOUND and (entry.share or 1) <= limit]
        if not fitting:
            return "nothing that has run sends so little."
        sign = -1 if table.metric == "loss" else 1
        best = max(fitting, key=lambda entry: sign * (entry.mean or 0))
        gain = "" if best.gain is None else f", {percent(best.gain)} of the centralized gain"
        return (
            f"{best.row.name} with {percent(best.share or 0)}: {score(best.mean or 0)} ± {score(best.sd or 0)}"
            f"{gain}; {verdict(protocol, best)}{_confirmed(protocol, table, best, again)}."
        )

    return answer


def _confirmed(protocol: Protocol, table: Table, entry: Entry, again: Sequence[Confirmation]) -> str:
    """What the confirmation of a row has shown; nothing where there is none with all its seeds."""
    words = {
        "equal": "is equal to FedAvg",
        "no worse": "is no worse than FedAvg by the margin",
        "worse": "is worse than FedAvg by more than the margin",
        "not shown": "is not shown to be no worse than FedAvg",
    }
    found = [one for one in again if one.table is table and one.row == entry.row.name and one.test]
    return f"; in the confirmation below it {words[shown(protocol, found[0])]}" if found else ""


def verdict(protocol: Protocol, entry: Entry) -> str:
    """The test of equality in words, corrected for the number of rows."""
    if entry.test is None:
        return "not tested"
    if entry.test.verdict == "equal":
        if entry.p is not None and entry.p < protocol.alpha:
            return "equal to FedAvg"
        return "equal to FedAvg by itself, but not corrected for the number of rows"
    low, high = entry.test.low, entry.test.high
    words = {
        "better": "better than FedAvg by more than the margin",
        "worse": "worse than FedAvg by more than the margin",
        "no worse": "no worse than FedAvg by the margin, not corrected for the number of rows",
        "not shown": f"differs from FedAvg by {low:+.4f} to {high:+.4f} (90 %): equality is not shown",
    }
    return words[entry.test.verdict]


def power_of(protocol: Protocol, task: str, facts: Mapping[str, Any]) -> tuple[int, float] | None:
    """How many test rows a task has, and the planned power of the test of equality; None before they are made."""
    if task not in facts:
        return None
    seeds, plan = len(protocol.seeds), protocol.planning[protocol.metric(task)]
    rows = sum(facts[task]["rows"][f"fold-{i}"] for i in range(seeds))
    return rows, planned_power(rows, seeds, plan["row"], plan["seed"], protocol.margin(task), protocol.alpha)


def _on_tasks(
    protocol: Protocol,
    tables: Sequence[Table],
    again: Sequence[Confirmation],
    facts: Mapping[str, Any],
    limit: float,
) -> list[str]:
    """On how many tasks a row within the limit is shown to be as good as FedAvg or no worse, by both studies."""
    tasks = {group.task for group in protocol.groups()}
    tested, found = _equal_tasks(protocol, tables, limit)
    if not tested:
        return [OPEN]
    names = "; ".join(f"{task}: {what}" for task, what in found.items())
    names = f": {names}" if names else ""
    said = [f"{len(found)} of {len(tested)} tasks tested so far ({len(tasks)} in the protocol){names}."]
    mine = [one for one in again if one.share is not None and one.share <= limit]
    whole = [one for one in mine if one.test]
    if not whole:
        return said + [f"The confirmation below, of {len(mine)}, has not run with all its seeds."] * bool(mine)
    good = [one for one in whole if shown(protocol, one) in ("equal", "no worse")]
    names = "; ".join(f"{title(one.table)}: {one.row} ({shown(protocol, one)})" for one in good)
    planned = "" if len(whole) == len(mine) else f" ({len(mine)} are planned)"
    said.append(
        f"In the confirmation below a row is shown to be equal or no worse on {len(good)} of {len(whole)} "
        f"tasks that have run{planned}{f': {names}' if names else ''}."
    )
    together = {*found, *(one.table.group.task for one in good)}
    tested |= {one.table.group.task for one in whole}
    said.append(f"Both together, each corrected by itself: {len(together)} of {len(tested)} tasks tested so far.")
    missing = (task for task in protocol.jobs if task not in together)
    reasons = [f"{task}: {_why_not(protocol, task, tables, whole, facts, limit)}" for task in missing]
    return said + [f"Why not on the others: {'; '.join(reasons)}."] * bool(reasons)


def _why_not(
    protocol: Protocol,
    task: str,
    tables: Sequence[Table],
    again: Sequence[Confirmation],
    facts: Mapping[str, Any],
    limit: float,
) -> str:
    """What keeps a task from being among those where a score is shown to be as good within the limit."""
    for one in again:
        if one.table.group.task == task and one.test:
            low, high = one.test.low, one.test.high
            return f"{one.row} differs from FedAvg by {low:+.4f} to {high:+.4f} (90 %) in the confirmation"
    rows, power = power_of(protocol, task, facts) or (0, 1.0)
    if power < protocol.test_power:
        return f"{rows:,} test rows are too few to show it (power {power:.2f})"
    among = [entry for table in tables if table.group.task == task for entry in table.whole if entry.test]
    within = [entry for entry in among if (entry.share or 1) <= limit]
    if not within:
        return "nothing that has run sends so little"
    best = max(within, key=lambda entry: entry.test.mean if entry.test else 0.0)
    return f"{best.row.name} is {verdict(protocol, best)}"


def _equal_tasks(protocol: Protocol, tables: Sequence[Table], limit: float) -> tuple[set[str], dict[str, str]]:
    """Tasks tested by a row within the limit; task -> such a row as good as FedAvg, corrected for its table."""
    tested: set[str] = set()
    found: dict[str, str] = {}
    for table in tables:
        among = sum(entry.test is not None for entry in table.entries)
        for entry in table.whole:
            if entry.test is None or entry.share is None or entry.share > limit:
                continue
            tested.add(table.group.task)
            equal = entry.test.verdict == "equal" and entry.p is not None and entry.p < protocol.alpha
            above = entry.test.verdict == "better" and entry.test.p_no_worse * among < protocol.alpha
            if equal or above:
                found.setdefault(table.group.task, f"{entry.row.name}, {table.group.partition}")
    return tested, found


def _cheaper(table: Table, entry: Entry) -> list[Entry]:
    """Rows that score as well or better on average with no more bytes."""
    sign = -1 if table.metric == "loss" else 1
    return [
        other
        for other in table.whole
        if other is not entry
        and 0 < other.bytes <= entry.bytes
        and sign * ((other.mean or 0) - (entry.mean or 0)) >= 0
    ]


def _surely(protocol: Protocol, table: Table, other: Entry, entry: Entry) -> bool:
    """Whether the interval of the difference lies above zero."""
    test = equivalence(paired(table.metric, other.scores, entry.scores), table.margin, protocol.alpha)
    return test is not None and test.low > 0
