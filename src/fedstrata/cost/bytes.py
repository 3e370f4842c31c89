"""Bytes of tensors on the wire: payload alone, from shapes."""

from __future__ import annotations

from collections.abc import Iterable

from fedstrata.core.parts import Parts

ITEM = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Wire type -> bytes per element."""


def payload(parts: Parts, names: Iterable[str], dtype: str = "fp32") -> int:
    """Bytes of the tensors of the named parts in the given wire type."""
    return parts.elements(names) * ITEM[dtype]
