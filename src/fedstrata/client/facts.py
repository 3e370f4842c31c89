"""What tokenization does to a job's rows, and the score of a prediction that is always the same."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstrata.client.setup import Ready
from fedstrata.data.facts import holders, row_facts, row_lines, trained_and_tested
from fedstrata.data.prepare import Prepared
from fedstrata.data.read import WORD_END
from fedstrata.data.rows import text_columns
from fedstrata.data.tokens import Tokens
from fedstrata.errors import plural
from fedstrata.job.metrics import Predictions, scores
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.tasks.batches import IGNORE_INDEX
from fedstrata.tasks.classify import positive_classes

Scores = dict[str, float]


def token_facts(job: Job, data: Prepared, ready: Ready) -> dict[str, Any]:
    """What tokenization does to the rows: the last fields of ``data`` in ``result.json``.

    ``long_texts`` has the ``count`` of texts longer than ``max_tokens``, of ``rows``, and what is done with them
    (``truncate``, ``chunk`` or ``pack``); ``unknown_tokens`` the ``count`` of ``tokens``, or is None where the
    tokenizer has no token for what it does not know. Both are of the training rows. Of the test rows
    ``test_unknown_tokens`` has the same, and ``test_words_cut`` of a task of words the ``count`` of ``words`` that
    are cut off, or of which the tokenizer makes nothing, so that no score is of them.
    """
    unknown, kind = _unknown_id(ready.loaded.tokenizer), TASK_KINDS[job.task.kind]
    train, test = trained_and_tested(job, data)
    pair = len(text_columns(job)) > 1 and bool(kind.texts)
    handling = "truncate" if pair else job.data.long_text or kind.long_text
    long = {"count": _long(job, data, ready, handling), "rows": len(train), "handling": handling}
    facts = {"long_texts": long, "unknown_tokens": _unknown(ready.train.tokens, train, unknown)}
    if not len(test):
        return facts
    facts["test_unknown_tokens"] = _unknown(ready.test.tokens, test, unknown)
    if kind.words:
        [column] = text_columns(job)
        words = sum(data.test.columns[column][row].count(WORD_END) + 1 for row in test)
        cut = words - len(_labels(ready, False, ready.test.tokens.of_rows(test)))
        facts["test_words_cut"] = {"count": cut, "words": words}
    return facts


def _unknown(tokens: Tokens, rows: Index, unknown: int | None) -> dict[str, int] | None:
    """How many of the tokens of rows are unknown."""
    if unknown is None:
        return None
    own = tokens.of_rows(rows)
    inside = np.repeat(np.isin(np.arange(len(tokens)), own), tokens.lengths)
    return {"count": int(((tokens.ids == unknown) & inside).sum()), "tokens": int(inside.sum())}


def token_lines(facts: Mapping[str, Any], most: int) -> list[str]:
    """The facts in sentences; ``most`` is ``train.max_tokens``."""
    long, unknown = facts["long_texts"], facts["unknown_tokens"]
    lines = []
    if long["handling"] != "pack" and long["rows"]:
        share = f"{long['count']:,} of {plural(long['rows'], 'text')} ({long['count'] / long['rows']:.1%})"
        done = "cut" if long["handling"] == "truncate" else "chunked"
        lines.append(f"{share} longer than {most} tokens, to be {done}" if long["count"] else "no text is cut")
    if unknown and unknown["tokens"]:
        share = f"{unknown['count']:,} of {plural(unknown['tokens'], 'token')}"
        share += f" ({unknown['count'] / unknown['tokens']:.1%})"
        lines.append(f"{share} unknown to the tokenizer" if unknown["count"] else "no token is unknown")
    if (tested := facts.get("test_unknown_tokens")) and tested["count"]:
        share = f"{tested['count']:,} of {plural(tested['tokens'], 'token')}"
        lines.append(
            f"of the test rows {share} ({tested['count'] / tested['tokens']:.1%}) unknown to the tokenizer"
        )
    if (cut := facts.get("test_words_cut")) and cut["count"]:
        share = f"{cut['count']:,} of {plural(cut['words'], 'word')} ({cut['count'] / cut['words']:.1%})"
        why = "cut off, or nothing" if long["handling"] == "truncate" else "nothing"  # such as a zero-width blank
        lines.append(f"of the test rows {share} are {why} to the tokenizer, and no score is of them")
    return lines


def facts_and_lines(job: Job, data: Prepared, ready: Ready) -> tuple[dict[str, Any], list[str]]:
    """All that is known of the rows here: ``data`` in ``result.json``, and the same in sentences."""
    facts = row_facts(job, data)
    lines = row_lines(facts, {client: len(rows) for client, rows in holders(job, data).items()})
    if len(ready.train):
        tokens = token_facts(job, data, ready)
        return facts | tokens, lines + token_lines(tokens, ready.runtime.trainer.train.max_tokens)
    return facts, lines


def baseline(job: Job, ready: Ready, labels: tuple[str, ...] | None, personal: bool) -> tuple[str, Scores]:
    """What is always predicted, and its scores on the test rows, by the task's metrics but the loss of classes.

    It is the most frequent class (of words: tag) of the training rows, or the mean of their numbers; with personal
    models each client's own. Where clients test on rows of their own, the mean over them, as with every score.
    Nothing for a task without labels, or without rows here.
    """
    if ready.train.labels is None or not len(ready.train) or not len(ready.test):
        return "", {}
    every = np.arange(len(ready.test))
    own = {client: index for each in ready.tests.values() for client, index in each.items()} or {"": every}
    everyone = np.concatenate(list(ready.shards.values()))
    guesses = (
        {client: _frequent(ready, index, labels) for client, index in ready.shards.items()} if personal else {}
    )
    common = _frequent(ready, everyone, labels)
    pairs = [(guesses.get(client, common), index) for client, index in own.items()]
    if personal and list(own) == [""]:
        pairs = [(guess, every) for guess in guesses.values()]
    each = [_constant(job, ready, guess, index, labels) for guess, index in pairs if len(index)]
    names = dict.fromkeys(name for one in each for name in one)
    whose = "each client's" if personal and len(guesses) > 1 else "the"
    what = f"always {whose} {'mean' if labels is None else 'most frequent class'}"
    if labels is not None and whose == "the":
        what += f", {labels[int(common)]}"
    return what, {name: fmean(one[name] for one in each if name in one) for name in names}


def _unknown_id(tokenizer: Any) -> int | None:
    """The id of what a tokenizer does not know; None where it has none, or one that has another meaning too."""
    unknown: int | None = tokenizer.unk_token_id
    others = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    return None if unknown in others else unknown


def _long(job: Job, data: Prepared, ready: Ready, handling: str) -> int:
    """Texts that are longer than an example may be; those that fill one are tokenized again."""
    if handling == "pack" or not len(data.train):
        return 0
    tokens, most = ready.train.tokens, ready.runtime.trainer.train.max_tokens
    own = tokens.of_rows(trained_and_tested(job, data)[0])
    if handling == "chunk":
        return int((np.bincount(tokens.rows[own]) > 1).sum())
    full = tokens.rows[own][tokens.lengths[own] >= most]
    columns = [[data.train.columns[name][row] for row in full] for name in text_columns(job)]
    if not len(full):
        return 0
    words = TASK_KINDS[job.task.kind].words
    texts = [[text.split(WORD_END) for text in column] if words else column for column in columns]
    if not TASK_KINDS[job.task.kind].texts and len(columns) > 1:
        texts = [[" ".join(row) for row in zip(*columns, strict=True)]]
    whole = ready.loaded.tokenizer(*texts, is_split_into_words=words, truncation=False)["input_ids"]
    return sum(len(ids) > most for ids in whole)


def _labels(ready: Ready, train: bool, index: Index) -> npt.NDArray[Any]:
    """The labels of examples; of words those of the words alone."""
    examples = ready.train if train else ready.test
    assert examples.labels is not None
    if len(examples.labels) == len(examples) and not len(examples.tokens.words):
        each: npt.NDArray[Any] = examples.labels[index]
        return each
    offsets = examples.tokens.offsets
    found = [examples.labels[offsets[i] : offsets[i + 1]] for i in index]
    every: npt.NDArray[Any] = np.concatenate([np.empty(0, np.int64), *found])
    words: npt.NDArray[Any] = every[every != IGNORE_INDEX]
    return words


def _frequent(ready: Ready, index: Index, labels: tuple[str, ...] | None) -> float:
    known = _labels(ready, True, index)
    if labels is None:
        return float(known.mean()) if len(known) else 0.0
    return float(np.bincount(known, minlength=len(labels)).argmax())


def _constant(job: Job, ready: Ready, guess: float, index: Index, labels: tuple[str, ...] | None) -> Scores:
    """The scores of one prediction for all."""
    truth = _labels(ready, False, index)
    kind, task = TASK_KINDS[job.task.kind], job.task
    if labels is None:
        return scores(kind.metrics, Predictions(truth, np.full(len(truth), guess)))
    if kind.words:
        ends = np.flatnonzero(np.diff(ready.test.tokens.rows[index])) + 1  # no entity goes on in the next text
        names = [[labels[i] for i in _labels(ready, False, text)] for text in np.split(index, ends)]
        return scores(kind.metrics, Predictions(names, [[labels[int(guess)]] * len(text) for text in names]))
    positive = positive_classes(labels, task.positive, False)
    always = np.full(len(truth), int(guess), np.int64)
    return scores(kind.metrics, Predictions(truth, always, labels=labels, positive=positive))
