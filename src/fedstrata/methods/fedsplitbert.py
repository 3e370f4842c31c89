"""FedSplitBERT: the lower layers are shared, the upper ones stay each client's own.

FedSplitBERT. IJCNN 2022.

    paper                                   here
    c, the critical layer (1-based)         critical_layer; layers 0 .. c-1 are shared
    W^g, the global part                    parts trained and sent
    W_i^l, the local part of client i       parts trained and kept: layers c and up, pooler, head
    c = L, "equivalent to FedAvg"           everything is sent
    c = 0                                   nothing is sent, each client is alone
    qat: 16-bit floats on the wire          [wire] dtype = "fp16", for any method; sums stay wider

The paper's bytes leave the embeddings out, a later comparison by others counts them in; they are trained and
sent here (``embeddings = "global"``), or trained and kept (``"local"``), or left as they are (``"frozen"``).

Requirements: a task with a head of its own per client; clients whose labels are dealt unevenly gain most.
Relations: FedAvg is c = L, ``local`` is c = 0. Server rules and the proximal term act on the shared part alone.
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
    """Everything is trained; the lower part is sent, the upper part is kept."""

    critical_layer: NonNegativeInt | None = None
    """Number of shared layers, from the embeddings up; half the model's when absent, as the paper's 6 of 12."""
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
                f"legal: 0 to {parts.depth}"
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
