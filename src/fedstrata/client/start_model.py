"""Where a job's start model is: a folder or hub id by name, or the outline of a new model."""

from __future__ import annotations

from pathlib import Path

from fedstrata.client.model_options import head_of
from fedstrata.data import demo
from fedstrata.data.prepare import Prepared, training_texts
from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.models import scratch


def model_path(job: Job, base_dir: Path | None) -> str:
    """The job's model: a folder (looked up here, then beside the job file), the demo's, or a hub id as it is.

    Raises:
        UserError: the name is a path and nothing is there.
    """
    assert job.model is not None
    assert job.model.name is not None
    name = job.model.name
    if name.startswith("demo:"):
        return str(demo.resolve_model(name))
    return _found(name, "name", base_dir)


def write_outline(job: Job, data: Prepared | None, base_dir: Path | None, folder: Path) -> str:
    """The config and tokenizer of a job's new model, written into a folder.

    Args:
        job: a job with ``[model.config]``.
        data: its rows, on which a tokenizer may have to be trained; None leaves that one out.
        base_dir: folder in which relative paths are looked up after the working directory.
        folder: where to write.

    Raises:
        UserError: the config or the tokenizer is not usable.
    """
    assert job.model is not None
    assert job.model.config is not None
    tokenizer = job.model.tokenizer and _found(job.model.tokenizer, "tokenizer", base_dir)
    texts = None if data is None else training_texts(job, data)
    labels = None if data is None else data.labels
    scratch.init_from_config(job.model.config, tokenizer, texts, folder, job.task.kind, labels, head_of(job))
    return str(folder)


def _found(name: str, key: str, base_dir: Path | None) -> str:
    folders = [Path(name).expanduser(), *([base_dir / name] if base_dir else [])]
    for folder in folders:
        if folder.is_dir():
            return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"[model] {key}: there is no folder {' nor '.join(map(str, dict.fromkeys(folders)))}")
    return name
