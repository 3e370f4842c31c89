"""FedStrata beside what one would use instead: same model, rows, batches and rates, whole processes in turn.

    python benchmarks/peers.py --out peers.json
    python benchmarks/peers.py --only 10,100 --peers "fedstrata,careful loop" --repeats 3
    python benchmarks/peers.py --quick

A run lasts from the start of its process to its end, with the score; its memory is the peak of all its processes.
Each peer has an environment of its own, which the first run installs (``benchmarks/environments.py``; rows:
``benchmarks/workloads.py``; scripts: ``benchmarks/peers/``). The peers take turns, each repeat in another order; a
ratio is the median of the ratios within a repeat. FedStrata tokenizes its texts in every run; all others but the
loop "as written" get them tokenized, in batches of similar length. A peer that fails is named with its reason and
not repeated. Linux only, because memory is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from environments import ROOT, NotInstalledError, python_of
from measure import GIVEN, machine, measure, summary
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Workload, prepare

from fedstrata.models.quiet import quiet

SCRIPTS = Path(__file__).resolve().parent / "peers"
OWN = "fedstrata"
REFERENCE = "careful loop"
"""Whose final weights the others' are compared with."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""No model hub, no telemetry."""
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 119)


@dataclass(frozen=True)
class Peer:
    """One competitor.

    Attributes:
        environment: of ``environments.ENVIRONMENTS``; empty for the one of this command.
        script: in ``benchmarks/peers``.
        variables: of its process's environment.
    """

    environment: str
    script: str
    variables: dict[str, str] = field(default_factory=dict)


PEERS = {
    OWN: Peer("", "fedstrata_run.py"),
    "fedstrata fp32": Peer("", "fedstrata_run.py", {"OVERRIDES": "train.precision=fp32"}),
    REFERENCE: Peer("loops", "careful_loop.py"),
    "loop as written": Peer("loops", "naive_loop.py"),
    "Trainer loop": Peer("loops", "trainer_loop.py"),
    "pfl-research": Peer("pfl", "pfl_research.py"),
    "Flower": Peer("flower", "flower_simulation.py"),
    "Flower, one actor": Peer("flower", "flower_simulation.py", {"ACTOR_CPUS": "2"}),
    "NVFlare": Peer("nvflare", "nvflare_simulation.py"),
    "FL4Health": Peer("fl4health", ""),
}


def run_peer(peer: Peer, here: bool, work: Path, out: Path, limit: float) -> dict[str, Any]:
    """One run of a peer, as a record."""
    out.mkdir()
    try:
        python = Path(sys.executable) if here or not peer.environment else python_of(peer.environment)
    except NotInstalledError as error:
        return {"failed": str(error)}
    paths = [str(SCRIPTS), *([str(ROOT / "src")] if not peer.environment else [])]
    paths += [GIVEN["PYTHONPATH"]] if here and "PYTHONPATH" in GIVEN else []
    environment = {
        **QUIET,
        **peer.variables,
        "WORK": str(work),
        "PYTHONPATH": ":".join(paths),
        "FEDSTRATA_CACHE": str(out / "cache"),
        "HOME": str(out),  # whatever a peer keeps for itself begins anew in every run
    }
    found = measure([str(python), str(SCRIPTS / peer.script)], environment, out, limit)
    if found.failed:
        return {"failed": found.failed, "seconds": found.seconds}
    return {"seconds": found.seconds, "peak": found.peak, **found.result}


def difference(work: Path, ours: Path, theirs: Path) -> float | None:
    """How far two runs' final weights lie apart, as a share of how far training has moved them."""
    from safetensors.torch import load_file

    if not (ours / "final.safetensors").exists() or not (theirs / "final.safetensors").exists():
        return None
    start, one, other = (
        load_file(file)
        for file in (work / "start" / "model.safetensors", *(f / "final.safetensors" for f in (ours, theirs)))
    )
    names = start.keys() & one.keys() & other.keys()
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in names)
    moved = sum(float((other[name] - start[name]).double().square().sum()) for name in names)
    return float((apart / moved) ** 0.5)


