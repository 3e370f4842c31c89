"""A model without values beside one that has some: what a worker begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import initialization

from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.adapters import add_adapters
from fedstrata.models.checkpoints import class_of
from fedstrata.models.dropout import disable_dropout
from fedstrata.models.parts import base_first


def empty_twin(
    config: Any,
    kind: str,
    buffers: Mapping[str, torch.Tensor],
    adapter: AdapterConfig | None = None,
    dropout: bool = True,
) -> Any:
    """A model like one that :func:`fedstrata.models.checkpoints.load` made, its parameters without values.

    Args:
        config: that model's.
        kind: the task's kind.
        buffers: that model's, by name.
        adapter: the adapters that were put into it.
        dropout: False sets every dropout to 0, those of adapters aside, as there.
    """
    with torch.random.fork_rng(devices=[]):
        with initialization.no_init_weights():
            model = class_of(kind, config).from_config(config)
        model.tie_weights()
        base_first(model)
        if not dropout:
            disable_dropout(model)
        if adapter:
            add_adapters(model, replace(adapter, init="gaussian"))  # nothing is to be decomposed here
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model
