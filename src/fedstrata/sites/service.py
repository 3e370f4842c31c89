"""What a site does with the server's messages: it decides, keeps, trains, answers."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedstrata.client.trainer import StepCallback
from fedstrata.cost.bytes import payload
from fedstrata.data.prepare import prepare_own
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.tables import Job, method_name
from fedstrata.models import checkpoints
from fedstrata.models.cut import SplitLink
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import Streams
from fedstrata.runs.setup import SENT, Ready, head_of, make_ready, settle
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
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site import Site
from fedstrata.wire.codec import WireError, check
from fedstrata.wire.store import write_bytes, write_tensors

LOG = logging.getLogger("fedstrata.site")
FILES = re.compile(r"[\w-]+\.(json|txt|model|jinja)")
"""What a model's folder may hold beside its weights: nothing that runs."""

Reach = Callable[[Request, int, str, float], AbstractContextManager[SplitLink]]
"""Makes the way to the server's layers: for a request, to a port, under a token, with a deadline in seconds."""


class Refused(Exception):
    """A sentence without its subject; it holds nothing of the site's own but what its settings say."""


@dataclass
class SiteRun:
    """A site's part in one run.

    Attributes:
        hello: how the run began.
        job: the run's job, with the site's rows and device.
        ready: its model and examples; None until the start model is here.
        site: answers requests.
    """

    hello: HelloHeader
    job: Job
    ready: Ready | None = None
    site: Site | None = None


