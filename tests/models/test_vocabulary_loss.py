"""Cross-entropy a few positions at a time against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fedstrata.models import vocabulary_loss as module
from fedstrata.models.vocabulary_loss import vocabulary_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (5, 1005), (33, 30522), (3, module.BLOCK + 1)])
def test_the_gradient_has_the_bits_of_torchs_own(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(shape, generator=rng)).to(dtype)
    targets = torch.randint(0, shape[1], shape[:1], generator=rng)
    own, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = vocabulary_loss(own, targets) / shape[0]
    reference = functional.cross_entropy(plain.float(), targets, reduction="sum") / shape[0]
    torch.testing.assert_close(loss, reference)
    torch.autograd.backward([loss, reference])
    assert own.grad is not None
    assert plain.grad is not None
    assert own.grad.dtype == dtype
    assert torch.equal(own.grad, plain.grad)


def test_nothing_to_predict_costs_nothing() -> None:
    logits = torch.empty(0, 12, requires_grad=True)
    loss = vocabulary_loss(logits, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.shape == (0, 12)


def test_nothing_larger_than_a_block_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all the logits there are two tensors: themselves, in bf16, and their gradient."""
    monkeypatch.setattr(module, "BLOCK", 4 * 50)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
                sizes.append(made.numel())
            return made

    logits = torch.randn(40, 50).to(torch.bfloat16).requires_grad_()
    with Sizes():
        vocabulary_loss(logits, torch.arange(40)).backward()
    assert max(sizes) <= 4 * 50
