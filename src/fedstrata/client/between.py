"""What a client keeps of parts that are sent in turns (``[wire] part_period``), from one round to the next."""

from __future__ import annotations

import torch

from fedstrata.client.working_model import WorkingModel
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import Request
from fedstrata.wire.store import Store, round_of

VERSION = ":version"
"""Ends the name under which a part's version is kept."""


def keep_own(store: Store, request: Request, later: Tensors) -> None:
    """Keep what was trained of parts that are sent later, with the versions of them that the client was sent."""
    versions = {part + VERSION: torch.tensor(request.versions[part]) for part in request.plan.later}
    store.between.save(request.round, {**later, **versions})


def own_values(store: Store, request: Request, working: WorkingModel) -> Weights:
    """Part -> the client's own value of it, where it counts: nobody has sent the part since it was kept."""
    between, path = request.plan.between, store.between.newest(request.round)
    if not between or path is None:
        return {}
    kept, shapes, last = store.between.load(request.round), working.parts.shapes, round_of(path)
    return {
        part: {name: kept[name] for name in shapes[part]}
        for part, since in between
        if kept.keys() >= shapes[part].keys() and (last >= since or _unmoved(kept, request, part))
    }


def _unmoved(kept: Tensors, request: Request, part: str) -> bool:
    """Whether a part has stayed as it was, though its turn has been: no client that has it was sampled."""
    return part + VERSION in kept and int(kept[part + VERSION]) == request.versions[part]
