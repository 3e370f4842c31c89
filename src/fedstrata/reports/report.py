"""The page of whatever folders a user names: runs, or a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.plan.kinds import PAGE
from fedstrata.reports.audit import read_audit
from fedstrata.reports.page import write_page
from fedstrata.reports.runs import Run, load_runs
from fedstrata.reports.sweep_files import is_sweep
from fedstrata.reports.sweep_page import write_sweep_page


def write_report(folders: Sequence[Path], path: Path | None = None, runs: Sequence[Run] | None = None) -> Path:
    """See :func:`fedstrata.report`.

    Args:
        folders: of runs, or of one sweep.
        path: the page to write.
        runs: those of the folders, where the caller has read them already.
    """
    if not folders:
        raise UserError("report: names no folder; expected the output folders of runs, or of one sweep")
    if path is None:
        path = folders[0] / PAGE if len(folders) == 1 else Path(PAGE)
    if len(folders) > 1 and (sweeps := [folder for folder in folders if is_sweep(folder)]):
        raise UserError(
            f"report: {sweeps[0]} is a sweep's folder, which has a page of its own; expected runs' folders"
        )
    _check_place(path)
    if runs is None:
        runs = [] if is_sweep(folders[0]) else load_runs(folders)
    try:
        audits = [read_audit(folder) for folder in folders]
        return write_page(runs, path, audits) if runs else write_sweep_page(folders[0], path)
    except OSError as error:
        raise UserError(f"report: {error.filename or path} cannot be written ({error.strerror})") from error


def _check_place(path: Path) -> None:
    """Refuse a page that cannot be written, before anything is drawn or written."""
    if path.is_dir():
        raise UserError(f"report: {path} is a folder; expected a file, such as {path / PAGE}")
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"report: {path} cannot be written, as {above} is a file")
