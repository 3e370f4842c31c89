"""A stage as its sites know it: what they are told of it, and what they may answer."""

from __future__ import annotations

import copy
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedstrata.errors import UserError
from fedstrata.exchanges.sums import most_sum_bytes
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models import checkpoints
from fedstrata.models.buffers import saved_buffers
from fedstrata.models.folders import write_tokenizer
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server import state
from fedstrata.server.layers import ServerLayers
from fedstrata.server.records import Records
from fedstrata.server.server import Server
from fedstrata.sites.approval import job_digest
from fedstrata.sites.engine import RemoteRun
from fedstrata.sites.messages import HelloHeader, StartHeader, decode_message, encode_message
from fedstrata.sites.model_files import VOCABULARY, sent_files
from fedstrata.sites.reply_checks import check_reply, needed_metrics
from fedstrata.wire.files import write_bytes
from fedstrata.wire.tensor_file import TensorFile

JOB_TABLES = ("task", "method", "train", "head", "adapter", "wire", "privacy")
"""Tables of the job that are sent to a site; the others are the site's own."""
EXAMPLE_BYTES, SCALE_BYTES = 8, 2
"""Beside an example's hidden states: its number of tokens and its label; and of each token a scale, with int8."""


@dataclass(frozen=True)
class RemoteStage:
    """A stage that is trained between sites.

    Attributes:
        job: the stage's job.
        labels: class names in order; None where the task has none.
        loaded: the stage's model and tokenizer.
        server: holds the model's parts and what a reply must hold.
        start: the start model's weights.
        layers: the layers that the server holds; None where the method has none.
        folder: the stage's output folder.
        records: the stage's records.
        installed: component of the caller's own -> its entry point and identity, which a site must have too.
        agreed: site -> its examples as it first said, in an earlier call.
    """

    job: Job
    labels: tuple[str, ...] | None
    loaded: checkpoints.Loaded
    server: Server
    start: Weights
    layers: ServerLayers | None
    folder: Path
    records: Records
    installed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    agreed: Mapping[str, int] = field(default_factory=dict)


def remote_run(
    stage: RemoteStage,
    names: Sequence[str],
    sent: Weights,
    tokens: Mapping[str, str],
    port: int,
    most_weight: Mapping[str, int],
) -> RemoteRun:
    """What the sites need to know of a stage.

    Args:
        stage: the stage.
        names: the sites' names.
        sent: the weights of the start model that the sites get.
        tokens: site -> its token for the activation stream.
        port: of the activation stream; 0 where there is none.
        most_weight: site -> most examples for which it counts; who is not in it counts for all of its own.
    """
    job, name_of_run, files = stage.job, run_id(stage.folder), _files(stage.loaded, stage.job.task.kind)
    if job.privacy.public_vocabulary is not None:
        content = bytearray(Path(job.privacy.public_vocabulary).read_bytes())
        files[VOCABULARY] = torch.frombuffer(content, dtype=torch.uint8)
    header = HelloHeader(
        version=version("fedstrata"),
        stage=job.stage,
        job=_site_tables(job, checkpoints.max_positions(stage.loaded.model)),
        long_text=job.data.long_text,
        share=job.clients.test or 0.0,
        labels=stage.labels,
        start=state.fingerprint(sent),
        components=dict(stage.installed),
    )

    def hello(name: str) -> TensorFile:
        stream = (port, tokens[name], job.engine.deadline) if port else None
        return encode_message(name_of_run, header.model_copy(update={"stream": stream}), {"files": files})

    return RemoteRun(
        id=name_of_run,
        names=names,
        hello=hello,
        start=partial(encode_message, name_of_run, StartHeader(), sent),
        check=_check_of(stage),
        answer_bytes=partial(_answer_bytes, stage),
        agreement=_agreement(hello(names[0])),
        start_digest=header.start,
        most_weight=most_weight,
        keeps=_kept(stage, names[0]),
        tokens=tokens,
    )


def _agreement(message: TensorFile) -> str:
    """What names the job to the sites, from a first message as it arrives; the same for each of them."""
    hello = decode_message(message, "hello")
    assert isinstance(hello.header, HelloHeader)
    return job_digest(hello.header, hello.weights["files"])


