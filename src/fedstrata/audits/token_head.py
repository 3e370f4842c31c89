"""Predicted words from the decoder's bias: the loss raises the bias of a target, and lowers that of all others."""

from __future__ import annotations

import numpy as np

from fedstrata.audits.figures import Figure, Floats, Truth, best_threshold, detection
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.play import Played, flat
from fedstrata.audits.replay import moved_beyond


def attack(view: View) -> list[Finding]:
    """The distinct tokens that were to be predicted."""
    bench, kept = view.bench, view.bench.ordinary
    parts = (bench.parts[part] for part in view.client.after if bench.parts[part].kind == "head")
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    names = [name for name, shape in shapes.items() if tuple(shape) == (bench.vocabulary,)]
    if not names or names[0] not in flat(view.client.after):
        return []
    scores, shadow = (_raised(view, played, names[0])[kept] for played in (view.client, view.shadow))
    true, shadow_true = (_targets(view, played)[kept] for played in (view.client, view.shadow))
    guess = view.common(int(shadow_true.sum()))[kept]
    certain = detection(scores, true, float(np.nextafter(0, 1)), guess)
    tuned = detection(scores, true, best_threshold(shadow, shadow_true), guess)
    return [
        Finding("token_head", f"decoder bias, {how}", view.setting, figures, _sentence(figures, how))
        for how, figures in (("raised", certain), ("tuned", tuned))
    ]


def _sentence(figures: dict[str, Figure], how: str) -> str:
    words = read_words(figures, "predicted words (distinct tokens)")
    return f"from the decoder's bias ({how}) the server {words}"


def _raised(view: View, played: Played, name: str) -> Floats:
    return moved_beyond(view.bench, played, [name])[name].double().numpy()


def _targets(view: View, played: Played) -> Truth:
    found = np.zeros(view.bench.vocabulary, dtype=bool)
    for seen in played.seen:
        found[seen.batch.targets.numpy().ravel()] = True
    return found
