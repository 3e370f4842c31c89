"""Bytes on the wire, from shapes alone."""

from __future__ import annotations

import pytest

from fedstrata.core.parts import find, tensors
from fedstrata.cost.bytes import ITEM, payload
from fedstrata.cost.ledger import size
from fedstrata.wire.tensors import DTYPES, encode, narrow
from tiny import tiny_model


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("names", [("embeddings",), ("layer.1", "head"), ("embeddings", "layer.0", "head"), ()])
def test_payload_is_the_size_of_the_tensors_as_they_travel(names: tuple[str, ...], dtype: str) -> None:
    model = tiny_model()
    parts = find(model)
    assert payload(parts, names, dtype) == size(narrow(tensors(model, parts, names), dtype))


def test_payload_by_hand() -> None:
    """A layer of width 32 and 64: 4 (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 4 * 32."""
    parts = find(tiny_model())
    assert payload(parts, ["layer.0"]) == 4 * (4 * 1056 + 2112 + 2080 + 128)
    assert payload(parts, ["layer.0"], "fp16") == payload(parts, ["layer.0"], "bf16") == 2 * 8544


def test_every_wire_type_has_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM


def test_payload_is_the_message_without_its_header() -> None:
    model = tiny_model()
    parts = find(model)
    message = encode(tensors(model, parts, ["layer.0"]))
    header = 8 + int.from_bytes(message[:8], "little")
    assert len(message) - header == payload(parts, ["layer.0"])


def test_an_unknown_wire_type_is_refused() -> None:
    with pytest.raises(KeyError, match="int4"):
        payload(find(tiny_model()), ["head"], "int4")
