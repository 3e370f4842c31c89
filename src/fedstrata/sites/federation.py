"""A run between sites, at the server: what of a job changes, and the engine that reaches them."""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fedstrata.data.dealing import sort_labels
from fedstrata.data.prepare import Prepared
from fedstrata.errors import UserError
from fedstrata.events import Event, Missed
from fedstrata.job.tables import Engine, Job, method_name
from fedstrata.models import checkpoints
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import Streams
from fedstrata.runs.setup import Ready
from fedstrata.server import state
from fedstrata.server.layers import ServerLayers
from fedstrata.sites.engine import RemoteEngine, Transport
from fedstrata.sites.messages import HelloHeader, StartHeader, seal
from fedstrata.sites.serve import secret
from fedstrata.sites.settings import ServerSettings, address, loopback, read_server
from fedstrata.wire.codec import WireError, check
from fedstrata.wire.store import write_bytes

TABLES = ("task", "method", "train", "head", "wire")
"""Tables of a job that a site is told; it brings the others."""


SILENT = 4
"""A client in the middle of a batch may be silent for this part of the deadline: others wait for their turns."""


@dataclass(frozen=True)
class Federation:
    """The sites of a run, while it lasts.

    Attributes:
        settings: the server's.
        courier: brings messages to the sites.
        tokens: site -> what it is known by where batches pass through the server's layers.
        secure: TLS and keys are on.
    """

    settings: ServerSettings
    courier: Transport
    tokens: Mapping[str, str]
    secure: bool


def names_of(job: Job) -> list[str]:
    """The sites that the job's federation names, in canonical order."""
    return sort_labels(_settings(job.engine).sites)


def settle_sites(job: Job) -> Job:
    """Where the server has no test rows, each site keeps some of its own aside."""
    if not job.between_sites or job.data.test is not None or job.clients.test is not None:
        return job
    return job.model_copy(update={"clients": job.clients.model_copy(update={"test": job.data.holdout})})


def check_sites(job: Job, parts: Parts) -> None:
    """Refuse a job that cannot be run between sites.

    Raises:
        UserError: it needs all rows in one place, or scores at the server what only the sites have.
    """
    name = method_name(job.method)
    plan = job.method.plan(parts, job.task.kind, 0, names_of(job)[0], Streams(job.train.seed))
    if job.method.population != "each" or not (plan.send or plan.server or job.method.exchange == "hidden_states"):
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
        UserError: no server is there, another run is on, or this one is insecure and not on one machine.
    """
    from fedstrata.sites import flower

    settings = _settings(engine)
    if engine.insecure and not loopback(settings.host):
        raise UserError(f"[engine] insecure: is for this machine alone, and the server is {settings.host}")
    ca = None if engine.insecure else settings.tls.ca.read_bytes()
    known = secret(settings.home).read_bytes()
    keys = {} if engine.insecure else {flower.public_key(path): name for name, path in settings.sites.items()}
    tokens = {name: secrets.token_hex(32) for name in settings.sites}
    at = address(settings.host, settings.port)
    with _alone(settings.home), flower.courier(at, ca, keys, known) as courier:
        yield Federation(settings, courier, tokens, not engine.insecure)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One run at a time: a site works on one message after the other."""
    try:
        with FileLock(home / "run.lock", timeout=0):
            yield
    except Timeout:
        raise UserError(
            f"{home}: another run is on in this federation; this one can begin when it has ended"
        ) from None


@contextmanager
def sites(
    job: Job,
    data: Prepared,
    ready: Ready,
    start: Weights,
    layers: ServerLayers | None,
    folder: Path,
    tell: Callable[[Event], None],
    far: Federation,
) -> Iterator[tuple[RemoteEngine, dict[str, int]]]:
    """The sites of one stage, greeted; and how many examples each has.

    Raises:
        UserError: too few of them take part.
    """
    names = names_of(job)
    plan = job.method.plan(ready.worker.parts, job.task.kind, 0, names[0], ready.worker.streams)
    sent = {part: own for part, own in start.items() if part not in plan.server}
    files, run = _files(ready.loaded), _run(folder)
    header = HelloHeader(
        version=version("fedstrata"),
        stage=job.stage,
        job=_told(job, checkpoints.max_positions(ready.loaded.model)),
        long_text=job.data.long_text,
        share=job.clients.test or 0.0,
        labels=data.labels,
        start=state.fingerprint(sent),
    )
    with ExitStack() as stack:
        port, crossing = 0, None
        if layers:
            from fedstrata.sites.stream import ActivationServer

            crossing = stack.enter_context(
                ActivationServer(
                    layers,
                    address(far.settings.bind, far.settings.stream_port),
                    _identity(far.settings) if far.secure else None,
                    job.engine.deadline / SILENT,
                )
            )
            port = crossing.port

        def hello(name: str) -> bytes:
            stream = (port, far.tokens[name], job.engine.deadline) if crossing else None
            return seal(run, header.model_copy(update={"stream": stream}), {"files": files})

        engine = RemoteEngine(
            run=run,
            names=names,
            courier=far.courier,
            check=partial(_usable, ready.worker.parts, job.wire.dtype),
            hello=hello,
            start=partial(seal, run, StartHeader(), sent),
            deadline=job.engine.deadline,
            folder=folder,
            tell=tell,
            crossing=crossing,
            tokens=far.tokens,
        )
        absent = engine.gather()
        for missing in absent:
            tell(Missed(-1, missing.client, missing.reason))
        if len(engine.welcome) < max(1, math.ceil(job.engine.quorum * len(names))):
            why = "; ".join(f"{missing.client} {missing.reason}" for missing in absent)
            raise UserError(f"engine.quorum: is {job.engine.quorum:g} of {len(names)} sites, but {why}")
        yield engine, {name: engine.welcome[name].examples if name in engine.welcome else 0 for name in names}
        engine.farewell(save=bool(plan.keep))


def _usable(parts: Parts, dtype: str, request: Request, reply: Reply) -> None:
    """Refuse a reply that must not get into the mean.

    Raises:
        WireError: it trained to a loss that is no number, or does not send what the plan says.
    """
    if request.phase == "train":
        if not math.isfinite(reply.loss):
            raise WireError(f"diverged (loss {reply.loss}); a smaller train.learning_rate helps")
        for part in request.plan.send:
            try:
                check(reply.weights.get(part, {}), parts.shapes[part], dtype)
            except WireError as error:
                raise WireError(f"sends what cannot be used: {part}: {error}") from None


def _told(job: Job, longest: int) -> dict[str, Any]:
    """Of the job what a site is told."""
    tables = job.dump()
    made = {table: tables[table] for table in TABLES}
    made["train"]["max_tokens"] = min(job.train.max_tokens, longest)
    return made


def _files(loaded: checkpoints.Loaded) -> dict[str, torch.Tensor]:
    """Name -> content of the files of a model's folder that hold no weights, as bytes."""
    with tempfile.TemporaryDirectory() as made:
        loaded.model.config.save_pretrained(made)
        loaded.tokenizer.save_pretrained(made)
        return {
            path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for path in sorted(Path(made).iterdir())
        }


def _run(folder: Path) -> str:
    """The name under which the sites know the stage; the same when it is resumed."""
    path = folder / "state" / "run"
    if not path.exists():
        write_bytes(path, secrets.token_hex(16).encode())
    return path.read_text()


def _identity(settings: ServerSettings) -> tuple[bytes, bytes]:
    return settings.tls.certificate.read_bytes(), settings.tls.key.read_bytes()
