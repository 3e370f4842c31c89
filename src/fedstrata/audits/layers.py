"""Tokens at their places from the lowest layer, or its adapters: see :mod:`fedstrata.audits.span`.

Layers further up take inputs that depend on whole texts; no attack here reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fedstrata.audits.figures import Figure, Floats, Truth, best_threshold, detection, share
from fedstrata.audits.finding import Finding, View
from fedstrata.audits.first_layer import Matrix, candidates, first_matrices, masks_of, text_types
from fedstrata.audits.play import Played, flat, play
from fedstrata.audits.public import NAME
from fedstrata.audits.replay import moved_beyond
from fedstrata.audits.some_texts import taken
from fedstrata.audits.span import Span, rounding, span_of
from fedstrata.plan.kinds import Index

CONTROL = 1000
"""Commonest tokens of the public text; those that the client does not have are the control group."""
PLACES = 64
"""Most positions that are checked, from the start of the texts."""
LEAST = 4
"""Tokens of a public text, the two at its ends among them, below which it is not cut."""


@dataclass(frozen=True)
class _Checked:
    """What the check says of every token at every position.

    Attributes:
        scores: share of the candidate in the span, ``[V, P]``.
        exact: whether that share can reach 1.
        directions: most that a span has.
    """

    scores: Floats
    exact: bool
    directions: int

    def standardized(self) -> _Checked:
        """Scores in standard deviations from the mean over all tokens, at each position."""
        spread = self.scores.std(0).clip(1e-12)
        return _Checked((self.scores - self.scores.mean(0)) / spread, False, self.directions)


def attack(view: View) -> list[Finding]:
    """Tokens and texts, from the layers and from the adapters."""
    sent = flat(view.client.after)
    there = [matrix for matrix in first_matrices(view.bench) if matrix.name in sent]
    plain = [matrix for matrix in there if ".lora_" not in matrix.name]
    adapters = [matrix for matrix in there if ".lora_" in matrix.name]
    return [*_read(view, "layers", plain), *_read(view, "adapters", adapters)]


def _read(view: View, channel: str, matrices: list[Matrix]) -> list[Finding]:
    if not matrices:
        return []
    checked, public = (_check(view, played, matrices) for played in (view.client, view.shadow))
    if checked is not None and (public is None or checked.exact > public.exact):
        view = _with_shorter_texts(view, checked.directions)
        public = _check(view, view.shadow, matrices)
    if checked is None or public is None:
        sentence = f"from the lowest of the {channel} the server reads nothing: its change spans every direction"
        return [Finding(channel, "span check", view.setting, {}, sentence)]
    if not (checked.exact and public.exact):
        checked, public = checked.standardized(), public.standardized()
    kept, bench = view.bench.ordinary, view.bench
    true, shadow_true = (_places(p, bench.vocabulary, c.scores.shape[1]) for p, c in _pairs(view, checked, public))
    shadow_words: Truth = np.asarray(shadow_true[kept].any(1))
    threshold = best_threshold(public.scores[kept].max(1), shadow_words)
    scores = checked.scores[kept].max(1)
    words: Truth = np.asarray(true[kept].any(1))
    figures = detection(scores, words, threshold, view.common(int(shadow_true[kept].any(1).sum()))[kept])
    control = view.common(CONTROL)[kept] & ~words
    figures["control group"] = share(int((scores[control] >= threshold).sum()), int(control.sum()))
    places = _sharper(public.scores[kept], shadow_true[kept])
    said = checked.scores[kept] >= places
    hits = int((said & true[kept]).sum())
    figures["places precision"] = share(hits, int(said.sum()), float(true[kept].mean()))
    figures["places recall"] = share(hits, int(true[kept].sum()), float(said.mean()))
    texts = _texts(view.client)
    longer, exact = any(len(text) > PLACES for text in texts), False
    if len(texts) == 1 and not longer:
        exact = _only(checked.scores, places, texts[0], bench.special)
        figures["exact texts"] = share(int(exact), 1, 0.0)
    return [Finding(channel, _how(checked), view.setting, figures, _sentence(channel, figures, exact, longer))]


def _with_shorter_texts(view: View, directions: int) -> View:
    """The public round with its texts cut, so that they have no more tokens than the client's span has directions.

    Longer ones fill every direction, and no threshold for the client's few could be had from them.
    """
    bench, shadow = view.bench, view.shadow
    most = max(LEAST, directions // max(1, view.client.texts))
    cut = taken(bench.public, np.arange(len(bench.public)), most)
    return replace(view, shadow=play(bench, NAME, cut, shadow.index, shadow.train))


def _sentence(channel: str, figures: dict[str, Figure], exact: bool, longer: bool) -> str:
    places, control = figures["places recall"].count, figures["control group"].count
    whole = "the text exactly: " if exact else ""
    wrong = figures["places precision"].count[1] - places[0]
    chance = ", as chance would" if figures["places precision"].holds_chance else ""
    of = f"the first {PLACES} places" if longer else "their places"
    return (
        f"from the lowest of the {channel} the server reads {whole}{places[0]:,} of {places[1]:,} tokens at {of}, "
        f"and wrongly names {wrong:,} others{chance}; of {control[1]:,} common tokens that are not there it "
        f"takes {control[0]:,} for the client's"
    )


def _how(checked: _Checked) -> str:
    return "span check" if checked.exact else "span check, not exact"


def _pairs(view: View, checked: _Checked, public: _Checked) -> list[tuple[Played, _Checked]]:
    return [(view.client, checked), (view.shadow, public)]


def _check(view: View, played: Played, matrices: list[Matrix]) -> _Checked | None:
    """The scores of all candidates; of several spans each candidate's best fitting one counts least.

    Where texts are pairs a token counts as whichever of the two it fits better.
    """
    spans = _spans(view, played, matrices)
    if not spans:
        return None
    texts = _texts(played)
    positions = min(PLACES, max(map(len, texts), default=1))
    tokens = torch.arange(view.bench.vocabulary)
    first, masks = matrices[0], masks_of(view.bench, played)
    into = Matrix(first.factor, False) if first.factor else first
    kinds: list[torch.Tensor] = []
    for kind in text_types(view.bench):
        rows = []
        for chunk in candidates(view.bench, into, positions, tokens, kind, masks):
            found = [span.scores(chunk if a is None else chunk @ a.T) for span, a in spans]
            rows.append(torch.stack(found).amin(0))
        kinds.append(torch.cat(rows))
    directions = max(span.basis.shape[1] for span, _ in spans)
    return _Checked(torch.stack(kinds).amax(0).double().numpy(), all(span.exact for span, _ in spans), directions)


def _spans(view: View, played: Played, matrices: list[Matrix]) -> list[tuple[Span, torch.Tensor | None]]:
    """The span of matrices that take the layer's input itself, and of each B, with the A before it."""
    change = moved_beyond(view.bench, played, [matrix.name for matrix in matrices])
    after, before = flat(played.after), flat(view.bench.start)
    dtype = view.bench.ready.runtime.wire.codec.name
    groups = [[matrix for matrix in matrices if not matrix.factor]]
    groups += [[matrix] for matrix in matrices if matrix.factor]
    found = []
    for group in filter(None, groups):
        noise = max(rounding(after[matrix.name], dtype) for matrix in group)
        span = span_of(torch.cat([matrix.rows(change[matrix.name]) for matrix in group]), noise)
        if span is not None and span.basis.shape[1] < span.basis.shape[0]:
            # an A moves by what B lets through: sums of the inputs, in fewer directions than there are inputs
            span = replace(span, exact=span.exact and ".lora_A." not in group[0].name)
            found.append((span, before[group[0].factor] if group[0].factor else None))
    return found


