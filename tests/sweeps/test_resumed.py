"""A sweep that goes on: its cells keep the jobs and rows they began with, so no table mixes two experiments."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from safetensors.torch import load_file

import fedstrata
from fedstrata.errors import UserError
from fedstrata.events import CellStarted, RoundEnded
from fedstrata.reports.report import write_report
from fedstrata.server.ended import damaged_end
from fedstrata.sweeps import begun
from fedstrata.sweeps.cells import cells
from fedstrata.sweeps.run import _Scheduler
from fedstrata.wire.files import read_lines
from fedstrata.wire.store import write_tensors
from tiny import SENTENCES, tokenizer

HEAD = "text,label\n"
LINES = [f'"{text}",{label}\n' for text, label in SENTENCES]
ANEW = "delete this folder to run the cell anew"


Done = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # else a sweep's share of the cores decides about the last bits
        yield


def small(model: Path, rows: Path, **tables: Any) -> dict[str, Any]:
    """Two rows of one seed."""
    made: dict[str, Any] = {
        "model": {"name": str(model)},
        "task": {"kind": "classify"},
        "data": {"train": str(rows), "holdout": 0.3},
        "clients": {"count": 2},
        "method": {"name": "fedavg", "rounds": 1},
        "train": {"batch_size": 4, "max_tokens": 32, "learning_rate": 0.01},
        "sweep": {"seeds": [0], "against": "a", "rows": [{"name": "a"}, {"name": "b", "method.name": "fedprox"}]},
    }
    for key, table in tables.items():
        made[key] = {**made.get(key, {}), **table}
    return made


def begun_sweep(folder: Path, model: Path, **tables: Any) -> dict[str, Any]:
    """A sweep that has been run in ``folder``; its rows are beside it."""
    rows = folder.with_name(f"{folder.name}.csv")
    rows.write_text(HEAD + "".join(LINES), "utf-8")
    made = small(model, rows, **tables)
    entries = fedstrata.sweep({**made, "output": {**made.get("output", {}), "dir": str(folder)}})
    assert not [entry.failed for entry in entries if entry.failed]
    return made


@pytest.fixture(scope="module")
def done(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A finished sweep, and its folder, which nobody writes to."""
    folder = tmp_path_factory.mktemp("done") / "sweep"
    return begun_sweep(folder, model_folder(layers=1)), folder


@pytest.fixture
def again(done: Done, tmp_path: Path) -> Callable[..., list[str]]:
    """Resumes a copy of the finished sweep with other keys; the cells that are started then."""
    made, folder = done
    shutil.copytree(folder, tmp_path / "sweep")

    def resume(over: dict[str, Any], **tables: Any) -> list[str]:
        job = {**made, "sweep": {**made["sweep"], **tables}, "output": {"dir": str(tmp_path / "sweep")}}
        return started(job, over)

    return resume


def started(job: dict[str, Any], over: dict[str, Any]) -> list[str]:
    told: list[str] = []

    def tell(event: Any) -> None:
        if isinstance(event, CellStarted):
            told.append(event.cell)

    fedstrata.sweep(job, over, resume=True, progress=tell)
    return told


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [
        ("train.learning_rate", 0.001, "0.01"),
        ("train.learning_rate", 0.1, "0.01"),
        ("server.learning_rate", 0.5, "nothing"),
        ("train.max_tokens", 16, "32"),
        ("train.precision", "fp32", None),
        ("clients.count", 3, "2"),
        ("data.limit", 10, "nothing"),
    ],
)
def test_another_job_is_refused_before_anything_runs(
    again: Callable[..., list[str]], tmp_path: Path, key: str, value: Any, was: str | None
) -> None:
    table = (tmp_path / "sweep" / "table.json").read_bytes()
    place = tmp_path / "sweep" / "cells" / "a" / "seed-0"
    if was is None:
        path = place / "job.toml"
        path.write_text(path.read_text("utf-8").replace('precision = "fp32"', 'precision = "bf16"'), "utf-8")
        was = "'bf16'"
    with pytest.raises(UserError) as caught:
        again({key: value}, seeds=[0, 1])
    assert str(caught.value).startswith(
        f"cell 'a, seed 0': {place}: its run began with {key} = {was}, the job now says {value!r}; "
    )
    assert str(caught.value).endswith(ANEW)
    assert not list((tmp_path / "sweep").glob("cells/*/seed-1"))
    assert (tmp_path / "sweep" / "table.json").read_bytes() == table


