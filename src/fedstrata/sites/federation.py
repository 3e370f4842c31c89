"""A run between sites, at the server: checks of its job, its federation, and the engine over the sites."""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from fedstrata.errors import UserError
from fedstrata.events import Event, Missed
from fedstrata.exchanges import EXCHANGES
from fedstrata.job.tables import Engine, Job, method_name
from fedstrata.models import checkpoints
from fedstrata.plan.kinds import Weights
from fedstrata.plan.labels import sort_labels
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server import state
from fedstrata.server.layers import ServerLayers
from fedstrata.server.records import Records
from fedstrata.server.server import Server
from fedstrata.sites.checks import join_address, loopback
from fedstrata.sites.engine import RemoteEngine, RemoteRun, Transport
from fedstrata.sites.messages import HelloHeader, StartHeader, encode_message
from fedstrata.sites.serve import secret_file
from fedstrata.sites.settings import ServerSettings, read_server
from fedstrata.wire.codec import WireError
from fedstrata.wire.files import write_bytes

if TYPE_CHECKING:
    from fedstrata.sites.activation_server import ActivationServer

JOB_TABLES = ("task", "method", "train", "head", "adapter", "wire")
"""Tables of the job that are sent to a site; the others are the site's own."""
SESSION_SHARE = 4
"""A client may keep the activation server waiting for a quarter of the deadline: others wait for their turns."""


@dataclass(frozen=True)
class Federation:
    """The sites of a run, while it is connected to them.

    Attributes:
        settings: the server's.
        transport: carries messages to the sites.
        tokens: site -> its token for the activation stream.
        secure: TLS and keys are on.
    """

    settings: ServerSettings
    transport: Transport
    tokens: Mapping[str, str]
    secure: bool


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


def names_of(job: Job) -> list[str]:
    """The sites that the job's federation names, in canonical order."""
    return sort_labels(_settings(job.engine).sites)


def settle_sites(job: Job) -> Job:
    """The job with test rows: where the server has none, each site holds out some of its own."""
    if not job.between_sites or job.data.test is not None or job.clients.test is not None:
        return job
    return job.model_copy(update={"clients": job.clients.model_copy(update={"test": job.data.holdout})})


def check_sites(job: Job, parts: Parts) -> None:
    """Refuse a job that cannot be run between sites.

    Raises:
        UserError: it needs all rows in one place, or would score at the server what only the sites have.
    """
    name = method_name(job.method)
    plan = make_plan(job.method, parts, job.task.kind, 0, names_of(job)[0], Streams(job.train.seed))
    if job.method.population != "each" or not EXCHANGES[job.method.exchange].sends(plan):
        raise UserError(f"[method] name: {name!r} sends nothing between clients, so it is not for sites")
    if plan.keep and job.clients.test is None:
        raise UserError(
            f"[clients] test: is missing; with {name} each site has a model of its own, which is scored on rows "
            "of its own: clients.test = 0.1 in place of [data] test"
        )
    if job.model is not None and job.model.config is not None and job.model.tokenizer is None:
        raise UserError("[model] tokenizer: is missing; between sites nobody has the rows to train one on")


def _settings(engine: Engine) -> ServerSettings:
    assert engine.federation is not None
    return read_server(Path(engine.federation))


@contextmanager
def federation(engine: Engine) -> Iterator[Federation]:
    """The job's federation, connected.

    Raises:
        UserError: the server does not answer, another run is on, or the run is insecure and not on one machine.
    """
    from fedstrata.sites import flower

    settings = _settings(engine)
    if engine.insecure and not loopback(settings.host):
        raise UserError(f"[engine] insecure: is for this machine alone, and the server is {settings.host}")
    ca = None if engine.insecure else settings.tls.ca.read_bytes()
    secret = secret_file(settings.home).read_bytes()
    keys = {} if engine.insecure else {flower.public_key(path): name for name, path in settings.sites.items()}
    tokens = {name: secrets.token_hex(32) for name in settings.sites}
    server = join_address(settings.host, settings.port)
    with _run_lock(settings.home), flower.connect(server, ca, keys, secret) as transport:
        yield Federation(settings, transport, tokens, not engine.insecure)


@contextmanager
def _run_lock(home: Path) -> Iterator[None]:
    """One run at a time: a site works on one message after the other."""
    try:
        with FileLock(home / "run.lock", timeout=0):
            yield
    except Timeout:
        raise UserError(
            f"{home}: another run is on in this federation; this one can begin when it has ended"
        ) from None


@contextmanager
def remote_engine(
    stage: RemoteStage, federation: Federation, on_event: Callable[[Event], None]
) -> Iterator[tuple[RemoteEngine, dict[str, int]]]:
    """The engine over the sites of one stage, which have been greeted; and how many examples each has.

    Raises:
        UserError: too few of them take part.
    """
    job, names = stage.job, names_of(stage.job)
    plan = make_plan(job.method, stage.server.parts, job.task.kind, 0, names[0], Streams(job.train.seed))
    away = plan.away(stage.server.parts)
    sent = {part: tensors for part, tensors in stage.start.items() if part not in away}
    with ExitStack() as stack:
        server = None
        if stage.layers:
            server = stack.enter_context(_activation_server(stage.layers, federation, job.engine.deadline))
        engine = RemoteEngine(
            run=_remote_run(stage, names, sent, federation.tokens, server.port if server else 0),
            transport=federation.transport,
            deadline=job.engine.deadline,
            records=stage.records,
            on_event=on_event,
            activation_server=server,
        )
        absent = engine.gather()
        for site in absent:
            on_event(Missed(-1, site.client, site.reason))
        if len(engine.welcomes) < max(1, math.ceil(job.engine.quorum * len(names))):
            why = "; ".join(f"{site.client} {site.reason}" for site in absent)
            raise UserError(f"engine.quorum: is {job.engine.quorum:g} of {len(names)} sites, but {why}")
        yield engine, {name: engine.welcomes[name].examples if name in engine.welcomes else 0 for name in names}
        for site in engine.farewell(save=bool(plan.keep)):
            if plan.keep:
                reason = f"{site.reason} after the end, so its own model is not saved there"
                on_event(Missed(job.method.rounds - 1, site.client, reason))


def _activation_server(layers: ServerLayers, federation: Federation, deadline: float) -> ActivationServer:
    from fedstrata.sites.activation_server import ActivationServer

    settings = federation.settings
    tls = (settings.tls.certificate.read_bytes(), settings.tls.key.read_bytes()) if federation.secure else None
    return ActivationServer(
        layers, join_address(settings.bind, settings.stream_port), tls, deadline / SESSION_SHARE
    )


def _remote_run(
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

    def hello(name: str) -> bytes:
        stream = (port, tokens[name], job.engine.deadline) if port else None
        return encode_message(run_id, header.model_copy(update={"stream": stream}), {"files": files})

    return RemoteRun(
        id=run_id,
        names=names,
        hello=hello,
        start=partial(encode_message, run_id, StartHeader(), sent),
        check=partial(_check_reply, stage.server),
        tokens=tokens,
    )


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
