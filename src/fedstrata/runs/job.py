"""A job from its file to checked rows; torch is imported only after that, as a mistake should not cost seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.data.facts import rows_seen_before
from fedstrata.data.prepare import prepare, prepare_test
from fedstrata.engines.machine import can_fork, cores
from fedstrata.environment import loading, spin_if_alone
from fedstrata.errors import UserError
from fedstrata.events import Event, Noted
from fedstrata.job.file import JobSource, Overrides, load
from fedstrata.runs.alone import alone
from fedstrata.runs.components import Components, check_between_sites
from fedstrata.runs.folder import own_folder
from fedstrata.runs.tracked import tracked

if TYPE_CHECKING:
    from fedstrata.runs.result import Result


def run_job(
    source: JobSource,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    progress: Callable[[Event], None] | None = None,
    components: Components = Components(),  # noqa: B008
    base_dir: Path | None = None,
) -> Result:
    """See :func:`fedstrata.run`; ``base_dir`` is the folder of the file that ``source`` was read from."""
    jobs = load(source, overrides, components.method)
    if len({job.between_sites for job in jobs}) > 1:
        raise UserError("[engine] name: must be the same in all stages")
    base_dir = Path(source).resolve().parent if isinstance(source, str | Path) else base_dir
    with alone(jobs[0].between_sites), own_folder(Path(jobs[0].output.dir), resume):
        for job in jobs:
            check_between_sites(job, components)
        data = [prepare_test(job, base_dir) if job.between_sites else prepare(job, base_dir) for job in jobs]
        first = "torch" not in sys.modules
        if first and not jobs[0].between_sites:
            spin_if_alone()
        with loading():
            from fedstrata.engines.processes import Nursery  # here, as it loads torch
            from fedstrata.runs.stages import run_stages

        with closing(Nursery()) as nursery, tracked(jobs, progress or (lambda event: None)) as (tell, finish):
            if first and cores() > 1 and any(job.engine.name in ("auto", "pool") for job in jobs) and can_fork():
                nursery.fork_now()  # before anything is computed
            for line in rows_seen_before(jobs, data).values():
                tell(Noted(line))
            result = run_stages(jobs, data, base_dir, tell, components, nursery)
            finish(result)
            return result
