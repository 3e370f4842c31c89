"""One file per hospital, from the job file to the end: who is who, and what was found out about the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from fedstrata.cli import app, main
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


def test_named_sources_are_clients_to_the_end(job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = job("fedavg", "classify", data={"train": {}}, method={"rounds": 1}, output={"dir": "run"})
    del made["clients"]
    for i, name in enumerate(("hospital-b", "hospital-a")):
        rows = "".join(f"{text};{label}\r\n" for text, label in SENTENCES[i::2])
        Path(f"{name}.csv").write_bytes(f"text;label\r\n{rows}".encode())
        made["data"]["train"][name] = f"{name}.csv"
    Path("job.toml").write_bytes(b"\xef\xbb\xbf" + tomli_w.dumps(made).encode())
    note = "note: hospital-b.csv and 1 file like it: delimiter ';'"

    def said(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.output

    ran = said("run", "job.toml")
    assert note in ran
    assert ran.index("hospital-a  loss") < ran.index("hospital-b  loss")
    assert list(json.loads(Path("run/result.json").read_text())["clients"]) == ["hospital-a", "hospital-b"]
    clients = json.loads(Path("run/partition.json").read_text())["clients"]
    assert {name: client["rows"] for name, client in clients.items()} == {"hospital-a": 6, "hospital-b": 6}
    shown = said("partition", "job.toml")
    assert note in shown
    assert "hospital-a" in shown
    assert "hospital-a of 2" in said("forecast", "job.toml")
    assert "'files' makes each a client" in said(
        "partition", "job.toml", "clients.partition=iid", "clients.count=3"
    )
    assert "[clients] count: is 3, but [data] train" in " ".join(
        said("forecast", "job.toml", "clients.count=3").split()
    )


def test_a_sweep_that_is_left_out_is_said(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = {**job("fedavg", "classify"), "sweep": {"rows": [{"name": "a"}]}}
    Path("job.toml").write_text(tomli_w.dumps(made), "utf-8")
    for words in (["partition", "job.toml"], ["forecast", "job.toml", "--json"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code
        assert "the [sweep] of job.toml is left out" in capsys.readouterr().err
