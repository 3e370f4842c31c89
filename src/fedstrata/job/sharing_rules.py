"""What parts in turns do not go with."""

from __future__ import annotations

from fedstrata.errors import UserError
from fedstrata.job.tables import Job, method_name


def check_turns(job: Job) -> None:
    """Refuse ``wire.part_period`` where a client needs every part as the server has it.

    Raises:
        UserError: it does.
    """
    if job.wire.part_period == 1:
        return
    method, name = job.method, method_name(job.method)
    where = "[wire] part_period:"
    if method.exchange != "weights":
        raise UserError(
            f"{where} goes with methods that send weights; {name!r} as set here sends {method.exchange}"
        )
    if method.population != "each":
        raise UserError(f"{where} goes with methods whose clients send parts of the model, not with {name!r}")
    if method.client_schedule != "parallel":
        raise UserError(
            f"{where} with {name!r} each client continues from the whole model of the one before; expected: 1"
        )
    if job.train.proximal_mu:
        raise UserError(
            f"{where} does not go with train.proximal_mu, which holds clients near the round's model, while they "
            "start from values of their own; expected: 1, or proximal_mu = 0"
        )
    if job.adapter.kind == "lora" and job.adapter.merge in ("alternate", "exact"):
        why = (
            "takes turns by itself"
            if job.adapter.merge == "alternate"
            else "needs both factors and their matrix at once"
        )
        raise UserError(
            f"{where} does not go with [adapter] merge = {job.adapter.merge!r}, which {why}; expected merge = "
            "'freeze_a' or 'plain'"
        )