@dataclass
class SiteService:
    """A site between the runs and in them.

    Attributes:
        settings: of the site.
        told: called after every step.
        reach: makes the way to the server's layers; None where there is none.
    """

    settings: SiteSettings
    told: StepCallback = lambda step, steps, loss, seen: None
    reach: Reach | None = None
    seats: dict[str, SiteRun] = field(default_factory=dict)

    def answer(self, message: bytes) -> bytes:
        """The answer to a message; nothing that goes wrong here is told there but in words of this file.

        An empty message asks for the site's name.
        """
        if not message:
            return self.settings.name.encode()
        run = ""
        try:
            envelope = decode_message(message, "hello", "start", "request", "farewell")
            run = envelope.run
            if not re.fullmatch(r"[0-9a-f]{32}", run):
                raise WireError("run: must be 32 hexadecimal digits")
            del message  # what it holds is held once
            return self._answer(envelope)
        except Refused as error:
            LOG.warning("run %s: refused: %s", run, error)
            return encode_message(run, RefusalHeader(reason=f"refuses: {error}", final=True))
        except WireError as error:
            LOG.warning("run %s: cannot do what it is asked: %s", run, error)
            return encode_message(
                run, RefusalHeader(reason=f"cannot do what it is asked: {error}"[:1000], final=False)
            )
        except UserError as error:
            LOG.error("run %s: %s", run, error)
            return encode_message(run, _failed("its data, model or device cannot be used; its own log says why"))
        except Exception as error:
            LOG.exception("run %s", run)
            return encode_message(run, _failed(f"{type(error).__name__}; its own log says more"))

    def _answer(self, envelope: Envelope) -> bytes:
        run, header, weights = envelope.run, envelope.header, envelope.weights
        if isinstance(header, HelloHeader):
            return encode_message(run, self._greeted(run, header, weights))
        seat = self._set_parameters(run)
        if isinstance(header, StartHeader):
            return encode_message(run, self._begin(run, seat, weights))
        if isinstance(header, FarewellHeader):
            return encode_message(run, self._end(run, seat, header.save))
        site = self._site(run, seat)
        request = decode_request(envelope)
        LOG.info("run %s: round %d: %s", run, request.round, request.phase)
        return encode_reply(run, site.answer(request))

    def _greeted(self, run: str, hello: HelloHeader, files: Weights) -> Header:
        if hello.version != (here := version("fedstrata")):
            raise Refused(f"its FedStrata is {here}, the server's {hello.version}")
        folder = self._folder(run)
        job = self._job(hello, folder)
        self._permit(job)
        for name, content in files.get("files", {}).items():
            text = content.numpy().tobytes()
            if not FILES.fullmatch(name) or (name.endswith(".json") and "auto_map" in json.loads(text)):
                raise Refused(f"the model comes with code of its own ({name})")
            write_bytes(folder / "start" / name, text)
        write_bytes(folder / "hello", encode_message(run, hello))
        self.seats = {run: SiteRun(hello, job)}  # of other runs nothing stays in memory
        LOG.info("run %s: %s, %s", run, hello.stage or "one stage", method_name(job.method))
        return self._welcome(run, self.seats[run])

    def _job(self, hello: HelloHeader, folder: Path) -> Job:
        """The server's job over the site's own rows and device; of ``[data]`` the server says one key alone."""
        own, sent = self.settings, hello.job
        data = {key: value for key, value in own.data.model_dump().items() if value is not None}
        if hello.long_text is not None:
            data["long_text"] = hello.long_text
        clients = {"test": hello.share} if hello.share and own.data.test is None else {}
        task = {**sent.get("task", {}), "labels": None if hello.labels is None else list(hello.labels)}
        train = {**sent.get("train", {}), "device": own.device.name}
        job: dict[str, Any] = {
            "model": {"name": str(folder / "start")},
            "task": task,
            "data": data,
            "clients": {"count": 1, **clients},
            "train": train,
            **{table: sent[table] for table in ("method", "head", "wire") if table in sent},
        }
        return settle(load(job)[0])

    def _permit(self, job: Job) -> None:
        allow = self.settings.allow
        name, exchange = method_name(job.method), job.method.exchange
        if allow.methods is not None and name not in allow.methods:
            raise Refused(f"{name} is none of the methods it takes part in ({', '.join(allow.methods)})")
        if exchange not in allow.payloads:
            raise Refused(
                f"{name} sends {exchange} ({SENT[exchange]}); nothing leaves it but {', '.join(allow.payloads)}"
            )
        if job.method.population != "each":
            raise Refused(f"{name} is not for clients apart")

    def _welcome(self, run: str, seat: SiteRun) -> WelcomeHeader:
        """What it has for the run; with the start model it is ready to train."""
        holds = (self._folder(run) / "start" / "model.safetensors").exists()
        if not holds:
            return WelcomeHeader(examples=0, holds=False)
        site = self._site(run, seat)
        return WelcomeHeader(examples=len(site.own), holds=True)

    def _begin(self, run: str, seat: SiteRun, weights: Weights) -> Header:
        folder = self._folder(run) / "start"
        parts = checkpoints.parts_of(str(folder), seat.job.task.kind, seat.hello.labels, head_of(seat.job))
        away = self._away(seat, parts)
        due = {part: shapes for part, shapes in parts.shapes.items() if part not in away}
        for part, shapes in due.items():
            check(weights.get(part, {}), shapes, "fp32")
        in_order = {part: {name: weights[part][name] for name in shapes} for part, shapes in due.items()}
        if fingerprint(in_order) != seat.hello.start:
            raise WireError("start model: is not the one that was announced")
        write_tensors(folder / "model.safetensors", {n: t for own in weights.values() for n, t in own.items()})
        return self._welcome(run, seat)

    def _site(self, run: str, seat: SiteRun) -> Site:
        if seat.site is None:
            folder = self._folder(run)
            start = str(folder / "start")
            parts = checkpoints.parts_of(start, seat.job.task.kind, seat.hello.labels, head_of(seat.job))
            data = prepare_own(seat.job, self.settings.name, self.settings.home)
            seat.ready = ready = make_ready(seat.job, data, start, self._away(seat, parts))
            name = self.settings.name
            tests = ready.tests.get(name, {})
            seat.site = Site(
                name=name,
                method=seat.job.method,
                kind=seat.job.task.kind,
                worker=ready.worker,
                train=ready.train,
                own=ready.shards[name],
                test=ready.test,
                tested=tests[name] if tests else ready.shards[name][:0],
                folder=folder,
                start=folder / "start" / "model.safetensors",
                limit=self.settings.limits.bytes_per_round,
                told=self.told,
                reach=self._reach(seat),
            )
            self._enough(seat)
        return seat.site

    def _enough(self, seat: SiteRun) -> None:
        assert seat.site is not None
        limits, count = self.settings.limits, len(seat.site.own)
        if count < limits.min_examples:
            raise Refused(f"it has fewer examples than the {limits.min_examples} it wants to train on")
        worker, method = seat.site.worker, seat.job.method
        for round in range(method.rounds):
            plan = method.plan(worker.parts, seat.job.task.kind, round, self.settings.name, worker.streams)
            leaves = payload(worker.parts, plan.send, worker.dtype)
            if limits.bytes_per_round is not None and leaves > limits.bytes_per_round:
                raise Refused(f"round {round} sends {leaves} bytes, its limit is {limits.bytes_per_round}")

    def _reach(self, seat: SiteRun) -> Callable[[Request], AbstractContextManager[SplitLink]] | None:
        reach, stream = self.reach, seat.hello.stream
        if stream is None:
            return None
        if reach is None:
            raise Refused("it has no way to send hidden states")
        return lambda request: reach(request, *stream)

    def _away(self, seat: SiteRun, parts: Parts) -> tuple[str, ...]:
        """The layers that the server holds."""
        job = seat.job
        return job.method.plan(parts, job.task.kind, 0, self.settings.name, Streams(job.train.seed)).server

    def _end(self, run: str, seat: SiteRun, save: bool) -> Header:
        made = self._welcome(run, seat)
        if save:
            site, ready = self._site(run, seat), seat.ready
            assert ready is not None
            weights = {n: t for own in site.model(seat.job.method.rounds).values() for n, t in own.items()}
            target = self.settings.folder / "models" / run
            checkpoints.save(ready.loaded, weights, target)
            LOG.info("run %s: this site's own model is in %s", run, target)
        del self.seats[run]
        shutil.rmtree(self._folder(run), ignore_errors=True)
        LOG.info("run %s: over", run)
        return made

    def _set_parameters(self, run: str) -> SiteRun:
        """The seat of a run, read again from the disk where this program has started since."""
        if run not in self.seats:
            path = self._folder(run) / "hello"
            if not path.exists():
                raise WireError("this run is not known here")
            hello = decode_message(path.read_bytes(), "hello").header
            assert isinstance(hello, HelloHeader)
            self.seats = {run: SiteRun(hello, self._job(hello, self._folder(run)))}
            self._permit(self.seats[run].job)  # its settings may have changed
        return self.seats[run]

    def _folder(self, run: str) -> Path:
        return self.settings.folder / "runs" / run


def _failed(reason: str) -> RefusalHeader:
    """It may be mended while the run goes on, so it is not final."""
    return RefusalHeader(reason=f"failed: {reason}", final=False)
