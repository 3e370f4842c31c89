"""What a run between sites says of rows that its server never sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_in_memory import NAMES, Village

import fedstrata
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


def test_of_rows_at_sites_nothing_is_said_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Jobs
) -> None:
    """Chunks passed for rows, and of training rows, of their classes and of known test rows there were none."""
    village = Village(tmp_path, monkeypatch)
    made = job("fedavg", "classify", train={"max_tokens": 8}, data={"long_text": "chunk"}, method={"rounds": 1})
    run = fedstrata.run(village.jobs(made)[1])
    held = {"clients": run.clients, "data": run.data}
    for name in ("result.json", "partition.json"):
        record = json.loads((run.folder / name).read_text("utf-8"))
        for found in (record, held):
            assert {(one["rows"], one["examples"]) for one in found["clients"].values()} == {(None, 8)}
            assert found["data"] == {
                "train_rows": None,
                "test_rows": 12,
                "classes": None,
                "test_classes": {"eye": 4, "heart": 4, "kidney": 4},
                "test_rows_in_training": None,
            }
    assert run.model_folder is not None
    card = (run.model_folder / "README.md").read_text("utf-8")
    assert f"* {len(NAMES)} clients, training examples of each: 8 to 8, median 8\n* 12 test rows\n" in card
    assert "* 3 classes: eye, heart, kidney\n" in card
    page = fedstrata.report(run.folder, tmp_path / "page.html").read_text("utf-8")
    assert "Examples of each client" in page
    assert "Rows of each client" not in page
    assert "What each client had. 24 test examples." in page
    assert "dropped" not in page, "how many rows the sites have dropped they alone know"


@pytest.mark.parametrize(("least", "apart"), [(1, True), (2, False)])
def test_sources_are_scored_apart_where_each_has_as_many_rows_as_a_score_must_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Jobs, least: int, apart: bool
) -> None:
    """The loss of a single row left, in every round, of a site that wants eight rows in a message."""
    village = Village(tmp_path, monkeypatch)
    config = job("fedavg", "classify", clients={"test": 0.3}, method={"rounds": 1})
    rows = [row for row in SENTENCES if row[1] == "kidney"]
    village.write("federation/sites/b/one.csv", ["text", "label"], rows[:1])
    village.write("federation/sites/b/many.csv", ["text", "label"], rows[1:])
    village.site("b", '# test = "test.csv"', 'test = {one = "one.csv", many = "many.csv"}')
    village.site("b", "min_examples = 1 ", f"min_examples = {least} ")
    run = fedstrata.run(village.jobs(config)[1])
    *_, scored = map(json.loads, (run.folder / "rounds.jsonl").read_text("utf-8").splitlines())
    own = scored["clients"]["b"]
    assert {name.partition(".")[2] for name in own} == {"", *(("one", "many") if apart else ())}
