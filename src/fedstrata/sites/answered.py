"""What a reply answers: it names the round, the request and the start model, so that no other is taken for it.

It also says what its site had answered before, see :mod:`fedstrata.sites.lost`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Annotated

from pydantic import Field, ValidationError

from fedstrata.plan.messages import Request
from fedstrata.sites.headers import MOST, Header, Name, to_header
from fedstrata.sites.lost import NOTHING, Span
from fedstrata.wire.codec import WireError
from fedstrata.wire.foreign import measure_json

MOST_TEXT = 1000
"""Most characters of a header of this module."""
Round = Annotated[int, Field(ge=-1, le=MOST)]


class AnsweredHeader(Header):
    """What a reply answers.

    Attributes:
        round: 0-based round of the request.
        request: its digest, see :func:`request_digest`.
        start: fingerprint of the run's start model, see :func:`fedstrata.server.state.fingerprint`.
        known: the rounds that the site had answered before, as far as it still knows.
    """

    round: Round
    request: Name
    start: Annotated[str, Field(max_length=200)]
    known: tuple[Round, Round]


def request_digest(request: Request) -> str:
    """SHA-256 of a request's header, in hexadecimal digits: of all but the tensors, whose versions it names.

    It is the same when a run that was stopped asks again: it may then no longer know that a site was asked before
    and did not reply in time, so ``first`` is left out.
    """
    return hashlib.sha256(to_header(replace(request, first=False)).model_dump_json().encode()).hexdigest()


def answered(request: Request, start: str, known: Span = NOTHING) -> str:
    """What the reply to a request says that it answers, of a site that knows of these answers before it."""
    header = AnsweredHeader(round=request.round, request=request_digest(request), start=start, known=known)
    return header.model_dump_json()


def check_answered(text: str, request: Request, start: str) -> Span:
    """Refuse a reply to another request: replayed, or of another run.

    Args:
        text: what the reply says that it answers.
        request: what its sender was asked.
        start: fingerprint of the run's start model.

    Returns:
        The rounds that the site says it had answered before.

    Raises:
        WireError: it answers something else.
    """
    try:
        measure_json(text, MOST_TEXT)
        found = AnsweredHeader.model_validate_json(text)
    except (ValueError, ValidationError):
        raise WireError("does not say which request it answers") from None
    if found.start != start:
        raise WireError("answers a run with another start model")
    if found.round != request.round:
        raise WireError(f"answers round {found.round + 1}, but was asked for round {request.round + 1}")
    if found.request != request_digest(request):
        raise WireError("answers another request of this round")
    return found.known
