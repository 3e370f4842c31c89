"""The page of whatever folders are named: where it is written, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.errors import UserError
from fedstrata.plan.parts import Part, Parts
from fedstrata.reports.parts import PartRecord, read_parts
from fedstrata.reports.sweep_files import read_table, write_table

Make = Callable[..., Path]


@dataclass(frozen=True)
class Cell:
    row: str
    base: str | None
    seed: int
    folder: Path
    target: float | None = None

    @property
    def stages(self) -> dict[str, str]:
        return {"": str(self.folder)}

    def __str__(self) -> str:
        return f"{self.row}, seed {self.seed}"


def test_a_page_is_in_the_runs_folder_or_where_it_is_wanted(
    run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = run("one"), run("other")
    assert fedstrata.report(str(one)) == one / "report.html"
    assert fedstrata.report([one], tmp_path / "a" / "page.html") == tmp_path / "a" / "page.html"
    both = fedstrata.report([one, other])
    assert both == Path("report.html")
    assert "other" in both.read_text("utf-8")
    with pytest.raises(UserError, match=r"names no folder"):
        fedstrata.report([])
    with pytest.raises(UserError, match=r"page.html cannot be written, as report.html is a file"):
        fedstrata.report(one, both / "page.html")


def test_a_sweeps_page_leads_to_those_of_its_finished_cells(run: Make, tmp_path: Path) -> None:
    sweep = tmp_path / "many"
    cells = [Cell("a", None, seed, run(f"many/cells/a/seed-{seed}")) for seed in (0, 1)]
    cells.append(Cell("b", "a", 0, run("many/cells/b/seed-0", status="failed")))
    rows = write_table(sweep, cells, "a")
    assert read_table(sweep).rows == rows
    assert not list(sweep.rglob("*.html"))
    page = fedstrata.report(sweep)
    assert page == sweep / "report.html"
    assert 'href="cells/a/seed-1/report.html"' in page.read_text("utf-8")
    assert "cells/b" not in page.read_text("utf-8")
    written = sorted(path.parent.relative_to(sweep).as_posix() for path in sweep.rglob("*.html"))
    assert written == [".", "cells/a/seed-0", "cells/a/seed-1"]
    assert 'href="../many/cells/a' in fedstrata.report(sweep, tmp_path / "out" / "page.html").read_text("utf-8")
    odd = sweep.rename(tmp_path / "50% #1")
    text = fedstrata.report(odd, tmp_path / "page.html").read_text("utf-8")
    assert 'href="50%25%20%231/cells/a/seed-1/report.html"' in text, "of a folder with letters that addresses lack"
    odd.rename(sweep)
    with pytest.raises(UserError, match=r"many is a sweep's folder, which has a page of its own"):
        fedstrata.report([cells[0].folder, sweep])


def test_a_cells_page_is_written_anew_only_after_its_result(run: Make, tmp_path: Path) -> None:
    cell = Cell("a", None, 0, run("many/cells/a/seed-0"))
    write_table(tmp_path / "many", [cell], None)
    fedstrata.report(tmp_path / "many")
    page = cell.folder / "report.html"
    page.write_text("<title>FedStrata report: kept</title>")
    fedstrata.report(tmp_path / "many")
    assert page.read_text() == "<title>FedStrata report: kept</title>"
    result = cell.folder / "result.json"
    result.write_bytes(result.read_bytes())
    fedstrata.report(tmp_path / "many")
    assert page.read_text() != "<title>FedStrata report: kept</title>"


@pytest.mark.parametrize(("found", "age"), [(None, "an older"), (1, "an older"), (4, "a newer")])
def test_another_versions_table_is_refused(run: Make, tmp_path: Path, found: int | None, age: str) -> None:
    write_table(tmp_path / "many", [Cell("a", None, 0, run("many/cells/a/seed-0"))], None)
    path = tmp_path / "many" / "table.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": found}))
    with pytest.raises(UserError, match=f"many: was written by {age} version of FedStrata"):
        fedstrata.report(tmp_path / "many")


@pytest.mark.parametrize("name", ["..", "../../other", "/etc", ""])
def test_a_stage_that_lies_elsewhere_is_not_read(run: Make, name: str) -> None:
    """A folder that somebody else has made named itself as its stage, or runs of the reader's own."""
    folder, _ = run("handed/over"), run("other")
    (folder / "stages").mkdir()
    result = folder / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "stages": [name]}))
    with pytest.raises(UserError, match=rf"over/result.json: is no record of a run: '{name}' is no name of a"):
        fedstrata.report(folder)


