"""The board: its statistics, how it tunes, what it says, and that its page is what its figures say."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest
from board import rows
from board.cells import Cell, Choice, Line, append, current, figures, hours, read_lines
from board.confirmation import confirmations, shown
from board.page import write_page
from board.protocol import FOLDER, Group, Protocol, Row, read_protocol
from board.statistics import equivalence, planned_power, power, rows_needed, seeds_needed
from board.table import Table, tables
from board.tuning import first_cells, second_cells, tuned, wanted
from board.words import OPEN, answers, percent
from scipy import stats

from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.reports.runs import Run

ROOT = Path(__file__).parent.parent
SEEDS = (0, 1, 2, 3, 4)


# statistics


def test_the_two_tests_are_scipys() -> None:
    differences = [0.004, -0.002, 0.001, 0.003, -0.001]
    found = equivalence(differences, 0.01, 0.05)
    assert found is not None
    above = stats.ttest_1samp(differences, -0.01, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.01, alternative="less").pvalue
    assert found.p == pytest.approx(max(above, below), rel=1e-12)
    assert found.p_no_worse == pytest.approx(above, rel=1e-12)
    interval = stats.t.interval(0.9, 4, np.mean(differences), stats.sem(differences))
    assert (found.low, found.high) == pytest.approx(interval, rel=1e-12)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.001, -0.001, 0.002, 0.0, 0.001], "equal"),
        ([0.021, 0.019, 0.022, 0.02, 0.021], "better"),
        ([-0.021, -0.019, -0.022, -0.02, -0.021], "worse"),
        ([0.012, 0.001, 0.02, 0.004, 0.009], "no worse"),
        ([-0.012, 0.015, -0.02, 0.01, 0.002], "not shown"),
        ([0.0, 0.0, 0.0], "equal"),
        ([0.01, 0.01, 0.01], "no worse"),  # the margin itself is not within the margin
    ],
)
def test_verdicts(differences: list[float], verdict: str) -> None:
    found = equivalence(differences, 0.01, 0.05)
    assert found is not None
    assert found.verdict == verdict
    assert (found.p < 0.05) == (verdict == "equal")


def test_one_seed_shows_nothing() -> None:
    assert equivalence([0.0], 0.01, 0.05) is None


@pytest.mark.parametrize(("cv", "count", "golden"), [(0.3, 40, 0.815845), (0.2, 20, 0.834680)])
def test_power_is_that_of_the_r_package_powertost(cv: float, count: int, golden: float) -> None:
    """Its examples of a 2x2 crossover: bounds 0.8 to 1.25, true ratio 0.95, alpha 0.05."""
    error = math.sqrt(math.log(1 + cv**2)) * math.sqrt(2 / count)
    found = power(math.log(1.25), error, count - 2, 0.05, math.log(0.95))
    assert found == pytest.approx(golden, abs=1e-6)


def test_power_is_how_often_it_is_shown() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(0.001, 0.006, (40_000, 5))
    reach = stats.t.ppf(0.95, 4) * draws.std(1, ddof=1) / math.sqrt(5)
    shown = ((draws.mean(1) - reach > -0.01) & (draws.mean(1) + reach < 0.01)).mean()
    assert power(0.01, 0.006 / math.sqrt(5), 4, 0.05, 0.001) == pytest.approx(shown, abs=0.01)


def test_rows_and_seeds_needed_are_the_fewest() -> None:
    few = rows_needed(0.8, 5, 0.283, 0.0, 0.01, 0.05)
    assert few is not None
    assert planned_power(few, 5, 0.283, 0.0, 0.01, 0.05) >= 0.8
    assert planned_power(int(few * 0.9), 5, 0.283, 0.0, 0.01, 0.05) < 0.8
    assert rows_needed(0.8, 5, 0.283, 0.03, 0.01, 0.05) is None
    seeds = seeds_needed(0.8, 0.01, 0.01, 0.05)
    assert seeds is not None
    assert power(0.01, 0.01 / math.sqrt(seeds), seeds - 1, 0.05) >= 0.8
    assert power(0.01, 0.01 / math.sqrt(seeds - 1), seeds - 2, 0.05) < 0.8


# rows


def test_sst2_is_cut_by_sentences(tmp_path: Path) -> None:
    """No training row is part of a test sentence, no test row part of a training sentence."""
    folder = tmp_path / "glue" / "SST-2"
    folder.mkdir(parents=True)
    wholes = [f"w{i} common x{i} y{i} shared" for i in range(60)]
    parts = [f"x{i} y{i}" for i in range(60)] + ["common", "shared"]
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"{t} \t1\n" for t in wholes + parts), "utf-8")
    facts = rows.make("sst2", tmp_path, tmp_path / "made", 2)
    read = {
        name: [json.loads(line)["text"] for line in (tmp_path / "made" / f"{name}.jsonl").read_text().splitlines()]
        for name in facts["rows"]
    }
    assert {name: len(texts) for name, texts in read.items()} == facts["rows"]
    texts = [text for part in read.values() for text in part]
    assert sorted(texts) == sorted(set(texts))
    assert len(texts) == 120
    number = {text: "".join(filter(str.isdigit, text.split()[0])) for text in texts}
    for name, part in read.items():
        others = {number[text] for other, texts in read.items() if other != name for text in texts}
        assert not {number[text] for text in part} & others
    assert rows.make("sst2", tmp_path / "gone", tmp_path / "made", 2) == facts
    more = rows.make("sst2", tmp_path, tmp_path / "more", 3)["rows"]
    assert sum(more[f"fold-{i}"] for i in range(3)) == len(read["fold-0"]) + len(read["fold-1"])
    for name in ("train", "dev"):  # whatever the folds
        assert (tmp_path / "more" / f"{name}.jsonl").read_bytes() == (
            tmp_path / "made" / f"{name}.jsonl"
        ).read_bytes()


def test_official_parts_share_no_text() -> None:
    def made(*texts: str) -> list[dict[str, str]]:
        return [{"text": text, "label": "x"} for text in texts]

    parts = rows.divided(made("a", "b", "c", "d"), made("c", "e", "F"), made("d", "f", "g"), 2)
    assert sorted(row["text"] for row in parts.train) == ["a", "b"]
    assert sorted(row["text"] for row in parts.dev) == ["c", "e"]
    assert sorted(row["text"] for fold in parts.test for row in fold) == ["d", "f", "g"]
    assert sorted(map(len, parts.test)) == [1, 2]


def test_words_and_tags_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    first, second = "NF-kB\tB-protein\nbinds\tO\n\n\nDNA\tB-DNA\n\n", "GATA-1\tB-protein"
    path.write_text(f"-DOCSTART-\tO\n\n{first}-DOCSTART-\tO\n\n{second}", "utf-8")
    assert rows.documents(path) == [
        [{"words": ["NF-kB", "binds"], "tags": ["B-protein", "O"]}, {"words": ["DNA"], "tags": ["B-DNA"]}],
        [{"words": ["GATA-1"], "tags": ["B-protein"]}],
    ]


def test_documents_are_cut_whole(tmp_path: Path) -> None:
    """All sentences of an abstract are in one part, but those that a later part has too."""
    for name, start in (("train", 0), ("dev", 200), ("test", 250)):
        (tmp_path / "csabstruct").mkdir(exist_ok=True)
        abstracts = [
            {"sentences": [f"a{i} first", "We conclude .", f"a{i} last"], "labels": ["x", "y", "z"]}
            for i in range(start, start + (200 if name == "train" else 50))
        ]
        text = "".join(json.dumps(abstract) + "\n" for abstract in abstracts)
        (tmp_path / "csabstruct" / f"{name}.jsonl").write_text(text, "utf-8")
    facts = rows.make("csabstruct", tmp_path, tmp_path / "made", 5)
    read = {
        name: [json.loads(line) for line in (tmp_path / "made" / f"{name}.jsonl").read_text().splitlines()]
        for name in facts["rows"]
    }
    test = [row for name, part in read.items() if name.startswith("fold") for row in part]
    texts = [[row["text"] for row in part] for part in (read["train"], read["dev"], test)]
    abstracts = [{text.split()[0] for text in part} - {"We"} for part in texts]
    assert len(set.union(*abstracts)) == sum(map(len, abstracts)) == 300
    assert len(abstracts[2]) > len(abstracts[0]) > len(abstracts[1]) > 0
    assert [part.count("We conclude .") for part in texts] == [0, 0, len(abstracts[2])]
    assert [len(part) for part in texts] == [2 * len(abstracts[0]), 2 * len(abstracts[1]), 3 * len(abstracts[2])]


def test_a_data_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one folder or file called 'SST-2' in it or below, found none"):
        rows.make("sst2", tmp_path, tmp_path / "made", 2)
    for name in ("a", "b"):
        (tmp_path / name / "SST-2").mkdir(parents=True)
    with pytest.raises(UserError, match="found 2 of them"):
        rows.find(tmp_path, "SST-2")


# the protocol


def test_every_cell_of_the_protocol_is_a_valid_job() -> None:
    protocol = read_protocol()
    for group in protocol.groups():
        for row in group.rows:
            cell = first_cells(protocol, group.task, group.partition, row)[0]
            choice = replace(cell.choice, server_rate=row.server_rates[-1])
            [job] = load(protocol.jobs[group.task], replace(cell, choice=choice).keys(protocol, row))
            assert job.train.learning_rate == row.learning_rates[0]
            assert job.clients.count == 10
            assert job.server.learning_rate in (None, row.server_rates[-1])
            assert list(row.learning_rates) == sorted(row.learning_rates)
    assert len({group.task for group in protocol.groups()}) == 6
    assert {group.partition for group in protocol.groups()} == {"iid", "dirichlet"}


def test_the_centralized_bound_makes_as_many_steps_as_all_clients() -> None:
    protocol = read_protocol()
    [row] = [row for row in protocol.slices[0].rows if row.name == "centralized"]
    cell = first_cells(protocol, "sst2", "iid", row)[0]
    assert cell.keys(protocol, row)["train.steps"] == 10 * protocol.jobs["sst2"]["train"]["steps"]


# tuning


def small(**changes: Any) -> Protocol:
    job = {"task": {"metric": "accuracy"}, "method": {"rounds": 4}, "train": {"steps": 3}}
    names = [("centralized", 1), ("FedAvg", 1), ("FedBFPT", 2), ("LoRA r8", 2), ("FedBT", 1)]
    made = tuple(
        Row(name, {"method.name": name}, (0.1, 0.2, 0.4, 0.8), (1.0, 1.5), rounds) for name, rounds in names
    )
    fields: dict[str, Any] = {
        "clients": 2,
        "seeds": SEEDS,
        "alpha": 0.05,
        "test_power": 0.8,
        "hours": 1.0,
        "parallel": 2,
        "margins": {"accuracy": 0.01},
        "planning": {"accuracy": {"row": 0.28, "seed": 0.004}},
        "tuning": {"first_share": 0.5, "keep": 2, "seeds": [100, 101]},
        "confirmation": {"seeds": [5, 6, 7]},
        "partitions": {"iid": {"clients": {}}, "dirichlet": {"tuned": "iid", "clients": {"alpha": 0.5}}},
        "slices": (Group("t", "iid", made), Group("t", "dirichlet", made[:2])),
        "jobs": {"t": job},
    }
    return Protocol(**{**fields, **changes})


def line(protocol: Protocol, cell: Cell, scores: list[float], bytes: int = 100, **changes: Any) -> Line:
    """A cell's line; every round costs ``bytes`` up and half of that down."""
    row = next(row for group in protocol.groups() for row in group.rows if row.name == cell.row)
    count = range(len(scores) + 1)
    fields: dict[str, Any] = {
        "digest": cell.digest(protocol, row, "rows", "model 1"),
        "rows": "rows",
        "model": "model 1",
        "counts": {"train": 9, "scored": 9},
        "scores": [0.1, *scores],
        "up": [bytes * i for i in count],
        "down": [bytes * i // 2 for i in count],
        "flops": [7 * i for i in count],
        "baseline": 0.5,
        "seconds": 1.0,
        "diverged": False,
        "commit": "c",
    }
    return Line(cell=cell, **{**fields, **changes})


def test_hours_are_those_of_the_clock_and_of_the_fastest_cells() -> None:
    protocol = small()
    cells = [Cell("t", "iid", "FedAvg", "first", Choice(0.1, 1.0, rounds), 1) for rounds in (2, 4)]
    other = Cell("t", "iid", "FedBT", "first", Choice(0.1, 1.0, 2), 1)
    took = zip([*cells, other], (3600.0, 3600.0, 7200.0), strict=True)
    lines = [line(protocol, cell, [0.2] * cell.choice.rounds, seconds=seconds) for cell, seconds in took]
    assert hours(lines, 2) == (2.0, (2 * 900 + 4 * 900 + 7200) / 3600 / 2)
    test = line(protocol, replace(cells[0], stage="test"), [0.2, 0.2], seconds=3600.0)  # scores other rows
    assert hours([*lines, test], 2) == (2.5, (2 * 900 + 4 * 900 + 7200 + 3600) / 3600 / 2)


def played(protocol: Protocol, row: Row, best: float = 0.4, bytes: int = 100, finals: Any = None) -> list[Line]:
    """Every line of a row, as the runs would come; the score is best at ``best`` and after the third round."""
    lines: list[Line] = []
    while cells := wanted(protocol, "t", "iid", row, lines):
        for cell in cells:
            near = -abs(math.log(cell.choice.learning_rate / best)) / 100 - 0.02 * (cell.choice.server_rate != 1)
            curve = [0.6 + near + 0.1 * min(i, 6 - i) for i in range(1, cell.choice.rounds + 1)]
            if cell.stage == "test" and finals is not None:
                curve = [*curve[:-1], finals[cell.seed]]
            lines.append(line(protocol, cell, curve, bytes))
    return lines


def test_halving() -> None:
    protocol = small()
    row = protocol.slices[0].rows[1]
    first = wanted(protocol, "t", "iid", row, [])
    assert [cell.choice for cell in first] == [Choice(rate, 1.0, 2) for rate in row.learning_rates]
    assert {(cell.stage, cell.seed) for cell in first} == {("first", 100)}
    lines = [line(protocol, cell, [0.5, 0.6 + cell.choice.learning_rate / 10]) for cell in first]
    second = wanted(protocol, "t", "iid", row, lines)
    assert [cell.choice for cell in second] == [Choice(0.8, 1.0, 4), Choice(0.4, 1.0, 4), Choice(0.8, 1.5, 4)]
    assert {(cell.stage, cell.seed) for cell in second} == {("second", 101)}
    curves = [[0.5, 0.6, 0.7, 0.65], [0.5, 0.72, 0.72, 0.7], [0.1] * 4]
    assert wanted(protocol, "t", "iid", row, [*lines, line(protocol, second[0], curves[0])]) == second[1:]
    lines += [line(protocol, cell, curve) for cell, curve in zip(second, curves, strict=True)]
    found = tuned(protocol, "t", "iid", row, lines)
    assert found is not None
    assert found.choice == Choice(0.4, 1.0, 2)  # the best score, after the fewest rounds that reach it
    assert (found.score, found.edge, found.last) == (0.72, False, False)
    assert [choice.learning_rate for choice, _ in found.pruned] == [0.1, 0.2, 0.8, 0.8]
    tests = wanted(protocol, "t", "iid", row, lines)
    assert [cell.seed for cell in tests] == list(SEEDS)
    assert {(cell.stage, cell.choice) for cell in tests} == {("test", found.choice)}
    away = wanted(protocol, "t", "dirichlet", row, lines)
    assert [(cell.partition, cell.choice) for cell in away] == [("dirichlet", found.choice)] * 5
    assert not wanted(protocol, "t", "iid", row, lines + [line(protocol, cell, [0.1, 0.2]) for cell in tests])


def test_of_a_loss_the_least_is_best() -> None:
    protocol = small(jobs={"t": {"task": {"metric": "loss"}, "method": {"rounds": 2}, "train": {"steps": 3}}})
    row = protocol.slices[0].rows[1]
    lines = [line(protocol, cell, [cell.choice.learning_rate]) for cell in first_cells(protocol, "t", "iid", row)]
    second = second_cells(protocol, "t", "iid", row, lines)
    assert [cell.choice.learning_rate for cell in second] == [0.1, 0.2, 0.1]
    lines += [line(protocol, cell, [1.0, cell.choice.learning_rate]) for cell in second]
    found = tuned(protocol, "t", "iid", row, lines)
    assert found is not None
    assert (found.choice, found.score) == (Choice(0.1, 1.0, 2), 0.1)
    assert found.edge
    assert found.last


def test_what_diverged_is_worst() -> None:
    protocol = small()
    row = protocol.slices[0].rows[1]
    first = first_cells(protocol, "t", "iid", row)
    lines = [line(protocol, cell, [0.2, 0.3]) for cell in first[:3]]
    lines.append(line(protocol, first[3], [], diverged=True))
    second = second_cells(protocol, "t", "iid", row, lines)
    assert 0.8 not in {cell.choice.learning_rate for cell in second}
    lines += [line(protocol, cell, [], diverged=True) for cell in second]
    assert tuned(protocol, "t", "iid", row, lines) is None
    assert wanted(protocol, "t", "iid", row, lines) == []


# lines


def test_lines_come_back_and_half_a_line_is_dropped(tmp_path: Path) -> None:
    protocol = small()
    cells = first_cells(protocol, "t", "iid", protocol.slices[0].rows[1])
    lines = [line(protocol, cell, [0.25, 1 / 3]) for cell in cells]
    for made in lines[:2]:
        append(tmp_path, made)
    with open(tmp_path / "t.jsonl", "ab") as file:
        file.write(b'{"cell": {"task": "t", "par')
    assert read_lines(tmp_path) == lines[:2]
    append(tmp_path, lines[2])
    assert read_lines(tmp_path) == lines[:3]
    assert current(read_lines(tmp_path), protocol) == lines[:3]


def test_lines_of_another_protocol_do_not_count() -> None:
    protocol = small()
    cell = first_cells(protocol, "t", "iid", protocol.slices[0].rows[1])[0]
    lines = [line(protocol, cell, [0.5])]
    job = protocol.jobs["t"]
    assert current(lines, small(jobs={"t": {**job, "train": {"steps": 4}}})) == []
    assert current(lines, small(clients=3)) == []
    assert current(lines, small(hours=3.0)) == lines


def test_figures_are_the_ledgers() -> None:
    entries = [
        {"round": -1, "client": "a", "phase": "setup", "direction": "down", "part": "x", "bytes": 10**6},
        *(
            {"round": i, "client": client, "phase": "train", "direction": way, "part": "x", "bytes": size + i}
            for i in range(3)
            for client in ("a", "b")
            for way, size in (("up", 10), ("down", 4))
        ),
    ]
    work = [{"round": i, "client": c, "flops": 5, "server_flops": 1} for i in range(3) for c in ("a", "b")]
    scored = [{"round": i, "client": "server", "score": {"accuracy": 0.1 * i}} for i in range(-1, 3)]
    result = {"clients": {"a": {}, "b": {}}, "baseline": {"score": {"accuracy": 0.3}}, "seconds": 2.0404}
    run = Run("r", result, {}, {}, {}, tuple(work + scored), tuple(entries))
    found = figures(run, "accuracy", 3)
    assert (found["up"], found["down"]) == ([0, 10, 21, 33], [0, 4, 9, 15])
    assert found["flops"] == [0, 12, 24, 36]
    assert found["scores"] == pytest.approx([-0.1, 0.0, 0.1, 0.2])
    assert (found["baseline"], found["seconds"]) == (0.3, 2.04)


# table and words


def whole_table(protocol: Protocol) -> tuple[Table, list[Line]]:
    """Centralized; FedAvg; FedBFPT, worse with 5 % of the bytes; LoRA, equal with 0.5 %; FedBT has not run."""
    centralized, fedavg, fedbfpt, lora, _ = protocol.slices[0].rows
    scores = [0.90, 0.91, 0.905, 0.895, 0.90]
    lines = played(protocol, centralized, bytes=0, finals=[score + 0.01 for score in scores])
    lines += played(protocol, fedavg, bytes=10_000, finals=scores)
    lines += played(
        protocol, fedbfpt, bytes=500, finals=[score - 0.1 - 0.01 * i for i, score in enumerate(scores)]
    )
    near = [0.001, -0.001, 0.0, 0.001, -0.002]
    lines += played(protocol, lora, bytes=50, finals=[score + d for score, d in zip(scores, near, strict=True)])
    return tables(protocol, lines)[0], lines


def test_the_table_is_what_the_lines_say() -> None:
    protocol = small()
    table, _ = whole_table(protocol)
    assert [entry.whole for entry in table.entries] == [True, True, True, True, False]
    _, fedavg, fedbfpt, lora, _ = table.entries
    assert (fedavg.mean, fedavg.up, fedavg.down) == (pytest.approx(0.902), 30_000, 15_000)
    assert fedavg.sd == pytest.approx(stdev([0.90, 0.91, 0.905, 0.895, 0.90]))
    assert (fedavg.share, fedavg.test) == (1.0, None)
    assert fedavg.gain == pytest.approx((0.902 - 0.5) / (0.912 - 0.5))
    assert lora.tuned is not None
    assert lora.share is not None
    assert lora.share == 50 * lora.tuned.choice.rounds / 30_000
    assert lora.test is not None
    assert lora.test.verdict == "equal"
    assert fedbfpt.test is not None
    assert fedbfpt.test.verdict == "worse"
    assert lora.p == pytest.approx(min(1.0, 2 * lora.test.p))  # Holm: the smaller of two
    assert [entry.row.name for entry in table.front()] == ["LoRA r8", "FedAvg"]


def test_bytes_to_a_share_of_the_gain_are_the_first_rounds() -> None:
    protocol = small()
    table, _ = whole_table(protocol)
    fedavg = table.entries[1]
    curve = [0.7, 0.8, 0.902]
    assert next(line.scores[1:] for line in fedavg.lines)[:2] == pytest.approx(curve[:2])
    assert fedavg.reached == (45_000, None)  # 95 %: 0.8914, 99 %: 0.90788


def test_words_say_what_the_figures_say() -> None:
    protocol = small()
    table, _ = whole_table(protocol)
    said = dict(answers(protocol, [table]))
    [fedbfpt] = said["Is FedBFPT's trade worth its megabytes when all are tuned?"]
    assert "not worth it: LoRA r8 comes to 0.90" in fedbfpt
    assert said["When does FedBT win?"] == said["What does splitting cost?"] == [OPEN]
    [best] = said["What is the best there is at 1 % of FedAvg's bytes?"]
    assert "LoRA r8 with 0.5 %" in best
    assert "equal to FedAvg" in best
    [none] = said["What is the best there is at 0.1 % of FedAvg's bytes?"]
    assert none.endswith("nothing that has run sends so little.")
    assert said["On how many tasks is a score shown to be equal or better at 1 % or less?"] == [
        "1 of 1 tasks tested so far (1 in the protocol): t: LoRA r8, iid."
    ]


def test_titles_name_the_start_model_where_there_are_several(tmp_path: Path) -> None:
    protocol = small()
    _, lines = whole_table(protocol)
    rows = {row.name: row for row in protocol.slices[0].rows}
    digests = [line.cell.digest(protocol, rows[line.cell.row], line.rows, "model 2") for line in lines]
    other = [replace(line, model="model 2", digest=digest) for line, digest in zip(lines, digests, strict=True)]
    for found, added, start, titles in (
        (lines, lines, "model 1 (the last is a digest of its weights)", ["t, iid"]),
        (
            [*lines, *other],
            other,
            "model 1 or model 2 (the last is a digest",
            ["t, iid (model 1)", "t, iid (model 2)"],
        ),
    ):
        said = dict(answers(protocol, tables(protocol, found)))
        [once] = said["What is the best there is at 0.1 % of FedAvg's bytes?"]
        assert once == f"{'; '.join(titles)}: nothing that has run sends so little."
        for made in added:
            append(tmp_path, made)
        page = write_page(protocol, tmp_path, tmp_path / "board.md").read_text("utf-8")
        assert f"* **Start model**: {start}" in " ".join(page.split())
        heads = [line for line in page.splitlines() if line.startswith("## t, iid")]
        assert heads == [f"## {at}" for at in titles]


def test_a_row_as_good_with_fewer_bytes_beats_fedbt() -> None:
    """No row was better with as few bytes, and the page ended in a traceback."""
    protocol = small()
    table, lines = whole_table(protocol)
    finals = [line.scores[-1] for line in table.entries[3].lines]
    lines += played(protocol, protocol.slices[0].rows[4], bytes=5000, finals=finals)
    said = dict(answers(protocol, tables(protocol, lines)[:1]))
    assert said["When does FedBT win?"] == ["t, iid: not here; FedBT is beaten by LoRA r8."]


def confirmed(protocol: Protocol, lines: list[Line], row: Row, differences: dict[int, float]) -> list[Line]:
    """The confirmation's lines of FedAvg, which ends at 0.9, and of a row with these differences by seed."""
    tests = {line.cell.row: line.cell for line in lines if line.cell.stage == "test" and line.cell.seed == 0}
    return [
        line(protocol, replace(tests[name], stage="confirm", seed=seed), [0.8, 0.9 + change], rows="other folds")
        for name, sign in (("FedAvg", 0), (row.name, 1))
        for seed, change in ((seed, sign * by) for seed, by in differences.items())
    ]


def test_a_confirmation_is_the_one_sided_test_of_its_own_seeds() -> None:
    protocol = small()
    _, fedavg, fedbfpt, lora, _ = protocol.slices[0].rows
    parts = [replace(protocol.slices[0], rows=(fedavg, row), confirms=True) for row in (lora, fedbfpt)]
    protocol = small(slices=(protocol.slices[0], *parts))
    table, lines = whole_table(protocol)
    facts = {"t": {"rows": {"train": 9, "dev": 9, **{f"fold-{i}": 4000 for i in range(5)}}}}
    found, other = confirmations(protocol, lines, [table], facts)
    assert [(one.test, one.p, one.p_equal) for one in (found, other)] == [(None, 1.0, 1.0)] * 2
    assert shown(protocol, found) == "not run: 0 of 3 seeds"
    # of a row as good that varies as the five seeds did: their spread is less than that of their rows
    seed = max(0.0, stdev([0.001, -0.001, 0.0, 0.001, -0.002]) ** 2 - 0.28**2 / 4000)
    error = math.sqrt((seed + 0.28**2 / (20_000 / 3)) / 3)
    rng = np.random.default_rng(0)
    draws = rng.normal(0.0, error * math.sqrt(3), (40_000, 3))
    low = draws.mean(1) - stats.t.ppf(0.95, 2) * draws.std(1, ddof=1) / math.sqrt(3)
    assert found.power == pytest.approx((low > -0.01).mean(), abs=0.01)
    differences = {5: 0.004, 6: -0.001, 7: 0.002}
    lines += confirmed(protocol, lines, lora, differences)
    found, other = confirmations(protocol, lines, [table], facts)
    p = stats.ttest_1samp(list(differences.values()), -0.01, alternative="greater").pvalue
    assert found.test is not None
    assert found.test.p_no_worse == pytest.approx(p, rel=1e-12)
    assert found.p == pytest.approx(2 * p, rel=1e-12)  # that of the other, which has not run, counts as 1
    above = stats.ttest_1samp(list(differences.values()), 0.01, alternative="less").pvalue
    assert found.p_equal == pytest.approx(2 * max(p, above), rel=1e-12)
    assert (other.test, other.p, other.done) == (None, 1.0, 0)
    assert shown(protocol, found) == "equal"
    assert tables(protocol, lines)[0] == table  # the first study is what it was
    said = dict(answers(protocol, [table], [found, other]))
    [first, then, both] = said["On how many tasks is a score shown to be equal or better at 1 % or less?"]
    assert first.startswith("1 of 1 tasks")
    assert then.endswith("equal or no worse on 1 of 1 tasks that have run: t, iid: LoRA r8 (equal).")
    assert both == "Both together, each corrected by itself: 1 of 1 tasks tested so far."
    [best] = said["What is the best there is at 1 % of FedAvg's bytes?"]
    assert best.endswith("; equal to FedAvg; in the confirmation below it is equal to FedAvg.")
    [other] = dict(answers(protocol, [table]))["What is the best there is at 1 % of FedAvg's bytes?"]
    assert "confirmation" not in other


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ({5: 0.004, 6: -0.001}, "not run: 2 of 3 seeds"),
        ({5: 0.004, 6: -0.02, 7: 0.002}, "not shown"),
        ({5: 0.014, 6: 0.004, 7: 0.01}, "no worse"),
        ({5: 0.031, 6: 0.03, 7: 0.032}, "no worse"),
        ({5: 0.008, 6: 0.002, 7: 0.005}, "no worse"),  # by itself within the margin at p 0.09
        ({5: 0.001, 6: 0.002, 7: 0.0}, "equal"),
        ({5: -0.031, 6: -0.03, 7: -0.032}, "worse"),
    ],
)
def test_verdicts_of_a_confirmation(differences: dict[int, float], verdict: str) -> None:
    protocol = small()
    _, fedavg, _, lora, _ = protocol.slices[0].rows
    part = replace(protocol.slices[0], rows=(fedavg, lora), confirms=True)
    protocol = small(slices=(protocol.slices[0], part))
    table, lines = whole_table(protocol)
    lines += confirmed(protocol, lines, lora, differences)
    [found] = confirmations(protocol, lines, [table], {})
    assert shown(protocol, found) == verdict


