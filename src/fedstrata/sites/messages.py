"""What the server and a site say to each other: each message one safetensors file, a small checked header with it.

    the server                                    a site
    Hello    the job, and what its model is       Welcome   how many examples; whether it has the start model
    Start    the start model                      Welcome
    Request  one round's work                     Reply
    Farewell the stage is over                    Welcome

and in place of any answer a ``Refusal``. Tensors stand under ``PART|NAME``. Nothing is taken from a message before
its form is checked: the header field by field here, the tensors by whoever knows what they must be
(:func:`fedstrata.wire.codec.check`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.wire.codec import WireError

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Header(BaseModel):
    """A header: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanHeader(Header):
    """A plan, see :class:`fedstrata.plan.plan.Plan`."""

    layers: tuple[Count, ...]
    train: tuple[Name, ...]
    send: tuple[Name, ...]
    keep: tuple[Name, ...]
    features: bool
    server: tuple[Name, ...]


class RequestHeader(Header):
    """A request, see :class:`fedstrata.client.trainer.Request`."""

    round: Annotated[int, Field(ge=-1)]
    client: Name
    plan: PlanHeader
    phase: Literal["train", "evaluate", "hidden_states", "receive"]
    versions: dict[Name, Count]
    first: bool
    span: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]]


class PositionsHeader(Header):
    """Positions computed with, see :class:`fedstrata.cost.flops.Positions`."""

    tokens: Count
    pairs: Count
    predicted: Count


class ReplyHeader(Header):
    """A reply, see :class:`fedstrata.client.trainer.Reply`."""

    client: Name
    examples: Annotated[int, Field(ge=1)]
    loss: float
    steps: Count
    work: PositionsHeader
    flops: Count
    seconds: Annotated[float, Field(ge=0)]
    scores: dict[Name, dict[Name, float]]


class HelloHeader(Header):
    """What a site must know before it can say whether it takes part in a run.

    Attributes:
        version: of FedStrata; both ends must have the same.
        stage: of the job.
        job: its tables ``task``, ``method``, ``train``, ``head`` and ``wire``.
        long_text: of its table ``data``.
        share: of its own rows, to be kept aside to test on where it names no test rows; 0 for none.
        labels: class names in order.
        start: fingerprint of the start model, see :func:`fedstrata.server.state.fingerprint`.
        stream: port for hidden states, what the site is known by there, and for how many seconds to wait.
    """

    version: str
    stage: str
    job: dict[str, Any]
    long_text: Literal["chunk", "truncate", "pack"] | None
    share: Annotated[float, Field(ge=0, lt=1)]
    labels: tuple[str, ...] | None
    start: str
    stream: tuple[int, str, float] | None = None


class StartHeader(Header):
    """The start model comes with it."""


class FarewellHeader(Header):
    """The stage is over.

    Attributes:
        save: the site holds parts that are its own alone, so it saves a model.
    """

    save: bool


class WelcomeHeader(Header):
    """A site takes part.

    Attributes:
        examples: that it trains on.
        holds: it has the start model.
    """

    examples: Count
    holds: bool


class RefusalHeader(Header):
    """A site does not do what it is asked.

    Attributes:
        reason: a sentence without its subject.
        final: it will not do so in this run.
    """

    reason: Annotated[str, Field(max_length=1000)]
    final: bool


BLOCK = 4096
"""Headers are filled up to a multiple of so many bytes: the same tensors then stand at the same place in messages
for several sites, and a carrier that cuts messages in pieces can tell that the pieces are the same."""
KINDS: dict[str, type[Header]] = {
    "hello": HelloHeader,
    "start": StartHeader,
    "request": RequestHeader,
    "farewell": FarewellHeader,
    "welcome": WelcomeHeader,
    "reply": ReplyHeader,
    "refusal": RefusalHeader,
}
"""Kind of message -> its header."""


@dataclass(frozen=True)
class Envelope:
    """A message, read: ``run`` it belongs to, ``header``, and the tensors by part."""

    run: str
    header: Header
    weights: Weights


def seal(run: str, header: Header, weights: Weights = {}) -> bytes:  # noqa: B006
    """A message as it travels."""
    kind = next(kind for kind, form in KINDS.items() if type(header) is form)
    tensors = {f"{part}|{name}": t.contiguous() for part, each in weights.items() for name, t in each.items()}
    texts = {
        "kind": kind,
        "run": run,
        "header": json.dumps(header.model_dump()),
        "parts": json.dumps(list(weights)),
    }
    texts["pad"] = " " * (-len(json.dumps(texts, ensure_ascii=False).encode()) % BLOCK)
    return bytes(safetensors.torch.save(tensors, texts))


def unseal(message: bytes, *kinds: str) -> Envelope:
    """What a message holds, which must be one of these kinds; its tensors are still to be checked.

    Raises:
        WireError: it is none of them.
    """
    wanted = " or ".join(kinds)
    try:
        tensors = safetensors.torch.load(message)
        size = int.from_bytes(message[:8], "little")
        texts = json.loads(message[8 : 8 + size])["__metadata__"]
        if texts["kind"] not in kinds:
            raise WireError(f"not a {wanted}: is a {texts['kind']}")
        header = KINDS[texts["kind"]].model_validate_json(texts["header"])
        weights: Weights = {
            str(part): {} for part in json.loads(texts["parts"])
        }  # a file of tensors sorts its own
    except (
        SafetensorError,
        KeyError,
        TypeError,
        ValidationError,
        json.JSONDecodeError,
        UnicodeDecodeError,
    ) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise WireError(f"not a {wanted}: {first}") from None
    for key, tensor in tensors.items():
        part, _, name = key.partition("|")
        if part not in weights:
            raise WireError(f"tensor {key!r}: belongs to no part")
        weights[part][name] = tensor
    return Envelope(str(texts["run"]), header, weights)


def of_request(run: str, request: Request) -> bytes:
    """A request as it travels."""
    fields = {name: value for name, value in vars(request).items() if name not in ("parts", "plan")}
    header = RequestHeader(**fields, plan=PlanHeader.model_validate(vars(request.plan)))
    return seal(run, header, request.parts)


def request_in(envelope: Envelope) -> Request:
    """The request of a message of that kind; its tensors are still to be checked."""
    header = envelope.header
    assert isinstance(header, RequestHeader)
    return Request(**{**dict(header), "plan": Plan(**dict(header.plan)), "parts": envelope.weights})


def of_reply(run: str, reply: Reply) -> bytes:
    """A reply as it travels."""
    fields = {name: value for name, value in vars(reply).items() if name not in ("weights", "work")}
    header = ReplyHeader(**fields, work=PositionsHeader.model_validate(vars(reply.work)))
    return seal(run, header, reply.weights)


def reply_in(envelope: Envelope) -> Reply:
    """The reply of a message of that kind; its weights are still to be checked."""
    header = envelope.header
    assert isinstance(header, ReplyHeader)
    return Reply(**{**dict(header), "work": Positions(**dict(header.work)), "weights": envelope.weights})
