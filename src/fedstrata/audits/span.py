"""The span check: the rows of a matrix's gradient are sums of its inputs, so an input lies in their span.

DAGER (Petrov, Dimitrov, Baader, Müller, Vechev: DAGER: Exact Gradient Inversion for Large Language Models, NeurIPS
2024), section 3. Fewer inputs than the matrix is wide leave a span of fewer directions, which the right inputs lie
in and others do not. Where the directions cannot be told from noise (an optimizer that takes the sign of the
gradient, dropout, many steps) those that stand out of it are taken (Gavish and Donoho, IEEE Trans. Inf. Theory 60,
2014), and the check is no longer exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GAP = 30.0
"""A singular value that is as many times smaller than the one before it begins the noise."""
EDGE = 2.858
"""Times the median singular value: the edge of the noise of a square matrix (Gavish and Donoho, section I)."""


@dataclass(frozen=True)
class Span:
    """The directions of a change.

    Attributes:
        basis: orthonormal, ``[in, k]``.
        exact: they end at a gap: whatever was put in lies in them.
    """

    basis: torch.Tensor
    exact: bool

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """The share of each vector's length that lies in the span, squared: 1 is all of it; ``[..., in]`` -> ``[...]``."""
        length = vectors.square().sum(-1).clamp_min(1e-30)
        return (vectors @ self.basis).square().sum(-1) / length


def span_of(change: torch.Tensor) -> Span | None:
    """The span of the rows of a change, ``[out, in]``; None where it tells nothing: no change, or every direction."""
    scale = change.abs().amax()
    if not torch.isfinite(scale) or scale == 0:
        return None
    _, values, right = torch.linalg.svd((change / scale).double(), full_matrices=False)
    floor = values.clamp_min(values[0] * 1e-12)
    ratios = floor[:-1] / floor[1:]
    gap = int(ratios.argmax()) if len(ratios) else 0
    if len(ratios) and ratios[gap] >= GAP and gap + 1 < change.shape[1]:
        return Span(right[: gap + 1].T.float(), True)
    if change.shape[0] < change.shape[1]:  # as many directions as rows: all of them
        return Span(right.T.float(), False)
    kept = int((values > EDGE * values.median()).sum())
    return Span(right[:kept].T.float(), False) if 0 < kept < change.shape[1] else None
