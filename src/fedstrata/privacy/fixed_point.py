"""Fixed-point integers: numbers that can be summed in any order, behind masks, without losing a bit.

A value x is the integer ``rint(x / step)``; a client's integers are multiplied by its weight and taken modulo
``2 ** (8 * width)``, where negative ones are two's complements. The modulus is so wide that the sum over all
clients fits, so what is decoded is the plain sum of the integers, bit for bit. Each integer is at most half a step
away from its value, and so is their weighted mean from the mean of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""Integers modulo ``2 ** 64``, of which the lowest bytes count."""
Integers = npt.NDArray[np.int64]

STEP = 2.0**-24
"""What an integer stands for: the resolution of fp32 between 1/2 and 1."""
RANGE = 4.0
"""Values up to this can be encoded, whatever the weights; a weight that changes by more in one round diverges."""
WIDTHS = range(4, 9)
"""Bytes that an integer may have as it travels."""
MOST_WEIGHT = 1 << 24
"""The weight of a client with more examples."""


class SaturationError(ValueError):
    """A value is too large to be encoded, or is none."""


@dataclass(frozen=True)
class FixedPoint:
    """How numbers are integers.

    Attributes:
        width: bytes of an integer as it travels.
        step: what the integer 1 stands for; a power of two.
        bound: the largest absolute integer that a client may bring before it is weighted.
    """

    width: int
    step: float
    bound: int

    def integers(self, values: npt.NDArray[np.float64]) -> Integers:
        """Values as integers, before they are weighted.

        Raises:
            SaturationError: one is not finite or beyond :attr:`bound`; nothing is ever clipped or wrapped.
        """
        scaled = np.rint(values / self.step)
        largest = float(np.abs(scaled).max(initial=0.0))
        if not largest <= self.bound:  # also where it is not a number
            raise SaturationError(
                f"{largest * self.step:.3g} is beyond {self.bound * self.step:.3g}, the largest number that a "
                "masked sum takes"
            )
        return scaled.astype(np.int64)

    def weighted(self, integers: Integers, weight: int) -> Words:
        """Integers times a weight, modulo ``2 ** 64``."""
        return integers.view(np.uint64) * np.uint64(weight)

    def signed(self, words: Words) -> Integers:
        """The integers that words modulo ``2 ** (8 * width)`` stand for."""
        unused = np.uint64(64 - 8 * self.width)
        return (words << unused).view(np.int64) >> np.int64(unused)

    def mean(self, words: Words, total: int) -> npt.NDArray[np.float64]:
        """The weighted mean that a sum stands for.

        Args:
            words: the sum.
            total: of the weights in it.
        """
        return self.signed(words).astype(np.float64) * self.step / total

    def pack(self, words: Words) -> npt.NDArray[np.uint8]:
        """The lowest :attr:`width` bytes of each word, little-endian, ``[n * width]``."""
        own = words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
        return np.ascontiguousarray(own[:, : self.width]).reshape(-1)

    def unpack(self, content: npt.NDArray[np.uint8]) -> Words:
        """The words of packed bytes, ``[n]``."""
        words = np.zeros((len(content) // self.width, 8), np.uint8)
        words[:, : self.width] = content.reshape(-1, self.width)
        return words.view("<u8").reshape(-1).astype(np.uint64, copy=False)


def fixed_point(total: int) -> FixedPoint:
    """Integers of as few bytes as hold a sum to which each brings values up to :data:`RANGE` at least.

    Args:
        total: of the weights of all who may be in the sum, 1 or more.

    Raises:
        SaturationError: no width is enough.
    """
    needed = int(RANGE / STEP) * total
    for width in WIDTHS:
        most = (1 << (8 * width - 1)) - 1
        if needed <= most:
            return FixedPoint(width, STEP, most // total)
    raise SaturationError(f"a sum of {total} examples needs more than {8 * WIDTHS[-1]} bits")


def capped(examples: int) -> int:
    """A client's weight in the mean."""
    return min(examples, MOST_WEIGHT)
