"""Each paper's own unit: what its tables call megabytes and per cent, for comparison with them, nothing else.

fedbfpt         one client's upload of one round, as a saved file, in MiB (printed as MB)      Table 2
fedbt           the same in pre-training; in fine-tuning the mean upload of a round, as a
                saved file without the pooler, in MB of 10^6 bytes                             Tables 1, 3
fedsplitbert    one direction, all clients, one round, without the embeddings, in GB of 10^9   Table VI
fedfreezebert   both directions, all clients, all rounds, in MB of 10^6 divided by 1024        Table 4
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedstrata.cost.bytes import payload
from fedstrata.plan.kinds import LANGUAGE
from fedstrata.plan.parts import Parts

UNITS = ("fedbfpt", "fedbt", "fedsplitbert", "fedfreezebert")
COMPUTE = ("fedbfpt", "fedbt")
"""Those that print compute in per cent of a whole BERT's."""
CONTAINER = 290
"""Bytes that ``torch.save`` adds per tensor; between 280 and 300 for the models of the papers."""
MIB = 2**20


def saved(parts: Parts, names: Sequence[str], dtype: str = "fp32") -> int:
    """Bytes of a file that ``torch.save`` makes of the named parts, within a few bytes per tensor."""
    return payload(parts, names, dtype) + CONTAINER * sum(len(parts.shapes[name]) for name in names)


def upload(
    unit: str, parts: Parts, task: str, sent: Sequence[Sequence[str]], clients: int, dtype: str = "fp32"
) -> tuple[float, str]:
    """The communication figure of a paper, and what it is called there.

    Args:
        unit: one of ``UNITS``.
        parts: the model's parts.
        task: the task's kind.
        sent: the parts one client sends in each round.
        clients: number of clients.
        dtype: the wire type.
    """
    if unit == "fedbfpt" or (unit == "fedbt" and task in LANGUAGE):
        return max(saved(parts, names, dtype) for names in sent) / MIB, "MiB up, one client, one round"
    if unit == "fedbt":
        without = [[name for name in names if name != "pooler"] for names in sent]
        return fmean(
            saved(parts, names, dtype) for names in without
        ) / 1e6, "MB up, one client, mean of the rounds"
    if unit == "fedsplitbert":
        layers = [name for name in sent[0] if name != "embeddings"]
        return clients * payload(parts, layers, dtype) / 1e9, "GB up, all clients, one round, no embeddings"
    total = 2 * clients * sum(payload(parts, names, dtype) for names in sent)
    return total / 1e6 / 1024, "MB / 1024, up and down, all clients and rounds"


def features(examples: int, tokens: int, hidden: int, clients: int, head_bytes: int, layers: int = 1) -> float:
    """FedFreezeBERT's equation 2 for its centralized variant, in the mixed unit of its Table 4.

    One hidden state of ``hidden`` fp32 numbers for every token, in GiB, and the head once to every client, in
    MB / 1024. P-SUM and H-SUM take the states of four ``layers``, which the paper leaves out.
    """
    return 4 * layers * examples * tokens * hidden / 2**30 + clients * head_bytes / 1e6 / 1024


def compute(depth: int, tokens: int, hidden: int, vocabulary: int, layer: int = 0, whole: int = 12) -> float:
    """FLOPs of a FedBFPT step relative to those of a whole BERT of ``whole`` layers, with the MLM head everywhere.

    The model behind the papers' percentages, corrected where they are wrong (the gradient passes through every
    layer above the trained one; the head counts): F = 24 S H^2 + 4 S^2 H per layer and forward pass, as much again
    for either gradient. It counts the products of attention once in the backward pass, where they cost two forward
    passes (:mod:`fedstrata.cost.flops` counts those); that is 0.3 points.

    Args:
        depth: layers of the local model.
        tokens: S, positions of an example.
        hidden: H.
        vocabulary: V.
        layer: the trained layer.
        whole: layers of the whole model.
    """
    once = 24 * tokens * hidden**2 + 4 * tokens**2 * hidden
    dense = 2 * tokens * hidden**2
    head = 2 * tokens * hidden * vocabulary + dense
    forward = depth * once + head
    backward = head + (depth - 1 - layer) * once + dense + 2 * once - 3 * dense
    return (forward + backward) / (3 * (whole * once + head))
