"""FedStrata: federated training of BERT-class models, part by part."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.errors import UserError

if TYPE_CHECKING:
    from fedstrata.reports.sweep import Entry
    from fedstrata.runs.result import Result

# Before the first import of the libraries that read them. Threads that wait for each other sleep and do not spin:
# with another process on the same cores a training step is then up to ten times as fast.
for _name, _value in (("HF_HUB_DISABLE_TELEMETRY", "1"), ("DO_NOT_TRACK", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
    os.environ.setdefault(_name, _value)

__all__ = ["UserError", "forecast", "run", "sweep"]


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
    from fedstrata.job.file import sweep_table
    from fedstrata.runs.stages import run_job

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


def forecast(
    job: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    methods: Sequence[str] = (),
    count: int | None = None,
    tokens: int | None = None,
    client: str | None = None,
    bandwidth: float | None = None,
    gflops: float | None = None,
    units: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Tell what a job will cost one client, before anything runs.

    Only the model's ``config.json`` is needed. Bytes equal those that the run's ledger will count. So do FLOPs on
    the job's own data, but for the number of masked positions, which is the expected one.

    Args:
        job: path of a job file, or its content as a mapping.
        overrides: laid over the file.
        methods: methods to compare; the job's own when empty.
        count: examples of each client, in place of the job's data.
        tokens: length of each example; ``train.max_tokens`` when absent.
        client: whose costs; the first client's when absent.
        bandwidth: of a client's line in Mbit/s (10^6 bits), the same both ways.
        gflops: what a client computes per second, in 10^9 FLOPs.
        units: also tell the figures as a paper prints them: ``fedbfpt``, ``fedbt``, ``fedsplitbert`` or
            ``fedfreezebert`` (:mod:`fedstrata.cost.papers`).

    Returns:
        Method -> ``setup`` (``down_bytes``: the start model), ``rounds`` (of each what the client sends and
        receives in bytes, its training FLOPs, its memory in bytes and the layers it trains), ``total`` (sums over
        the rounds), ``clients`` (sums over all clients) and ``holdings`` (what examples were counted on); with
        ``bandwidth`` or ``gflops`` also ``seconds``, with ``units`` also ``units``, a line per stage.

    Raises:
        UserError: the job is not legal, or the model's config cannot be had.
    """
    from fedstrata.forecasts import forecast as forecasting

    return forecasting.forecast(
        job,
        overrides,
        methods=methods,
        count=count,
        tokens=tokens,
        client=client,
        bandwidth=bandwidth,
        gflops=gflops,
        units=units,
    )
