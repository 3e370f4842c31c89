"""The hidden states that a client sends, as they travel.

    up      features [sum of T, n, H], tokens [m] int32, labels [m] int32 or fp32     once, before the first round

``T`` of a text is 1 where the head takes one vector of it, else its number of tokens; ``n`` is the number of the
head's branches, ``m`` of texts.
"""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.client.feature_cache import FeatureCache, layout
from fedstrata.plan.kinds import Index, Tensors
from fedstrata.wire.codec import Spec, WireError, check, dequantize, quantize, wire_spec


def encode_hidden_states(cache: FeatureCache, index: Index, dtype: str) -> Tensors:
    """What a client sends of its texts at ``index``."""
    states = cache.of(index)
    labels = cache.examples.labels
    assert labels is not None
    flat = torch.from_numpy(np.concatenate([state.transpose(1, 0, 2) for state in states]))
    return {
        **quantize({"features": flat}, dtype),
        "tokens": torch.tensor([state.shape[1] for state in states], dtype=torch.int32),
        "labels": torch.from_numpy(labels[index]).to(_label_dtype(labels.dtype.kind == "f")),
    }


def hidden_states_spec(lengths: Index, branches: int, width: int, dtype: str) -> Spec:
    """What a message holds for texts of these lengths: name -> dtype and shape."""
    tokens, _ = layout(lengths, branches, width)
    states = wire_spec({"features": (int(tokens.sum()), branches, width)}, dtype)
    return {**states, **{name: (torch.int32, (len(lengths),)) for name in ("tokens", "labels")}}


def decode_hidden_states(message: Tensors, branches: int, width: int, classes: int | None, dtype: str) -> Tensors:
    """What a client sent, checked, its ``features`` fp32.

    Args:
        message: the tensors received.
        branches: n.
        width: H.
        classes: number of classes; None where the labels are numbers.
        dtype: the wire type.

    Raises:
        WireError: it is not what :func:`encode_hidden_states` makes for this model and task.
    """
    tokens, labels = message.get("tokens"), message.get("labels")
    if tokens is None or labels is None or tokens.ndim != 1 or labels.shape != tokens.shape:
        raise WireError("tokens and labels: must be one number for each text")
    if tokens.dtype != torch.int32 or len(tokens) == 0 or int(tokens.min()) < 1:
        raise WireError("tokens: must be whole numbers above 0 (int32)")
    states = {name: tensor for name, tensor in message.items() if name not in ("tokens", "labels")}
    check(states, wire_spec({"features": (int(tokens.sum()), branches, width)}, dtype))
    if classes is None and (labels.dtype != torch.float32 or not torch.isfinite(labels).all()):
        raise WireError("labels: must be finite numbers (fp32)")
    if classes is not None and (
        labels.dtype != torch.int32 or int(labels.min()) < 0 or int(labels.max()) >= classes
    ):
        raise WireError(f"labels: must be classes from 0 to {classes - 1} (int32)")
    return {**dequantize(states), "tokens": tokens, "labels": labels}


def some_texts(message: Tensors, most: int) -> Tensors:
    """A decoded message of ``most`` texts at most, from all of it: texts often stand in the order of classes."""
    tokens = message["tokens"]
    if len(tokens) <= most:
        return message
    taken = torch.zeros(len(tokens), dtype=torch.bool)
    taken[torch.arange(most) * len(tokens) // most] = True
    rows = taken.repeat_interleave(tokens)
    return {name: tensor[rows if name == "features" else taken] for name, tensor in message.items()}


def _label_dtype(numbers: bool) -> torch.dtype:
    return torch.float32 if numbers else torch.int32
