"""The wire: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Tensors
from fedstrata.wire.codec import (
    CODECS,
    DTYPES,
    SCALE,
    Int8Codec,
    StateCodec,
    Wire,
    WireError,
    check,
    dequantize,
    make_codec,
    payload_bytes,
    quantize,
    wire_spec,
)
from fedstrata.wire.finite import all_finite
from fedstrata.wire.states import Spec
from fedstrata.wire.tensor_file import pack, read_file

SHAPES = {"a.weight": (3, 4), "a.bias": (4,)}


def sample(dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def file_of(tensors: Tensors) -> bytes:
    """A message as it travels."""
    return bytes(pack(tensors, {}))


def received(content: bytes, spec: Spec) -> Tensors:
    """The tensors of a message, checked."""
    tensors = read_file(content).tensors
    check(tensors, spec)
    return tensors


def message(header: dict[str, Any], body: bytes) -> bytes:
    """A safetensors file written by hand."""
    text = json.dumps({"__metadata__": {}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype: str) -> None:
    sent = quantize(sample(), dtype)
    back = received(file_of(sent), wire_spec(SHAPES, dtype))
    assert back.keys() == sent.keys()
    for name, tensor in back.items():
        assert (tensor.dtype, tuple(tensor.shape)) == wire_spec(SHAPES, dtype)[name]
        assert torch.equal(tensor, sent[name])


@pytest.mark.parametrize(("dtype", "bits"), [("fp32", 24), ("fp16", 11), ("bf16", 8)])
def test_what_is_widened_differs_by_the_rounding_of_the_wire_type(dtype: str, bits: int) -> None:
    start = sample()
    for name, tensor in dequantize(quantize(start, dtype)).items():
        assert tensor.dtype == torch.float32
        error = ((tensor - start[name]) / start[name]).abs().max()
        assert error <= 2.0**-bits
        assert (error > 0) == (dtype != "fp32")


def test_nothing_is_copied_that_has_its_type_already() -> None:
    start = sample()
    assert all(quantize(start, "fp32")[name] is tensor for name, tensor in start.items())
    assert all(dequantize(start)[name] is tensor for name, tensor in start.items())


def test_views_and_scalars_travel() -> None:
    sent = {"turned": torch.arange(6.0).reshape(2, 3).T, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    back = received(file_of(sent), wire_spec({"turned": (3, 2), "scalar": (), "empty": (0, 3)}, "fp32"))
    assert back["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back["scalar"].item() == 2.5


def test_a_message_is_a_safetensors_file() -> None:
    made = file_of({"x": torch.tensor([1.0, 2.0])})
    length = struct.unpack("<Q", made[:8])[0]
    assert json.loads(made[8 : 8 + length]) == {"__metadata__": {}, "x": entry("F32", [2], 0, 8)}
    assert np.frombuffer(made[8 + length :], "<f4").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"a.weight": torch.ones(3, 4)}, "names differ from the plan's: a.bias"),
        ({**sample(), "b": torch.ones(1)}, "names differ from the plan's: b"),
        ({"a.weight": torch.ones(3, 4), "A.bias": torch.ones(4)}, "names differ from the plan's: A.bias, a.bias"),
        ({}, "names differ"),
        ({**sample(), "a.bias": torch.ones(5)}, r"a.bias: is torch.float32 \(5,\), must be torch.float32 \(4,\)"),
        (
            {**sample(), "a.weight": torch.ones(4, 3)},
            r"a.weight: is torch.float32 \(4, 3\), must be torch.float32 \(3, 4\)",
        ),
        ({**sample(), "a.bias": torch.ones(4, 1)}, "a.bias: is"),
        ({**sample(), "a.bias": torch.ones(4, dtype=torch.float64)}, "a.bias: is torch.float64"),
        ({**sample(), "a.bias": torch.ones(4, dtype=torch.float16)}, "a.bias: is torch.float16"),
        ({**sample(), "a.bias": torch.ones(4, dtype=torch.int32)}, "a.bias: is torch.int32"),
    ],
)
def test_what_the_plan_does_not_say_is_refused(sent: Tensors, words: str) -> None:
    with pytest.raises(WireError, match=words):
        check(sent, wire_spec(SHAPES, "fp32"))
    with pytest.raises(WireError, match=words):
        received(file_of(sent), wire_spec(SHAPES, "fp32"))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float, dtype: str) -> None:
    sent = sample(DTYPES[dtype])
    sent["a.weight"][2, 3] = value
    with pytest.raises(WireError, match=r"a\.weight: holds a value that is not finite"):
        received(file_of(sent), wire_spec(SHAPES, dtype))


def test_a_value_too_large_for_fp16_is_refused() -> None:
    sent = sample()
    sent["a.bias"][0] = 70_000.0
    check(sent, wire_spec(SHAPES, "fp32"))
    with pytest.raises(WireError, match=r"a\.bias: holds a value that is not finite"):
        check(quantize(sent, "fp16"), wire_spec(SHAPES, "fp16"))


def test_int8_by_hand() -> None:
    """Each row's largest value is 127 steps; scales are bf16, vectors fp16."""
    rows = torch.tensor([[127.0, -63.4, 0.6], [0.0, 0.0, 0.0], [-(2.0**-7) * 127, 0.0, 2.0**-7]])
    sent = quantize({"w": rows, "b": torch.tensor([1000.0, 1e-3])}, "int8")
    assert sent["w"].tolist() == [[127, -63, 1], [0, 0, 0], [-127, 0, 1]]
    assert sent["w" + SCALE].tolist() == [1.0, 0.0, 2.0**-7]
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "w": torch.int8,
        "w" + SCALE: torch.bfloat16,
        "b": torch.float16,
    }
    back = dequantize(sent)
    assert back["w"].tolist() == [[127, -63, 1], [0, 0, 0], [-(2.0**-7) * 127, 0, 2.0**-7]]
    assert back["b"][1].item() == pytest.approx(1e-3, rel=2**-10), "a large neighbor does not drown it"


