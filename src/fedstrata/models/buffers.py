"""What a model's weights hold besides its parameters: such as the bias by which a router chooses experts."""

from __future__ import annotations

from typing import Any

from fedstrata.plan.kinds import Tensors


def saved_buffers(model: Any) -> Tensors:
    """The buffers that a model is saved with, by name (no copies): no round moves them, and no part holds them."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
