"""A client's half of masked sums: what it keeps between the steps, and its parts as integers behind masks.

On the client's own disk are the secrets of the attempt under way, and for every round whose sum it has helped to
open, whose sum that was: of a round it opens one set of clients and no other, however often it is asked, because
the difference of two would be the message of whoever is in one of them alone. With noise, which is a round's and
not an attempt's, nor do other numbers of the same round leave: the difference of two sums would have no noise. And
with noise that clients share, or a part that not all send, they leave for one list of clients, or for several of
which only one can be opened.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstrata.client.answer import Handler, PassOf, Work, sent_parts, train_with
from fedstrata.client.private import Draw, Private
from fedstrata.client.sum_rules import Begun, SumRules, session
from fedstrata.errors import UserError
from fedstrata.plan.kinds import SUM_PHASES, Tensors, Weights
from fedstrata.plan.messages import Reply
from fedstrata.plan.parts import Parts
from fedstrata.privacy.fixed_point import Integers, SaturationError, capped
from fedstrata.privacy.masked_sums import Member
from fedstrata.privacy.sum_secrets import load_secrets, new_secrets
from fedstrata.privacy.sum_terms import ATTEMPT_BYTES, Message, digest, named, only_one_opens
from fedstrata.wire.codec import WireError
from fedstrata.wire.files import PRIVATE, read_sealed, write_sealed
from fedstrata.wire.partial import travelling

MASKED = "masked"
"""The one tensor of a part behind masks: uint8, as many bytes per element as the sum needs."""

ATTEMPT, OPENED, NUMBERS, ROSTERS = SUM_FILES = ("attempt.json", "opened.json", "numbers.json", "rosters.json")
"""What a client keeps: the attempt under way, whose sum it has opened in which round, which numbers with noise
it has brought to which, and with whom they were summed in it."""


def sum_step(work: Work) -> Generator[None, None, Reply]:
    """A step of a masked sum other than ``train``.

    Raises:
        WireError: see :class:`fedstrata.privacy.masked_sums.Member`, or the round is opened already, with others.
    """
    yield from ()
    step, question = SUM_PHASES[work.request.phase], dict(work.request.sums)
    member = _begin(work, question) if step == "keys" else _under_way(work, question)
    answer = member.answer(step, question)
    if step == "open":
        _note_opened(work, member)
    _save(work, member)
    return Reply(work.request.client, len(work.data.index), sums=answer)


def train_for_sum(pass_of: PassOf) -> Handler:
    """The phase ``train`` where parts travel in masked sums; the loss stays with the client."""
    train = train_with(pass_of, masked_parts)

    def handler(work: Work) -> Generator[None, None, Reply]:
        before_training(work)
        return without_loss((yield from train(work)))

    return handler


def before_training(work: Work) -> None:
    """Refuse to train for a sum to which the client has brought its numbers already.

    Raises:
        WireError: it has brought them, or the request is for no attempt under way; see also :func:`_note_roster`.
    """
    question = dict(work.request.sums)
    member = _under_way(work, question)
    if member.asked("train", question) is not None:
        raise WireError("masked sum: its numbers have been sent")
    _note_roster(work, member)
    _save(work, member)


def masked_parts(work: Work, draw: Draw | None) -> Weights:
    """The trained parts' changes as integers behind masks, packed: part -> ``MASKED``.

    Noise comes before; so the integers, like all that is made of a noised message, depend on the noised one alone.

    Raises:
        UserError: a change is too large to be encoded.
        WireError: see :func:`_note_numbers`.
    """
    request, parts = work.request, work.runtime.working.parts
    question = dict(request.sums)
    member, sent = _under_way(work, question), sent_parts(work, draw)
    member.asked("train", question)
    roster = member.roster()
    fixed, numbers = roster.fixed, {}
    changes = {part: _change(parts, part, sent[part], work.shared[part][1]) for part in sent}
    if work.runtime.private and draw:
        changes = work.runtime.private.summands(changes, fixed.step, draw)
    try:
        for place in roster.own_groups(request.client):
            own = roster.groups[place].parts
            numbers[place] = np.concatenate([fixed.integers(changes[part]) for part in own])
    except SaturationError as error:
        raise UserError(
            f"round {request.round + 1}, client {request.client}: a change of {error}; a smaller "
            "train.learning_rate helps, with --resume from the last finished round"
        ) from None
    if draw:
        _note_numbers(work, numbers)
    message: Weights = {}
    for place, words in member.masked(question, numbers).items():
        start = 0
        for part in roster.groups[place].parts:
            end = start + parts.travelling(part)
            message[part] = {MASKED: torch.from_numpy(fixed.pack(words[start:end]))}
            start = end
    _save(work, member)  # before anything leaves
    return {part: message[part] for part in request.plan.send}


def _change(parts: Parts, part: str, tensors: Tensors, reference: Tensors) -> npt.NDArray[np.float64]:
    """What has changed of that of a part which travels, exact, as one vector in the order of the part's shapes."""
    new, old = travelling(tensors, parts.sharing), travelling(reference, parts.sharing)
    names = parts.sharing.travelling(parts.shapes[part])
    changes = [(new[n].detach().cpu().double() - old[n].double()).reshape(-1).numpy() for n in names]
    return np.concatenate(changes or [np.zeros(0)])


def weight_in_sum(private: Private | None, examples: int) -> int:
    """A client's weight in the mean; where its presence is to be hidden, all weigh the same."""
    return 1 if private is not None and private.table.level == "client" else capped(examples)


