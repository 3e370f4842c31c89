"""What the server and a site send each other: every message is one safetensors file with a small checked header.

    the server                                    a site
    Hello    the job, and what its model is       Welcome   how many examples; whether it has the start model
    Start    the start model                      Welcome
    Request  one round's work                     Reply
    Farewell the stage is over                    Welcome

and in place of any answer a ``Refusal``. Tensors are named ``PART|NAME``. Nothing is taken from a message before
it is checked: the header field by field here, the tensors by the caller, who knows what they must be
(:func:`fedstrata.wire.codec.check`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fedstrata.job.sentences import sentence
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.sites.answered import answered
from fedstrata.sites.headers import Examples, Header, Name, Port, Seconds, from_header, header_model, to_header
from fedstrata.sites.lost import NOTHING, Span
from fedstrata.sites.sum_fields import with_sums, without_sums
from fedstrata.wire.codec import WireError
from fedstrata.wire.foreign import is_plain_name, measure_json, plain_text, read_json
from fedstrata.wire.tensor_file import JSON_ERRORS, TensorFile, pack, read_file

RequestHeader = header_model(Request)
ReplyHeader = header_model(Reply)


class HelloHeader(Header):
    """What a site must know to decide whether it takes part in a run.

    Attributes:
        version: of FedStrata; both ends must have the same.
        stage: name of the job's stage.
        job: the job's tables ``task``, ``method``, ``train``, ``head``, ``adapter``, ``wire`` and
            ``privacy``.
        long_text: the job's ``data.long_text``.
        share: share of the site's own rows to hold out for testing where it names no test rows; 0 for none.
        labels: class names in order.
        start: fingerprint of the start model, see :func:`fedstrata.server.state.fingerprint`.
        stream: (port, session token, timeout in seconds) of the activation stream.
        components: own ``method``, ``task`` or ``codec`` of the run -> (entry point, identity), see
            :mod:`fedstrata.plan.components`.
    """

    version: str
    stage: str
    job: dict[str, Any]
    long_text: Literal["chunk", "truncate", "pack"] | None
    share: Annotated[float, Field(ge=0, lt=1)]
    labels: tuple[str, ...] | None
    start: str
    stream: tuple[Port, Name, Seconds] | None = None
    components: dict[str, tuple[str, str]] = Field(default_factory=dict, max_length=3)


class StartHeader(Header):
    """The start model; its tensors come with this header."""


class FarewellHeader(Header):
    """The stage is over.

    Attributes:
        save: the site has personal parts, so it saves its own model.
    """

    save: bool


class WelcomeHeader(Header):
    """The site takes part.

    Attributes:
        examples: number of its training examples.
        holds: it has the start model.
        own: which was not sent to it, but came from a folder of its own.
    """

    examples: Examples
    holds: bool
    own: bool = False


class RefusalHeader(Header):
    """The site does not do what the message asks for.

    Attributes:
        reason: a sentence without its subject.
        final: the answer will be the same until the site is started again.
    """

    reason: Annotated[str, Field(max_length=1000)]
    final: bool


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
MOST_HEADER = 1 << 20
"""Most characters of a header: those of a job with 10,000 labels."""
MOST_PARTS = 10_000
"""Most parts of a message."""
DECODE_ERRORS = (ValidationError, RuntimeError, *JSON_ERRORS)
"""Raised by the libraries for bytes that are no message."""


@dataclass(frozen=True)
class Envelope:
    """A decoded message.

    Attributes:
        run: the run it belongs to.
        header: checked.
        weights: its tensors by part, still to be checked.
        answers: of a reply what it answers, see :mod:`fedstrata.sites.answered`; still to be checked.
    """

    run: str
    header: Header
    weights: Weights
    answers: str = ""


Answer = bytes | TensorFile | WireError | None
"""What came back: a message; why it cannot be used; or None, if there will be none."""


def encode_message(
    run: str,
    header: Header,
    weights: Weights = {},  # noqa: B006
    answers: str = "",
) -> TensorFile:
    """A message; its tensors are not copied, and must not change until it has been sent."""
    kind = next(kind for kind, model in KINDS.items() if type(header) is model)
    flat = {f"{part}|{name}": t for part, tensors in weights.items() for name, t in tensors.items()}
    metadata = {
        "kind": kind,
        "run": run,
        "header": json.dumps(header.model_dump()),
        "parts": json.dumps(list(weights)),
        **({"answers": answers} if answers else {}),
    }
    return pack(flat, metadata)


def decode_message(message: bytes | TensorFile, *kinds: str) -> Envelope:
    """The content of a message, which must be of one of these kinds; its tensors are still to be checked.

    Raises:
        WireError: it is of none of these kinds, or its header is invalid.
    """
    expected = " or ".join(kinds)
    try:
        file = read_file(message) if isinstance(message, bytes) else message
        metadata = file.metadata
        run, kind, text = metadata["run"], metadata["kind"], metadata["header"]
        if kind not in kinds:
            raise WireError(f"is a {plain_text(kind, 100)}")
        measure_json(text, MOST_HEADER)
        header = KINDS[kind].model_validate_json(text)
        parts = read_json(metadata["parts"], MOST_HEADER)  # in the sender's order; the file sorts by its own
        if not isinstance(parts, list) or len(parts) > MOST_PARTS or not all(map(is_plain_name, parts)):
            raise WireError(f"its parts must be a list of at most {MOST_PARTS} names")
        weights: Weights = {part: {} for part in parts}
    except ValidationError as error:
        raise WireError(f"not a {expected}: {sentence(error, KINDS[kind], kind)}") from None
    except DECODE_ERRORS as error:
        raise WireError(f"not a {expected}: {first_line(error)}") from None
    for key, tensor in file.tensors.items():
        part, _, name = key.partition("|")
        if part not in weights:
            raise WireError(f"tensor {key!r}: belongs to no part")
        weights[part][name] = tensor
    return Envelope(run, header, weights, metadata.get("answers", ""))


def metadata_of(message: bytes | TensorFile) -> Mapping[str, str]:
    """What stands in a message beside its tensors; nothing where it is none."""
    try:
        return (read_file(message) if isinstance(message, bytes) else message).metadata
    except WireError:
        return {}


def first_line(error: Exception) -> str:
    """The first line of an exception's text."""
    return (str(error).strip().splitlines() or [""])[0]


def encode_request(run: str, request: Request) -> TensorFile:
    """The message of a request."""
    return encode_message(run, to_header(request), with_sums(request.parts, request.sums))


def decode_request(envelope: Envelope) -> Request:
    """The request in a message of that kind; its tensors are still to be checked."""
    assert isinstance(envelope.header, RequestHeader)
    parts, sums = without_sums(envelope.weights)
    request: Request = from_header(envelope.header, parts=parts, sums=sums)
    return request


def encode_reply(run: str, reply: Reply, request: Request, start: str, known: Span = NOTHING) -> TensorFile:
    """The message of a reply to a request.

    Args:
        run: the run.
        reply: the reply.
        request: what it answers.
        start: fingerprint of the run's start model.
        known: the rounds that the site had answered before.
    """
    weights = with_sums(reply.weights, reply.sums)
    return encode_message(run, to_header(reply), weights, answered(request, start, known))


def decode_reply(envelope: Envelope) -> Reply:
    """The reply in a message of that kind; its weights are still to be checked."""
    assert isinstance(envelope.header, ReplyHeader)
    weights, sums = without_sums(envelope.weights)
    reply: Reply = from_header(envelope.header, weights=weights, sums=sums)
    return reply
