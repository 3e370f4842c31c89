"""What of a run a caller may bring in place of what the job names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import isclass
from typing import TYPE_CHECKING

from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.methods import METHODS
from fedstrata.plan.components import AT_SITES, identity, installed_name

if TYPE_CHECKING:
    from fedstrata.plan.plan import Method
    from fedstrata.server.aggregate import Aggregate
    from fedstrata.server.optimizer import ServerOptimizer
    from fedstrata.tasks import Task, TaskContext
    from fedstrata.wire.codec import Codec

NEEDS: Mapping[str, Sequence[str]] = {
    "method": ("plan", "presets"),
    "codec": ("name", "changes", "wire_spec", "encode", "decode"),
    "server_optimizer": ("step",),
}
"""Component that is an object -> what it must have."""


@dataclass(frozen=True)
class Components:
    """Objects of a caller's own; None for what the job names.

    Attributes:
        method: in place of ``[method]``, in every stage.
        task: builds the task of every stage, in place of what ``[task] kind`` names.
        codec: in place of ``[wire] dtype`` for parts of the model.
        aggregate: begins a round's aggregate, in place of ``[server] aggregate``.
        server_optimizer: in place of ``[server] optimizer``.

    Raises:
        UserError: a class stands in an object's place, an object in that of what makes one, or an object lacks
            what it is asked for.
    """

    method: Method | None = None
    task: Callable[[TaskContext], Task] | None = None
    codec: Codec | None = None
    aggregate: Callable[[], Aggregate] | None = None
    server_optimizer: ServerOptimizer | None = None

    def __post_init__(self) -> None:
        for name, needs in NEEDS.items():
            if isclass(own := getattr(self, name)):
                raise UserError(
                    f"{name}: {own.__name__} is a class; expected an object of it, such as {own.__name__}()"
                )
            if own is not None and (lacks := [need for need in needs if not hasattr(own, need)]):
                which = getattr(own, "__name__", f"an object of {type(own).__name__}")
                raise UserError(f"{name}: {which} has no {lacks[0]}; expected an object with {', '.join(needs)}")
        for name in ("task", "aggregate"):
            if (own := getattr(self, name)) is not None and not callable(own):
                kind = type(own).__name__
                raise UserError(
                    f"{name}: found an object of {kind}; expected what makes one, such as the class {kind}"
                )

    def of(self, job: Job) -> Components:
        """These, and the method that a stage's job itself holds as an object."""
        named = type(job.method) in METHODS.values()
        return self if named or self.method is not None else replace(self, method=job.method)

    def identities(self) -> dict[str, str]:
        """Component -> what a resumed run compares: name and digest of its source and settings."""
        return {
            field.name: identity(getattr(self, field.name))
            for field in fields(self)
            if getattr(self, field.name) is not None
        }

    def installed(self) -> dict[str, tuple[str, str]]:
        """Component -> (entry point, identity) of those that sites must have too.

        Raises:
            UserError: one of them is not installed as an entry point.
        """
        brought = {part: getattr(self, part) for part in AT_SITES if getattr(self, part) is not None}
        return {part: (installed_name(part, own), identity(own)) for part, own in brought.items()}


def check_between_sites(job: Job, components: Components) -> None:
    """Refuse what sites cannot have, and what masked sums cannot.

    Raises:
        UserError: a class of the caller's own is not installed as an entry point, or needs single messages.
    """
    for part, why in (
        ("aggregate", "works on single messages, of which the server sees none"),
        ("codec", "makes messages that are no integers to be added"),
    ):
        if job.privacy.sum_only and getattr(components, part) is not None:
            raise UserError(f"[privacy] sum_only: the run's own {part} {why}; expected false, or none")
    if job.between_sites:
        components.of(job).installed()
