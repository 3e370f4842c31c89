"""From rows to examples: tokens and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedstrata.data.read import WORD_END, Rows
from fedstrata.data.rows import label_numbers, text_columns
from fedstrata.data.tokens import Tokens, pack, tokenize
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.tasks.batches import IGNORE_INDEX, Examples


def examples(
    job: Job, rows: Rows, labels: Sequence[str] | None, tokenizer: Any, holders: Iterable[Index] | None = None
) -> Examples:
    """Tokenized examples of rows; long texts are handled as ``data.long_text`` says.

    Args:
        job: the job.
        rows: the rows.
        labels: class names, for a task with classes.
        tokenizer: the model's.
        holders: for packing, the rows of each who holds some: only one's own are joined, source by source where
            sources have names; None for one who holds all.
    """
    kind = TASK_KINDS[job.task.kind]
    tokens = _tokens(job, rows, tokenizer, holders)
    pool = np.asarray(rows.pools)
    pools = {name: tokens.of_rows(np.flatnonzero(pool == name)) for name in dict.fromkeys(rows.pools)}
    numbers = np.asarray(rows.numbers)[tokens.rows] if rows.numbers else None
    if kind.target == "number":
        return Examples(tokens, label_numbers(job, rows)[tokens.rows], pools, numbers)
    if labels is None:
        return Examples(tokens, pools=pools, numbers=numbers)
    number = {label: i for i, label in enumerate(labels)}
    if kind.words:
        return Examples(tokens, _tags(tokens, rows.columns[job.data.label], number), pools, numbers)
    classes = np.asarray([number[label] for label in rows.columns[job.data.label]], dtype=np.int64)
    return Examples(tokens, classes[tokens.rows], pools, numbers)


def _tokens(job: Job, rows: Rows, tokenizer: Any, holders: Iterable[Index] | None) -> Tokens:
    kind, most = TASK_KINDS[job.task.kind], job.train.max_tokens
    columns = [rows.columns[name] for name in text_columns(job)]
    if not kind.texts and len(columns) > 1:
        columns = [[" ".join(row) for row in zip(*columns, strict=True)]]
    if len(columns) > 1:
        return tokenize(columns[0], tokenizer, most, "truncate", seconds=columns[1])
    long_text = job.data.long_text or kind.long_text
    tokens = tokenize(columns[0], tokenizer, most, long_text, WORD_END if kind.words else None)
    if long_text != "pack":
        return tokens
    held = [np.arange(len(rows))] if holders is None else holders
    if rows.pools:
        pool = np.asarray(rows.pools)
        held = [own[pool[own] == name] for own in held for name in dict.fromkeys(pool[own])]
    return pack(tokens, tokenizer, most, held, kind.attention == "causal")


def _tags(tokens: Tokens, tags: Sequence[str], number: Mapping[str, int]) -> Index:
    """The class of each token: its word's where it is the word's first piece."""
    classes = [np.asarray([number[tag] for tag in row.split(WORD_END)], dtype=np.int64) for row in tags]
    begins = np.concatenate([[0], np.cumsum([len(row) for row in classes], dtype=np.int64)])
    row = np.repeat(tokens.rows, tokens.lengths)
    every = np.concatenate([*classes, np.empty(0, np.int64)])
    return np.where(tokens.words < 0, IGNORE_INDEX, every[(begins[row] + tokens.words).clip(0, len(every) - 1)])
