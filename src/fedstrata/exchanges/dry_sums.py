"""A client's answers to the steps of a masked sum by costs alone: every message of its size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fedstrata.client.sum_rules import SumRules
from fedstrata.client.sums import MASKED
from fedstrata.exchanges.dry import dry_train
from fedstrata.exchanges.exchange import DryContext
from fedstrata.exchanges.sums import LEDGER
from fedstrata.job.tables import Job
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.schedule import sample_clients
from fedstrata.privacy.fixed_point import FixedPoint, capped, fixed_point
from fedstrata.privacy.shamir import SECRET_BYTES, SHARE_BYTES
from fedstrata.privacy.sum_terms import (
    ENTRY_BYTES,
    SIGNATURE_BYTES,
    Group,
    share_bytes,
    threshold,
)
from fedstrata.wire.dry import empty

MASK_BYTES_PER_SECOND = 2e8
"""Bytes of masks that a core makes and adds in a second: an estimate, for a forecast alone."""


def dry_sum_step(context: DryContext, request: Request) -> Reply:
    """A step other than ``train``; in a forecast nobody drops out."""
    own = request.client
    weight = weight_of(context, own).to_bytes(8, "big")
    signature = bytes(SIGNATURE_BYTES)
    if request.phase == "sum_keys":
        sums = {"keys": bytes(ENTRY_BYTES - len(weight)) + weight, "signature": signature}
    elif request.phase == "sum_survivors":
        sums = {"signature": signature}
    elif request.phase == "sum_shares":
        names = tuple(json.loads(request.sums["names"]))
        sent = sum(own in group.senders for group in _groups(context, request, names))
        sums = {"shares": bytes((len(names) - 1) * share_bytes(sent)), "commitments": bytes(SECRET_BYTES * sent)}
    else:
        groups = _groups(context, request, tuple(json.loads(request.sums["signers"])))
        sums = {"shares": bytes(SHARE_BYTES * sum(len(group.senders) for group in groups))}
    return Reply(own, len(context.lengths[own]), sums=sums)


def dry_summed(context: DryContext, request: Request) -> Reply:
    """A round of training; the parts travel as integers behind masks."""
    width = fixed_point_of(context, tuple(json.loads(request.sums["members"]))).width
    sizes = {part: context.parts.travelling(part) * width for part in request.plan.send}
    weights: Weights = {part: empty({MASKED: (torch.uint8, (size,))}) for part, size in sizes.items()}
    return replace(dry_train(context, request), weights=weights)


def fixed_point_of(context: DryContext, names: tuple[str, ...]) -> FixedPoint:
    """How numbers are integers in a sum of these clients."""
    return fixed_point(sum(weight_of(context, name) for name in names))


def weight_of(context: DryContext, name: str) -> int:
    """A client's weight in the mean."""
    return 1 if context.equal_weights else capped(len(context.lengths[name]))


def _groups(context: DryContext, request: Request, names: tuple[str, ...]) -> tuple[Group, ...]:
    """The sums of the round; the same for all clients, so computed once."""
    key = ("groups", request.round, names)
    if context.memory.get("last groups") != key:
        rules = SumRules(context.method, context.task, context.streams)
        context.memory["last groups"] = key
        context.memory["groups"] = rules.groups(context.parts, request.round, names)
    groups: tuple[Group, ...] = context.memory["groups"]
    return groups


def sum_figures(context: DryContext, job: Job, ledger: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What a forecast tells of a stage's masked sums; None where there are none.

    Args:
        context: method, model and clients.
        job: the stage's.
        ledger: as forecast.

    Returns:
        ``clients`` a round and the ``threshold`` of them that must be left to open a sum; ``bytes_per_number`` and
        ``step`` of the integers in the first round, the ``half_step`` that a mean may be off, and the ``largest``
        change that can be sent; ``protocol_bytes`` of keys, shares and signatures, all clients, both ways; and an
        estimate of the ``seconds`` that the masks of the first round take each client, and the server.
    """
    if not context.sums:
        return None
    names = sample_clients(list(context.lengths), job.clients.fraction, 0, context.streams)
    fixed = fixed_point_of(context, tuple(names))
    lines = [line for line in ledger if line["direction"] == "up" and line["round"] == 0]
    masked = max((sum_bytes(lines, name) for name in names), default=0)
    return {
        "clients": len(names),
        "threshold": threshold(len(names)),
        "bytes_per_number": fixed.width,
        "step": fixed.step,
        "half_step": fixed.step / 2,
        "largest": fixed.bound * fixed.step,
        "protocol_bytes": sum(line["bytes"] for line in ledger if line["part"] == LEDGER),
        "seconds": len(names) * masked / MASK_BYTES_PER_SECOND,
    }


def sum_bytes(ledger: Iterable[Mapping[str, Any]], name: str) -> int:
    """Bytes of the masked parts of a client."""
    return sum(line["bytes"] for line in ledger if line["client"] == name and line["part"] != LEDGER)
