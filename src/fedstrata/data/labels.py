"""What stands in a label column: names of tags, decimal commas, several labels in one, types of entities."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from fedstrata.data.forms.how import together
from fedstrata.data.read import WORD_END, Rows
from fedstrata.errors import UserError

NO_ENTITY = "O"
"""The tag of a word that belongs to no entity, and the group of sentences without one."""
ERRORS = ("#n/a", "#ref!", "#value!", "#div/0!", "#name?", "#num!", "#null!")
"""What spreadsheets write for a value that they cannot compute, in lower case."""
MISSING = ("nan", "<na>", "n/a", *ERRORS)
"""Labels and names of clients that stand for a missing value, in lower case."""
MAY_BE_MISSING = (*MISSING, "none", "null", "na", "nil", "?", "-", "missing", "unlabeled", "unlabelled")
"""Those that may stand for one, or be what they say."""


def named_tags(rows: Rows, column: str, labels: Sequence[str] | None) -> Rows:
    """Rows of a tagging task in which tags that are numbers have the names of ``task.labels``, in its order.

    Raises:
        UserError: tags are numbers without names.
    """
    found = {tag for value in rows.columns[column] for tag in value.split(WORD_END)}
    if not found or not all(re.fullmatch(r"-?\d+", tag) for tag in found):
        return rows
    numbers = sorted(found, key=int)
    named = None if labels is None or all(re.fullmatch(r"-?\d+", label) for label in labels) else labels
    if named is None:
        raise UserError(
            f"[data] label: the tags in column {column!r} are numbers ({', '.join(numbers[:5])}); expected names, "
            "or those of the numbers from 0 in [task] labels, such as ['O', 'B-disease', 'I-disease']"
        )
    if not 0 <= int(numbers[0]) <= int(numbers[-1]) < len(named):
        wrong = numbers[0] if int(numbers[0]) < 0 else numbers[-1]
        raise UserError(
            f"[task] labels: column {column!r} holds the tag {wrong}, but {len(named)} names count from 0 to "
            f"{len(named) - 1}"
        )
    values = [WORD_END.join(named[int(tag)] for tag in value.split(WORD_END)) for value in rows.columns[column]]
    return _changed(rows, column, values, "the tags are numbers, named in the order of [task] labels")


def decimal_points(rows: Rows, column: str) -> Rows:
    """Rows in which numbers with a decimal comma have a point.

    Raises:
        UserError: the commas may as well stand between thousands.
    """
    values = rows.columns[column]
    commas = [value for value in values if re.fullmatch(r"\s*[-+]?\d+,\d+\s*", value)]
    if not commas:
        return rows
    if all(re.fullmatch(r"\s*[-+]?[1-9]\d{0,2},\d{3}\s*", value) for value in commas):
        raise UserError(
            f"[data] label: column {column!r} holds {commas[0]!r}, which may be "
            f"{commas[0].replace(',', '.')} or {commas[0].replace(',', '')}; expected one of these"
        )
    pointed = [re.sub(r"^(\s*[-+]?\d+),(\d+\s*)$", r"\1.\2", value) for value in values]
    return _changed(rows, column, pointed, "the numbers have decimal commas")


def doubtful(rows: Rows, column: str) -> Rows:
    """Rows with a finding on each label that may mark rows without one, as -1 does beside 0, 1, … in data sets."""
    found = set(rows.columns[column])
    missing = [label for label in sorted(found) if label.strip().lower() in MAY_BE_MISSING]
    missing += [label for label in found if re.fullmatch(r"-1(\.0)?", label) and _numbered(found - {label})]
    what = "may mark rows without a label, but is a class here; if it is none, leave these rows out"
    added = {f"column {column!r}": {f"{label!r} {what}": None for label in missing}} if missing else {}
    return replace(rows, found=together(rows.found, added))


def one_number(rows: Rows, column: str) -> Rows:
    """Rows with a finding if all have one number, as test rows whose labels are kept back have -1."""
    found = set(rows.columns[column])
    if len(rows) < 2 or len(found) > 1:
        return rows
    what = f"is {min(found)} in every row of a source, and a correlation with it means nothing"
    return replace(rows, found=together(rows.found, {f"column {column!r}": {what: None}}))


def _numbered(labels: Collection[str]) -> bool:
    """Whether labels are numbers of classes from 0."""
    return all(re.fullmatch(r"\d+(\.0)?", label) for label in labels) and not {"0", "0.0"}.isdisjoint(labels)


def _changed(rows: Rows, column: str, values: list[str], finding: str) -> Rows:
    found = together(rows.found, {f"column {column!r}": {finding: None}})
    return replace(rows, columns={**rows.columns, column: values}, found=found)


def refuse_several(column: str, found: Collection[str]) -> None:
    """Refuse labels that are evidently several in one: lists, or names joined by a sign.

    The latter if all names of a label also stand alone, or some name does, and each stands in several labels or
    there are few names for many joined labels.

    Raises:
        UserError: they are.
    """
    if lists := [label for label in found if re.fullmatch(r"\[.*\]", label.strip(), re.DOTALL)]:
        _several(column, min(lists))
    for sign in "|;,":
        pieces = {label: {piece.strip() for piece in label.split(sign)} for label in found}
        joined = sorted(label for label in found if len(pieces[label]) > 1)
        uses = Counter(piece for parts in pieces.values() for piece in parts)
        names = {piece for label in joined for piece in pieces[label]}
        often = all(uses[name] > 1 for name in names) or 2 * len(names) <= len(joined)
        if (often and names & set(found)) or any(pieces[label] <= set(found) for label in joined):
            _several(column, joined[0])


def _several(column: str, label: str) -> None:
    raise UserError(
        f"[data] label: column {column!r} holds several labels in one row ({label[:60]!r}); expected one label "
        "for each row, as multi-label classification is not supported; if all are single classes, name them in "
        "task.labels"
    )


def entity_types(tags: Sequence[str]) -> list[str]:
    """Of each sentence the type of entity that most of its words have, the first one of several; else ``O``."""
    return [_entity_type(sentence.split(WORD_END)) for sentence in tags]


def _entity_type(tags: Sequence[str]) -> str:
    types = Counter(re.sub(r"^[BIESLUM][-_](?=.)", "", tag) for tag in tags if tag != NO_ENTITY)
    return types.most_common(1)[0][0] if types else NO_ENTITY  # equal counts come in their first order
