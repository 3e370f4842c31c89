"""Tokenised text: what becomes an example, and that it is made once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.data import tokens as module
from fedstrata.data.tokens import Tokens, cache_folder, tokenise
from tiny import SENTENCES, tokenizer

CLS, SEP = 2, 3
LONG = "the kidney filters the blood and keeps salt in balance ."


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))


def examples(tokens: Tokens) -> list[list[int]]:
    return [tokens[i].tolist() for i in range(len(tokens))]


def plain(text: str) -> list[int]:
    """Ids without special tokens."""
    return tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def test_texts_become_ids_with_special_tokens() -> None:
    made = tokenise(["The heart.", "the eye"], tokenizer(), 32, "split")
    assert examples(made) == [[CLS, *plain("the heart ."), SEP], [CLS, *plain("the eye"), SEP]]
    assert made.rows.tolist() == [0, 1]
    assert made.lengths.tolist() == [5, 4]
    assert (made.ids.dtype, made.offsets.dtype, made.rows.dtype) == (np.int32, np.int64, np.int64)


@pytest.mark.parametrize("most", [3, 4, 8, 13, 14])
def test_split_cuts_into_examples_each_with_special_tokens(most: int) -> None:
    ids = plain(LONG)
    assert len(ids) == 11
    made = tokenise(["the eye", LONG, "the heart"], tokenizer(), most, "split")
    pieces = [ids[i : i + most - 2] for i in range(0, 11, most - 2)]
    own = made.of_rows(np.asarray([1]))
    assert [made[i].tolist() for i in own] == [[CLS, *piece, SEP] for piece in pieces]
    if most >= 4:
        assert made.rows.tolist() == [0, *[1] * len(pieces), 2]
    assert made.lengths.max() <= most


@pytest.mark.parametrize("most", [4, 8, 13, 14])
def test_truncate_keeps_the_beginning(most: int) -> None:
    made = tokenise([LONG, "the eye"], tokenizer(), most, "truncate")
    assert examples(made) == [[CLS, *plain(LONG)[: most - 2], SEP], [CLS, *plain("the eye")[: most - 2], SEP]]
    assert made.rows.tolist() == [0, 1]


def test_of_rows_is_ascending_and_complete() -> None:
    made = tokenise(["the eye", LONG, "", LONG], tokenizer(), 8, "split")
    assert made.rows.tolist() == [0, 1, 1, 2, 3, 3]
    assert made.of_rows(np.asarray([3, 0])).tolist() == [0, 4, 5]
    assert made.of_rows(np.asarray([], dtype=np.int64)).tolist() == []
    assert made.of_rows(np.arange(4)).tolist() == list(range(6))


def test_text_longer_than_a_chunk_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text for text, _ in SENTENCES]
    whole = tokenise(texts, tokenizer(), 8, "split")
    monkeypatch.setattr(module, "CHUNK", 5)
    chunked = module._tokenise(texts, tokenizer(), 8, "split")
    assert examples(chunked) == examples(whole)
    assert chunked.rows.tolist() == whole.rows.tolist()
    assert chunked.rows.max() == 11


@pytest.mark.parametrize(
    "text", ["", " \t\n", "القلب يضخ الدم", "心臓", "e\u0301 🫀 \u200d", "\ufeffheart", "a\x01b", "[MASK] [SEP]"]
)
@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_any_text_is_one_example_like_the_tokenizers_own(text: str, overlong: Any) -> None:
    made = tokenise(["the eye", text, "the heart"], tokenizer(), 16, overlong)
    assert made.rows.tolist() == [0, 1, 2]
    assert made[1].tolist() == tokenizer()(text)["input_ids"]
    assert made[2].tolist() == [CLS, *plain("the heart"), SEP]


def test_an_empty_text_is_its_special_tokens() -> None:
    assert examples(tokenise([""], tokenizer(), 8, "split")) == [[CLS, SEP]]


def test_no_text_is_no_example() -> None:
    made = tokenise([], tokenizer(), 8, "split")
    assert (len(made), made.ids.shape, made.lengths.tolist()) == (0, (0,), [])


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes every time that text is really tokenised."""
    calls: list[int] = []
    original = module._tokenise

    def spy(*args: Any) -> Tokens:
        calls.append(len(args[0]))
        return original(*args)

    monkeypatch.setattr(module, "_tokenise", spy)
    return calls


def test_the_same_text_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    first = tokenise(["the heart", LONG], tokenizer(), 8, "split")
    second = tokenise(["the heart", LONG], tokenizer(), 8, "split")
    assert calls == [2]
    assert examples(first) == examples(second)
    assert second.rows.tolist() == first.rows.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        (["the heart", "the eye."], 8, "split"),
        (["the eye", "the heart"], 8, "split"),
        (["the heartthe eye"], 8, "split"),
        (["the heart", "the eye"], 9, "split"),
        (["the heart", "the eye"], 8, "truncate"),
    ],
)
def test_anything_else_is_tokenised_anew(monkeypatch: pytest.MonkeyPatch, other: tuple[Any, ...]) -> None:
    calls = count(monkeypatch)
    texts, most, overlong = other
    tokenise(["the heart", "the eye"], tokenizer(), 8, "split")
    tokenise(texts, tokenizer(), most, overlong)
    assert len(calls) == 2


def test_another_tokenizer_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    other = tokenizer()
    other.add_tokens(["aorta"])
    assert examples(tokenise(["aorta"], tokenizer(), 8, "split")) == [[CLS, 1, SEP]]
    assert examples(tokenise(["aorta"], other, 8, "split")) == [[CLS, 68, SEP]]
    assert len(calls) == 2


def test_a_crash_leaves_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = itertools.count()
    original = np.save

    def crash(*args: Any) -> None:
        if next(saved) == 1:
            raise KeyboardInterrupt
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            tokenise(["the heart"], tokenizer(), 8, "split")
    assert list(cache_folder().iterdir()) == []
    assert examples(tokenise(["the heart"], tokenizer(), 8, "split")) == [[CLS, *plain("the heart"), SEP]]
    assert [sorted(path.name for path in entry.iterdir()) for entry in cache_folder().iterdir()] == [
        ["ids.npy", "offsets.npy", "rows.npy", "types.npy", "words.npy"]
    ]


def test_two_runs_at_once_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run finishes the same entry while this one is at work."""
    original = module._tokenise

    def slow(*args: Any) -> Tokens:
        made = original(*args)
        monkeypatch.setattr(module, "_tokenise", original)
        tokenise(["the heart"], tokenizer(), 8, "split")
        return made

    monkeypatch.setattr(module, "_tokenise", slow)
    assert examples(tokenise(["the heart"], tokenizer(), 8, "split")) == [[CLS, *plain("the heart"), SEP]]
    assert len(list(cache_folder().iterdir())) == 1


def test_the_cache_is_mapped_and_not_read() -> None:
    assert isinstance(tokenise(["the heart"], tokenizer(), 8, "split").ids, np.memmap)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("FEDSTRATA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/fedstrata")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "fedstrata"
