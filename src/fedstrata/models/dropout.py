"""Dropout whose masks come from a stream that the caller sets, drawn 16 bits for each element.

Torch draws dropout's masks on a CPU one after the other from a global generator: 6 ns for each element, a seventh
of a step of BERT-base in bf16 that trains one layer of six. Where a stream is set (:func:`drawing`) and the
tensors are on a CPU, masks come from it, and everything else is as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

WORD = 1 << 16
"""Values of the 16 random bits that decide on one element."""
DrawWords = Callable[[Sequence[int]], torch.Tensor]
"""Draws the random bits of so many elements, as int16 in the shape asked for."""
_STREAM: ContextVar[DrawWords | None] = ContextVar("dropout", default=None)


@contextmanager
def drawing(words: DrawWords | None) -> Iterator[None]:
    """Inside, in this thread, dropout draws from ``words``; None leaves it to torch."""
    before = _STREAM.set(words)
    try:
        yield
    finally:
        _STREAM.reset(before)


def stream() -> DrawWords | None:
    """What dropout draws from at present; None is torch's own generator."""
    return _STREAM.get()


def keep_mask(words: DrawWords, shape: Sequence[int], p: float, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """1 for every element that is kept, 0 for the others, and what those that are kept are multiplied by.

    ``p`` is rounded to 16 bits; the factor goes with the rounded rate, so that the mean stays.
    """
    dropped = round(p * WORD)
    mask = torch.empty(tuple(shape), dtype=dtype)
    torch.ge(words(shape), dropped - WORD // 2, out=mask)
    return mask, WORD / (WORD - dropped)


class Dropout(nn.Dropout):
    """Torch's dropout, with masks from the stream where one is set."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input * mask / (1 - p)`` of any shape, in its own dtype."""
        words = stream()
        if words is None or not self.training or not 0 < self.p < 1 or input.device.type != "cpu":
            return super().forward(input)
        mask, factor = keep_mask(words, input.shape, self.p, input.dtype)
        return input * mask.mul_(factor)


def place_dropout(model: nn.Module) -> None:
    """Put :class:`Dropout` in the place of every ``nn.Dropout`` of a model; none of them has a tensor."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                own = Dropout(child.p)
                module.add_module(name, own.train(child.training))


def disable_dropout(model: nn.Module) -> None:
    """Set every ``nn.Dropout`` of a model to 0: GPT-2's head of ``tag`` has a rate that is in no config."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
