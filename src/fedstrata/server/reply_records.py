"""What is written down of a client's reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedstrata.cost.flops import server_flops
from fedstrata.errors import UserError, plural
from fedstrata.events import Event, Noted
from fedstrata.plan.messages import Reply
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.server.server import Server


def check_loss(round: int, reply: Reply, server: Server) -> None:
    """Refuse a reply whose training diverged.

    Raises:
        UserError: its loss is not finite; the learning rate that is likely to blame is named.
    """
    if reply.loss is not None and not math.isfinite(reply.loss):
        raise UserError(
            f"round {round + 1}, client {reply.client}: its training diverged (loss {reply.loss}); a smaller "
            f"{server.suspect}.learning_rate helps, with --resume from the last finished round"
        )


def check_score(round: int, score: Mapping[str, float], server: Server) -> None:
    """Refuse a model whose loss on the test rows is not finite.

    Raises:
        UserError: it is not.
    """
    if not math.isfinite(score.get("loss", 0.0)):
        if round < 0:
            raise UserError(
                f"the start model's loss on the test rows is {score['loss']}; nothing can be trained from it"
            )
        raise UserError(
            f"round {round + 1}: the model's loss on the test rows is {score['loss']}; a smaller "
            f"{server.suspect}.learning_rate helps, with --resume from the last finished round"
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


def name_outliers(round: int, server: Server, tell: Callable[[Event], None]) -> list[dict[str, Any]]:
    """The lines of ``outliers.jsonl`` of a round that was just merged; they, and parts that stayed, are told."""
    lines = [{"round": round, "client": name, "times": times} for name, times in server.outliers.items()]
    for name, times in server.outliers.items():
        tell(Noted(f"round {round + 1}: {name} is far outside the others, {times:.3g} times the median distance"))
    if server.unmoved:
        few = ", ".join(server.unmoved[:3]) + (", ..." if len(server.unmoved) > 3 else "")
        tell(
            Noted(
                f"round {round + 1}: too few replies hold {few}: {plural(len(server.unmoved), 'part')} unchanged"
            )
        )
    return lines
