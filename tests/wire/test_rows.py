"""Rows in few bits or with few entries, and the stream's messages made of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from fedstrata.wire.activations import (
    StreamForm,
    decode_gradients,
    decode_states,
    encode_gradients,
    encode_states,
    message_bytes,
    pack,
)
from fedstrata.wire.codec import DTYPES, WireError, check, payload_bytes
from fedstrata.wire.rows import RowForm, decode_rows, encode_rows, rows_spec

FORMS = [
    RowForm(dtype, density)
    for dtype in ("fp32", "fp16", "bf16", "int8", "int4")
    for density in (1.0, 0.5, 0.1, 0.001)
]
QUICK = settings(max_examples=40)


def drawn(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)) ** 3


@QUICK
@given(rows=some.integers(1, 6), hidden=some.integers(1, 70), form=some.sampled_from(FORMS))
def test_rows_take_the_bytes_that_are_known_before(rows: int, hidden: int, form: RowForm) -> None:
    states = drawn(rows, hidden)
    message, spec = encode_rows("x", states, form), rows_spec("x", rows, hidden, form)
    check(message, spec)
    assert payload_bytes(message) == rows * form.row_bytes(hidden)
    back = decode_rows("x", message, hidden, form)
    assert back.shape == (rows, hidden)
    assert ((back != 0).sum(1) <= form.kept(hidden)).all()
    kept = states.abs().topk(form.kept(hidden), dim=1)
    step = kept.values.amax(1, keepdim=True) * {"int8": 1 / 127, "int4": 1 / 7}.get(form.dtype, 2.0**-7)
    error = (back - states).gather(1, kept.indices).abs()
    assert (error <= 0.51 * step).all(), "the largest entries, each half a step off at most"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_all_entries_in_a_float_type_are_the_plain_stream(dtype: str) -> None:
    states = drawn(5, 32)
    message = encode_rows("activations", states, RowForm(dtype))
    assert message.keys() == {"activations"}
    assert torch.equal(message["activations"], states.to(DTYPES[dtype]))
    assert torch.equal(decode_rows("activations", message, 32, RowForm(dtype)), states.to(DTYPES[dtype]).float())


def test_int4_by_hand() -> None:
    message = encode_rows("x", torch.tensor([[7.0, -7.0, 1.2], [0.0, 0.0, 0.0]]), RowForm("int4"))
    assert message["x"].tolist() == [[14 + 16 * 0, 8], [7 + 16 * 7, 7]]
    assert message["x:scale"].tolist() == [1, 0]
    assert decode_rows("x", message, 3, RowForm("int4")).tolist() == [[7, -7, 1], [0, 0, 0]]


def test_the_target_of_a_tenth_of_fp16() -> None:
    """Width 768: int4 of a fifth of the channels."""
    assert RowForm("fp16").row_bytes(768) == 1536
    assert RowForm("int4").row_bytes(768) == 386
    assert RowForm("int4", 0.1).row_bytes(768) == 39 + 2 + 29 + 22
    assert RowForm("int4", 0.15).row_bytes(768) <= 0.1 * 1536


LENGTHS = torch.tensor([4, 2])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_session_takes_the_bytes_that_are_known_before(form: RowForm) -> None:
    whole = drawn(8, 48).view(2, 4, 48) * 1e-6
    sent = {
        "activations": encode_states(whole, LENGTHS, form),
        "gradients": encode_gradients(whole, LENGTHS, form),
    }
    sizes = message_bytes(6, 2, 48, StreamForm(form, form))
    assert payload_bytes(sent["activations"]) + 8 == sizes["up", "activations"]
    assert payload_bytes(sent["activations"]) == sizes["down", "activations"]
    assert payload_bytes(sent["gradients"]) == sizes["up", "gradients"] == sizes["down", "gradients"]
    packed = pack(whole, LENGTHS)
    for back in (
        decode_states(sent["activations"], 6, 48, form),
        decode_gradients(sent["gradients"], 6, 48, form),
    ):
        assert back.shape == (6, 48)
        assert (back.abs().amax(1) <= 1.02 * packed.abs().amax(1) + 1e-7).all()
    back = decode_gradients(sent["gradients"], 6, 48, form)
    far = packed.abs().topk(form.kept(48), dim=1)
    assert torch.allclose(
        back.gather(1, far.indices[:, :1]), packed.gather(1, far.indices[:, :1]), rtol=0.01, atol=0
    ), "the largest of each token, however small"


FEW = RowForm("int4", 0.1)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("activations:places", lambda t: t * 0, "activations:places: must be 5 in every row"),
        ("activations:places", lambda t: t | 255, "activations:places: must be 5 in every row"),
        ("activations:places", lambda t: t[:, 1:], "activations:places: is torch.uint8"),
        ("activations:scale", lambda t: t * torch.nan, "holds a value that is not finite"),
        ("activations:scale", lambda t: t[:-1], "activations:scale: is torch.bfloat16"),
        ("activations", lambda t: t.to(torch.int8), "activations: is torch.int8"),
        ("more", lambda t: torch.zeros(1), "names differ"),
    ],
)
def test_a_message_that_is_none_is_refused(name: str, change: Any, words: str) -> None:
    message = encode_states(drawn(8, 48).view(2, 4, 48), LENGTHS, FEW)
    decode_states(message, 6, 48, FEW)
    with pytest.raises(WireError, match=words):
        decode_states({**message, name: change(message.get(name))}, 6, 48, FEW)


def test_what_outgrows_fp32_with_its_scale_is_refused() -> None:
    """Codes and scales are finite by themselves."""
    form, rows = RowForm("int8"), torch.tensor([[1.0, 2.0]])
    states = encode_states(rows[None], torch.tensor([1]), form)
    states["activations:scale"].fill_(3e38)
    with pytest.raises(WireError, match="activations: are not finite once multiplied by their scale"):
        decode_states(states, 1, 2, form)
    gradients = encode_gradients(rows[None], torch.tensor([1]), RowForm("fp16"))
    gradients["scale"].fill_(1e-40)
    with pytest.raises(WireError, match="gradients: are not finite once multiplied by their scale"):
        decode_gradients(gradients, 1, 2, RowForm("fp16"))


@pytest.mark.parametrize("form", [RowForm("int4", 0.1), RowForm("fp16", 0.5)])
def test_whatever_is_read_are_places_of_the_row(form: RowForm) -> None:
    """Random bytes in place of places: refused, or as many different ones in every row."""
    message, draw, refused = encode_rows("x", drawn(3, 50) + 100, form), random.Random(0), 0
    for _ in range(400):
        bad = message["x:places"].clone()
        bad[draw.randrange(3), draw.randrange(bad.shape[1])] = draw.randrange(256)
        try:
            back = decode_rows("x", {**message, "x:places": bad}, 50, form)
        except WireError:
            refused += 1
        else:
            assert ((back != 0).sum(1) == form.kept(50)).all()
    assert 50 < refused < 400


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_states_that_are_not_finite_are_refused_by_their_receiver(form: RowForm, value: float) -> None:
    states = drawn(8, 48).view(2, 4, 48)
    states[0, 1, 7] = value
    with pytest.raises(WireError, match="not finite"):
        decode_states(encode_states(states, LENGTHS, form), 6, 48, form)
