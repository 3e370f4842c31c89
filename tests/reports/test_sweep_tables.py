"""A sweep's numbers: means, deviations, paired tests; and the files they are written to."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console
from scipy.stats import t

from fedstrata.reports.sweep import SweepRow, holm, paired
from fedstrata.reports.sweep_text import latex, markdown, note, terminal, verdicts

ROW = SweepRow(
    row="FedBFPT\\M",
    stage="tag",
    method="fedbfpt",
    metric="f1",
    seeds=(0, 1, 2),
    scores=(0.1, 0.2, 0.6),
    mean=0.3,
    sd=0.2646,
    p=0.0004,
    p_holm=0.0004,
    up_mb=29.42,
    down_mb=29.42,
    setup_mb=435.0,
    tflops=1234.5,
    seconds=577.85,
    metrics={"f1": (0.1, 0.2, 0.6)},
    failed={},
)


def test_the_paired_test_by_hand() -> None:
    one, other = [0.71, 0.74, 0.70], [0.70, 0.72, 0.71]
    differences = [a - b for a, b in zip(one, other, strict=True)]
    mean = sum(differences) / 3
    sd = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    expected = 2 * t.sf(abs(mean / (sd / math.sqrt(3))), 2)
    assert paired(one, other) == pytest.approx(expected)


@pytest.mark.parametrize(("one", "other"), [([], []), ([0.5], [0.4]), ([0.5, 0.6], [0.5, 0.6])])
def test_no_paired_test_without_two_different_pairs(one: list[float], other: list[float]) -> None:
    assert paired(one, other) is None


@pytest.mark.parametrize(
    ("one", "other"), [([0.9, 0.8], [0.8, 0.7]), ([0.3, 0.4, 0.5], [0.2, 0.3, 0.4]), ([0.7, 0.8], [0.9, 1.0])]
)
def test_the_same_difference_at_every_seed_is_no_test_whatever_its_last_bits(
    one: list[float], other: list[float]
) -> None:
    assert len({a - b for a, b in zip(one, other, strict=True)}) > 1
    assert paired(one, other) is None


def test_means_that_differ_in_their_last_bits_are_the_same() -> None:
    base = replace(ROW, metric="accuracy", seeds=(0, 1), scores=(0.8, 0.8), mean=0.8)
    [said] = verdicts([replace(base, row="A"), replace(base, row="B", scores=(0.9, 0.7), base="A", p_holm=1.0)])
    assert said.startswith("B: accuracy 0.8000, the same as A, with")


def test_a_small_p_is_not_zero() -> None:
    [said] = verdicts([ROW, replace(ROW, row="B", scores=(0.2, 0.3, 0.7), base=ROW.row)])
    assert said.endswith("more than chance over 3 seeds (p <0.001, Holm).")


def test_p_values_are_corrected_for_their_number() -> None:
    """Holm 1979: the smallest times m, the next times m - 1, never below the one before, at most 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_note_has_the_baseline_and_names_what_does_not_beat_it() -> None:
    rows = [replace(ROW, baseline=0.25), replace(ROW, row="chance", mean=0.25, baseline=0.25)]
    assert note(rows, None).endswith(
        "Baseline of tag, always the most frequent class or the mean: 0.2500; not better than that: chance."
    )
    assert note([rows[0], replace(ROW, baseline=0.2)], None).endswith("the mean: 0.2000 to 0.2500.")
    squares = [replace(ROW, metric="loss", baseline=value) for value in (9.5, 10.25, 100.0)]
    assert "the mean: 9.5000 to 100.0000" in note(squares, None), "by value, not by their digits"
    losses = [replace(ROW, metric="loss", baseline=0.2)]
    assert note(losses, None).endswith("0.2000; not better than that: FedBFPT\\M.")
    assert "Baseline" not in note([ROW], None)


def test_the_tables_say_the_same() -> None:
    lost = replace(
        ROW, row="lost & gone", seeds=(), scores=(), mean=None, sd=None, p=None, p_holm=None, failed={0: "why"}
    )
    rows = [ROW, lost]
    text = markdown(rows, "FedAvg")
    assert "### tag\n\n| row | f1 | p (Holm) | MB up | MB down | TFLOP | seconds |\n|---|---:|" in text
    assert "| FedBFPT\\M | 0.3000 ± 0.2646 | <0.001 | 29.4 | 29.4 | 1,234.5 | 577.9 |" in text
    assert "| lost & gone | – (0 of 1) |" in text
    assert "paired t-test over the seeds with 'FedAvg'" in text
    tex = latex(rows, None)
    assert r"FedBFPT\textbackslash{}M & 0.3000 $\pm$ 0.2646 & $<$0.001 & 29.4 &" in tex
    assert r"lost \& gone & -- (0 of 1) &" in tex
    assert tex.count(r"\begin{tabular}{lrrrrrr}") == tex.count(r"\end{tabular}") == 1
    [table] = terminal(rows)
    assert table.row_count == 2


