"""FedStrata: federated training of BERT-class models, part by part."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.errors import UserError

if TYPE_CHECKING:
    from fedstrata.result import Result

# Before the first import of the libraries that read them. Threads that wait for each other sleep and do not spin:
# with another process on the same cores a training step is then up to ten times as fast.
for _name, _value in (("HF_HUB_DISABLE_TELEMETRY", "1"), ("DO_NOT_TRACK", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
    os.environ.setdefault(_name, _value)

__all__ = ["UserError", "run"]


def run(
    job: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    resume: bool = False,
    progress: Callable[[Any], None] | None = None,
) -> Result:
    """Run a job: every stage of it, into its output folder.

    Args:
        job: path of a job file, or its content as a mapping.
        overrides: ``key=value`` words or a mapping, laid over the file.
        resume: continue what an earlier, stopped call has begun in the output folder.
        progress: called with every :mod:`fedstrata.events` event.

    Raises:
        UserError: the job, its data or its model is not usable; the sentence says what to change.
    """
    from fedstrata.stages import run_job

    return run_job(job, overrides, resume=resume, progress=progress)
