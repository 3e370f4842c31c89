"""What a site does with the server's messages: it decides, keeps, trains, answers."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedstrata.client.sums import SUM_FILES
from fedstrata.client.trainer import StepCallback
from fedstrata.errors import TokenizerError, UserError
from fedstrata.events import Answered, Asked, Declined, RunEnded, SiteEvent
from fedstrata.job.tables import method_name
from fedstrata.models.quiet import quiet
from fedstrata.plan.kinds import Weights
from fedstrata.server.state import fingerprint
from fedstrata.sites.answers import FILES as ANSWER_FILES
from fedstrata.sites.answers import Answers
from fedstrata.sites.approval import FILE, Ask, approve, content_of, has_leave, job_digest
from fedstrata.sites.gate import Gate
from fedstrata.sites.greeting import (
    DIGEST,
    HELLO,
    RUN_NAME,
    START_FILES,
    Trial,
    agree,
    check_name,
    check_same,
    check_same_examples,
    kept_job,
    made_by,
    open_message,
    start_files,
    write_start,
)
from fedstrata.sites.messages import (
    Envelope,
    FarewellHeader,
    HelloHeader,
    RefusalHeader,
    StartHeader,
    WelcomeHeader,
    decode_request,
    encode_message,
    metadata_of,
)
from fedstrata.sites.model_files import check_files
from fedstrata.sites.noise_account import check_account
from fedstrata.sites.own_model import save_own_model
from fedstrata.sites.own_start import MARK, is_own, take_own_start
from fedstrata.sites.own_state import ROWS, START, holds_start, open_journal, write_journal
from fedstrata.sites.permission import NotNow, Refused, check_job, permit
from fedstrata.sites.release_log import ReleaseLog, now
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site import Site
from fedstrata.sites.site_job import site_job
from fedstrata.sites.site_run import Hooks, ReachServer, SiteRun, keeps_own, make_site, parts_of, server_parts
from fedstrata.sites.trial import try_run
from fedstrata.wire.codec import WireError, check, wire_spec
from fedstrata.wire.files import clear, write_bytes
from fedstrata.wire.foreign import plain_text
from fedstrata.wire.store import Store
from fedstrata.wire.tensor_file import TensorFile

LOG = logging.getLogger("fedstrata.site")
OWN_FILES = (
    *(MARK, HELLO, DIGEST, FILE, ROWS, "journal.jsonl", "*.safetensors", ".*.part"),
    *("features.*", "noise.*", *SUM_FILES),
)
"""What a site itself writes into a run's folder, beside its answers and the files of the start model."""

MOST_FILE_BYTES = 1 << 28
"""Of the files that come with the first message: settings and vocabulary of a model, not its weights."""
MOST_REFUSALS = 1000
"""Refusals within 24 hours beyond which all have the same words, and so one line of the log for good."""
WIDEST = 8
"""Bytes of a parameter in a request, at most: fp32, or what an own codec may make of it."""