def test_a_confirmation_with_a_run_that_diverged_shows_nothing() -> None:
    protocol = small()
    _, fedavg, _, lora, _ = protocol.slices[0].rows
    part = replace(protocol.slices[0], rows=(fedavg, lora), confirms=True)
    protocol = small(slices=(protocol.slices[0], part))
    table, lines = whole_table(protocol)
    lines += confirmed(protocol, lines, lora, {5: 0.0, 6: 0.0, 7: 0.001})
    lines[-1] = replace(lines[-1], scores=[0.1], diverged=True)
    [found] = confirmations(protocol, lines, [table], {})
    assert (found.test, found.done, shown(protocol, found)) == (None, 2, "diverged")


def test_a_confirmation_comes_after_the_test_with_what_tuning_chose() -> None:
    protocol = small()
    row = protocol.slices[0].rows[1]
    lines = played(protocol, row)
    [choice] = {line.cell.choice for line in lines if line.cell.stage == "test"}
    again = wanted(protocol, "t", "iid", row, lines, confirms=True)
    assert [(cell.stage, cell.choice, cell.seed) for cell in again] == [("confirm", choice, i) for i in (5, 6, 7)]
    assert wanted(protocol, "t", "iid", row, lines[:-1], confirms=True)[0].stage == "test"
    assert not wanted(protocol, "t", "iid", row, lines)


