"""What is asked of an audit beside the job, checked before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedstrata.errors import UserError, did_you_mean
from fedstrata.events import Event

ATTACKS = ("embeddings", "token_head", "class_head", "layers", "hidden_states", "activations")
"""The attacks, by what they read from; those that fit a stage are carried out. ``layers`` reads adapters too."""


@dataclass(frozen=True)
class AuditOptions:
    """What is asked of an audit; see :func:`fedstrata.audit`.

    Raises:
        UserError: there is no such attack, none is named, or one is named twice.
    """

    client: str | None = None
    attacks: Sequence[str] = ATTACKS
    public: str | None = None
    tell: Callable[[Event], None] = lambda event: None
    deep: bool = False

    def __post_init__(self) -> None:
        if not self.attacks:
            raise UserError("--attacks: names none; " + did_you_mean("", ATTACKS))
        for attack in self.attacks:
            if attack not in ATTACKS:
                raise UserError(f"--attacks: {attack!r} is no attack; {did_you_mean(attack, ATTACKS)}")
        if len(set(self.attacks)) < len(self.attacks):
            raise UserError(f"--attacks: names one more than once: {', '.join(self.attacks)}")
