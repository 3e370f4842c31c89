"""What a client keeps of parts that are sent in turns (``[wire] part_period``), from one round to the next."""

from __future__ import annotations

from fedstrata.client.working_model import WorkingModel
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Request
from fedstrata.wire.store import Store, round_of


def own_values(store: Store, request: Request, working: WorkingModel) -> Weights:
    """Part -> the client's own value of it, where it counts: nobody has sent the part since it was kept."""
    between, path = request.plan.between, store.between.newest(request.round)
    if not between or path is None:
        return {}
    kept, shapes = store.between.load(request.round), working.parts.shapes
    return {
        part: {name: kept[name] for name in shapes[part]}
        for part, since in between
        if round_of(path) >= since and kept.keys() >= shapes[part].keys()
    }
