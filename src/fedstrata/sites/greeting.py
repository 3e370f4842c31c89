"""Whether a site takes part in a run: its job is tried and approved before anything of it stays here."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.sites.approval import Ask, approve, job_digest
from fedstrata.sites.messages import (
    DECODE_ERRORS,
    MOST_HEADER,
    Envelope,
    HelloHeader,
    decode_message,
    metadata_of,
)
from fedstrata.sites.permission import Refused
from fedstrata.sites.proposal import Proposal
from fedstrata.sites.settings import SiteSettings
from fedstrata.wire.codec import WireError
from fedstrata.wire.files import clear, write_bytes
from fedstrata.wire.foreign import plain_text, read_json
from fedstrata.wire.tensor_file import TensorFile

LOG = logging.getLogger("fedstrata.site")
RUN_NAME = r"[0-9a-f]{32}"
HELLO, DIGEST = "hello", "digest"
"""In a run's folder: its first message, and the digest of its job."""
START_FILES = ("*.json", "*.txt")
"""Patterns of the files of the start model beside its weights."""
Trial = Callable[[SiteSettings, HelloHeader, Path], Proposal]
"""Tries a run before anything is agreed; see :func:`fedstrata.sites.trial.try_run`."""


def open_message(message: bytes | TensorFile, *kinds: str) -> Envelope:
    """The content of a server's message, as :func:`decode_message`, of a run whose name can be a folder's.

    Another version may say other things of a run, so that its version is said before them.

    Raises:
        Refused: it is of another version of FedStrata.
        WireError: it is of none of these kinds, or its run has no such name.
    """
    try:
        envelope = decode_message(message, *kinds)
    except WireError:
        _check_version(_version(message))
        raise
    if isinstance(envelope.header, HelloHeader):
        _check_version(envelope.header.version)
    check_name(envelope.run)
    return envelope


def check_name(run: str) -> None:
    """Refuse a run whose name cannot be a folder's.

    Raises:
        WireError: it cannot be.
    """
    if not re.fullmatch(RUN_NAME, run):
        raise WireError("run: must be 32 hexadecimal digits")


def _version(message: bytes | TensorFile) -> str:
    """The version that a message names, whatever else stands in it; this one where it names none."""
    try:
        return str(read_json(metadata_of(message)["header"], MOST_HEADER)["version"])
    except DECODE_ERRORS:
        return version("fedstrata")


def _check_version(found: str) -> None:
    if found != (here := version("fedstrata")):
        raise Refused(f"its FedStrata is {here}, the server's {found}")


def check_same(folder: Path, hello: HelloHeader, digest: str) -> None:
    """Refuse another start model in a run, and another job where noise or sums rest on its being the same.

    Of a start model that the site has already it is sent no other, and would go on from the one before. The
    difference of two answers to the same rows would hold one noise, or one set of clients, less than was
    accounted for.

    Raises:
        Refused: the start model or the job is another one.
    """
    known, path, same = [hello], folder / HELLO, digest_of(folder) in ("", digest)
    try:
        if path.exists():
            before = decode_message(path.read_bytes(), "hello").header
            assert isinstance(before, HelloHeader)
            known.append(before)
    except WireError:  # it is damaged, and of the same job is written anew
        if not same:
            raise
    if any(own.start != hello.start for own in known):
        raise Refused("this run has begun with another start model, and has one alone")
    if not same and any(_is_private(own) for own in known):
        raise Refused("this run has begun with another job, and with noise or masked sums a run has one alone")


def check_same_examples(before: str, made: str) -> None:
    """Refuse to make other examples of the rows in a run that was told what came of making some.

    By the numbers for one tokenizer after the other a server could look for any word in the texts, past all noise,
    and so it could by which of them fail. A run that is resumed differs in learning rates and rounds alone.

    Args:
        before: of :func:`made_by`, when it was told; empty where that is not known.
        made: the same now.

    Raises:
        Refused: so it would be.
    """
    if before not in ("", made):
        raise Refused("this run has begun with another tokenizer, task or share of test rows, and has one alone")


def made_by(hello: HelloHeader, files: Mapping[str, bytes]) -> str:
    """SHA-256 of all by which rows become examples, the model's files among it."""
    train = hello.job.get("train") or {}
    own = [train.get(key) for key in ("max_tokens", "seed")]
    own += [hello.job.get("task"), hello.components.get("task"), hello.labels, hello.long_text, hello.share]
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return hashlib.sha256(json.dumps([own, digests], sort_keys=True).encode()).hexdigest()


def agree(
    settings: SiteSettings,
    hello: HelloHeader,
    digest: str,
    folder: Path,
    files: Mapping[str, bytes],
    trial: Trial | None,
    ask: Ask | None,
    told: Callable[[], None],
) -> None:
    """Try the run in a folder beside its own, unless it was tried before, and ask for leave.

    A tokenizer of the server's can be made so that whether a trial succeeds tells of the texts. So before a yes
    nobody is told what came of it, and after one ``told`` is called first. Of a job without leave nothing stays,
    and nothing of it comes into the place of one that has it.

    Raises:
        Refused: the owner has not approved the job, or the trial failed.
        UserError: the site's own rows or device cannot be used.
    """
    proposal: list[str] = []
    failed: Exception | None = None
    beside = folder.with_name(f"{folder.name}.new")
    try:
        if trial and digest_of(folder) != digest:
            write_start(beside, files)
            try:
                proposal = trial(settings, hello, beside).lines()
            except (Refused, UserError) as error:
                failed = error
                why = "why" if isinstance(error, Refused) else "so, but not why"  # names of files and classes
                said = plain_text(str(error))
                proposal = [f"it cannot be done here, and after a yes the server is told {why}: {said}"]
            for line in proposal:
                LOG.info("proposed: %s", line)
        approve(settings.approve, digest, folder, ask, proposal)
        told()
        if failed:
            raise failed
    except BaseException:
        clear(folder, ())
        raise
    finally:
        clear(beside, START_FILES)


def write_start(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put the files of the start model beside its weights, in place of those that were there."""
    clear(folder / "start", START_FILES)
    for file, content in files.items():
        write_bytes(folder / "start" / file, content)


def kept_job(folder: Path) -> tuple[HelloHeader, str]:
    """The first message of a run that goes on, and the digest of its job: as they were agreed to, to the last bit.

    Raises:
        WireError: the run is not known here, or its job is damaged; the server then begins with it again.
    """
    path = folder / HELLO
    if not path.exists():
        raise WireError("this run is not known here")
    try:
        hello = decode_message(path.read_bytes(), "hello").header
        assert isinstance(hello, HelloHeader)
        if (digest := digest_of(folder)) == job_digest(hello, start_files(folder)):
            return hello, digest
    except WireError:
        pass
    LOG.error("%s: its first message, digest or a file of its model is damaged or missing", folder)
    raise WireError("the job that it keeps of this run is damaged; its own log says more")


def start_files(folder: Path) -> dict[str, bytes]:
    """What :func:`write_start` has put into a run's folder."""
    return {file.name: file.read_bytes() for name in START_FILES for file in (folder / "start").glob(name)}


def digest_of(folder: Path) -> str:
    """Digest of the job that a run's folder is of; empty where there is none."""
    path = folder / DIGEST
    return path.read_text("ascii", errors="replace") if path.exists() else ""


def _is_private(hello: HelloHeader) -> bool:
    """Whether a job has noise or masked sums."""
    table = hello.job.get("privacy") or {}
    return bool(table.get("sum_only")) or table.get("level", "none") != "none"
