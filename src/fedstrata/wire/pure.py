"""What an object of a caller's own may not rest on: what it remembers by itself, and shared random numbers.

Every worker has a copy of it, and a resumed run a new one, so either would silently change a result.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedstrata.errors import UserError
from fedstrata.plan.components import settings_of


@contextmanager
def pure(component: Any, what: str, lasting: str) -> Iterator[None]:
    """Refuse an object that comes out of a call with other settings, or has drawn as :func:`undrawn` refuses.

    Args:
        component: the object; FedStrata's own are not asked.
        what: the object and its method, for the sentence.
        lasting: what is expected in place of settings that change.

    Raises:
        UserError: it does one of the two.
    """
    before = remembered(component)
    with undrawn(component, what, "a torch.Generator that is seeded by what the method is given"):
        yield
    check_remembered(component, before, what, lasting)


def remembered(component: Any) -> dict[str, str]:
    """The settings of an object of a caller's own, to be compared later."""
    return {} if _ours(component) else settings_of(component)


def check_remembered(component: Any, before: dict[str, str], what: str, lasting: str) -> None:
    """Refuse an object whose settings have changed.

    An attribute that is new, or was None, is none of them: it may be something computed once.

    Args: as :func:`pure`.
    """
    after = remembered(component)
    if changed := [name for name, value in before.items() if after.get(name) != value and value != "null"]:
        raise UserError(
            f"{what} changes its own {changed[0]!r}, which workers and a resumed run do not have; "
            f"expected {lasting}"
        )


@contextmanager
def undrawn(component: Any, what: str, instead: str) -> Iterator[None]:
    """Refuse an object that draws from torch's or numpy's own random numbers; ``instead`` is what is expected.

    Python's are not watched: threads of libraries, such as those that connect again after a while, draw from them.
    """
    if _ours(component):
        yield
        return
    before = _own_numbers()
    yield
    if drawn := [library for library, state in _own_numbers().items() if state != before[library]]:
        raise UserError(
            f"{what} draws from {drawn[0]}'s own random numbers, which differ between workers and in a resumed "
            f"run; expected {instead}"
        )


def _own_numbers() -> dict[str, bytes]:
    """Library -> where its own random numbers have come to."""
    return {"torch": torch.get_rng_state().numpy().tobytes(), "numpy": pickle.dumps(np.random.get_state())}


def _ours(component: Any) -> bool:
    return type(component).__module__.startswith("fedstrata.")
