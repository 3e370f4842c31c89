"""What a site does with the server's messages: it decides, keeps, trains, answers."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from fedstrata.client.answer import ClientData
from fedstrata.client.facts import facts_and_lines
from fedstrata.client.model_options import adapter_of, head_of
from fedstrata.client.setup import Ready, make_ready
from fedstrata.client.trainer import StepCallback
from fedstrata.data.fingerprint import fingerprints
from fedstrata.data.prepare import data_notes, prepare_own
from fedstrata.errors import UserError
from fedstrata.job.tables import Job, method_name
from fedstrata.models import checkpoints
from fedstrata.models.cut import SplitLink
from fedstrata.models.quiet import quiet
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server.journal import Journal
from fedstrata.server.state import fingerprint
from fedstrata.sites.headers import Header
from fedstrata.sites.messages import (
    Envelope,
    FarewellHeader,
    HelloHeader,
    RefusalHeader,
    StartHeader,
    WelcomeHeader,
    decode_message,
    decode_request,
    encode_message,
    encode_reply,
)
from fedstrata.sites.own_model import save_own_model
from fedstrata.sites.own_state import START, check_own, open_journal, write_journal
from fedstrata.sites.permission import Refused, check_limits, own_component, permit
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site import Reach, Site
from fedstrata.sites.site_job import site_job
from fedstrata.wire.codec import WireError, check, wire_spec
from fedstrata.wire.files import clear, write_bytes
from fedstrata.wire.store import Store
from fedstrata.wire.tensor_file import TensorFile

LOG = logging.getLogger("fedstrata.site")
FILES = re.compile(r"[\w-]+\.(json|txt|model|jinja)")
"""What a model's folder may hold beside its weights: nothing that runs."""

OWN_FILES = ("hello", "rows.json", "journal.jsonl", "*.safetensors", ".*.part", "features.f32", "features.json")
"""What a site itself writes into a run's folder, beside the files of the start model."""

MOST_FILE_BYTES = 1 << 28
"""Of the files that come with the first message: settings and vocabulary of a model, not its weights."""
WIDEST = 8
"""Bytes of a parameter in a request, at most: fp32, or what an own codec may make of it."""

ReachServer = Callable[[Request, int, str, float], AbstractContextManager[SplitLink]]
"""Opens the way to the server's layers: for a request, to a port, with a token, with a deadline in seconds."""


@dataclass
class SiteRun:
    """A site's part in one run.

    Attributes:
        hello: how the run began.
        job: the run's job, with the site's rows and device.
        journal: of what the site keeps of the run.
        ready: its model and examples; None until the start model is here.
        site: answers requests.
    """

    hello: HelloHeader
    job: Job
    journal: Journal
    ready: Ready | None = None
    site: Site | None = None


