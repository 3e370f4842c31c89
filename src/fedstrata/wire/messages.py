"""Requests and replies as bytes: one safetensors message each, a small header of JSON in its metadata.

Tensors stand under ``PART|NAME``. Nothing is taken from a message before its form is checked: the header field by
field here, the tensors by whoever knows what they must be (:func:`fedstrata.wire.tensors.check`).
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, TypeVar

import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from fedstrata.core.client import Reply, Request, Weights
from fedstrata.core.plan import Plan
from fedstrata.cost.flops import Positions
from fedstrata.wire.tensors import WireError

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Header(BaseModel):
    """A header: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanHeader(Header):
    """A plan, see :class:`fedstrata.core.plan.Plan`."""

    layers: tuple[Count, ...]
    train: tuple[Name, ...]
    send: tuple[Name, ...]
    keep: tuple[Name, ...]
    features: bool
    server: tuple[Name, ...]


class RequestHeader(Header):
    """A request, see :class:`fedstrata.core.client.Request`."""

    round: Annotated[int, Field(ge=-1)]
    client: Name
    plan: PlanHeader
    phase: Literal["train", "evaluate", "features"]
    versions: dict[Name, Count]
    first: bool
    span: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]]


class PositionsHeader(Header):
    """Positions computed with, see :class:`fedstrata.cost.flops.Positions`."""

    tokens: Count
    pairs: Count
    predicted: Count


class ReplyHeader(Header):
    """A reply, see :class:`fedstrata.core.client.Reply`."""

    client: Name
    examples: Annotated[int, Field(ge=1)]
    loss: float
    steps: Count
    work: PositionsHeader
    flops: Count
    seconds: Annotated[float, Field(ge=0)]
    scores: dict[Name, dict[Name, float]]


Form = TypeVar("Form", bound=Header)


def of_request(request: Request) -> bytes:
    """A request as it travels."""
    header = RequestHeader(
        round=request.round,
        client=request.client,
        plan=PlanHeader.model_validate(vars(request.plan)),
        phase=request.phase,  # type: ignore[arg-type]
        versions=request.versions,
        first=request.first,
        span=request.span,
    )
    return _message(header, request.parts)


def request_in(message: bytes) -> Request:
    """The request of a message.

    Raises:
        WireError: the message holds no request.
    """
    header, parts = _read(message, RequestHeader)
    plan = Plan(**dict(header.plan))
    return Request(**{**dict(header), "plan": plan, "parts": parts})


def of_reply(reply: Reply) -> bytes:
    """A reply as it travels."""
    fields = {name: value for name, value in vars(reply).items() if name not in ("weights", "work")}
    header = ReplyHeader(**fields, work=PositionsHeader.model_validate(vars(reply.work)))
    return _message(header, reply.weights)


def reply_in(message: bytes) -> Reply:
    """The reply of a message; its weights are still to be checked.

    Raises:
        WireError: the message holds no reply.
    """
    header, weights = _read(message, ReplyHeader)
    return Reply(**{**dict(header), "work": Positions(**dict(header.work)), "weights": weights})


def _message(header: Header, weights: Weights) -> bytes:
    tensors = {f"{part}|{name}": t.contiguous() for part, each in weights.items() for name, t in each.items()}
    texts = {"header": json.dumps(header.model_dump()), "parts": json.dumps(list(weights))}
    return bytes(safetensors.torch.save(tensors, texts))


def _read(message: bytes, form: type[Form]) -> tuple[Form, Weights]:
    try:
        tensors = safetensors.torch.load(message)
        size = int.from_bytes(message[:8], "little")
        texts = json.loads(message[8 : 8 + size])["__metadata__"]
        header = form.model_validate_json(texts["header"])
        weights: Weights = {
            str(part): {} for part in json.loads(texts["parts"])
        }  # a file of tensors sorts its own
    except (SafetensorError, KeyError, TypeError, ValueError, ValidationError) as error:
        first = str(error).strip().splitlines()[0]
        raise WireError(f"not a {form.__name__.removesuffix('Header').lower()}: {first}") from None
    for key, tensor in tensors.items():
        part, _, name = key.partition("|")
        if part not in weights:
            raise WireError(f"tensor {key!r}: belongs to no part")
        weights[part][name] = tensor
    return header, weights
