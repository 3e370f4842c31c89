"""What a bad site may send in place of an answer. Each attack turns the honest bytes into others.

    PYTHONPATH=tests python -m attacks.bad_site join site.toml

is the command ``fedstrata`` of a site that attacks each of its first replies in another way, in turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedstrata.sites.messages import RefusalHeader, decode_message, encode_message
from fedstrata.sites.service import SiteService
from fedstrata.wire.tensor_file import TensorFile

Attack = Callable[[bytes], bytes]
NEST = 100_000
"""Brackets inside one another."""
ESCAPES = "\x1b[31mred\x1b[0m \x1b]0;title\x07 <script>alert(1)</script> \u202eback\u2028 \x00\x08 \ud7ff"


def metadata_of(message: bytes) -> dict[str, str]:
    """The metadata of a message."""
    size = int.from_bytes(message[:8], "little")
    found: dict[str, str] = json.loads(message[8 : 8 + size])["__metadata__"]
    return found


def with_metadata(message: bytes, change: Callable[[dict[str, str]], Any]) -> bytes:
    """A message with other metadata."""
    size = int.from_bytes(message[:8], "little")
    table = json.loads(message[8 : 8 + size])
    change(table["__metadata__"])
    return with_head(message, json.dumps(table))


def with_head(message: bytes, head: str) -> bytes:
    """A message with another head."""
    size = int.from_bytes(message[:8], "little")
    text = head.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + message[8 + size :]


def metadata(**fields: str | None) -> Attack:
    """Other metadata; None leaves a key out."""

    def attack(message: bytes) -> bytes:
        def change(found: dict[str, str]) -> None:
            for key, value in fields.items():
                if value is None:
                    del found[key]
                else:
                    found[key] = value

        return with_metadata(message, change)

    return attack


def header(raw: Mapping[str, str] = {}, **fields: Any) -> Attack:
    """Other values in the header; ``raw`` as JSON text."""

    def attack(message: bytes) -> bytes:
        found = json.loads(metadata_of(message)["header"])
        assert found.keys() >= fields.keys() | raw.keys()
        text = json.dumps({**found, **fields, **{key: f"@{key}@" for key in raw}})
        for key, value in raw.items():
            text = text.replace(f'"@{key}@"', value)
        return metadata(header=text)(message)

    return attack


def weights(change: Callable[[dict[str, dict[str, torch.Tensor]]], Any]) -> Attack:
    """Other tensors."""

    def attack(message: bytes) -> bytes:
        envelope = decode_message(message, "reply")
        own = {part: dict(tensors) for part, tensors in envelope.weights.items()}
        change(own)
        return bytes(encode_message(envelope.run, envelope.header, own, envelope.answers))

    return attack


def filled(value: float) -> Attack:
    """One number of the head is another."""

    def change(own: dict[str, dict[str, torch.Tensor]]) -> None:
        own["head"]["classifier.weight"][0, 0] = value

    return weights(change)


def refusal(reason: str) -> Attack:
    """A refusal."""
    return lambda message: bytes(
        encode_message(metadata_of(message)["run"], RefusalHeader(reason=reason, final=False))
    )


@dataclass
class Replay:
    """The first message that it is given, for ever."""

    first: bytes = b""

    def __call__(self, message: bytes) -> bytes:
        """The first message."""
        self.first = self.first or message
        return self.first


REPLIES: dict[str, tuple[Attack, str]] = {
    "a parts list of nested brackets": (metadata(parts="[" * NEST + "]" * NEST), "not a welcome or reply"),
    "a header of nested brackets": (metadata(header="[" * NEST + "]" * NEST), "not a welcome or reply"),
    "a head of nested brackets": (
        lambda message: with_head(message, '{"__metadata__":' + "[" * NEST + "]" * NEST + "}"),
        "not a welcome or reply",
    ),
    "a part of 5,000 digits": (metadata(parts="[" + "9" * 5000 + "]"), "not a welcome or reply"),
    "steps of 5,000 digits": (header({"steps": "9" * 5000}), "not a welcome or reply"),
    "no run": (metadata(run=None), "not a welcome or reply"),
    "another run": (metadata(run="f" * 32), "answers for another run"),
    "a run of a lone surrogate": (metadata(run="\ud800"), "answers for another run"),
    "no parts": (metadata(parts=None), "not a welcome or reply"),
    "parts that are no list": (metadata(parts='{"head": 1}'), "not a welcome or reply"),
    "a part of a lone surrogate": (metadata(parts='["\\ud800"]'), "not a welcome or reply"),
    "a part of an escape sequence": (metadata(parts='["\\u001b[31m"]'), "not a welcome or reply"),
    "no kind": (metadata(kind="\x1b[31mboth"), "not a welcome or reply"),
    "1e25 examples": (header(examples=10**25), "not a welcome or reply"),
    "a billion examples": (header(examples=10**9), "says that it has 1000000000 examples"),
    "flops of 400 digits": (header({"flops": "1" + "0" * 400}), "not a welcome or reply"),
    "flops of 30 digits": (header(flops=10**30), "not a welcome or reply"),
    "infinite seconds": (header({"seconds": "Infinity"}), "not a welcome or reply"),
    "seconds that are no number": (header({"seconds": "NaN"}), "not a welcome or reply"),
    "a loss that is no number": (header({"loss": "NaN"}), "diverged (loss nan)"),
    "a loss of 1e300": (header(loss=1e300), "diverged (loss 1e+300)"),
    "another client": (header(client="a"), "answers as 'a'"),
    "a key too many": (
        lambda message: metadata(header=metadata_of(message)["header"][:-1] + ', "x": 1}')(message),
        "not a welcome or reply",
    ),
    "scores in training": (
        header(scores={"b": {"accuracy": 1.0}}),
        "scores b, but was asked for a score of nobody",
    ),
    "extra parts": (
        weights(lambda own: own.update(extra=own.pop("head"))),
        "sends what it was not asked for: extra",
    ),
    "a part too few": (weights(lambda own: own.pop("head")), "sends what cannot be used: head: is missing"),
    "a weight that is no number": (filled(float("nan")), "sends what cannot be used: head: classifier.weight"),
    "a weight of 1e30": (filled(1e30), "sends what cannot be used: head: classifier.weight has a number of 1e+30"),
    "no word of what it answers": (metadata(answers=None), "does not say which request it answers"),
    "an answer to nested brackets": (metadata(answers="[" * NEST), "does not say which request it answers"),
    "a request of its own": (
        lambda message: with_metadata(
            message, lambda found: found.update(answers=found["answers"].replace('"request":"', '"request":"0'))
        ),
        "answers another request of this round",
    ),
    "an earlier answer of 10^13": (
        lambda message: with_metadata(
            message,
            lambda found: found.update(answers=found["answers"].replace('"known":[-1', '"known":[' + "9" * 13)),
        ),
        "does not say which request it answers",
    ),
    "another start model": (
        lambda message: with_metadata(
            message, lambda found: found.update(answers=found["answers"].replace('"start":"', '"start":"0'))
        ),
        "answers a run with another start model",
    ),
    "escape sequences and HTML": (refusal(ESCAPES), "red \u2039script\u203aalert(1)"),
    "nothing": (lambda message: b"", "not a welcome or reply"),
    "half of it": (lambda message: message[: len(message) // 2], "not a welcome or reply"),
}
"""Attack on a reply of training -> what is sent, and how the recorded reason begins."""
OF_ONE_ROUND = ("an earlier answer of 10^13", "nothing", "half of it")
IN_TURN = [name for name in REPLIES if name not in OF_ONE_ROUND]
"""Those after which a site can attack again. The first of the others is of one that never answered; after the
two last ones it tries to deliver the same again and again.
"""

SCORES: dict[str, tuple[Attack, str]] = {
    "NaN": (header({"scores": '{"b": {"accuracy": NaN}}'}), "its score of accuracy is nan, which cannot be"),
    "beyond the range": (header(scores={"b": {"accuracy": 7.0}}), "its score of accuracy is 7.0, which cannot be"),
    "of another": (header(scores={"a": {"accuracy": 1.0}}), "scores a, but was asked for a score of b"),
    "of nobody": (header(scores={}), "scores nobody, but was asked for a score of b"),
    "of everybody": (header(scores={"a": {"accuracy": 1.0}, "b": {"accuracy": 1.0}}), "not a welcome or reply"),
    "unknown metric": (
        header(scores={"b": {"luck": 1.0}}),
        "its score has a metric 'luck', which the task",
    ),
    "the best of its metrics alone": (
        header(scores={"b": {"accuracy": 1.0}}),
        "its score lacks loss, macro_f1, matthews",
    ),
    "no metric": (header(scores={"b": {}}), "its score lacks accuracy, loss, macro_f1, matthews"),
}
"""Attack on a reply with a score -> the same."""

GREETINGS: dict[str, tuple[Attack, str]] = {
    "no start model": (header(holds=False), "does not greet back with examples and the start model"),
    "1e25 examples": (header(examples=10**25), "not a welcome or reply"),
    "no examples": (header(examples=0), "does not greet back with examples and the start model"),
    "nested brackets": (metadata(header="[" * NEST), "not a welcome or reply"),
    "escape sequences and HTML": (refusal(ESCAPES), "red \u2039script\u203aalert(1)"),
}
"""Attack on the last answer of a greeting -> the same; the first one to that to the start model."""


def main() -> None:
    """The command of a bad site."""
    from fedstrata.cli import main as command

    left, honest = [REPLIES[name][0] for name in IN_TURN], SiteService.answer

    def answer(service: SiteService, message: bytes | TensorFile) -> TensorFile:
        own = honest(service, message)
        attacked = own.metadata["kind"] == "reply" and left
        return TensorFile(left.pop(0)(bytes(own)), {}, {}) if attacked else own

    SiteService.answer = answer  # type: ignore[method-assign]
    command()


if __name__ == "__main__":
    main()
