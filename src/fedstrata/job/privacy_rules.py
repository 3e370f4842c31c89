"""What noise, sums and omissions do not go with."""

from __future__ import annotations

from fedstrata.errors import UserError
from fedstrata.job.tables import Job


def check_privacy(job: Job) -> None:
    """Refuse a promise that the rest of the job would break.

    Raises:
        UserError: it would.
    """
    table = job.privacy
    if table.sum_only:
        raise UserError("[privacy] sum_only: is not there yet; expected false")
    if table.level != "none":
        raise UserError(f"[privacy] level: {table.level!r} is not there yet; expected 'none'")
