"""The gate through which everything leaves a site: its limits are kept, and its release log is written first."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedstrata.client.trainer import StepCallback
from fedstrata.plan.kinds import SUM_PHASES, Phase, Tensors
from fedstrata.plan.messages import Request
from fedstrata.sites.answers import Answer, Answers, work_digest
from fedstrata.sites.limit_tables import Limits
from fedstrata.sites.messages import encode_reply
from fedstrata.sites.permission import NotNow, Refused, check_rows
from fedstrata.sites.release_log import WITH_ROWS, Release, ReleaseLog, now, release_of
from fedstrata.sites.reply_size import least_bytes
from fedstrata.sites.rows_behind import rows_behind
from fedstrata.sites.site import Site
from fedstrata.sites.site_run import SiteRun
from fedstrata.wire.codec import payload_bytes
from fedstrata.wire.tensor_file import TensorFile

PAYLOADS: dict[Phase, str] = {
    "train": "weights",
    "evaluate": "scores",
    "hidden_states": "hidden_states",
    "receive": "receipt",
    **dict.fromkeys(SUM_PHASES, "sum"),
}
"""Phase of a request -> payload of its reply in the release log."""


@dataclass
class Gate:
    """The gate.

    Attributes:
        limits: the site's.
        log: its release log.
    """

    limits: Limits
    log: ReleaseLog
    _batch_rows: dict[str, int] = field(default_factory=dict)

    def check_run(self, run: str) -> None:
        """Refuse a run beyond the number that the site takes part in; one that was told of its examples is one.

        Raises:
            Refused: it is one.
        """
        most, known = self.limits.max_runs, self.log.runs() | self.log.told.keys()
        if most is not None and run not in known and len(known) >= most:
            raise Refused(f"it has taken part in as many runs as its limit allows, {most} (max_runs)")

    def check_over(self, run: str) -> None:
        """Refuse a run that is over: what limits it is not kept any more.

        Raises:
            Refused: the server has said so.
        """
        if run in self.log.over:
            raise Refused("the server has said that this run is over, and it answers no round of it any more")

    def answer(self, run: SiteRun, site: Site, request: Request, write: Callable[[], None]) -> TensorFile:
        """The message with the reply to a request, ready to leave: a new one, or the one that has left before.

        Args:
            run: the request's.
            site: answers it.
            request: what is asked.
            write: puts on the disk what the site keeps of the run.

        Raises:
            Refused: a limit is reached, or another request was answered in this one's place.
            WireError: the request does not fit the site.
        """
        site.check_plan(request)
        payload, parts = PAYLOADS[request.phase], tuple(request.plan.send)
        known = run.answers.before(request)
        if self.limits.bytes_per_run or self.limits.bytes_per_day:  # before it works in vain
            self.check_bytes(run.name, least_bytes(site, request))
        if payload not in WITH_ROWS:
            message = encode_reply(run.name, site.answer(request), request, run.hello.start, known)
            write()
            return self.release(message, run.name, request.round, payload)
        self.check_run(run.name)  # others may have begun since this one was greeted
        self._check_seconds(run.answers, 0.0)
        began = time.monotonic()
        rows = self._rows(run.answers, site, request, payload)
        site.take(request)
        self.check_over(run.name)
        again = bool(request.plan.server) or site.runtime.sums is not None  # whose answers cannot be sent again
        digest = work_digest(site, request, again)
        key, epsilon = (request.round, payload), site.epsilon if payload == "weights" else None
        left = (run.name, *key) in self.log.answered
        if found := run.answers.find(request, payload, digest, again):
            told = run.name, request.round, payload, parts, found[0].rows
            return self.release(found[1], *told, epsilon=None if left else epsilon)
        if left and key not in run.answers.known:
            raise Refused(f"it has answered round {request.round + 1} of this run, and does not keep the answer")
        if again:
            run.answers.begin(Answer(*key, digest, rows))
        try:
            reply = site.carry_out(request, copied=False)  # what leaves is read from where it is kept
            write()
            message = encode_reply(run.name, reply, request, run.hello.start, known)
            self.check_bytes(run.name, len(message))
        except BaseException:
            run.answers.spend(request.round, digest, time.monotonic() - began)
            raise
        answer, kept = run.answers.keep(Answer(*key, digest, rows, time.monotonic() - began), message)
        fields = run.name, request.round, payload, parts, len(kept), rows, answer.sha256
        self.log.append(Release(now().isoformat(), *fields, epsilon=epsilon))
        return kept

    def _rows(self, answers: Answers, site: Site, request: Request, payload: str) -> int:
        """Rows behind the reply to a request, counted once; where they are too few, that was work as well."""
        began, before = time.monotonic(), answers.known.get((request.round, payload))
        try:
            rows = before.rows if before else rows_behind(site, request)
            check_rows(self.limits, rows)
        except Refused:
            answers.spend(request.round, "", time.monotonic() - began)
            raise
        return rows

    def release(
        self,
        message: TensorFile,
        run: str,
        round: int,
        payload: str,
        parts: tuple[str, ...] = (),
        rows: int = 0,
        epsilon: float | None = None,
        examples: str | None = None,
    ) -> TensorFile:
        """Let a message leave: its line is on the disk when this returns.

        A short answer without rows that has left before, word for word, is not written down again, unless it is
        the first to tell of the run's examples, or that it is over.

        Raises:
            Refused: too many bytes have left.
        """
        release = release_of(message.views(), run, round, payload, parts, rows)
        release = replace(release, epsilon=epsilon, examples=examples)
        known = (examples is None or run in self.log.told) and (payload != "over" or run in self.log.over)
        if payload not in WITH_ROWS and release.sha256 in self.log.short and known:
            return message
        if payload not in ("refusal", "over"):  # a run beyond its limits ends as well
            self.check_bytes(run, release.bytes)
        self.log.append(release)
        return message

    def release_batch(self, run: str, request: Request, message: Tensors) -> None:
        """Let a message of a session on the server's layers leave; its bytes are those of its tensors.

        Raises:
            Refused: too many bytes have left.
        """
        if "lengths" in message:
            self._batch_rows[run] = len(message["lengths"])
        size = payload_bytes(message)
        self.check_bytes(run, size)
        digest = hashlib.sha256()
        for piece in _contents(message):
            digest.update(piece)
        rows = self._batch_rows.get(run, 0)
        time = now().isoformat()
        self.log.append(
            Release(time, run, request.round, "activations", (), size, rows, digest.hexdigest()), head=False
        )

    def timed(self, answers: Answers, callback: StepCallback) -> StepCallback:
        """A callback that also ends work beyond the seconds of the run whose answers these are."""
        began: dict[str, float] = {}

        def step(done: int, steps: int, loss: float, seen: int) -> None:
            if done == 1 or "now" not in began:
                began["now"] = time.monotonic()
            callback(done, steps, loss, seen)
            self._check_seconds(answers, time.monotonic() - began["now"])

        return step

    def check_disk(self, run: Path, incoming: int) -> None:
        """Refuse to take more bytes than a run may have on the disk.

        Raises:
            Refused: it would have more.
        """
        most = self.limits.disk_per_run
        if most is not None and incoming + sum(path.stat().st_size for path in _files(run)) > most:
            raise Refused(f"the run would take more of its disk than the {most} bytes of its limit")

    def _check_seconds(self, answers: Answers, more: float) -> None:
        most = self.limits.seconds_per_run
        if most is not None and answers.seconds + more >= most:
            raise Refused(f"it has worked for this run as long as its limit allows, {most} s (seconds_per_run)")

    def check_bytes(self, run: str, size: int) -> None:
        """Refuse to let so many bytes more leave in a run.

        Raises:
            Refused: they would be more than a limit, with what has left before; of a day's as :class:`NotNow`.
        """
        left = {"run": self.log.run_bytes[run], "day": self.log.bytes_today(now())}
        limits = {"run": self.limits.bytes_per_run, "day": self.limits.bytes_per_day}
        for span, limit in limits.items():
            if limit is not None and left[span] + size > limit:
                error = Refused if span == "run" or size > limit else NotNow
                raise error(f"its limit is {limit} bytes a {span} (bytes_per_{span}), and this would be more")


def _contents(message: Tensors) -> Iterator[bytes]:
    for name, tensor in sorted(message.items()):
        yield name.encode()
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
