"""What stands in files is shown as it is written: it gives a terminal no commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
from typer.testing import CliRunner

from fedstrata.cli import app
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


def invoked(job: dict[str, Any], tmp_path: Path, labels: list[str], *words: str) -> str:
    """What ``fedstrata run`` says of the sentences with these labels in turn."""
    rows = "".join(f'"{text}","{labels[i % 2]}"\n' for i, (text, _) in enumerate(SENTENCES))
    (tmp_path / "rows.csv").write_text(f"text,\x1b]0;label\x07\n{rows}", "utf-8")
    job |= {"data": {"train": str(tmp_path / "rows.csv"), "label": "\x1b]0;label\x07"}}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job), "utf-8")
    return CliRunner().invoke(app, ["run", str(tmp_path / "job.toml"), *words]).output


def test_a_class_and_a_column_are_no_commands_to_the_terminal(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", "classify", 1, method={"rounds": 1}, output={"dir": str(tmp_path / "run")})
    said = invoked(made, tmp_path, ["\x1b[31mred", "\u202eder\x9b"])
    assert all(name in said for name in (r" \x1b[31mred ", r" \u202eder\x9b "))
    refused = invoked(made, tmp_path, ["a", "b"], "data.label=lable", f"output.dir={tmp_path / 'other'}")
    assert r"expected one of: text, \x1b]0;label\x07" in refused
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*said, *refused}


def test_names_in_tables_are_no_commands_to_the_terminal(job: Jobs, tmp_path: Path) -> None:
    """Those of classes, of folders and of a sweep's rows."""
    rows = "".join(f'"{text}","{label}\x1b[2J"\n' for text, label in SENTENCES)
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}", "utf-8")
    made = job("fedavg", "classify", 1, method={"rounds": 1}, output={"dir": str(tmp_path / "a\x1b[31m")})
    made |= {"data": {"train": str(tmp_path / "rows.csv")}}
    swept = {
        **made,
        "sweep": {"rows": [{"name": "\x1b[32mred \u202e"}]},
        "output": {"dir": str(tmp_path / "sweep")},
    }
    said = ""
    for name, table in {"job": made, "swept": swept}.items():
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(table), "utf-8")
        for command in ("partition", "run"):
            said += CliRunner().invoke(app, [command, str(tmp_path / f"{name}.toml")]).output
    assert all(name in said for name in (r"eye\x1b[2J", r"a\x1b[31m", r"\x1b[32mred \u202e"))
    assert not {"\x1b", "\u202e"} & {*said}
