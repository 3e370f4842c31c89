"""Epsilon against dp-accounting's own values, the closed form, and a brute-force attack on a toy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from fedstrata.errors import UserError
from fedstrata.privacy.accounting import LEAST_NOISE, MOST_RELEASES, Spending, _least, calibrate, epsilon_of
from fedstrata.privacy.keystream import PIECE, Keystream
from fedstrata.privacy.noise import add_gaussian, norm_of, privatized

KEY = bytes(32)


@pytest.mark.parametrize(
    ("noise", "rate", "count", "expected"),
    [
        (1.0, 1.0, 6, 12.8707),  # all clients in six rounds, as measured before
        (5.0, 1.0, 6, 1.9482),
        (10.0, 1.0, 6, 0.9068),
        (1.1, 0.01, 1000, 1.5154),  # dp_accounting.pld.PLDAccountant at its own step of 1e-4
        (0.6, 0.05, 300, 18.7299),
        (2.0, 0.3, 100, 7.9248),
    ],
)
def test_epsilon_is_that_of_dp_accounting(noise: float, rate: float, count: int, expected: float) -> None:
    found = epsilon_of([Spending(noise, rate, count)], 1e-5, "pld")
    assert expected - 1e-3 < found < expected + 2e-3
    assert found < epsilon_of([Spending(noise, rate, count)], 1e-5, "rdp") < 1.2 * found


@pytest.mark.parametrize(
    ("noise", "rate", "count", "expected"),
    [
        (0.94, 0.2, 24, 7.9949),
        (0.385, 0.001, 1000, 7.9605),
        (3.0, 0.01, 3, 0.0204),
        (3.0, 0.001, 300, 0.01576),  # steps of 1e-3 come to 0.0244
        (0.16338604744947674, 0.001, 24, 38.5044),  # a bound by few of Rényi's orders is above LOOSE
    ],
)
def test_epsilon_is_near_that_of_steps_of_1e_4(noise: float, rate: float, count: int, expected: float) -> None:
    found = epsilon_of([Spending(noise, rate, count)], 1e-5, "pld")
    assert expected - 1e-4 < found < expected + 1e-3
    assert found < epsilon_of([Spending(noise, rate, count)], 1e-5, "rdp")


def test_releases_of_several_kinds_add_up() -> None:
    both = [Spending(2.0, 1.0, 3), Spending(4.0, 1.0, 5)]
    alike = Spending((3 / 4 + 5 / 16) ** -0.5, 1.0, 1)
    assert epsilon_of(both, 1e-5, "pld") == pytest.approx(epsilon_of([alike], 1e-5, "pld"), rel=1e-6)
    assert epsilon_of([], 1e-5, "pld") == epsilon_of([Spending(1.0, 1.0, 0)], 1e-5, "rdp") == 0.0


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_delta_of_one_release_is_the_closed_form(noise: float) -> None:
    """Balle and Wang 2018, theorem 8: at the epsilon told, the delta is the one asked for."""
    epsilon = epsilon_of([Spending(noise, 1.0, 1)], 1e-5, "pld")
    upper, lower = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
    delta = stats.norm.cdf(upper) - math.exp(epsilon) * stats.norm.cdf(lower)
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("epsilon", "rate", "count"),
    [(8.0, 1.0, 5), (1.0, 0.05, 200), (0.3, 0.5, 3), (8.0, 0.013, 24), (99.0, 0.2, 24), (2000.0, 0.2, 24)],
)
def test_calibrated_noise_is_just_enough(accountant: str, epsilon: float, rate: float, count: int) -> None:
    noise = calibrate(epsilon, 1e-5, accountant, rate, count)  # type: ignore[arg-type]
    found, less = (
        epsilon_of([Spending(z, rate, count)], 1e-5, accountant)  # type: ignore[arg-type]
        for z in (noise, noise / 1.01)
    )
    assert found <= epsilon < less
    assert calibrate(epsilon, 1e-5, "pld", rate, 0) == LEAST_NOISE


def test_a_loss_that_would_take_minutes_is_bounded_by_renyi() -> None:
    """A hostile job may ask for a hundred million releases of next to nothing."""
    spent = [Spending(1e4, 1 / 12, 1000 * 12 * 10_000)]
    assert epsilon_of(spent, 1e-5, "pld") == epsilon_of(spent, 1e-5, "rdp")
    assert epsilon_of([Spending(1e4, 1 / 12, MOST_RELEASES)], 1e-5, "pld") < epsilon_of(spent, 1e-5, "pld")


def test_an_epsilon_that_no_noise_reaches_is_refused() -> None:
    assert epsilon_of([Spending(calibrate(0.003, 1e-5, "pld", 1.0, 3), 1.0, 3)], 1e-5, "pld") <= 0.003
    with pytest.raises(UserError, match="no noise is enough for 2"):
        _least(lambda noise: 3.0, 2.0, 1.0, 1e-3)
    with pytest.raises(UserError, match="no noise is enough for 1e-300"):
        calibrate(1e-300, 1e-5, "pld", 1.0, 3)


def stepped(noise: float) -> float:
    """An epsilon that jumps: no line through two points leads to where it is 2."""
    return 4.0 if noise < 3.7 else 1.0 / noise


@pytest.mark.parametrize("spends", [stepped, lambda noise: 10 / noise**3, lambda noise: 10 / noise**0.2])
@pytest.mark.parametrize("guess", [1e-2, 1.0, 1e4])
def test_the_search_ends_beside_the_least_noise(spends: Callable[[float], float], guess: float) -> None:
    asked = Counter[float]()

    def counting(noise: float) -> float:
        asked[noise] += 1
        return spends(noise)

    found = _least(counting, 2.0, guess, 1e-3)
    assert spends(found) <= 2.0 < spends(found / 1.0011)
    assert sum(asked.values()) < 40


def test_a_message_is_clipped_as_a_whole_and_noised_everywhere() -> None:
    shape = (200, 100)
    start = {"a": {"w": torch.full(shape, 2.0)}, "b": {"v": torch.full((100,), -1.0)}}
    sent = {"a": {"w": start["a"]["w"] + 3.0}, "b": {"v": start["b"]["v"] + 4.0}}
    stream = Keystream(KEY)
    still = privatized(sent, start, 1.0, 0.0, stream)
    changes = [still[part][name] - start[part][name] for part, name in (("a", "w"), ("b", "v"))]
    assert norm_of(changes) == pytest.approx(1.0, abs=1e-4)
    assert float(changes[1][0] / changes[0][0, 0]) == pytest.approx(4 / 3, rel=1e-3)
    short = privatized(sent, start, 1e6, 0.0, stream)
    torch.testing.assert_close(short, sent)
    noised = privatized(sent, start, 2.0, 5.0, stream)
    rest = torch.cat([(noised[p][n] - start[p][n]).flatten() for p, n in (("a", "w"), ("b", "v"))])
    assert float(rest.std()) == pytest.approx(10.0, rel=0.02)
    none = privatized({**sent, "a": {"w": sent["a"]["w"] * math.inf}}, start, 1.0, 0.0, stream)
    torch.testing.assert_close(none, start)


def test_the_norm_is_that_of_all_tensors_together_in_fp64() -> None:
    long, short = torch.full((3, PIECE), 3e30), torch.full((7,), 4e30)  # whose squares fp32 does not hold
    expected = math.sqrt(3 * PIECE * 9 + 7 * 16) * 1e30
    assert norm_of([long, short.view(7, 1), torch.zeros(0)]) == pytest.approx(expected, rel=1e-6)
    long[2, -1] = math.inf
    assert norm_of([short, long]) == math.inf


def noised(shape: tuple[int, ...], value: float, deviation: float, stream: Keystream) -> torch.Tensor:
    """A tensor of one value with noise over it."""
    numbers = torch.full(shape, value)
    add_gaussian(numbers, deviation, stream)
    return numbers


def test_gaussian_numbers_are_gaussian() -> None:
    drawn = noised((50_000,), 0.0, 2.0, Keystream(KEY)).numpy()
    assert stats.kstest(drawn / 2.0, "norm").pvalue > 0.01
    assert len(np.unique(drawn)) > 49_000


def test_a_long_tensor_has_the_same_noise_for_any_number_of_threads_and_no_two_pieces_share_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedstrata.privacy.noise.CHUNK", 1000)
    shape, found = (50, 170), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        stream = Keystream(KEY)
        found.append([noised(shape, 0.0, 2.0, stream), noised(shape, 0.0, 2.0, stream)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    drawn = torch.cat([each.flatten() for each in found[0]]).numpy()
    assert len(np.unique(drawn)) > 16_900
    assert stats.kstest(drawn / 2.0, "norm").pvalue > 0.01
    start = {"a": {"w": torch.zeros(shape)}}
    whole = privatized(start, start, 1.0, 3.0, Keystream(KEY))["a"]["w"]
    assert len(whole.unique()) > 8_400
    assert float(whole.std()) == pytest.approx(3.0, rel=0.05)


def test_a_message_is_that_of_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.privacy.noise.CHUNK", 1000)
    monkeypatch.setattr("fedstrata.privacy.noise.PIECE", 300)
    start = {"a": {"w": torch.randn(60, 55).T, "b": torch.zeros(0)}, "b": {"v": torch.randn(7)}}
    sent = {part: {name: tensor + torch.randn(()) for name, tensor in own.items()} for part, own in start.items()}
    found, stream = privatized(sent, start, 2.0, 0.5, Keystream(KEY)), Keystream(KEY)
    norm = norm_of(sent[part][name] - old for part, own in start.items() for name, old in own.items())
    assert norm > 2.0
    for part, own in start.items():
        for name, old in own.items():
            change = (sent[part][name].double() - old.double()).contiguous() * (2.0 / norm)
            add_gaussian(change, 1.0, stream)
            torch.testing.assert_close(found[part][name], (old + change).float(), rtol=0, atol=0)
            assert found[part][name].is_contiguous()


@pytest.mark.parametrize("deviation", [0.7, 1.0, 3e-4, 1e12])
def test_the_last_bits_do_not_tell_what_the_noise_was_added_to(deviation: float) -> None:
    """Of fp32 noise over 0 they are all there; where it all but cancels a number they are those of the number."""
    shares = []
    for value in (0.0, 0.3, -0.07):
        found = noised((400_000,), value * deviation, deviation, Keystream(KEY)).double().numpy()
        small = found[np.abs(found) < deviation / 128]
        steps = small / np.exp2(math.frexp(deviation)[1] - np.arange(8.0, 40.0))[:, None]
        shares.append((steps == np.rint(steps)).mean(axis=1))
    assert shares[0][0] < 0.1
    assert shares[0][-1] == 1.0
    for share in shares[1:]:
        np.testing.assert_allclose(share, shares[0], atol=0.1)


def test_of_a_message_no_bit_is_finer_than_the_steps_of_its_noise() -> None:
    start = {"a": {"w": torch.zeros(1000)}}
    for change in (0.0, 1e-5):
        sent = {"a": {"w": start["a"]["w"] + change}}
        steps = privatized(sent, start, 1.0, 1.0, Keystream(KEY))["a"]["w"].double() * 2**20
        assert torch.equal(steps, steps.round())


@pytest.mark.parametrize("deviation", [0.0, 1e-300, 5e-324])
def test_noise_of_next_to_no_deviation_changes_nothing(deviation: float) -> None:
    assert torch.equal(noised((10,), 0.3, deviation, Keystream(KEY)), torch.full((10,), 0.3))


def lower_bound(outputs: dict[bool, np.ndarray], delta: float) -> float:
    """The largest epsilon that a test of "was the unit there?" proves, at 99.9 %: Clopper and Pearson 1934.

    Whoever claims (epsilon, delta) has P(test says yes | there) <= e^epsilon P(test says yes | not there) + delta,
    for any test; here those that ask whether the output is above a threshold.
    """
    there, gone = outputs[True], outputs[False]
    half = len(there) // 2
    thresholds = np.quantile(np.concatenate([there[:half], gone[:half]]), np.linspace(0.01, 0.999, 60))
    best = 0.0
    for sign in (1, -1):  # the threshold is chosen on one half, the bound holds on the other
        rates = [
            ((sign * there[:half] > sign * t).mean(), (sign * gone[:half] > sign * t).mean()) for t in thresholds
        ]
        chosen = thresholds[np.argmax([(hit - delta) / (miss + 20 / half) for hit, miss in rates])]
        hits, misses = ((sign * own[half:] > sign * chosen).sum() for own in (there, gone))
        low = stats.beta.ppf(0.0005, hits, half - hits + 1) if hits else 0.0
        high = stats.beta.ppf(0.9995, misses + 1, half - misses)
        best = max(best, math.log(max(low - delta, 1e-12) / high))
    return best


def messages(noise: float, rounds: int, tries: int) -> dict[bool, np.ndarray]:
    """What the server sees of a client that moves one weight by the clip, or not: the sum of rounds."""
    stream = Keystream(KEY)
    start = {"a": {"w": torch.zeros(tries)}}
    seen = {}
    for there in (True, False):
        total = np.zeros(tries)
        for _ in range(rounds):
            # one weight in each of many independent tries: the noise over them is drawn at once
            change = 1.0 if there else 0.0
            noised = privatized(start, start, 1.0, noise, stream)["a"]["w"].numpy() + change
            total += noised
        seen[there] = total
    return seen


def test_no_attack_on_a_toy_beats_the_claim() -> None:
    """And with half the noise one does, so that the test can fail."""
    noise, rounds, delta = 2.0, 4, 1e-3
    claim = epsilon_of([Spending(noise, 1.0, rounds)], delta, "pld")
    found = lower_bound(messages(noise, rounds, 200_000), delta)
    assert 0.5 * claim < found < claim
    assert lower_bound(messages(noise / 2, rounds, 200_000), delta) > claim
