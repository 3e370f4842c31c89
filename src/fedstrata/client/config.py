"""How a client trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Local:
    """How a client trains: the job's ``[train]`` with every "auto" settled.

    Attributes:
        decay: the learning rate is multiplied by it after every epoch.
        schedule: ``constant`` or ``polynomial``: how the learning rate goes over the whole run.
        power: of the polynomial.
        warmup: share of the run over which the learning rate rises.
        betas: AdamW's.
        epsilon: AdamW's.
        kept: the optimizer goes on from the client's last round; else it begins anew in each.
        width: pad every batch to so many tokens; None pads to its longest text.
        features: bytes that may be kept on disk of what a frozen encoder makes of a client's texts.
        by_length: batches of texts of like length.
        bf16: compute in bf16 where autocast allows; weights and optimizer stay fp32.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 5e-5
    decay: float = 1.0
    schedule: str = "constant"
    power: float = 1.0
    warmup: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    kept: bool = False
    proximal_mu: float = 0.0
    device: str = "cpu"
    bf16: bool = False
    by_length: bool = True
    width: int | None = None
    features: int = 0
