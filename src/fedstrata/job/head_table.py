"""The table ``[head]``: the head over the encoder in classification and regression."""

from __future__ import annotations

from typing import Literal

from fedstrata.job.base import Table


class Head(Table):
    """``[head]``: the head over the encoder in classification and regression, with any method."""

    kind: Literal["cls", "mean", "psum", "hsum"] | None = None
    """Absent: what the checkpoint has, or the architecture's own."""
    classifier: Literal["branch", "shared"] = "branch"
    """Of psum and hsum: one for each of the four branches, or one for all."""
    pooler: bool = False
    """The encoder's pooler stands between token 0 and the classifier."""
    average: Literal["logits", "probabilities"] = "logits"
    """What is averaged over the branches to predict."""
    tokens: Literal["text", "inner", "all"] = "text"
    """Of ``mean``: the tokens of the text, those without the first and the last, or all with the padding."""
