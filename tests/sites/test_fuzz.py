"""A sample of ``make fuzz``: messages changed at random are refused by the declared error, or are messages."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import fuzz
from fedstrata.wire.codec import WireError
from fedstrata.wire.foreign import MOST_DEPTH, is_plain_name, measure_json, plain_text, read_json


@settings(max_examples=20)
@given(some.integers(0, 2**32))
def test_a_sample_of_changed_messages(seed: int) -> None:
    found = fuzz.fuzz(200, seed)
    assert sum(found.values()) == 200


def test_the_sample_holds_every_kind_and_both_outcomes() -> None:
    found: Counter[str] = Counter()
    for kind, outcome in fuzz.fuzz(3000, 1):
        found[kind.partition(":")[0]] += 1
        found[outcome] += 1
    assert found.keys() >= {"file", "delivery", "batch", "refused", "another message", "as it was"}


def test_an_error_that_is_not_declared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("run")

    monkeypatch.setattr(fuzz, "decode_message", fails)
    with pytest.raises(AssertionError, match="KeyError"):
        fuzz.fuzz(100, 0)


def test_a_delivery_that_comes_out_as_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "read_frames", lambda reader, rest: b"".join(rest))
    with pytest.raises(AssertionError, match="delivery"):
        fuzz.fuzz(100, 0)


@given(some.text())
def test_plain_text_is_printed_on_one_line(text: str) -> None:
    plain = plain_text(text, 50)
    assert len(plain) <= 50
    assert plain.isprintable()
    assert not set(plain) & set("<>")
    assert plain_text(plain, 50) == plain


def test_plain_text_of_terminals_and_pages() -> None:
    assert plain_text("\x1b[31mred\x1b[0m \x1b]0;title\x07x") == "red x"
    assert plain_text("a\nb\t c\u202e\u2028d\x00") == "a b c d"
    assert plain_text("<b>\ud800") == "\u2039b\u203a"
    assert plain_text("Größe „groß“ 中文") == "Größe „groß“ 中文"


def test_json_is_measured_before_it_is_parsed() -> None:
    deepest = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert read_json(deepest, 100)
    for text, why in (
        (f"[{deepest}]", "brackets inside one another"),
        ("[" * 10**6, "brackets inside one another"),
        ("9" * 41, "more than 40 digits"),
        ('{"a": 1' + "0" * 400 + "}", "more than 40 digits"),
        ("[]" + " " * 99, "101 characters of JSON, at most 100"),
    ):
        with pytest.raises(ValueError, match=why):
            measure_json(text, 10**7 if "characters" not in why else 100)
    harmless = '["' + "[" * 99 + "9" * 99 + '\\""]'
    assert read_json(harmless, 1000) == ["[" * 99 + "9" * 99 + '"'], "in a string it is text"
    assert not issubclass(ValueError, WireError)


def test_json_is_measured_in_one_pass_whatever_is_in_it() -> None:
    """A string without an end was begun again at each of its quotes: a head of 8 MB held a server for days."""
    for text in ('"' + '\\"' * 50_000, '\\"' * 50_000, '"' * 50_001, "\\" * 50_001, '"\\' * 50_001):
        began = time.process_time()
        measure_json(text, 10**6)
        assert time.process_time() < began + 2
    with pytest.raises(ValueError, match="brackets inside one another"):
        measure_json("[" * 20 + '"', 100)


def test_names_are_printed_characters() -> None:
    assert is_plain_name("layer.0")
    assert not any(map(is_plain_name, ["", "a" * 201, "\ud800", "\x1b[31m", "a\nb", 5, None]))