def _kept(stage: RemoteStage, name: str) -> list[str]:
    """What a site keeps from round to round, and the server has not; nothing where the server trains."""
    job, server = stage.job, stage.server
    if job.method.exchange == "hidden_states":
        return []
    plan = make_plan(job.method, server.parts, job.task.kind, 0, name, Streams(job.train.seed))
    kept = {
        "optimizer moments": job.train.optimizer_state == "persist",
        "unsent changes": server.wire.changes and not job.privacy.sum_only,
        "parts that wait for their turn": job.wire.part_period > 1,
        "parts of its own": bool(plan.keep),
    }
    return [what for what, so in kept.items() if so]


def _answer_bytes(stage: RemoteStage, request: Request, examples: int) -> int:
    """Most bytes of tensors in the reply of a site with so many examples."""
    server = stage.server
    if request.phase == "hidden_states":
        return examples * _states_bytes(stage)
    shapes = server.parts.shapes
    if request.sums:
        return most_sum_bytes(server.parts, request)
    return sum(server.wire.size(shapes[part], server.wire.changes) for part in request.plan.send)


def _states_bytes(stage: RemoteStage) -> int:
    """Most bytes of the hidden states of an example: its longest text, in all branches, fp32, and its label."""
    tokens = min(stage.job.train.max_tokens, checkpoints.max_positions(stage.loaded.model))
    parts = stage.server.parts
    return tokens * max(1, len(parts.head_layers)) * parts.hidden * 4 + EXAMPLE_BYTES + tokens * SCALE_BYTES


def _check_of(stage: RemoteStage) -> Callable[[Request, Reply], None]:
    """The check of replies; of a task of the caller's own nobody here knows the metrics."""
    task, told = stage.job.task, stage.job.privacy.level == "none"
    if "task" in stage.installed:
        return partial(check_reply, stage.server, metrics=None, told=told)
    metrics, needed = {*TASK_KINDS[task.kind].metrics, "loss"}, needed_metrics(task, stage.labels)
    return partial(check_reply, stage.server, metrics=metrics, told=told, needed=needed)


def _site_tables(job: Job, max_positions: int) -> dict[str, Any]:
    """The tables of the job that are sent to a site."""
    dump = job.dump()
    tables = {table: dump[table] for table in JOB_TABLES}
    tables["train"]["max_tokens"] = min(job.train.max_tokens, max_positions)
    if tables["privacy"]["public_vocabulary"] is not None:  # its content comes with the model's files
        tables["privacy"]["public_vocabulary"] = VOCABULARY
    return tables


def _files(loaded: checkpoints.Loaded, kind: str) -> Tensors:
    """Name -> content, as bytes, of the files of a model's folder that hold no weights.

    What a tokenizer was last called with is no part of it, and of no job: rows whose tokens are kept are not
    tokenized again.

    Raises:
        UserError: sites, which take known settings alone, would make another tokenizer of them, or another model.
    """
    _check_buffers(loaded, kind)
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.config.save_pretrained(folder)
        write_tokenizer(loaded.tokenizer, Path(folder))
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    sent = sent_files(files)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in sent.items():
            Path(folder, name).write_bytes(content)
        there = checkpoints.fast_tokenizer(folder, kind)
    if checkpoints.tokenizer_text(there) != checkpoints.tokenizer_text(loaded.tokenizer):
        raise UserError(
            f"model {loaded.name}: its tokenizer has settings that do not go to sites, and without them it splits "
            "texts otherwise"
        )
    return {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in sent.items()}


def _check_buffers(loaded: checkpoints.Loaded, kind: str) -> None:
    """Refuse a model with buffers that its config alone does not give: sites are sent its parameters."""
    if not (found := saved_buffers(loaded.model)):
        return
    with torch.random.fork_rng(devices=[]):
        there = checkpoints.class_of(kind, loaded.model.config).from_config(copy.deepcopy(loaded.model.config))
    made = dict(there.named_buffers())
    same = {name for name in found.keys() & made.keys() if torch.equal(found[name].cpu(), made[name])}
    if others := [name for name in found if name not in same]:
        raise UserError(
            f"model {loaded.name}: its weights hold {others[0]}, which is no parameter and does not go to sites, "
            "and without it they compute otherwise"
        )


def run_id(folder: Path) -> str:
    """The name by which the sites know the stage; the same when it is resumed."""
    path = folder / "state" / "run"
    if not path.exists():
        write_bytes(path, secrets.token_hex(16).encode())
    return path.read_text()
