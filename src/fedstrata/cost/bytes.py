"""Bytes of tensors on the wire: payload alone, from shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedstrata.plan.parts import Parts
from fedstrata.wire.codec import form


def payload(parts: Parts, names: Iterable[str], dtype: str = "fp32") -> int:
    """Bytes of the tensors of the named parts in the given wire type, scales included."""
    held = (form(parts.shapes[name], dtype).values() for name in names)
    return sum(kind.itemsize * math.prod(shape) for each in held for kind, shape in each)
