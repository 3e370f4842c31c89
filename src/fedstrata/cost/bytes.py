"""Bytes of parts as they travel: payload alone, from shapes."""

from __future__ import annotations

from collections.abc import Iterable

from fedstrata.plan.parts import Parts
from fedstrata.wire.codec import spec_bytes, wire_spec


def payload(parts: Parts, names: Iterable[str], dtype: str = "fp32") -> int:
    """Bytes of the tensors of the named parts in the given wire type, scales included."""
    return sum(spec_bytes(wire_spec(parts.shapes[name], dtype)) for name in names)
