"""Tokenized text: flat arrays on disk, computed once per text and tokenizer, then memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedstrata.errors import FULL, UserError, tokenizing
from fedstrata.plan.kinds import Index
from fedstrata.wire.files import checksum_of, named, read_sealed, write_sealed

FIELDS = ("ids", "offsets", "rows", "words", "types")
CHECKSUMS = "checksums.json"
"""File of a folder of the cache: the checksum of each of the others."""
CHUNK = 4096
"""Texts given to the tokenizer at once: bounds memory."""


@dataclass(frozen=True)
class Tokens:
    """Examples as token ids, special tokens included.

    Attributes:
        ids: all ids in a row, ``[sum of lengths]`` int32.
        offsets: example ``i`` is ``ids[offsets[i]:offsets[i + 1]]``, ``[n + 1]`` int64.
        rows: the row each example comes from, ``[n]`` int64, ascending; of a block of packed texts the row of its
            first token, in the order of the blocks.
        words: for each id the index in its row of the word whose first piece it is, else -1,
            ``[sum of lengths]`` int64; for texts that are lists of words only.
        types: for each id 0 in a pair's first text and 1 in its second, ``[sum of lengths]`` int8; for pairs
            only, and if the tokenizer's model has token types.
    """

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    types: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, example: int) -> npt.NDArray[np.int32]:
        return self.ids[self.offsets[example] : self.offsets[example + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example, ``[n]``."""
        return np.diff(self.offsets)

    def of_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The examples that come from the given rows, ascending."""
        order, starts = self._by_row
        known = rows[rows < len(starts) - 1]
        first, count = starts[known], starts[known + 1] - starts[known]
        places = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
        return np.unique(order[places])

    @cached_property
    def _by_row(self) -> tuple[Index, Index]:
        """All examples in the order of their rows, and where those of each row begin among them."""
        order = np.argsort(self.rows, kind="stable")
        return order, np.searchsorted(self.rows[order], np.arange(self.rows.max(initial=-1) + 2))


def cache_folder() -> Path:
    """Where tokenized text is kept: ``$FEDSTRATA_CACHE``, else ``~/.cache/fedstrata``."""
    if own := os.environ.get("FEDSTRATA_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedstrata"


def tokenize(
    texts: Sequence[str],
    tokenizer: Any,
    max_tokens: int,
    long_text: Literal["chunk", "truncate", "pack"],
    word_end: str | None = None,
    seconds: Sequence[str] | None = None,
) -> Tokens:
    """Token ids of every text, from the cache where they are in it.

    Args:
        texts: one per row.
        tokenizer: a fast Hugging Face tokenizer.
        max_tokens: longest example, special tokens included.
        long_text: ``chunk`` makes further examples of what exceeds ``max_tokens``, ``truncate`` drops it,
            ``pack`` leaves every text whole and without special tokens, for :func:`pack`.
        word_end: what stands between the words of texts that are lists of words.
        seconds: the second texts of pairs; ``long_text`` is then ``truncate``, which cuts the longer of the two.

    Raises:
        UserError: the tokenizer's own tokens leave no room for a text's, or it fails on one.
    """
    own = tokenizer.num_special_tokens_to_add(pair=seconds is not None)
    if own >= max_tokens:
        raise UserError(
            f"[train] max_tokens: is {max_tokens}, but the tokenizer puts {own} tokens of its own around a text"
        )
    texts = [text.encode("utf-8", "replace").decode() for text in texts]  # a lone surrogate cannot be encoded
    seconds = None if seconds is None else [text.encode("utf-8", "replace").decode() for text in seconds]
    pair = None if seconds is None else "token_type_ids" in tokenizer.model_input_names
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    rules = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}  # set per call
    side = _cut_side(tokenizer, long_text, word_end)
    kept = [6, max_tokens, long_text, side, word_end, pair, rules, tokenizer.split_special_tokens]
    digest = hashlib.sha256(json.dumps(kept).encode())
    for text in [*texts, *(seconds or ())]:
        digest.update(f"{len(text)}\0{text}".encode())
    folder = cache_folder() / digest.hexdigest()
    if not _intact(folder):
        before, tokenizer.truncation_side = tokenizer.truncation_side, side
        try:
            _store(folder, _tokenize(texts, tokenizer, max_tokens, long_text, word_end, seconds))
        finally:
            tokenizer.truncation_side = before
    return Tokens(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in FIELDS))


def _cut_side(tokenizer: Any, long_text: str, word_end: str | None) -> str:
    """The side on which a text is cut: the tokenizer's own for texts that are truncated, else ``right``.

    Chunks from the left would come in reverse, and a word's first piece, which carries its tag, might be cut off.
    """
    own: str = tokenizer.truncation_side
    return own if long_text == "truncate" and word_end is None else "right"


def _tokenize(
    texts: Sequence[str],
    tokenizer: Any,
    max_tokens: int,
    long_text: str,
    word_end: str | None = None,
    seconds: Sequence[str] | None = None,
) -> Tokens:
    lengths: list[int] = []
    rows: list[int] = []
    ids, words, types = (list[npt.NDArray[Any]]() for _ in range(3))
    typed = seconds is not None and "token_type_ids" in tokenizer.model_input_names
    for start in range(0, len(texts), CHUNK):
        chunk = list(texts[start : start + CHUNK])
        with tokenizing(tokenizer.name_or_path):
            encoded = tokenizer(
                chunk if word_end is None else [text.split(word_end) for text in chunk],
                text_pair=None if seconds is None else list(seconds[start : start + CHUNK]),
                is_split_into_words=word_end is not None,
                add_special_tokens=long_text != "pack",
                truncation=long_text != "pack",
                max_length=None if long_text == "pack" else max_tokens,
                return_overflowing_tokens=long_text == "chunk",
                return_attention_mask=False,
                return_token_type_ids=typed,
            )
        lengths += map(len, encoded["input_ids"])
        ids += _arrays(encoded["input_ids"], np.int32)
        sources = encoded.get("overflow_to_sample_mapping", range(len(encoded["input_ids"])))
        rows += [start + source for source in sources]
        types += _arrays(encoded["token_type_ids"] if typed else [], np.int8)
        words += [] if word_end is None else _word_starts(encoded, sources)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Tokens(
        _flat(ids, np.int32),
        offsets,
        np.asarray(rows, dtype=np.int64),
        _flat(words, np.int64),
        _flat(types, np.int8),
    )


def _arrays(sequences: Iterable[Any], dtype: type[np.integer[Any]]) -> list[npt.NDArray[Any]]:
    return [np.asarray(sequence, dtype=dtype) for sequence in sequences]


def _flat(arrays: Iterable[npt.NDArray[Any]], dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
    """All arrays as one; of none an empty one."""
    return np.concatenate([*arrays, np.empty(0, dtype)])


def _word_starts(encoded: Any, sources: Sequence[int]) -> Iterator[npt.NDArray[np.int64]]:
    """Of each example the ``words`` of :class:`Tokens`; ``sources`` says which text an example is from."""
    last = dict.fromkeys(sources, -1)  # text -> its last word that an earlier example has begun
    for example, source in enumerate(sources):
        words = _first_pieces(encoded.word_ids(example), last[source])
        last[source] = max(last[source], words.max(initial=-1))
        yield words


def pack(
    tokens: Tokens, tokenizer: Any, max_tokens: int, groups: Iterable[npt.NDArray[np.int64]], causal: bool
) -> Tokens:
    """Blocks of exactly ``max_tokens`` tokens out of whole texts, joined in their order group by group.

    The separator (sep, else eos) follows every text; around each block stands what the tokenizer puts around a
    text. The last block of a group may be shorter; it is dropped if nothing in it can be predicted.

    Args:
        tokens: one example per row, without special tokens.
        tokenizer: whose they are.
        max_tokens: length of a block, special tokens included.
        groups: disjoint sets of rows; no block holds texts of two.
        causal: tokens are predicted from those before, not from what is around them.

    Raises:
        UserError: the tokenizer has no separator.
    """
    separator = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    if separator is None:
        raise UserError("[data] long_text: 'pack' needs a tokenizer with a separator or an end-of-text token")
    around = np.asarray(tokenizer("")["input_ids"], dtype=np.int32)
    opening = np.isin(around, [i for i in (tokenizer.cls_token_id, tokenizer.bos_token_id) if i is not None])
    room = max_tokens - len(around)
    blocks, rows = list[npt.NDArray[np.int32]](), list[int]()
    for group in groups:
        joined, source = _joined(tokens, np.sort(group), separator)
        for start in range(0, len(joined), room):
            content = joined[start : start + room]
            block = np.concatenate([around[opening], content, around[~opening]])
            empty = len(block) < 2 if causal else bool(np.isin(content, tokenizer.all_special_ids).all())
            if start and empty and len(content) < room:
                continue
            blocks.append(block)
            rows.append(int(source[start]))
    offsets = np.concatenate([[0], np.cumsum([len(block) for block in blocks], dtype=np.int64)])
    return Tokens(_flat(blocks, np.int32), offsets, np.asarray(rows, dtype=np.int64))


def _joined(tokens: Tokens, rows: Index, separator: int) -> tuple[npt.NDArray[np.int32], Index]:
    """The tokens of rows one after the other, a separator after each; and the row of every token."""
    texts = [np.append(tokens[row], np.int32(separator)) for row in rows]
    return _flat(texts, np.int32), np.repeat(rows, [len(text) for text in texts])


def _first_pieces(words: Sequence[int | None], last: int) -> npt.NDArray[np.int64]:
    """Each token's word where it is the word's first piece, else -1; words up to ``last`` have had theirs."""
    word = np.asarray([-1 if place is None else place for place in words], dtype=np.int64)
    first = np.concatenate([[True], word[1:] != word[:-1]]) & (word > last)
    return np.where(first, word, -1)


def _checksums(folder: Path) -> dict[str, str | None]:
    return {name: checksum_of(folder / f"{name}.npy") for name in FIELDS}


def _intact(folder: Path) -> bool:
    """Whether a folder of the cache is there as it was written: it outlives runs, and a crash of the machine."""
    try:
        return read_sealed(folder / CHECKSUMS) == _checksums(folder)
    except OSError:
        return False


def _store(folder: Path, tokens: Tokens) -> None:
    """Write to a folder of its own and rename it: another run sees all of it or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            f"{folder.parent}: cannot be written ({error.strerror}), and tokenized text is kept there; the "
            "environment variable FEDSTRATA_CACHE names another folder"
        ) from None
    with made as temporary, named(folder):
        target = Path(temporary) / "done"
        target.mkdir()
        for name in FIELDS:
            np.save(target / f"{name}.npy", getattr(tokens, name))
        write_sealed(target / CHECKSUMS, _checksums(target))
        try:
            os.rename(target, folder)
        except OSError:
            if not folder.exists():
                raise
            if not _intact(folder):  # else another run has made it meanwhile
                os.rename(folder, Path(temporary) / "damaged")
                os.rename(target, folder)
