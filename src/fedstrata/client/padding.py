"""What padding may change where no example may depend on the others of its batch."""

from __future__ import annotations

from typing import Any

from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.models.padding import padding_matters


def check_padding(job: Job, model: Any) -> None:
    """Refuse level ``example`` where the longest text of a batch would change the gradients of the others.

    Raises:
        UserError: it would.
    """
    if (
        job.privacy.level == "example"
        and job.train.padding != "max"
        and padding_matters(model, job.train.max_tokens)
    ):
        raise UserError(
            f"[privacy] level: 'example' with a model of type {model.config.model_type!r} needs train.padding = "
            "'max', else what it makes of a text depends on the longest of its batch"
        )
