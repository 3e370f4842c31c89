"""Tokenized text: what becomes an example, and that it is made once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.data import tokens as module
from fedstrata.data.tokens import Tokens, cache_folder, pack, tokenize
from fedstrata.errors import UserError
from tiny import SENTENCES, SPECIAL, gpt2_tokenizer, tokenizer, words

CLS, SEP, END = 2, 3, len(SPECIAL) + len(words())
LONG = "the kidney filters the blood and keeps salt in balance ."


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))


def examples(tokens: Tokens) -> list[list[int]]:
    return [tokens[i].tolist() for i in range(len(tokens))]


def plain(text: str) -> list[int]:
    """Ids without special tokens."""
    return tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("long_text", ["chunk", "truncate", "pack"])
def test_a_text_needs_room_beside_the_tokenizers_own_tokens(long_text: Any) -> None:
    """Cut to so few, every example was the same special tokens and no word."""
    with pytest.raises(UserError, match="max_tokens: is 2, but the tokenizer puts 2 tokens of its own"):
        tokenize(["the eye"], tokenizer(), 2, long_text)


def test_texts_become_ids_with_special_tokens() -> None:
    made = tokenize(["The heart.", "the eye"], tokenizer(), 32, "chunk")
    assert examples(made) == [[CLS, *plain("the heart ."), SEP], [CLS, *plain("the eye"), SEP]]
    assert made.rows.tolist() == [0, 1]
    assert made.lengths.tolist() == [5, 4]
    assert (made.ids.dtype, made.offsets.dtype, made.rows.dtype) == (np.int32, np.int64, np.int64)


@pytest.mark.parametrize("most", [3, 4, 8, 13, 14])
def test_split_cuts_into_examples_each_with_special_tokens(most: int) -> None:
    ids = plain(LONG)
    assert len(ids) == 11
    made = tokenize(["the eye", LONG, "the heart"], tokenizer(), most, "chunk")
    pieces = [ids[i : i + most - 2] for i in range(0, 11, most - 2)]
    own = made.of_rows(np.asarray([1]))
    assert [made[i].tolist() for i in own] == [[CLS, *piece, SEP] for piece in pieces]
    if most >= 4:
        assert made.rows.tolist() == [0, *[1] * len(pieces), 2]
    assert made.lengths.max() <= most


@pytest.mark.parametrize("most", [4, 8, 13, 14])
def test_truncate_keeps_the_beginning(most: int) -> None:
    made = tokenize([LONG, "the eye"], tokenizer(), most, "truncate")
    assert examples(made) == [[CLS, *plain(LONG)[: most - 2], SEP], [CLS, *plain("the eye")[: most - 2], SEP]]
    assert made.rows.tolist() == [0, 1]


@pytest.mark.parametrize("how", ["chunk", "truncate"])
def test_words_are_cut_from_the_beginning_whatever_side_the_tokenizer_cuts(how: Any, tmp_path: Path) -> None:
    """Chunks from the left came in reverse, and no word but those of a text's last chunk had its tag."""
    text, left = [LONG.replace(" ", "\n")], tokenizer()
    right = tokenize(text, tokenizer(), 6, how, "\n")
    (tmp_path / "cache").rename(tmp_path / "another")
    left.truncation_side = "left"
    made = tokenize(text, left, 6, how, "\n")
    assert (examples(made), made.words.tolist()) == (examples(right), right.words.tolist())
    assert left.truncation_side == "left"


def test_texts_that_are_truncated_on_the_left_are_kept_apart_from_others() -> None:
    tokenize([LONG], tokenizer(), 6, "truncate")
    left = tokenizer()
    left.truncation_side = "left"
    assert examples(tokenize([LONG], left, 6, "truncate")) == [[CLS, *plain(LONG)[-4:], SEP]]


def test_of_rows_is_ascending_and_complete() -> None:
    made = tokenize(["the eye", LONG, "", LONG], tokenizer(), 8, "chunk")
    assert made.rows.tolist() == [0, 1, 1, 2, 3, 3]
    assert made.of_rows(np.asarray([3, 0])).tolist() == [0, 4, 5]
    assert made.of_rows(np.asarray([], dtype=np.int64)).tolist() == []
    assert made.of_rows(np.arange(4)).tolist() == list(range(6))


def test_text_longer_than_a_chunk_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text for text, _ in SENTENCES]
    whole = tokenize(texts, tokenizer(), 8, "chunk")
    monkeypatch.setattr(module, "CHUNK", 5)
    chunked = module._tokenize(texts, tokenizer(), 8, "chunk")
    assert examples(chunked) == examples(whole)
    assert chunked.rows.tolist() == whole.rows.tolist()
    assert chunked.rows.max() == 11


