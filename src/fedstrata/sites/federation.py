"""A run between sites, at the server: checks of its job, its federation, and the engine over the sites."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from fedstrata.errors import UserError
from fedstrata.events import Event, Missed, Noted
from fedstrata.exchanges import EXCHANGES
from fedstrata.job.engine_table import Engine
from fedstrata.job.tables import Job, method_name
from fedstrata.plan.labels import sort_labels
from fedstrata.plan.messages import NoReply
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server.cohort import why_missing
from fedstrata.server.layers import ServerLayers
from fedstrata.sites.admission import Admission
from fedstrata.sites.buffered_engine import BufferedRemoteEngine
from fedstrata.sites.certificates import SERVER_THEN, check_server, ends_soon
from fedstrata.sites.checks import join_address, loopback
from fedstrata.sites.control_secret import read_secret
from fedstrata.sites.engine import RemoteEngine, Transport
from fedstrata.sites.remote_run import RemoteStage, remote_run
from fedstrata.sites.reply_checks import weight_notes
from fedstrata.sites.run_record import RUN_LOCK
from fedstrata.sites.settings import ServerSettings, read_server

if TYPE_CHECKING:  # these need gRPC, an extra
    from fedstrata.sites.activation_server import ActivationServer
    from fedstrata.sites.listening import ServerTLS

LOCK_SECONDS = 0.3
"""For which a run waits for its lock: whoever looks whether a run is on holds it for a moment."""
SESSION_SHARE = 4
"""A client may keep the activation server waiting for a quarter of the deadline: others wait for their turns."""


@dataclass(frozen=True)
class Federation:
    """The sites of a run, while it is connected to them.

    Attributes:
        settings: the server's.
        transport: carries messages to the sites.
        tokens: site -> its token for messages and for the activation stream.
        secure: TLS and keys are on.
    """

    settings: ServerSettings
    transport: Transport
    tokens: Mapping[str, str]
    secure: bool

    @property
    def names(self) -> list[str]:
        """The sites' names, in canonical order: those of the beginning, whatever ``server.toml`` says since."""
        return sort_labels(self.settings.sites)


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
    if plan.keep and job.privacy.level != "none":
        raise UserError(
            f"[privacy] level: with {name} each site has a model of its own, which it alone can score, and no "
            "noise covers its scores; expected a method that sends all that it trains, or level = 'none'"
        )
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
    from fedstrata.sites.message_server import MessageServer
    from fedstrata.sites.transport import SiteTransport

    settings = _settings(engine)
    if engine.insecure and not loopback(settings.host):
        raise UserError(f"[engine] insecure: is for this machine alone, and the server is {settings.host}")
    if not engine.insecure:
        check_server(settings)
    ca = None if engine.insecure else settings.tls.ca.read_bytes()
    secret = read_secret(settings.home)
    keys = {} if engine.insecure else {flower.public_key(path): name for name, path in settings.sites.items()}
    tokens = {name: secrets.token_hex(32) for name in settings.sites}
    server = join_address(settings.host, settings.port)
    listen = join_address(settings.bind, settings.message_port)
    with (
        _run_lock(settings.home),
        flower.connect(server, ca, keys, secret) as caller,
        MessageServer(listen, _tls(settings, not engine.insecure), tokens, settings.home) as messages,
    ):
        admission = Admission(settings, None if engine.insecure else settings.home / "server.toml")
        transport = SiteTransport(caller, messages, tokens, admission.revoked)
        yield Federation(settings, transport, tokens, not engine.insecure)


def _tls(settings: ServerSettings, secure: bool) -> ServerTLS | None:
    """The server's certificate and its key, and the CA of the sites' certificates where they must have some."""
    tls = settings.tls
    files = [tls.certificate, tls.key, *([tls.clients] if tls.clients else [])]
    return tuple(path.read_bytes() for path in files) if secure else None


@contextmanager
def _run_lock(home: Path) -> Iterator[None]:
    """One run at a time: a site works on one message after the other."""
    try:
        with FileLock(home / RUN_LOCK, timeout=LOCK_SECONDS):
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
    job, names = stage.job, federation.names
    plan = make_plan(job.method, stage.server.parts, job.task.kind, 0, names[0], Streams(job.train.seed))
    away = plan.away(stage.server.parts)
    most_weight = _most_weight(job, federation.settings, names)
    sent = {part: tensors for part, tensors in stage.start.items() if part not in away}
    with ExitStack() as stack:
        server = None
        if stage.layers:
            server = stack.enter_context(_activation_server(stage.layers, federation, job.engine.deadline))
        engine = _kind(job)(
            run=remote_run(stage, names, sent, federation.tokens, server.port if server else 0, most_weight),
            transport=federation.transport,
            deadline=job.engine.deadline,
            records=stage.records,
            on_event=on_event,
            activation_server=server,
        )
        engine.agreed.update({name: stage.agreed[name] for name in names if name in stage.agreed})
        own = federation.settings.tls.certificate
        if federation.secure and (words := ends_soon(own, own.read_bytes(), SERVER_THEN)):
            on_event(Noted(words))
        on_event(Noted(f"job {engine.run.agreement}; a site that lists its jobs has this in [approve] jobs"))
        absent = engine.gather()
        engine.own_start = frozenset(name for name, welcome in engine.welcomes.items() if welcome.own)
        for site in absent:
            on_event(Missed(-1, site.client, site.reason))
        _check_quorum(job, len(engine.welcomes), len(names), absent)
        engine.greeted = _weights_told(names, most_weight, job.privacy.level, on_event)  # also of who comes late
        engine.greeted(engine.agreed)
        yield engine, {name: engine.welcomes[name].examples if name in engine.welcomes else 0 for name in names}
        for site in engine.farewell(save=bool(plan.keep)):
            if plan.keep:
                reason = f"{site.reason} after the end, so its own model is not saved there"
                on_event(Missed(job.method.rounds - 1, site.client, reason))


def _most_weight(job: Job, settings: ServerSettings, names: Sequence[str]) -> Mapping[str, int]:
    """Site -> most examples for which it counts; at level ``client`` one, whatever it says of itself."""
    return dict.fromkeys(names, 1) if job.privacy.level == "client" else settings.most_weight


def _weights_told(
    names: Sequence[str], most_weight: Mapping[str, int], level: str, on_event: Callable[[Event], None]
) -> Callable[[Mapping[str, int]], None]:
    """Tells each sentence of :func:`weight_notes` once, whenever a site has been greeted."""
    told = set[str]()

    def tell(agreed: Mapping[str, int]) -> None:
        examples = {name: agreed[name] for name in names if name in agreed}
        for sentence in weight_notes(examples, most_weight, level):
            if sentence not in told:
                told.add(sentence)
                on_event(Noted(sentence))

    return tell


def _kind(job: Job) -> type[RemoteEngine]:
    return RemoteEngine if job.engine.buffer is None else BufferedRemoteEngine


def _check_quorum(job: Job, there: int, asked: int, absent: Sequence[NoReply]) -> None:
    if there < max(1, math.ceil(job.engine.quorum * asked)):
        raise UserError(
            f"engine.quorum: is {job.engine.quorum:g} of {asked} sites, but {why_missing(absent)}; --resume asks "
            "them again, and another job takes another folder (output.dir=...)"
        )


def _activation_server(layers: ServerLayers, federation: Federation, deadline: float) -> ActivationServer:
    from fedstrata.sites.activation_server import ActivationServer

    settings = federation.settings
    address = join_address(settings.bind, settings.stream_port)
    return ActivationServer(layers, address, _tls(settings, federation.secure), deadline / SESSION_SHARE)
