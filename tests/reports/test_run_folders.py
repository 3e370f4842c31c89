"""Run folders read back, whatever state they were left in."""

from __future__ import annotations

import codecs
import gc
import json
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from filelock import FileLock

from fedstrata.cli import main
from fedstrata.errors import UserError
from fedstrata.plan.kinds import CHOICES, LOCK
from fedstrata.reports import record_files, runs
from fedstrata.reports.record_types import ROUNDS
from fedstrata.reports.report import write_report
from fedstrata.reports.runs import curve, headline, load_run, load_runs, score
from fedstrata.reports.tables import result_rows

Make = Callable[..., Path]


def test_a_run_is_read_as_it_was_written(run: Make) -> None:
    made = load_run(run())
    assert made.name == "try"
    assert made.clients == ["client-0", "client-1"]
    assert made.job["method"]["name"] == "fedbfpt"
    assert len(made.work) == 6
    assert {line["phase"] for line in made.transfers} == {"train"}
    assert made.named_parts == ["embeddings", *(f"layer.{i}" for i in range(6)), "head"]
    assert score(made) == (2.0, None)


def test_the_curve_adds_up_what_was_spent_by_then(run: Make) -> None:
    points = curve(load_run(run()))
    assert [point.round for point in points] == [-1, 0, 1, 2]
    assert [point.score for point in points] == [3.5, 3.0, 2.5, 2.0]
    assert [point.bytes for point in points] == [0, 12_000_000, 24_000_000, 36_000_000]
    assert [point.flops for point in points] == [0, 4 * 10**12, 8 * 10**12, 12 * 10**12]


def test_the_curve_of_many_rounds_reads_what_each_of_them_spent_a_few_times(run: Make) -> None:
    """Read anew for each point, 4,000 rounds took 0.6 s."""

    class Counted(Counter[int]):
        read = 0

        def items(self) -> Any:
            Counted.read += len(self)
            return super().items()

        def __getitem__(self, key: int) -> int:
            Counted.read += 1
            return super().__getitem__(key)

    rounds = 300
    lines = tuple({"round": at, "client": "server", "score": {"loss": 1.0}} for at in range(-1, rounds))
    made = replace(load_run(run()), rounds=lines)
    spent = Counted(dict.fromkeys(range(0, rounds, 2), 2))  # nothing in every second round
    vars(made).update(bytes_by_round=spent, flops_by_round=spent)
    points = curve(made)
    assert [(point.round, point.bytes, point.flops) for point in points[:4]] == [
        (-1, 0, 0), (0, 2, 2), (1, 2, 2), (2, 4, 4),
    ]  # fmt: skip
    assert points[-1].bytes == rounds
    assert Counted.read < 10 * rounds


def test_scores_of_nought_are_scores(run: Make) -> None:
    folder = run()
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text("utf-8").splitlines()]
    for line in lines:
        if "score" in line:
            line["score"] = dict.fromkeys(line["score"], 0.0)
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    assert [(point.round, point.score) for point in curve(load_run(folder))] == [(at, 0.0) for at in range(-1, 3)]


def test_the_curve_of_the_last_stage_begins_where_the_first_ended(staged: Make) -> None:
    points = curve(load_run(staged("pretrain", "finetune")))
    assert points[0].bytes == 36_000_000
    assert points[-1].flops == 24 * 10**12


def test_a_killed_run_is_summed_from_its_records(run: Make) -> None:
    folder = run()
    whole = load_run(folder)
    (folder / "result.json").unlink()
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "cli')
    made = load_run(folder)
    assert made.result["status"] == "stopped"
    for key in ("bytes", "flops", "score", "rounds", "method"):
        assert made.result[key] == whole.result[key], key


@pytest.mark.parametrize("before", ["nothing", "stopped"])
def test_a_run_whose_folder_is_locked_is_going_on(run: Make, before: str) -> None:
    folder = run(status=before)
    whole = load_run(folder)
    if before == "nothing":
        (folder / "result.json").unlink()
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "client": "server", "score": {"loss": 1.5}, "seconds": 0.5}\n')
    with FileLock(folder / LOCK):
        made = load_run(folder)
        page = write_report([folder]).read_text("utf-8")
        assert result_rows([made])[0]["status"] == "running"
    assert (made.result["status"], made.result["message"]) == ("running", None)
    assert made.result["score"]["loss"] == 1.5  # what an earlier call left in result.json is older
    assert made.result["bytes"] == whole.result["bytes"]
    assert '<span class="status running">running</span>' in page
    assert "The run is going on, so far with loss 1.5" in page
    assert load_run(folder).result["status"] == "stopped"