def test_int8_is_off_by_half_a_step_at_most() -> None:
    start = {
        "w": torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-12, 12, 200)[:, None]
    }
    back = dequantize(quantize(start, "int8"))["w"]
    step = start["w"].abs().amax(1, keepdim=True) / 127
    error = (back - start["w"]).abs()
    assert (error <= 0.51 * step).all(), "half a step, and what bf16 rounds off the scale"
    assert (error > 0.45 * step).any()


def test_int8_of_the_smallest_numbers_keeps_their_sign() -> None:
    """A scale below bf16's normal numbers is rounded so far down that the largest value takes over 127."""
    rows = torch.tensor([[1.0, -1.0]]) * (1.4 * 127 * 2.0**-133)
    assert quantize({"w": rows}, "int8")["w"].tolist() == [[127, -127]]


@pytest.mark.parametrize(
    "held",
    [None, {"w": torch.tensor([[0.5, 0.0], [-0.25, 0.5]]), "b": torch.tensor([0.5])}],
    ids=["whole", "change"],
)
def test_what_a_message_leaves_out_comes_with_the_next(held: Tensors | None) -> None:
    """A value far below a step is lost for ever without error feedback; with it the sum arrives."""
    tensors = {"w": torch.tensor([[1.0, 1e-3], [0.5, -0.3]]), "b": torch.tensor([1.0 + 2**-13])}
    residual: Tensors = {}
    total = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    known = held or total
    new = {name: known[name] + tensor for name, tensor in tensors.items()}
    for times in range(1, 101):
        message, residual = Int8Codec().encode(new, held, residual)
        check(message, wire_spec({"w": (2, 2), "b": (1,)}, "int8"))
        for name, tensor in Int8Codec().decode(message, held).items():
            total[name] += tensor - held[name] if held else tensor
            assert torch.allclose(total[name] + residual[name], times * tensors[name], rtol=1e-5)
    assert total["w"][0, 1].item() == pytest.approx(0.1, abs=0.5 / 127)
    assert dequantize(quantize(tensors, "int8"))["w"][0, 1].item() == 0.0
    assert residual["w"].abs().max() <= 0.51 / 127


