"""An audit as a table for a terminal, as sentences, and as rows of a run's page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.errors import plural
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import AUDIT, AUDIT_FORMAT

Stage = Mapping[str, Any]
"""A stage of ``audit.json``."""
OF_A_MACHINE = ("device", "precision")
"""Keys of ``[train]`` that an audit, which plays on the processor, may have otherwise than the run."""


def read_audit(folder: Path) -> list[Stage]:
    """The stages of a folder's audit.

    None where it has no audit; where it has a record that this version cannot show, a stand-in whose note says so.
    """
    try:
        record = json.loads((folder / AUDIT).read_text("utf-8"))
        # a ValueError for half a character, which no page can hold
        json.dumps(record, ensure_ascii=False).encode()
        stages = list(record["stages"]) if record["format"] == AUDIT_FORMAT else None
        for stage in stages or ():
            for shown in (audit_title, audit_rows, audit_lines):  # all that a page shows of it
                shown(stage)
        stages = stages and [{**stage, "notes": [*_otherwise(stage, folder), *stage["notes"]]} for stage in stages]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        stages = None
    if stages is None:
        note = f"{AUDIT} holds no audit that this version of FedStrata can read; fedstrata audit writes a new one"
        return [{"stage": "", "method": "", "findings": [], "notes": [note]}]
    return stages


def _otherwise(stage: Stage, folder: Path) -> list[str]:
    """In which keys the run in a folder is of another job than the audit, a sentence; nothing where in none."""
    path = (folder / "stages" / stage["stage"] if stage["stage"] else folder) / "job.toml"
    run = read_toml(path) if path.exists() else {}
    keys = [
        f"{table}.{key}"
        for table, own in (stage.get("settings", {}) if run else {}).items()
        for key in {**own, **run.get(table, {})}
        if own.get(key) != run.get(table, {}).get(key) and key not in OF_A_MACHINE
    ]
    return [f"this run is not of the job that was audited: it has another {', '.join(keys)}"] if keys else []


def audit_rows(stage: Stage) -> list[dict[str, str]]:
    """A row for every figure; where a finding has no figures, one that says so."""
    rows = []
    for finding in stage["findings"]:
        first = {key: str(finding[key]).replace("_", " ") for key in ("channel", "setting", "attack")}
        for name, figure in (finding["figures"] or {"": None}).items():
            rows.append({**first, "figure": name, **_words(figure)})
    return rows


def _words(figure: Mapping[str, Any] | None) -> dict[str, str]:
    if figure is None or figure["value"] is None:
        return {"value": "–", "interval": "", "chance": ""}
    return {
        "value": f"{figure['value']:.3f}",
        "interval": f"{figure['low']:.3f}–{figure['high']:.3f}",
        "chance": "" if figure["chance"] is None else f"{figure['chance']:.3f}",
    }


def audit_table(stage: Stage) -> Table:
    """The figures of a stage; what repeats from row to row is left out."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=audit_title(stage), title_justify="left", title_style=""
    )
    for name in ("read from", "setting", "attack", "figure"):
        table.add_column(name, overflow="fold")
    for name in ("value", "95 %", "chance"):
        table.add_column(name, justify="right", no_wrap=True)
    before = [""] * 3
    for row in audit_rows(stage):
        words = [row[key] for key in ("channel", "setting", "attack", "figure", "value", "interval", "chance")]
        first = [word if words[: i + 1] != before[: i + 1] else "" for i, word in enumerate(words[:3])]
        table.add_row(*map(Text, [*first, *words[3:]]))
        before = words[:3]
    return table


def audit_title(stage: Stage) -> str:
    """What was played, and what the attacks learned from; of a stand-in, that there is nothing to show."""
    if not stage["method"]:
        return "an audit that cannot be shown"
    name = f"{stage['stage']}: " if stage["stage"] else ""
    public = stage["public"]
    return (
        f"{name}{stage['method']}, {stage['task']}: what the server reads of {stage['client']} in round 1; "
        f"thresholds from {plural(public['texts'], 'text')} of {public['source']}"
    )


def audit_lines(stage: Stage) -> list[str]:
    """One sentence per finding, by how the client trained, and the notes."""
    lines = [f"{finding['setting']}: {finding['sentence']}" for finding in stage["findings"]]
    return [*dict.fromkeys(lines), *(f"note: {note}" for note in stage["notes"])]
