"""``docs/board.md``: protocol, answers, a table and a picture per task and partition, and what was pruned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from board.cells import Choice, Line, current, hours, read_lines
from board.confirmation import Confirmation, confirmations, mean_sd, shown
from board.picture import draw
from board.protocol import BOUND, DENOMINATOR, Protocol, Row
from board.statistics import rows_needed
from board.table import GAINS, Entry, Table, tables
from board.words import answers, percent, power_of, score, title

FACTS = "rows.json"
"""Beside the lines: how many rows each task has."""
INTRODUCTION = """\
# The board

This page compares methods, adapters and codecs by score and megabytes sent. `make board` writes it from
[`configs/board`](../configs/board/board.toml), where each row was written down before its own runs, and from the
figures in `docs/board`. Four kinds of rows were added after others had been seen. LoRA all r8 1 bit was added
after pilots with one seed on development rows of sst2 and jnlpba, and to chemprot and mrpc because it had come
nearest to FedAvg elsewhere; FedAvg top 1 % to jnlpba, where LoRA r8 1 bit had stayed far below FedAvg in tuning
and one test. LoRA all r8 plain 1 bit trains and sends both factors of an adapter in every round, where the other
rows take turns; it was added when the other rows with scores had been tested, after pilots with one seed on rows
kept from sst2's training and on development rows of jnlpba. On sst2 with Dirichlet partitions LoRA all r8 1 bit
was added when LoRA all r8 plain 1 bit had ended at 0.646 with one of five seeds. FedBERT LoRA all r8 int4 15 % was
added when FedBERT int4 15 % had been tested, nearly all of whose bytes are embeddings; its TFLOP are without the
gradients that the server sends back to the cut, which have been counted since and add about 2 %. A row that has
not run says so; nothing is filled in.

When the confirmation had shown LoRA all r8 plain 1 bit below FedAvg on jnlpba, two pilots with one seed on its
development rows asked whether more bytes would help there: rank 32, which sends four times as much, and adapters
on the word embeddings too, which sends less than twice as much. With the same rates and 32 rounds both ended
within 0.01 of the row and of FedAvg; neither was tested. All four scores still rose in the last rounds, so there
the number of rounds may limit them, not the bytes.

The budget was 24 hours before the runs. When 23.5 were spent, 6 more were added, since other programs had run on
the same two cores.

