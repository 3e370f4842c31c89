"""The closed sets of words that a job and its records use, and the types that every layer shares. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Tensors = dict[str, "torch.Tensor"]
"""Tensors by the names they have in the model."""
Weights = dict[str, Tensors]
"""Part -> its tensors."""
Index: TypeAlias = "npt.NDArray[np.int64]"
"""Places of rows or examples, or their lengths in tokens, ``[n]``."""

PartKind = Literal["embeddings", "layer", "base", "adapter", "pooler", "head"]
Factors = Literal["both", "a", "b"]
"""What an adapter's part holds of the products B A: both factors, or one of them."""
Payload = Literal["weights", "hidden_states", "activations"]
"""What leaves a client: parts of the model; a frozen encoder's hidden states of its texts, with the labels; or the
hidden states of every batch and their gradients, to and from layers that the server holds."""
ClientSchedule = Literal["parallel", "sequential", "interleaved"]
"""Client schedule within a round: independent copies; each continues from the previous client; or all share one
set of server layers, batch by batch."""
Population = Literal["each", "pooled", "one"]
"""Whom a method asks: every client, one that holds all the data, or the first alone."""
Phase = Literal[
    "train", "evaluate", "hidden_states", "receive", "sum_keys", "sum_shares", "sum_survivors", "sum_open"
]
"""What a request is for: to train; to score the model; to send the hidden states of all texts; to take the parts
that come with it, and no more; or for a step of a masked sum, see :mod:`fedstrata.privacy.masked_sums`."""
SUM_PHASES: dict[Phase, str] = {
    "sum_keys": "keys",
    "sum_shares": "shares",
    "sum_survivors": "survivors",
    "sum_open": "open",
}
"""Phase -> step of a masked sum."""

AUDIT = "audit.json"
"""What an audit writes into a run's folder."""
AUDIT_FORMAT = 1
"""Version of that file."""
PAGE = "report.html"
"""The page of a run, a sweep or one of its cells."""
TRACK = "track"
"""The folder in a run's folder in which trackers write their files, from before anything is trained."""
CHOICES = "choices.toml"
"""In a run's folder: its stages in their order, and what was settled for each when the run began."""
LOCK = ".fedstrata.lock"
"""The file that the process that writes a run's folder holds locked; the lock goes with the process."""
FORMAT = 3
"""Version of the files in a run's folder; a folder of another version is refused."""

LANGUAGE = ("mlm", "clm")
"""Task kinds that learn from plain text: pre-training."""
LOWER_IS_BETTER = ("loss", "perplexity")
"""Metrics that are better when smaller."""
