"""A finished model for use elsewhere: exported, or pushed to a hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.data.prepare import prepare
from fedstrata.data.read import WORD_END
from fedstrata.data.rows import take, text_columns
from fedstrata.errors import UserError, plural
from fedstrata.job.file import load
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.job.toml import read_toml
from fedstrata.models.folders import written_whole
from fedstrata.reports.record_files import stages_on_disk

if TYPE_CHECKING:
    from fedstrata.models.onnx import OnnxReport
    from fedstrata.models.sentence_encoder import EncoderReport

COMPARED = 200
"""Test rows on which an exported model is compared."""
PLAIN = ("A short text.", "Another text, somewhat longer than the first one.", "One more.")


def model_folder(folder: Path) -> Path:
    """The folder of the model that a folder is, or that a run left in it.

    Raises:
        UserError: there is none.
    """
    for place in (folder / "model", folder):
        if (place / "config.json").exists():
            return place
    if (folder / "adapter" / "config.json").exists():
        raise UserError(
            f"{folder}: holds adapters and no plain model ([adapter] merged_model = false); expected a run with "
            f"merged_model = true, or, to push the adapters, {folder / 'adapter'}"
        )
    if own := sorted(folder.glob("clients/*/model/config.json")):
        raise UserError(
            f"{folder}: each client has a model of its own; expected one of them, such as {own[0].parent}"
        )
    raise UserError(f"{folder}: holds no model; expected a run's output folder, or a folder with a config.json")


def _whole_model(folder: Path) -> Path:
    """As :func:`model_folder`, of a model that can be loaded by itself.

    Raises:
        UserError: there is none, only adapters, or only what the clients of a run have in common.
    """
    place = model_folder(folder)
    if place.name == "shared" and (place.parent / "result.json").exists():
        raise UserError(
            f"{place}: holds what the clients have in common, and the rest of a model would be untrained; "
            "expected the model of one of them, clients/NAME/model"
        )
    if (place / "adapter_config.json").exists():
        raise UserError(
            f"{place}: holds adapters, which are exported with the model that they belong to; expected the plain "
            "model of their run (its folder, [adapter] merged_model = true)"
        )
    return place


def export(folder: Path, out: Path | None = None, int8: bool = False) -> tuple[list[OnnxReport], str]:
    """Export a model to ONNX, compared on the run's own test rows where they can be read.

    Args:
        folder: a run's output folder, or a model's.
        out: where to write; ``onnx`` in the folder by default.
        int8: also with weights of 8 bits.

    Returns:
        A report for each file, and on which texts they were compared.

    Raises:
        UserError: there is no model, ``out`` holds another one or is a file, or a library is missing.
        OSError: the disk is full; nothing is written then.
    """
    model = _whole_model(folder)
    place = _place(out or folder / "onnx", "model.onnx")
    texts, where = _test_texts(model)
    from fedstrata.models.onnx import export_onnx

    with written_whole(place, "model.onnx") as partial:
        reports = export_onnx(model, partial, texts, int8)
    return [replace(report, path=place / report.path.name) for report in reports], where


def export_sentences(folder: Path, out: Path | None = None) -> tuple[EncoderReport, str]:
    """Export a model's encoder to sentence-transformers, compared on the run's own test rows if they can be read.

    Args:
        folder: a run's output folder, or a model's.
        out: where to write; ``sentence-transformers`` in the folder by default.

    Returns:
        A report, and on which texts it was compared.

    Raises:
        UserError: there is no model, it is no encoder, ``out`` holds another one or is a file, or the library is
            missing.
        OSError: the disk is full; nothing is written then.
    """
    model = _whole_model(folder)
    place = _place(out or folder / "sentence-transformers", "modules.json")
    texts, where = _test_texts(model)
    from fedstrata.models.sentence_encoder import export_encoder

    single = [" ".join([text] if isinstance(text, str) else text) for text in texts]  # of pairs, of words
    with written_whole(place, "modules.json") as partial:
        report = export_encoder(model, partial, single)
    return replace(report, path=place), where


def _place(out: Path, form: str) -> Path:
    """The folder that is to be written, whose config and tokenizer are no other model's.

    Args:
        out: it.
        form: the file by which a model of the same form is known, which is written anew.

    Raises:
        UserError: it holds another model, or is a file.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a new or empty folder with --out")
    if (out / "config.json").exists() and not (out / form).exists():
        raise UserError(f"{out}: holds another model; name a new or empty folder with --out")
    return out


def base_here(model: Path) -> str | None:
    """The folder of this machine that adapters name as the model that they belong to; None of any other model.

    Raises:
        UserError: what peft writes beside adapters is damaged.
    """
    path = model / "adapter_config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        base = table.get("base_model_name_or_path")
    except (ValueError, RecursionError, AttributeError):
        raise UserError(f"{path}: cannot be read; expected a table in JSON, as peft writes it") from None
    return base if isinstance(base, str) and Path(base).is_absolute() else None


def push(folder: Path, repository: str, public: bool = False) -> str:
    """Upload a model's folder to the hub of Hugging Face; the repository is private unless ``public``.

    Returns:
        The address of the repository.

    Raises:
        UserError: there is no model, a file of it is a link that leads out of its folder, nobody is logged in, or
            the hub refuses.
    """
    model = model_folder(folder)
    for path in sorted(model.rglob("*")):
        if path.is_symlink() and model.resolve() not in path.resolve().parents:
            raise UserError(
                f"push: {path} is a link to {path.resolve()}, which would be uploaded; expected a file"
            )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        if api.token is None and api.whoami() is None:
            raise UserError("push: nobody is logged in")
        url = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(model))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"push: {repository}: {reason}; log in with: hf auth login") from None
    return str(url)


def _test_texts(model: Path) -> tuple[Sequence[Any], str]:
    """Texts of the test rows of a model's run in the form that its tokenizer takes; else a few plain ones.

    A client's model is compared on its own test rows, where it has some.
    """
    own = model.parent.name if model.parent.parent.name == "clients" else None
    run = model.parents[2] if own else model.parent
    last = next(reversed(stages_on_disk(run)), "")
    path = run / "stages" / last / "job.toml" if last else run / "job.toml"
    if not path.exists():
        return PLAIN, f"{len(PLAIN)} plain texts, as there is no run beside the model"
    table = read_toml(path)
    try:
        for name in ("format", "changes", "components", "stage", "start"):
            table.pop(name, None)
        table.setdefault("model", {"name": str(model)})
        job = load(table)[0]
        data = prepare(job, Path.cwd())
    except UserError as error:
        return PLAIN, f"{len(PLAIN)} plain texts, as the test rows cannot be read ({error})"
    tests = {own: data.tests[own]} if data.tests and own in data.tests else data.tests
    rows = data.test if tests is None else take(data.test, np.concatenate([*tests.values()]))
    columns = [rows.columns[name][:COMPARED] for name in text_columns(job)]
    where = plural(len(columns[0]), "test row")
    if TASK_KINDS[job.task.kind].words:
        return [text.split(WORD_END) for text in columns[0]], where
    return (list(zip(*columns, strict=True)) if len(columns) == 2 else columns[0]), where
