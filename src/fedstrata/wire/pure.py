"""What an object of a caller's own may not rest on: what it remembers by itself, and torch's own random numbers.

Every worker has a copy of it, and a resumed run a new one, so either would silently change a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedstrata.errors import UserError
from fedstrata.plan.components import settings_of


@contextmanager
def pure(component: Any, what: str, lasting: str) -> Iterator[None]:
    """Refuse an object that comes out of a call with other settings, or has drawn random numbers of torch's own.

    An attribute that is new is none of its settings: it may be something computed once.

    Args:
        component: the object; FedStrata's own are not asked.
        what: the object and its method, for the sentence.
        lasting: where what is to last belongs.

    Raises:
        UserError: it does one of the two.
    """
    if type(component).__module__.startswith("fedstrata."):
        yield
        return
    before, drawn = settings_of(component), torch.get_rng_state()
    yield
    after = settings_of(component)
    if changed := [name for name, value in before.items() if after.get(name) != value]:
        raise UserError(
            f"{what} changes its own {changed[0]!r}, which workers and a resumed run do not have; expected what "
            f"is to last in {lasting}"
        )
    if not torch.equal(drawn, torch.get_rng_state()):
        raise UserError(
            f"{what} draws from torch's own random numbers, which differ between workers and in a resumed run; "
            "expected a torch.Generator that is seeded by what the method is given"
        )
