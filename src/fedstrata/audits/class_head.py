"""Classes from the classifier: its bias rises for classes that the texts have, the more of them the further.

So does a class's row, along the mean of what the classifier takes in, which the server computes with public text.
A row says it louder than the bias, by as much as that mean is longer than 1: what hides a bias, noise or a message
of few entries, need not hide a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Floats, best_threshold, detection, distance
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.play import Played
from fedstrata.audits.replay import moved_beyond
from fedstrata.plan.parts import Part
from fedstrata.plan.sharing import Shapes

TEXTS = 64
"""Public texts over which the mean of what the classifier takes in is taken."""


def told_by_class(part: Part, classes: int) -> Shapes:
    """Of a head's tensors those that have a number, or a row, for each class."""
    return {name: shape for name, shape in part.shapes.items() if shape[:1] == (classes,) and len(shape) <= 2}


def attack(view: View) -> list[Finding]:
    """The classes that are there, and the share of each."""
    bench, labels = view.bench, view.bench.data.labels
    parts = (bench.parts[part] for part in view.client.after if bench.parts[part].kind == "head")
    if labels is None:
        return []
    shapes = {name: shape for part in parts for name, shape in told_by_class(part, len(labels)).items()}
    biases = [name for name, shape in shapes.items() if len(shape) == 1]
    rows = [name for name, shape in shapes.items() if len(shape) == 2]
    found = [_read(view, "bias", dict.fromkeys(biases))] if biases else []
    return [*found, _read(view, "rows", {**dict.fromkeys(biases), **mean_inputs(bench, rows)})] if rows else found


def _read(view: View, what: str, along: Mapping[str, torch.Tensor | None]) -> Finding:
    """One finding.

    Args:
        view: what is attacked.
        what: bias, or rows.
        along: name of a tensor -> what its rows are multiplied by; None for a bias.
    """
    assert view.bench.data.labels is not None
    classes = len(view.bench.data.labels)
    scores, shadow = (_raised(view, played, along) for played in (view.client, view.shadow))
    true, shadow_true = (_shares(played, classes) for played in (view.client, view.shadow))
    if not true.any():
        sentence = f"from the classifier's {what} nothing is read: nothing that has a class took part"
        return Finding("class_head", f"classifier {what}", view.setting, {}, sentence)
    figures = detection(scores, true > 0, best_threshold(shadow, shadow_true > 0))
    figures["total variation"] = distance(_estimate(scores, shadow, shadow_true), true)
    off = figures["total variation"]
    sentence = (
        f"from the classifier's {what} the server {read_words(figures, 'classes that the client has')}; its "
        f"estimate of their shares is off by {off.value:.2f} (total variation; equal shares: {off.chance:.2f})"
    )
    return Finding("class_head", f"classifier {what}", view.setting, figures, sentence)


def mean_inputs(bench: Bench, names: list[str]) -> dict[str, torch.Tensor]:
    """For each of some matrices the mean of what it takes in, over public texts, ``[in]``."""
    totals = {name: (torch.zeros(()), 0) for name in names}

    def note(name: str) -> object:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            vectors = inputs[0].detach().float().flatten(0, -2)
            total, count = totals[name]
            totals[name] = total + vectors.sum(0), count + len(vectors)

        return hook

    task, rng = bench.ready.runtime.trainer.task, np.random.default_rng(0)
    with bench.model() as model:
        handles = [
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(note(name))  # type: ignore[arg-type]
            for name in names
        ]
        try:
            with bench.local_layers():
                for text in range(min(TEXTS, len(bench.public))):
                    task.loss(model, task.batch(bench.public, np.asarray([text]), rng))
        finally:
            for handle in handles:
                handle.remove()
    return {name: total / max(1, count) for name, (total, count) in totals.items()}


def _raised(view: View, played: Played, along: Mapping[str, torch.Tensor | None]) -> Floats:
    """How far each class was raised, over the heads' branches."""
    changes = moved_beyond(view.bench, played, along)
    each = [changes[name] if way is None else changes[name] @ way for name, way in along.items()]
    raised: Floats = torch.stack(each).sum(0).double().numpy()
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
