"""Whether a model remembers one text: a text of random tokens put once, 10 and 100 times among the client's.

Carlini, Liu, Erlingsson, Kos, Song: The Secret Sharer (USENIX Security 2019), section 4: the exposure of a canary
is log2 of the number of candidates less log2 of its rank among them. Candidates have its form and were not put in.
They are ranked by how far their loss has fallen from the start model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Figure, Floats, exponential_mean, share
from fedstrata.audits.finding import Finding
from fedstrata.audits.membership import MOST
from fedstrata.audits.short_training import SHORT, ShortTrainings, that_fit
from fedstrata.audits.some_texts import each_token, losses, taken, together
from fedstrata.data.tokens import Tokens
from fedstrata.errors import plural
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Examples
from fedstrata.tasks.batches import IGNORE_INDEX

TIMES = (1, 10, 100)
"""How often a canary is put among the client's texts."""
EACH = 5
"""Canaries of each number."""
CANDIDATES = 250
"""Texts of the same form that are not put in."""
TOKENS = 8
"""Random tokens of a canary."""


def attack(trainings: ShortTrainings) -> list[Finding]:
    """The exposure of canaries by how often they were put in: one training with all of them."""
    bench = trainings.bench
    rng = Streams(bench.job.train.seed).numpy(0, bench.client, "canaries")
    canaries = random_texts(bench, len(TIMES) * EACH + CANDIDATES, rng)
    own = that_fit(bench, bench.ready.train, rng.permutation(bench.index)[:MOST], 0.5)
    examples = together(canaries, taken(bench.ready.train, own))
    put = np.repeat(np.arange(len(TIMES) * EACH), np.repeat(TIMES, EACH))
    index = np.concatenate([put, len(canaries) + np.arange(len(own))])
    batches = each_token(bench, canaries)
    with bench.model():
        before = losses(bench, bench.ready.runtime.working, batches)
    fallen = before - trainings.losses(trainings.train("training with canaries", examples, index), batches)
    candidates = fallen[len(TIMES) * EACH :]
    setting = plural(trainings.steps, "step")
    found = []
    for number, times in enumerate(TIMES):
        figures = exposures(fallen[number * EACH : (number + 1) * EACH], candidates)
        how = f"canary put {'once' if times == 1 else f'{times} times'}"
        found.append(Finding(SHORT, how, setting, figures, _sentence(figures, how)))
    return found


def _sentence(figures: dict[str, Figure], how: str) -> str:
    first, most = figures["ranked first"].count, np.log2(CANDIDATES + 1)
    return (
        f"{how}: among {CANDIDATES} others it has an exposure of {figures['exposure'].value:.1f} of {most:.1f} "
        f"bits (by chance {figures['exposure'].chance:.1f}); {first[0]} of {first[1]} come first"
    )


def exposures(canaries: Floats, candidates: Floats) -> dict[str, Figure]:
    """The mean exposure of canaries in bits, and the share of them that come first.

    Args:
        canaries: their scores, high for "remembered"; at least one.
        candidates: those of texts that were not put in.
    """
    ranks = [1 + int((candidates > s).sum()) + 0.5 * int((candidates == s).sum()) for s in canaries]
    count = len(candidates) + 1
    bits = [float(np.log2(count) - np.log2(rank)) for rank in ranks]
    chance = float(np.log2(count) - np.log2(np.arange(1, count + 1)).mean())
    first = sum(rank == 1 for rank in ranks)
    exposure = exponential_mean(bits, chance, float(np.log2(count)))
    return {"exposure": exposure, "ranked first": share(first, len(ranks), 1 / count)}


def random_texts(bench: Bench, count: int, rng: np.random.Generator) -> Examples:
    """Texts of random ordinary tokens as examples of the job's task; labels are drawn, and so are mostly wrong."""
    tokenizer, kind = bench.ready.loaded.tokenizer, TASK_KINDS[bench.job.task.kind]
    around = np.asarray(tokenizer("")["input_ids"], dtype=np.int32)
    opening = np.isin(around, [i for i in (tokenizer.cls_token_id, tokenizer.bos_token_id) if i is not None])
    known = np.flatnonzero(bench.ordinary)
    known = known[known < len(tokenizer)].astype(np.int32)
    room = max(1, min(TOKENS, bench.job.train.max_tokens - len(around)))
    texts = [
        np.concatenate([around[opening], rng.choice(known, room), around[~opening]]).astype(np.int32)
        for _ in range(count)
    ]
    length = len(texts[0])
    words = np.tile(_words(int(opening.sum()), room, length), count) if kind.words else np.empty(0, np.int64)
    like = bench.ready.train.tokens
    tokens = Tokens(
        ids=np.concatenate(texts),
        offsets=length * np.arange(count + 1, dtype=np.int64),
        rows=np.arange(count),
        words=words,
        types=np.zeros(length * count if len(like.types) else 0, np.int8),
    )
    return Examples(tokens, _labels(bench, words, count, rng))


def _words(begin: int, room: int, length: int) -> Index:
    """Of each token of a text its word; special tokens are none."""
    words = np.full(length, -1, dtype=np.int64)
    words[begin : begin + room] = np.arange(room)
    return words


def _labels(bench: Bench, words: Index, count: int, rng: np.random.Generator) -> npt.NDArray[Any] | None:
    """Drawn labels: numbers are those of texts of the client, classes all as likely."""
    like, classes = bench.ready.train.labels, bench.data.labels
    if like is None:
        return None
    if classes is None:
        numbers: npt.NDArray[Any] = rng.choice(np.asarray(like[bench.index]), count)
        return numbers
    if len(words):
        return np.where(words < 0, IGNORE_INDEX, rng.integers(0, len(classes), len(words)))
    return rng.integers(0, len(classes), count)
