"""What a site has answered in a run: a request that comes again gets the same bytes, another in its place none.

``answers.jsonl`` in the run's folder has a line for every answer, written before it leaves, and ``answers/`` the
messages of the last rounds. Two answers to one round would tell the difference of what went into them.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from fedstrata.plan.messages import Request
from fedstrata.sites.lost import NOTHING, Span
from fedstrata.sites.permission import Refused
from fedstrata.sites.site import Site
from fedstrata.wire.files import append_lines, flush, named
from fedstrata.wire.on_disk import content, let_go
from fedstrata.wire.tensor_file import PIECE, TensorFile, open_file

INDEX, FOLDER = "answers.jsonl", "answers"
FILES = (INDEX, "*.answer")
"""Patterns of what is written into a run's folder."""
KEPT_ROUNDS = 4
"""Rounds whose answers stay on disk, of those that were answered: as many as a server may have to go back."""
NOTHING_LEFT = ""
"""In place of the payload, of work that came to nothing."""
SESSIONS = 10
"""Times that a session on the server's layers may be held for one request: after the server, or the connection,
was lost. Its batches cannot be kept and sent again, for their gradients come back in between."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        round: 0-based.
        payload: see :class:`fedstrata.sites.release_log.Release`.
        request: digest of what was asked, see :func:`work_digest`.
        rows: distinct rows behind it.
        seconds: of the work.
        sha256: of the message; empty where there is none yet.
        sessions: sessions on the server's layers that were begun for it.
    """

    round: int
    payload: str
    request: str
    rows: int
    seconds: float = 0.0
    sha256: str = ""
    sessions: int = 0


class Answers:
    """The answers of one run.

    Args:
        folder: the run's.

    Attributes:
        seconds: of work in the run so far.

    Raises:
        Refused: what it keeps is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.index, self.folder = folder / INDEX, folder / FOLDER
        self.known: dict[tuple[int, str], Answer] = {}
        self.seconds = 0.0
        lines = self.index.read_bytes().splitlines(keepends=True) if self.index.exists() else []
        for number, line in enumerate(lines):
            try:
                self._take(Answer(**json.loads(line)))
            except (ValueError, TypeError):
                if number + 1 < len(lines):
                    raise Refused("what it keeps of its answers is damaged; its own log says more") from None
                self.index.write_bytes(b"".join(lines[:-1]))  # it was being written when the machine stopped

    def find(self, request: Request, payload: str, digest: str, again: bool) -> tuple[Answer, TensorFile] | None:
        """What was answered to this request; None where it has to be carried out.

        Args:
            request: the request.
            payload: of the answer.
            digest: of what is asked.
            again: the same request is carried out anew each time: a session on the server's layers, or a masked
                change, whose masks are others each time.

        Raises:
            Refused: another request was answered in its place, or the answer is not here any more.
        """
        found = self.known.get((request.round, payload))
        if found is None:
            return None
        where = f"round {request.round + 1}"
        if found.request != digest:
            raise Refused(f"it has answered another request for {payload} of {where}, and answers one alone")
        if again:
            if found.sessions >= SESSIONS:
                raise Refused(f"it has held {SESSIONS} sessions for {where} already")
            return None
        try:
            with self._path(found).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise Refused(f"its answer to {where} was sent long ago and is not kept any more") from None
        if digest != found.sha256:
            raise Refused(f"its answer to {where} is damaged; its own log says more")
        return found, open_file(self._path(found))

    def before(self, request: Request) -> Span:
        """The rounds before a request that were answered by training."""
        end = request.round + (request.phase == "evaluate")
        rounds = [round for round, payload in self.known if payload == "weights" and round < end]
        return (min(rounds), max(rounds)) if rounds else NOTHING

    def begin(self, answer: Answer) -> None:
        """Note a request whose session on the server's layers is about to begin."""
        self._write(replace(answer, sessions=self._sessions(answer) + 1))

    def keep(self, answer: Answer, message: TensorFile) -> tuple[Answer, TensorFile]:
        """Keep an answer that is about to leave; it with its SHA-256, and the message as it is kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(answer)
        part, hashed = path.with_suffix(".part.answer"), hashlib.sha256()
        try:
            with named(part), part.open("wb") as file:
                for view in message.views(PIECE):
                    hashed.update(view)
                    file.write(view)
        except OSError:
            part.unlink(missing_ok=True)  # on a full disk the release log needs its room
            raise
        os.replace(part, path)
        answer = replace(answer, sessions=self._sessions(answer), sha256=hashed.hexdigest())
        self._write(answer)
        recent = sorted({old.round for old in self.known.values() if old.sha256})[-KEPT_ROUNDS:]
        for old in self.known.values():
            if old.round < min(recent[0], answer.round):
                self._path(old).unlink(missing_ok=True)
        return answer, open_file(path)

    def spend(self, round: int, request: str, seconds: float) -> None:
        """Note work of which nothing came; it counts as well."""
        self._write(Answer(round, NOTHING_LEFT, request, 0, seconds))

    def _sessions(self, answer: Answer) -> int:
        before = self.known.get((answer.round, answer.payload))
        return before.sessions if before else 0

    def _write(self, answer: Answer) -> None:
        append_lines(self.index, [asdict(answer)])
        flush(self.index)
        self._take(answer)

    def _take(self, answer: Answer) -> None:
        self.known[answer.round, answer.payload] = answer
        self.seconds += answer.seconds

    def _path(self, answer: Answer) -> Path:
        return self.folder / f"{answer.round}-{answer.payload}.answer"


def work_digest(site: Site, request: Request, again: bool) -> str:
    """A digest of all that an answer depends on: the request without the form in which its parts came.

    After a server was resumed it sends whole what it had sent as a change before; the tensors that the site then
    holds are the same.

    Args:
        site: which is asked.
        request: what is asked.
        again: see :meth:`Answers.find`. Where the stored answer leaves, a digest that an attacker can meet twice
            does no harm, and the faster one is enough.
    """
    header = {
        "round": request.round,
        "client": request.client,
        "phase": request.phase,
        "plan": asdict(request.plan),
        "versions": request.versions,
        "span": request.span,
    }
    digest: Any = hashlib.sha256() if again else xxhash.xxh3_128()
    digest.update(json.dumps(header, sort_keys=True).encode())
    for part in sorted(request.versions):
        for name, tensor in sorted(site.shared[part][1].items()):
            digest.update(f"\0{part}|{name}\0".encode())
            digest.update(content(tensor.contiguous()))
            let_go([tensor])
    return str(digest.hexdigest())
