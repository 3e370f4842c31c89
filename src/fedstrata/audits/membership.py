"""Which texts a model was trained on: its loss of them, against that of models that were not.

Two scores: by how far the loss of a text has fallen from the start model (calibration by a reference model, Watson
et al., On the Importance of Difficulty Calibration in Membership Inference Attacks, ICLR 2022, section 3), and by
how many deviations its confidence lies above that of shadow models that were not trained on it (Carlini et al.,
Membership Inference Attacks From First Principles, IEEE S&P 2022: the offline attack, with one variance for all
texts, as few shadow models ask for).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Figure, Floats, Truth, area, share
from fedstrata.audits.finding import Finding
from fedstrata.audits.play import Played
from fedstrata.audits.short_training import ShortTrainings, that_fit
from fedstrata.audits.some_texts import distinct, drawn_batches, losses, taken, together
from fedstrata.errors import plural
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Batch, Examples

SHADOWS = 4
"""Shadow models: two pairs, each trained on the two halves of the texts."""
MOST = 200
"""Texts of the client, and as many held-out ones."""
LEAST = 20
"""Texts below which no area is worth an interval."""
RATE = 0.01
"""False positives at which true ones are counted."""
Draws = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pool:
    """Texts about which it is asked whether a model was trained on them.

    Attributes:
        examples: the client's texts, then held-out ones; no two are the same.
        own: which are the client's, ``[n]``.
        batches: one for each text, see :func:`fedstrata.audits.some_texts.drawn_batches`.
    """

    examples: Examples
    own: Truth
    batches: list[Batch]


@dataclass(frozen=True)
class Shadows:
    """What the attacker made itself to compare with.

    Attributes:
        start: loss of every text under the start model, ``[n]``.
        shadows: under each shadow model, ``[k, n]``; empty without shadow models.
        inside: which texts each shadow model was trained on, ``[k, n]``.
    """

    start: Floats
    shadows: Floats = field(default_factory=lambda: np.empty((0, 0)))
    inside: Draws = field(default_factory=lambda: np.empty((0, 0), dtype=np.bool_))

    def scores(self, target: Floats) -> dict[str, Floats]:
        """Attack -> its score of every text, high where the target was trained on it."""
        found = {"calibrated loss": self.start - target}
        if len(self.shadows):
            found[f"LiRA, {len(self.shadows)} shadow models"] = likelihood_ratio(target, self.shadows, self.inside)
        return found


def pool_of(bench: Bench) -> Pool:
    """The client's texts, and held-out ones: its own test rows where it has some, else the common test rows."""
    ready, rng = bench.ready, _rng(bench, "texts of membership")
    known: set[bytes] = set()
    own = distinct(ready.train, rng.permutation(bench.index), known)[:MOST]
    distinct(ready.train, np.concatenate(list(ready.shards.values())), known)
    tests = ready.tests.get(bench.client, {}).get(bench.client, np.arange(len(ready.test)))
    held_out = distinct(ready.test, rng.permutation(tests), known)[:MOST]
    own = that_fit(bench, ready.train, own, 1.0)
    held_out = that_fit(bench, ready.test, held_out, 1.0) if len(held_out) else held_out
    examples = together(taken(ready.train, own), taken(ready.test, held_out))
    return Pool(examples, np.arange(len(examples)) < len(own), drawn_batches(bench, examples))