def test_a_finished_run_is_finished_while_its_trackers_are_closed(run: Make) -> None:
    folder = run()
    with FileLock(folder / LOCK):
        assert load_run(folder).result["status"] == "finished"


def test_a_finished_run_that_gets_more_rounds_is_going_on(run: Make) -> None:
    folder = run()
    path = folder / "job.toml"
    job = tomllib.loads(path.read_text("utf-8"))
    job["method"]["rounds"] += 2
    path.write_text(tomli_w.dumps(job), "utf-8")
    with FileLock(folder / LOCK):
        assert load_run(folder).result["status"] == "running"
    assert load_run(folder).result["status"] == "finished"


@pytest.mark.parametrize("before", ["finished", "stopped", "failed"])
def test_a_run_that_was_killed_after_it_went_on_is_summed_from_its_records(run: Make, before: str) -> None:
    folder = run(status=before)
    whole = load_run(folder)
    assert whole.result["status"] == before
    job = tomllib.loads((folder / "job.toml").read_text("utf-8"))
    job["method"]["rounds"] += 2
    (folder / "job.toml").write_text(tomli_w.dumps(job), "utf-8")
    line = next(line for line in whole.work if line["client"] == "client-0")
    for added in ({**line, "round": 3}, {"round": 3, "client": "server", "score": {"loss": 1.5}, "seconds": 0.5}):
        with (folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(added) + "\n")
    made = load_run(folder)
    assert (made.result["status"], made.result["message"]) == ("stopped", None)
    assert made.result["score"] == {"loss": 1.5}
    assert made.result["rounds"] == 4
    assert made.result["flops"] > whole.result["flops"]
    assert "The run stopped before its end with loss 1.5" in write_report([folder]).read_text("utf-8")


def test_of_stages_the_one_that_is_not_finished_is_going_on(staged: Make) -> None:
    folder = staged("pretrain", "finetune")
    for path in (folder / "result.json", folder / "stages" / "finetune" / "result.json"):
        path.unlink()
    with FileLock(folder / LOCK):
        made = load_run(folder)
    assert made.result["status"] == "running"
    assert [stage.result["status"] for stage in made.stages] == ["finished", "running"]


def test_killed_stages_are_in_the_jobs_order_whatever_the_times_of_their_files(staged: Make) -> None:
    """In a copy, or after a clock was set back, the first stage could be taken for the last."""
    folder = staged("pretrain", "finetune")
    (folder / "result.json").unlink()
    (folder / CHOICES).write_text("[stages.pretrain.train]\n[stages.finetune.train]\n[stages.third.train]\n")
    os.utime(folder / "stages" / "finetune" / "job.toml", (1, 1))
    made = load_run(folder)
    assert [stage.name for stage in made.stages] == ["pretrain", "finetune"]
    assert made.result["stage"] == "finetune"


def test_a_broken_line_in_the_middle_is_an_error(run: Make) -> None:
    folder = run()
    (folder / "ledger.jsonl").write_text('{"a\n{}\n')
    with pytest.raises(UserError, match=r"ledger.jsonl, line 1: is not JSON"):
        load_run(folder)


@pytest.mark.parametrize("name", ["result.json", "rounds.jsonl", "ledger.jsonl"])
def test_a_byte_order_mark_is_no_content(run: Make, name: str) -> None:
    folder = run()
    whole = load_run(folder)
    (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())
    assert load_run(folder) == whole