def test_a_share_above_a_limit_does_not_look_like_the_limit() -> None:
    shares = {
        0.001: "0.1 %",
        0.00101: "0.101 %",
        0.00099: "0.099 %",
        0.0104: "1.04 %",
        0.000075: "0.0075 %",
        1.0: "100 %",
    }
    assert {share: percent(share) for share in shares} == shares


def test_without_figures_everything_is_open() -> None:
    protocol = small()
    assert {tuple(sentences) for _, sentences in answers(protocol, tables(protocol, []))} == {(OPEN,)}


def test_a_row_without_all_its_seeds_is_not_run(tmp_path: Path) -> None:
    protocol = small()
    _, lines = whole_table(protocol)
    partly = [line for line in lines if (line.cell.row, line.cell.stage, line.cell.seed) != ("LoRA r8", "test", 4)]
    for made in partly:
        append(tmp_path, made)
    page = write_page(protocol, tmp_path, tmp_path / "board.md").read_text("utf-8")
    assert "| LoRA r8 | not run: 4 of 5 seeds |  |" in page
    assert "| FedBT | not run |  |" in page
    assert "nothing that has run sends so little" in page
    assert "0.1, 2 rounds: " in page  # pruned
    picture = (tmp_path / "t-iid-1.svg").read_bytes()
    assert (page, picture) == (
        write_page(protocol, tmp_path, tmp_path / "board.md").read_text("utf-8"),
        (tmp_path / "t-iid-1.svg").read_bytes(),
    )


