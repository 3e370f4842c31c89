"""The templates of all pages."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def templates() -> Environment:
    """They escape what they are given, and refuse a name that they are not given."""
    return Environment(
        loader=PackageLoader("fedstrata", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
