"""The span check on matrices with known inputs."""

from __future__ import annotations

import torch

from fedstrata.audits.span import rounding, span_of


def gradient(inputs: torch.Tensor, rows: int = 96) -> torch.Tensor:
    """A gradient over inputs ``[T, in]``: sums of them with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.randn(rows, len(inputs)) @ inputs


def vectors(count: int, width: int = 32, seed: int = 0) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.randn(count, width)


def test_inputs_lie_in_the_span_and_others_do_not() -> None:
    inputs = vectors(9)
    span = span_of(gradient(inputs), 0.0)
    assert span is not None
    assert span.exact
    assert span.basis.shape == (32, 9)
    assert float(span.scores(inputs).min()) > 1 - 1e-5
    assert float(span.scores(vectors(500, seed=2)).max()) < 0.8


def test_no_input_is_outside_by_its_rounding() -> None:
    for seed in range(20):
        inputs = vectors(9, seed=seed)
        span = span_of(gradient(inputs), 0.0)
        assert span is not None
        assert set(span.scores(inputs).tolist()) == {1.0}


def test_what_is_added_to_weights_is_found_through_rounding() -> None:
    inputs, weights = vectors(9), 0.02 * vectors(96)
    change = (weights + 1e-3 * gradient(inputs)) - weights
    span = span_of(change, rounding(weights, "fp32"))
    assert span is not None
    assert span.exact
    assert span.basis.shape[1] == 9
    assert float(span.scores(inputs).min()) > 1 - 1e-3


def test_as_many_inputs_as_the_matrix_is_wide_have_no_exact_span() -> None:
    span = span_of(gradient(vectors(40)), 0.0)
    assert span is None or not span.exact
    assert span_of(torch.zeros(96, 32), 0.0) is None


def test_signs_are_not_taken_for_an_exact_span() -> None:
    span = span_of(gradient(vectors(9)).sign(), 0.0)
    assert span is None or not span.exact


def test_noise_hides_the_inputs() -> None:
    """No direction stands out of noise that is far larger; out of less noise some do."""
    change = gradient(vectors(9))
    for seed in range(3, 9):
        assert span_of(change + 300 * vectors(96, seed=seed), 0.0) is None
    assert span_of(change + vectors(96, seed=3), 0.0) is not None
