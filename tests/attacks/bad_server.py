"""What a bad server may send in place of its messages. Each attack turns the honest bytes into others.

    PYTHONPATH=tests python -m attacks.bad_server '{"a": "20,000 layers"}' run job.toml --engine flower …

is the command ``fedstrata`` of a server that attacks these sites so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from attacks.bad_site import NEST, Attack, metadata
from fedstrata.sites.message_server import MessageServer
from fedstrata.sites.messages import decode_message, encode_message
from fedstrata.wire.tensor_file import TensorFile

Tables = dict[str, dict[str, Any]]
PANICS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
"""A tokenizer's step that ends in a panic of its library for a text such as ``PANIC_TEXT``."""
PANIC_TEXT = "a" * 60 + " b"


def changed(kind: str, change: Callable[[Any, Tables], Any]) -> Attack:
    """Another header or other tensors."""

    def attack(message: bytes) -> bytes:
        envelope = decode_message(message, kind)
        header, weights = envelope.header, {part: dict(own) for part, own in envelope.weights.items()}
        header = change(header, weights) or header
        return bytes(encode_message(envelope.run, header, weights))

    return attack


def job(table: str, **keys: Any) -> Attack:
    """Other keys in the job."""
    return changed(
        "hello",
        lambda header, _: header.model_copy(update={"job": {**header.job, table: header.job[table] | keys}}),
    )


def model_file(name: str, **keys: Any) -> Attack:
    """Other keys in a file of the start model."""

    def change(_: Any, weights: Tables) -> None:
        content = json.dumps(json.loads(weights["files"][name].numpy().tobytes()) | keys).encode()
        weights["files"][name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    return changed("hello", change)


def larger(_: Any, weights: Tables) -> None:
    """One weight is larger."""
    next(iter(next(iter(weights.values())).values())).view(-1)[0] += 1


def no_number(_: Any, weights: Tables) -> None:
    """One weight is no number; a request of the first round has none."""
    for tensor in [tensor for own in weights.values() for tensor in own.values()][:1]:
        tensor.view(-1)[0] = float("nan")


def of_round_1(header: Any, _: Tables) -> Any:
    """The request of the second round, with its weights, as if it were of the first."""
    first = {"round": 0, "span": (0.0, header.span[0])}
    return header.model_copy(update=first) if header.round == 1 else None


ATTACKS: dict[str, tuple[str, Attack, str]] = {
    "a header of nested brackets": ("hello", metadata(header="[" * NEST), "cannot do what it is asked"),
    "code for attention": ("hello", model_file("config.json", attn_implementation="a/b"), "'attn_implementation'"),
    "20,000 layers": ("hello", model_file("config.json", num_hidden_layers=20_000), "has 20000 layers"),
    "a tokenizer that panics": ("hello", model_file("tokenizer.json", pre_tokenizer=PANICS), "PanicException"),
    "a million rounds": ("hello", job("method", rounds=10**6), "the run has 1000000 rounds"),
    "one step of one text": ("hello", job("train", steps=1, batch_size=1), "fewer than 4 rows of its own"),
    "another start model": ("start", changed("start", larger), "is not the one that was announced"),
    "a weight that is no number": ("request", changed("request", no_number), "cannot do what it is asked"),
    "a round asked for twice": ("request", changed("request", of_round_1), "has answered another request"),
}
"""Attack -> the kind of the messages that are attacked, how, and what the site's own log says."""


def main() -> None:
    """The command of a bad server."""
    from fedstrata.cli import main as command

    attacked, honest = json.loads(sys.argv.pop(1)), MessageServer.post

    def post(server: MessageServer, site: str, message: TensorFile, *rest: Any) -> str:
        kind, attack, _ = ATTACKS[attacked[site]] if site in attacked else ("", bytes, "")
        if message.metadata["kind"] == kind:
            message = TensorFile(attack(bytes(message)), {}, {})
        return honest(server, site, message, *rest)

    MessageServer.post = post  # type: ignore[method-assign,assignment]
    command()


if __name__ == "__main__":
    main()
