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
    flat = numbers.view(-1)

    def add(place: slice, normal: torch.Tensor) -> None:
        flat[place] = _in_steps(flat[place], normal.to(flat.device), deviation)

    _with_normal(len(flat), stream, add)


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
    before = {part: {name: start[part][name] for name in own} for part, own in sent.items()}
    after = {part: {name: tensor.detach().cpu() for name, tensor in own.items()} for part, own in sent.items()}
    norm = _norm_of_change(after, before)
    if not math.isfinite(norm):
        LOG.warning("the change is not finite and counts as none; %s", DIVERGED)
        after, norm = before, 0.0
    scale = clip / norm if norm > clip else 1.0
    return {
        part: {name: _noised(old, after[part][name], scale, noise * clip, stream) for name, old in own.items()}
        for part, own in before.items()
    }


def _norm_of_change(after: Mapping[str, Tensors], before: Mapping[str, Tensors]) -> float:
    """The L2 norm of a message's change."""
    pairs = ((tensor, before[part][name]) for part, own in after.items() for name, tensor in own.items())
    return norm_of(
        new.double() - old.double()
        for both in pairs
        for new, old in zip(*(torch.split(each.reshape(-1), PIECE) for each in both), strict=True)
    )


def _noised(
    old: torch.Tensor, new: torch.Tensor, scale: float, deviation: float, stream: Keystream
) -> torch.Tensor:
    """``old`` and its change to ``new``, scaled and with noise over it, fp32; piece by piece, within the cache."""
    made = torch.empty(old.shape, dtype=torch.float32)
    flat, first, last = made.view(-1), old.reshape(-1), new.reshape(-1)

    def make(place: slice, normal: torch.Tensor) -> None:
        change = (last[place].double() - first[place].double()).mul_(scale)
        flat[place] = _in_steps(change, normal, deviation).add_(first[place])

    _with_normal(len(flat), stream, make)
    return made


def _in_steps(numbers: torch.Tensor, normal: torch.Tensor, deviation: float) -> torch.Tensor:
    """Numbers with noise over them, in whole steps, fp64; ``normal`` is overwritten."""
    if deviation < 2.0**-900:  # what is clipped to such lengths is 0 in fp32, as the noise is
        return numbers
    step = math.ldexp(STEP, math.frexp(deviation)[1])
    return normal.mul_(deviation / step).add_(numbers, alpha=1 / step).round_().mul_(step)


def _with_normal(count: int, stream: Keystream, use: Callable[[slice, torch.Tensor], object]) -> None:
    """Call ``use`` on each piece of a vector with as many normal numbers, the same for any number of threads."""

    def draw(begin: int, own: Keystream) -> None:
        for place in range(begin, min(count, begin + CHUNK), PIECE):
            size = min(PIECE, count - place, begin + CHUNK - place)
            use(slice(place, place + size), own.normal(size))

    starts = range(0, count, CHUNK)
    if len(starts) == 1:
        draw(0, stream)
        return
    with ThreadPoolExecutor(min(torch.get_num_threads(), max(1, len(starts)))) as threads:
        list(threads.map(draw, starts, stream.apart(len(starts))))