The adapters' rows in 1 bit were tuned when each row of their matrices had a scale of its own. Since then [short
rows share those of their columns](decisions/wire.md#changes-with-few-bits-and-few-entries), and an entry of B
takes 1.04 bits in place of 3. Tests were then run again with the rates and rounds found before. LoRA r8 1 bit
and LoRA all r8 1 bit on sst2, and the latter on csabstruct, send half of what they did; they come to 0.8405,
0.8415 and 0.5942, where they had come to 0.8396, 0.8426 and 0.5953. The 90 % intervals of these differences lie
within 0.006. On qbio LoRA r8 1 bit sends 0.86 of it, with a loss of 5.6740 where it had been 5.6454 (a
difference of -0.036 to 0.094). The earlier tests had shown LoRA all r8 1 bit equal to FedAvg on csabstruct, with
0.088 % of its bytes; their figures are in the history of `docs/board`. LoRA r8 1 bit on csabstruct and jnlpba
is of the earlier tests.

```
make board DATA=FOLDER MODEL=FOLDER          # run what is missing; kill it at any time, and call it again
make board DATA=FOLDER SLICES=1              # only this slice; MODEL is demo:minilm if it is absent
make board                                   # write this page again
```
"""


def write_page(protocol: Protocol, records: Path, page: Path) -> Path:
    """Write the page, and the pictures beside the lines; the same bytes for the same figures."""
    facts = read_facts(records)
    lines = current(read_lines(records), protocol)
    found = tables(protocol, lines)
    pictures = {}
    for table in found:
        if table.front():
            records.mkdir(parents=True, exist_ok=True)
            draw(table, records / f"{table.name}.svg")
            pictures[table.name] = f"{records.name}/{table.name}.svg"
    again = confirmations(protocol, lines, found, facts)
    blocks = [INTRODUCTION, *_protocol(protocol, facts, lines), *_answers(protocol, found, again, facts)]
    blocks += _confirmations(protocol, again)
    for table in found:
        blocks += _table(protocol, table, pictures.get(table.name))
    blocks += _tuning(protocol, found)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(blocks), "utf-8")
    return page


def read_facts(records: Path) -> dict[str, Any]:
    """Task -> rows of its parts and their digest, of those whose rows have been made."""
    path = records / FACTS
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def write_facts(records: Path, task: str, facts: Mapping[str, Any]) -> None:
    """Keep the facts of a task's rows."""
    records.mkdir(parents=True, exist_ok=True)
    known = {**read_facts(records), task: facts}
    (records / FACTS).write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


def _protocol(protocol: Protocol, facts: Mapping[str, Any], lines: Sequence[Line]) -> Iterator[str]:
    yield "## What was fixed before the runs\n"
    yield "".join(f"{fill(point, 115, subsequent_indent='  ')}\n" for point in _points(protocol, lines))
    yield "### Are the test sets large enough?\n"
    text = (
        "The power of the test of equality for two methods that are equal, planned with two standard deviations "
        "in `board.toml`: that of the difference at a single test row, and that between seeds beyond it. Where "
        "runs vary more, the power is lower; then the text below a table says how many seeds would have been "
        "needed."
    )
    yield fill(text, 115) + "\n"
    yield _lines(
        ["task", "metric", "margin", "test rows", "power", "rows needed", "verdict"],
        [_power(protocol, task, facts) for task in protocol.jobs],
    )
    yield "### The grid\n"
    yield _lines(
        ["row", "keys over the task's job", "learning rates", "server rates", "rounds"],
        [_grid(row) for row in {row.name: row for group in protocol.slices for row in group.rows}.values()],
    )


def _points(protocol: Protocol, lines: Sequence[Line]) -> Iterator[str]:
    margins = ", ".join(f"{value:g} {metric}" for metric, value in protocol.margins.items())
    first, second = protocol.tuning["seeds"]
    models = list(dict.fromkeys(line.model for line in lines))
    if models:
        several = "; titles of tables name it" if len(models) > 1 else ""
        yield f"* **Start model**: {' or '.join(models)} (the last is a digest of its weights{several})."
    yield (
        f"* **{protocol.clients} clients**: rows are partitioned iid or by Dirichlet(0.5) over the labels. "
        "All take part in every round."
    )
    yield (
        f"* **Tuning**: each row by itself, on development rows. First every learning rate runs for "
        f"{protocol.tuning['first_share']:g} of the rounds (seed {first}); then the best {protocol.tuning['keep']}"
        f", and the best one with the other server rates, for all rounds (seed {second}). The rates and the round "
        "with the best score are taken. Dirichlet uses what was found for iid."
    )
    yield (
        f"* **Test**: seeds {', '.join(map(str, protocol.seeds))}. The test rows, which no tuning has seen, are "
        "cut into as many folds, and each seed is scored on its own. So the spread over the seeds includes the "
        "choice of test rows, and two rows are compared seed by seed."
    )
    yield (
        f"* **Equal** means: two one-sided t-tests of the paired differences, at {protocol.alpha:g} each, "
        f"show that the true difference is within the margin: {margins}. A large p of an ordinary test proves "
        'nothing. "No worse" is shown against one side of the margin alone. The p of equality is corrected for '
        "the rows of a table by Holm's method. Better, worse and no worse are what the interval of a row by "
        "itself says, without such a correction. A difference above 0 is in the row's favor, of a loss too."
    )
    yield (
        f"* **Share of {DENOMINATOR}'s bytes**: bytes up and down, divided by those of {DENOMINATOR} in fp32 with "
        "its own best rates and rounds. No row counts the initial download."
    )
    yield (
        "* **Gain**: 0 % is the score of always predicting the most frequent class (mlm: of the start model), "
        f"100 % that of `{BOUND}`, tuned in the same way."
    )
    spent, least = hours(lines, protocol.parallel)
    yield (
        f"* **Budget**: {protocol.hours:g} hours, {protocol.parallel} cells at a time. {spent:.1f} are spent; had "
        f"each cell been as fast, per round, as the fastest of its task, row and stage, it would be {least:.1f}."
    )


def _power(protocol: Protocol, task: str, facts: Mapping[str, Any]) -> list[str]:
    metric, seeds = protocol.metric(task), len(protocol.seeds)
    plan, margin = protocol.planning[metric], protocol.margin(task)
    needed = rows_needed(protocol.test_power, seeds, plan["row"], plan["seed"], margin, protocol.alpha)
    words = [task, metric, f"{margin:g}"]
    found = power_of(protocol, task, facts)
    if found is None:
        return [*words, "not made", "–", _number(needed), "–"]
    rows, power = found
    verdict = "large enough as planned" if power >= protocol.test_power else "too small for a claim of equality"
    return [*words, _number(rows), f"{power:.2f}", _number(needed), verdict]


def _number(value: int | None) -> str:
    return "none is enough" if value is None else f"{value:,}"


def _grid(row: Row) -> list[str]:
    keys = ", ".join(f"{key} = {value}" for key, value in row.set.items())
    rates = ", ".join(f"{rate:g}" for rate in row.learning_rates)
    servers = ", ".join(f"{rate:g}" for rate in row.server_rates)
    return [row.name, keys, rates, servers, f"x {row.rounds}"]


def _answers(
    protocol: Protocol, found: Sequence[Table], again: Sequence[Confirmation], facts: Mapping[str, Any]
) -> Iterator[str]:
    yield "## Answers\n"
    for question, sentences in answers(protocol, found, again, facts):
        yield f"**{question}**\n"
        yield "".join(f"* {sentence}\n" for sentence in sentences)


def _confirmations(protocol: Protocol, again: Sequence[Confirmation]) -> Iterator[str]:
    if not again:
        return
    seeds = protocol.seeds_of(True)
    yield "## Confirmation: one row, with more seeds\n"
    text = (
        "Five seeds are too few for most of the tests below. So for each of these tasks one row was named, when "
        "the tables below were known and before any run of this study, and is run again beside "
        f"{DENOMINATOR} with {len(seeds)} other seeds ({seeds[0]} to {seeds[-1]}), with the rates and rounds "
        f"that tuning had found. One hypothesis per task is tested: the row is no worse than {DENOMINATOR} by "
        f"the margin (one-sided t-test at {protocol.alpha:g}; p corrected for all {len(again)} by Holm's method, "
        "one that has not run counting as not shown). A row is equal where the tests against both sides of the "
        f'margin show it, corrected in the same way. Power is that of showing "no worse" of a row equal to '
        f"{DENOMINATOR} that varies as in the tables below. The test rows are those of the tables, cut into "
        f"{len(seeds)} folds: a row that they happen to favor there, they favor here too."
    )
    yield fill(text, 115) + "\n"
    yield _lines(
        [
            "task",
            "row",
            "of FedAvg's bytes",
            "power",
            "FedAvg",
            "the row",
            "difference (90 %)",
            "p (Holm)",
            "verdict",
        ],
        [_confirmation(protocol, one) for one in again],
    )


def _confirmation(protocol: Protocol, one: Confirmation) -> list[str]:
    test = one.test
    return [
        title(one.table),
        one.row,
        "–" if one.share is None else percent(one.share),
        "–" if one.power is None else f"{one.power:.2f}",
        mean_sd(one.base) if test else "",
        mean_sd(one.scores) if test else "",
        "" if test is None else f"{test.mean:+.4f} ({test.low:+.4f} to {test.high:+.4f})",
        f"{one.p:.3f}" if test else "",
        shown(protocol, one),
    ]


def _table(protocol: Protocol, table: Table, picture: str | None) -> Iterator[str]:
    yield f"## {title(table)}\n"
    if not any(entry.tuning[0] or entry.lines for entry in table.entries):
        yield f"Not run. Rows: {'; '.join(entry.row.name for entry in table.entries)}.\n"
        return
    if picture:
        yield f"![{title(table)}]({picture})\n"
    bytes_to = [f"MB to {percent(share)} of the gain" for share in GAINS]
    costs = ["MB up", "MB down", "of FedAvg's bytes", "TFLOP", *bytes_to]
    header = ["row", table.metric, "of the gain", *costs, "difference (90 %)", "p (Holm)", "verdict"]
    yield _lines(header, [_entry(protocol, table, entry) for entry in table.entries])
    if table.start is not None and table.metric == "loss":
        yield f"The gain counts from the loss of the start model, {score(table.start)}.\n"
    open_ = [entry for entry in table.entries if entry.test and entry.test.verdict in ("not shown", "no worse")]
    if open_:
        seeds = [entry.seeds for entry in open_]
        most = "more than 100" if None in seeds else f"up to {max(seed for seed in seeds if seed)}"
        found = {entry.test.verdict for entry in open_ if entry.test}
        verdicts = " or ".join(f'"{verdict}"' for verdict in ("not shown", "no worse") if verdict in found)
        text = (
            f"For the rows with {verdicts}, a test of equality with power {protocol.test_power:g} would have "
            f"needed {most} seeds, if they were equal to {DENOMINATOR} and varied as much as they did here."
        )
        yield fill(text, 115) + "\n"


def _entry(protocol: Protocol, table: Table, entry: Entry) -> list[str]:
    width = 10
    if not entry.whole:
        return [entry.row.name, _state(protocol, entry), *[""] * width]
    sd = "" if entry.sd is None else f" ± {score(entry.sd)}"
    reached = entry.reached or [None] * len(GAINS)
    test = entry.test
    return [
        entry.row.name,
        f"{score(entry.mean or 0)}{sd}",
        "–" if entry.gain is None else percent(entry.gain),
        _mb(entry.up),
        _mb(entry.down),
        "–" if entry.share is None else percent(entry.share),
        f"{(entry.flops or 0) / 1e12:.1f}",
        *("never" if entry.reached and value is None else _mb(value) for value in reached),
        "" if test is None else f"{test.mean:+.4f} ({test.low:+.4f} to {test.high:+.4f})",
        "" if entry.p is None else f"{entry.p:.3f}",
        "" if test is None else test.verdict,
    ]


def _state(protocol: Protocol, entry: Entry) -> str:
    """How far a row is that has no score yet."""
    if any(line.diverged for line in entry.lines):
        return "diverged in the test"
    if entry.tuned is not None:
        return f"not run: {len(entry.lines)} of {len(protocol.seeds)} seeds"
    done, _ = entry.tuning
    return f"not run: {done} cells of its tuning" if done else "not run"


def _mb(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:.3g}" if value < 1e8 else f"{value / 1e6:,.0f}"


def _tuning(protocol: Protocol, found: Sequence[Table]) -> Iterator[str]:
    yield "## What tuning chose, and what it pruned\n"
    rows = []
    for table in found:
        for entry in table.entries:
            choice = entry.tuned
            if choice is None or protocol.tuned(table.group.partition) != table.group.partition:
                continue
            marks = ["edge of the grid"] * choice.edge + ["last round tried"] * choice.last
            pruned = ", ".join(f"{_choice(dropped)}: {score(value)}" for dropped, value in choice.pruned)
            chosen = f"{_choice(choice.choice)}: {score(choice.score)}"
            rows.append([title(table), entry.row.name, chosen, ", ".join(marks), pruned])
    if not rows:
        yield "Nothing yet.\n"
        return
    text = (
        "Scores are the best on development rows. Where the chosen rate is at the edge of its grid, or the best "
        "round was the last one tried, a wider grid may find a better one."
    )
    yield fill(text, 115) + "\n"
    yield _lines(["table", "row", "chosen", "remark", "pruned"], rows)


def _choice(choice: Choice) -> str:
    server = "" if choice.server_rate == 1 else f", server {choice.server_rate:g}"
    return f"{choice.learning_rate:g}{server}, {choice.rounds} rounds"


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
