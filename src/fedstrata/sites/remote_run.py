"""A stage as its sites know it: what they are told of it, and what they may answer."""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedstrata.job.tables import Job
from fedstrata.models import checkpoints
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.server import state
from fedstrata.server.layers import ServerLayers
from fedstrata.server.records import Records
from fedstrata.server.server import Server
from fedstrata.sites.engine import RemoteRun
from fedstrata.sites.messages import HelloHeader, StartHeader, encode_message
from fedstrata.wire.codec import WireError
from fedstrata.wire.files import write_bytes
from fedstrata.wire.tensor_file import TensorFile

JOB_TABLES = ("task", "method", "train", "head", "adapter", "wire")
"""Tables of the job that are sent to a site; the others are the site's own."""
MOST_STATES_BYTES = 1 << 26
"""Of an example's hidden states: more than 512 tokens of the largest models have, in all branches of a head."""


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


def remote_run(
    stage: RemoteStage, names: Sequence[str], sent: Weights, tokens: Mapping[str, str], port: int
) -> RemoteRun:
    """What the sites need to know of a stage.

    Args:
        stage: the stage.
        names: the sites' names.
        sent: the weights of the start model that the sites get.
        tokens: site -> its token for the activation stream.
        port: of the activation stream; 0 where there is none.
    """
    job, run_id, files = stage.job, _run_id(stage.folder), _files(stage.loaded)
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
        return encode_message(run_id, header.model_copy(update={"stream": stream}), {"files": files})

    return RemoteRun(
        id=run_id,
        names=names,
        hello=hello,
        start=partial(encode_message, run_id, StartHeader(), sent),
        check=partial(_check_reply, stage.server),
        answer_bytes=partial(_answer_bytes, stage.server),
        tokens=tokens,
    )


def _answer_bytes(server: Server, request: Request, examples: int) -> int:
    """Most bytes of tensors in the reply of a site with so many examples."""
    if request.phase == "hidden_states":
        return examples * MOST_STATES_BYTES
    shapes = server.parts.shapes
    return sum(server.wire.size(shapes[part], server.wire.changes) for part in request.plan.send)


def _check_reply(server: Server, request: Request, reply: Reply) -> None:
    """Refuse a reply that must not be aggregated.

    Raises:
        WireError: its loss is not finite, or it does not send what the plan says.
    """
    if request.phase == "train":
        if not math.isfinite(reply.loss):
            raise WireError(f"diverged (loss {reply.loss}); a smaller train.learning_rate helps")
        try:
            server.check(request.plan, reply)
        except WireError as error:
            raise WireError(f"sends what cannot be used: {error}") from None


def _site_tables(job: Job, max_positions: int) -> dict[str, Any]:
    """The tables of the job that are sent to a site."""
    dump = job.dump()
    tables = {table: dump[table] for table in JOB_TABLES}
    tables["train"]["max_tokens"] = min(job.train.max_tokens, max_positions)
    return tables


def _files(loaded: checkpoints.Loaded) -> dict[str, torch.Tensor]:
    """Name -> content, as bytes, of the files of a model's folder that hold no weights."""
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.config.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        return {
            path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for path in sorted(Path(folder).iterdir())
        }


def _run_id(folder: Path) -> str:
    """The name by which the sites know the stage; the same when it is resumed."""
    path = folder / "state" / "run"
    if not path.exists():
        write_bytes(path, secrets.token_hex(16).encode())
    return path.read_text()
