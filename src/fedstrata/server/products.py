"""The average of adapters' products, where the average of their factors is not it.

What clients send of an adapter are A and B, what they have learned is B A. ``mean(B) mean(A)`` is not
``mean(B A)`` where both factors were trained; the difference is a matrix of full rank. It goes into the matrix W
that the adapter stands beside, so that the next model is the average of the clients' models::

    A <- mean(A)    B <- mean(B)    W <- W + s (mean(B A) - mean(B) mean(A))

(Singhal et al. 2024, FedEx-LoRA, https://arxiv.org/abs/2410.09432, eq. 12.) A segment of the rank is averaged over
the clients that have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedstrata.models.adapters import Adapted
from fedstrata.plan.kinds import Tensors
from fedstrata.server.mean import WeightedMean


class ExactMean:
    """The mean of factors and products; memory is that of the matrices in fp64, whatever the number of clients.

    Args:
        adapted: the matrices with adapters.
        weights: the server's parts, from which the matrices are taken at the round's end.
    """

    def __init__(self, adapted: Sequence[Adapted], weights: Mapping[str, Tensors]) -> None:
        self.adapted, self.weights = adapted, weights
        self.mean = WeightedMean()
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """See :class:`fedstrata.server.aggregate.Aggregate`; both factors of a segment come together."""
        self.mean.add(tensors, weight, client)
        for matrix in self.adapted:
            for a, b in matrix.factors:
                if a in tensors and b in tensors:
                    product = matrix.product(tensors[a], tensors[b])
                    self.sums[a] = self.sums.get(a, torch.zeros_like(product)).add_(product, alpha=weight)
                    self.counts[a] = self.counts.get(a, 0) + weight

    def result(self) -> Tensors:
        """The mean factors, and the matrices that make up for what their products lack."""
        mean = self.mean.result()
        for matrix in self.adapted:
            sent = [(a, b) for a, b in matrix.factors if a in self.sums]
            if sent:
                total = _tensor(self.weights, matrix.base).double()
                for a, b in sent:
                    total = total + (self.sums[a] / self.counts[a] - matrix.product(mean[a], mean[b]))
                mean[matrix.base] = total.float().contiguous()
        return mean


def _tensor(weights: Mapping[str, Tensors], name: str) -> torch.Tensor:
    return next(own[name] for own in weights.values() if name in own)
