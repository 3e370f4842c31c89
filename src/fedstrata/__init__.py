"""FedStrata: federated training of BERT-class models, part by part."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.errors import UserError

if TYPE_CHECKING:
    from fedstrata.report.sweep import Entry
    from fedstrata.result import Result

# Before the first import of the libraries that read them. Threads that wait for each other sleep and do not spin:
# with another process on the same cores a training step is then up to ten times as fast.
for _name, _value in (("HF_HUB_DISABLE_TELEMETRY", "1"), ("DO_NOT_TRACK", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
    os.environ.setdefault(_name, _value)

__all__ = ["UserError", "run", "sweep"]


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
    from fedstrata.jobfile import sweep_table
    from fedstrata.stages import run_job

    where, table = sweep_table(job)
    if table:
        raise UserError(f"{where}: holds a [sweep], which is many runs; fedstrata.sweep runs them")
    return run_job(job, overrides, resume=resume, progress=progress)


def sweep(
    job: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    resume: bool = False,
    progress: Callable[[Any], None] | None = None,
) -> list[Entry]:
    """Run every cell of a job's ``[sweep]``, each in a folder under the output folder, and write the table.

    A cell that fails is survived and named in the table. Finished cells are not run again with ``resume``; failed
    ones are.

    Args:
        job: path of a job file with a table ``[sweep]``, or its content as a mapping.
        overrides: laid over the file and under the sweep's rows; ``sweep.…`` keys set the sweep's own table.
        resume: continue what an earlier call has begun in the output folder.
        progress: called with every :mod:`fedstrata.events` event.

    Returns:
        The table's lines, stage by stage; also in ``table.json``, ``.csv``, ``.md`` and ``.tex``.

    Raises:
        UserError: the sweep, or the job of one of its cells, is not legal.
    """
    from fedstrata.sweeps.run import run_sweep

    return run_sweep(job, overrides, resume=resume, progress=progress)