@pytest.mark.parametrize(
    "text", ["", " \t\n", "القلب يضخ الدم", "心臓", "e\u0301 🫀 \u200d", "\ufeffheart", "a\x01b", "[MASK] [SEP]"]
)
@pytest.mark.parametrize("long_text", ["chunk", "truncate"])
def test_any_text_is_one_example_like_the_tokenizers_own(text: str, long_text: Any) -> None:
    made = tokenize(["the eye", text, "the heart"], tokenizer(), 16, long_text)
    assert made.rows.tolist() == [0, 1, 2]
    assert made[1].tolist() == tokenizer()(text)["input_ids"]
    assert made[2].tolist() == [CLS, *plain("the heart"), SEP]


def test_an_empty_text_is_its_special_tokens() -> None:
    assert examples(tokenize([""], tokenizer(), 8, "chunk")) == [[CLS, SEP]]


def test_no_text_is_no_example() -> None:
    made = tokenize([], tokenizer(), 8, "chunk")
    assert (len(made), made.ids.shape, made.lengths.tolist()) == (0, (0,), [])


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes every time that text is really tokenized."""
    calls: list[int] = []
    original = module._tokenize

    def spy(*args: Any) -> Tokens:
        calls.append(len(args[0]))
        return original(*args)

    monkeypatch.setattr(module, "_tokenize", spy)
    return calls


def test_the_same_text_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    first = tokenize(["the heart", LONG], tokenizer(), 8, "chunk")
    second = tokenize(["the heart", LONG], tokenizer(), 8, "chunk")
    assert calls == [2]
    assert examples(first) == examples(second)
    assert second.rows.tolist() == first.rows.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        (["the heart", "the eye."], 8, "chunk"),
        (["the eye", "the heart"], 8, "chunk"),
        (["the heartthe eye"], 8, "chunk"),
        (["the heart", "the eye"], 9, "chunk"),
        (["the heart", "the eye"], 8, "truncate"),
    ],
)
def test_anything_else_is_tokenized_anew(monkeypatch: pytest.MonkeyPatch, other: tuple[Any, ...]) -> None:
    calls = count(monkeypatch)
    texts, most, long_text = other
    tokenize(["the heart", "the eye"], tokenizer(), 8, "chunk")
    tokenize(texts, tokenizer(), most, long_text)
    assert len(calls) == 2


def test_another_tokenizer_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    other = tokenizer()
    other.add_tokens(["aorta"])
    assert examples(tokenize(["aorta"], tokenizer(), 8, "chunk")) == [[CLS, 1, SEP]]
    assert examples(tokenize(["aorta"], other, 8, "chunk")) == [[CLS, 68, SEP]]
    assert len(calls) == 2


def test_texts_whose_special_tokens_are_split_are_kept_apart_from_others() -> None:
    assert examples(tokenize(["[MASK]"], tokenizer(), 8, "chunk")) == [[CLS, 4, SEP]]
    other = tokenizer()
    other.split_special_tokens = True
    assert examples(tokenize(["[MASK]"], other, 8, "chunk")) == [[CLS, 1, 1, 1, SEP]]


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
            tokenize(["the heart"], tokenizer(), 8, "chunk")
    assert list(cache_folder().iterdir()) == []
    assert examples(tokenize(["the heart"], tokenizer(), 8, "chunk")) == [[CLS, *plain("the heart"), SEP]]
    assert [sorted(path.name for path in entry.iterdir()) for entry in cache_folder().iterdir()] == [
        ["checksums.json", "ids.npy", "offsets.npy", "rows.npy", "types.npy", "words.npy"]
    ]


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-4] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["ids.npy", "offsets.npy", "rows.npy", "checksums.json"])
@pytest.mark.parametrize(
    "harm", [_flipped, Path.unlink, lambda path: path.write_bytes(b""), lambda path: os.truncate(path, 150)]
)
def test_damaged_tokens_are_made_again(name: str, harm: Callable[[Path], object]) -> None:
    """A flipped bit gave another model without a word, and a file cut by a crash a traceback in every run."""
    expected = examples(tokenize(["the heart", LONG], tokenizer(), 8, "chunk"))
    (entry,) = cache_folder().iterdir()
    harm(entry / name)
    for _ in range(2):
        made = tokenize(["the heart", LONG], tokenizer(), 8, "chunk")
        assert (examples(made), made.rows.tolist()) == (expected, [0, 1, 1])
    assert list(cache_folder().iterdir()) == [entry]


def test_two_runs_at_once_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run finishes the same entry while this one is at work."""
    original = module._tokenize

    def slow(*args: Any) -> Tokens:
        made = original(*args)
        monkeypatch.setattr(module, "_tokenize", original)
        tokenize(["the heart"], tokenizer(), 8, "chunk")
        return made

    monkeypatch.setattr(module, "_tokenize", slow)
    assert examples(tokenize(["the heart"], tokenizer(), 8, "chunk")) == [[CLS, *plain("the heart"), SEP]]
    assert len(list(cache_folder().iterdir())) == 1


