"""Words from the embeddings: a text moves the rows of its tokens and of its positions, and no others.

Where the table is the decoder of a language model as well, every row moves, all of them almost in one direction:
rows of tokens that were read or predicted go elsewhere.
"""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.audits.figures import Floats, Truth, best_threshold, detection
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.play import Played, flat, token_table
from fedstrata.audits.replay import moved_beyond
from fedstrata.models.checkpoints import max_positions


def attack(view: View) -> list[Finding]:
    """The distinct tokens of the client's texts, and the length of the longest."""
    return [*_words(view), *_length(view)]


def _words(view: View) -> list[Finding]:
    bench = view.bench
    name = token_table(bench.ready.loaded.model, bench.vocabulary)
    if name not in flat(view.client.after):
        return []
    tied = bool(bench.parts.tied)
    score = _turned if tied else _moved
    true, shadow_true = (p.token_ids(bench.vocabulary, bench.special) for p in (view.client, view.shadow))
    kept = bench.ordinary
    scores, shadow = (score(view, played, name)[kept] for played in (view.client, view.shadow))
    threshold = best_threshold(shadow, shadow_true[kept])
    guess = view.common(int(shadow_true.sum()))[kept]
    figures = detection(scores, true[kept], threshold, guess)
    how = "direction of rows" if tied else "rows moved"
    sentence = f"from the embeddings the server {read_words(figures, 'distinct tokens')}"
    return [Finding("embeddings", how, view.setting, figures, sentence)]


def _moved(view: View, played: Played, name: str) -> Floats:
    """The largest change of each row beyond the replay, to two digits.

    Further ones are rounding, which is coarser where weights are larger, as those of common words are: where noise
    moves all rows alike they would tell of the model and pass for words of the client.
    """
    change = moved_beyond(view.bench, played, [name])[name].abs().amax(1).double().numpy()
    unit = 10.0 ** np.floor(np.log10(change, out=np.zeros_like(change), where=change > 0))
    rounded: Floats = np.round(change / unit, 1) * unit
    return rounded


def _turned(view: View, played: Played, name: str) -> Floats:
    """How far each row's change points away from the usual one: 1 - cosine."""
    change = moved_beyond(view.bench, played, [name])[name]
    usual = change.median(0).values
    cosine: torch.Tensor = torch.nn.functional.cosine_similarity(change, usual[None], dim=1)
    return (1 - cosine).double().numpy()


def _length(view: View) -> list[Finding]:
    bench = view.bench
    longest = max_positions(bench.ready.loaded.model)
    sent = flat(view.client.after)
    tables = [n for n in sent if "position" in n and sent[n].ndim == 2 and sent[n].shape[0] >= longest]
    if not tables:
        return []
    scores, shadow = (_moved(view, played, tables[0])[-longest:] for played in (view.client, view.shadow))
    true, shadow_true = (_positions(played, longest) for played in (view.client, view.shadow))
    threshold = best_threshold(shadow, shadow_true)
    figures = detection(scores, true, threshold)
    read = int(np.flatnonzero(scores >= threshold).max(initial=-1)) + 1
    sentence = (
        f"from the rows of positions the server reads that the longest text has {read} tokens; "
        f"it has {int(true.sum())}"
    )
    return [Finding("embeddings", "position rows", view.setting, figures, sentence)]


def _positions(played: Played, longest: int) -> Truth:
    most = max((len(ids) for seen in played.seen for ids in seen.originals), default=0)
    return np.arange(longest) < most
