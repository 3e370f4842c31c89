"""The start model as NVFlare's server makes it: a class with a name."""

from __future__ import annotations

import torch
from common import load_model


class Net(torch.nn.Module):
    """The model one level down, as a class of its own has to have it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = load_model()