def test_epsilon_has_a_column_where_a_row_has_noise() -> None:
    """Behind those of targets, of which a row may have none; the table without noise is as it was."""
    noisy = replace(ROW, row="noise", epsilon=7.984, target=0.5)
    lost = replace(ROW, row="lost", seeds=(), scores=(), mean=None, sd=None, p=None, p_holm=None)
    heads, *lines = markdown([ROW, noisy, lost], None).splitlines()[2:7]
    assert heads.endswith("| seconds | rounds to target | MB to target | epsilon |")
    assert [line.split(" | ")[-1] for line in lines[1:]] == ["none |", "7.98 |", " |"]
    assert "Epsilon: of the stage alone" in note([noisy], None)
    assert "psilon" not in markdown([ROW, lost], None)
    for rows, heads in (
        ([ROW, replace(ROW, row="noise", epsilon=7.984)], ["MB up", "MB down", "seconds", "epsilon"]),
        ([ROW, noisy], ["MB up", "rounds\nto target", "MB\nto target", "epsilon"]),
    ):
        [table] = terminal(rows)
        assert [str(column.header) for column in table.columns][3:] == heads


def test_the_name_of_a_row_stays_in_its_cell_and_in_the_note() -> None:
    """It may hold line breaks, tags and a terminal's commands; a note of LaTeX is a comment of one line."""
    bad = replace(ROW, row="a\n# b <img src=x>\x1b[2J | c", baseline=1.0)
    name = "a # b \u2039img src=x\u203a | c"
    text, tex = markdown([bad], bad.row), latex([bad], bad.row)
    assert f"| {name.replace('|', chr(92) + '|')} | 0.3000" in text
    assert f"not better than that: {name}." in text
    assert not {"<img", "\n# b", "\x1b"} & {*text.split(), *text}
    assert [line for line in tex.splitlines() if "MB = 1 000 000" in line] == [tex.splitlines()[-1]]
    assert tex.splitlines()[-1].startswith("% Score: ")


def test_rows_of_different_metrics_each_name_their_own() -> None:
    other = replace(ROW, row="STS-B", metric="pearson")
    text = markdown([ROW, other], None)
    assert "| row | score | p (Holm) |" in text
    assert "| f1 0.3000 ± 0.2646 |" in text
    assert "| pearson 0.3000 ± 0.2646 |" in text


def test_a_verdict_is_of_the_row_compared_with_over_the_seeds_of_both() -> None:
    base = replace(ROW, row="FedAvg, rate=1", p=None, p_holm=None, up_mb=58.84)
    first = replace(ROW, row="first", base=None, scores=(0.9, 0.9, 0.9), mean=0.9)
    small = replace(ROW, row="FedAvg small, rate=1", base="FedAvg, rate=1", scores=(0.0, 0.2, 0.5), p_holm=0.2)
    assert verdicts([first, base, small]) == [
        "FedAvg small, rate=1: f1 0.3000, 0.0667 worse than FedAvg, rate=1, with 50.0% of its MB up; "
        "not told apart from chance by 3 seeds (p 0.200), no proof of equality."
    ]
    fewer = replace(base, seeds=(0, 2), scores=(0.1, 0.6), failed={1: "why"})
    [said] = verdicts([replace(small, p_holm=0.01), fewer])
    assert "f1 0.3000, 0.1000 worse than FedAvg, rate=1" in said
    assert "more than chance over 2 seeds" in said
    assert not verdicts([small, replace(base, seeds=(5, 6, 7))]), "no seed in common"
    assert not verdicts([small, replace(base, metric="accuracy")])


def test_a_row_that_diverged_leaves_room_for_the_names_of_the_others() -> None:
    huge = replace(ROW, row="huge", metric="perplexity", mean=1.01423e304, sd=0.0, p_holm=None)
    console = Console(width=80, record=True, file=io.StringIO())
    for table in terminal([replace(ROW, metric="perplexity"), huge]):
        console.print(table)
    assert "1.014e+304 ± 0.0000" in console.export_text()


def test_targets_have_columns_where_they_are_set() -> None:
    some = replace(ROW, target=0.5, reached=2, rounds_to_target=2.5, mb_to_target=17.25)
    never = replace(ROW, row="never", target=0.5)
    lines = markdown([ROW, some, never], None).splitlines()
    assert lines[2].endswith("| seconds | rounds to target | MB to target |")
    assert lines[4].endswith("| 577.9 |  |  |")
    assert lines[5].endswith("| 2.50 (2 of 3) | 17.2 |")
    assert lines[6].endswith("| – | – |")


def test_a_terminal_of_80_columns_has_room_for_all_of_it() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    some = replace(ROW, row="FedSplitBERT, c = 3, 8 bits, STS-B", target=0.5, reached=2, rounds_to_target=2.5)
    some = replace(some, metric="pearson", mb_to_target=1017.25, up_mb=1334.6, down_mb=1201.1)
    for table in terminal([ROW, some]):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    for words in ("pearson", "0.3000 ± 0.2646", "FedSplitBERT", "1,334.6", "1,017.2", "(2 of 3)"):
        assert words in text
