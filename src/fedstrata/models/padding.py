"""Whether what a model makes of a text depends on the padding beside it.

Models with attention take a mask, behind which padding weighs nothing. Others mix all places of a batch's width:
by a Fourier transform (FNet), a convolution (ConvBERT, CANINE), means over segments of it (Nyströmformer), or an
attention that is sorted, sparse or placed by it (Reformer, YOSO, BigBird, CPM-Ant), positions that turn by it
(RoPE, if the config says so), or embeddings of a token and its neighbors (MobileBERT). There the longest text of
a batch changes what is computed of all others.
"""

from __future__ import annotations

from typing import Any

import torch

MIXES = ("big_bird", "canine", "convbert", "cpmant", "fnet", "mobilebert", "nystromformer", "reformer", "yoso")
"""Model types that do, whatever their weights: a server may send a start model with which nothing shows."""
TURNS = ("dynamic", "longrope")
"""Kinds of rotary positions that do: beyond a width of the config's those of shorter texts turn otherwise."""
WIDEST = 64
"""Places of the wider of two inputs that are compared; the text takes the first half."""
ROUNDING = 1e-4
"""How far two hidden states may be apart, relative to their length, that differ by rounding alone."""


def padding_matters(model: Any, width: int) -> bool:
    """Whether the encoder's hidden states of one text change with the padding.

    Args:
        model: on any device; it is computed with as in evaluation.
        width: most tokens that it is given, 2 or more.
    """
    if model.config.model_type in MIXES or not _rotary(model).isdisjoint(TURNS):
        return True
    widest, pad = min(width, WIDEST), model.config.pad_token_id or 0
    words = [token for token in range(min(model.config.vocab_size, WIDEST)) if token != pad]
    ids = torch.tensor([[words[place % len(words)] for place in range(widest)]], device=model.device)
    ids[:, widest // 2 :] = pad
    mask, training = (ids != pad).long(), model.training
    model.eval()
    with torch.no_grad():
        wide, narrow = (
            model.base_model(input_ids=ids[:, :end], attention_mask=mask[:, :end])[0].float()
            for end in (widest, widest // 2)
        )
    model.train(training)
    return float((wide[:, : widest // 2] - narrow).norm()) > ROUNDING * float(narrow.norm())


def _rotary(model: Any) -> set[str]:
    """The kinds of rotary positions of a model's modules; a module may have several, by kind of layer."""
    each = [getattr(module, "rope_type", ()) for module in model.modules()]
    return {kind for kinds in each for kind in ([kinds] if isinstance(kinds, str) else dict(kinds).values())}