def test_the_page_is_what_its_figures_say(tmp_path: Path) -> None:
    records = tmp_path / "board"
    records.mkdir()
    for path in (ROOT / "docs" / "board").glob("*.json*"):
        (records / path.name).write_bytes(path.read_bytes())
    page = write_page(read_protocol(), records, tmp_path / "board.md")
    assert page.read_text("utf-8") == (ROOT / "docs" / "board.md").read_text("utf-8")
    words = " ".join(page.read_text("utf-8").split())
    assert "A difference above 0 is in the row's favor, of a loss too." in words
    assert "worse and no worse are what the interval of a row by itself says, without such a correction." in words
    for picture in records.glob("*.svg"):
        assert picture.read_bytes() == (ROOT / "docs" / "board" / picture.name).read_bytes()


def test_the_readmes_figures_are_the_boards() -> None:
    page, readme = ((ROOT / name).read_text("utf-8") for name in ("docs/board.md", "README.md"))
    said = " ".join(readme.partition("[The board](docs/board.md)")[2].partition("![")[0].split())
    assert "five seeds" in said
    told = {
        "sst2": {
            "FedAvg": "",
            "LoRA r8 1 bit": "worse",
            "LoRA all r8 1 bit": "worse",
            "LoRA all r8 plain 1 bit": "no worse",
            "FedBERT": "better",
            "FedBERT LoRA all r8 int4 15 %": "not shown",
        },
        "csabstruct": {
            "FedAvg": "",
            "LoRA r8 1 bit": "not shown",
            "LoRA all r8 1 bit": "equal",
            "LoRA all r8 plain 1 bit": "no worse",
        },
        "jnlpba": {"FedAvg": "", "LoRA r8 1 bit": "worse", "LoRA all r8 plain 1 bit": "not shown"},
        "qbio": {"FedAvg": "", "LoRA r8 1 bit": "better"},
        "mrpc": {"FedAvg": "", "LoRA all r8 plain 1 bit": "not shown"},
    }
    for task, verdicts in told.items():
        table = page.partition(f"\n## {task}, iid")[2]
        for row, verdict in verdicts.items():
            cells = table.partition(f"\n| {row} |")[2].partition("\n")[0].split(" | ")
            assert cells[0].strip() in said, row
            assert cells[-1].strip(" |") == verdict
            assert row == "FedAvg" or cells[4] in said


