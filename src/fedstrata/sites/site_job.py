"""The job of a run as a site carries it out: the server's, over the site's own rows and device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstrata.client.setup import resolve_auto
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.privacy_rules import check_task
from fedstrata.job.sentences import shown
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.model_files import VOCABULARY
from fedstrata.sites.permission import Refused, own_component
from fedstrata.sites.settings import SiteSettings


def site_job(own: SiteSettings, hello: HelloHeader, folder: Path) -> Job:
    """The job; of ``[data]`` the server says one key alone.

    Args:
        own: the site's settings.
        hello: what the server says.
        folder: the run's, where the model's files are.

    Raises:
        Refused: it has a class or a kind of task of its own that is not installed here, or of which its noise
            promises nothing.
        UserError: it is no job.
    """
    sent = hello.job
    for table in ("task", "train", "privacy"):  # of the others the job itself says so
        if not isinstance(found := sent.get(table, {}), dict):
            raise UserError(f"job: {table}: must be a table ([{table}]), found {shown(found)}")
    _check_kind(hello, sent.get("task", {}).get("kind"))
    data = {key: value for key, value in own.data.model_dump().items() if value is not None}
    if hello.long_text is not None:
        data["long_text"] = hello.long_text
    clients = {"test": hello.share} if hello.share and own.data.test is None else {}
    task = {**sent.get("task", {}), "labels": None if hello.labels is None else list(hello.labels)}
    train = {**sent.get("train", {}), "device": own.device.name}
    most, cache = own.limits.disk_per_run, train.get("feature_cache_gb", 8.0)
    if most is not None and isinstance(cache, (int, float)):
        train["feature_cache_gb"] = min(cache, most / 2e9)
    job: dict[str, Any] = {
        "model": {"name": str(folder / "start")},
        "task": task,
        "data": data,
        "clients": {"count": 1, **clients},
        "train": train,
        **{table: sent[table] for table in ("method", "head", "adapter", "wire", "privacy") if table in sent},
    }
    privacy = {key: value for key, value in sent.get("privacy", {}).items() if value is not None}
    if "public_vocabulary" in privacy:
        privacy["public_vocabulary"] = str(folder / "start" / VOCABULARY)
    job["privacy"] = privacy
    method = None
    if "method" in hello.components:
        options = {key: value for key, value in sent.get("method", {}).items() if key != "name"}
        method = own_component(hello, "method", options)
    found = load(job, method=method)[0]
    try:
        check_task(found, hello.components.get("task"))
    except UserError as error:
        raise Refused(f"the job's noise promises nothing: {error}") from None
    return _own_count(resolve_auto(found))


def _check_kind(hello: HelloHeader, kind: Any) -> None:
    """Refuse a kind of task that is not known here. The module of an installed task may add one."""
    if "task" in hello.components:
        own_component(hello, "task", None)
    if isinstance(kind, str) and kind not in TASK_KINDS:
        raise Refused(
            f"task.kind {kind!r} is not known here; a kind of one's own comes with an installed task of the run "
            "(entry points 'fedstrata.tasks')"
        )


def _own_count(job: Job) -> Job:
    """The job with noise for every round at least: the server may ask in each, whatever it says."""
    if job.privacy.epsilon is None:
        return job
    most = max(job.method.rounds, job.privacy.participations or 0)
    table = job.privacy.model_copy(update={"participations": most})
    return job.model_copy(update={"privacy": table})