@dataclass
class SiteService:
    """A site between the runs and in them.

    Attributes:
        settings: of the site.
        callback: called after every step.
        reach: opens the way to the server's layers; None where there is none.
    """

    settings: SiteSettings
    callback: StepCallback = lambda step, steps, loss, seen: None
    reach: ReachServer | None = None
    runs: dict[str, SiteRun] = field(default_factory=dict)

    def admit(self, metadata: Mapping[str, str], size: int) -> None:
        """Refuse a message with more bytes of tensors than it can need, before they are received.

        Raises:
            Exception: as when the message is answered; :meth:`refuse` says so to the server.
        """
        limit = MOST_FILE_BYTES
        if metadata.get("kind") in ("start", "request"):
            name = metadata.get("run", "")
            _check_name(name)
            run = self._run(name)
            shapes = self._parts(run, self._folder(name) / "start").shapes.values()
            limit = sum(WIDEST * math.prod(shape) for own in shapes for shape in own.values())
        if size > limit:
            raise WireError(f"its tensors have {size} bytes, at most {limit} are taken")

    @quiet()
    def answer(self, message: bytes | TensorFile) -> TensorFile:
        """The answer to a message; what goes wrong here is reported there in words of this file alone."""
        run = ""
        try:
            envelope = decode_message(message, "hello", "start", "request", "farewell")
            run = envelope.run
            _check_name(run)
            del message  # so that its content is freed as early as can be
            return self._answer(envelope)
        except Exception as error:
            return self.refuse(run, error)

    def refuse(self, run: str, error: Exception) -> TensorFile:
        """The answer to a message that cannot be answered, in words of this file alone."""
        if isinstance(error, Refused):
            LOG.warning("run %s: refused: %s", run, error)
            refusal = RefusalHeader(reason=f"refuses: {error}", final=True)
        elif isinstance(error, WireError):
            LOG.warning("run %s: cannot do what it is asked: %s", run, error)
            refusal = RefusalHeader(reason=f"cannot do what it is asked: {error}"[:1000], final=False)
        elif isinstance(error, UserError):
            LOG.error("run %s: %s", run, error)
            refusal = _failed("its data, model or device cannot be used; its own log says why")
        else:
            LOG.error("run %s", run, exc_info=error)
            refusal = _failed(f"{type(error).__name__}; its own log says more")
        return encode_message(run, refusal)

    def _answer(self, envelope: Envelope) -> TensorFile:
        name, header, weights = envelope.run, envelope.header, envelope.weights
        if isinstance(header, HelloHeader):
            return encode_message(name, self._greet(name, header, weights))
        run = self._run(name)
        if isinstance(header, StartHeader):
            return encode_message(name, self._take_start(name, run, weights))
        if isinstance(header, FarewellHeader):
            return encode_message(name, self._end(name, run, header.save))
        site = self._site(name, run)
        request = decode_request(envelope)
        LOG.info("run %s: round %d: %s", name, request.round + 1, request.phase)
        reply = site.answer(request)
        write_journal(self._folder(name), run.journal)
        return encode_reply(name, reply)

    def _greet(self, name: str, hello: HelloHeader, files: Weights) -> Header:
        if hello.version != (here := version("fedstrata")):
            raise Refused(f"its FedStrata is {here}, the server's {hello.version}")
        folder = self._folder(name)
        job = site_job(self.settings, hello, folder)
        permit(self.settings, job)
        for file, content in files.get("files", {}).items():
            text = content.numpy().tobytes()
            if not FILES.fullmatch(file) or (file.endswith(".json") and "auto_map" in json.loads(text)):
                raise Refused(f"the model comes with code of its own ({file})")
            write_bytes(folder / "start" / file, text)
        write_bytes(folder / "hello", bytes(encode_message(name, hello)))
        self.runs = {name: SiteRun(hello, job, open_journal(folder))}  # of other runs nothing stays in memory
        LOG.info("run %s: %s, %s", name, hello.stage or "one stage", method_name(job.method))
        return self._welcome(name, self.runs[name])

    def _welcome(self, name: str, run: SiteRun) -> WelcomeHeader:
        """What it has for the run; with the start model it is ready to train."""
        holds = (self._folder(name) / "start" / "model.safetensors").exists()
        if not holds:
            return WelcomeHeader(examples=0, holds=False)
        site = self._site(name, run)
        return WelcomeHeader(examples=len(site.data.index), holds=True)

    def _take_start(self, name: str, run: SiteRun, weights: Weights) -> Header:
        folder = self._folder(name) / "start"
        parts = self._parts(run, folder)
        server = self._server_parts(run, parts)
        shapes = {part: own for part, own in parts.shapes.items() if part not in server}
        for part, own in shapes.items():
            check(weights.get(part, {}), wire_spec(own, "fp32"))
        in_order = {part: {tensor: weights[part][tensor] for tensor in own} for part, own in shapes.items()}
        if fingerprint(in_order) != run.hello.start:
            raise WireError("start model: is not the one that was announced")
        store = Store(folder.parent, run.journal.note)
        store.write(START, {n: t for own in weights.values() for n, t in own.items()})
        write_journal(folder.parent, run.journal)
        return self._welcome(name, run)

    def _site(self, name: str, run: SiteRun) -> Site:
        if run.site is None:
            folder = self._folder(name)
            start = folder / "start"
            data = prepare_own(run.job, self.settings.name, self.settings.home)
            for note in data_notes(run.job, data):
                LOG.info("%s", note)
            check_own(folder, run.journal, fingerprints(data))
            server = self._server_parts(run, self._parts(run, start))
            task = own_component(run.hello, "task", None) if "task" in run.hello.components else None
            codec = own_component(run.hello, "codec", {}) if "codec" in run.hello.components else None
            run.ready = make_ready(run.job, data, str(start), server, task, codec)
            run.site = Site(
                name=self.settings.name,
                method=run.job.method,
                task=run.job.task.kind,
                runtime=run.ready.runtime,
                data=self._data(run.ready, Store(folder, run.journal.note)),
                folder=folder,
                start=start / "model.safetensors",
                limit=self.settings.limits.bytes_per_round,
                callback=self.callback,
                reach=self._reach(run),
            )
            check_limits(self.settings, run.site)
            for line in facts_and_lines(run.job, data, run.ready)[1]:
                LOG.info("run %s: data: %s", name, line)
        return run.site

    def _data(self, ready: Ready, store: Store) -> ClientData:
        """The site's examples; it is scored on test rows of its own or not at all."""
        name = self.settings.name
        index = ready.shards[name]
        tests = {name: ready.tests.get(name, {}).get(name, index[:0])}
        return ClientData(ready.train, index, ready.test, tests, store)

    def _parts(self, run: SiteRun, start: Path) -> Parts:
        job, labels = run.job, run.hello.labels
        return checkpoints.parts_of(str(start), job.task.kind, labels, head_of(job), adapter_of(job))

    def _reach(self, run: SiteRun) -> Reach | None:
        reach, stream = self.reach, run.hello.stream
        if stream is None:
            return None
        if reach is None:
            raise Refused("it has no way to send hidden states")
        return lambda request: reach(request, *stream)

    def _server_parts(self, run: SiteRun, parts: Parts) -> tuple[str, ...]:
        """The parts that the server holds."""
        job = run.job
        streams = Streams(job.train.seed)
        return make_plan(job.method, parts, job.task.kind, 0, self.settings.name, streams).away(parts)

    def _end(self, name: str, run: SiteRun, save: bool) -> Header:
        welcome = self._welcome(name, run)
        if save:
            site, ready = self._site(name, run), run.ready
            assert ready is not None
            target = self.settings.folder / "models" / name
            save_own_model(site, ready, run.job.method.rounds, target)
            LOG.info("run %s: this site's own model is in %s", name, target)
        del self.runs[name]
        clear(self._folder(name) / "start", ("*.json", "*.txt", "*.model", "*.jinja"))
        clear(self._folder(name), OWN_FILES)
        LOG.info("run %s: over", name)
        return welcome

    def _run(self, name: str) -> SiteRun:
        """A run, read again from the disk where this program has started since."""
        if name not in self.runs:
            folder = self._folder(name)
            path = folder / "hello"
            if not path.exists():
                raise WireError("this run is not known here")
            hello = decode_message(path.read_bytes(), "hello").header
            assert isinstance(hello, HelloHeader)
            self.runs = {name: SiteRun(hello, site_job(self.settings, hello, folder), open_journal(folder))}
            permit(self.settings, self.runs[name].job)  # its settings may have changed
        return self.runs[name]

    def _folder(self, name: str) -> Path:
        return self.settings.folder / "runs" / name


def _check_name(run: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{32}", run):
        raise WireError("run: must be 32 hexadecimal digits")


def _failed(reason: str) -> RefusalHeader:
    """It may be mended while the run goes on, so it is not final."""
    return RefusalHeader(reason=f"failed: {reason}", final=False)
