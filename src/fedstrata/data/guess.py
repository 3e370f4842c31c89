"""A first job for rows of which nothing is said: which columns are text, labels and clients; which task fits."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from fedstrata.data.column_names import CLIENTS, LABELS, PAIRS, TEXTS, plain_name
from fedstrata.data.sample import Sample, holds_words
from fedstrata.data.values import is_date, is_filled, is_latin, is_number
from fedstrata.errors import UserError, did_you_mean, listed, plural
from fedstrata.job.task_kinds import TASK_KINDS

CLASSES = 200
"""Classes that a column of labels has at most."""
COUNTING = {"id", "index", "idx", "row", "number", "nr", "uid", "guid", "year", "date", "time", "file"}
"""How columns are called that count the rows, and label none."""
NUMBERS = 20
"""Different numbers from which on a column of them is a quantity and no class."""


@dataclass(frozen=True)
class Guess:
    """A first job for rows.

    Attributes:
        kind: the task's.
        text: the column of the text, or several.
        label: the column of the label; None without one.
        client: the column whose values are the clients; None without one.
        tokens: what nine in ten texts have at most, estimated from their words.
        latin: whether most letters are Latin ones.
        reasons: key of the job -> why it is set so, a phrase each.
        numbers: of tags that are numbers without names all up to the highest; a run needs their names.
    """

    kind: str
    text: str | list[str]
    label: str | None
    client: str | None
    tokens: int
    latin: bool
    reasons: Mapping[str, str] = field(default_factory=dict)
    numbers: Sequence[str] = ()


def guess(rows: Sample, kind: str | None = None, text: Sequence[str] = (), label: str | None = None) -> Guess:
    """Guess a job for rows; what the caller knows is not guessed.

    Args:
        rows: the first rows.
        kind: the task's kind, if it is known.
        text: the columns of the text, if they are known.
        label: the column of the label, if it is known.

    Raises:
        UserError: a named column is not there or does not go with the kind, or no column looks like text or, for
            the kind, like a label.
    """
    for name in (*text, *((label,) if label else ())):
        if name not in rows.columns:
            raise UserError(f"column {name!r} is not there; {did_you_mean(name, rows.columns)}")
    if kind is not None and kind not in TASK_KINDS:
        raise UserError(f"--task: {kind!r} is no kind of task; {did_you_mean(kind, TASK_KINDS)}")
    found = _tagged(rows, text, label) if kind in (None, "tag") else None
    if found:
        return found
    if kind == "tag":
        raise UserError(f"no column holds a list of words beside a list of tags; found {listed(rows.columns)}")
    client = _client(rows, {*text, label or ""})
    texts = list(text) or _texts(rows, {label or "", client or ""})
    taken = {*texts, client or ""}
    target = label or (None if kind in ("mlm", "clm") else _label(rows, taken))
    two = list(text) if len(text) == 2 else _pair([name for name in texts if name not in (target, client)])
    chosen, why = _kind(rows, target, bool(two), taken) if kind is None else (kind, "as asked for")
    if TASK_KINDS[chosen].labeled and target is None:
        raise UserError(f"{_no_label(rows, taken)}; name it with --label, one of: {listed(rows.columns)}")
    columns = list(text) or (two if chosen in ("pair", "regress") else []) or [_first_text(texts)]
    _check_fit(rows, chosen, columns, target)
    _check_alone(rows, [] if text else columns, None if label else target)
    if not TASK_KINDS[chosen].labeled and (lists := [name for name in columns if name in rows.lists]):
        raise UserError(f"column {lists[0]!r} holds lists; {chosen!r} reads a text in each row")
    named = columns if len(columns) > 1 else columns[0]
    reasons = _reasons(rows, why, client)
    latin = is_latin("".join(map(str, rows.columns[columns[0]][:200])))
    return Guess(chosen, named, target, client, _tokens(rows, columns), latin, reasons)


def _reasons(rows: Sample, why: str, client: str | None) -> dict[str, str]:
    """Of a guess: why it is this task, and how many clients a column names."""
    named = {"clients.column": f"{len(set(_filled(rows, client)))} values"} if client else {}
    return {"task.kind": why, **named}


def _check_fit(rows: Sample, kind: str, texts: Sequence[str], label: str | None) -> None:
    """Refuse columns of which a run would say that they do not go with the kind of task."""
    takes = TASK_KINDS[kind].texts
    if takes and len(texts) not in takes:
        raise UserError(
            f"{kind!r} reads {plural(takes[0], 'column')} of text, found {', '.join(texts)}; name what it reads "
            "with --text, or another kind with --task"
        )
    if label in texts and TASK_KINDS[kind].labeled:
        raise UserError(f"--label: {label!r} is also the text; expected another column")
    if label and TASK_KINDS[kind].labeled and any(isinstance(value, list) for value in _filled(rows, label)):
        raise UserError(f"--label: {label!r} holds lists; expected a text, a number or a truth value in each row")
    for name in texts:
        if not (filled := _filled(rows, name)):
            raise UserError(f"--text: no row has a value in column {name!r}")
        if all(re.fullmatch(r"\[\s*['\"].*\]", str(value), re.DOTALL) for value in filled):
            raise UserError(f"column {name!r} holds lists written as text; expected them in JSON or Parquet")
    if TASK_KINDS[kind].target == "number" and label is not None:
        word = next((value for value in _filled(rows, label) if not is_number(value)), None)
        if word is not None:
            raise UserError(f"{kind!r} needs numbers, but {label!r} holds {str(word)!r:.40}")


def _check_alone(rows: Sample, texts: Collection[str], label: str | None) -> None:
    """Refuse a guess of one of two columns whose names differ in nothing that the guess looks at."""
    for name, option in [*((text, "--text") for text in texts), *([(label, "--label")] if label else [])]:
        alike = [other for other in rows.columns if plain_name(other) == plain_name(name)]
        if alike[1:]:
            raise UserError(
                f"columns {alike[0]!r} and {alike[1]!r} have nearly the same name; name the one that is meant "
                f"with {option}"
            )


def _tagged(rows: Sample, text: Sequence[str], label: str | None) -> Guess | None:
    """A job of tags, where one column holds lists of words and another as many tags."""
    lists = [name for name in rows.columns if all(isinstance(value, list) for value in _filled(rows, name))]
    lists = [name for name in lists if _filled(rows, name)]
    words = [*text] or [
        name for name in lists if holds_words(_filled(rows, name)) and plain_name(name) not in LABELS
    ]
    if not words or len(lists) < 2 or words[0] not in lists:
        return None
    sizes = [len(value) for value in _filled(rows, words[0])]
    tags = [name for name in lists if name != words[0] and [len(v) for v in _filled(rows, name)] == sizes]
    target = label or _named(tags, LABELS) or (tags[-1] if tags else None)
    if target is None:
        _refuse_lengths(rows, words[0], _named([name for name in lists if name != words[0]], LABELS))
        return None
    length = _up(1.3 * sorted(sizes)[int(0.9 * (len(sizes) - 1))])
    why = "a word and its tag per line" if rows.words else f"a list of tags in {target!r}"
    latin = is_latin(" ".join(_filled(rows, words[0])[0]))
    client = _client(rows, {words[0], target})
    numbers = _numbers({str(tag) for value in _filled(rows, target) for tag in value})
    return Guess("tag", words[0], target, client, length, latin, _reasons(rows, why, client), numbers)


def _numbers(tags: set[str]) -> list[str]:
    """All numbers up to the highest, where tags are numbers of classes."""
    highest = max(map(int, tags)) if tags and all(re.fullmatch(r"\d{1,9}", tag) for tag in tags) else -1
    return [str(number) for number in range(highest + 1)] if highest < CLASSES else []


def _refuse_lengths(rows: Sample, words: str, tags: str | None) -> None:
    """Refuse lists that are called as tags are, where a row has more or fewer of them than words."""
    pairs = zip(rows.columns[words], rows.columns[tags] if tags else (), strict=False)
    for number, (one, two) in enumerate(pairs, 1):
        if is_filled(one) and is_filled(two) and len(one) != len(two):
            raise UserError(
                f"row {number}: column {words!r} has {plural(len(one), 'word')} and column {tags!r} "
                f"{plural(len(two), 'tag')}; expected a tag for each word"
            )


def _client(rows: Sample, taken: set[str]) -> str | None:
    """The column that says whose a row is, by its name and its values."""
    name = _named([name for name in rows.columns if name not in taken], CLIENTS)
    if name is None:
        return None
    values = [str(value) for value in _filled(rows, name)]
    different = len(set(values))
    return name if 2 <= different <= 1_000 and len(values) / different >= 5 else None


def _texts(rows: Sample, taken: set[str]) -> list[str]:
    """The columns of texts, the longest first."""
    sizes = {}
    for name in rows.columns:
        values = [value for value in _filled(rows, name) if isinstance(value, str)]
        numbers = sum(is_number(value) for value in values)
        if name not in taken and values and numbers < len(values) / 2:
            sizes[name] = mean(len(value.split()) for value in values), len(set(values)) / len(values)
    named = [name for name in sizes if plain_name(name) in TEXTS]
    long = [name for name, (words, different) in sizes.items() if words >= 3 and different > 0.1]
    found = dict.fromkeys([*long, *(named if not long else [])])
    if not found:
        empty = [name for name in rows.columns if plain_name(name) in TEXTS and not _filled(rows, name)]
        if empty:
            raise UserError(f"column {empty[0]!r}: is empty in all rows; expected texts")
        raise UserError(f"no column looks like text; name it with --text, one of: {listed(rows.columns)}")
    return sorted(found, key=lambda name: -sizes[name][0])


def _first_text(texts: Sequence[str]) -> str:
    """The column whose name says most plainly that it is the text, else the one of the longest texts."""
    return _named(texts, TEXTS) or texts[0]


def _label(rows: Sample, texts: set[str]) -> str | None:
    """The column of labels: by its name, else the only one of few different short values."""
    free = [name for name in rows.columns if name not in texts]
    fit = [name for name in free if _classes(rows, name) or _quantity(rows, name)]
    if name := _named(fit, LABELS):
        return name
    short = _short(rows, texts)
    found = {name: {str(value) for value in _filled(rows, name)} for name in short}
    coded = [name for name in short if found[name] & {"0", "1"} and all(map(str.isdigit, found[name]))]
    chosen = coded if len(coded) == 1 else short
    return chosen[0] if len(chosen) == 1 else None


def _short(rows: Sample, taken: set[str]) -> list[str]:
    """The columns of few different short values, which may be labels."""
    free = [name for name in rows.columns if name not in taken and not _counts_rows(name)]
    return [name for name in free if _classes(rows, name) and not all(map(is_date, _filled(rows, name)))]


def _no_label(rows: Sample, taken: set[str]) -> str:
    """Why no column is the label."""
    values = {name: _filled(rows, name) for name in rows.columns}
    unfit = {
        "is empty in all rows": [name for name, found in values.items() if not found],
        "holds lists": [name for name, found in values.items() if any(isinstance(one, list) for one in found)],
        "holds a single value": [name for name, found in values.items() if len(set(map(str, found))) == 1],
        "holds too many different or too long values": [name for name in values if name not in taken],
    }
    if called := [f"{name!r} {why}" for why, names in unfit.items() if (name := _named(names, LABELS))]:
        return called[0]
    several = " or ".join(map(repr, _short(rows, taken)[:3]))
    return f"{several} may be the label" if several else "no column looks like a label"


def _classes(rows: Sample, name: str) -> bool:
    """Whether a column's values may be names of classes: few, short and repeated."""
    values = [str(value) for value in _filled(rows, name) if not isinstance(value, list | dict)]
    different = len(set(values))
    return 2 <= different <= min(CLASSES, max(2, len(values) // 3)) and mean(map(len, values)) <= 40


def _quantity(rows: Sample, name: str) -> bool:
    """Whether a column's values are numbers of a quantity."""
    values = [str(value) for value in _filled(rows, name)]
    return len(set(values)) >= NUMBERS and all(is_number(value) for value in values) and not _counts_rows(name)


def _counts_rows(name: str) -> bool:
    return plain_name(name) in COUNTING


def _kind(rows: Sample, label: str | None, pair: bool, taken: set[str]) -> tuple[str, str]:
    """The task's kind, and why."""
    if label is None:
        return "mlm", f"{_no_label(rows, taken)}, and --label names none: the model is trained on the text itself"
    if _quantity(rows, label) and any(re.search("[.,]", str(value)) for value in _filled(rows, label)):
        return "regress", f"{label!r} holds numbers"
    classes = len(set(map(str, _filled(rows, label))))
    return ("pair" if pair else "classify"), f"{label!r} holds {classes} class{'' if classes == 1 else 'es'}"


def _pair(texts: Sequence[str]) -> list[str]:
    """Two columns of texts that belong together, in their order; none if there are none."""
    plain = {plain_name(name): name for name in texts}
    for one, two in PAIRS:
        if one in plain and two in plain:
            return [plain[one], plain[two]]
    for name in texts:
        for first, second in (("1", "2"), ("a", "b"), ("A", "B")):
            other = re.sub(rf"{first}(?=\D*$)", second, name)
            if other != name and other in texts and re.search(rf"[\W_\d]?{first}(\W|$|\s)", name):
                return [name, other]
    return []


def _named(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The column whose name is the first of the usual ones."""
    plain = {plain_name(name): name for name in reversed(names)}
    return next((plain[word] for word in usual if word in plain), None)


def _filled(rows: Sample, name: str) -> list[Any]:
    return [value for value in rows.columns[name] if is_filled(value)]


def _tokens(rows: Sample, columns: Sequence[str]) -> int:
    """Tokens that nine in ten texts have at most: 1.3 for a word and two around it, up to a multiple of 32."""
    texts = zip(*(rows.columns[name] for name in columns), strict=True)
    sizes = sorted(sum(len(str(value).split()) for value in row) for row in texts)
    return _up(1.3 * sizes[int(0.9 * (len(sizes) - 1))] + 3)


def _up(tokens: float) -> int:
    return min(512, max(32, 32 * math.ceil(tokens / 32)))
