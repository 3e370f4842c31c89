"""What an attack sees and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Figure, Truth
from fedstrata.audits.play import Played


@dataclass(frozen=True)
class View:
    """What the server holds of one client's round, and what it has made itself to compare with.

    Attributes:
        bench: the stage.
        setting: how the client trained, in words, such as ``1 step``.
        client: the audited client's round. Of its truth attacks use nothing but to count what they got right.
        shadow: the same round, played by the server with public text: thresholds and probes come from here.
    """

    bench: Bench
    setting: str
    client: Played
    shadow: Played

    def common(self, count: int) -> Truth:
        """The guess without the message: the ``count`` commonest tokens of the public text, ``[V]``."""
        chosen = np.zeros(self.bench.vocabulary, dtype=bool)
        frequencies = self.bench.frequencies
        chosen[np.argsort(-frequencies, kind="stable")[:count]] = True
        return chosen & (frequencies > 0)


@dataclass(frozen=True)
class Finding:
    """What one attack found.

    Attributes:
        channel: what it read from, such as ``embeddings``.
        attack: how, in a few words.
        setting: how the client trained.
        figures: name -> figure.
        sentence: the same for people.
    """

    channel: str
    attack: str
    setting: str
    figures: Mapping[str, Figure]
    sentence: str

    def record(self) -> dict[str, Any]:
        """As it stands in ``audit.json``."""
        figures = {name: figure.record() for name, figure in self.figures.items()}
        return {**vars(self), "figures": figures}


def read_words(figures: Mapping[str, Figure], what: str) -> str:
    """Precision and recall as a sentence's middle: ``reads 70 of 70 tokens, and wrongly names 0 others``."""
    hits, true = figures["recall"].count
    said = figures["precision"].count[1]
    return f"reads {hits:,} of {true:,} {what}, and wrongly names {said - hits:,} others"
