"""Callbacks of a run: objects with methods for the kinds of events they want, or functions of every event."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from fedstrata.errors import UserError, did_you_mean
from fedstrata.events import (
    Awaited,
    Counted,
    Encoded,
    Event,
    Missed,
    Noted,
    Replied,
    RoundEnded,
    Scored,
    StageEnded,
    StageStarted,
    Stepped,
    Waiting,
)


class Callback:
    """What a callback may have; one with some of these methods is one, too. They are called in the run's process.

    An exception ends the run; ``fedstrata.run(..., resume=True)`` continues it.
    """

    def on_stage_started(self, event: StageStarted) -> None:
        """A stage begins, or goes on."""

    def on_stepped(self, event: Stepped) -> None:
        """A client finished a training step."""

    def on_encoded(self, event: Encoded) -> None:
        """A frozen encoder has encoded some more texts."""

    def on_counted(self, event: Counted) -> None:
        """Some more plans were checked, rounds forecast, or clients' noise calibrated."""

    def on_replied(self, event: Replied) -> None:
        """A client replied."""

    def on_missed(self, event: Missed) -> None:
        """A client did not reply."""

    def on_waiting(self, event: Waiting) -> None:
        """The run waits for clients to connect."""

    def on_awaited(self, event: Awaited) -> None:
        """Sites have been asked, and the run waits for their answers."""

    def on_scored(self, event: Scored) -> None:
        """A model was scored."""

    def on_round_ended(self, event: RoundEnded) -> None:
        """A round is over."""

    def on_noted(self, event: Noted) -> None:
        """There is something that the user should know."""

    def on_stage_ended(self, event: StageEnded) -> None:
        """A stage is over."""


def handler_name(kind: type) -> str:
    """The method that takes events of a class: ``on_stage_started`` of ``StageStarted``."""
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


HANDLERS = {name for kind in typing.get_args(Event) if hasattr(Callback, name := handler_name(kind))}


def calls(callbacks: Sequence[Any]) -> Callable[[Event], None]:
    """One function that hands an event to all of them, in their order.

    Raises:
        UserError: one has no method for any event, or one whose name is close to that of an event's.
    """
    for callback in callbacks:
        _check(callback)

    def call(event: Event) -> None:
        name = handler_name(type(event))
        for callback in callbacks:
            handle = getattr(callback, name, None) if _methods(callback) else callback
            if handle is not None:
                handle(event)

    return call


def _methods(callback: Any) -> list[str]:
    return [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]


def _check(callback: Any) -> None:
    found = _methods(callback)
    if unknown := next((name for name in found if name not in HANDLERS), None):
        raise UserError(
            f"callbacks: {type(callback).__name__}.{unknown} is called for no event; "
            f"{did_you_mean(unknown, sorted(HANDLERS))}"
        )
    if isinstance(callback, type):
        raise UserError(
            f"callbacks: {callback.__name__} is a class; expected an object of it: {callback.__name__}()"
        )
    if not found and not callable(callback):
        listed = ", ".join(sorted(HANDLERS))
        raise UserError(
            f"callbacks: an object of {type(callback).__name__} is neither a function nor has it one of: {listed}"
        )
