"""What masked sums do not go with: whatever needs single messages, or more than sums."""

from __future__ import annotations

from fedstrata.errors import UserError
from fedstrata.job.tables import Job, method_name


def check_sum_only(job: Job) -> None:
    """Refuse ``[privacy] sum_only`` where the server could not do its work with sums.

    Raises:
        UserError: it could not.
    """
    if not job.privacy.sum_only:
        return
    name, method = method_name(job.method), job.method
    if method.exchange != "weights":
        raise UserError(
            f"[privacy] sum_only: the server adds up changes of weights, and {name!r} as set here sends "
            f"{method.exchange}, which it needs client by client; expected false, or a method that sends weights"
        )
    if method.population != "each":
        raise UserError(
            f"[privacy] sum_only: with {name!r} one client holds all that is trained on, so nothing is summed; "
            "expected false"
        )
    if method.client_schedule == "sequential":
        raise UserError(
            f"[privacy] sum_only: with {name!r} as set here each client goes on from the one before it, whose "
            "message the server must read; expected false, or clients side by side"
        )
    for what, found, expected, why in (
        ("[server] aggregate", job.server.aggregate, "mean", "compares single messages"),
        ("[wire] codec", job.wire.codec, "none", "has scales and places of its own in every message"),
    ):
        if found != expected:
            raise UserError(
                f"[privacy] sum_only: {what} = {found!r} {why}, of which the server sees none; expected "
                f"{expected!r}, or sum_only = false"
            )
    if job.wire.dtype == "int8":
        raise UserError(
            "[privacy] sum_only: [wire] dtype = 'int8' has a scale for every row of every message, so that "
            "those of two clients cannot be added; expected 'fp32', 'fp16' or 'bf16', or sum_only = false"
        )
    if job.adapter.kind == "lora" and job.adapter.merge == "exact":
        raise UserError(
            "[privacy] sum_only: [adapter] merge = 'exact' takes the product of each client's own factors, of "
            "which the server sees only sums; expected 'alternate' or 'freeze_a', or sum_only = false"
        )