def test_the_cache_is_mapped_and_not_read() -> None:
    assert isinstance(tokenize(["the heart"], tokenizer(), 8, "chunk").ids, np.memmap)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("FEDSTRATA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/fedstrata")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "fedstrata"


def test_a_home_that_cannot_be_written_is_told_with_what_names_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FEDSTRATA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()  # a folder without write permission is none to root
    with pytest.raises(UserError, match=r"file/fedstrata: cannot be written .* FEDSTRATA_CACHE names another"):
        tokenize(["the heart"], tokenizer(), 8, "chunk")
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "home", lambda: pytest.fail("not asked for, as another folder is named"))
    assert len(tokenize(["the heart"], tokenizer(), 8, "chunk")) == 1


def packed(
    texts: list[str], most: int, groups: list[list[int]], causal: bool, made: Any
) -> tuple[Tokens, list[list[int]]]:
    """The blocks, and by plain Python those that there would be if none went."""
    whole = tokenize(texts, made, most, "pack")
    end = made.eos_token_id if made.sep_token_id is None else made.sep_token_id
    around = 0 if made.cls_token_id is None else 2
    expected = []
    for group in groups:
        line: list[int] = []
        for row in group:
            line += made(texts[row], add_special_tokens=False)["input_ids"] + [end]
        while line:
            content, line = line[: most - around], line[most - around :]
            block = [made.cls_token_id, *content, made.sep_token_id] if around else content
            expected.append(block)
    return pack(whole, made, most, [np.array(group) for group in groups], causal), expected


GROUPS = [[0, 3, 4, 9], [1, 2, 5], [6, 7, 8, 10, 11]]


@pytest.mark.parametrize(("make", "causal"), [(tokenizer, False), (gpt2_tokenizer, True)], ids=["bert", "gpt2"])
@pytest.mark.parametrize("most", [8, 13, 1000])
def test_packed_blocks_hold_every_token_once_and_in_order(make: Any, causal: bool, most: int) -> None:
    """And none those of two clients; all but a client's last are full."""
    made, texts = make(), [text for text, _ in SENTENCES]
    blocks, expected = packed(texts, most, GROUPS, causal, made)
    assert examples(blocks) == [block for block in expected if set(block) - {END, CLS, SEP}]
    for group in GROUPS:
        mine = blocks.of_rows(np.array(group))
        assert all(len(blocks[i]) == most for i in mine[:-1])
        assert 0 < len(blocks[mine[-1]]) <= most
        inner = slice(None) if causal else slice(1, -1)
        content = [int(token) for i in mine for token in blocks[i][inner]]
        ends = made.eos_token_id if causal else made.sep_token_id
        line = [made(texts[row], add_special_tokens=False)["input_ids"] + [ends] for row in group]
        assert content + [ends] * (content[-1] != ends) == list(itertools.chain(*line))
    assert sum(len(blocks.of_rows(np.array(group))) for group in GROUPS) == len(blocks)


def test_a_last_block_without_anything_to_predict_goes() -> None:
    """But not a client's only one."""
    bert, gpt2 = tokenizer(), gpt2_tokenizer()
    text = "the heart the heart the heart"  # six tokens and a separator
    for made, causal, most in ((bert, False, 8), (gpt2, True, 6)):
        blocks, expected = packed([text], most, [[0]], causal, made)
        assert examples(blocks) == expected[:-1]
        assert len(expected) == 2
    assert examples(packed([text], 7, [[0]], True, gpt2)[0]) == [[*gpt2(text)["input_ids"], gpt2.eos_token_id]]
    assert examples(packed(["aorta"], 8, [[0]], False, bert)[0]) == [[CLS, 1, SEP, SEP]]


def test_texts_are_joined_whole_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer()
    made.model_max_length = 8
    text = " ".join(["the heart"] * 50)
    assert len(tokenize([text], made, 8, "pack")) == 1
    assert len(tokenize([text], made, 8, "pack")[0]) == 100


def test_examples_of_rows_are_those_that_a_search_of_all_rows_finds() -> None:
    """Rows without examples, with several, and in any order, as packed blocks have them."""
    rng = np.random.default_rng(0)
    for rows in (np.sort(rng.integers(0, 40, 60)), rng.integers(0, 40, 60), np.empty(0, np.int64)):
        made = Tokens(np.empty(0, np.int32), np.zeros(len(rows) + 1, np.int64), rows)
        for _ in range(20):
            own = rng.permutation(50)[: rng.integers(0, 50)]
            assert made.of_rows(own).tolist() == np.flatnonzero(np.isin(rows, own)).tolist()
