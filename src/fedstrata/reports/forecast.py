"""A forecast as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.reports.page import part_words
from fedstrata.reports.tables import MB, TERA, figure

GB = 10**9


def rounds_table(made: Mapping[str, Any]) -> Table:
    """Every round of one client under one method, rounds that cost the same drawn together, and the totals."""
    staged = any(round["stage"] for round in made["rounds"])
    timed = "seconds" in made["total"]
    table = _table([*(["stage"] if staged else []), "rounds", "trains"], timed)
    for first, last, round in _alike(made["rounds"]):
        span = str(first) if first == last else f"{first}-{last}"
        words = [span, part_words(round["trained"]) or "nothing", *_costs(round, timed)]
        table.add_row(*map(Text, [round["stage"], *words] if staged else words))
    table.add_section()
    total = made["total"]
    table.add_row(*map(Text, [*([""] if staged else []), "all", "", *_costs(total, timed)]))
    return table


def methods_table(made: Mapping[str, Mapping[str, Any]]) -> Table:
    """One client's totals under several methods, and each method's share of the first one's bytes and FLOPs."""
    timed = any("seconds" in one["total"] for one in made.values())
    table = _table(["method", "rounds"], timed, shares=True)
    first = next(iter(made.values()))["total"]
    for name, one in made.items():
        total = one["total"]
        moved = _share(total["up_bytes"] + total["down_bytes"], first["up_bytes"] + first["down_bytes"])
        computed = _share(total["train_flops"], first["train_flops"])
        table.add_row(*map(Text, [name, str(len(one["rounds"])), *_costs(total, timed), moved, computed]))
    return table


def note(made: Mapping[str, Mapping[str, Any]]) -> str:
    """Whose costs these are, on what grounds, and in which units."""
    one = next(iter(made.values()))
    setup = figure(one["setup"]["down_bytes"] / MB)
    grounds = "; ".join(dict.fromkeys(one["holdings"]))
    return (
        f"Costs of one client, {one['client']} of {one['clients']['count']}, over its rounds; beside them it "
        f"receives {setup} MB of start models. Counted on: {grounds}. MB = 1 000 000 bytes of tensors; "
        "TFLOPs of training; GB: the most it holds at once (weights, gradients, optimizer, activations)."
    )


def split_lines(made: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What passes the cut of a split model, a sentence for each method that has one."""
    lines = []
    for name, one in made.items():
        if cut := one["split"]:
            batch, epoch, whole = (cut[f"{what}_bytes"] for what in ("batch", "epoch", "fedavg_round"))
            lines.append(
                f"{name}: a batch moves up to {figure(batch / MB)} MB through the cut, an epoch "
                f"{figure(epoch / MB)} MB: {epoch / whole:.3g} times the {figure(whole / MB)} MB of a round of "
                "FedAvg, however many epochs that has"
            )
    return lines


def unit_lines(made: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The figures in a paper's unit, a sentence per method and stage; none where no unit was asked for."""
    lines = []
    for name, one in made.items():
        for stage in one.get("units", ()):
            where = f"{name}, {stage['stage']}" if stage["stage"] else name
            line = f"{where}: {stage['upload']:.2f} {stage['what']}, {100 * stage['of_fedavg']:.2f} % of FedAvg's"
            if "compute_of_fedavg" in stage:
                line += f"; compute in round 0 {100 * stage['compute_of_fedavg']:.1f} % of FedAvg's"
            lines.append(line)
    return lines


def _table(heads: list[str], timed: bool, shares: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    costs = ["MB up", "MB down", "TFLOPs", "GB", *(["hours"] if timed else [])]
    for head in [*costs, *(["bytes", "FLOPs"] if shares else [])]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _costs(line: Mapping[str, Any], timed: bool) -> list[str]:
    units = {"up_bytes": MB, "down_bytes": MB, "train_flops": TERA, "peak_memory_bytes": GB}
    made = [figure(line[key] / unit) for key, unit in units.items()]
    return [*made, figure(line["seconds"] / 3600)] if timed else made


def _share(value: int, whole: int) -> str:
    return f"{100 * value / whole:.1f} %" if whole else "–"


def _alike(rounds: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Rounds in a row that cost the same: the first, the last, and one of them."""
    made: list[tuple[int, int, dict[str, Any]]] = []
    for round in rounds:
        same = made and {**made[-1][2], "round": 0} == {**round, "round": 0}
        if same:
            made[-1] = (made[-1][0], round["round"], round)
        else:
            made.append((round["round"], round["round"], round))
    return made
