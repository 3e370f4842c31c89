"""The last product of a regression stays in fp32 where all others are in bf16.

It makes a number in the user's own units, and bf16 has 8 bits: of numbers from 128 to 256 it knows the whole ones
alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class NumberLinear(nn.Linear):
    """A linear module that autocast leaves in fp32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product in fp32, ``[..., 1]``."""
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.float(), self.weight, self.bias)


def place_numbers(model: nn.Module) -> None:
    """Keep every linear module with one output in fp32; of all modules a regression's last alone has one."""
    for module in model.modules():
        if type(module) is nn.Linear and module.out_features == 1:
            module.__class__ = NumberLinear
