"""Predicted words from a language model's head.

The loss raises the decoder's bias of a target, and lowers that of all others. It moves the bias of the norm before
the decoder by the sum of the targets' rows in the decoder, which the server has, less those of what was expected.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Figure, Floats, Truth, along_one_direction, best_threshold, detection
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.play import Played, flat
from fedstrata.audits.replay import moved_beyond
from fedstrata.plan.parts import Part

Score = Callable[[View, Played, str], Floats]
"""A round, and the name of a bias -> how much it speaks for each token's having been predicted, ``[V]``."""


def read_of(bench: Bench, head: Part) -> dict[str, str]:
    """What the attack reads of a head, as far as it travels: ``decoder`` and ``norm`` -> the name of a bias."""
    model = bench.ready.loaded.model
    width = model.get_output_embeddings().weight.shape[1]
    sent = {name: tuple(shape) for name, shape in head.shapes.items() if name not in bench.parts.sharing.omitted}
    norms = {f"{name}.bias" for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    found = {}
    for name, shape in sent.items():
        if shape == (bench.vocabulary,):
            found["decoder"] = name
        elif name in norms and shape == (width,):
            found["norm"] = name
    return found


def attack(view: View) -> list[Finding]:
    """The distinct tokens that were to be predicted."""
    bench, sent = view.bench, flat(view.client.after)
    if bench.data.labels is not None or bench.ready.loaded.model.get_output_embeddings() is None:
        return []
    parts = (bench.parts[part] for part in view.client.after if bench.parts[part].kind == "head")
    biases = {which: name for part in parts for which, name in read_of(bench, part).items() if name in sent}
    found = []
    if "decoder" in biases:
        found += _read(view, "decoder", ("raised", "tuned"), _moved, biases["decoder"])
    if "norm" in biases:
        found += _read(view, "norm", ("tuned",), _along_rows, biases["norm"])
    return found


def _read(view: View, which: str, ways: tuple[str, ...], score: Score, name: str) -> list[Finding]:
    kept = view.bench.ordinary
    scores, shadow = (score(view, played, name)[kept] for played in (view.client, view.shadow))
    true, shadow_true = (_targets(view, played)[kept] for played in (view.client, view.shadow))
    guess = view.common(int(shadow_true.sum()))[kept]
    thresholds = {"raised": float(np.nextafter(0, 1)), "tuned": best_threshold(shadow, shadow_true)}
    found = []
    for how in ways:
        figures = detection(scores, true, thresholds[how], guess)
        if which == "norm":
            figures["auc"] = along_one_direction(figures["auc"], _rows(view)[kept], true)
        sentence = _sentence(figures, f"{which}'s bias ({how})")
        found.append(Finding("token_head", f"{which} bias, {how}", view.setting, figures, sentence))
    return found


def _sentence(figures: dict[str, Figure], where: str) -> str:
    return f"from the {where} the server {read_words(figures, 'predicted words (distinct tokens)')}"


def _along_rows(view: View, played: Played, name: str) -> Floats:
    """How far the norm's bias has moved along each token's row of the decoder, as a cosine."""
    moved = _moved(view, played, name)
    return np.asarray(_rows(view) @ (moved / (np.linalg.norm(moved) or 1.0)), dtype=np.float64)


def _rows(view: View) -> npt.NDArray[np.float32]:
    """The decoder's rows in the start model less their mean, of unit length, ``[V, H]``."""
    model = view.bench.ready.loaded.model
    weight = model.get_output_embeddings().weight
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    rows = flat(view.bench.start)[name]
    unit: torch.Tensor = torch.nn.functional.normalize(rows - rows.mean(0))
    return unit.numpy()


def _moved(view: View, played: Played, name: str) -> Floats:
    """How far a bias has moved."""
    return moved_beyond(view.bench, played, [name])[name].double().numpy()


def _targets(view: View, played: Played) -> Truth:
    found = np.zeros(view.bench.vocabulary, dtype=bool)
    for seen in played.seen:
        found[seen.batch.targets.numpy().ravel()] = True
    return found
