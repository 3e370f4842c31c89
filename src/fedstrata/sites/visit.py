"""``fedstrata join --dry-run``: shows what a run would have this site send, and leaves its message unanswered."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstrata.client.private import private_of, spending
from fedstrata.client.sums import weight_in_sum
from fedstrata.errors import UserError
from fedstrata.privacy.fixed_point import WIDTHS, fixed_point
from fedstrata.sites.approval import approve, content_of, job_digest
from fedstrata.sites.gate import Gate
from fedstrata.sites.greeting import check_same, check_same_examples, made_by, open_message
from fedstrata.sites.message_client import Over
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.model_files import check_files
from fedstrata.sites.noise_account import NoiseAccount, refusal_of_epsilon
from fedstrata.sites.permission import Refused, check_job, check_rows, check_tests, permit
from fedstrata.sites.release_log import ReleaseLog
from fedstrata.sites.service import MOST_FILE_BYTES
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_job import site_job
from fedstrata.sites.trial import try_run
from fedstrata.wire.codec import WireError
from fedstrata.wire.files import write_bytes
from fedstrata.wire.foreign import plain_text
from fedstrata.wire.tensor_file import TensorFile


class Visit:
    """Stands in for :class:`fedstrata.sites.service.SiteService`; the first message is shown and not answered.

    Args:
        settings: the site's.
        say: prints a line.

    Attributes:
        over: a message has come and was shown.
    """

    def __init__(self, settings: SiteSettings, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say
        self.over = False

    def admit(self, metadata: Any, size: int) -> None:
        """Refuse what is no first message, before it is received."""
        if metadata.get("kind") != "hello" or size > MOST_FILE_BYTES:
            raise WireError("is no first message")

    def answer(self, message: bytes | TensorFile) -> TensorFile:
        """Show a first message; it stays at the server, where `fedstrata join` fetches it again."""
        self.over = True
        for line in self._lines(message):
            self.say(plain_text(line))
        raise Over

    def refuse(self, run: str, error: BaseException) -> TensorFile:
        """Show that a run is on."""
        self.over = True
        run = plain_text(run, 32)
        self.say(f"run {run} has begun already; what it has sent is in the release log: fedstrata site log")
        raise Over

    def _lines(self, message: bytes | TensorFile) -> list[str]:
        lines: list[str] = []
        try:
            envelope = open_message(message, "hello")
            run, hello, files = envelope.run, envelope.header, envelope.weights.get("files", {})
            assert isinstance(hello, HelloHeader)
            digest = job_digest(hello, files)
            lines += [f"run {run}", f"job {digest}"]
            with tempfile.TemporaryDirectory(dir=self.settings.folder, prefix=".dry-run-") as folder:
                self._propose(run, hello, files, Path(folder), lines)
        except (Refused, WireError) as error:
            return [*lines, f"this site would refuse: {error}"]
        except UserError as error:
            return [*lines, f"this site cannot take part: {error}"]
        with suppress(Refused):
            approve(self.settings.approve, digest, self.settings.folder / "runs" / run, None, [])
            return [*lines, "fedstrata join takes part in it, by [approve] in site.toml"]
        if self.settings.approve.runs == "ask":
            return [*lines, "fedstrata join asks about it on its terminal"]
        return [*lines, f'fedstrata join refuses it, unless site.toml has [approve] jobs = ["{digest}"]']

    def _propose(
        self, run: str, hello: HelloHeader, files: dict[str, Any], folder: Path, lines: list[str]
    ) -> None:
        """Add what the run would do, as far as the site comes before it refuses."""
        job = site_job(self.settings, hello, folder)
        permit(self.settings, job)
        check_job(self.settings, job)
        gate = Gate(self.settings.limits, ReleaseLog(self.settings.folder))
        gate.check_run(run)
        gate.check_over(run)
        contents = {name: content_of(tensor) for name, tensor in files.items()}
        check_files(contents)
        disk, size = self.settings.folder / "runs" / run, sum(map(len, contents.values()))
        gate.check_disk(disk, size)
        check_same(disk, hello, job_digest(hello, contents))
        check_same_examples(gate.log.told.get(run, ""), made_by(hello, contents))
        for name, content in contents.items():
            write_bytes(folder / "start" / name, content)
        proposal = try_run(self.settings, hello, folder)
        lines += proposal.lines()
        gate.check_disk(disk, size + proposal.start)
        limits, private = self.settings.limits, private_of(job)
        if reason := refusal_of_epsilon(self.settings.require, private, proposal.examples, proposal.rounds):
            raise Refused(reason)
        if private:
            account = NoiseAccount(self.settings.folder, limits.epsilon, limits.delta)
            release = spending(private.table, private.train, proposal.examples, 1)
            lines.append(account.foreseen(run, proposal.rounds, job.privacy, release))
        check_rows(limits, proposal.least)
        share = 1.0  # of what leaves at most; in a masked sum what leaves at least, as join counts it
        if job.privacy.sum_only:
            share = fixed_point(weight_in_sum(private, proposal.examples)).width / WIDTHS[-1]
        for span, size in (("round", proposal.round_bytes), ("run", proposal.bytes)):
            limit, least = getattr(limits, f"bytes_per_{span}"), round(share * size)
            if limit is not None and least > limit:
                raise Refused(f"a {span} sends {least} bytes, its limit is {limit}")
        gate.check_bytes(run, round(share * proposal.round_bytes))
        if hello.share:
            check_tests(limits, proposal.tests)