def test_a_row_that_means_something_else_now_is_refused(again: Callable[..., list[str]]) -> None:
    rows = [{"name": "a"}, {"name": "b", "method.name": "fedbt"}]
    with pytest.raises(UserError, match=r"^cell 'b, seed 0': .* method.name = 'fedprox', .* 'fedbt'; "):
        again({}, rows=rows)


def test_another_start_model_is_refused_before_anything_runs(
    done: Done, again: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The table would have held cells from two models, under one name."""
    path = Path(done[0]["model"]["name"]) / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    tensors["bert.embeddings.LayerNorm.bias"] += 1
    try:
        write_tensors(path, tensors)
        assert again({}) == [], "of what is over only the table is made again"
        with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*began from other weights, .*anew$"):
            again({}, seeds=[0, 1])
        assert not list((tmp_path / "sweep").glob("cells/*/seed-1"))
    finally:
        path.write_bytes(whole)
    assert again({}, seeds=[0, 1]) == ["a, seed 1", "b, seed 1"]


@pytest.mark.parametrize("what", ["tokenizer", "vocabulary"])
def test_another_file_behind_the_start_model_is_refused(tmp_path: Path, what: str) -> None:
    """A new model's tokenizer, or which rows of tokens leave: cells of both were under one name."""
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    words, rows = tmp_path / "words.txt", tmp_path / "rows.csv"
    words.write_text("kidney\nheart\n", "utf-8")
    rows.write_text(HEAD + "".join(LINES), "utf-8")
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    path, old, new = tmp_path / "tokenizer" / "tokenizer.json", '"lowercase": true', '"lowercase": false'
    made = small(tmp_path, rows, output={"dir": str(tmp_path / "sweep")})
    made |= {"model": {"config": config, "tokenizer": str(path.parent)}, "task": {"kind": "mlm"}}
    if what == "vocabulary":
        path, old, new = words, "heart", "eye"
        made["privacy"] = {"omit": ["unlisted_rows"], "public_vocabulary": str(words)}
    assert not [entry.failed for entry in fedstrata.sweep(made) if entry.failed]
    whole = path.read_text("utf-8")
    path.write_text(whole.replace(old, new), "utf-8")
    told = "public_vocabulary: lists other" if what == "vocabulary" else "other weights, or another"
    with pytest.raises(UserError, match=rf"^cell 'a, seed 0': .*{told}"):
        started(made, {"sweep.seeds": [0, 1]})
    path.write_text(whole, "utf-8")
    assert started(made, {"sweep.seeds": [0, 1]}) == ["a, seed 1", "b, seed 1"]


def test_other_rows_are_refused(done: Done, again: Callable[..., list[str]]) -> None:
    path = Path(done[0]["data"]["train"])
    whole = path.read_text("utf-8")
    try:
        path.write_text(HEAD + "".join(LINES[1:]), "utf-8")
        with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*the test rows are not those it began with"):
            again({}, seeds=[0, 1])
        path.write_text(whole.replace("salt", "iron"), "utf-8")
        with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*began with \(\d of them, as before"):
            again({})
        path.unlink()
        with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*there is no such file"):
            again({})
    finally:
        path.write_text(whole, "utf-8")


@pytest.mark.parametrize("name", ["job.toml", "state/rows.json"])
def test_without_what_it_began_with_nothing_is_compared(
    again: Callable[..., list[str]], tmp_path: Path, name: str
) -> None:
    (tmp_path / "sweep" / "cells" / "b" / "seed-0" / name).unlink()
    with pytest.raises(UserError, match=rf"^cell 'b, seed 0': .*{name}: is .*missing, so that it cannot be told"):
        again({})


def test_new_cells_run_and_keys_that_no_number_depends_on_may_differ(
    again: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, divided = list[Any](), list[Any]()
    for kept, name in ((read, "read_sources"), (divided, "divided")):
        real = getattr(begun, name)
        monkeypatch.setattr(begun, name, lambda *a, kept=kept, real=real: (kept.append(a), real(*a))[1])
    free = {"engine.workers": 2, "output.target": 0.5, "output.keep_state": True, "output.client_models": False}
    rows = [{"name": "a"}, {"name": "b", "method.name": "fedprox"}, {"name": "c", "method.rounds": 2}]
    assert again(free, seeds=[0, 1], rows=rows) == ["a, seed 1", "b, seed 1", "c, seed 0", "c, seed 1"]
    assert (len(read), len(divided)) == (1, 1), "two cells with the same rows"
    assert not again(free, seeds=[0, 1], rows=rows)
    assert (len(read), len(divided)) == (2, 3), "six cells, two seeds"


def test_a_sweep_that_goes_on_has_no_table_until_it_ends(
    again: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed had the table and the page of its former cells."""
    folder = tmp_path / "sweep"
    write_report([folder])
    made = {path for path in folder.iterdir() if path.suffix in {".json", ".csv", ".md", ".tex", ".html"}}
    assert len(made) == 6

    def killed(scheduler: _Scheduler) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Scheduler, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            again({}, seeds=[0, 1])
    assert not made & set(folder.iterdir())
    with pytest.raises(UserError, match=r"a sweep's folder without its table; the sweep writes it when it ends"):
        write_report([folder])
    (folder / "report.html").write_text("mine")
    assert again({}) == [], "of its former cells none is to be run"
    assert (folder / "table.json").exists()
    assert (folder / "report.html").read_text() == "mine"


@pytest.mark.parametrize("linked", ["cells", "cells/a", "cells/a/seed-0"])
def test_models_behind_a_link_in_a_cells_place_stay(
    again: Callable[..., list[str]], tmp_path: Path, linked: str
) -> None:
    """A cell of another sweep that somebody had linked there lost its model."""
    place = tmp_path / "sweep" / linked
    place.rename(tmp_path / "other")
    place.symlink_to(tmp_path / "other")
    model = tmp_path / "sweep" / "cells" / "a" / "seed-0" / "model" / "config.json"
    model.parent.mkdir()
    model.write_text("{}")
    assert again({}, rows=[{"name": "a"}, {"name": "b", "method.name": "fedprox"}, {"name": "c"}]) == ["c, seed 0"]
    assert model.exists()


def test_more_rounds_of_finished_cells(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """With their state they go on, and come to what longer runs come to; without it they are refused."""
    kept = {"output": {"keep_state": True}}
    made = begun_sweep(tmp_path / "one", model_folder(layers=1), **kept)
    longer = begun_sweep(tmp_path / "two", Path(made["model"]["name"]), **kept, method={"rounds": 2})
    job = {**made, "output": {"dir": str(tmp_path / "one"), "keep_state": True}}

    told = started(job, {"method.rounds": 2, "train.lr_schedule": "constant"})
    assert told == ["a, seed 0", "b, seed 0"]
    assert scores(tmp_path / "one") == scores(tmp_path / "two")
    assert longer["method"]["rounds"] == 2
    assert not started(job, {"method.rounds": 2})
    with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*began with method.rounds = 2, the job now says 1"):
        started(job, {})


def test_a_cells_page_shows_its_new_rounds_whatever_the_clock_says(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """If the clock was set back meanwhile, the page of fewer rounds was newer than the result, and stayed."""
    kept = {"output": {"keep_state": True}}
    made = begun_sweep(tmp_path / "one", model_folder(layers=1), **kept)
    job = {**made, "output": {"dir": str(tmp_path / "one"), "keep_state": True}}
    write_report([tmp_path / "one"])
    page = tmp_path / "one" / "cells" / "a" / "seed-0" / "report.html"
    before = page.read_bytes()
    later = time.time() + 1000
    os.utime(page, (later, later))
    started(job, {"method.rounds": 2})
    write_report([tmp_path / "one"])
    assert page.read_bytes() != before


def test_more_rounds_that_fail_leave_no_score_of_fewer(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A learning rate that falls over the whole run: its rounds would have been others."""
    tables = {"output": {"keep_state": True}, "train": {"lr_schedule": "polynomial"}}
    made = begun_sweep(tmp_path / "one", model_folder(layers=1), **tables)
    before = scores(tmp_path / "one")
    job = {**made, "output": {"dir": str(tmp_path / "one"), "keep_state": True}}
    entries = fedstrata.sweep(job, {"method.rounds": 2}, resume=True)
    assert [entry.scores for entry in entries] == [(), ()]
    assert all("shares of the whole run" in entry.failed[0] for entry in entries)
    assert not started(job, {})
    assert scores(tmp_path / "one") == before


def test_models_of_a_cell_that_gets_more_rounds_stay_while_it_runs(
    done: Done, again: Callable[..., list[str]], tmp_path: Path
) -> None:
    """It is finished by its ``result.json`` until it ends again, and another may end before it."""
    sweep, _, found = cells({**done[0], "output": {"dir": str(tmp_path / "sweep")}})
    models = [cell.folder / "model" / "model.safetensors" for cell in found]
    for model in models:
        model.parent.mkdir()
        model.touch()
    workers: Any = SimpleNamespace(running=found[1:])
    _Scheduler(sweep, found, [], done[0], lambda event: None, workers)._drop_models()
    assert [model.exists() for model in models] == [False, True]


def test_more_rounds_without_the_state_are_refused(again: Callable[..., list[str]]) -> None:
    with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*ended after 1 rounds and its state was not kept"):
        again({"method.rounds": 2})


def test_noise_is_calibrated_for_the_rounds_that_a_cell_began_with(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    noise = {"level": "client", "clip": 1.0, "epsilon": 50.0, "delta": 1e-3, "single_message": True}
    tables = {"output": {"keep_state": True}, "privacy": noise, "task": {"labels": ["eye", "heart", "kidney"]}}
    made = begun_sweep(tmp_path / "one", model_folder(layers=1), **tables)
    job = {**made, "output": {"dir": str(tmp_path / "one"), "keep_state": True}}
    assert not started(job, {})
    with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*began with privacy.participations = 1"):
        started(job, {"method.rounds": 2})


def test_stages_are_compared_too(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    stages = [{"name": "first", "task": {"kind": "mlm"}}, {"name": "second"}]
    folder, kept = tmp_path / "one", {"keep_state": True}
    made = {**begun_sweep(folder, model_folder(layers=1), output=kept), "output": {**kept, "dir": str(folder)}}
    shutil.rmtree(folder)
    two = {**made, "stages": stages}
    fedstrata.sweep(two)
    assert not started(two, {})
    with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*stages/first: its run began with train.batch_size"):
        started(two, {"first.train.batch_size": 2})
    with pytest.raises(UserError, match=r"stages/second: method.rounds: cannot be 2, as the model of stage 'fi"):
        started(two, {"second.method.rounds": 2})
    with pytest.raises(UserError, match=r"stages/first: method.rounds: cannot be changed, as stage 'second' has"):
        started(two, {"first.method.rounds": 2})
    for other in (made, {**made, "stages": [*stages, {"name": "third"}]}):
        with pytest.raises(UserError, match=r"^cell 'a, seed 0': .*its run had other stages; "):
            started(other, {})


def test_more_rounds_of_a_stage_that_cells_share_are_each_cells_own(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Their records were one file under two names: the second cell's rounds took the place of the first one's."""
    rows, model = tmp_path / "rows.csv", model_folder(layers=1)
    rows.write_text(HEAD + "".join(LINES), "utf-8")
    cells = [{"name": "a"}, {"name": "b", "second.train.learning_rate": 0.001}]
    made = small(model, rows, output={"dir": str(tmp_path / "sweep"), "keep_state": True})
    made["stages"] = [{"name": "first"}, {"name": "second", "model": {"name": str(model)}}]
    made["sweep"] = {"rows": cells, "keep_models": True}
    fedstrata.sweep(made)
    fedstrata.sweep(made, {"first.method.rounds": 2}, resume=True)
    for name in ("a", "b"):
        first = tmp_path / "sweep" / "cells" / name / "seed-0" / "stages" / "first"
        assert damaged_end(first) is None
        assert {line["round"] for line in read_lines(first / "rounds.jsonl")} == {-1, 0, 1}


def test_a_single_stage_may_have_a_name(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "one"
    made = {**begun_sweep(folder, model_folder(layers=1)), "output": {"dir": str(folder)}}
    shutil.rmtree(folder)
    named = {**made, "stages": [{"name": "fine"}]}
    fedstrata.sweep(named)
    assert not started(named, {})
    with pytest.raises(UserError, match=r"its run had other stages; "):
        started({**made, "stages": [{"name": "other"}]}, {})


def test_a_cell_that_was_stopped_keeps_its_job_and_rows(
    done: Done, again: Callable[..., list[str]], tmp_path: Path
) -> None:
    """A single run may lower its learning rate on the way; a sweep would average over both rates."""
    place, rows = tmp_path / "sweep" / "cells" / "b" / "seed-0", Path(done[0]["data"]["train"])
    shutil.rmtree(place)

    def stop(event: Any) -> None:
        if isinstance(event, RoundEnded):
            raise KeyboardInterrupt

    job = {key: table for key, table in done[0].items() if key != "sweep"}
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(job, {"method.name": "fedprox", "output.dir": str(place)}, progress=stop)
    with pytest.raises(UserError, match=r"^cell 'b, seed 0': .*train.learning_rate = 0.01, the job now says 0"):
        again({}, rows=[{"name": "a"}, {"name": "b", "method.name": "fedprox", "train.learning_rate": 0.001}])
    whole = rows.read_text("utf-8")
    try:
        rows.write_text(HEAD + "".join(LINES[1:]), "utf-8")
        with pytest.raises(UserError, match=r"^cell 'b, seed 0': .*are not those it began with"):
            again({}, rows=[{"name": "b", "method.name": "fedprox"}], against=None)
    finally:
        rows.write_text(whole, "utf-8")
    assert again({}) == ["b, seed 0"]


def scores(folder: Path) -> list[Any]:
    return [entry["metrics"] for entry in json.loads((folder / "table.json").read_text("utf-8"))["entries"]]


def test_rows_beside_the_job_file_are_found(done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in a job file may be relative to it."""
    made, folder = done
    shutil.copytree(folder, tmp_path / "sweep")
    shutil.copy(made["data"]["train"], tmp_path / "rows.csv")
    for path in tmp_path.glob("sweep/cells/*/*/job.toml"):
        path.write_text(path.read_text("utf-8").replace(made["data"]["train"], "rows.csv"), "utf-8")
    job = {**made, "data": {**made["data"], "train": "rows.csv"}, "output": {"dir": str(tmp_path / "sweep")}}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job), "utf-8")
    told: list[Any] = []
    fedstrata.sweep(tmp_path / "job.toml", resume=True, progress=told.append)
    assert not told
