"""FedSplitBERT: the lower layers are shared, the upper ones are personal to each client.

Li, Si, Wang, Xiao. Federated Split BERT for Heterogeneous Text Classification. IJCNN 2022.
https://arxiv.org/abs/2205.13299

    paper                                   here
    c, the critical layer (1-based)         critical_layer; layers 0 .. c-1 are shared
    W^g, the global part                    parts trained and sent
    W_i^l, the local part of client i       parts trained and kept: layers c and up, pooler, head
    c = L, "equivalent to FedAvg"           everything is sent
    c = 0                                   nothing is sent, each client is alone
    qat: 16-bit floats when sent            [wire] dtype = "fp16", for any method; sums keep full precision

The paper's bytes exclude the embeddings, a later comparison by others includes them; here they are trained and
sent (``embeddings = "global"``), or trained and kept (``"local"``), or left as they are (``"frozen"``).

Requirements: a task with a personal head per client; clients with skewed labels gain most.
Relations: FedAvg is c = L, ``local`` is c = 0. Server optimizer and proximal term act on the shared part alone.
Cost: BERT-base, c = 6: 170,108,928 bytes of layers and 95,348,736 of embeddings per client, round and direction;
the compute of FedAvg.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from fedstrata.errors import UserError
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams


class FedSplitBERT(Method):
    """Everything is trained; the lower part is sent, the upper part is personal."""

    critical_layer: NonNegativeInt | None = None
    """Number of shared layers, from the bottom up; half the model's when absent, as in the paper (6 of 12)."""
    embeddings: Literal["global", "local", "frozen"] = "global"

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The same plan for every client and round.

        Raises:
            UserError: ``critical_layer`` exceeds the model's layers.
        """
        critical = parts.depth // 2 if self.critical_layer is None else self.critical_layer
        if critical > parts.depth:
            raise UserError(
                f"[method] critical_layer: is {critical}, but the model has {parts.depth} layers; "
                f"expected 0 to {parts.depth}"
            )
        trained = [part for part in parts.names if part != "embeddings" or self.embeddings != "frozen"]
        shared = {*parts.layers(0, critical), *(("pooler", "head") if critical == parts.depth else ())}
        if self.embeddings == "global" and critical > 0:
            shared.add("embeddings")
        return Plan(
            layers=tuple(range(parts.depth)),
            train=tuple(trained),
            send=tuple(part for part in trained if part in shared),
            keep=tuple(part for part in trained if part not in shared),
        )
