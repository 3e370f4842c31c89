"""What a run between sites tells whoever looks at its federation: ``run.json`` in the federation's folder."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fedstrata.errors import UserError
from fedstrata.events import Awaited, Event, Missed, Replied, RoundEnded, Scored, StageEnded, StageStarted
from fedstrata.job.tables import Job, method_name
from fedstrata.wire.files import PRIVATE

FILE = "run.json"
RUN_LOCK = "run.lock"
"""The file that a run holds locked, in the same folder."""
Tell = Callable[[Event], None]
"""Receives the events of a run."""


class SiteRecord(BaseModel):
    """A site's newest word: what it replied, or why it did not.

    Attributes:
        round: from 0; -1 before the first.
        loss: of its training; None where it told none.
        seconds: that it worked.
        missing: why it did not reply; empty if it did.
    """

    model_config = ConfigDict(extra="forbid")
    round: int
    loss: float | None = None
    seconds: float = 0.0
    missing: str = ""


class RunRecord(BaseModel):
    """A run between sites. Times are in seconds since 1970, rounds count from 0.

    Attributes:
        output: the run's folder.
        stage: the stage's name; empty for a job of one stage.
        method: the method's name.
        rounds: of the stage.
        round: that is under way; -1 while the sites are greeted, ``rounds`` after the last.
        began: when the run was started, or started again.
        status: "running" also of a run that was killed.
        message: why it failed.
        waiting: the sites that are waited for,
        until: at most until then.
        ends: when the stage is likely to be over.
        score: the newest, metric -> value,
        scored: after this round; -1 is the start model.
        epsilon: the largest that noise promises a site over all rounds of the stage; None without noise,
        delta: for this delta.
        sites: name -> its newest word.
    """

    model_config = ConfigDict(extra="forbid")
    output: str
    stage: str
    method: str
    rounds: int
    round: int = -1
    began: float
    status: Literal["running", "finished", "stopped", "failed"] = "running"
    message: str = ""
    waiting: list[str] = []
    until: float | None = None
    ends: float | None = None
    score: dict[str, float] = {}
    scored: int = -1
    epsilon: float | None = None
    delta: float | None = None
    sites: dict[str, SiteRecord] = {}


class RunTeller:
    """Keeps the record of a run up to date, and hands every event on.

    Args:
        home: the federation's folder.
        output: the run's.
        jobs: of its stages.
        tell: receives the events.
    """

    def __init__(self, home: Path, output: Path, jobs: Sequence[Job], tell: Tell) -> None:
        self.path, self.output, self.tell = home / FILE, str(output.resolve()), tell
        self.began, self.left = time.time(), list(jobs)
        self.record = self._next()
        self.write()

    def __call__(self, event: Event) -> None:
        """Note an event and hand it on."""
        if self._note(event):
            self.write()
        self.tell(event)

    def end(self, status: Literal["finished", "stopped", "failed"], message: str) -> None:
        """Note that the run is over."""
        self.record.status, self.record.message = status, message
        self.record.waiting, self.record.until, self.record.ends = [], None, None
        self.write()

    def write(self) -> None:
        """Put the record in its place. Training does not end because it cannot be shown."""
        part = self.path.with_name(f".{FILE}.part")
        with suppress(OSError):
            with open(
                os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "w", encoding="utf-8"
            ) as file:
                json.dump(self.record.model_dump(), file, ensure_ascii=False)
            os.replace(part, self.path)

    def _next(self) -> RunRecord:
        """The record of the next stage, which has not begun."""
        job = self.job = self.left.pop(0)
        name, rounds = method_name(job.method), job.method.rounds
        return RunRecord(output=self.output, stage=job.stage, method=name, rounds=rounds, began=self.began)

    def _note(self, event: Event) -> bool:
        """Whether an event changes the record."""
        record, now = self.record, time.time()
        match event:
            case StageStarted():
                record.round, record.epsilon = event.done, event.epsilon
                record.delta = None if event.epsilon is None else self.job.privacy.delta
            case Awaited(_, clients, seconds):
                record.waiting, record.until = list(clients), now + seconds
            case Replied():
                loss = event.loss if event.loss is None or math.isfinite(event.loss) else None
                self._hear(event.client, SiteRecord(round=event.round, loss=loss, seconds=event.seconds))
            case Missed(round, client, reason):
                self._hear(client, SiteRecord(round=round, missing=reason))
            case Scored(round, score):
                record.scored = round
                record.score = {name: value for name, value in score.items() if math.isfinite(value)}
            case RoundEnded(round, left):
                record.round, record.ends = round + 1, now + left
                record.waiting, record.until = [], None
            case StageEnded() if self.left:
                self.record = self._next()
            case _:
                return False
        return True

    def _hear(self, name: str, said: SiteRecord) -> None:
        self.record.sites[name] = said
        self.record.waiting = [other for other in self.record.waiting if other != name]


@contextmanager
def recorded(home: Path | None, output: Path, jobs: Sequence[Job], tell: Tell) -> Iterator[Tell]:
    """What the events of a run are told, so that its record is kept.

    Args:
        home: the federation's folder; None where there are no sites, and no record.
        output: the run's folder.
        jobs: of its stages.
        tell: receives the events.
    """
    if home is None:
        yield tell
        return
    teller = RunTeller(home, output, jobs, tell)
    try:
        yield teller
    except KeyboardInterrupt:
        teller.end("stopped", "")
        raise
    except UserError as error:
        teller.end("failed", str(error))
        raise
    except OSError as error:
        teller.end("failed", f"{error.filename or 'system error'}: {error.strerror or error}")
        raise
    except BaseException as error:
        teller.end("failed", type(error).__name__)
        raise
    teller.end("finished", "")


def read_record(home: Path) -> RunRecord | None:
    """The record of a federation's newest run; None if there is none, or it holds none.

    Raises:
        UserError: it is a folder, or another user's.
    """
    try:
        return RunRecord.model_validate_json((home / FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    except OSError as error:
        raise UserError(
            f"{home / FILE}: cannot be read ({error.strerror}); expected the record of a run"
        ) from None