def test_what_is_said_of_the_confirmation_is_what_the_page_says() -> None:
    page, readme, why = (
        " ".join((ROOT / name).read_text("utf-8").split())
        for name in ("docs/board.md", "README.md", "docs/decisions/adapters.md")
    )
    table = page.partition(" ## Confirmation")[2].partition(" ## ")[0]
    said = readme.partition("**Confirmed on SST-2 and CSAbstruct.**")[2].partition(" * **")[0]
    told = {
        "sst2": ("equal", "adapters with both factors", "equal within", "equal to FedAvg on SST-2"),
        "csabstruct": ("no worse", "they", "no worse by", "no worse on CSAbstruct"),
    }
    for task, (expected, who, how, reason) in told.items():
        row = table.partition(f"| {task}, iid | ")[2].split(" | ")[:8]
        name, share, _, fedavg, score, difference, p, verdict = row
        assert (name, verdict.partition(" |")[0]) == ("LoRA all r8 plain 1 bit", expected)
        low, high = (float(bound) for bound in difference.partition("(")[2].strip(")").split(" to "))
        scores = f"{who} come to {score} and FedAvg to {fedavg}"
        assert f"{scores}: {how} the margin ({low:+.3f} to {high:+.3f}), with {share}" in said
        assert float(p) < 0.05
        means = [words.partition(" ±")[0] for words in (score, fedavg)]
        assert f"{reason} ({means[0]} and {means[1]})" in why
    assert "Both hold after correction for the three tasks of the study." in said
    row = table.partition("| jnlpba, iid | ")[2].split(" | ")[:8]
    _, share, _, fedavg, score, difference, _, verdict = row
    assert verdict.partition(" |")[0] == "not shown"
    mean, low, high = re.findall(r"-[.0-9]+", difference)
    short = [f"{float(number):.3f}" for number in (mean[1:], low, high)]
    lower = (
        f"On JNLPBA they come to {score} and FedAvg to {fedavg}, lower by {short[0]} ({' to '.join(short[1:])}),"
    )
    assert f"{lower} with {share}; that they are no worse by the margin is not shown." in said
    means = [words.partition(" ±")[0] for words in (score, fedavg)]
    assert f"and lower on JNLPBA ({means[0]} and {means[1]})" in why
    assert "not run: " not in table
    powers = page.partition("### Are the test sets large enough?")[2].partition(" ### ")[0]
    small = re.findall(r"\| (\w+) \|(?: [^|]+ \|){5} too small for a claim of equality", powers)
    assert {"mrpc", "chemprot"} <= set(small)
    assert (
        "MRPC has too few test rows to show it, and so has the sixth task, ChemProt, which has not been tested."
        in said
    )
    assert "| FedAvg | not run |" in page.partition(" ## chemprot, iid ")[2].partition(" ## ")[0]
    tables, again = page.partition("equal or better at 1 % or less?** * ")[2].split(" * ")[:2]
    assert tables.startswith("1 of 5 tasks tested so far (6 in the protocol): qbio: LoRA r8 1 bit, iid.")
    assert "no worse on 2 of 3 tasks that have run: sst2" in again
    assert "Both together, each corrected by itself: 3 of 5 tasks tested so far." in page
    found = re.findall(r"\| (mrpc|chemprot) \|(?: [^|]+ \|){2} ([^|]+) \| ([^|]+) \|", powers)
    few = [f"{task}: {rows} test rows are too few to show it (power {power})" for task, rows, power in found]
    lower = f"jnlpba: LoRA all r8 plain 1 bit differs from FedAvg by {low} to {high} (90 %) in the confirmation"
    assert f"Why not on the others: {'; '.join([lower, *few])}." in page
    assert "Why not on the others: sst2: LoRA all r8 1 bit is worse than FedAvg by more than the margin;" in page
    assert "0.11 % of the bytes or less is shown to be enough on three of the five tasks tested." in said


