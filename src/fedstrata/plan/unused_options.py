"""Options of a method that change nothing as the others are set: whatever their value, the plans are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from fedstrata.errors import UserError
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method
from fedstrata.plan.streams import SERVER, Streams

ROUNDS, CLIENTS = 100, 8
"""How many of them are compared at most; what an option changes shows in the first."""


def unused_options(
    method: Method, parts: Parts, task: str, clients: Sequence[str], streams: Streams
) -> tuple[str, ...]:
    """The options that were set and that no plan depends on.

    Args:
        method: the job's.
        parts: the model's, without adapters.
        task: the task's kind.
        clients: their names.
        streams: the job's.
    """
    fields = type(method).model_fields
    found = []
    for name in fields.keys() & method.model_fields_set - {"rounds"}:
        value, default = getattr(method, name), fields[name].get_default(call_default_factory=True)
        names = (SERVER, *clients[:CLIENTS], *(value if isinstance(value, Mapping) else ()))
        others = [other for other in (default, *_others(value, fields[name].annotation)) if other != value]
        as_it_is = method, parts, task, names, streams
        if value != default and all(_same(*as_it_is, method.model_copy(update={name: o})) for o in others):
            found.append(name)
    return tuple(name for name in fields if name in found)


def _others(value: Any, annotation: Any) -> Iterator[Any]:
    """Other values that an option of this type may have."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value > 1:
            yield value - 1
    elif isinstance(value, Mapping):
        yield {key: one + 1 if isinstance(one, int) else one for key, one in value.items()}
    elif isinstance(value, str):
        yield from _words(annotation)


def _words(annotation: Any) -> Iterator[str]:
    """The words of every ``Literal`` in a type."""
    for part in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield part
        else:
            yield from _words(part)


def _same(
    method: Method, parts: Parts, task: str, clients: Sequence[str], streams: Streams, other: Method
) -> bool:
    """The two do the same; one whose value is refused does not."""
    try:
        if (method.exchange, method.client_schedule, method.presets()) != (
            other.exchange,
            other.client_schedule,
            other.presets(),
        ):
            return False
        return all(
            method.plan(parts, task, round, client, streams) == other.plan(parts, task, round, client, streams)
            for round in range(min(method.rounds, ROUNDS))
            for client in clients
        )
    except (UserError, ValueError):
        return False
