"""What masked sums do not go with: whatever needs single messages, or more than sums."""

from __future__ import annotations

from fedstrata.errors import UserError
from fedstrata.job.tables import Job, method_name


def check_sum_only(job: Job) -> None:
    """Refuse ``[privacy] sum_only`` where the server could not do its work with sums.

    Raises:
        UserError: it could not.
    """
    if job.privacy.sum_only:
        _check_method(job)
        _check_server(job)
        _check_wire(job)


def _check_method(job: Job) -> None:
    """What a round's clients send can be added."""
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


def _check_server(job: Job) -> None:
    """What the server does with messages it can do with their sum."""
    if job.server.aggregate != "mean":
        raise UserError(
            f"[privacy] sum_only: [server] aggregate = {job.server.aggregate!r} compares single messages, of "
            "which the server sees none; expected 'mean', or sum_only = false"
        )
    if job.server.max_norm is not None:
        raise UserError(
            "[privacy] sum_only: [server] max_norm shortens single messages, of which the server sees none; "
            "expected no max_norm, or sum_only = false"
        )
    if job.adapter.kind == "lora" and job.adapter.merge == "exact":
        raise UserError(
            "[privacy] sum_only: [adapter] merge = 'exact' takes the product of each client's own factors, of "
            "which the server sees only sums; expected 'alternate' or 'freeze_a', or sum_only = false"
        )


def _check_wire(job: Job) -> None:
    """Two messages have the same scales and places."""
    if job.wire.codec != "none":
        raise UserError(
            f"[privacy] sum_only: [wire] codec = {job.wire.codec!r} has scales and places of its own in every "
            "message, of which the server sees none; expected 'none', or sum_only = false"
        )
    if job.wire.dtype == "int8":
        raise UserError(
            "[privacy] sum_only: [wire] dtype = 'int8' has a scale for every row of every message, so that "
            "those of two clients cannot be added; expected 'fp32', 'fp16' or 'bf16', or sum_only = false"
        )
