"""What stands in a label column: names of tags, decimal commas, several labels in one, types of entities."""

from __future__ import annotations

from itertools import combinations

import pytest

from fedstrata.data.forms.how import notes
from fedstrata.data.labels import decimal_points, doubtful, entity_types, named_tags, refuse_several
from fedstrata.data.read import WORD_END, Rows
from fedstrata.errors import UserError
from fedstrata.plan.labels import alike

SEVERAL = [",".join(names) for size in (2, 3) for names in combinations("abcd", size)]
NAMES = ["O", "B-x", "I-x"]


def rows(*values: str) -> Rows:
    return Rows({"y": [value.replace(" ", WORD_END) for value in values]}, 0)


def test_tags_that_are_numbers_have_the_job_s_names() -> None:
    found = named_tags(rows("0 1 2", "0"), "y", NAMES)
    assert found == rows("O B-x I-x", "O")
    assert notes(found.found) == ["column 'y': the tags are numbers, named in the order of [task] labels"]
    assert named_tags(rows("O B-x", "3"), "y", None) == rows("O B-x", "3"), "not all of them are numbers"


@pytest.mark.parametrize(
    ("labels", "values", "words"),
    [
        (None, ["0 1", "10"], r"^\[data\] label: the tags in column 'y' are numbers \(0, 1, 10\); expected names"),
        (["0", "1"], ["0 1"], "are numbers"),
        (NAMES, ["0 3"], r"^\[task\] labels: column 'y' holds the tag 3, but 3 names count from 0 to 2$"),
        (NAMES, ["0 -100"], "holds the tag -100"),
    ],
)
def test_tags_that_are_numbers_without_names_are_refused(
    labels: list[str] | None, values: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        named_tags(rows(*values), "y", labels)


def test_decimal_commas_become_points() -> None:
    found = decimal_points(rows("4,5", "-1,250", "3", "2.5", "x,y"), "y")
    assert found == rows("4.5", "-1.250", "3", "2.5", "x,y")
    assert notes(found.found) == ["column 'y': the numbers have decimal commas"]
    assert decimal_points(rows("1.5", "2"), "y").found == {}
    with pytest.raises(UserError, match=r"column 'y' holds '1,250', which may be 1.250 or 1250; expected one"):
        decimal_points(rows("1,250", "3"), "y")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("1 0 -1 1", ["-1"]),
        ("1.0 0.0 -1.0", ["-1.0"]),
        ("yes no None ? NULL", ["?", "NULL", "None"]),
        ("-1 1", []),
        ("-2 -1 0 1", []),
        ("yes no -1", []),
        ("yes no nonesuch", []),
    ],
)
def test_labels_that_may_mark_rows_without_one_are_a_note(values: str, named: list[str]) -> None:
    found = doubtful(Rows({"y": values.split()}, 0), "y")
    what = "may mark rows without a label, but is a class here; if it is none, leave these rows out"
    said = ", ".join(f"{label!r} {what}" for label in named)
    assert notes(found.found) == ([f"column 'y': {said}"] if named else [])


@pytest.mark.parametrize(
    "found",
    [
        ["a", "b", "a|b"],
        ["a", "b", "a|b", "c|a"],
        ["a; b", "a", "b"],
        ["a", "a,e", *SEVERAL],
        ["['a', 'b']"],
        ["[]", "['a']"],
    ],
)
def test_labels_that_are_evidently_several_are_refused(found: list[str]) -> None:
    with pytest.raises(UserError, match=r"column .y. holds several labels in one row \(.* not supported"):
        refuse_several("y", found)


@pytest.mark.parametrize(
    "found",
    [["a", "b"], ["sci|space", "sci|med"], ["Bonn, Rhein", "Wien", "Bonn"], ["a,", "b"], ["x,y", "y,z", "x,z"]],
)
def test_labels_with_signs_in_them_are_labels(found: list[str]) -> None:
    refuse_several("y", found)


def test_a_sentence_stands_for_the_entities_that_most_of_its_words_are_of() -> None:
    tags = ["O O", "O B-a I-a B-b", "B-a B-b I-b", "B-b B-a", "B-a_b I-a_b", "NN VB NN", "B-"]
    assert entity_types([value.replace(" ", WORD_END) for value in tags]) == [
        "O",
        "a",
        "b",
        "b",
        "a_b",
        "NN",
        "B-",
    ]


def test_long_ids_that_differ_in_their_last_digit_are_two() -> None:
    """As floats they are one number, and rows with such codes as labels were refused."""
    assert not [*alike(["900000000000207008", "900000000000207009", "1e400", "2e400"])]
    for pair in (["1", "01"], ["10", "1e1"], ["1.50", "1.5"], ["900000000000207008", "900000000000207008.0"]):
        assert [how for _, _, how in alike(pair)] == ["are the same number"]
    assert not [*alike(["", "1e99999999999999999999", "snan", "1,5", "1.5"])], "what is no number is none"


def test_codes_with_an_underscore_are_no_numbers() -> None:
    """Of 1_1 and 11 the refusal said that they are the same number."""
    assert list(alike(["1_1", "1_2", "11", "12"])) == []
