"""The page of output files names every file that a run writes, and every field of its records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.exchanges.hidden_states import PART
from fedstrata.exchanges.sums import LEDGER
from fedstrata.plan.streams import SERVER
from fedstrata.runs.folder import OWN_FOLDERS
from fedstrata.server.trainer import NAME
from fedstrata.wire.activations import GRADIENTS, STATES
from pages import DOCS, named_in_output_files, unnamed_files

JSON = ("result.json", "partition.json", "parts.json", "environment.json", "classes.json")
LINES = ("rounds.jsonl", "ledger.jsonl", "missing.jsonl", "lost.jsonl", "outliers.jsonl", "predictions.jsonl")


def fields(folder: Path) -> set[str]:
    """The names of the fields of a run's records: of the first level, in lists too."""
    contents = [json.loads((folder / name).read_text("utf-8")) for name in JSON if (folder / name).exists()]
    for name in LINES:
        if (folder / name).exists():
            contents += map(json.loads, (folder / name).read_text("utf-8").splitlines())
    records = [record for found in contents for record in (found if isinstance(found, list) else [found])]
    return {key for record in records for key in record}


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("fedavg", {"output": {"predictions": True, "target": 0.9}, "server": {"max_norm": 1.0}}),
        ("fedsplitbert", {"output": {"keep_state": True}}),
        ("fedavg", {"stages": [{"name": "one"}, {"name": "two"}]}),
    ],
    ids=["one model", "personal models", "stages"],
)
def test_the_page_names_every_file_and_field(job: Callable[..., Any], name: str, tables: dict[str, Any]) -> None:
    stages = {"stages": tables.pop("stages")} if "stages" in tables else {}
    result = fedstrata.run({**job(name, "classify", method={"rounds": 1}, **tables), **stages})
    fedstrata.report(result.folder)
    folders = [result.folder, *result.folder.glob("stages/*")]
    for folder in folders:
        assert not unnamed_files(folder)
        assert not fields(folder) - named_in_output_files()


def test_the_job_page_names_every_field_of_a_forecast(job: Callable[..., Any]) -> None:
    noise = {"level": "client", "noise": 1.0, "single_message": True}
    made = job("fedavg", "classify", task={"labels": ["eye", "heart", "kidney"]}, privacy=noise)
    [found] = fedstrata.forecast(made, bandwidth=1.0, units="fedbt").values()
    named = set(re.findall(r"`(\w+)`", (DOCS / "job.md").read_text("utf-8")))
    assert not found.keys() - named
    assert not found["privacy"].keys() - named
    assert not (found["rounds"][0].keys() | found["total"].keys()) - named


def test_the_page_names_every_folder_in_which_other_commands_write() -> None:
    """Of two exports it named one."""
    assert {f"{name}/" for name in OWN_FOLDERS} <= named_in_output_files()


def test_the_page_names_what_stands_in_place_of_a_part_and_of_a_client() -> None:
    """Whoever joined the ledger with the parts, or the rounds with the clients, found names of neither."""
    text = (DOCS / "output-files.md").read_text("utf-8")
    [parts] = re.findall(r"^\| `ledger.jsonl` \| (.*) \|$", text, re.MULTILINE)
    [clients] = re.findall(r"^\| `round`, `client` \| (.*) \|$", text, re.MULTILINE)
    assert {PART, STATES, GRADIENTS, LEDGER} <= set(re.findall(r"`([^`]+)`", parts))
    assert {SERVER, NAME} <= set(re.findall(r"`([^`]+)`", clients))


def test_the_page_names_the_pictures_of_the_stages() -> None:
    """``partition`` writes one for each; ``tests/bad_inputs`` sees that."""
    assert {"JOB.partition.png", "JOB.STAGE.partition.png"} <= named_in_output_files()