def test_the_command_reads_the_records_once(run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its table and for the page, which took half of the time of a page of 10,000 clients."""
    read: list[str] = []
    lines = record_files.record_lines
    monkeypatch.setattr(runs, "record_lines", lambda path, kind: read.append(path.name) or lines(path, kind))
    with suppress(SystemExit):
        main(["report", str(run())])
    assert read == ["rounds.jsonl", "ledger.jsonl"]


@pytest.mark.parametrize("was", [True, False])
def test_reading_leaves_the_collector_as_it_was(run: Make, monkeypatch: pytest.MonkeyPatch, was: bool) -> None:
    during: list[bool] = []
    monkeypatch.setattr(record_files, "check_record", lambda *_: during.append(gc.isenabled()))
    folder = run()
    damaged = folder / "damaged.jsonl"
    damaged.write_text("{\n{}\n")
    try:
        (gc.enable if was else gc.disable)()
        record_files.record_lines(folder / "rounds.jsonl", ROUNDS)
        with pytest.raises(UserError):
            record_files.record_lines(damaged, ROUNDS)
        assert (during, gc.isenabled()) == ([False], was)
    finally:
        gc.enable()


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder"):
        load_run(tmp_path)


def test_a_sweep_without_its_table_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "cells" / "all").mkdir(parents=True)
    with pytest.raises(UserError, match=r"is a sweep's folder without its table"):
        load_run(tmp_path)


def test_records_of_a_finished_run_that_were_cut_are_an_error(run: Make) -> None:
    folder = run()
    path = folder / "rounds.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    last = max(json.loads(line)["round"] for line in lines)
    path.write_text("".join(line for line in lines if json.loads(line)["round"] < last), "utf-8")
    with pytest.raises(
        UserError, match=rf"rounds.jsonl: ends after round {last} of a run that finished {last + 1}"
    ):
        load_run(folder)
    (folder / "result.json").unlink()
    assert load_run(folder).result["status"] != "finished"


def test_a_ledger_of_a_finished_run_that_was_cut_is_an_error(run: Make) -> None:
    """A report of it would draw too few bytes."""
    folder = run()
    path = folder / "ledger.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]), "utf-8")
    with pytest.raises(UserError, match=r"ledger.jsonl: holds [\d,]+ bytes \(up\) of a run that sent [\d,]+"):
        load_run(folder)


@pytest.mark.parametrize("name", ["rounds.jsonl", "parts.json", "report.html"])
def test_a_pipe_in_a_folder_is_an_error_and_not_waited_for(run: Make, name: str) -> None:
    folder = run()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"{name}: is a pipe or a device; expected a file in a run's folder"):
        write_report([folder])


def test_a_link_to_a_device_in_a_sweeps_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "table.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"table.json: is a pipe or a device; expected a file in a sweep's folder"):
        write_report([tmp_path])


def test_equal_names_are_told_apart(run: Make) -> None:
    folders = [run("a/try"), run("b/try")]
    assert [made.name for made in load_runs(folders)] == ["a/try", "b/try"]
    assert load_runs(folders[:1])[0].name == "try"


def test_a_run_without_a_server_model_is_the_mean_over_its_clients(run: Make) -> None:
    clients = {f"client-{i}": {"examples": 120 + i, "score": {"loss": 1.0 + i}} for i in range(2)}
    folder = run(method="local")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "score": {"loss": 1.5}, "clients": clients}))
    made = load_run(folder)
    value, spread = score(made)
    assert value == 1.5
    assert spread == pytest.approx(0.7071, abs=1e-4)
    assert headline(made, None) is None


def test_a_run_that_has_only_begun(run: Make) -> None:
    folder = run()
    for name in ("result.json", "rounds.jsonl", "ledger.jsonl", "partition.json"):
        (folder / name).unlink()
    made = load_run(folder)
    assert (made.result["status"], made.work, curve(made)) == ("stopped", [], [])
    json.dumps(made.result)


@pytest.mark.parametrize(("found", "age"), [(None, "an older"), (1, "an older"), (4, "a newer")])
def test_another_versions_folder_is_refused(run: Make, found: int | None, age: str) -> None:
    folder = run()
    result = json.loads((folder / "result.json").read_text())
    result["format"] = found
    if found is None:
        del result["format"]
    (folder / "result.json").write_text(json.dumps(result))
    sentence = f"try: was written by {age} version of FedStrata and cannot be read by this one"
    with pytest.raises(UserError, match=sentence):
        load_run(folder)


@pytest.mark.parametrize("line", ["", "format = 1\n"])
def test_a_killed_runs_version_is_that_of_its_job(run: Make, line: str) -> None:
    folder = run()
    (folder / "result.json").unlink()
    job = (folder / "job.toml").read_text().replace("format = 3\n", "")
    (folder / "job.toml").write_text(f"{line}{job}")
    with pytest.raises(UserError, match=r"an older version"):
        load_run(folder)


def test_parts_have_the_models_order_whatever_their_names(run: Make) -> None:
    folder = run()
    records = [{"name": f"block {i}", "kind": "layer", "depth": i, "bytes": 8} for i in (2, 0, 1)]
    (folder / "parts.json").write_text(json.dumps([*records, {"name": "x", "kind": "head", "depth": None}]))
    made = load_run(folder)
    assert made.named_parts[:3] == ["block 2", "block 0", "block 1"], "their layers were built"
    assert made.named_parts[3:] == ["embeddings", "head", *(f"layer.{i}" for i in range(6))], "others by name"
    assert "x" not in made.named_parts
    assert made.model_parts == ["block 2", "block 0", "block 1"]
    assert made.model_parts is made.model_parts, "found once: a page asks for it in every round"
