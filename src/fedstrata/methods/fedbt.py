r"""FedBT: FedBFPT's further pre-training, and fine-tuning that unfreezes the layers from the top in cycles.

Wang, Li, Chen, Shou. 基于联邦学习的BERT模型高效训练框架. Journal of Software (软件学报) 36(9), 2025, from p. 4110.

    paper                                   here
    pre-training schedule Next(l, i, r, I)  progressive(rounds), as FedBFPT
    l = L - (i % c), L the deepest index    cyclic(depth, cycle, round)
    c                                       cycle, at most local_layers
    trained: layers [l, L_G) and output     parts "layer.l" .. "layer.11", "head"
    L_k                                     local_layers (pre-training half, fine-tuning all)
    l_k = l - (L_G - L_k)                   layers l_k .. l-1 are dropped from the local model
    FedBT-All                               variant "all": every tensor in every round
    FedBT-Half                              variant "half": the upper half of the layers in every round
    FedBT-Map                               variant "map": the frozen layers are sampled from 0 .. l-1
    FedBT\Circle                            variant "circle": the top layer alone in every round
    FedBT\Add                               variant "add": layer l alone, the layers above it frozen
    \PL, \M, \S, \SP of pre-training        variants "pl", "m", "s", "sp", as FedBFPT

The pooler is not in the paper's byte counts: it stays at its received value and is not sent
(``pooler = "train"`` trains and sends it with the head).

Requirements: tasks "mlm" and "clm" pre-train; every other task fine-tunes.
Relations: FedBFPT for pre-training; FedAvg is every layer trained in every round.
Cost: fine-tuning BERT-base over 10 rounds sends 3.1 layers and the head per round on average.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from fedstrata.errors import UserError, did_you_mean
from fedstrata.methods.fedbfpt import FedBFPT
from fedstrata.plan.kinds import LANGUAGE
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, Rounds
from fedstrata.plan.streams import Streams

Variant = Literal["full", "all", "pl", "m", "s", "sp", "half", "map", "circle", "add"]
PRE_TRAINING = ("full", "all", "pl", "m", "s", "sp")
FINE_TUNING = ("full", "all", "half", "map", "circle", "add")


def cyclic(depth: int, cycle: int, round: int) -> int:
    """The lowest layer trained in ``round`` of fine-tuning a model of ``depth`` layers.

    >>> [cyclic(12, 6, i) for i in range(10)]
    [11, 10, 9, 8, 7, 6, 11, 10, 9, 8]
    """
    return depth - 1 - round % cycle


class FedBT(FedBFPT):
    """Progressive pre-training with FedBFPT's options, cyclic fine-tuning."""

    variant: Variant = "full"  # type: ignore[assignment]  # FedBFPT's and fine-tuning's
    rounds: Rounds = 10
    cycle: PositiveInt | None = None
    """Rounds of one cycle of fine-tuning; half the model's layers when absent, as in the paper (6 of 12)."""
    pooler: Literal["frozen", "train"] = "frozen"

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """FedBFPT's plan for ``mlm`` and ``clm``; else the layers from l up and the head, trained and sent.

        In fine-tuning, local layers [l_k, L_k) are global [l, L_G) and those below are frozen; when absent,
        ``local_layers`` is all the model's.

        Raises:
            UserError: a variant of the other task, or options that do not fit the model.
        """
        variants = PRE_TRAINING if task in LANGUAGE else FINE_TUNING
        if self.variant not in variants:
            raise UserError(
                f"[method] variant: {self.variant!r} is none of task {task!r}; "
                f"{did_you_mean(self.variant, variants)}"
            )
        if task in LANGUAGE:
            return super().plan(parts, task, round, client, streams)
        depth = parts.depth
        local, shallowest = self.local_depth(client, depth, depth)
        lowest = self.lowest(depth, shallowest, round)
        frozen = lowest - (depth - local)
        sampled = self.variant == "map"
        below = self.sampled(range(lowest), frozen, round, client, streams) if sampled else range(frozen)
        layers = (*below, *range(lowest, depth))
        pooler = ("pooler",) if self.pooler == "train" and "pooler" in parts.names else ()
        own = (*parts.layers(lowest, lowest + 1 if self.variant == "add" else depth), *pooler, "head")
        if self.variant == "all":
            own = Plan(layers, train=()).builds(parts)
        return Plan(layers, train=own, send=own)

    def lowest(self, depth: int, shallowest: int, round: int) -> int:
        """The lowest layer trained in ``round`` of fine-tuning.

        Raises:
            UserError: a local model of ``shallowest`` layers would lack layers to train.
        """
        cycle = self.cycle or min((depth + 1) // 2, shallowest)
        if self.variant in ("all", "half", "circle"):
            cycle = {"all": depth, "half": (depth + 1) // 2, "circle": 1}[self.variant]
            round = cycle - 1
        if cycle > shallowest:
            raise UserError(
                f"[method] cycle = {cycle}, local_layers = {shallowest} on a model of {depth} layers; "
                "expected cycle <= local_layers <= the model's layers (variant 'all' is a cycle of all layers, "
                "'half' of half of them)"
            )
        return cyclic(depth, cycle, round)