def test_the_scores_of_what_was_tested_again_are_those_of_the_tables() -> None:
    page = (ROOT / "docs" / "board.md").read_text("utf-8")
    said = " ".join(page.partition("```")[0].split())
    found = {}
    for task, row in (("sst2", "r8"), ("sst2", "all r8"), ("csabstruct", "all r8"), ("qbio", "r8")):
        table = page.partition(f"\n## {task}, iid")[2]
        found[task, row] = table.partition(f"\n| LoRA {row} 1 bit | ")[2].partition(" ±")[0]
    assert f"come to {found['sst2', 'r8']}, {found['sst2', 'all r8']} and {found['csabstruct', 'all r8']}," in said
    assert f"with a loss of {found['qbio', 'r8']} where" in said


def test_what_is_said_of_both_factors_is_what_the_tables_say() -> None:
    page, readme, why = (
        " ".join((ROOT / name).read_text("utf-8").split())
        for name in ("docs/board.md", "README.md", "docs/decisions/adapters.md")
    )
    gains, told = [], []
    for task in ("sst2", "csabstruct"):
        table = page.partition(f" ## {task}, iid")[2]
        for row in ("LoRA all r8 plain 1 bit", "LoRA all r8 1 bit"):
            cells = table.partition(f" | {row} | ")[2].split(" | ")
            tuning = page.partition(" ## What tuning chose")[2]
            rounds = tuning.partition(f"| {task}, iid | {row} | ")[2]
            gains.append(cells[1])
            told.append((cells[0].partition(" ±")[0], rounds.partition(" rounds")[0].split()[-1]))
    assert (
        f"that makes {gains[0]} of the gain of centralized training, where taking turns made {gains[1]};" in readme
    )
    assert f"more rounds ({told[0][1]}, for {told[1][1]})" in readme
    table, ner = page.partition(" ## jnlpba, iid")[2], []
    for row in ("LoRA all r8 plain 1 bit", "FedAvg", "LoRA r8 1 bit"):
        ner.append(table.partition(f" | {row} | ")[2].split(" | ")[1])
    shares = f"it makes {ner[0]} of the gain where FedAvg makes {ner[1]} and LoRA on query and value {ner[2]}."
    assert f"On JNLPBA {shares}" in readme
    table, skewed = page.partition(" ## sst2, dirichlet")[2], []
    for row in ("FedAvg", "LoRA all r8 1 bit", "LoRA all r8 plain 1 bit"):
        skewed.append(table.partition(f" | {row} | ")[2].partition(" | ")[0])
    fedavg, in_turns, both = skewed
    lora = f"LoRA on all linear layers to {in_turns} in turns and to {both} with both"
    assert f"FedAvg comes to {fedavg} on SST-2, {lora}" in readme
    lines = current(read_lines(ROOT / "docs" / "board"), read_protocol())
    least = min(
        line.scores[-1]
        for line in lines
        if (line.cell.task, line.cell.partition, line.cell.row) == ("sst2", "dirichlet", "LoRA all r8 plain 1 bit")
    )
    assert f"FedAvg came to {fedavg} on SST-2, `plain` came to {both}, at {least:.4f} with" in why
    assert f"the last round with both factors gave {least:.4f}." in readme
    assert f"and `alternate` to {in_turns}." in why
    (plain, rounds), (turns, fewer) = told[:2]
    assert f"on SST-2 to {plain} after {rounds} rounds and `alternate` to {turns} after {fewer}" in why
    assert (
        f"CSAbstruct to {told[2][0]} after {told[2][1]} and `alternate` to {told[3][0]} after {told[3][1]}," in why
    )


def test_a_slice_that_confirms_has_fedavg_and_one_row(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.toml"):
        text = path.read_text("utf-8")
        (tmp_path / path.name).write_text(text.replace('"LoRA r8"]\n', '"LoRA r8"]\nconfirm = true\n', 1), "utf-8")
    with pytest.raises(UserError, match=r"slice \d+: expected FedAvg and the row that is confirmed"):
        read_protocol(tmp_path)


def test_a_slice_of_an_unknown_row_is_refused(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.toml"):
        (tmp_path / path.name).write_text(path.read_text("utf-8").replace('"head only", ', '"head", '), "utf-8")
    with pytest.raises(UserError, match=r"slice \d+: there is no row 'head'"):
        read_protocol(tmp_path)
