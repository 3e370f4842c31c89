"""The state of a federation in words, for the screen and for the live page. Rounds count from 1."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from fedstrata.errors import four_decimals
from fedstrata.reports.html_table import Head
from fedstrata.reports.templates import templates
from fedstrata.reports.times import clock, duration, left_words

Status = Mapping[str, Any]
"""As :func:`fedstrata.sites.status.federation_status` makes it."""
HEADS = ("site", "connected", "newest word")
"""Of the table of sites."""
UNKNOWN = "not known"


def facts(status: Status) -> dict[str, str]:
    """What is said of the server and of the run: name -> words."""
    server, run = status["server"], status["run"]
    where = f"{server['address']}, {'running' if server['running'] else 'does not answer'}"
    said = {"server": ": ".join(filter(None, [where, server["message"]]))}
    if status["nameless"]:
        said["sites"] = f"{status['nameless']} connected, without keys, so that their names are not known here"
    if run is None:
        return {**said, "run": "none yet"}
    stage = f"stage {run['stage']}, " if run["stage"] else ""
    said["run"] = f"{stage}{run['method']}, {_progress(run)}"
    if run["message"]:
        said["reason"] = run["message"]
    if run["status"] == "running":
        said |= _waits(run)
    if run["score"]:
        after = f"after round {run['scored'] + 1}" if run["scored"] >= 0 else "before training"
        said["score"] = (
            "  ".join(f"{name} {four_decimals(value)}" for name, value in run["score"].items()) + f" {after}"
        )
    if run["epsilon"] is not None:
        said["epsilon"] = f"{run['epsilon']:.3g} of a site at most after all rounds (delta {run['delta']:g})"
    return {**said, "folder": run["output"]}


def _progress(run: Mapping[str, Any]) -> str:
    """Where a run stands."""
    began, now = _ago(run["began"]), min(run["round"] + 1, run["rounds"])
    place = f"{'in' if run['round'] >= 0 else 'before'} round {max(now, 1)} of {run['rounds']}"
    if run["status"] == "running":
        return f"{place.removeprefix('in ')}, begun {began}"
    words = {
        "finished": "finished",
        "stopped": f"stopped {place}; --resume goes on",
        "failed": f"failed {place}",
        "killed": f"ended without a word {place}, so it was killed; --resume goes on",
    }
    return f"{words[run['status']]}, begun {began}"


def _waits(run: Mapping[str, Any]) -> dict[str, str]:
    """Who is waited for, until when, and how long the stage takes."""
    said = {}
    if run["waiting"]:
        until = clock(run["until"] - time.time())
        said["waiting for"] = f"{', '.join(run['waiting'])} until {until}"
    if run["ends"] is not None and run["round"] < run["rounds"]:
        said["time left"] = left_words(max(0.0, run["ends"] - time.time()))
    return said


def rows(status: Status) -> list[tuple[str, str, str]]:
    """The table of sites: name, whether it is connected, what it said last."""
    run = status["run"] or {"sites": {}, "waiting": []}
    return [
        (name, _connected(site), _word(run["sites"].get(name), name in run["waiting"]))
        for name, site in status["sites"].items()
    ]


def _connected(site: Mapping[str, Any]) -> str:
    if site["connected"] is None:
        return UNKNOWN if site["admitted"] else "not admitted"
    words = f"since {_ago(site['since'])}" if site["connected"] else "no"
    return words if site["admitted"] else f"{words}, not admitted"


def _word(said: Mapping[str, Any] | None, awaited: bool) -> str:
    """The newest word of a site in a run."""
    words = []
    if awaited:
        words.append("is waited for")
    if said is not None:
        place = f"round {said['round'] + 1}" if said["round"] >= 0 else "before round 1"
        loss = "replied" if said["loss"] is None else f"loss {said['loss']:.4f}"
        took = f", {duration(said['seconds'])}" if said["seconds"] else ""  # of sites that add noise none is known
        words.append(f"{place}: {said['missing'] or loss + took}")
    return "; ".join(words)


def _ago(moment: float) -> str:
    return clock(moment - time.time())


def live_page(status: Status, refreshed: bool) -> tuple[str, str]:
    """The page, and the Content-Security-Policy that permits its style and nothing else.

    Args:
        status: the federation's.
        refreshed: whether it is loaded again by itself, which the page says.
    """
    found = templates()
    style = found.get_template("style.css.j2").render()
    heads = [Head(head, words=True) for head in HEADS]
    table = {"title": "Sites", "heads": heads, "rows": rows(status), "links": (), "downloads": ()}
    page = found.get_template("live.html.j2").render(
        style=Markup(style), facts=facts(status), sites=table, refreshed=refreshed, now=clock(0.0)
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        *(f"{directive} 'none'" for directive in ("base-uri", "form-action", "frame-ancestors")),
    ]
    return page, "; ".join(rules)
