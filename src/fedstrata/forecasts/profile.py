"""What a forecast knows of the clients' data: how many tokens each of their examples has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from fedstrata.data.fingerprint import text_digests
from fedstrata.data.partition import check_partition, client_names
from fedstrata.data.prepare import NO_DATA, Prepared, prepare, source_names
from fedstrata.errors import UserError, plural
from fedstrata.forecasts.options import MOST_EXAMPLES
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models import checkpoints, configs
from fedstrata.plan.kinds import Index
from fedstrata.tasks.examples import examples

EXAMPLES = 1000
"""Examples of each client where neither the job's data nor the caller says how many there are."""


@dataclass(frozen=True)
class DataProfile:
    """What the clients hold, as far as costs depend on it.

    Attributes:
        lengths: tokens of every example, ``[n]``.
        shards: client -> its examples.
        texts: makes, for each client, a digest of every text that it holds.
        labels: class names, where they are known.
        source: where this comes from, a sentence.
        tests: makes, for each client, the tokens of every example that it is scored on.
        assumed: how many examples each client is taken to have, where they were not counted.
    """

    lengths: Index
    shards: dict[str, Index]
    texts: Callable[[], dict[str, Index]]
    labels: tuple[str, ...] | None
    source: str
    tests: Callable[[], dict[str, Index]]
    assumed: str = ""


def data_profile(
    job: Job, base_dir: Path | None, model: str, count: int | None, tokens: int | None
) -> DataProfile:
    """The lengths of the clients' examples: the job's own if its data is there, else ``count`` of ``tokens``.

    Args:
        job: the stage's job.
        base_dir: folder in which relative paths are looked up after the working directory.
        model: folder or hub id of the model, for its tokenizer.
        count: examples of each client, instead of the job's data.
        tokens: length of each example; ``train.max_tokens`` when absent.
    """
    config = configs.config_of(model)
    longest = tokens or job.train.max_tokens
    longest = min(longest, getattr(config, "max_position_embeddings", longest))
    reason = ""
    if count is None and job.data.train not in ("", NO_DATA):
        try:
            data = prepare(job, base_dir)
        except UserError as error:
            reason = f": the data cannot be read ({error})"
        else:
            return _of_data(job, data, model, longest, tokens)
    if not job.task.labels and TASK_KINDS[job.task.kind].classes:
        reason += f", {config.num_labels} classes"
    return _without_data(job, count or EXAMPLES, longest, reason)


def longest_text(model: str, kind: str) -> int:
    """Most tokens that a model reads at once; no weights are read.

    Raises:
        UserError: there is no such model.
    """
    config = configs.config_of(model, kind)
    try:
        with torch.device("meta"):
            bare = checkpoints.auto_class(kind).from_config(config)
    except configs.HF_LOAD_ERRORS as error:
        raise configs.unusable(model, error) from None
    return checkpoints.max_positions(bare)


def _of_data(job: Job, data: Prepared, model: str, longest: int, tokens: int | None) -> DataProfile:
    """Of the job's own rows; without a tokenizer, or where the caller names a length, all have the same length."""
    texts = functools.cache(lambda: text_digests(job, data))
    try:
        if tokens is not None:
            raise UserError(f"--tokens says {tokens}")
        tokenizer = checkpoints.tokenizer_of(model, job.task.kind)
    except UserError as error:
        count_of = {name: len(rows) for name, rows in (data.tests or {}).items()}
        tests = {name: np.full(count_of.get(name, len(data.test)), longest) for name in data.shards}
        return DataProfile(
            lengths=np.full(len(data.train), longest, dtype=np.int64),
            shards=data.shards,
            texts=texts,
            labels=data.labels,
            source=f"{_held(data.shards)} training rows of the job's data at {longest} tokens each ({error})",
            tests=lambda: tests,
            assumed="as many examples as rows",
        )
    train = examples(job, data.train, data.labels, tokenizer, data.shards.values()).tokens
    shards = {name: train.of_rows(rows) for name, rows in data.shards.items()}
    return DataProfile(
        lengths=train.lengths,
        shards=shards,
        texts=texts,
        labels=data.labels,
        source=f"{_held(shards)} training examples of the job's data",
        tests=functools.cache(lambda: _test_lengths(job, data, model)),
    )


def _held(shards: Mapping[str, Index]) -> int:
    """How many the clients train on: rows that they test on, or that go to none, are read as well."""
    return sum(map(len, shards.values()))


def _without_data(job: Job, each: int, longest: int, reason: str) -> DataProfile:
    """So many examples of one length at each client."""
    check_partition(job.clients)
    names = client_names(job.clients, source_names(job))
    number = len(names)
    if number * each > MOST_EXAMPLES:
        raise UserError(
            f"{each:,} examples at each of {number:,} clients are too many to forecast; expected at most "
            f"{MOST_EXAMPLES:,} in all, as with fewer --examples"
        )
    shards = {name: np.arange(i * each, (i + 1) * each) for i, name in enumerate(names)}
    source = np.asarray([crc32(repr(job.data.train).encode())])  # in place of texts: all clients share one source
    share = job.clients.test or job.data.holdout * number
    tests = dict.fromkeys(names, np.full(max(1, round(share * each)), longest, dtype=np.int64))
    return DataProfile(
        lengths=np.full(number * each, longest, dtype=np.int64),
        shards=shards,
        texts=lambda: dict.fromkeys(names, source),
        labels=tuple(job.task.labels) if job.task.labels else None,
        source=f"{each} examples of {longest} tokens at each of {number} clients{reason}",
        tests=lambda: tests,
        assumed=plural(each, "example"),
    )


def _test_lengths(job: Job, data: Prepared, model: str) -> dict[str, Index]:
    """For each client the tokens of every test example that it is scored on, as often as it is."""
    own = None if data.tests is None else data.tests.values()
    test = examples(job, data.test, data.labels, checkpoints.tokenizer_of(model, job.task.kind), own)
    lengths = {}
    for name in data.shards:
        chosen = np.arange(len(test)) if data.tests is None else test.tokens.of_rows(data.tests[name])
        again = [np.intersect1d(chosen, pool) for pool in test.pools.values()]
        lengths[name] = test.tokens.lengths[np.concatenate([chosen, *again])]
    return lengths
