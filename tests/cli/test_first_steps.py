"""``init``, ``validate`` and ``methods``, as a new user calls them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import fedstrata
from fedstrata.cli import main
from fedstrata.job.toml import read_toml
from fedstrata.methods import METHODS
from fedstrata.runs.folder import mark
from tiny import SENTENCES


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = "".join(f'"{text}",{label}\n' for text, label in SENTENCES * 5)
    (tmp_path / "rows.csv").write_text(f"text,label\n{lines}", encoding="utf-8")
    return tmp_path / "rows.csv"


def test_an_option_that_takes_several_names_may_be_given_several_times(
    rows: Path, model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last was taken alone, without a word."""
    columns = ["--text", "text", "--text", "label"]
    assert call("init", "rows.csv", "--task", "mlm", *columns, "--model", str(model_folder())) == 0
    assert "text    text and label\n" in capsys.readouterr().out
    assert call("forecast", "job.toml", "--methods", "fedavg", "--methods", "fedbfpt, fedprox", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == ["fedavg", "fedbfpt", "fedprox"]
    assert call("federation", "init", "federation", "--sites", "a", "--sites", "b,c") == 0
    assert {path.name for path in Path("federation/sites").iterdir()} == {"a", "b", "c"}


def test_from_a_file_to_a_trained_model(
    rows: Path, model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("init", "rows.csv", "--model", str(model_folder())) == 0
    assert "task    classify" in capsys.readouterr().out
    assert call("validate", "job.toml") == 0
    shown = capsys.readouterr().out
    assert "54 training rows" in shown
    assert "eye" in shown
    assert "fedbt" in shown
    assert "nothing was trained" in shown
    assert not Path("runs").exists(), "validate writes nothing"
    result = fedstrata.run("job.toml", ["method.rounds=1", "train.steps=1"])
    assert result.status == "finished"
    assert result.model_folder is not None


@pytest.mark.parametrize("command", ["validate", "partition", "run"])
def test_every_command_tells_which_rows_are_dropped_and_why(
    rows: Path, model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    call("init", "rows.csv", "--model", str(model_folder()), "--clients", "2")
    with rows.open("a", encoding="utf-8") as file:
        file.write("a kidney,\n")
    capsys.readouterr()
    words = ["method.rounds=1", "train.steps=1"] if command != "partition" else []
    assert call(command, "job.toml", *words) == 0
    said = capsys.readouterr()
    assert "1 row without a value in 'label' dropped" in said.out + said.err


def test_without_a_gpu_a_first_job_is_bounded_however_many_rows_there_are(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert call("init", "rows.csv", "--out", "short.toml") == 0
    assert (read_toml(Path("short.toml"))["train"]["steps"], _tokens("short.toml")) == (40, 32)
    Path("long.txt").write_text("the heart pumps blood " * 300 + "\n", encoding="utf-8")
    assert call("init", "long.txt", "--out", "long.toml") == 0
    assert (read_toml(Path("long.toml"))["train"]["steps"], _tokens("long.toml")) == (10, 128)
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert call("init", "rows.csv", "--out", "gpu.toml") == 0
    assert "steps" not in read_toml(Path("gpu.toml"))["train"]


def test_of_ten_thousand_columns_the_first_are_listed(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = rows.read_text("utf-8").splitlines()
    many = [
        ",".join([line, *(f"c{i}" if at == 0 else "1" for i in range(10_000))]) for at, line in enumerate(lines)
    ]
    rows.write_text("\n".join(many), "utf-8")
    assert call("init", "rows.csv", "--model", "models/none") == 0
    said = capsys.readouterr().out
    assert len(said) < 2000
    assert "c46, c47, and 9,952 more" in said


def test_names_are_printed_as_they_are(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Styles are written in brackets, pictures between colons: ``rich`` would take names for them."""
    Path(":eye:rows.csv").write_bytes(rows.read_bytes())
    assert call("init", ":eye:rows.csv", "--out", "[b]job.toml") == 0
    said = capsys.readouterr().out
    assert said.startswith("rows    :eye:rows.csv: 60 rows")
    assert "job     [b]job.toml\nnext    fedstrata validate '[b]job.toml'\n" in said, "as a shell takes it"
    assert "#     fedstrata run '[b]job.toml' " in Path("[b]job.toml").read_text("utf-8")
    assert call("partition", "[b]job.toml") == 0
    assert "picture [b]job.partition.png\n" in capsys.readouterr().out


def test_a_picture_whose_font_lacks_letters_says_so(
    rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of matplotlib's own for each letter came before, and boxes where the reader expects names."""
    rows.write_text(rows.read_text("utf-8").replace("eye", "眼"), "utf-8")
    assert call("init", "rows.csv") == 0
    capsys.readouterr()
    for name, lacking in (("a.png", True), ("a.svg", False)):
        assert call("partition", "job.toml", "--picture", name) == 0
        said = capsys.readouterr()
        assert said.err == ""
        assert ("its font lacks letters" in said.out) is lacking
    assert ">眼<" in Path("a.svg").read_text("utf-8")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: warnings.warn("axes", stacklevel=1))
    rows.write_text(rows.read_text("utf-8").replace("眼", "eye"), "utf-8")
    assert call("partition", "job.toml", "--picture", "a.png") == 0
    assert "its font lacks letters" not in capsys.readouterr().out, "another warning says nothing of letters"


def _tokens(job: str) -> int:
    return int(read_toml(Path(job))["train"]["max_tokens"])


def test_names_of_bytes_that_are_no_utf_8_are_told(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"r\xe9views.csv")
    rows.rename(name)
    assert call("init", name) == 2
    assert capsys.readouterr().err == (
        r"fedstrata: job.toml: cannot name a file or column with '\udce9', which is no Unicode text; rename it"
        "\n"
    )
    assert not Path("job.toml").exists()
    Path("job.toml").write_text('[model]\nname = "x"\n[task]\nkind = "mlm"\n[method]\nname = "fedavg"\n', "utf-8")
    assert call("run", "job.toml", f"data.train={name}", "output.dir=out") == 2
    assert r"[data] train: 'r\udce9views.csv' is no Unicode text, as every name" in capsys.readouterr().err
    assert call("run", "job.toml", "data.train=rows.csv", f"output.dir={name}") == 2
    assert r"[output] dir: must be Unicode text, found 'r\udce9views.csv'" in capsys.readouterr().err


def test_init_overwrites_nothing(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text("mine", encoding="utf-8")
    assert call("init", "rows.csv") == 2
    assert "job.toml: already exists" in capsys.readouterr().err
    assert Path("job.toml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("count", "clients"), [(2, 1), (3, 2), (5, 4), (60, 6)])
def test_init_deals_no_more_clients_than_there_are_rows_to_train_on(rows: Path, count: int, clients: int) -> None:
    lines = rows.read_text(encoding="utf-8").splitlines()[: count + 1]
    Path("few.csv").write_text("\n".join(lines), encoding="utf-8")
    assert call("init", "few.csv") == 0
    assert read_toml(Path("job.toml"))["clients"]["count"] == clients
    assert call("partition", "job.toml") == 0


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ("0", "--clients: expected a number from 1 to 100,000, found 0"),
        ("-3", "--clients: expected a number from 1 to 100,000, found -3"),
        ("55", "--clients: expected at most 54, as there are so many rows to train on, found 55"),
    ],
)
def test_init_refuses_numbers_of_clients_that_do_not_fit(
    rows: Path, capsys: pytest.CaptureFixture[str], clients: str, sentence: str
) -> None:
    assert call("init", "rows.csv", "--clients", clients) == 2
    assert capsys.readouterr().err == f"fedstrata: {sentence}\n"
    assert not Path("job.toml").exists()
    assert call("init", "rows.csv", "--clients", "54") == 0
    assert call("partition", "job.toml") == 0


def test_init_refuses_a_number_of_clients_where_each_file_is_one(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("north.csv").write_bytes(Path("rows.csv").read_bytes())
    assert call("init", "rows.csv", "north.csv", "--clients", "3") == 2
    assert "--clients: each file is a client's, so their number is known" in capsys.readouterr().err
    assert not Path("job.toml").exists()
    assert call("init", "rows.csv", "north.csv") == 0


def test_validate_refuses_what_a_run_would(
    rows: Path, model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    call("init", "rows.csv", "--model", str(model_folder()))
    for word, sentence in (
        ("data.label=lable", "has no column 'lable'"),
        ("method.cycle=9", "cycle = 9"),
        ("model.name=nowhere/at-all", "nowhere/at-all"),
        ("clients.count=200", "client"),
        ("output.dir=rows.csv", "is a file"),
    ):
        capsys.readouterr()
        assert call("validate", "job.toml", word) == 2, word
        said = capsys.readouterr().err
        assert sentence in said
        assert "Traceback" not in said


def test_validate_reads_the_rows_of_a_sweep_too(
    rows: Path, model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that the job is valid and what run writes to, and run refused it."""
    call("init", "rows.csv", "--model", str(model_folder()))
    written = Path("job.toml").read_text("utf-8")
    for sweep, sentence in (
        ("[sweep]\nseeds = 2\n", "[sweep] seeds: must be a list, found 2"),
        ("[[sweep.rows]]\nname = 'a'\nadapter.rnk = 2\n", "row 'a': job.toml: [adapter] rnk: no such key"),
    ):
        Path("job.toml").write_text(f"{written}\n{sweep}", "utf-8")
        assert call("validate", "job.toml") == 2
        assert sentence in capsys.readouterr().err


def test_a_sweep_that_has_begun_is_valid(rows: Path, model_folder: Callable[..., Path]) -> None:
    """Its folder was said to hold a sweep, not a run."""
    call("init", "rows.csv", "--model", str(model_folder()))
    Path("job.toml").write_text(Path("job.toml").read_text("utf-8") + "\n[sweep]\nseeds = [0, 1]\n", "utf-8")
    mark(Path("runs/first"), "sweep")
    Path("runs/first/table.md").write_text("")
    assert call("validate", "job.toml") == 0


def test_methods_lists_them_all_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("methods") == 0
    listed = capsys.readouterr().out
    assert all(any(line.startswith(f"{name} ") for line in listed.splitlines()) for name in METHODS)
    for name, kind in METHODS.items():
        assert call("methods", name) == 0
        shown = capsys.readouterr().out
        assert all(f"  {option}" in shown for option in kind.model_fields)
    assert call("methods", "fedbbt") == 2
    assert "did you mean 'fedbt'" in capsys.readouterr().err
