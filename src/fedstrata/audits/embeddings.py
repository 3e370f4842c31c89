"""Words from the embeddings: a text moves the rows of its tokens and of its positions, and no others.

Where the table is the decoder of a language model as well, every row moves, all of them almost in one direction:
rows of tokens that were read or predicted go elsewhere.

Of an adapter of the table it is the columns of its A that a text moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fedstrata.audits.figures import Figure, Floats, Truth, best_threshold, detection
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.play import Played, flat
from fedstrata.audits.replay import moved_beyond
from fedstrata.models.checkpoints import max_positions
from fedstrata.plan.parts import Parts
from fedstrata.plan.sharing import POSITION_FACTORS, POSITIONS
from fedstrata.wire.partial import listed_rows

Score = Callable[[View, Played, Sequence[str]], Floats]
"""A round, and the names of tensors -> how much each token's row speaks for its having been read, ``[V]``."""


def is_factor(parts: Parts, name: str) -> bool:
    """Whether a tensor is an adapter's A of a table of tokens or positions, with a column for each."""
    return bool(parts.word_factors([name]) or POSITION_FACTORS.search(name))


def attack(view: View) -> list[Finding]:
    """The distinct tokens of the client's texts, and the length of the longest."""
    return [*_words(view), *_length(view)]


def _words(view: View) -> list[Finding]:
    bench, sent = view.bench, flat(view.client.after)
    name = bench.parts.words
    found = []
    if name in sent:
        how, score = ("direction of rows", _turned) if bench.parts.tied else ("rows moved", _moved)
        figures = _tokens(view, score, [name])
        sentence = f"from the embeddings the server {read_words(figures, 'distinct tokens')}"
        found.append(Finding("embeddings", how, view.setting, figures, sentence))
    if factors := bench.parts.word_factors(sent):
        figures = _tokens(view, _moved, factors)
        sentence = f"from the adapter of the embeddings the server {read_words(figures, 'distinct tokens')}"
        found.append(Finding("adapters", "columns moved", view.setting, figures, sentence))
    return found


def _tokens(view: View, score: Score, names: Sequence[str]) -> dict[str, Figure]:
    """How well the tensors with these names, by their scores, tell the tokens that stand in the texts."""
    bench, kept = view.bench, view.bench.ordinary
    true, shadow_true = (p.token_ids(bench.vocabulary, bench.special) for p in (view.client, view.shadow))
    scores, shadow = (score(view, played, names)[kept] for played in (view.client, view.shadow))
    threshold = best_threshold(shadow, shadow_true[kept])
    return detection(scores, true[kept], threshold, view.common(int(shadow_true.sum()))[kept])


def _changes(view: View, played: Played, names: Sequence[str]) -> torch.Tensor:
    """By how much rows of tables, or columns of an adapter's A, have moved beyond the replay, ``[V, ·]``."""
    changes = moved_beyond(view.bench, played, names)
    parts = view.bench.parts
    columns = [own.T if is_factor(parts, name) else own for name, own in changes.items()]
    made: torch.Tensor = torch.cat(columns, 1)
    return made


def _moved(view: View, played: Played, names: Sequence[str]) -> Floats:
    """The largest change of each row beyond the replay, to two digits.

    Further ones are rounding, which is coarser where weights are larger, as those of common words are: where noise
    moves all rows alike they would tell of the model and pass for words of the client.
    """
    change = _changes(view, played, names).abs().amax(1).double().numpy()
    unit = 10.0 ** np.floor(np.log10(change, out=np.zeros_like(change), where=change > 0))
    rounded: Floats = np.round(change / unit, 1) * unit
    return rounded


def _turned(view: View, played: Played, names: Sequence[str]) -> Floats:
    """How far each row's change points away from the usual one: 1 - cosine.

    Rows that never travel have none. Nor is there a usual one where most rows have not moved, as in a message of
    the largest changes alone: then it is which of them have.
    """
    change = _changes(view, played, names)
    travel = _travelling(view, names, len(change))
    usual = change[travel].median(0).values
    if not usual.any():
        return _moved(view, played, names)
    cosine: torch.Tensor = torch.nn.functional.cosine_similarity(change, usual[None], dim=1)
    return ((1 - cosine) * travel).double().numpy()


def _travelling(view: View, names: Sequence[str], rows: int) -> torch.Tensor:
    """Which rows of these tables are sent, bool ``[rows]``."""
    sharing = view.bench.parts.sharing
    if not sharing.narrowed & set(names):
        return torch.ones(rows, dtype=torch.bool)
    return torch.zeros(rows, dtype=torch.bool).index_fill(0, listed_rows(sharing), True)


def _length(view: View) -> list[Finding]:
    bench = view.bench
    longest = max_positions(bench.ready.loaded.model)
    sent = flat(view.client.after)
    tables = [n for n in sent if POSITIONS.search(n) and sent[n].shape[0] >= longest]
    tables = tables[:1] or [n for n in sent if POSITION_FACTORS.search(n)]
    if not tables:
        return []
    scores, shadow = (_moved(view, played, tables)[-longest:] for played in (view.client, view.shadow))
    true, shadow_true = (_positions(played, longest) for played in (view.client, view.shadow))
    threshold = best_threshold(shadow, shadow_true)
    figures = detection(scores, true, threshold)
    read = int(np.flatnonzero(scores >= threshold).max(initial=-1)) + 1
    where = "adapter" if is_factor(bench.parts, tables[0]) else "rows"
    sentence = (
        f"from the {where} of positions the server reads that the longest text has {read} tokens; "
        f"it has {int(true.sum())}"
    )
    channel, how = ("adapters", "columns of positions") if where == "adapter" else ("embeddings", "position rows")
    return [Finding(channel, how, view.setting, figures, sentence)]


def _positions(played: Played, longest: int) -> Truth:
    most = max((len(ids) for seen in played.seen for ids in seen.originals), default=0)
    return np.arange(longest) < most