@dataclass
class SiteService:
    """A site between the runs and in them.

    Attributes:
        settings: of the site.
        callback: called after every step.
        reach: opens the way to the server's layers; None where there is none.
        ask: asks the site's owner; None where there is no terminal.
        trial: tries a run in a process of its own; None tries nothing.
        tell: receives events.
        gate: through which everything leaves.
        made: the last run that has leave -> by what its examples are made; answers to it may tell of them.

    Raises:
        UserError: the site's release log is damaged, or its account of noise lacks what has left.
    """

    settings: SiteSettings
    callback: StepCallback = lambda step, steps, loss, seen: None
    reach: ReachServer | None = None
    ask: Ask | None = None
    trial: Trial | None = try_run
    tell: Callable[[SiteEvent], None] = lambda event: None
    runs: dict[str, SiteRun] = field(default_factory=dict)
    gate: Gate = field(init=False)
    made: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = Gate(self.settings.limits, ReleaseLog(self.settings.folder))
        check_account(self.settings.folder, self.gate.log.noisy)

    def admit(self, metadata: Mapping[str, str], size: int) -> None:
        """Refuse a message with more bytes of tensors than it can need, before they are received.

        Raises:
            Exception: as when the message is answered; :meth:`refuse` says so to the server.
        """
        limit, name = MOST_FILE_BYTES, metadata.get("run", "")
        if metadata.get("kind") in ("start", "request"):
            check_name(name)
            shapes = parts_of(self._run(name)).shapes.values()
            limit = sum(WIDEST * math.prod(shape) for own in shapes for shape in own.values())
            self.gate.check_disk(self._folder(name), min(size, limit))
        if size > limit:
            raise WireError(f"its tensors have {size} bytes, at most {limit} are taken")

    @quiet()
    def answer(self, message: bytes | TensorFile) -> TensorFile:
        """The answer to a message; what goes wrong here is reported there in words of this file alone."""
        run = metadata_of(message).get("run", "")
        try:
            envelope = open_message(message, "hello", "start", "request", "farewell")
            del message  # so that its content is freed as early as can be
            return self._answer(envelope)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library tokenizers is no Exception
            return self.refuse(run, error)

    def refuse(self, run: str, error: BaseException) -> TensorFile:
        """The answer to a message that cannot be answered, in words of this file alone."""
        run, said = run if re.fullmatch(RUN_NAME, run) else "", plain_text(str(error))
        if isinstance(error, Refused):
            LOG.warning("run %s: refused: %s", run, said)
            refusal = RefusalHeader(reason=plain_text(f"refuses: {said}"), final=not isinstance(error, NotNow))
        elif isinstance(error, WireError):
            LOG.warning("run %s: cannot do what it is asked: %s", run, said)
            refusal = RefusalHeader(reason=plain_text(f"cannot do what it is asked: {said}"), final=False)
        elif isinstance(error, UserError) and not isinstance(error, TokenizerError):
            LOG.error("run %s: %s", run, said)
            refusal = _failed("its data, model or device cannot be used; its own log says why")
        else:
            LOG.error("run %s", run, exc_info=error)
            what = type(error.__cause__ if isinstance(error, TokenizerError) else error).__name__
            if isinstance(error, OSError) and error.errno:
                what += f" ({os.strerror(error.errno)})"  # a library's own words may name paths
            refusal = _failed(f"{what}; its own log says more")
        named = run
        if self.gate.log.refusals_today(now()) >= MOST_REFUSALS:
            many = f"it has refused {MOST_REFUSALS} messages within 24 hours; its own log says why"
            named, refusal = "", _failed(many)
        self.tell(Declined(named, refusal.reason))
        return self.gate.release(encode_message(named, refusal), run, -1, "refusal", examples=self.made.get(run))

    def _answer(self, envelope: Envelope) -> TensorFile:
        name, header, weights = envelope.run, envelope.header, envelope.weights
        if isinstance(header, HelloHeader):
            return self._say(name, self._greet(name, header, weights))
        run = self._run(name)
        if isinstance(header, StartHeader):
            return self._say(name, self._take_start(run, weights))
        if isinstance(header, FarewellHeader):
            return self._end(run, header.save)
        site = self._site(run)
        request = decode_request(envelope)
        LOG.info("run %s: round %d: %s", name, request.round + 1, request.phase)
        self.tell(Asked(name, method_name(run.job.method), request.phase, request.round, run.job.method.rounds))
        answer = None
        try:
            answer = self.gate.answer(run, site, request, lambda: write_journal(run.folder, run.journal))
            return answer
        finally:
            self.tell(Answered(answer is None))

    def _say(self, name: str, welcome: WelcomeHeader, payload: str = "examples") -> TensorFile:
        message, made = encode_message(name, welcome), self.made.get(name)
        return self.gate.release(message, name, -1, payload, rows=welcome.examples, examples=made)

    def _greet(self, name: str, hello: HelloHeader, weights: Weights) -> WelcomeHeader:
        folder = self._folder(name)
        job = site_job(self.settings, hello, folder)
        permit(self.settings, job)
        check_job(self.settings, job)
        self.gate.check_run(name)
        files = {file: content_of(tensor) for file, tensor in weights.get("files", {}).items()}
        check_files(files)
        self.gate.check_disk(folder, sum(map(len, files.values())))
        digest = job_digest(hello, files)
        LOG.info("run %s: job %s", name, digest)
        check_same(folder, hello, digest)
        has_leave(self.settings.approve, digest, folder, self.ask)  # a job that cannot get it is not tried
        made = made_by(hello, files)
        check_same_examples(self.gate.log.told.get(name, ""), made)

        def told() -> None:
            self.made = {name: made}

        agree(self.settings, hello, digest, folder, files, self.trial, self.ask, told)
        self._clear_unanswered(name)
        (folder / HELLO).unlink(missing_ok=True)  # until all that belongs to it is there
        write_start(folder, files)
        write_bytes(folder / DIGEST, digest.encode())
        write_bytes(folder / HELLO, bytes(encode_message(name, hello)))
        run = SiteRun(name, folder, hello, digest, job, open_journal(folder), Answers(folder))
        self.runs = {name: run}  # of other runs nothing stays in memory
        LOG.info("run %s: %s, %s", name, hello.stage or "one stage", method_name(job.method))
        return self._welcome(run)

    def _clear_unanswered(self, name: str) -> None:
        """Of runs before this one from which nothing of the rows has left no more stays than seconds of work."""
        answered = {name, *self.gate.log.runs()}
        for folder in self._folder(name).parent.glob("*"):
            if folder.name not in answered:
                clear(folder / "start", START_FILES)
                clear(folder, OWN_FILES)

    def _welcome(self, run: SiteRun) -> WelcomeHeader:
        """What it has for the run; with the start model it is ready to train."""
        if not holds_start(run.folder, run.journal) and not take_own_start(
            self.settings, run.job, run.hello, run.journal, partial(self.gate.check_disk, run.folder)
        ):
            return WelcomeHeader(examples=0, holds=False)
        return WelcomeHeader(examples=self._site(run).examples, holds=True, own=is_own(run.folder))

    def _take_start(self, run: SiteRun, weights: Weights) -> WelcomeHeader:
        folder, parts = run.folder, parts_of(run)
        server = server_parts(self.settings, run, parts)
        shapes = {part: own for part, own in parts.shapes.items() if part not in server}
        if strange := sorted(weights.keys() - shapes.keys()):  # whose tensors may have the names of others
            raise WireError(f"start model: {strange[0]} is no part that this site holds")
        for part, own in shapes.items():
            check(weights.get(part, {}), wire_spec(own, "fp32"))
        in_order = {part: {tensor: weights[part][tensor] for tensor in own} for part, own in shapes.items()}
        if fingerprint(in_order) != run.hello.start:
            raise WireError("start model: is not the one that was announced")
        store = Store(folder, run.journal.note)
        store.write(START, {n: t for own in weights.values() for n, t in own.items()})
        write_journal(folder, run.journal)
        return self._welcome(run)

    def _site(self, run: SiteRun) -> Site:
        hooks = Hooks(  # that hold no run: its model would stay in memory until Python looks for cycles
            step=self.gate.timed(run.answers, self.callback),
            reach=self.reach,
            leaving=partial(self.gate.release_batch, run.name),
        )
        return make_site(self.settings, run, hooks)

    def _end(self, run: SiteRun, save: bool) -> TensorFile:
        name, welcome, left = run.name, self._welcome(run), run.name in self.gate.log.runs()
        if save and left and keeps_own(self.settings, run):  # else no limit would count it
            site, ready = self._site(run), run.ready
            assert ready is not None
            target = self.settings.folder / "models" / name
            save_own_model(site, ready, run.job.method.rounds, target)
            LOG.info("run %s: this site's own model is in %s", name, target)
        answer = self._say(name, welcome, "over" if left or run.answers.known else "examples")
        del self.runs[name]
        clear(run.folder / "start", START_FILES)
        clear(run.folder, (*OWN_FILES, *ANSWER_FILES))
        LOG.info("run %s: over", name)
        self.tell(RunEnded(name))
        return answer

    def _run(self, name: str) -> SiteRun:
        """A run, read again from the disk where this program has started since."""
        if name not in self.runs:
            folder = self._folder(name)
            hello, digest = kept_job(folder)
            job = site_job(self.settings, hello, folder)
            permit(self.settings, job)  # its settings may have changed
            check_job(self.settings, job)
            approve(self.settings.approve, digest, folder, self.ask, [])
            self.runs = {name: SiteRun(name, folder, hello, digest, job, open_journal(folder), Answers(folder))}
            self.made = {name: made_by(hello, start_files(folder))}
        return self.runs[name]

    def _folder(self, name: str) -> Path:
        return self.settings.folder / "runs" / name


def _failed(reason: str) -> RefusalHeader:
    """It may be mended while the run goes on, so it is not final."""
    return RefusalHeader(reason=f"failed: {reason}", final=False)
