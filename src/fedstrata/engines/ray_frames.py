"""What a Ray worker answers, as bytes of our own: safetensors with a JSON head, never a pickle.

    played      a reply, its tensors, and the files that the client has written
    predicted   the batches of test rows, their arrays beside them
    failed      whether the user can put it right, and the text

Ray itself pickles what passes between a program and its actors, here bytes, text and numbers.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from fedstrata.engines.player import Answer, Failed, Played, without_weights
from fedstrata.errors import UserError
from fedstrata.events import Encoded, Event, Stepped
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Positions, Reply
from fedstrata.tasks.task import Predicted
from fedstrata.wire.codec import WireError
from fedstrata.wire.tensor_file import JSON_ERRORS, pack, read_file

ARRAY = "array"
"""Key of a table that stands for an array: its number."""
EVENTS = {kind.__name__: kind for kind in (Stepped, Encoded)}
"""What a worker tells while it plays."""


class WorkerError(RuntimeError):
    """What went wrong in a worker, in its own words."""


def encode_answer(answer: Answer) -> tuple[str, bytes, str]:
    """An answer's kind, its frame, and what stands beside it, as JSON."""
    if isinstance(answer, Played):
        bare, tensors = without_weights(answer)
        numbered = {str(number): tensor for number, tensor in enumerate(tensors.values())}
        table = [_fields(bare.reply), list(bare.reply.weights), list(tensors), answer.notes]
        return "played", bytes(pack(numbered, {})), json.dumps(table)
    if isinstance(answer, Failed):
        return "failed", b"", json.dumps(_said(answer))
    arrays: Tensors = {}
    batches = [
        [*(_plain(value, arrays) for value in (each.truth, each.guess, each.origin)), each.loss] for each in answer
    ]
    return "predicted", bytes(pack(arrays, {})), json.dumps(batches)


def decode_answer(kind: str, frame: bytes, beside: str) -> Answer:
    """The answer of :func:`encode_answer`; a reply's tensors are still to be checked.

    Raises:
        WireError: it is none.
    """
    try:
        table = json.loads(beside)
        if kind == "played":
            return _played(table, read_file(frame).tensors or {})
        if kind == "failed":
            user, text = table
            return Failed(pickle.dumps(UserError(text) if user else WorkerError(text)))
        arrays = read_file(frame).tensors or {}
        return [
            Predicted(_value(truth, arrays), _value(guess, arrays), float(loss), _value(origin, arrays))
            for truth, guess, origin, loss in table
        ]
    except (*JSON_ERRORS, AttributeError, WireError) as error:
        raise WireError(f"a worker's answer cannot be used: {error}") from None


def encode_events(events: list[Event]) -> str:
    """Events as JSON."""
    return json.dumps([[type(event).__name__, *astuple(event)] for event in events])


def decode_events(text: str) -> list[Event]:
    """The events of :func:`encode_events`."""
    return [EVENTS[kind](*fields) for kind, *fields in json.loads(text)]


def encode_tensors(tensors: Mapping[Any, torch.Tensor]) -> np.ndarray[Any, Any]:
    """Tensors as an array of bytes, which Ray keeps once for all workers of a machine."""
    file = pack({str(name): tensor for name, tensor in tensors.items()}, {})
    return np.frombuffer(bytes(file), np.uint8)


def decode_tensors(frame: np.ndarray[Any, Any]) -> Tensors:
    """A copy of the tensors of :func:`encode_tensors`."""
    return read_file(frame.tobytes()).tensors or {}


def _fields(reply: Reply) -> list[Any]:
    """A reply without its weights, in the order of :func:`_played`."""
    counts = [reply.examples, reply.steps, reply.flops, *astuple(reply.work)]
    return [reply.client, counts, [reply.loss, reply.seconds], reply.scores]


def _played(table: list[Any], tensors: Tensors) -> Played:
    (client, counts, (loss, seconds), scores), parts, places, notes = table
    examples, steps, flops, *work = map(int, counts)
    weights = {str(part): Tensors() for part in parts}
    for (part, name), number in zip(places, range(len(tensors)), strict=True):
        weights[part][str(name)] = tensors[str(number)]
    reply = Reply(
        client=str(client),
        examples=examples,
        weights=weights,
        loss=float(loss),
        steps=steps,
        work=Positions(*work),
        flops=flops,
        seconds=float(seconds),
        scores={str(of): {str(name): float(value) for name, value in own.items()} for of, own in scores.items()},
    )
    return Played(reply, tuple((str(key), str(path), str(checksum)) for key, path, checksum in notes))


def _said(failed: Failed) -> tuple[bool, str]:
    error = pickle.loads(failed.error)  # of this process's own making
    if isinstance(error, UserError):
        return True, str(error)
    return False, "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _plain(value: Any, arrays: Tensors) -> Any:
    """A prediction as JSON takes it, its arrays put beside it."""
    if isinstance(value, np.ndarray | torch.Tensor):
        number = str(len(arrays))
        arrays[number] = torch.as_tensor(value).cpu().contiguous()
        return {ARRAY: number}
    if isinstance(value, list | tuple):
        return [_plain(each, arrays) for each in value]
    return value


def _value(found: Any, arrays: Tensors) -> Any:
    if isinstance(found, dict):
        return arrays[found[ARRAY]].numpy()
    return [_value(each, arrays) for each in found] if isinstance(found, list) else found
