"""FedBFPT: further pre-training in which a client trains one layer at a time of a shortened BERT.

Wang, Li, Chen, Shou. FedBFPT: An Efficient Federated Learning Framework for BERT Further Pre-training.
IJCAI 2023. https://doi.org/10.24963/ijcai.2023/483

    paper                                   here
    l, the layer trained in this round      part "layer.l", l = progressive(rounds)[round]
    output layer                            part "head": for MLM the 5 tensors beside the tied decoder
    m_L, layers of the local model          local_layers
    layers above l, sampled from the rest    drawn with replacement, ascending, anew per round and client
    layers 0..l stand for themselves        plan.layers begins 0, 1, .. l

Requirements: made for task "mlm"; runs with any head.
Relations: FedBT pre-trains in the same way and adds fine-tuning; FedAvg is every layer built, trained and sent.
Cost: one layer and the head up and down per round (BERT-base: 30,842,088 bytes, 7.04 % of the model). The
gradient still passes through the frozen layers above l, so compute falls less than bytes do.
"""

from __future__ import annotations

from pydantic import PositiveInt

from fedstrata.core.parts import Parts
from fedstrata.core.plan import Method, Plan
from fedstrata.core.rng import Streams
from fedstrata.errors import UserError


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


class FedBFPT(Method):
    """One shallow layer and the head are trained under a few sampled deeper layers."""

    local_layers: PositiveInt | None = None
    """Layers of the local model; half the model's when absent, as the paper's 6 of 12."""

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """Layers 0..l, then sampled ones; layer l and the head are trained and sent.

        Raises:
            UserError: ``local_layers`` exceeds the model's layers.
        """
        depth = parts.depth
        local = self.local_layers or (depth + 1) // 2
        if local > depth:
            raise UserError(
                f"[method] local_layers: is {local}, but the model has {depth} layers; legal: 1 to {depth}"
            )
        layer = min(progressive(self.rounds)[round], local - 1)
        deeper = range(layer + 1, depth)
        above = streams.numpy(round, client, "layers").choice(deeper, local - layer - 1) if deeper else ()
        own = (f"layer.{layer}", "head")
        return Plan(layers=(*range(layer + 1), *sorted(map(int, above))), train=own, send=own)
