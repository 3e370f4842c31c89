"""Classes of a caller's own: how a resumed run and a site know that they are still the same. No code is ever sent.

A class that is installed with a package may be registered under one of the :data:`GROUPS` of entry points; only
then can it be used between sites, where every site must have the same source installed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from importlib.metadata import entry_points
from numbers import Number
from typing import Any

from fedstrata.errors import UserError
from fedstrata.plan.plan import Method

GROUPS: Mapping[str, str] = {
    "method": "fedstrata.methods",
    "task": "fedstrata.tasks",
    "codec": "fedstrata.codecs",
    "aggregate": "fedstrata.aggregates",
    "server_optimizer": "fedstrata.server_optimizers",
}
"""Component -> its group of entry points."""
AT_SITES = ("method", "task", "codec")
"""Components that a site needs too."""


def identity(component: Any) -> str:
    """What a run writes down of a component: its name, and a digest of its source and of its settings.

    Settings are the attributes that JSON can hold, sets, and fields of data classes; of a function what it uses of
    the function around it, of a ``functools.partial`` its arguments. Tensors, functions and other objects are not
    compared; nor are a method's rounds, of which a run may get more.

    Args:
        component: an object, a class or a function.
    """
    kind = _kind(component)
    digest = hashlib.sha256(_source(kind).encode())
    digest.update(repr(sorted(settings_of(component).items())).encode())
    return f"{kind.__module__}.{kind.__qualname__} {digest.hexdigest()[:16]}"


def installed_name(part: str, component: Any) -> str:
    """The name under which a component's class is registered as an entry point.

    Args:
        part: a key of :data:`GROUPS`.
        component: an object, a class or a function.

    Raises:
        UserError: it is registered under none.
    """
    kind = _kind(component)
    for entry in entry_points(group=GROUPS[part]):
        if entry.value == f"{kind.__module__}:{kind.__qualname__}":
            return entry.name
    raise UserError(
        f"{part}: {kind.__qualname__} is not installed; between sites no code is sent, so a class of one's own "
        f"has to be installed at every site and registered as an entry point of the group {GROUPS[part]!r}"
    )


def load_installed(part: str, name: str) -> Any:
    """The class or function that is registered under a name.

    Raises:
        UserError: none is.
    """
    for entry in entry_points(group=GROUPS[part]):
        if entry.name == name:
            return entry.load()
    raise UserError(f"{part}: {name!r} is not installed here (entry points {GROUPS[part]!r})")


def _kind(component: Any) -> Any:
    """The class or function whose source a component is of."""
    if isinstance(component, partial):
        return _kind(component.func)
    return component if inspect.isclass(component) or inspect.isfunction(component) else type(component)


def settings_of(component: Any) -> dict[str, str]:
    """The plain values that an object holds: what JSON can, lists and tables included."""
    settings = {}
    for name, value in _held(component).items():
        with suppress(TypeError, ValueError):
            settings[name] = json.dumps(value, sort_keys=True, default=_plain)
    return settings


def _held(component: Any) -> dict[str, Any]:
    """All that an object holds, by name."""
    if isinstance(component, partial):
        given = {f"argument {place}": value for place, value in enumerate(component.args)}
        return {**_held(component.func), **given, **component.keywords}
    if inspect.isclass(component):
        return {}
    if inspect.isfunction(component):
        return dict(inspect.getclosurevars(component).nonlocals)
    slots = {name for base in type(component).__mro__ for name in _slots(base) if hasattr(component, name)}
    held = {**{name: getattr(component, name) for name in slots}, **getattr(component, "__dict__", {})}
    return {name: value for name, value in held.items() if name != "rounds" or not isinstance(component, Method)}


def _slots(base: type) -> tuple[str, ...]:
    found = vars(base).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in names if not name.startswith("__"))  # pydantic's own, and the table of all


def _plain(value: Any) -> Any:
    """For JSON: numbers of numpy, sets and data classes, which it does not know."""
    if isinstance(value, Number):
        return value.item() if hasattr(value, "item") else repr(value)  # such as a Fraction
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if is_dataclass(value):
        return _held(value)
    raise TypeError


def _source(kind: Any) -> str:
    """The source of a class with its bases outside FedStrata, or of a function."""
    bases = kind.__mro__[:-1] if inspect.isclass(kind) else (kind,)
    sources = []
    for base in bases:
        if base is kind or not base.__module__.startswith(("fedstrata.", "pydantic.", "abc")):
            try:
                sources.append(inspect.getsource(base))
            except (OSError, TypeError):
                raise UserError(
                    f"{base.__qualname__}: its source cannot be read, so a resumed run could not tell whether it "
                    "is still the same; define it in a file"
                ) from None
    return "".join(sources)