def halves(rng: np.random.Generator, texts: int) -> Draws:
    """What the target and each shadow model are trained on, ``[1 + SHADOWS, texts]``.

    Shadow models come in pairs whose halves are each other's complement, so that every text has as many that were
    not trained on it.
    """
    first = [np.argsort(rng.random(texts)) < texts // 2 for _ in range(1 + SHADOWS // 2)]
    return np.stack([first[0], *(half for own in first[1:] for half in (own, ~own))])


def shadow_trainings(trainings: ShortTrainings, pool: Pool) -> tuple[Shadows, Played, Truth]:
    """Shadow models; and a target that was trained as they were, with what it was trained on."""
    bench, rng = trainings.bench, _rng(trainings.bench, "halves of membership")
    inside = halves(rng, len(pool.own))
    target, *others = (np.flatnonzero(half) for half in inside)
    played = trainings.train("membership target", pool.examples, target)
    found = [
        trainings.losses(trainings.train(f"shadow model {i} of {SHADOWS}", pool.examples, half), pool.batches)
        for i, half in enumerate(others, 1)
    ]
    return Shadows(start_losses(bench, pool), np.stack(found), inside[1:]), played, inside[0]


def start_losses(bench: Bench, pool: Pool) -> Floats:
    """The start model's loss of every text."""
    with bench.model():
        return losses(bench, bench.ready.runtime.working, pool.batches)


def found_in(
    bench: Bench, channel: str, setting: str, scores: Mapping[str, Floats], member: Truth
) -> list[Finding]:
    """The findings of both attacks on one model."""
    findings = []
    for attack, values in scores.items():
        figures = membership(values, member, _rng(bench, "threshold of membership"))
        area_, hits = figures["AUC"], figures["TPR at 1 % FPR"]
        sentence = (
            f"whether a text was trained on is told from the {channel} with an area of {area_.value:.2f} "
            f"({area_.low:.2f} to {area_.high:.2f}); of {plural(hits.count[1], 'text')} that were, "
            f"{hits.count[0]:,} stand above nearly all that were not ({attack})"
        )
        findings.append(Finding(channel, attack, setting, figures, sentence))
    return findings


def membership(scores: Floats, member: Truth, rng: np.random.Generator) -> dict[str, Figure]:
    """Area, and the share of members above a threshold, which one half of the others sets for the other half.

    Args:
        scores: of each text, ``[n]``, high for "trained on".
        member: which were trained on, ``[n]``.
        rng: deals the halves.
    """
    outside = rng.permutation(np.flatnonzero(~member))
    setting, counted = outside[: (len(outside) + 1) // 2], outside[(len(outside) + 1) // 2 :]
    ranked = np.sort(scores[setting])[::-1]
    allowed = max(0, int(RATE * (len(ranked) + 1)) - 1)
    threshold = float(ranked[allowed]) if len(ranked) else float("inf")
    expected = (allowed + 1) / (len(ranked) + 1)  # of another draw of such texts above that one
    hits = int((scores[member] > threshold).sum())
    return {
        "AUC": area(scores, member),
        "TPR at 1 % FPR": share(hits, int(member.sum()), expected),
        "FPR there": share(int((scores[counted] > threshold).sum()), len(counted), expected),
    }


def likelihood_ratio(target: Floats, shadows: Floats, inside: Draws) -> Floats:
    """Standard deviations of a text's confidence above that of shadow models not trained on it, ``[n]``.

    Args:
        target: losses of the texts under the attacked model, ``[n]``.
        shadows: under the shadow models, ``[k, n]``.
        inside: which texts these were trained on, ``[k, n]``; each text is outside of at least one.
    """
    outside = ~inside
    count = outside.sum(0)
    trusts = confidence(shadows)
    center = np.where(outside, trusts, 0.0).sum(0) / count
    squares = np.where(outside, (trusts - center) ** 2, 0.0).sum() / max(1, int((count - 1).sum()))
    ratio: Floats = (confidence(target) - center) / max(float(np.sqrt(squares)), 1e-12)
    return ratio


def confidence(loss: Floats) -> Floats:
    """log p / (1 - p) of the probability p that a loss stands for (Carlini et al. 2022, as above).

    Of numbers the loss is a squared error, which may be large: there it is the loss with its sign changed.
    """
    bounded = np.clip(loss, 1e-9, 1e9)  # also where a training has diverged
    logit: Floats = -bounded - np.log(-np.expm1(-bounded))
    return logit


def _rng(bench: Bench, use: str) -> np.random.Generator:
    return Streams(bench.job.train.seed).numpy(0, bench.client, use)


def small(held_out: int) -> str:
    """What to say where too few texts set the threshold for one of :data:`RATE`; else empty."""
    setting = (held_out + 1) // 2
    if RATE * (setting + 1) >= 1:
        return ""
    return (
        f"{plural(setting, 'text')} that were not trained on set the threshold, too few for 1 % of false "
        f"positives: it is their highest score, which {1 / (setting + 1):.1%} of others are expected to pass"
    )


def texts_of(pool: Pool) -> tuple[int, int]:
    """The client's texts, and held-out ones."""
    return int(pool.own.sum()), int((~pool.own).sum())
