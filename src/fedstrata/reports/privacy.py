"""What a run promises, in sentences: the same before it and after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstrata.plan.disclosure import UNCOVERED

UNITS = {
    "example": "one training example more or less at a client",
    "client": "whether a client's own change or none is in its messages",
}
"""Level -> what two neighbors differ in."""
HOLDS = {
    "sites": "it holds against the server and whoever has the model",
    "train.seed": "in one process all noise comes from train.seed, so it holds against nobody who knows or guesses"
    " that; between sites, which have secrets of their own, against the server and whoever has the model",
}
"""What noise is drawn from -> against whom epsilon holds."""

ASSUMED = "privacy: that is for {} at each client, which is assumed; a run's epsilon follows from the real number"
"""Said of a forecast without the clients' examples."""


def privacy_lines(record: Mapping[str, Any] | None) -> list[str]:
    """A record of :func:`fedstrata.runs.privacy.privacy_record` in sentences; none without noise."""
    if not record:
        return []
    if record["epsilon"] is None:
        return [f"privacy: no epsilon for the whole job, as {record['why']}; each stage has its own"]
    level, clients = record["level"], record["clients"].values()
    least = min((own["epsilon"] for own in clients), default=0.0)
    span = f"{record['epsilon']:.3g}"
    if f"{least:.3g}" != span:
        span = f"{span} at most, {least:.3g} at least"
    whole = "each message by itself, as the server sees it" if level == "client" else "all that a client sends"
    if honest := record.get("honest"):
        whole = f"sums, in each of which {honest} or more clients add their noise"
    return [
        f"privacy: epsilon {span}, delta {record['delta']:g} ({record['accountant']}), level {level}, clip "
        f"{record['clip']:g}: for {UNITS[level]}; {HOLDS[record.get('noise_from', 'train.seed')]}, "
        f"for {whole}, over all rounds",
        *([ASSUMED.format(record["assumed"])] if "assumed" in record else []),
        f"privacy: no noise covers {UNCOVERED[level]}; losses are not told",
    ]