def test_int8_sends_changes_where_both_ends_know_the_reference() -> None:
    """A step is then 1/127 of a row's largest change; no change arrives as none."""
    codec, reference = Int8Codec(), {"w": torch.tensor([[1.0, 0.3], [0.5, -0.3]])}
    changed = {"w": reference["w"] + torch.tensor([[1e-3, -2e-4], [0.0, 0.0]])}
    message, left = codec.encode(changed, reference, {})
    arrived = codec.decode(message, reference)["w"]
    assert torch.allclose(arrived, changed["w"], atol=0.51e-3 / 127)
    assert torch.equal(arrived[1], reference["w"][1])
    assert torch.allclose(arrived + left["w"], changed["w"], atol=1e-7)
    again = codec.decode(codec.encode(reference, reference, left)[0], reference)["w"]
    assert torch.allclose(again + arrived, changed["w"] + reference["w"], atol=1e-6), "with the first's residual"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_floats_leave_no_residual(dtype: str) -> None:
    message, residual = StateCodec(dtype).encode(sample(), None, {})
    assert residual == {}
    assert all(torch.equal(tensor, quantize(sample(), dtype)[name]) for name, tensor in message.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_int8_cannot_scale_is_refused(value: float) -> None:
    sent = sample()
    sent["a.weight"][1, 2] = value
    with pytest.raises(WireError, match=r"a\.weight:scale: holds a value that is not finite"):
        check(quantize(sent, "int8"), wire_spec(SHAPES, "int8"))


def test_a_matrix_without_its_scales_is_refused() -> None:
    sent = quantize(sample(), "int8")
    del sent["a.weight" + SCALE]
    with pytest.raises(WireError, match=r"names differ from the plan's: a\.weight:scale"):
        check(sent, wire_spec(SHAPES, "int8"))


def garbage() -> list[bytes]:
    good = file_of(sample())
    zipped = io.BytesIO()
    torch.save(sample(), zipped)
    length = struct.unpack("<Q", good[:8])[0]
    return [
        b"",
        b"1234567",
        b"\xff" * 8,
        b"\x00" * 64,
        b"no tensors here, only words",
        pickle.dumps(sample()),
        zipped.getvalue(),
        good[:-1],
        good[: len(good) // 2],
        good[:20],
        good + b"x",
        struct.pack("<Q", 2**62) + good[8:],
        struct.pack("<Q", length - 1) + good[8:],
        message({"a.weight": entry("F32", [3, 4], 0, 48), "a.bias": entry("F32", [4], 32, 48)}, bytes(48)),
        message({"a.weight": entry("F32", [2**62, 4], 0, 48), "a.bias": entry("F32", [4], 48, 64)}, bytes(64)),
        message({"a.weight": entry("F32", [3, 4], 0, 2**40), "a.bias": entry("F32", [4], 48, 64)}, bytes(64)),
        message({"a.weight": entry("F32", [3, -4], 0, 48), "a.bias": entry("F32", [4], 48, 64)}, bytes(64)),
        message({"a.weight": entry("O", [3, 4], 0, 48), "a.bias": entry("F32", [4], 48, 64)}, bytes(64)),
    ]


@pytest.mark.parametrize("number", range(18))
def test_bytes_that_are_no_message_are_refused(number: int) -> None:
    with pytest.raises(WireError, match=r"^(its head|its tensors|is shorter|is longer) "):
        received(garbage()[number], wire_spec(SHAPES, "fp32"))


def test_pickles_are_never_run() -> None:
    ran: list[int] = []

    class Bomb:
        def __reduce__(self) -> Any:
            return ran.append, (1,)

    with pytest.raises(WireError):
        received(pickle.dumps(Bomb()), wire_spec(SHAPES, "fp32"))
    assert not ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype: torch.dtype) -> None:
    largest = torch.full((65, 33), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(largest), "their sum is infinite"
    for value in (float("inf"), float("-inf"), float("nan")):
        for place in (0, 1000, largest.numel() - 1):
            tensor = largest.clone()
            tensor.view(-1)[place] = value
            assert not all_finite(tensor)
    assert all_finite(torch.empty(0, 4, dtype=dtype))
    assert all_finite(torch.full((3,), 127, dtype=torch.int8))


def test_a_damaged_message_is_refused_or_is_finite_and_of_the_shapes() -> None:
    """Random bytes of a good message replaced, mostly in its header: no other exception, nothing unchecked."""
    good = file_of(sample())
    draw = random.Random(0)
    refusals = 0
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        try:
            made = received(bytes(bad), wire_spec(SHAPES, "fp32"))
        except WireError:
            refusals += 1
        else:
            assert {name: tuple(tensor.shape) for name, tensor in made.items()} == SHAPES
            assert all(bool(torch.isfinite(tensor).all()) for tensor in made.values())
    assert 800 < refusals < 2000


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ends_of_a_wire_agree_and_its_size_is_known_before(dtype: str) -> None:
    wire = Wire(make_codec(dtype))
    message, _ = wire.encode(sample())
    wire.check(message, SHAPES)
    assert wire.size(SHAPES) == payload_bytes(message)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in message.items()} == wire_spec(
        SHAPES, dtype
    )
    decoded = wire.decode(message)
    assert all(torch.equal(tensor, dequantize(message)[name]) for name, tensor in decoded.items())
    message["a.bias"] = torch.full_like(message["a.bias"], torch.nan)
    with pytest.raises(WireError, match=r"a\.bias: holds a value that is not finite"):
        wire.check(message, SHAPES)


def test_a_codec_is_one_class_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "int4", Int8Codec)  # type: ignore[arg-type]
    assert make_codec("int4").name == "int8"
    with pytest.raises(UserError, match=r"\[wire\] dtype: 'int5' .*int4"):
        make_codec("int5")


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_is_found_and_large_values_are_not_mistaken_for_it(bad: float) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite(tensor), "though its sum is not"
        tensor[700] = bad
        assert not all_finite(tensor)
        tensor[3] = -tensor[700]
        assert not all_finite(tensor), "infinities that cancel"
