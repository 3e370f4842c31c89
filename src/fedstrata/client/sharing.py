"""What a job has its clients leave out of messages, and in which rounds they send the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError, plural
from fedstrata.job.paths import existing_file
from fedstrata.job.tables import Job, method_name
from fedstrata.models.checkpoints import tokenizer_of
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, adapted_plan, make_plan
from fedstrata.plan.sharing import DISTANCES, POSITIONS, Sharing
from fedstrata.plan.streams import SERVER, Streams

MOST_VOCABULARY_BYTES = 1 << 26
"""Of a public vocabulary: a hundred times a large tokenizer's."""
NAMED = {
    "decoder_bias": "the MLM decoder's bias",
    "position_rows": "the table of positions",
    "embeddings": "the embeddings",
    "unlisted_rows": "the rows of tokens that the public vocabulary does not list",
}
"""Omission -> what it is."""


def with_sharing(job: Job, parts: Parts, tokenizer: Callable[[], Any]) -> Parts:
    """The parts of a job's model, with what of them travels and when.

    Args:
        job: the job, its public vocabulary an absolute path.
        parts: the model's.
        tokenizer: gives the model's tokenizer; asked only where there is a public vocabulary.

    Raises:
        UserError: an omission does not go with the adapters, or the vocabulary cannot be used.
    """
    omit, period = job.privacy.omit, job.wire.part_period
    if not omit and period == 1:
        return parts
    means = tensors_of(omit, parts)
    whole = frozenset[str]().union(*(means[name] for name in omit if name != "unlisted_rows"))
    narrowed = means.get("unlisted_rows", frozenset()) - whole
    listed: tuple[int, ...] = ()
    if narrowed:
        rows = min(
            parts.shapes[part.name][name][0] for part in parts.each for name in part.shapes if name in narrowed
        )
        assert job.privacy.public_vocabulary is not None
        listed = listed_tokens(Path(job.privacy.public_vocabulary), tokenizer(), rows)
    return replace(parts, sharing=Sharing(whole | parts.fixed, narrowed, listed, period))


def parts_with_sharing(job: Job, parts: Parts, model: str) -> Parts:
    """As :func:`with_sharing`, with the tokenizer of a folder or hub id."""
    return with_sharing(job, parts, lambda: tokenizer_of(model, job.task.kind))


def tensors_of(omit: Iterable[str], parts: Parts) -> Mapping[str, frozenset[str]]:
    """The tensors that each omission means; none where the model, or its task's head, has none.

    ``unlisted_rows`` means all tensors with a row for each token: the table, a decoder of its own and its bias.

    Raises:
        UserError: rows are to be left out of embeddings in whose place adapters are trained, of no known table,
            or of a head that has columns.
    """
    below = {
        name: shape
        for part in parts.each
        if part.depth is None and part.kind in ("embeddings", "adapter", "base")
        for name, shape in part.shapes.items()
    }
    head = {name: shape for part in parts.each if part.kind == "head" for name, shape in part.shapes.items()}
    tables = {name: shape[0] for name, shape in (below | head).items() if name == parts.words}
    by_token = {name for name, shape in head.items() if shape[:1] and shape[0] in tables.values()}
    columns = [name for name, shape in head.items() if name not in by_token and {*shape} & {*tables.values()}]
    means = {
        "decoder_bias": {name for name in by_token if len(head[name]) == 1},
        "position_rows": {name for name in below if POSITIONS.search(name) or DISTANCES.search(name)},
        "embeddings": set(below),
        "unlisted_rows": tables.keys() | by_token,
    }
    if columns and "unlisted_rows" in omit:
        raise UserError(
            f"[privacy] omit: 'unlisted_rows' does not go with {parts.architecture}, whose head has a column for "
            f"each token ({columns[0]}), and only rows can be left out; expected: omissions without it"
        )
    rows = next((name for name in omit if name in ("position_rows", "unlisted_rows")), None)
    if rows and parts.adapters_of(None):
        raise UserError(
            f"[privacy] omit: {rows!r} goes with embeddings that are trained themselves, not with adapters in "
            "their place ([adapter] targets); expected: 'embeddings'"
        )
    if "unlisted_rows" in omit and below and not tables:  # all rows would leave, unlisted ones too
        raise UserError(
            f"[privacy] omit: which tensor of {parts.architecture!r} has the rows of tokens is not known, so "
            "'unlisted_rows' cannot be left out; expected: 'embeddings'"
        )
    return {name: frozenset(means[name]) for name in omit}


