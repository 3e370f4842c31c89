"""Messages of every kind, changed at random: each is refused by the declared error, or is a message.

    python tests/fuzz.py --messages 1000000        as ``make fuzz``; prints what became of them

Three ways in are tried. A *file* is what :func:`decode_message` takes, a reply with all the checks of a server. A
*delivery* is the file as it travels, with its checksum: none may come out other than it was sent. A *batch* is a
message of split learning.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.server.server import Server
from fedstrata.sites.answered import check_answered
from fedstrata.sites.message_stream import frames, read_frames, read_header
from fedstrata.sites.messages import (
    KINDS,
    FarewellHeader,
    HelloHeader,
    RefusalHeader,
    StartHeader,
    WelcomeHeader,
    decode_message,
    decode_reply,
    decode_request,
    encode_message,
    encode_reply,
    encode_request,
)
from fedstrata.sites.reply_checks import check_reply
from fedstrata.sites.stream import StreamHeader, decode_stream_message, encode_stream_message
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import Reader
from tiny import tiny_model

RUN, START = "0" * 32, "a" * 64
WORDS = [
    *(b"NaN", b"Infinity", b"-1", b"1e999", b"null", b"true", b"{}", b"[]", b'""', b"9" * 60, b"9" * 5000),
    *(b"\\ud800", b"\\u001b[31m", b"\\u0000", b"[" * 3000, b'{"a":' * 3000, b'"', b"\\", b"\xff", b"\xed\xa0\x80"),
    *(b"__metadata__", b"F64", b"BOOL", b"data_offsets", b"18446744073709551615", b"reply", b"hello", b"parts"),
]
"""Put in at random places."""


@dataclass(frozen=True)
class Material:
    """What is changed, and what it is checked against."""

    server: Server
    request: Request
    files: dict[str, bytes]
    deliveries: dict[str, list[bytes]]
    batches: dict[str, bytes]


@functools.cache
def material() -> Material:
    """An honest message of every kind."""
    model = tiny_model(head="classify", layers=1, num_labels=3)
    parts = find_parts(model)
    weights = {part: part_tensors(model, parts, [part]) for part in parts.names}
    weights = {part: {name: t.detach().clone() for name, t in own.items()} for part, own in weights.items()}
    plan = Plan((0,), ("head",), ("head",))
    request = Request(1, "a", plan, "train", {"head": 2}, {"head": weights["head"]}, True, (0.25, 0.5))
    reply = Reply("a", 4, {"head": weights["head"]}, 0.5, 2, Positions(8, 64, 2), 1000, 0.25)
    hello = HelloHeader(
        version="1",
        stage="",
        job={"task": {"kind": "classify"}},
        long_text=None,
        share=0.1,
        labels=("x", "y"),
        start=START,
    )
    files = {"config.json": torch.frombuffer(bytearray(b'{"a": 1}'), dtype=torch.uint8)}
    made = {
        "hello": encode_message(RUN, hello, {"files": files}),
        "start": encode_message(RUN, StartHeader(), {"head": weights["head"]}),
        "request": encode_request(RUN, request),
        "farewell": encode_message(RUN, FarewellHeader(save=True)),
        "welcome": encode_message(RUN, WelcomeHeader(examples=4, holds=True)),
        "reply": encode_reply(RUN, reply, request, START),
        "refusal": encode_message(RUN, RefusalHeader(reason="refuses: so", final=False)),
    }
    states = {"states": torch.zeros(2, 3, dtype=torch.float16), "lengths": torch.ones(2, dtype=torch.int32)}
    batches = {
        "begin": encode_stream_message(StreamHeader("begin", ScheduleSpan(3, 3, 0.0, 0.5)), {}),
        "forward": encode_stream_message(StreamHeader("forward"), states),
    }
    return Material(
        Server(parts, weights),
        request,
        {kind: bytes(file) for kind, file in made.items()},
        {kind: list(frames("message", file)) for kind, file in made.items()},
        batches,
    )


def changed(rng: random.Random, message: bytes, other: bytes) -> bytes:
    """A message with one to four changes."""
    found = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        most = len(found) if rng.random() < 0.3 else min(len(found), 2000)  # mostly in the head
        at, length = rng.randrange(most + 1), rng.choice((1, 1, 2, 8, 64))
        what = rng.randrange(7)
        if what == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del found[at : at + length]
        elif what == 2:
            found[at:at] = rng.randbytes(length)
        elif what == 3:
            found[at : at + rng.choice((0, length))] = rng.choice(WORDS)
        elif what == 4:
            found[at:at] = found[at : at + length]
        elif what == 5:
            found[at:] = other[rng.randrange(len(other)) :]
        else:
            found[:8] = rng.choice((len(found), rng.randrange(2**24), 2**63, 0)).to_bytes(8, "little")
            del found[rng.choice((at, len(found))) :]
    return bytes(found)


def try_file(rng: random.Random) -> tuple[str, str]:
    """What becomes of a file."""
    have = material()
    kind = rng.choice(list(have.files))
    message = changed(rng, have.files[kind], have.files[rng.choice(list(have.files))])
    try:
        envelope = decode_message(message, *KINDS)
        if type(envelope.header) is KINDS["reply"]:
            reply = decode_reply(envelope)
            check_answered(envelope.answers, have.request, START)
            check_reply(have.server, have.request, reply, {"accuracy"})
        elif type(envelope.header) is KINDS["request"]:
            decode_request(envelope)
    except WireError:
        return f"file: {kind}", "refused"
    return f"file: {kind}", "as it was" if message == have.files[kind] else "another message"


def try_delivery(rng: random.Random) -> tuple[str, str]:
    """What becomes of a file on its way: one of its frames is changed, lost, doubled or in another place."""
    have = material()
    kind = rng.choice(list(have.deliveries))
    sent = list(have.deliveries[kind])
    at, what = rng.randrange(len(sent)), rng.randrange(5)
    if what == 0:
        del sent[at]
    elif what == 1:
        sent.insert(rng.randrange(len(sent) + 1), sent[at])
    elif what == 2:
        rng.shuffle(sent)
    else:
        sent[at] = changed(rng, sent[at], sent[-1])
    try:
        rest = iter(sent)
        header = read_header(next(rest, b""))
        file = read_frames(Reader(header.size), rest)
    except WireError:
        return f"delivery: {kind}", "refused"
    return f"delivery: {kind}", "as it was" if bytes(file) == have.files[kind] else "another message"


def try_batch(rng: random.Random) -> tuple[str, str]:
    """What becomes of a message of split learning."""
    have = material()
    kind = rng.choice(list(have.batches))
    message = changed(rng, have.batches[kind], have.batches[rng.choice(list(have.batches))])
    try:
        decode_stream_message(message)
    except WireError:
        return f"batch: {kind}", "refused"
    return f"batch: {kind}", "as it was" if message == have.batches[kind] else "another message"


WAYS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (try_file, try_file, try_delivery, try_batch)


def fuzz(messages: int, seed: int) -> Counter[tuple[str, str]]:
    """(kind, what became of it) -> how many of so many messages.

    Raises:
        AssertionError: a message with a checksum came out as another one.
        Exception: any but the declared error, with the number that makes the message again.
    """
    found: Counter[tuple[str, str]] = Counter()
    for number in range(messages):
        name = f"{seed} {number}"
        rng = random.Random(name)
        try:
            kind, outcome = rng.choice(WAYS)(rng)
        except Exception as error:
            raise AssertionError(f"message {name!r}: {type(error).__name__}: {error}") from error
        assert not (kind.startswith("delivery") and outcome == "another message"), f"message {name!r}: {kind}"
        found[kind, outcome] += 1
    return found


def main() -> None:
    """Try so many messages and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = fuzz(options.messages, options.seed)
    outcomes = ("refused", "another message", "as it was")
    print("| kind | " + " | ".join(outcomes) + " |\n|---|" + "---:|" * len(outcomes))
    for kind in sorted({kind for kind, _ in found}):
        print(f"| {kind} | " + " | ".join(f"{found[kind, outcome]:,}" for outcome in outcomes) + " |")
    print(f"{sum(found.values()):,} messages, seed {options.seed}: no error but the declared one")


if __name__ == "__main__":
    main()