def _rules(work: Work) -> SumRules:
    rules = work.runtime.sums
    if rules is None:
        raise WireError("masked sum: this run has none")
    return rules


def _member(work: Work, attempt: bytes, kept: str | None) -> Member:
    rules, round, parts = _rules(work), work.request.round, work.runtime.working.parts
    weight = weight_in_sum(work.runtime.private, len(work.data.index))
    held = new_secrets(weight) if kept is None else load_secrets(kept)
    begun = Begun(
        received=partial(rules.received, parts, round),
        tensors=lambda part: work.shared[part][1],
        span=work.request.span,
    )
    return Member(
        name=work.request.client,
        session=session(rules.run, rules.agreement, round, attempt),
        signer=rules.signer,
        groups_of=lambda names: rules.groups(parts, round, names),
        secrets=held,
        begun=partial(begun.by, work.request.client),
    )


def _attempt(question: Message) -> bytes:
    attempt = question.pop("attempt", b"")
    if len(attempt) != ATTEMPT_BYTES:
        raise WireError("masked sum: names no attempt")
    return attempt


def _begin(work: Work, question: Message) -> Member:
    """The member of a new attempt, with new secrets; those of the attempt before are gone for good."""
    attempt = _attempt(question)
    kept = _read(work)
    same = kept.get("attempt") == attempt.hex() and kept.get("round") == work.request.round
    return _member(work, attempt, kept["secrets"] if same else None)


def _under_way(work: Work, question: Message) -> Member:
    attempt, kept = _attempt(question), _read(work)
    if (kept.get("attempt"), kept.get("round")) != (attempt.hex(), work.request.round):
        raise WireError("masked sum: this attempt is not under way here")
    return _member(work, attempt, kept["secrets"])


def _folder(work: Work) -> Path:
    return work.data.store.folder / "sums"


def _read(work: Work) -> dict[str, Any]:
    """The attempt under way; one whose file is damaged is none."""
    return read_sealed(_folder(work) / ATTEMPT) or {}


def _noted(path: Path) -> dict[str, Any]:
    """What is written down of all rounds.

    Raises:
        WireError: it is damaged.
    """
    if not path.exists():
        return {}
    if (noted := read_sealed(path)) is None:
        raise WireError("masked sum: what it has written down of its sums is damaged")
    return noted


def _save(work: Work, member: Member) -> None:
    attempt = work.request.sums["attempt"].hex()
    kept = {"round": work.request.round, "attempt": attempt, "secrets": member.secrets.dump()}
    path = _folder(work) / ATTEMPT
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    write_sealed(path, kept, PRIVATE)


def _note_opened(work: Work, member: Member) -> None:
    """Write down whose sum of this round is opened, before the shares leave.

    Raises:
        WireError: another one was opened before.
    """
    path, round = _folder(work) / OPENED, str(work.request.round)
    opened = _noted(path)
    whose = digest(named(member.secrets.survivors)).hex()
    if opened.setdefault(round, whose) != whose:
        raise WireError(
            f"masked sum: of round {work.request.round + 1} it has opened a sum of other clients; the difference "
            "of the two would be a single client's"
        )
    write_sealed(path, opened)


def _note_numbers(work: Work, numbers: Mapping[int, Integers]) -> None:
    """Write down which numbers of this round are masked, before they are. In one process no noise is a secret.

    Raises:
        WireError: it has brought others to an earlier attempt, as training on a GPU may come to.
    """
    if not _rules(work).run:
        return
    hashed = hashlib.sha256()
    for place in sorted(numbers):
        hashed.update(numbers[place].data)
    path, round, found = _folder(work) / NUMBERS, str(work.request.round), hashed.hexdigest()
    known = _noted(path)
    if known.setdefault(round, found) != found:
        raise WireError(
            f"masked sum: asked for round {work.request.round + 1} again it comes to other numbers, as on a GPU, "
            "and has sent some with the same noise; the difference would have none"
        )
    write_sealed(path, known)


def _note_roster(work: Work, member: Member) -> None:
    """Write down with whom the client's numbers of a round are summed. In one process no number is a secret.

    Raises:
        WireError: with others before, where two sums tell more of it than one: they lack each other's noise, or
            those who open a sum may not be in it.
    """
    if not _rules(work).run:
        return
    private = work.runtime.private
    honest = (private.table.honest or 1) if private else 1
    path, round, names = _folder(work) / ROSTERS, str(work.request.round), list(member.roster().names)
    known = _noted(path)
    before = known.setdefault(round, [])
    own = honest == 1 and all(map(member.sends_with_all, [names, *before]))
    if not own and not all(only_one_opens(names, others, honest) for others in before):
        raise WireError(
            f"masked sum: round {work.request.round + 1} was asked of other clients before, and both sums could "
            "be opened, which together could tell of a single client; expected nearly the same clients"
        )
    if names not in before:
        before.append(names)
        write_sealed(path, known)


def without_loss(reply: Reply) -> Reply:
    """A reply beside a masked sum: the loss is the client's own.

    Raises:
        UserError: the training diverged.
    """
    if reply.loss is not None and not math.isfinite(reply.loss):
        raise UserError(
            f"client {reply.client}: its training diverged (loss {reply.loss}); a smaller train.learning_rate "
            "helps, with --resume from the last finished round"
        )
    return replace(reply, loss=None)
