"""Classes from the classifier: its bias rises for classes that the texts have, the more of them the further."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.audits.figures import Figure, Floats, best_threshold, detection, mean
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.play import Played
from fedstrata.audits.replay import moved_beyond


def attack(view: View) -> list[Finding]:
    """The classes that are there, and the share of each."""
    bench, labels = view.bench, view.bench.data.labels
    parts = (bench.parts[part] for part in view.client.after if bench.parts[part].kind == "head")
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    names = [name for name, shape in shapes.items() if labels is not None and tuple(shape) == (len(labels),)]
    if not names or labels is None:
        return []
    scores, shadow = (_raised(view, played, names) for played in (view.client, view.shadow))
    true, shadow_true = (_shares(played, len(labels)) for played in (view.client, view.shadow))
    if not true.any():
        sentence = "from the classifier's bias nothing is read: nothing that has a class took part"
        return [Finding("class_head", "classifier bias", view.setting, {}, sentence)]
    figures = detection(scores, true > 0, best_threshold(shadow, shadow_true > 0))
    figures["total variation"] = _distance(_estimate(scores, shadow, shadow_true), true)
    off = figures["total variation"]
    sentence = (
        f"from the classifier's bias the server {read_words(figures, 'classes that the client has')}; its "
        f"estimate of their shares is off by {off.value:.2f} (total variation; equal shares: {off.chance:.2f})"
    )
    return [Finding("class_head", "classifier bias", view.setting, figures, sentence)]


def _raised(view: View, played: Played, names: list[str]) -> Floats:
    """The change of each class's bias, over the heads' branches."""
    changes = moved_beyond(view.bench, played, names)
    raised: Floats = torch.stack([changes[name] for name in names]).sum(0).double().numpy()
    return raised


def _shares(played: Played, classes: int) -> Floats:
    """The share of each class in what was trained on, ``[C]``; zeros where nothing was."""
    targets = [seen.batch.targets.numpy().ravel() for seen in played.seen]
    drawn = np.concatenate([np.empty(0, np.int64), *(t[t >= 0] for t in targets)])  # Poisson: perhaps nobody
    counts = np.bincount(drawn, minlength=classes)
    shares: Floats = counts / max(1, int(counts.sum()))
    return shares


def _estimate(scores: Floats, shadow: Floats, shares: Floats) -> Floats:
    """Shares from changes, by the line that fits the public round best."""
    slope, offset = np.polyfit(shadow, shares, 1) if np.ptp(shadow) > 0 else (0.0, 1 / len(scores))
    guessed = np.maximum(slope * scores + offset, 0.0)
    return guessed / guessed.sum() if guessed.sum() > 0 else np.full(len(scores), 1 / len(scores))


def _distance(estimate: Floats, true: Floats) -> Figure:
    """Total variation; its interval is over the classes."""
    half, chance = len(true) / 2, float(np.abs(1 / len(true) - true).sum() / 2)
    found = mean(list(np.abs(estimate - true)))
    return Figure(half * found.value, half * found.low, min(1.0, half * found.high), chance)
