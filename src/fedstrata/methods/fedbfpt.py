r"""FedBFPT: further pre-training in which a client trains one layer at a time of a shortened BERT.

Wang, Li, Chen, Shou. FedBFPT: An Efficient Federated Learning Framework for BERT Further Pre-training.
IJCAI 2023. https://doi.org/10.24963/ijcai.2023/483

    paper                                   here
    l, the layer trained in this round      part "layer.l", l = progressive(rounds)[round]
    output layer                            part "head": for MLM the 5 tensors besides the tied decoder
    m_L, layers of the local model          local_layers
    layers 0..l stand for themselves        plan.layers begins 0, 1, .. l
    layers above l, sampled from the rest   drawn with replacement, ascending, for each round and client
    ALL                                     variant "all": layers 0..m_L-1, every tensor trained and sent
    \PL, no progressive learning            variant "pl": layer 0 in every round
    \M, no mapping                          variant "m": the local model is layers 0..m_L-1
    \S, no sampling anew                    variant "s": a client's layers are redrawn only when l changes
    \SP, equal rounds per layer             variant "sp": layer i in round i, the deepest one from then on
    clients of different m_L                local_layers = {default = 6, small-hospital = 3}; l stays below all

Requirements: made for tasks "mlm" and "clm"; works with any head.
Relations: FedBT pre-trains in the same way and adds fine-tuning; FedAvg is every layer built, trained and sent.
Cost: one layer and the head up and down per round (BERT-base: 30,842,088 bytes, 7.04 % of the model). The
gradient still passes through the frozen layers above l, so compute falls less than bytes do.
"""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import PositiveInt

from fedstrata.errors import UserError
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import LAYERS, SERVER, Streams


def progressive(rounds: int) -> list[int]:
    """The layer trained in each round: layer 0 for half the rounds (rounded up), layer 1 for half the rest, …

    >>> progressive(10)
    [0, 0, 0, 0, 0, 1, 1, 1, 2, 3]
    """
    layers: list[int] = []
    layer = 0
    while len(layers) < rounds:
        layers += [layer] * ((rounds - len(layers) + 1) // 2)
        layer += 1
    return layers


@functools.cache
def trained_layers(variant: str, rounds: int, deepest: int) -> tuple[int, ...]:
    """The (lowest) layer trained in each round, none beyond ``deepest``."""
    layers = progressive(rounds)
    if variant == "pl":
        layers = [0] * rounds
    elif variant == "sp":
        layers = list(range(rounds))
    return tuple(min(layer, deepest) for layer in layers)


class FedBFPT(Method):
    """One shallow layer and the head are trained under a few sampled deeper layers."""

    variant: Literal["full", "all", "pl", "m", "s", "sp"] = "full"
    """The method in full, or one of the paper's ablations."""
    local_layers: PositiveInt | dict[str, PositiveInt] | None = None
    """Layers of the local model, for all clients or by client name and ``default``; when absent, half the model's,
    as in the paper (6 of 12), and in FedBT's fine-tuning all."""
    layers_per_round: PositiveInt = 1
    """Layers l, l+1, .. trained together."""
    replacement: bool = True
    """False: no layer is drawn twice for one local model."""
    shared_draw: bool = False
    """True: all clients of a round get the same layers."""
    legacy_rng: bool = False
    """True: the draws of the released code, which are the same for every client and round with the same l."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """Layers 0..l, then sampled ones; layer l and the head are trained and sent.

        Raises:
            UserError: the local model has more layers than the model, or fewer than are trained in it.
        """
        depth = parts.depth
        local, shallowest = self.local_depth(client, depth, (depth + 1) // 2)
        if self.variant == "all":
            everything = Plan(tuple(range(local)), train=()).builds(parts)
            return Plan(tuple(range(local)), train=everything, send=everything)
        if self.layers_per_round > shallowest:
            raise UserError(
                f"[method] layers_per_round: is {self.layers_per_round}, but a local model has {shallowest} layers"
            )
        schedule = trained_layers(self.variant, self.rounds, shallowest - self.layers_per_round)
        layer = schedule[round]
        above = layer + self.layers_per_round
        drawn_in = schedule.index(layer) if self.variant == "s" else round
        deeper = (
            range(above, local)
            if self.variant == "m"
            else self.sampled(range(above, depth), local - above, drawn_in, client, streams)
        )
        own = tuple(part for part in (*parts.layers(layer, above), "head") if part in parts)  # OPT's has no tensor
        return Plan(layers=(*range(above), *deeper), train=own, send=own)

    def sampled(self, pool: range, count: int, round: int, client: str, streams: Streams) -> list[int]:
        """``count`` layers drawn uniformly from ``pool``, ascending."""
        if self.legacy_rng:
            import numpy as np  # here: a job file is read without it

            drawn = np.random.RandomState(24).randint(pool.start, pool.stop, count) if count else ()
        else:
            rng = streams.numpy(round, SERVER if self.shared_draw else client, LAYERS)
            drawn = rng.choice(pool, count, replace=self.replacement) if count else ()
        return sorted(map(int, drawn))

    def local_depth(self, client: str, depth: int, default: int) -> tuple[int, int]:
        """Layers of this client's local model, and of the shallowest local model of all clients.

        Raises:
            UserError: more layers than the model's ``depth``.
        """
        option = self.local_layers
        by_client = option if isinstance(option, dict) else {"default": option or default}
        by_client = {"default": default, **by_client}
        for name, local in by_client.items():
            if local > depth:
                whose = f" of {name!r}" if isinstance(option, dict) else ""
                raise UserError(
                    f"[method] local_layers{whose}: is {local}, but the model has {depth} layers; "
                    f"expected 1 to {depth}"
                )
        return by_client.get(client, by_client["default"]), min(by_client.values())