@pytest.mark.parametrize("place", ["../own", "cells/../../own", "{}/own"])
def test_no_page_is_written_into_a_cell_that_lies_elsewhere(run: Make, tmp_path: Path, place: str) -> None:
    own = run("own")
    write_table(tmp_path / "many", [Cell("a", None, 0, run("many/cells/a/seed-0"))], None)
    path = tmp_path / "many" / "table.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "cells": {"a": place.format(tmp_path)}}))
    with pytest.raises(UserError, match=r"table.json: is no sweep's table"):
        fedstrata.report(tmp_path / "many")
    assert not (own / "report.html").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("row", 3), ("row", ["a"]), ("metric", "\ud800"), ("seeds", []), ("scores", [0.5, "x"]), ("mean", "0.5"),
        ("sd", -1.0), ("up_mb", {}), ("p_holm", "<b>"), ("epsilon", []), ("failed", {"a": "b"}),
    ],
)  # fmt: skip
def test_a_table_with_other_values_is_no_sweep_s(run: Make, tmp_path: Path, key: str, value: Any) -> None:
    write_table(tmp_path / "many", [Cell("a", None, 0, run("many/cells/a/seed-0"))], None)
    path = tmp_path / "many" / "table.json"
    table = json.loads(path.read_text())
    table["entries"][0][key] = value
    path.write_text(json.dumps(table))
    with pytest.raises(UserError, match=r"table.json: is no sweep's table"):
        fedstrata.report(tmp_path / "many")


def test_a_table_is_read_as_it_was_written(run: Make, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    cells = [Cell("a", None, 0, run("many/cells/a/seed-0")), Cell("a", None, 1, folder / "cells/a/seed-1")]
    rows = write_table(folder, cells, "a")
    assert rows[0].failed == {1: "not run"}
    assert read_table(folder).rows == rows
    content = (folder / "table.json").read_text()
    (folder / "table.json").write_text(re.sub('"mean": [^,]+', '"mean": NaN', content))
    assert math.isnan(read_table(folder).rows[0].mean or 0), "as of a model that has diverged"


@pytest.mark.parametrize(
    "content",
    ["[" * 10**5, '{"rounds": ' + "1" * 5000 + "}", '{"name": "\\ud800"}', '{"\\uDFFF": 1}'],
    ids=["deep", "long", "half a character", "half a character for a key"],
)
@pytest.mark.parametrize("name", ["result.json", "rounds.jsonl", "parts.json"])
def test_json_that_cannot_be_parsed_is_a_sentence(run: Make, name: str, content: str) -> None:
    folder = run()
    (folder / name).write_text(f"{content}\n{{}}\n" if name.endswith("l") else content)
    with pytest.raises(UserError, match=rf"{name}.*: is not JSON: "):
        fedstrata.report(folder)


def test_what_a_run_writes_of_its_parts_is_read_back() -> None:
    parts = Parts(
        (
            Part("low", "embeddings", None, {"weight": (3, 2)}),
            Part("block", "layer", 0, {"weight": (2, 2), "bias": (2,)}),
            Part("lora", "adapter", 0, {"a": (2,)}),
        ),
        stack="encoder",
        tied=0,
        hidden=2,
    )
    records = json.loads(json.dumps(parts.records()))
    assert [record["bytes"] for record in records] == [24, 24, 8]
    assert list(read_parts(records).values()) == [
        PartRecord("low", "embeddings", None),
        PartRecord("block", "layer", 0),
        PartRecord("lora", "adapter", 0),
    ]
