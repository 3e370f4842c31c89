"""A forecast as tables for a terminal.

The functions take what :func:`fedstrata.forecast` returns, a mapping from each method to its costs, or the costs
of one method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.reports.parts import part_words, read_parts
from fedstrata.reports.tables import MB, TERA, figure
from fedstrata.wire.row_cache import room_words

GB = 10**9
"""Bytes in a GB."""
Costs = Mapping[str, Any]


def rounds_table(costs: Costs) -> Table:
    """Every round of one client under one method, equal rounds in a row as one line, and the totals."""
    staged = any(record["stage"] for record in costs["rounds"])
    timed = "seconds" in costs["total"]
    parts = read_parts(costs.get("parts", ()))
    table = _table([*(["stage"] if staged else []), "rounds", "trains"], timed)
    for first, last, record in _spans(costs["rounds"]):
        span = str(first + 1) if first == last else f"{first + 1}-{last + 1}"
        words = [span, part_words(record["trained"], parts) or "nothing", *_cells(record, timed)]
        table.add_row(*map(Text, [record["stage"], *words] if staged else words))
    table.add_section()
    table.add_row(*map(Text, [*([""] if staged else []), "all", "", *_cells(costs["total"], timed)]))
    return table


def methods_table(forecast: Mapping[str, Costs]) -> Table:
    """One client's totals under several methods, and each method's share of the first one's bytes and FLOPs."""
    timed = any("seconds" in costs["total"] for costs in forecast.values())
    table = _table(["method", "rounds"], timed, shares=True)
    first = next(iter(forecast.values()))["total"]
    for name, costs in forecast.items():
        total = costs["total"]
        moved = _share(total["up_bytes"] + total["down_bytes"], first["up_bytes"] + first["down_bytes"])
        computed = _share(total["train_flops"], first["train_flops"])
        table.add_row(*map(Text, [name, str(len(costs["rounds"])), *_cells(total, timed), moved, computed]))
    return table


def note(forecast: Mapping[str, Costs]) -> str:
    """Whose costs these are, what they were computed from, and in which units."""
    costs = next(iter(forecast.values()))
    setup = figure(costs["setup"]["down_bytes"] / MB)
    sources = "; ".join(dict.fromkeys(costs["holdings"]))
    return (
        f"Costs of one client, {costs['client']} of {costs['clients']['count']}, over its rounds, plus {setup} MB "
        "of initial download, unless the site already has the model. "
        f"Computed from: {sources}. MB = 1 000 000 bytes of tensors; TFLOP: of training; "
        "GB: peak memory (weights, gradients, optimizer, activations)."
    )


def late_lines(forecast: Mapping[str, Costs]) -> list[str]:
    """How far the bytes of asynchronous rounds are known, a sentence for each method that has them."""
    words = {
        "exact": "asynchronous rounds: these are exact for the order of arrival that the run will have",
        "bound": "asynchronous rounds between sites: all rounds together cost at most this, whoever answers when",
    }
    return [f"{name}: {words[known]}" for name, costs in forecast.items() if (known := costs.get("asynchronous"))]


def readable_lines(forecast: Mapping[str, Costs]) -> list[str]:
    """What the server can read of what a client sends, by method where there are several."""
    return [
        f"{name}: {line}" if len(forecast) > 1 else line
        for name, costs in forecast.items()
        for line in costs["readable"]
    ]


def split_lines(forecast: Mapping[str, Costs]) -> list[str]:
    """The traffic of split learning, a sentence for each method that has a cut."""
    lines = []
    for name, costs in forecast.items():
        if cut := costs["split"]:
            batch, epoch, whole = (cut[f"{what}_bytes"] for what in ("batch", "epoch", "fedavg_round"))
            most = "at most " if cut["at_most"] else ""
            lines.append(
                f"{name}: a batch moves up to {figure(batch / MB)} MB through the cut, an epoch {most}"
                f"{figure(epoch / MB)} MB: {epoch / whole:.3g} times the {figure(whole / MB)} MB of a round of "
                "FedAvg, however many epochs that has"
            )
            if most:
                lines.append(
                    f"{name}: these bytes and those of its rounds are upper bounds, since only what has changed "
                    f"is sent; the ledger has what was; {room_words(cut['cache_bytes'], cut['cache_limit'])}"
                )
    return lines


def sum_lines(forecast: Mapping[str, Costs]) -> list[str]:
    """What masked sums are and cost, a sentence for each method that has them."""
    return [
        f"{name}: the server sees sums of {own['clients']} clients a round and opens one as long as "
        f"{own['threshold']} of them are left; {own['bytes_per_number']} bytes a number, the mean at most "
        f"{own['half_step']:.1e} off, no change beyond {own['largest']:.3g}; keys and shares "
        f"{figure(own['protocol_bytes'] / MB)} MB, masks about {figure(own['seconds'])} s a round and client"
        for name, costs in forecast.items()
        if (own := costs["sums"])
    ]


def unit_lines(forecast: Mapping[str, Costs]) -> list[str]:
    """The figures in a paper's unit, a sentence per method and stage; none where no unit was asked for."""
    lines = []
    for name, costs in forecast.items():
        for stage in costs.get("units", ()):
            where = f"{name}, {stage['stage']}" if stage["stage"] else name
            line = f"{where}: {stage['upload']:.2f} {stage['what']}, {100 * stage['of_fedavg']:.2f} % of FedAvg's"
            if "compute_of_fedavg" in stage:
                line += f"; compute in round 1 {100 * stage['compute_of_fedavg']:.1f} % of FedAvg's"
            lines.append(line)
    return lines


def _table(heads: list[str], timed: bool, shares: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    costs = ["MB up", "MB down", "TFLOP", "GB", *(["hours"] if timed else [])]
    for head in [*costs, *(["bytes", "FLOPs"] if shares else [])]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _cells(record: Mapping[str, Any], timed: bool) -> list[str]:
    units = {"up_bytes": MB, "down_bytes": MB, "train_flops": TERA, "peak_memory_bytes": GB}
    figures = [figure(record[key] / unit) for key, unit in units.items()]
    return [*figures, figure(record["seconds"] / 3600)] if timed else figures


def _share(value: int, whole: int) -> str:
    return f"{100 * value / whole:.1f} %" if whole else "–"


def _spans(records: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Rounds in a row that cost the same: the first, the last, and one of their records."""
    spans: list[tuple[int, int, dict[str, Any]]] = []
    for record in records:
        if spans and {**spans[-1][2], "round": 0} == {**record, "round": 0}:
            spans[-1] = (spans[-1][0], record["round"], record)
        else:
            spans.append((record["round"], record["round"], record))
    return spans
