"""What adapters, and how they are merged, do not go with."""

from __future__ import annotations

from fedstrata.errors import UserError
from fedstrata.job.tables import Job


def check_adapter(job: Job) -> None:
    """Refuse adapters, or a merge of them, that the rest of the job makes impossible.

    Raises:
        UserError: it does.
    """
    table, server = job.adapter, job.server
    if table.kind == "none":
        return
    if job.train.cache_frozen_layers:
        raise UserError(
            "[train] cache_frozen_layers: goes with layers that are trained themselves, not with [adapter] kind = "
            "'lora'; leave the key out"
        )
    copies = job.method.exchange == "activations" and job.method.client_schedule == "parallel"
    if table.merge == "alternate" and copies:
        raise UserError(
            "[adapter] merge: 'alternate' takes turns in what clients send, and this method also averages copies "
            "of the server's own layers; expected one of: freeze_a, exact, plain"
        )
    if table.merge != "exact":
        return
    for what, found, expected in (
        ("[server] aggregate", server.aggregate, "mean"),
        ("[server] optimizer", server.optimizer, "sgd"),
        ("[server] learning_rate", server.learning_rate or 1.0, 1.0),
    ):
        if found != expected:
            raise UserError(
                f"[adapter] merge: 'exact' takes the average of the clients' products as it is, which does not go "
                f"with {what} = {found!r}; expected {expected!r}, or merge = 'alternate' or 'freeze_a'"
            )
    if job.wire.dtype == "int8":
        raise UserError(
            "[adapter] merge: 'exact' sends matrices of the frozen model, which 'int8' would round; expected "
            "wire.dtype = 'fp32', 'fp16' or 'bf16', or merge = 'alternate' or 'freeze_a'"
        )
    if job.wire.codec != "none":
        raise UserError(
            f"[adapter] merge: 'exact' sends matrices of the frozen model, which wire.codec = {job.wire.codec!r} "
            "would round; expected wire.codec = 'none', or merge = 'alternate' or 'freeze_a'"
        )
