"""What noise, sums and omissions do not go with."""

from __future__ import annotations

from fedstrata.errors import UserError
from fedstrata.job.sum_rules import check_sum_only
from fedstrata.job.tables import Job


def check_privacy(job: Job) -> None:
    """Refuse a promise that the rest of the job would break.

    Raises:
        UserError: it would.
    """
    table = job.privacy
    check_sum_only(job)
    if table.omit:
        raise UserError(f"[privacy] omit: {table.omit[0]!r} is not there yet; expected []")
    if table.level != "none":
        raise UserError(f"[privacy] level: {table.level!r} is not there yet; expected 'none'")
