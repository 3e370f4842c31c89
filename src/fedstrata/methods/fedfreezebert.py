"""FedFreezeBERT: the encoder is frozen, a head over it is trained.

Galal, Abdel-Gawad, Farouk. Federated Freeze BERT for text classification. Journal of Big Data 11, 28, 2024.
https://doi.org/10.1186/s40537-024-00885-x

    paper                                   here
    W_s, the aggregation architecture       part ``head``: [head] kind, classifier, ...
    Ordinary, Average, P-SUM, H-SUM         head = "cls", "mean", "psum", "hsum"
    D-FedFreezeBERT                         variant = "distributed": the head is trained and sent in every round
    C-FedFreezeBERT                         variant = "centralized": hidden states and labels go up once, the
                                            server trains the head, it goes down once; E epochs are rounds
    Emb_i, [n_i, 128, 768]                  the hidden states that the head takes, without padding: one vector per
                                            text for Ordinary and Average, for P-SUM and H-SUM four layers (the
                                            paper counts one)
    frozen BERT, downloaded once            ``plan.freeze_encoder``: no dropout, computed once
    FedProx on top                          train.proximal_mu, or any server optimizer

The paper writes the mean over the clients after its loop; it is taken in every round, as its text says.

Requirements: a text classifier or regressor; an encoder pre-trained on the language.
Relations: FedAvg of the head alone. With ``head = "cls"`` it is a linear probe.
Cost: BERT-base: 9,228 bytes per client, round and direction for Ordinary and Average with three classes,
113,442,864 for P-SUM and H-SUM; the encoder runs once over each text, without a backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fedstrata.errors import UserError
from fedstrata.plan.kinds import Payload
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Method, Plan
from fedstrata.plan.streams import Streams


class FedFreezeBERT(Method):
    """The head is trained and sent; the encoder is downloaded once."""

    head: Literal["cls", "mean", "psum", "hsum"] | None = None
    """The head, as ``[head] kind`` sets it too. P-SUM when both are absent."""
    variant: Literal["distributed", "centralized"] = "distributed"
    pooler: Literal["frozen", "train"] = "frozen"
    """With ``[head] pooler = true``: frozen as in the checkpoint, or trained and sent with the head."""

    @property
    def exchange(self) -> Payload:
        """Clients of the centralized variant send hidden states."""
        return "hidden_states" if self.variant == "centralized" else "weights"

    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """One of our own heads, which can be trained on cached hidden states."""
        return {"head": {"kind": self.head or "psum"}}

    def plan(self, parts: Parts, task: str, round: int, client: str, streams: Streams) -> Plan:
        """The same plan for every client and round.

        Raises:
            UserError: a pooler is to be trained that the model does not have.
        """
        if self.pooler == "train" and "pooler" not in parts.names:
            raise UserError("[method] pooler: there is none to train; [head] pooler = true puts it into the model")
        trained = ("pooler", "head") if self.pooler == "train" else ("head",)
        sent = trained if self.exchange == "weights" else ()
        return Plan(layers=tuple(range(parts.depth)), train=trained, send=sent, freeze_encoder=True)
