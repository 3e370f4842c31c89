"""Matrices as int8 by blocks, against the same arithmetic on whole matrices."""

from __future__ import annotations

import pytest
import torch

from fedstrata.wire.codec import SCALE, Int8Codec
from fedstrata.wire.int8 import BLOCK, dequantize_rows, quantize_rows

SHAPES = [(1, 3), (5, BLOCK // 4), (3, BLOCK + 1), (BLOCK // 8 + 1, 17), (40, 3, 50), (0, 7)]


def matrix(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    rows[:1] = 0.0  # a row without a scale
    return rows


def plainly(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and what they leave out, of a whole matrix."""
    scale = (whole.abs().flatten(1).amax(1) / 127).to(torch.bfloat16)
    along = scale.float().reshape(-1, *[1] * (whole.ndim - 1))
    codes = (whole / along).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127).to(torch.int8)
    return codes, scale, whole - codes * along


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True), (True, True)])
def test_blocks_change_no_bit(shape: tuple[int, ...], kinds: tuple[bool, bool]) -> None:
    tensor, base, old = (matrix(shape, seed) for seed in range(3))
    reference, residual = (base if kinds[0] else None), (old if kinds[1] else None)
    whole = tensor - base if kinds[0] else tensor.clone()
    whole = whole + old if kinds[1] else whole
    before = [each.clone() for each in (tensor, base, old)]
    found, wanted = quantize_rows(tensor, reference, residual), plainly(whole)
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(torch.equal(one, other) for one, other in zip((tensor, base, old), before, strict=True))
    back = whole - wanted[2] if reference is None else None
    codes, scales, _ = found
    along = scales.float().reshape(-1, *[1] * (len(shape) - 1))
    assert torch.equal(dequantize_rows(codes, scales), codes * along)
    assert torch.equal(dequantize_rows(codes, scales, base), base + codes * along)
    if back is not None:
        torch.testing.assert_close(dequantize_rows(codes, scales), back)


def test_the_codec_leaves_out_what_its_receiver_lacks() -> None:
    """Message and residual add up to what was to be sent; vectors too."""
    tensors = {"w": matrix((9, 50), 0), "b": torch.tensor([1000.0, 1e-3])}
    reference = {"w": matrix((9, 50), 1), "b": torch.tensor([1.0, 2.0])}
    residual = {"w": matrix((9, 50), 2) / 100}
    message, left = Int8Codec().encode(tensors, reference, residual)
    assert message.keys() == {"w", "w" + SCALE, "b"}
    got = Int8Codec().decode(message, reference)
    for name, tensor in tensors.items():
        torch.testing.assert_close(got[name] + left[name], tensor + residual.get(name, 0.0))
    assert message["b"].dtype == torch.float16


def test_what_is_not_finite_is_sent_and_seen() -> None:
    """The scale says it, which the receiver checks."""
    rows = torch.ones(3, 4)
    rows[1, 2] = torch.inf
    rows[2, 0] = torch.nan
    codes, scales, left = quantize_rows(rows)
    assert torch.isfinite(scales).tolist() == [True, False, False]
    assert codes[1:].tolist() == plainly(rows)[0][1:].tolist()
    assert not torch.isfinite(left[1:]).all()
