"""FedStrata: federated training of BERT-class models, part by part.

The Python face: :func:`run`, :func:`sweep`, :func:`forecast`, :func:`audit`, :func:`report`, and the classes
that a caller needs.
Heavy libraries are imported when a function first needs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata import environment
from fedstrata.errors import UserError

if TYPE_CHECKING:
    from fedstrata.job.tables import Job
    from fedstrata.plan.plan import Method, Plan
    from fedstrata.reports.sweep import SweepRow
    from fedstrata.runs.result import Result


environment.prepare()  # before the first import of the libraries that read it

__all__ = ["Job", "Method", "Plan", "Result", "UserError", "audit", "forecast", "report", "run", "sweep"]

_MODULES = {
    "Job": "fedstrata.job.tables",
    "Method": "fedstrata.plan.plan",
    "Plan": "fedstrata.plan.plan",
    "Result": "fedstrata.runs.result",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def _several(name: str, found: Sequence[str] | None) -> None:
    """Refuse one name in place of a list of them, which would be read letter by letter."""
    if isinstance(found, str):
        raise UserError(f"{name}: found {found!r}; expected a list of names, such as [{found!r}]")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def run(
    job: str | Path | Mapping[str, Any] | Job,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
    progress: Callable[[Any], None] | None = None,
    **components: Any,
) -> Result:
    """Run a job: every stage of it, into its output folder. :func:`report` makes a page of it.

    Args:
        job: path of a job file, its content as a mapping, or a :class:`Job`. In the latter two ``data.train`` and
            ``data.test`` may also be rows in memory: a pandas or polars data frame, an Arrow table, a
            ``datasets.Dataset``, a list of dicts, or a dict from clients to any of these.
        overrides: ``key=value`` words or a mapping, laid over the file.
        resume: continue what an earlier, stopped call began in the output folder.
        callbacks: objects with methods of :class:`fedstrata.callbacks.Callback`, or functions of one event.
        progress: called with every :mod:`fedstrata.events` event.
        components: objects of the caller's own: ``method``, ``task``, ``codec``, ``aggregate`` and
            ``server_optimizer``, see :class:`fedstrata.runs.components.Components`.

    Raises:
        UserError: the job, its data or its model is not usable; the sentence says what to change.
        TypeError: a component has another name.
    """
    from fedstrata.job.file import sweep_table
    from fedstrata.runs.components import Components
    from fedstrata.runs.job import run_job

    where, table = sweep_table(job)
    if table:
        raise UserError(f"{where}: holds a [sweep], which is many runs; fedstrata.sweep runs them")
    from fedstrata.callbacks import calls

    if not isinstance(callbacks, Iterable):
        raise UserError(f"callbacks: expected a list of them, found an object of {type(callbacks).__name__}")
    tell = calls([*([progress] if progress else []), *callbacks])
    return run_job(job, overrides, resume=resume, progress=tell, components=Components(**components))


def sweep(
    job: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    resume: bool = False,
    progress: Callable[[Any], None] | None = None,
) -> list[SweepRow]:
    """Run every cell of a job's ``[sweep]``, each in a folder under the output folder, and write the table.

    A cell that fails does not stop the others; the table names it. With ``resume`` finished cells are not run
    again, failed ones are.

    Args:
        job: path of a job file with a table ``[sweep]``, or its content as a mapping.
        overrides: laid over the file and under the sweep's rows; ``sweep.…`` keys set the sweep's own table.
        resume: continue what an earlier call began in the output folder.
        progress: called with every :mod:`fedstrata.events` event.

    Returns:
        The table's rows, stage by stage; also in ``table.json``, ``.csv``, ``.md`` and ``.tex``.

    Raises:
        UserError: the sweep, or the job of one of its cells, is invalid.
    """
    from fedstrata.job.file import pairs_of
    from fedstrata.sweeps.cells import cells

    given = list(pairs_of(overrides))  # what is read once only is empty the second time
    cells(job, given)  # a mistake in the job file is reported before torch is imported
    from fedstrata.sweeps.run import run_sweep

    return run_sweep(job, given, resume=resume, progress=progress)


def report(
    folders: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
) -> Path:
    """Write an offline HTML page of one run, of several runs compared, or of a sweep and each finished cell of it.

    Args:
        folders: output folder of a run or of a sweep, or output folders of several runs.
        out: the page to write; by default ``report.html`` in the folder, for several in the working directory.

    Returns:
        Path of the page.

    Raises:
        UserError: a folder holds no run that this version can read, or the page cannot be written.
    """
    from fedstrata.reports.report import write_report

    paths = list(folders) if isinstance(folders, Iterable) and not isinstance(folders, str) else [folders]
    for path in paths:
        if not isinstance(path, str | Path):
            kind = type(path).__name__
            raise UserError(
                f"report: found an object of {kind}; expected the path of a folder, such as result.folder"
            )
    return write_report(list(map(Path, paths)), None if out is None else Path(out))


def forecast(  # noqa: PLR0913  # what a caller may ask, each by its name
    job: str | Path | Mapping[str, Any] | Job,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    methods: Sequence[str] = (),
    count: int | None = None,
    tokens: int | None = None,
    client: str | None = None,
    bandwidth: float | None = None,
    gflops: float | None = None,
    units: str | None = None,
    **components: Any,
) -> dict[str, dict[str, Any]]:
    """Compute what a job will cost one client, without running it.

    Only the model's ``config.json`` is needed. Bytes equal those that the run's ledger will count. So do FLOPs
    on the job's own data, except that the number of masked positions is the expected one.

    Args:
        job: path of a job file, its content as a mapping, or a :class:`Job`.
        overrides: laid over the file.
        methods: methods to compare; the job's own when empty.
        count: examples of each client, instead of the job's data.
        tokens: length of each example; ``train.max_tokens`` when absent.
        client: whose costs; the first client's when absent.
        bandwidth: a client's bandwidth in Mbit/s (10^6 bits), the same both ways.
        gflops: what a client computes per second, in 10^9 FLOPs.
        units: also return the figures as a paper prints them: ``fedbfpt``, ``fedbt``, ``fedsplitbert`` or
            ``fedfreezebert`` (:mod:`fedstrata.cost.papers`).
        components: objects of the caller's own, as of :func:`run`.

    Returns:
        Method -> ``setup`` (``down_bytes``: the initial download), ``rounds`` (of each what the client sends and
        receives in bytes, its training FLOPs, its memory in bytes and the layers it trains), ``total`` (sums over
        the rounds), ``clients`` (sums over all clients) and ``holdings`` (what examples were counted on); with
        ``bandwidth`` or ``gflops`` also ``seconds``, with ``units`` also ``units``, a line per stage.

    Raises:
        UserError: the job is invalid, or the model's config cannot be read.
    """
    from fedstrata.job.file import load, pairs_of
    from fedstrata.runs.components import Components

    _several("methods", methods)
    names, given = list(methods), list(pairs_of(overrides))  # what is read once only is empty the second time
    brought = Components(**components)
    for method in [[("method.name", name)] for name in names] or [[]]:
        # a mistake in the job file is reported before torch is imported
        load(job, [*given, *method], brought.method)
    from fedstrata.forecasts.options import ForecastOptions

    options = ForecastOptions(names, count, tokens, client, bandwidth, gflops, units, brought)
    with environment.loading():
        from fedstrata.forecasts.forecast import forecast as compute

    return compute(job, given, options)


def audit(
    job: str | Path | Mapping[str, Any] | Job,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    client: str | None = None,
    attacks: Sequence[str] | None = None,
    public: str | None = None,
    deep: bool = False,
    progress: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Measure what the server can read from what one client sends in the first round of each stage.

    The client's own code runs the round; attacks read what it sends, and are compared with its texts. Where a
    later round sends what they read and the first does not, that one is simulated too. What an attack has to learn
    or set comes from public text. ``audit.json`` in the job's output folder has the result.

    Args:
        job: as of :func:`run`.
        overrides: laid over the file.
        client: whose round; the first client's when absent.
        attacks: which, of :data:`fedstrata.audits.options.ATTACKS`; all that fit when absent.
        public: a file or ``demo:`` name with public text; absent: the documentation that comes with Python.
        deep: also attack the model that the training ends in: membership, and texts put in on purpose.
        progress: called with every :mod:`fedstrata.events` event.

    Returns:
        ``stages``, each with what was simulated (``plays``), ``findings`` (channel, attack, setting, figures with
        their intervals and what chance gives, and a sentence) and ``notes``; and ``seconds``.

    Raises:
        UserError: the job, its data, its model or the public text is not usable.
    """
    from fedstrata.job.file import load, pairs_of

    given = list(pairs_of(overrides))  # what is read once only is empty the second time
    load(job, given)  # a mistake in the job file is reported before torch is imported
    from fedstrata.audits.options import ATTACKS, AuditOptions

    _several("attacks", attacks)
    options = AuditOptions(client, list(attacks or ()) or ATTACKS, public, progress or (lambda event: None), deep)
    with environment.loading():
        from fedstrata.audits.audit import audit as play
        from fedstrata.runs.alone import alone

    with alone():
        return play(job, given, options)
