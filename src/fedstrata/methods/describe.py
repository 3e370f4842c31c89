"""The methods as a reader sees them: what each does, its paper, its options; from the classes themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from fedstrata.errors import UserError, did_you_mean
from fedstrata.methods import METHODS
from fedstrata.plan.described import described
from fedstrata.plan.plan import Method


def one_line(kind: type[Method]) -> str:
    """What a method does, the first line of its class."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def describe(name: str) -> Iterator[str]:
    """A method's lines: what it does, its paper, requirements and costs, and its options with their defaults.

    Raises:
        UserError: there is no such method.
    """
    if name not in METHODS:
        raise UserError(f"methods: {name!r} is not a method; {did_you_mean(name, METHODS)}")
    kind = METHODS[name]
    yield from (inspect.getdoc(inspect.getmodule(kind)) or "").splitlines()
    yield ""
    yield f"[method]  name = {name!r}; {one_line(kind)}"
    for option in described(kind):
        default = f" = {option.default}" if option.default else ""
        yield f"  {option.name}{default}  ({option.kind})"
        if option.text:
            yield f"      {option.text}"
    for table, keys in kind.preset.items():
        listed = ", ".join(f"{key} = {value!r}" for key, value in keys.items())
        yield f"  presets [{table}] {listed}"
