"""How many bytes leave a site in reply to a request: known before anything is computed, so that a site does not
train what it then may not send."""

from __future__ import annotations

from itertools import islice

from fedstrata.client.steps import steps
from fedstrata.client.sums import weight_in_sum
from fedstrata.exchanges.hidden_states_form import hidden_states_spec
from fedstrata.plan.messages import Request
from fedstrata.plan.streams import ORDER
from fedstrata.privacy.fixed_point import fixed_point
from fedstrata.sites.site import Site
from fedstrata.wire.activations import message_bytes
from fedstrata.wire.codec import spec_bytes

MOST_STEPS = 100_000
"""Steps whose batches are counted: a job may name any number."""
TRAINS = ("train", "sum_keys")
"""Phases that a round's weights follow on: who cannot send them takes no part in their masked sum either."""


def sizes_of(site: Site) -> dict[str, int]:
    """Bytes of each part as the site sends it; in a masked sum the least, since others' rows are not known yet."""
    runtime, parts = site.runtime, site.runtime.working.parts
    if runtime.sums is None:
        return {part: runtime.wire.size(parts.shapes[part], runtime.wire.changes) for part in parts.names}
    width = fixed_point(weight_in_sum(runtime.private, len(site.data.index))).width
    return {part: width * parts.travelling(part) for part in parts.names}


def least_bytes(site: Site, request: Request) -> int:
    """Bytes of tensors that leave in a reply and on the way to it, at least: headers are not counted."""
    runtime, data = site.runtime, site.data
    lengths, parts = data.train.tokens.lengths[data.index], runtime.working.parts
    if request.phase == "hidden_states":
        branches = max(1, len(parts.head_layers))
        return spec_bytes(hidden_states_spec(lengths, branches, parts.hidden, runtime.dtype))
    if request.phase not in TRAINS:
        return 0
    passed, sizes = 0, sizes_of(site)
    if request.plan.server and runtime.stream.changed is None:
        train, order = runtime.trainer.train, runtime.trainer.streams.numpy(request.round, request.client, ORDER)
        drawn = islice(steps(lengths, train, order), MOST_STEPS)
        batches = [lengths[batch] for step in drawn for batch in step.batches]
        tokens, texts = sum(int(batch.sum()) for batch in batches), sum(map(len, batches))
        through = message_bytes(tokens, texts, parts.hidden, runtime.stream, len(batches))
        passed = sum(size for (way, _), size in through.items() if way == "up")
    return passed + sum(sizes.get(part, 0) for part in request.plan.send)
