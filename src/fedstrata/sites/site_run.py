"""A site's part in one run: its job, its model and examples, and what it keeps of the run on its disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from fedstrata.client.answer import ClientData
from fedstrata.client.device import device_words, idle_gpu
from fedstrata.client.facts import facts_and_lines
from fedstrata.client.model_options import adapter_of, head_of
from fedstrata.client.setup import Ready, make_ready
from fedstrata.client.trainer import StepCallback
from fedstrata.data.fingerprint import fingerprints
from fedstrata.data.prepare import data_notes, dropped_rows, prepare_own
from fedstrata.job.tables import Job
from fedstrata.models import checkpoints
from fedstrata.models.cut import SplitLink
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server.journal import Journal
from fedstrata.sites.answers import Answers
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.own_state import check_own, keep_rows
from fedstrata.sites.permission import Refused, check_limits, own_component
from fedstrata.sites.rows_behind import scored_apart
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.signing import with_signer
from fedstrata.sites.site import Reach, Site
from fedstrata.wire.store import Store

LOG = logging.getLogger("fedstrata.site")
ReachServer = Callable[[Request, int, str, float], AbstractContextManager[SplitLink]]
"""Opens the way to the server's layers: for a request, to a port, with a token, with a deadline in seconds."""


@dataclass
class SiteRun:
    """A site's part in one run.

    Attributes:
        name: the run's.
        folder: the run's, on the site's disk.
        hello: how the run began.
        digest: of the job as the server tells it, see :func:`fedstrata.sites.approval.job_digest`.
        job: the run's job, with the site's rows and device.
        journal: of what the site keeps of the run.
        answers: what it has answered.
        parts: of its model, once they are known; see :func:`parts_of`.
        ready: its model and examples; None until the start model is here.
        site: answers requests.
    """

    name: str
    folder: Path
    hello: HelloHeader
    digest: str
    job: Job
    journal: Journal
    answers: Answers
    parts: Parts | None = None
    ready: Ready | None = None
    site: Site | None = None


@dataclass(frozen=True)
class Hooks:
    """What a run's site calls.

    Attributes:
        step: after every training step.
        reach: opens the way to the server's layers; None where there is none.
        leaving: told of every message of activations before it leaves.
    """

    step: StepCallback
    reach: ReachServer | None
    leaving: Callable[[Request, Tensors], None]


def make_site(settings: SiteSettings, run: SiteRun, hooks: Hooks) -> Site:
    """What answers the run's requests; made once, when the start model is there.

    Raises:
        Refused: the site's settings do not allow the run, or its rows are others than before.
        UserError: its rows, model or device cannot be used.
    """
    if run.site is not None:
        return run.site
    folder, hello, start = run.folder, run.hello, run.folder / "start"
    data = prepare_own(run.job, settings.name, settings.home)
    dropped = [dropped_rows(data)] if data.dropped else []
    for note in (*data_notes(run.job, data), *dropped, *idle_gpu(settings.device.name != "auto")):
        LOG.info("%s", note)
    LOG.info("run %s: computes on %s", run.name, device_words(run.job.train.device))
    rows = fingerprints(data)
    check_own(folder, run.journal, rows)
    server = server_parts(settings, run, parts_of(run))
    task = own_component(hello, "task", None) if "task" in hello.components else None
    codec = own_component(hello, "codec", {}) if "codec" in hello.components else None
    ready = make_ready(run.job, data, str(start), server, task, codec)
    run.ready = with_signer(ready, settings, run.name, run.digest)
    site = Site(
        name=settings.name,
        method=run.job.method,
        task=run.job.task.kind,
        runtime=run.ready.runtime,
        data=_data(settings, run.ready, Store(folder, run.journal.note)),
        folder=folder,
        start=start / "model.safetensors",
        limit=settings.limits.bytes_per_round,
        callback=hooks.step,
        reach=_reach(hooks.reach, hello, settings.limits.seconds_per_run),
        leaving=hooks.leaving,
    )
    check_limits(settings, site, scored=bool(hello.share))
    keep_rows(folder, rows)
    run.site = site
    for line in facts_and_lines(run.job, data, run.ready)[1]:
        LOG.info("run %s: data: %s", run.name, line)
    return site


def parts_of(run: SiteRun) -> Parts:
    """The parts of the run's model, found once."""
    if run.parts is None:
        job, start = run.job, str(run.folder / "start")
        run.parts = checkpoints.parts_of(start, job.task.kind, run.hello.labels, head_of(job), adapter_of(job))
    return run.parts


def server_parts(settings: SiteSettings, run: SiteRun, parts: Parts) -> tuple[str, ...]:
    """The parts that the server holds."""
    return _first_plan(settings, run, parts).away(parts)


def keeps_own(settings: SiteSettings, run: SiteRun) -> bool:
    """Whether the run's method leaves the site parts of its own."""
    return bool(_first_plan(settings, run, parts_of(run)).keep)


def _first_plan(settings: SiteSettings, run: SiteRun, parts: Parts) -> Plan:
    job = run.job
    return make_plan(job.method, parts, job.task.kind, 0, settings.name, Streams(job.train.seed))


def _data(settings: SiteSettings, ready: Ready, store: Store) -> ClientData:
    """The site's examples; it is scored on test rows of its own or not at all."""
    name, index = settings.name, ready.shards[settings.name]
    own = ready.tests.get(name, {}).get(name, index[:0])
    test = scored_apart(ready.test, own, settings.limits.min_examples)
    return ClientData(ready.train, index, test, {name: own}, store)


def _reach(reach: ReachServer | None, hello: HelloHeader, most: int | None) -> Reach | None:
    """The way to the server's layers, for whose answers it waits ``most`` seconds, whatever the server says."""
    if hello.stream is None:
        return None
    if reach is None:
        raise Refused("it has no way to send hidden states")
    port, token, deadline = hello.stream
    return lambda request: reach(request, port, token, min(deadline, most or deadline))
