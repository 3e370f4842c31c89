"""The pages in a browser: on a phone and on a desk, light and dark. Skipped without Chromium and axe-core.

``make page-test`` installs axe-core and requires both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedstrata.reports.live import live_page
from fedstrata.reports.page import write_page
from fedstrata.reports.runs import load_run

Make = Callable[..., Path]
AXE = Path(__file__).parents[2] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUIRED = "FEDSTRATA_PAGE_TEST" in os.environ
SCRIPT = """
<script>%s</script>
<script>
const tell = found => parent.postMessage(JSON.stringify(found), "*");
addEventListener("load", () => axe.run().then(found => tell({
  wrong: found.violations.map(one => [one.id, one.nodes.slice(0, 3).map(node => node.html.slice(0, 120))]),
  wide: document.documentElement.scrollWidth - window.innerWidth,
  width: window.innerWidth,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  letters: Math.min(...[...document.querySelectorAll("svg text")].map(
    one => Math.hypot(one.getScreenCTM().a, one.getScreenCTM().b) * parseFloat(getComputedStyle(one).fontSize))),
  unnamed: [...document.querySelectorAll("svg")].filter(
    one => !one.querySelector("title")?.textContent || !one.querySelector("desc")?.textContent).length,
  headings: [...document.querySelectorAll("h1,h2,h3,h4")].map(one => +one.tagName[1]),
})).catch(error => tell({failed: String(error)})));
</script>
"""

FRAME = """<!DOCTYPE html><iframe src="%s" width="%d" height="1600" style="border:0"></iframe>
<script>
addEventListener("message", event => {
  const out = document.createElement("script");
  out.type = "application/json"; out.id = "told"; out.textContent = event.data;
  document.body.append(out);
});
</script>
"""
"""Chromium makes no window narrower than 500 pixels, but a frame of any width."""

pytestmark = pytest.mark.skipif(
    not REQUIRED and (CHROMIUM is None or not AXE.exists()), reason="needs Chromium and axe-core: make page-test"
)


def seen(page: Path, width: int, dark: bool) -> dict[str, Any]:
    """What axe and the browser say of a page at a width in CSS pixels."""
    copy = page.with_name(f"{page.stem}-{width}-{dark}.html")
    script = SCRIPT % AXE.read_text(encoding="utf-8").replace("</script>", "<\\/script>")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", script + "</body>"), encoding="utf-8")
    frame = copy.with_suffix(".frame.html")
    frame.write_text(FRAME % (copy.as_uri(), width), encoding="utf-8")
    assert CHROMIUM is not None
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1500,1700"]
    words += ["--virtual-time-budget=20000", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *words, *scheme, frame.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<script type="application/json" id="told">(.*?)</script>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(unescape(found.group(1)))
    return told


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_are_readable_for_all(run: Make, staged: Make, tmp_path: Path, width: int, dark: bool) -> None:
    clients = ["St. Anna Hospital, Department of Internal Medicine", "مستشفى", *(f"client-{i}" for i in range(12))]
    folders = [
        run(labels=["eye", "heart"], clients=clients),
        staged("pretrain", "finetune"),
        run("b", status="failed"),
    ]
    page = write_page([load_run(folder) for folder in folders], tmp_path / "report.html")
    told = seen(page, width, dark)
    assert told["wrong"] == []
    assert (told["width"], told["dark"]) == (width, dark), "the browser shows what is meant to be tested"
    assert told["wide"] <= 0, "nothing is wider than the screen"
    assert told["letters"] >= 9
    assert told["unnamed"] == 0
    levels = told["headings"]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))


@pytest.mark.parametrize("width", [390, 1400])
def test_the_live_page_is_readable_for_all(tmp_path: Path, width: int) -> None:
    said = {"round": 1, "loss": 0.5, "seconds": 3.0, "missing": ""}
    names = ["st-anna", "hospital-of-the-holy-spirit-department-of-internal-medicine", "c"]
    sites = {name: {"admitted": True, "connected": True, "since": 0.0} for name in names}
    run = {"output": "/srv/runs/try", "stage": "", "method": "fedavg", "rounds": 20, "round": 1, "began": 0.0}
    run |= {"status": "running", "message": "", "waiting": names[1:], "until": 60.0, "ends": 600.0}
    run |= {"score": {"accuracy": 0.5}, "scored": 0, "sites": dict.fromkeys(names[:2], said)}
    server = {"address": "fed.example.org:9440", "running": True, "message": ""}
    text, _ = live_page({"server": server, "sites": sites, "nameless": 0, "run": run}, refreshed=True)
    (tmp_path / "live.html").write_text(text, encoding="utf-8")
    told = seen(tmp_path / "live.html", width, False)
    assert told["wrong"] == []
    assert told["wide"] <= 0


def test_axe_finds_what_is_wrong(run: Make, tmp_path: Path) -> None:
    """So that the test above can fail."""
    page = write_page([load_run(run())], tmp_path / "report.html")
    text = page.read_text(encoding="utf-8").replace('lang="en-US"', "").replace("--ink: #1d2733", "--ink: #eeeeee")
    page.write_text(text, encoding="utf-8")
    assert {name for name, _ in seen(page, 390, False)["wrong"]} >= {"html-has-lang", "color-contrast"}