def _texts(played: Played) -> list[Index]:
    """Texts as the model saw them whose loss depends on them: those with something to predict."""
    found = []
    for seen in played.seen:
        shown, mask = seen.batch.inputs["input_ids"].numpy(), seen.batch.inputs["attention_mask"].numpy()
        predicted = seen.batch.positions
        for row in range(len(shown)):
            if not isinstance(predicted, torch.Tensor) or bool(predicted[row].any()):
                found.append(shown[row][mask[row] > 0])
    return found


def _places(played: Played, vocabulary: int, positions: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Which token stands at which position in some text, ``[V, P]``."""
    true = np.zeros((vocabulary, positions), dtype=bool)
    for text in _texts(played):
        true[text[:positions], np.arange(min(len(text), positions))] = True
    return true


def _sharper(scores: Floats, true: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> float:
    """The threshold for single places, from the public round."""
    return best_threshold(scores.ravel(), true.ravel())


def _only(scores: Floats, threshold: float, text: Index, special: Index) -> bool:
    """Whether at each place of a text the check names its token and, special ones apart, no other.

    Of a text of special tokens alone, as one whose words the tokenizer does not know, there is nothing to name.
    """
    if set(text.tolist()) <= set(special.tolist()):
        return False
    said = scores >= threshold
    said[special] = False
    for place, token in enumerate(text[: scores.shape[1]]):
        named = set(np.flatnonzero(said[:, place]).tolist())
        if named - {int(token)} or (token not in special and int(token) not in named):
            return False
    return True