def listed_tokens(path: Path, tokenizer: Any, rows: int) -> tuple[int, ...]:
    """The rows of the tokens that a public vocabulary lists, and of the tokenizer's special ones, ascending.

    A line of the file is a token as the tokenizer writes it (``##ing``), or a word, which stands for its tokens.

    Args:
        path: the file.
        tokenizer: the model's.
        rows: of the table of tokens.

    Raises:
        UserError: the file cannot be read, is too large, or no line is a token or a word of this tokenizer.
    """
    try:
        if path.stat().st_size > MOST_VOCABULARY_BYTES:
            raise UserError(f"{path}: has more than {MOST_VOCABULARY_BYTES >> 20} MB; expected a list of tokens")
        lines = path.read_text("utf-8-sig").splitlines()  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        why = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read ({error.strerror})"
        raise UserError(
            f"[privacy] public_vocabulary: {path} {why}; expected a text file with a token or word on each line"
        ) from None
    vocabulary = tokenizer.get_vocab()
    words = [line.strip() for line in lines if line.strip()]
    listed = {vocabulary[word] for word in words if word in vocabulary}
    others = [form for word in words if word not in vocabulary for form in (word, f" {word}")]
    for ids in tokenizer(others, add_special_tokens=False)["input_ids"] if others else ():
        listed.update(ids)
    special = set(tokenizer.all_special_ids)
    if not listed - special:
        raise UserError(
            f"[privacy] public_vocabulary: no line of {path} is a token or word of the model's tokenizer; "
            "expected one of them on each line"
        )
    return tuple(sorted(token for token in listed | special if token < rows))


def with_vocabulary(job: Job, base_dir: Path | None) -> Job:
    """The job with the path of its public vocabulary made absolute: looked up here, then beside the job file.

    Raises:
        UserError: there is no such file.
    """
    name = job.privacy.public_vocabulary
    if name is None:
        return job
    path = existing_file("[privacy] public_vocabulary", name, base_dir)
    return job.model_copy(update={"privacy": job.privacy.model_copy(update={"public_vocabulary": path})})


def check_turns(
    job: Job, parts: Parts, round: int, plans: Mapping[str, Plan], sent: dict[str, tuple[str, ...]]
) -> None:
    """Refuse ``wire.part_period`` where parts cannot be sent in turns.

    Args:
        job: the job.
        parts: the model's.
        round: 0-based round.
        plans: the plans of those who are asked in it.
        sent: client -> the parts that it sends, each in its turn, by the rounds before; it is added to.

    Raises:
        UserError: nothing is sent, fewer parts than rounds of a period are, or others from round to round.
    """
    period, name = job.wire.part_period, method_name(job.method)
    if period == 1:
        return
    every = make_plan(job.method, parts, job.task.kind, round, SERVER, Streams(job.train.seed))
    for client, plan in {SERVER: every, **plans}.items():  # a client may be asked in one round alone
        own = tuple(part for part, _ in plan.between)
        if sent.setdefault(client, own) != own:
            raise UserError(
                f"[wire] part_period: {name!r} as set here sends other parts from round to round by itself; "
                "expected: 1, or a method that sends the same parts in every round, such as fedavg"
            )
        if client in plans and len(own) < period:
            expected = f"at most {len(own)}" if len(own) > 1 else "1"
            raise UserError(
                f"[wire] part_period: is {period}, but {name!r} as set here sends {plural(len(own), 'part')}, so "
                f"that there would be rounds in which nothing is sent; expected: {expected}"
            )


def sharing_notes(job: Job, parts: Parts) -> list[str]:
    """What is left out and what is sent in turns, a sentence each."""
    sharing, lines, streams = parts.sharing, [], Streams(job.train.seed)
    rounds = range(job.method.rounds)
    plans = [adapted_plan(job.method, parts, job.task.kind, round, SERVER, streams) for round in rounds]
    sent = {tensor for plan in plans for part in plan.send for tensor in parts.shapes[part]}
    for name, tensors in tensors_of(job.privacy.omit, parts).items():
        if not tensors:
            lines.append(f"[privacy] omit: {name!r} changes nothing; this model, with this task, has none")
        elif not tensors & sent:
            lines.append(f"[privacy] omit: {name!r} changes nothing; {method_name(job.method)} sends none of it")
        else:
            lines.append(f"{NAMED[name]}: neither trained nor sent; the start model's stay")
    if sharing.narrowed & sent:
        lines.append(f"of the rows of tokens, {len(sharing.listed):,} are listed and travel")
    if sharing.period > 1:
        first = [
            make_plan(job.method, parts, job.task.kind, round, SERVER, streams)
            for round in rounds[: sharing.period]
        ]
        turns = "; ".join(f"round {i + 1} {_short(plan)}" for i, plan in enumerate(first))
        lines.append(
            f"each part is sent in every {sharing.period} rounds ({turns}) and in the last one; in between every "
            "client goes on with its own value"
        )
    return lines


def _short(plan: Plan) -> str:
    names = ", ".join(plan.send[:3])
    return f"{names} and {len(plan.send) - 3} more" if len(plan.send) > 3 else names or "none"
