"""What is written down of a client's reply."""

from __future__ import annotations

import math
from typing import Any

from fedstrata.cost.flops import server_flops
from fedstrata.errors import UserError
from fedstrata.plan.messages import Reply
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan


def check_loss(round: int, reply: Reply) -> None:
    """Refuse a reply whose training diverged.

    Raises:
        UserError: its loss is no number.
    """
    if not math.isfinite(reply.loss):
        raise UserError(
            f"round {round + 1}, client {reply.client}: its training diverged (loss {reply.loss}); a smaller "
            "train.learning_rate helps"
        )


def reply_record(round: int, parts: Parts, plan: Plan, reply: Reply) -> dict[str, Any]:
    """A client's line of ``rounds.jsonl``: its work, and what of the model it was about."""
    return {
        "round": round,
        "client": reply.client,
        "examples": reply.examples,
        "steps": reply.steps,
        "tokens": reply.work.tokens,
        "loss": reply.loss,
        "flops": reply.flops,
        "server_flops": server_flops(parts, plan, reply.work),
        "seconds": reply.seconds,
        "layers": plan.layers,
        "trained": plan.train,
        "sent": plan.send,
        "server": plan.server,
    }


def collected_record(round: int, plan: Plan, reply: Reply) -> dict[str, Any]:
    """The line of a client that computed something once and trained nothing."""
    line = {"round": round, "client": reply.client, "examples": reply.examples, "steps": 0, "tokens": 0}
    line |= {"loss": None, "flops": reply.flops, "seconds": reply.seconds}
    return {**line, "layers": plan.layers, "trained": (), "sent": ()}
