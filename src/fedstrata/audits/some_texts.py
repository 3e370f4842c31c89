"""Examples taken from others and put together; and a model's loss of each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Floats
from fedstrata.client.trainer import autocast
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.tokens import Tokens
from fedstrata.plan.kinds import Index
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Batch, Examples
from fedstrata.tasks.mlm import MaskedLM

MASKINGS = 4
"""Drawn maskings of a text, over which a masked language model's loss of it is the mean."""


def taken(examples: Examples, index: Index, most: int | None = None) -> Examples:
    """The examples at ``index``, as examples of their own; each is from a row of its own.

    Args:
        examples: all of them.
        index: which to take, ``[n]``.
        most: tokens of each, the first ones; all when absent.
    """
    tokens = examples.tokens
    lengths = tokens.lengths[index] if most is None else tokens.lengths[index].clip(max=most)
    places = np.concatenate(
        [tokens.offsets[i] + np.arange(n) for i, n in zip(index, lengths, strict=True)] or [np.empty(0, np.int64)]
    )
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    words = tokens.words[places] if len(tokens.words) else tokens.words
    types = tokens.types[places] if len(tokens.types) else tokens.types
    labels = examples.labels
    if labels is not None:
        labels = labels[places if len(tokens.words) else index]  # of lists of words each token has one
    return Examples(Tokens(tokens.ids[places], offsets, np.arange(len(index)), words, types), labels)


def together(first: Examples, second: Examples) -> Examples:
    """Two sets of examples of one task as one, the first ones first."""
    one, other = first.tokens, second.tokens
    tokens = Tokens(
        np.concatenate([one.ids, other.ids]),
        np.concatenate([one.offsets, other.offsets[1:] + one.offsets[-1]]),
        np.arange(len(one) + len(other)),
        np.concatenate([one.words, other.words]),
        np.concatenate([one.types, other.types]),
    )
    if first.labels is None or second.labels is None:
        return Examples(tokens)
    return Examples(tokens, np.concatenate([first.labels, second.labels]))


def distinct(examples: Examples, index: Index, known: set[bytes]) -> Index:
    """Those of ``index`` whose tokens are not known yet, each text once; they become known."""
    kept = []
    for i in index:
        text = np.asarray(examples.tokens[int(i)], dtype=np.int32).tobytes()
        if text not in known:
            known.add(text)
            kept.append(int(i))
    return np.asarray(kept, dtype=np.int64)


def drawn_batches(bench: Bench, examples: Examples) -> list[Batch]:
    """A batch for each example, the same for every model: of a masked language model it has several maskings."""
    task, streams = bench.ready.runtime.trainer.task, Streams(bench.job.train.seed)
    rng = streams.numpy(0, bench.client, "masks of an audit")
    times = MASKINGS if isinstance(task, MaskedLM) else 1
    return [task.batch(examples, np.full(times, i), rng) for i in range(len(examples))]


def each_token(bench: Bench, examples: Examples) -> list[Batch]:
    """A batch for each example; a masked language model predicts each token once, from all the others of its text.

    The mean is then the pseudo-log-likelihood (Salazar et al. 2020, Masked Language Model Scoring, section 2) per
    token, with its sign changed.
    """
    task = bench.ready.runtime.trainer.task
    if not isinstance(task, MaskedLM):
        return drawn_batches(bench, examples)
    return list(masked_in_turn(task, examples))


def masked_in_turn(task: MaskedLM, examples: Examples) -> Iterator[Batch]:
    """For each example a batch with a row for each of its tokens, which alone is masked in it."""
    for i in range(len(examples)):
        ids = np.asarray(examples.tokens[i], dtype=np.int64)
        places = np.flatnonzero(~np.isin(ids, task.special))
        rows = torch.from_numpy(np.tile(ids, (len(places), 1)))
        positions = torch.zeros_like(rows, dtype=torch.bool)
        positions[torch.arange(len(places)), torch.from_numpy(places)] = True
        inputs = {"input_ids": rows.masked_fill(positions, task.mask), "attention_mask": torch.ones_like(rows)}
        if len(examples.tokens.types):
            inputs["token_type_ids"] = torch.zeros_like(rows)
        yield Batch(inputs, rows[positions], positions)


def losses(bench: Bench, working: WorkingModel, batches: Sequence[Batch]) -> Floats:
    """The mean loss of a model over each batch, ``[n]``, without dropout."""
    task, was = bench.ready.runtime.trainer.task, working.model.training
    working.model.eval()
    try:
        with torch.no_grad(), autocast(working.device, bench.job.train):
            found = [float(task.loss(working.model, batch.to(working.device))) for batch in batches]
    finally:
        working.model.train(was)
    return np.asarray(found, dtype=np.float64)
