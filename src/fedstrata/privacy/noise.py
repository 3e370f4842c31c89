"""Clipped and noised messages: what one client's change may be, and the noise over it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fedstrata.plan.kinds import Tensors, Weights

LOG = logging.getLogger("fedstrata.site")
DIVERGED = "a smaller train.learning_rate may help, and nobody else is told, since no noise would cover that"
PIECE = 1 << 15
"""Numbers drawn at a time: so few that they stay in a core's cache."""
CHUNK = 1 << 18
"""Numbers of one stream: a longer tensor's come from several, drawn at the same time by the threads of the job."""


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """The L2 norm of tensors together, summed in fp64."""
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


def gaussian(shape: torch.Size, deviation: float, rng: np.random.Generator) -> torch.Tensor:
    """Independent normal numbers, fp32: drawn in fp64, so that their steps are far below those of fp32."""

    def put(piece: torch.Tensor, normal: torch.Tensor) -> None:
        piece.copy_(normal * deviation)

    drawn = torch.empty(math.prod(shape))
    _with_normal(drawn, rng, put)
    return drawn.reshape(shape)


def privatized(
    sent: Weights, start: Mapping[str, Tensors], clip: float, noise: float, rng: np.random.Generator
) -> Weights:
    """A message whose change, all tensors together, is at most ``clip`` long, with noise over it.

    A change that is not finite counts as none: to refuse it would tell of the client's rows, as often as a server
    sends weights that overflow for some of them.

    Args:
        sent: part -> its tensors after training, in the order of the plan.
        start: part -> the tensors that training began with.
        clip: longest L2 norm of the change of the whole message; a longer one is scaled.
        noise: standard deviation of the noise at every element, in units of ``clip``.
        rng: draws the noise; nobody who sees the message may know it.
    """
    changes = {
        part: {name: tensor.detach().cpu().double() - start[part][name].double() for name, tensor in own.items()}
        for part, own in sent.items()
    }
    norm = norm_of(tensor for own in changes.values() for tensor in own.values())
    if not math.isfinite(norm):
        LOG.warning("the change is not finite and counts as none; %s", DIVERGED)
        changes = {part: {name: torch.zeros_like(own[name]) for name in own} for part, own in changes.items()}
    scale = clip / norm if clip < norm < math.inf else 1.0
    deviation = noise * clip
    return {
        part: {
            name: (start[part][name].double() + _noised(change * scale, deviation, rng)).float()
            for name, change in own.items()
        }
        for part, own in changes.items()
    }


def _noised(change: torch.Tensor, deviation: float, rng: np.random.Generator) -> torch.Tensor:
    """A change in fp64 with noise over it."""
    flat = change.reshape(-1).clone()
    _with_normal(flat, rng, lambda piece, normal: piece.add_(normal, alpha=deviation))
    return flat.reshape(change.shape)


def _with_normal(
    flat: torch.Tensor, rng: np.random.Generator, use: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    """Call ``use`` on each piece of a vector with as many normal numbers, the same for any number of threads."""

    def draw(chunk: torch.Tensor, own: np.random.Generator) -> None:
        for piece in torch.split(chunk, PIECE):
            use(piece, torch.from_numpy(own.standard_normal(len(piece))))

    chunks = torch.split(flat, CHUNK)
    if len(chunks) == 1:
        draw(flat, rng)
        return
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(chunks))) as threads:
        list(threads.map(draw, chunks, rng.spawn(len(chunks))))
