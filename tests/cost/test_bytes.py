"""Bytes on the wire, from shapes alone."""

from __future__ import annotations

import pytest
import torch
import transformers

from fedstrata.cost.bytes import payload
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.wire.codec import DTYPES, payload_bytes, quantize
from fedstrata.wire.tensor_file import pack
from tiny import tiny_model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [("embeddings",), ("layer.1", "head"), ("embeddings", "layer.0", "head"), ()])
def test_payload_is_the_size_of_the_tensors_as_they_travel(names: tuple[str, ...], dtype: str) -> None:
    model = tiny_model()
    parts = find_parts(model)
    assert payload(parts, names, dtype) == payload_bytes(quantize(part_tensors(model, parts, names), dtype))


def test_payload_by_hand() -> None:
    """A layer of width 32 and 64: 4 (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 4 * 32."""
    parts = find_parts(tiny_model())
    assert payload(parts, ["layer.0"]) == 4 * (4 * 1056 + 2112 + 2080 + 128)
    assert payload(parts, ["layer.0"], "fp16") == payload(parts, ["layer.0"], "bf16") == 2 * 8544


def test_int8_of_a_bert_layer_by_hand() -> None:
    """7,087,872 elements: 7,077,888 in matrices of 6,912 rows, each with a scale of 2 bytes; 9,984 in vectors."""
    with torch.device("meta"):
        parts = find_parts(transformers.BertForMaskedLM(transformers.BertConfig()))
    assert payload(parts, ["layer.0"]) == 4 * 7_087_872
    assert payload(parts, ["layer.0"], "int8") == 7_077_888 + 2 * 6_912 + 2 * 9_984
    every = payload(parts, parts.names, "int8") / payload(parts, parts.names)
    assert every == pytest.approx(0.25, rel=0.01)


def test_payload_is_the_message_without_its_header() -> None:
    model = tiny_model()
    parts = find_parts(model)
    message = bytes(pack(part_tensors(model, parts, ["layer.0"]), {}))
    header = 8 + int.from_bytes(message[:8], "little")
    assert len(message) - header == payload(parts, ["layer.0"])


def test_an_unknown_wire_type_is_refused() -> None:
    with pytest.raises(KeyError, match="int4"):
        payload(find_parts(tiny_model()), ["head"], "int4")


def test_bytes_are_elements_times_their_width() -> None:
    made = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.float16), "c": torch.tensor(1.0)}
    assert payload_bytes(made) == 4 * 15 + 2 * 7 + 4
    assert payload_bytes({}) == 0
    assert payload_bytes({"turned": torch.zeros(6, 4)[::2].T}) == 48
