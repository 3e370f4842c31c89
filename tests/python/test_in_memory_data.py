"""Rows handed over from Python, jobs as objects, callbacks, and what a result gives a notebook."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

import fedstrata
from fedstrata.callbacks import Callback, calls
from fedstrata.data.prepare import prepare
from fedstrata.errors import UserError
from fedstrata.events import Noted, Replied, Scored
from fedstrata.job.file import load
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]
ROWS = [{"text": text, "label": label} for text, label in SENTENCES]
FRAME = pandas.DataFrame(ROWS)
KINDS = {
    "pandas": FRAME,
    "arrow": pyarrow.Table.from_pylist(ROWS),
    "datasets": datasets.Dataset.from_list(ROWS),
    "dicts": ROWS,
}
COLUMNS = "[data] train: is a dictionary of columns; expected a frame, rows, or clients -> rows"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_memory_train_the_model_that_the_same_file_does(job: Jobs, kind: str, tmp_path: Path) -> None:
    made = job("fedavg", "classify", method={"rounds": 1})
    file = fedstrata.run(made)
    memory = {"data": {"train": KINDS[kind], "test": KINDS[kind]}, "output": {"dir": str(tmp_path / "memory")}}
    result = fedstrata.run({**made, **memory})
    assert result.model_folder is not None
    assert file.model_folder is not None
    weights = [folder / "model.safetensors" for folder in (result.model_folder, file.model_folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert result.score == file.score
    assert 'train = "python: ' in (tmp_path / "memory" / "job.toml").read_text(encoding="utf-8")


class DataFrame:
    """What is used of a polars frame; polars itself is tried below, where it is installed."""

    __module__ = "polars.dataframe.frame"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.columns = list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, names: list[str]) -> DataFrame:
        return DataFrame([{name: row[name] for name in names} for row in self.rows])

    def iter_rows(self, *, named: bool) -> Iterator[dict[str, Any]]:
        assert named
        return iter(self.rows)


@pytest.mark.parametrize("kind", ["like polars", "polars", "lazy"])
def test_polars_frames_are_rows_too(job: Jobs, kind: str) -> None:
    frame = DataFrame if kind == "like polars" else pytest.importorskip("polars").DataFrame
    found = frame([*ROWS, {"text": None, "label": "eye"}, {"text": "a lens", "label": "eye"}])
    made = job("fedavg", "classify", data={"train": found.lazy() if kind == "lazy" else found, "test": ROWS})
    rows = prepare(load(made)[0]).train
    assert rows.columns["text"] == [*(row["text"] for row in ROWS), "a lens"]
    assert rows.columns["label"] == [*(row["label"] for row in ROWS), "eye"]
    words = frame([{"text": ["The", "eye"], "label": ["O", "B-X"]}, {"text": ["a"], "label": ["O"]}])
    tagged = prepare(load(job("fedavg", "tag", data={"train": words, "test": words}, clients={"count": 1}))[0])
    assert tagged.train.columns["text"] == ["The\neye", "a"]
    wrong = frame([{"text": "a lens", "lable": "eye"}])
    with pytest.raises(UserError, match="polars DataFrame: has no column 'label'; did you mean 'lable'"):
        prepare(load(job("fedavg", "classify", data={"train": wrong}))[0])


def test_an_arrow_table_of_a_data_set_has_the_names_of_its_classes(job: Jobs, tmp_path: Path) -> None:
    """Read from a Parquet file by pyarrow, its classes were numbers, and rows without one a class called -1."""
    names = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    made = {"text": ["one", "two", "three"], "label": [1, -1, 0]}
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_dict(made, features=features).to_parquet(file)
    table, found = pyarrow.parquet.read_table(file), []
    for source in (str(file), table, table.replace_schema_metadata(None)):
        data = {"train": source, "test": source}
        found.append(prepare(load(job("fedavg", "classify", data=data, clients={"count": 1}))[0]).train.columns)
    assert found[0] == found[1] == {"text": ["one", "three"], "label": ["yes", "no"]}
    assert found[2]["label"] == ["1", "-1", "0"]


def test_a_dict_of_tables_is_a_client_each(job: Jobs) -> None:
    made = job(
        "fedavg", "classify", data={"train": {"north": FRAME[:5], "south": ROWS[3:]}}, clients={"count": None}
    )
    del made["clients"]
    prepared = prepare(load(made)[0])
    assert {client: len(rows) for client, rows in prepared.shards.items()} == {"north": 5, "south": 9}


def test_what_pandas_counts_as_missing_is_dropped_and_lists_are_words(job: Jobs) -> None:
    frame = pandas.DataFrame({"text": ["one", None, "two", "three"], "label": pandas.array([1, 0, pandas.NA, 0])})
    made = job("fedavg", "classify", data={"train": frame, "test": frame}, clients={"count": 1})
    rows = prepare(load(made)[0]).train
    assert rows.columns == {"text": ["one", "three"], "label": ["1", "0"]}
    assert rows.dropped == 2
    made["data"] |= {"train": [{"text": "two", "label": pandas.NA}, *ROWS], "test": ROWS}
    assert prepare(load(made)[0]).train.lacking == {"label": 1}
    words = pandas.DataFrame({"text": [["The", "eye"], ("a",)], "label": [["O", "B-X"], ("O",)]})
    tagged = prepare(load(job("fedavg", "tag", data={"train": words, "test": words}, clients={"count": 1}))[0])
    assert tagged.train.columns["text"] == ["The\neye", "a"]


def test_a_missing_word_is_refused_in_a_sentence(job: Jobs) -> None:
    words = [{"text": ["The", pandas.NA], "label": ["O", "B-X"]}]
    for rows in (words, pandas.DataFrame(words)):
        with pytest.raises(UserError, match="row 1: column 'text' holds an empty word"):
            prepare(load(job("fedavg", "tag", data={"train": rows, "test": rows}))[0])


@pytest.mark.parametrize(
    "label",
    [
        {"eye", "heart"},
        frozenset(["eye"]),
        bytearray(b"eye"),
        SimpleNamespace(name="eye"),
        len,
        (i for i in "eye"),
    ],
    ids=["set", "frozenset", "bytes", "object", "function", "generator"],
)
def test_sets_and_objects_are_no_labels(job: Jobs, label: Any) -> None:
    """Each was a class of its own, named by the order or the address that Python happens to write."""
    rows = [*ROWS, {"text": "a lens", "label": label}]
    with pytest.raises(
        UserError, match=rf"row 13: column 'label' holds a {type(label).__name__}, expected a text"
    ):
        prepare(load(job("fedavg", "classify", data={"train": rows, "test": rows}))[0])


def test_numbers_dates_and_ids_are_labels(job: Jobs) -> None:
    labels = [Decimal("1.50"), datetime.date(2020, 1, 2), UUID(int=7), np.float32(0.5), datetime.time(9, 30)]
    missing = [Decimal("NaN"), Decimal("sNaN"), pandas.NaT, np.float64("nan")]
    rows = [{"text": f"text {i}", "label": label} for i, label in enumerate(labels + missing)]
    found = prepare(load(job("fedavg", "classify", data={"train": rows, "test": rows}))[0])
    assert found.train.columns["label"] == ["1.50", "2020-01-02", str(UUID(int=7)), "0.5", "09:30:00"]
    assert found.train.lacking == {"label": len(missing)}


@pytest.mark.parametrize("columns", [None, ["label"]])
def test_a_data_set_is_read_alike_however_it_is_formatted(job: Jobs, columns: list[str] | None) -> None:
    names = sorted({label for _, label in SENTENCES})
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    plain = datasets.Dataset.from_list(ROWS, features)
    own = {"train": plain.with_format("torch", columns), "test": plain}
    found = prepare(load(job("fedavg", "classify", data=own))[0])
    assert found.train == found.test
    assert found.labels == tuple(names)


def test_a_frame_without_a_header_has_numbers_for_names(job: Jobs) -> None:
    frame = FRAME.set_axis([1, 0], axis=1)
    made = job("fedavg", "classify", data={"train": frame, "test": frame, "text": "1", "label": "0"})
    rows = prepare(load(made)[0]).train
    assert rows.columns == {"1": list(FRAME["text"]), "0": list(FRAME["label"])}


def test_a_dict_of_lists_of_files_is_no_dict_of_columns(job: Jobs, tmp_path: Path) -> None:
    for name in ("north wing.csv", "south.csv"):
        FRAME.to_csv(tmp_path / name, index=False)
    named = {"north": [str(tmp_path / "north wing.csv")], "south": [tmp_path / "south.csv"]}
    made = job("fedavg", "classify", data={"train": named})
    del made["clients"]
    assert set(prepare(load(made)[0]).shards) == {"north", "south"}


def test_class_names_of_a_data_set_are_its_labels(job: Jobs) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["b", "a"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["x", "y"] * 4, "label": [0, 1] * 4}, features=features)
    assert prepare(load(job("fedavg", "classify", data={"train": rows, "test": rows}))[0]).labels == ("b", "a")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (FRAME["text"], "[data] train: must be a string, a list or a table, found a pandas.Series"),
        (FRAME.to_numpy(), "[data] train: must be a string, a list or a table, found a numpy.ndarray"),
        ([1, 2], "[data] train, entry 1: must be a string, found 1"),
        (datasets.DatasetDict(a=KINDS["datasets"]), "[data] train: is a DatasetDict of the splits 'a'"),
        # texts were read as if there were no transform, also where it took out what was not to be trained on
        (
            KINDS["datasets"].with_transform(lambda rows: rows),
            "[data] train: has a transform (with_transform), which",
        ),
        (
            FRAME.rename(columns={"label": "lable"}),
            "pandas DataFrame: has no column 'label'; did you mean 'lable'?",
        ),
        (FRAME[:0], "found 0 rows"),
        (FRAME.to_dict("list"), COLUMNS),
        (FRAME.to_dict("series"), COLUMNS),
        (FRAME.to_dict(), COLUMNS),
        ({"report": ["a patient with a stone", "a stone"], "finding": ["x", "y"]}, COLUMNS),
        ({"text": ["stone", "fever"], "label": ["x", "y"]}, COLUMNS),
        ({"words": ["stone", "fever"], "finding": [0, 1]}, COLUMNS),
        (
            [{"text": "a stone", "label": "x"}, None],
            "[data] train: is a list of rows in which entry 2 is a NoneType; expected a dict for each row",
        ),
    ],
)
def test_what_holds_no_rows_is_refused_in_one_short_sentence(job: Jobs, found: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        prepare(load(job("fedavg", "classify", data={"train": found}))[0])
    assert sentence in str(refused.value) or "is empty" in str(refused.value)
    assert len(str(refused.value)) < 250
    assert "stone" not in str(refused.value), "a row's text is nobody else's"
    assert "\n" not in str(refused.value)


def test_a_recorded_job_says_that_its_rows_are_elsewhere(job: Jobs) -> None:
    made = job("fedavg", data={"train": ROWS}, method={"rounds": 1})
    fedstrata.run(made)
    with pytest.raises(UserError, match="handed over from Python"):
        prepare(load(job("fedavg", data={"train": "python: list of dicts of 12 rows"}))[0])
    resumed = fedstrata.run(made, resume=True)
    assert resumed.status == "finished"
    other = [*ROWS[1:], ROWS[0]]
    with pytest.raises(UserError, match="rows"):
        fedstrata.run(made, {"data.train": other}, resume=True)


def test_a_path_may_stand_wherever_a_job_names_a_file_or_folder(job: Jobs, tmp_path: Path) -> None:
    """Only those of rows could be one."""
    made = job("fedavg", "classify")
    given = {**made, "model": {"name": Path(made["model"]["name"])}, "output": {"dir": tmp_path / "mapping"}}
    result = fedstrata.run(given, {"method.rounds": 1})
    assert result.folder == tmp_path / "mapping"
    assert fedstrata.Job(**{**given, "output": {"dir": tmp_path / "job"}}).output.dir == str(tmp_path / "job")
    again = fedstrata.run(made, {"method.rounds": 1, "output.dir": tmp_path / "override"})
    assert (again.folder, again.score) == (tmp_path / "override", result.score)
    start = {"name": "a", "model": {"name": Path(made["model"]["name"])}}
    swept = {**made, "output": {"dir": tmp_path / "sweep"}, "sweep": {"rows": [start]}}
    assert not fedstrata.sweep(swept, {"method.rounds": 1})[0].failed
    with pytest.raises(UserError, match=r"\[train\] epochs: must be a whole number, found 'x'"):
        fedstrata.run(made, {"train.epochs": Path("x")})


def test_a_job_object_runs_as_its_tables_do(job: Jobs, tmp_path: Path) -> None:
    made = job("fedbt", "classify", method={"rounds": 1})
    from_tables = fedstrata.run(made)
    built = fedstrata.Job(**{**made, "output": {"dir": str(tmp_path / "object")}})
    from_object = fedstrata.run(built, {"train.seed": 0})
    assert from_object.score == from_tables.score
    assert from_object.flops == from_tables.flops
    assert fedstrata.forecast(built).keys() == {"fedbt"}
    with pytest.raises(UserError, match=r"job: \[task\] kind: 'clasify' is invalid; did you mean 'classify'"):
        fedstrata.Job(**{**made, "task": {"kind": "clasify"}})
    with pytest.raises(UserError, match="did you mean 'fedbt'"):
        fedstrata.Job(**{**made, "method": {"name": "fedbtt"}})


class Seen:
    """Counts what it is called for."""

    def __init__(self) -> None:
        self.replied: list[Replied] = []
        self.scored: list[Scored] = []

    def on_replied(self, event: Replied) -> None:
        self.replied.append(event)

    def on_scored(self, event: Scored) -> None:
        self.scored.append(event)


def test_callbacks_get_the_events_they_have_methods_for(job: Jobs) -> None:
    seen, all_events = Seen(), list[Any]()
    result = fedstrata.run(job("fedavg"), callbacks=[seen, all_events.append])
    assert len(seen.replied) == 6
    assert seen.scored[-1].score == result.score
    assert [event for event in all_events if isinstance(event, Replied)] == seen.replied
    assert {type(event).__name__ for event in all_events} >= {"StageStarted", "Stepped", "StageEnded"}


def test_a_callback_that_is_never_called_is_refused(job: Jobs) -> None:
    class Misspelled:
        def on_score(self, event: Scored) -> None: ...

    for callback, sentence in (
        (Misspelled(), "on_score is called for no event; did you mean 'on_scored'"),
        (Seen, "is a class"),
        (3, "neither a function nor"),
    ):
        with pytest.raises(UserError, match=sentence):
            fedstrata.run(job("fedavg"), callbacks=[callback])


def test_a_result_gives_frames_plot_pipeline_and_html(job: Jobs) -> None:
    result = fedstrata.run(job("fedavg", "classify"))
    history = result.history
    assert len(history) == 2 * 3 + 3
    assert history["score.accuracy"].dropna().iloc[-1] == result.score["accuracy"]
    answer = result.pipeline()("the heart pumps blood")
    model, tokenizer = result.model()
    logits = model(**tokenizer("the heart pumps blood", return_tensors="pt")).logits
    assert answer[0]["label"] == model.config.id2label[int(logits.argmax())]
    up = result.ledger.query("direction == 'up'")["bytes"].sum()
    assert up == result.bytes["up"]
    assert answer[0]["label"] in ("eye", "heart", "kidney")
    figure = result.plot()
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows it"
    lines = figure.axes[0].lines
    assert list(lines[0].get_ydata()) == list(history["score.accuracy"].dropna())
    page = result._repr_html_()
    assert "&lt;0.001 TFLOP" in page
    assert f"{result.score['accuracy']:.4f}" in page
    assert str(result.folder) in page
    recorded = json.loads((result.folder / "result.json").read_text(encoding="utf-8"))
    assert recorded["task"] == result.task == "classify"
    assert result.headline == "accuracy"


def test_a_result_is_read_whatever_the_working_directory_is(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fedstrata.run(job("fedavg", "classify", output={"dir": "runs/here"}))
    rows, sent = len(result.history), len(result.ledger)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (len(result.history), len(result.ledger)) == (rows, sent) != (0, 0)
    assert result.pipeline()("the heart")[0]["label"] in result.model().model.config.label2id
    assert str(result.folder) == "runs/here"


def test_a_result_whose_folder_is_gone_says_so(job: Jobs, tmp_path: Path) -> None:
    """Its history and its ledger came out empty, as of a run that has sent nothing."""
    result = fedstrata.run(job("fedavg", "classify", method={"rounds": 1}))
    result.folder.rename(tmp_path / "moved")
    for read in (
        lambda: result.history,
        lambda: result.ledger,
        result.plot,
        result.model,
        result.pipeline,
    ):
        with pytest.raises(UserError, match=r"run: its result.json is gone"):
            read()
    assert "finished" in result._repr_html_()


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_a_pipeline_takes_texts_that_are_longer_than_the_model_reads(job: Jobs, kind: str) -> None:
    rows = ROWS if kind == "classify" else [{"text": ["The", "eye"], "label": ["O", "B-X"]}] * 6
    result = fedstrata.run(job("fedavg", kind, data={"train": rows, "test": rows}, method={"rounds": 1}))
    answer = result.pipeline()("the heart pumps blood " * 100)
    assert isinstance(answer, list)


def test_the_class_of_callbacks_has_nothing_abstract() -> None:
    """A class of one's own may have it as a base, for its types: an object needs no method for every event."""
    calls([Callback()])(Noted("a note"))
