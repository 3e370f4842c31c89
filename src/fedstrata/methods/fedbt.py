"""FedBT: FedBFPT's further pre-training, and fine-tuning that unfreezes the layers from the top in cycles.

Wang, Li, Chen, Shou. Journal of Software (软件学报) 36(9), 2025, pp. 4110-4130.

    paper                                   here
    pre-training schedule Next(l, i, r, I)  progressive(rounds), as FedBFPT
    l = L - (i % c), L the deepest index    cyclic(depth, cycle, round)
    c                                       cycle, at most local_layers
    trained: layers [l, L_G) and output     parts "layer.l" .. "layer.11", "head"
    L_k                                     local_layers (pre-training half, fine-tuning all)
    l_k = l - (L_G - L_k)                   layers l_k .. l-1 are left out of the local model

The pooler is not in the paper's byte counts: it stays at its received value and is not sent
(``pooler = "train"`` trains and sends it with the head).

Requirements: task "mlm" pre-trains; every other task fine-tunes.
Relations: FedBFPT for pre-training; FedAvg is every layer trained in every round.
Cost: fine-tuning BERT-base over 10 rounds sends 3.1 layers and the head per round on average.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from fedstrata.core.parts import Parts
from fedstrata.core.plan import Method, Plan
from fedstrata.core.rng import Streams
from fedstrata.errors import UserError
from fedstrata.methods.fedbfpt import FedBFPT


def cyclic(depth: int, cycle: int, round: int) -> int:
    """The lowest layer trained in ``round`` of fine-tuning a model of ``depth`` layers.

    >>> [cyclic(12, 6, i) for i in range(10)]
    [11, 10, 9, 8, 7, 6, 11, 10, 9, 8]
    """
    return depth - 1 - round % cycle


class FedBT(Method):
    """Progressive pre-training, cyclic fine-tuning."""

    rounds: PositiveInt = 10
    local_layers: PositiveInt | None = None
    """Layers of the local model; half the model's in pre-training, all in fine-tuning when absent."""
    cycle: PositiveInt | None = None
    """Rounds of one cycle of fine-tuning; half the model's layers when absent, as the paper's 6 of 12."""
    pooler: Literal["frozen", "train"] = "frozen"

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """FedBFPT's plan for ``mlm``; else the layers from l up and the head, trained and sent."""
        if task == "mlm":
            same = FedBFPT(rounds=self.rounds, local_layers=self.local_layers)
            return same.plan(parts, task, round, client, streams)
        return self.fine_tuning(parts, round)

    def fine_tuning(self, parts: Parts, round: int) -> Plan:
        """Local layers [l_k, L_k) are global [l, L_G) and trained; those below are global [0, l_k), frozen.

        Raises:
            UserError: ``local_layers`` exceeds the model's layers or ``cycle`` exceeds ``local_layers``.
        """
        depth, local = parts.depth, self.local_layers or parts.depth
        cycle = self.cycle or min((depth + 1) // 2, local)
        if not cycle <= local <= depth:
            raise UserError(
                f"[method] cycle = {cycle}, local_layers = {local} on a model of {depth} layers; "
                "legal: cycle <= local_layers <= the model's layers"
            )
        lowest = cyclic(depth, cycle, round)
        pooler = ("pooler",) if self.pooler == "train" and "pooler" in parts.names else ()
        own = (*parts.layers(lowest), *pooler, "head")
        return Plan(layers=(*range(lowest - (depth - local)), *range(lowest, depth)), train=own, send=own)
