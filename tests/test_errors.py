"""The tail of an error sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedstrata.cli.common import resumable
from fedstrata.errors import UserError, did_you_mean, first_words, megabytes, plural

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    ("found", "expected", "tail"),
    [
        ("fedagv", ["fedavg", "fedprox"], "did you mean 'fedavg'? (expected one of: fedavg, fedprox)"),
        ("fedproxx", ("fedavg", "fedprox"), "did you mean 'fedprox'? (expected one of: fedavg, fedprox)"),
        ("zzz", ["fedavg", "fedprox"], "expected one of: fedavg, fedprox"),
        ("", ["a"], "expected one of: a"),
        ("a", [], "expected one of: "),
        ("12", [1, 2], "did you mean '2'? (expected one of: 1, 2)"),
    ],
)
def test_did_you_mean(found: str, expected: list[str], tail: str) -> None:
    assert did_you_mean(found, expected) == tail


def test_did_you_mean_takes_any_iterable() -> None:
    assert (
        did_you_mean("rownds", iter(["rounds", "name"]))
        == "did you mean 'rounds'? (expected one of: rounds, name)"
    )
    assert did_you_mean("keyz", {"key": 1, "value": 2}) == "did you mean 'key'? (expected one of: key, value)"


def test_of_many_words_the_first_are_listed() -> None:
    clients = [f"client-{i:04d}" for i in range(2000)]
    tail = did_you_mean("client-42", clients)
    assert tail.endswith("client-0048, client-0049, and 1,950 more)")
    assert "client-0050" not in tail
    assert did_you_mean("zzz", clients[:50]).endswith(", client-0049")


def test_a_user_error_is_its_sentence() -> None:
    assert str(UserError("what is wrong, and what is expected")) == "what is wrong, and what is expected"
    assert not issubclass(UserError, ValueError)  # so that no handler of library errors swallows it


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Error no file named x.", "no file named x"),
        ("Validation error for field 'size':\n    TypeError: expected int.\nmore", "expected int"),
        ("\n  first\nsecond", "first"),
        ("", "ValueError"),
    ],
)
def test_what_a_library_says_first(said: str, words: str) -> None:
    assert first_words(ValueError(said)) == words


def test_one_is_singular() -> None:
    assert [plural(number, "row") for number in (0, 1, 2, 1200)] == ["0 rows", "1 row", "2 rows", "1,200 rows"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "memory ran out"),
        (RuntimeError(ALLOCATOR), "memory ran out"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "the GPU's memory ran out"),
        (RuntimeError("OutOfMemoryError: CUDA out of memory."), "the GPU's memory ran out"),  # in a worker
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"), "the GPU's memory ran out"),
    ],
)
def test_memory_that_runs_out_is_told_in_a_sentence(error: Exception, sentence: str, tmp_path: Path) -> None:
    """Whatever torch raises then; and the sentence asks for nothing that --resume refuses."""
    with pytest.raises(UserError) as told, resumable(tmp_path):
        raise error
    assert str(told.value) == (
        f"{sentence}; a run takes less with fewer engine.workers and --resume, or with a smaller train.batch_size "
        "in another folder"
    )


def test_other_errors_of_torch_are_raised_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), resumable(tmp_path):
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0.0 MB"),
        (45, "<0.001 MB"),
        (46_123, "0.046 MB"),
        (146_000, "0.1 MB"),
        (3_141_593, "3.1 MB"),
        (1_234_567_890, "1,234.6 MB"),
    ],
)
def test_few_bytes_are_not_none(count: int, words: str) -> None:
    """What adapters send in a bit per entry was 0.0 MB on the model's card."""
    assert megabytes(count) == words
