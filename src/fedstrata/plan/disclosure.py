"""What can be read from what leaves a client: the one table behind every sentence about it.

Permission texts, the first lines of a run, a new ``site.toml``, the forecast and the documents take their words
from here; tests hold that they do. ``fedstrata audit`` measures it; docs/results/privacy.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from fedstrata.plan.kinds import Payload
from fedstrata.plan.parts import Parts
from fedstrata.plan.sharing import DISTANCES, POSITION_FACTORS, POSITIONS

Channel = Literal[
    "embeddings",
    "token_head",
    "class_head",
    "number_head",
    "layers",
    "adapters",
    "hidden_states",
    "activations",
    "reply",
]
"""What an attack reads from."""

LENGTH = ", and the length of the longest"
"""Read from a table of positions."""
LISTED = "every word of the public vocabulary in the texts"
"""Read where rows of other words are left out."""

READ: Mapping[Channel, str] = {
    "embeddings": f"every word of the texts{LENGTH}",
    "token_head": "which words were masked or predicted",
    "class_head": "the classes, about how many rows each has, and whether a given text was trained on",
    "number_head": (
        "roughly the mean of the numbers, or the number of a single text, and whether a given text was trained on"
    ),
    "layers": (
        "every token with its position, if few texts were trained on (with dropout too, whose seed the server "
        "knows), and whether a given text was trained on"
    ),
    "adapters": (
        "some tokens of short texts, and whether a given text was trained on; published attacks read whole texts "
        "from adapters"
    ),
    "hidden_states": "most words of every text with their positions; the labels are sent as they are",
    "activations": (
        "nearly every word of every batch with its position; from gradients, the masked positions and words, or "
        "every label; with activations_changed, which texts come again and which of their tokens moved"
    ),
    "reply": (
        "the numbers of examples, predictions, steps and tokens; if there are few batches, the length of the "
        "longest text of each; the loss, scores, and how long training took"
    ),
}
"""Channel -> what whoever receives it can read."""

UNCOVERED: Mapping[str, str] = {
    "example": "the number of each client's examples, the scores on the test rows, and how long anything took",
    "client": "who took part and when, the scores on the test rows, and how long anything took",
}
"""Level of noise -> what is told beside the parts of the model and has no noise."""

HIDDEN: Mapping[str, str] = {
    "example": "each training example, but not what many of them share, such as classes",
    "client": "whatever a single client's rows tell",
}
"""Level of noise -> what it hides."""

POOLED = "the rows of all clients lie in one place: a baseline for experiments, nothing is federated"
"""Said of methods that pool the rows, which send nothing."""

NAMES: Mapping[Channel, str] = {
    "embeddings": "the embeddings",
    "token_head": "the language model's head",
    "class_head": "the classifier",
    "number_head": "the regression head",
    "layers": "the layers",
    "adapters": "the adapters",
    "hidden_states": "the hidden states",
    "activations": "the activations",
    "reply": "each reply",
}
"""Channel -> what people call it."""

CHANGED = (
    "which texts come again within a round, which of their tokens have moved since, and at which tokens the "
    "output is read"
)
"""What ``[wire] activations_changed`` says beside the numbers that it sends."""

SENT: Mapping[Payload, str] = {
    "weights": (
        "trained parts of the model, which reveal whether a given text was trained on, words of the texts "
        "(embeddings, head of a language model), classes (classifier) and, if trained on few texts, whole texts "
        "(layers)"
    ),
    "hidden_states": (
        "the encoder's hidden states of every text, from which texts can be reconstructed, and the labels"
    ),
    "activations": (
        "the hidden states of every batch, from which texts can be reconstructed; their gradients, from which "
        "labels can be read; and trained parts of the model, as with the payload weights"
    ),
}
"""Payload -> what leaves a client, and what it tells, in words for whoever has to permit it."""


def beside(level: str, sum_only: bool) -> str:
    """What is told beside the tensors, by ``[privacy]``'s ``level`` and ``sum_only``."""
    if level in UNCOVERED:
        return UNCOVERED[level]
    return READ["reply"].replace("the loss, ", "") if sum_only else READ["reply"]


def channels(parts: Parts, sent: Iterable[str], target: str) -> dict[Channel, str]:
    """The channels that sent parts of the model open, and what can be read through each.

    Args:
        parts: the model's; what of them never travels opens nothing.
        sent: the parts that a client sends.
        target: what the head predicts, as :class:`fedstrata.job.task_kinds.TaskKind` has it.
    """
    kinds = {parts[name].kind for name in sent}
    whole = {name for part in sent for name in parts.shapes[part]} - parts.sharing.omitted
    opened: dict[Channel, bool] = {
        "embeddings": "embeddings" in kinds or bool(parts.word_factors(whole)),
        "token_head": "head" in kinds and target == "token",
        "class_head": "head" in kinds and target in ("class", "tag"),
        "number_head": "head" in kinds and target == "number",
        "layers": "layer" in kinds or ("head" in kinds and bool(parts.head_layers)),
        "adapters": "adapter" in kinds,
    }
    read = {channel: READ[channel] for channel, there in opened.items() if there}
    if parts.sharing.narrowed and "embeddings" in read:
        read["embeddings"] = read["embeddings"].replace("every word of the texts", LISTED)
    telling = (POSITIONS, POSITION_FACTORS, DISTANCES)
    if "embeddings" in read and not any(table.search(name) for table in telling for name in whole):
        read["embeddings"] = read["embeddings"].replace(LENGTH, "")
    if "embeddings" not in read and any(POSITION_FACTORS.search(name) for name in whole):
        read["adapters"] += "; the length of the longest text"
    return read


def sentence(found: Mapping[Channel, str], level: str = "none", sum_only: bool = False) -> str:
    """What can be read through channels, as one sentence for people; empty where there are none.

    Args:
        found: of :func:`channels`.
        level: of noise, as in ``[privacy]``.
        sum_only: the server sees sums alone.
    """
    if not found:
        return ""
    who, measured = "of each client", " (fedstrata audit measures it)"
    if not found.keys() - {"number_head"}:
        measured = ""  # no attack of the audit reads it
    if sum_only:  # whose a word is the sum does not tell; the audit attacks single messages
        who, measured = "of a round's clients together, not of each by itself", ""
    if level in HIDDEN:
        seen = ", ".join(NAMES[channel] for channel in found)
        hidden = f"within the bound that epsilon states, the noise hides {HIDDEN[level]}"
        return f"the server sees {who}, with noise: {seen}; {hidden}{measured}"
    said = [f"from {NAMES[channel]} {words}" for channel, words in found.items()]
    return f"the server can read {who}: {'; '.join(said)}{measured}"