def run_workload(workload: Workload, names: list[str], chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs of one workload, peer by peer, each repeat in another order."""
    work = folder / "work"
    CONSOLE.print(f"\n[bold]{workload.name}[/bold]: {workload.about}")
    with quiet():
        prepare(workload, work, chosen.model, chosen.data)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for repeat in range(chosen.repeats):
        turn = repeat % len(names)
        for name in [*names[turn:], *names[:turn]]:
            if name in failed:
                continue
            out = folder / f"{name}-{repeat}".replace(" ", "-")
            record = run_peer(PEERS[name], chosen.here, work, out, chosen.limit)
            if "failed" in record:
                failed[name] = record["failed"]
                CONSOLE.print(f"  {repeat + 1}/{chosen.repeats} {name}: {record['failed']}", soft_wrap=True)
                continue
            runs[name].append(record)
            said = f"{record['seconds']:.1f} s, {record['peak'] / 1e9:.2f} GB, score {record['score']:.3f}"
            CONSOLE.print(f"  {repeat + 1}/{chosen.repeats} {name}: {said}")
    apart = {}
    if not workload.dropout and REFERENCE in names:
        first = {name: folder / f"{name}-0".replace(" ", "-") for name in names}
        apart = {n: difference(work, out, first[REFERENCE]) for n, out in first.items() if n != REFERENCE}
    known = json.loads((work / "workload.json").read_text("utf-8"))
    baseline = None if workload.kind == "mlm" else known["most_frequent"]
    return {
        "about": workload.about,
        "headline": known["headline"],
        "most_frequent": baseline,
        "runs": runs,
        "failed": failed,
        "apart": apart,
    }


def measures(name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """FedStrata's time and memory by each peer's, repeat by repeat."""
    runs, rows = found["runs"], []
    for peer, theirs in runs.items():
        ours = runs.get(OWN, [])
        if peer == OWN or len(ours) < len(theirs) or not theirs:
            continue
        for what in ("seconds", "peak", "epoch_seconds"):
            if not all(what in run for run in (*ours, *theirs)):
                continue
            values = [one[what] / other[what] for one, other in zip(ours, theirs, strict=False)]
            rows.append({"measure": f"{name}: {what} / {peer}", **summary(values), "values": values})
    return rows


def show(name: str, found: dict[str, Any], ratios: list[dict[str, Any]]) -> None:
    """A workload's table."""
    table = Table("", "seconds", f"{OWN} / it", "memory, GB", found["headline"], title=f"{name}: {found['about']}")
    by_name = {row["measure"]: row for row in ratios}
    for peer, runs in found["runs"].items():
        if peer in found["failed"]:
            table.add_row(peer, found["failed"][peer])
            continue
        ratio = by_name.get(f"{name}: seconds / {peer}")
        table.add_row(
            peer,
            spread([run["seconds"] for run in runs], 1),
            spread(ratio["values"], 2) if ratio else "",
            spread([run["peak"] / 1e9 for run in runs], 2),
            spread([run["score"] for run in runs], 3),
        )
    CONSOLE.print(table)
    if found["most_frequent"]:
        CONSOLE.print(f"always the most frequent class: {found['most_frequent']:.3f}")
    for peer, value in found["apart"].items():
        if value is not None:
            CONSOLE.print(
                f"final weights of {peer}: {value:.1e} of what training moved away from the {REFERENCE}'s"
            )


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    found = summary(values)
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f} to {found['max']:.{digits}f})"


def arguments() -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for name in WORKLOADS if not name.startswith("quick")]
    rows = ",".join(name for name in every if WORKLOADS[name].device == "cpu")
    options.add_argument("--only", default=rows, help=f"rows: {', '.join(every)}; those on a GPU must be named")
    options.add_argument("--clients", help="the rows of so many clients: 10,100,1000")
    options.add_argument("--peers", help=f"of: {', '.join(PEERS)}")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--limit", type=float, default=180, help="seconds after which a run is stopped")
    options.add_argument("--quick", action="store_true", help="a tiny row in this environment: does it run")
    options.add_argument("--here", action="store_true", help="all peers by this Python, which has what they need")
    options.add_argument("--model", type=Path, help="folder of a model to start from")
    options.add_argument("--data", type=Path, help="JSON lines with text and label")
    options.add_argument("--out", type=Path, help="write the figures here")
    chosen = options.parse_args()
    chosen.only = ["quick"] if chosen.quick else (chosen.clients or chosen.only).split(",")
    for name in chosen.only:
        if name not in WORKLOADS:
            options.error(f"--only: no row {name!r}; expected some of: {', '.join(every)}")
        if WORKLOADS[name].device == "cuda" and not torch.cuda.is_available():
            options.error(f"--only: row {name!r} needs a GPU that torch can use, and there is none")
    chosen.peers = chosen.peers.split(",") if chosen.peers else None
    for name in chosen.peers or ():
        if name not in PEERS:
            options.error(f"--peers: no peer {name!r}; expected some of: {', '.join(PEERS)}")
    if chosen.repeats < 1:
        options.error("--repeats: must be at least 1")
    if chosen.quick:
        chosen.repeats, chosen.here = 1, True
    return chosen


def main() -> None:
    """Measure, print tables, write the results."""
    chosen = arguments()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    report: dict[str, Any] = {"machine": machine(), "commit": commit, "workloads": {}, "measures": []}
    for name in chosen.only:
        workload = WORKLOADS[name]
        names = chosen.peers or list(workload.peers)
        with tempfile.TemporaryDirectory(prefix="fedstrata-peers-", ignore_cleanup_errors=True) as folder:
            found = run_workload(workload, names, chosen, Path(folder))
        ratios = measures(name, found)
        show(name, found, ratios)
        report["workloads"][name] = found
        report["measures"] += ratios
        if chosen.out:
            chosen.out.write_text(json.dumps(report, indent=1), "utf-8")


if __name__ == "__main__":
    main()
