"""A start model that a site has already: from its own folder, if it is the announced one to the last bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from fedstrata.client.model_options import adapter_of, head_of
from fedstrata.client.setup import init_seed
from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.models import checkpoints
from fedstrata.models.parts import part_tensors
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server.journal import Journal
from fedstrata.server.state import fingerprint
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.own_state import START, write_journal
from fedstrata.sites.settings import SiteSettings
from fedstrata.wire.codec import payload_bytes
from fedstrata.wire.files import write_bytes
from fedstrata.wire.store import Store

LOG = logging.getLogger("fedstrata.site")
MARK = "own"
"""File in a run's folder that says that the start model was not sent."""


def take_own_start(
    own: SiteSettings, job: Job, hello: HelloHeader, journal: Journal, check_disk: Callable[[int], None]
) -> bool:
    """Take the start model from the site's own folder; what no checkpoint has (head, adapters) by the job's seed.

    Args:
        own: the site's settings.
        job: the run's job.
        hello: what the server says, with the fingerprint of the start model.
        journal: of what the site keeps of the run.
        check_disk: refuses to take so many bytes onto the disk.

    Returns:
        Whether the model there is the announced one; else it has to be sent.
    """
    model, labels = own.model.path, hello.labels
    if model is None:
        return False
    try:
        loaded = checkpoints.load(
            str(model), job.task.kind, labels, init_seed(job), job.train.dropout, head_of(job), (), adapter_of(job)
        )
    except UserError as error:
        LOG.warning("[model] path: %s; the start model is taken from the server", error)
        return False
    parts = loaded.parts
    away = make_plan(job.method, parts, job.task.kind, 0, own.name, Streams(job.train.seed)).away(parts)
    weights = {p: part_tensors(loaded.model, parts, [p]) for p in parts.names if p not in away}
    if fingerprint(weights) != hello.start:
        LOG.warning("[model] path: %s is not the start model of this run, which is taken from the server", model)
        return False
    check_disk(sum(map(payload_bytes, weights.values())))
    folder = journal.folder
    Store(folder, journal.note).write(START, {n: t for tensors in weights.values() for n, t in tensors.items()})
    write_bytes(folder / MARK, b"")
    write_journal(folder, journal)
    LOG.info("the start model is the one in %s; it is not sent", model)
    return True


def is_own(folder: Path) -> bool:
    """Whether the start model of a run was not sent to the site."""
    return (folder / MARK).exists()
