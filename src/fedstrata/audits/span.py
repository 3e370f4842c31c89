"""The span check: the rows of a matrix's gradient are sums of its inputs, so an input lies in their span.

DAGER (Petrov, Dimitrov, Baader, Müller, Vechev: DAGER: Exact Gradient Inversion for Large Language Models, NeurIPS
2024), section 3. Fewer inputs than the matrix is wide leave a span of fewer directions, which the right inputs lie
in and others do not, but for what rounding takes away. Where the directions cannot be told from noise (an
optimizer that takes a gradient's sign, dropout of several texts, many steps) those that stand out of it are taken
(Gavish and Donoho, IEEE Trans. Inf. Theory 60, 2014), and the check is no longer exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EDGE = 2.858
"""Times the median singular value: the edge of the noise of a square matrix (Gavish and Donoho, section I)."""
ARITHMETIC = 2e-7
"""What sums in fp32 leave at most of the largest singular value."""

INSIDE = 2e-6
"""Share of a vector's squared length that rounding alone may leave outside."""


@dataclass(frozen=True)
class Span:
    """The directions of a change.

    Attributes:
        basis: orthonormal, ``[in, k]``.
        exact: what lies outside is rounding alone: whatever was put in lies inside.
    """

    basis: torch.Tensor
    exact: bool

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """The share of each vector's squared length in the span, 1 is all of it; ``[..., in]`` -> ``[...]``.

        All of it but for rounding is 1 too: else a threshold could lie between two roundings.
        """
        length = vectors.square().sum(-1).clamp_min(1e-30)
        share = (vectors @ self.basis).square().sum(-1) / length
        return share.masked_fill(share > 1 - INSIDE, 1.0)


def span_of(change: torch.Tensor, rounding: float) -> Span | None:
    """The span of the rows of a change, ``[out, in]``; None where it tells nothing: no change, or every direction.

    Args:
        change: by how much a matrix has moved.
        rounding: standard deviation of what rounding adds to each of its elements.
    """
    if not torch.isfinite(change).all() or not change.any():
        return None
    rows, width = change.shape
    _, values, right = torch.linalg.svd(change.double(), full_matrices=False)
    edge = max(1.5 * rounding * (math.sqrt(rows) + math.sqrt(width)), ARITHMETIC * float(values[0]))
    kept = int((values > edge).sum())
    if 0 < kept < len(values):
        return Span(right[:kept].T.float(), True)
    if kept and rows < width:  # as many directions as rows: all of them
        return Span(right.T.float(), False)
    kept = int((values > EDGE * values.median()).sum())
    return Span(right[:kept].T.float(), False) if 0 < kept < width else None


def rounding(weights: torch.Tensor, dtype: str) -> float:
    """The standard deviation of what rounding adds to a weight on its way; unknown, so 0, for codecs of steps."""
    steps = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if dtype not in steps:
        return 0.0
    size = float(weights.double().square().mean().sqrt())
    return size * torch.finfo(steps[dtype]).eps / math.sqrt(12)
