"""Clipped and noised messages: what one client's change may be, and the noise over it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.privacy.keystream import PIECE, Keystream

LOG = logging.getLogger("fedstrata.site")
DIVERGED = "a smaller train.learning_rate may help, and nobody else is told, since no noise would cover that"
CHUNK = 1 << 18
"""Numbers of one stream: a longer tensor's come from several, drawn at the same time by the threads of the job."""
STEP = 2.0**-21
"""As a share of the power of two above the deviation: fp64 has hundreds of millions of numbers in each step."""


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """The L2 norm of tensors together, summed in fp64; on a CPU in pieces, for which its cache has room."""
    squares = 0.0
    for flat in (tensor.detach().reshape(-1) for tensor in tensors):
        for piece in torch.split(flat, PIECE) if flat.device.type == "cpu" else [flat]:
            numbers = piece.double()
            squares += float(numbers @ numbers)
    return math.sqrt(squares)


def add_gaussian(numbers: torch.Tensor, deviation: float, stream: Keystream) -> None:
    """Add independent normal numbers to a tensor, in place; it must be contiguous.

    Sums are formed in fp64 and rounded to whole steps (:data:`STEP`), the same for whatever the noise is added to.
    Else the last bits of a sum would tell of that, past any epsilon: where fp32 noise all but cancels a number,
    the sum is as coarse as the number, and where there is nothing to cancel it is fine (Mironov 2012).
    """
    if deviation < 2.0**-900:  # what is clipped to such lengths is 0 in fp32, as the noise is
        return
    step = math.ldexp(STEP, math.frexp(deviation)[1])

    def add(piece: torch.Tensor, normal: torch.Tensor) -> None:
        noise = normal.to(piece.device).mul_(deviation / step)
        piece.copy_(noise.add_(piece, alpha=1 / step).round_().mul_(step))

    _with_normal(numbers.view(-1), stream, add)


def privatized(
    sent: Weights, start: Mapping[str, Tensors], clip: float, noise: float, stream: Keystream
) -> Weights:
    """A message whose change, all tensors together, is at most ``clip`` long, with noise over it.

    A change that is not finite counts as none: to refuse it would tell of the client's rows, as often as a server
    sends weights that overflow for some of them.

    Args:
        sent: part -> its tensors after training, in the order of the plan.
        start: part -> the tensors that training began with.
        clip: longest L2 norm of the change of the whole message; a longer one is scaled.
        noise: standard deviation of the noise at every element, in units of ``clip``.
        stream: draws the noise; nobody who sees the message may know its key.
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
            name: (start[part][name].double() + _noised(change * scale, deviation, stream)).float()
            for name, change in own.items()
        }
        for part, own in changes.items()
    }


def _noised(change: torch.Tensor, deviation: float, stream: Keystream) -> torch.Tensor:
    """A change in fp64 with noise over it."""
    noised = change.clone(memory_format=torch.contiguous_format)
    add_gaussian(noised, deviation, stream)
    return noised


def _with_normal(
    flat: torch.Tensor, stream: Keystream, use: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    """Call ``use`` on each piece of a vector with as many normal numbers, the same for any number of threads."""

    def draw(chunk: torch.Tensor, own: Keystream) -> None:
        for piece in torch.split(chunk, PIECE):
            use(piece, own.normal(len(piece)))

    chunks = torch.split(flat, CHUNK)
    if len(chunks) == 1:
        draw(flat, stream)
        return
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(chunks))) as threads:
        list(threads.map(draw, chunks, stream.apart(len(chunks))))
