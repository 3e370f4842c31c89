"""The head of a language model at the predicted positions alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def head_at(model: Any, positions: torch.Tensor | tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Inside the context, the head of ``model`` gets only the hidden states at ``positions``.

    Logits have shape ``[1, n, V]`` for the ``n`` true entries of ``positions`` (bool, ``[B, S]``, in row-major
    order, or its indices), in place of ``[B, S, V]``. The head acts on each position alone, so nothing else
    changes; for 15 % of the positions and a vocabulary of 30,522 this saves a sixth of a BERT-base step.
    """
    base: nn.Module = getattr(model, model.base_model_prefix)
    base = getattr(base, "decoder", base)  # which OPT's language model calls past its base

    def gather(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[positions].unsqueeze(0)  # [1, n, H]
        return output

    handle = base.register_forward_hook(gather)
    try:
        yield
    finally:
        handle.remove()
