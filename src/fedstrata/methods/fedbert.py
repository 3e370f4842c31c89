"""FedBERT: split learning. Clients hold embeddings and head, the server the layers between, batch by batch.

Tian, Wan, Lyu, Yao, Jin, Sun. FedBERT: When Federated Learning Meets Pre-training. ACM TIST 13(4), 2022.
https://doi.org/10.1145/3510033

    paper                                   here
    E, the embedding layer                  part "embeddings", at the client, with the tied decoder
    T, the Transformer layers               plan.server: all layers, but for ``lower`` and ``upper`` ones
    H, the head                             part "head", at the client
    P_ef, P_tf, their gradients             four messages per batch, without padding; no token id, no label
    parallel FSL (Algorithm 2)              mode "parallel": a copy of T for each client; E, T, H averaged
    sequential FSL, Head-Emd Share          mode "share": clients in sequence, one T; E and H passed on
    EmdAvg                                  mode "emb-avg": one T, batch by batch; E averaged, H personal
    Head-Emd Avg                            mode "head-emb-avg": the same with E and H averaged
    averaging period                        one round: train.epochs, or train.steps updates

The paper's Algorithm 3 copies and averages T, which contradicts its text; one T is meant. Its code never splits
the model and averages only what is left of E under a tied decoder. Optimizers stay where their weights are and
persist from round to round (train.optimizer_state = "persist").

Requirements: BERT, RoBERTa, DistilBERT, ELECTRA or GPT-2; made for pre-training, works with any head on the last
hidden state.
Relations: "parallel" is FedAvg with persistent optimizers; "share" with one client is ``centralized``.
Cost: 4 B S H numbers per batch; for RoBERTa-base and 16 texts of 512 tokens 100,663,296 bytes and their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt

from fedstrata.errors import UserError
from fedstrata.plan.kinds import ClientSchedule, Payload
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams


class FedBERT(Method):
    """Split learning: clients train embeddings and head, the server trains the layers."""

    preset: ClassVar[Mapping[str, Mapping[str, Any]]] = {"train": {"optimizer_state": "persist"}}

    mode: Literal["parallel", "share", "emb-avg", "head-emb-avg"] = "share"
    lower: NonNegativeInt = 0
    """Layers at the client between the embeddings and the server's."""
    upper: NonNegativeInt = 0
    """Layers at the client between the server's and the head."""

    @property
    def exchange(self) -> Payload:
        """Hidden states and gradients."""
        return "activations"

    @property
    def client_schedule(self) -> ClientSchedule:
        """By mode."""
        modes: dict[str, ClientSchedule] = {"parallel": "parallel", "share": "sequential"}
        return modes.get(self.mode, "interleaved")

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The same plan for every client and round.

        Raises:
            UserError: the server would be left without a layer.
        """
        depth = parts.depth
        if self.lower + self.upper >= depth:
            raise UserError(
                f"[method] lower, upper: are {self.lower} and {self.upper}, but the model has {depth} layers, "
                "at least one of which must be the server's"
            )
        server = parts.layers(self.lower, depth - self.upper)
        own = tuple(part for part in parts.names if part not in server)
        personal = tuple(part for part in own if part in ("pooler", "head")) if self.mode == "emb-avg" else ()
        sent = tuple(part for part in own if part not in personal)
        return Plan(layers=tuple(range(depth)), train=own, send=sent, keep=personal, server=server)
