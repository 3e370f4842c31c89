"""Changes with few bits and few entries: sizes, errors, error feedback, and messages that are none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.changes import ChangeForm, change_spec, check_change, decode_change, encode_change
from fedstrata.wire.codec import StateCodec, Wire, WireError, payload_bytes, spec_bytes
from fedstrata.wire.delta import DeltaCodec, job_codec
from fedstrata.wire.packing import unpack_codes, unpack_places
from fedstrata.wire.rotation import rotate

SHAPES = {"b.weight": (30, 50), "a.weight": (7, 3, 5), "bias": (50,), "scalar": (), "narrow": (90, 4)}
FORMS = [
    ChangeForm(bits, density, rotation)
    for bits in (8, 4, 2, 1)
    for density in (1.0, 0.5, 0.05, 0.001)
    for rotation in (False, True)
]
QUICK = settings(max_examples=30)


def drawn(seed: int = 0, power: int = 3) -> Tensors:
    """Values some of which are far larger than others."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) ** power for name, shape in SHAPES.items()}


def squares(tensors: Tensors) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values())


def minus(one: Tensors, other: Tensors) -> Tensors:
    return {name: one[name] - other[name] for name in one}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_size_is_known_before_and_the_content_is_not(form: ChangeForm) -> None:
    spec = change_spec(SHAPES, form)
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for change in (drawn(0), drawn(1, 1), zero):
        message = encode_change(change, form)
        assert {name: (t.dtype, tuple(t.shape)) for name, t in message.items()} == spec
        assert payload_bytes(message) == spec_bytes(spec)
        check_change(message, SHAPES, form)
        decoded = decode_change(message, SHAPES, form)
        assert {name: tuple(tensor.shape) for name, tensor in decoded.items()} == SHAPES
    assert all(not tensor.any() for tensor in decoded.values()), "no change arrives as none"


@pytest.mark.parametrize(("bits", "share"), [(8, 0.26), (4, 0.14), (2, 0.08), (1, 0.05)])
def test_bytes_of_a_matrix_by_hand(bits: int, share: float) -> None:
    shapes = {"w": (384, 384)}
    size = spec_bytes(change_spec(shapes, ChangeForm(bits)))
    assert size == 384 * 384 * bits // 8 + 384 * (2 if bits == 1 else 4)
    assert size / (4 * 384 * 384) < share
    sparse = spec_bytes(change_spec(shapes, ChangeForm(bits, 0.01)))
    kept = round(0.01 * 384 * 384)
    width = 6  # 2^6 is the power of two below one place in a hundred
    upper = -(-(kept + (384 * 384 >> width) + 1) // 8)
    groups = -(-kept // 128) * (2 if bits == 1 else 4)
    assert sparse == -(-kept * bits // 8) + groups + -(-kept * width // 8) + upper


@pytest.mark.parametrize(
    ("rank", "form", "expected"),
    [
        (8, ChangeForm(1), 1.02),
        (8, ChangeForm(8), 8.04),
        (1, ChangeForm(1), 1.02),
        (1, ChangeForm(8), 8.04),
        (63, ChangeForm(2), 2.04),
        (8, ChangeForm(1, rotation=True), 1.125),
        (8, ChangeForm(8, rotation=True), 8.25),
    ],
    ids=str,
)
def test_an_entry_of_b_takes_as_many_bits_as_one_of_a(rank: int, form: ChangeForm, expected: float) -> None:
    """docs/decisions/wire.md: rows of B are as short as the rank, so that columns have the scales."""
    shapes: dict[str, tuple[int, ...]] = {"b": (768, rank), "a": (rank, 768)}
    bits = {name: 8 * spec_bytes(change_spec({name: shape}, form)) / 768 / rank for name, shape in shapes.items()}
    assert bits == dict.fromkeys("ba", pytest.approx(expected, abs=0.005))


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize(
    ("shape", "columns"),
    [((65, 63), True), ((65, 64), False), ((7, 6), True), ((6, 7), False), ((7, 7), False), ((70, 2, 3), True)],
    ids=str,
)
def test_short_rows_have_no_scales_of_their_own_beside_longer_columns(
    shape: tuple[int, ...], columns: bool, bits: int
) -> None:
    """Against each group by itself, an entry at a time."""
    change = torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** 3
    matrix = change.reshape(shape[0], -1)
    message = encode_change({"w": change}, ChangeForm(bits))
    made = [plainly(group, bits) for group in (matrix.T if columns else matrix)]
    scales = torch.cat([own for own, _ in made]).view(message["scales"].shape)
    torch.testing.assert_close(message["scales"], scales, rtol=2**-7, atol=0)  # sums in another order
    codes = unpack_codes(message["codes"], change.numel(), bits).tolist()
    assert codes == [code for _, own in made for code in own]
    back = decode_change(message, {"w": shape}, ChangeForm(bits))["w"].reshape(matrix.shape)
    signs = torch.sign(matrix)
    if bits == 1:
        steps = message["scales"].float()
        assert torch.equal(back, signs * (steps if columns else steps[:, None]))
    assert torch.equal(torch.sign(back)[back != 0], signs[back != 0])


def test_rows_by_hand() -> None:
    rows = {"w": torch.tensor([[4.0, -2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 1.0, -1.0]])}
    assert decode_change(encode_change(rows, ChangeForm(1)), {"w": (3, 3)}, ChangeForm(1))["w"].tolist() == [
        [2, -2, 2],
        [0, 0, 0],
        [-1, 1, -1],
    ]
    two = decode_change(encode_change(rows, ChangeForm(2)), {"w": (3, 3)}, ChangeForm(2))["w"]
    assert two.tolist() == [[4, -1, 1], [0, 0, 0], [-1, 1, -1]], "two levels: 4, and the mean of 2 and 0"
    eight = decode_change(encode_change(rows, ChangeForm(8)), {"w": (3, 3)}, ChangeForm(8))["w"]
    assert torch.allclose(eight, rows["w"], atol=4 / 254)


def test_the_largest_by_hand() -> None:
    change, form = {"w": torch.tensor([0.1, -3.0, 0.2, 0.3, 3.0, 0.3, 0.0, 0.0])}, ChangeForm(1, 0.25)
    arrived = decode_change(encode_change(change, form), {"w": (8,)}, form)["w"]
    assert arrived.tolist() == [0, -3, 0, 0, 3, 0, 0, 0]
    equal = {"w": torch.ones(8)}
    assert decode_change(encode_change(equal, form), {"w": (8,)}, form)["w"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@given(some.lists(some.integers(-3, 3), min_size=1, max_size=60), some.floats(0.01, 0.99))
def test_the_largest_come_before_equal_ones_of_which_the_first_are_sent(values: list[int], density: float) -> None:
    """Many equal ones, by the slow way: all places in the order of their sizes, then of their numbers."""
    form = ChangeForm(8, density)
    count = form.kept(len(values))
    places = sorted(sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:count])
    message = encode_change({"w": torch.tensor(values, dtype=torch.float32)}, form)
    assert unpack_places(message["places"], count, len(values)).tolist() == places


@pytest.mark.parametrize("bits", [8, 4])
def test_an_entry_is_off_by_half_a_step_at_most(bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    change = {"w": torch.randn(200, 64, generator=generator) * torch.logspace(-12, 12, 200)[:, None]}
    error = minus(
        change, decode_change(encode_change(change, ChangeForm(bits)), {"w": (200, 64)}, ChangeForm(bits))
    )
    largest = change["w"].abs().amax(1, keepdim=True)
    step = largest / (2 ** (bits - 1) - 1)
    assert (error["w"].abs() <= 0.51 * step + 2**-8 * largest).all(), "and what bf16 rounds off the largest level"


def plainly(group: torch.Tensor, bits: int) -> tuple[torch.Tensor, list[int]]:
    """The scales of one group, and its codes, an entry at a time."""
    size = group.abs()
    low, high = size.min(), size.max()
    if bits == 1:
        low = high = size.mean()
    if bits == 2:
        middle = size.mean()
        for _ in range(3):
            above, below = size[size > middle], size[size <= middle]
            low, high = (below.sum() / len(below), above.sum() / len(above)) if len(above) else (middle, middle)
            middle = (low + high) / 2
    scales = torch.stack([low, high]).to(torch.bfloat16)
    first, last = scales.tolist()
    levels, codes = 2 ** (bits - 1), []
    for value in group.tolist():
        step = (last - first) / max(1, levels - 1)
        level = min(levels - 1, max(0, round((abs(value) - first) / step))) if step else 0
        codes.append(level + levels * (value < 0))
    return scales[:1] if bits == 1 else scales, codes


@pytest.mark.parametrize("kept", [1, 3, 51, 127, 128, 129, 256, 300])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_group_has_the_scales_of_its_own_entries(bits: int, kept: int) -> None:
    """Whole groups and the last one, which may have fewer than 128 entries."""
    generator, form = torch.Generator().manual_seed(kept), ChangeForm(bits, 0.5)
    change = torch.zeros(2 * kept)
    places = torch.randperm(2 * kept, generator=generator)[:kept].sort().values
    change[places] = 1 + torch.rand(kept, generator=generator) ** 4
    change[places[-1]] = -9.0
    message = encode_change({"w": change}, form)
    expected = [plainly(group, bits) for group in change[places].split(128)]
    scales = torch.cat([own for own, _ in expected]).view(message["scales"].shape)
    torch.testing.assert_close(message["scales"], scales, rtol=0, atol=0)
    codes = unpack_codes(message["codes"], kept, bits).tolist()
    assert codes == [code for _, own in expected for code in own]


@pytest.mark.parametrize("shapes", [{"w": (3,)}, {"w": (2, 4), "b": (2,)}], ids=str)
@pytest.mark.parametrize("form", [ChangeForm(1, 1.0, True), ChangeForm(1, 0.5), ChangeForm(1, 0.5, True)], ids=str)
def test_what_is_left_of_a_small_part_stays_bounded(form: ChangeForm, shapes: dict[str, tuple[int, ...]]) -> None:
    """The same change in every round, in parts with fewer entries than a group."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        change = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        left, sizes = {name: torch.zeros(shape) for name, shape in shapes.items()}, []
        for _ in range(200):
            whole = {name: change[name] + left[name] for name in change}
            left = minus(whole, decode_change(encode_change(whole, form), shapes, form))
            sizes.append(squares(left))
        assert max(sizes) < 100 * squares(change)


@QUICK
@given(seed=some.integers(0, 999), power=some.sampled_from([1, 3, 5]), form=some.sampled_from(FORMS))
def test_every_message_takes_something_off_what_is_to_be_sent(seed: int, power: int, form: ChangeForm) -> None:
    """A contraction: what error feedback needs to converge (Karimireddy et al. 2019, assumption A)."""
    change = drawn(seed, power)
    left = minus(change, decode_change(encode_change(change, form), SHAPES, form))
    assert squares(left) < squares(change)


@pytest.mark.parametrize("form", [*FORMS[::3], ChangeForm(1, 0.05)], ids=str)
def test_with_error_feedback_the_sum_arrives(form: ChangeForm) -> None:
    """What was sent and what is left are what was to be sent; what is left does not grow for ever."""
    codec = DeltaCodec(StateCodec("fp32"), form, form)
    reference, residual = drawn(5), {}
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sizes = []
    for times in range(1, 301):
        change = drawn(times, 1)
        learned = {name: reference[name] + change[name] for name in change}
        message, residual = codec.encode(learned, reference, residual)
        arrived = minus(codec.decode(message, reference), reference)
        total = {name: total[name] + change[name] - arrived[name] for name in total}
        assert squares(minus(total, residual)) < 1e-6 * (1 + squares(residual)) * times
        sizes.append(squares(residual))
    if form.density >= 0.05:
        assert max(sizes[200:]) < 2 * max(sizes[100:200])


def test_without_error_feedback_small_changes_never_arrive() -> None:
    """The same sum, with and without what the messages left out."""
    codec = DeltaCodec(StateCodec("fp32"), ChangeForm(1, 0.05), ChangeForm())
    reference = {"w": torch.zeros(100)}
    change = {"w": torch.linspace(0.1, 1, 100)}
    summed = {True: torch.zeros(100), False: torch.zeros(100)}
    for feedback, total in summed.items():
        residual: Tensors = {}
        for _ in range(300):
            message, left = codec.encode(change, reference, residual)
            residual = left if feedback else {}
            total += codec.decode(message, reference)["w"]
    assert (summed[True] / 300 - change["w"]).abs().max() < 0.15
    assert (summed[False] / 300)[0] == 0


@pytest.mark.parametrize("form", FORMS[::5], ids=str)
def test_the_order_of_the_tensors_does_not_matter(form: ChangeForm) -> None:
    change = drawn()
    turned = dict(reversed(change.items()))
    one, other = encode_change(change, form), encode_change(turned, form)
    assert all(torch.equal(one[name], other[name]) for name in one)
    shapes = dict(reversed(SHAPES.items()))
    back, again = decode_change(one, SHAPES, form), decode_change(one, shapes, form)
    assert all(torch.equal(back[name], again[name]) for name in back)


@pytest.mark.parametrize("size", [1, 2, 64, 1024])
def test_a_rotation_keeps_lengths_and_can_be_undone(size: int) -> None:
    blocks = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    turned = rotate(blocks)
    assert torch.allclose(turned.norm(dim=1), blocks.norm(dim=1), rtol=1e-5)
    assert torch.allclose(rotate(turned, back=True), blocks, atol=1e-5)
    if size == 1024:
        peak = torch.zeros(1, size)
        peak[0, 17] = 1
        assert rotate(peak).abs().max() < 0.04, "one large entry is spread over all"


SPARSE, TURNED = ChangeForm(2, 0.05), ChangeForm(1, 0.05, True)
EMPTY = torch.zeros(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("form", "name", "change", "words"),
    [
        (SPARSE, "places", lambda t: t * 0, "places: are 0 places, must be 101"),
        (SPARSE, "places", lambda t: t | 255, "places: are .* places, must be 101"),
        (SPARSE, "places", lambda t: t[:-1], "places: is torch.uint8"),
        (SPARSE, "places", lambda t: t.int(), "places: is torch.int32"),
        (SPARSE, "scales", lambda t: t * torch.nan, "scales: holds a value that is not finite"),
        (SPARSE, "scales", lambda t: t + torch.inf, "scales: holds a value that is not finite"),
        (SPARSE, "scales", lambda t: -t, "scales: must be 0 or more"),
        (SPARSE, "scales", lambda t: t.float(), "scales: is torch.float32"),
        (SPARSE, "codes", lambda t: torch.cat([t, t]), "codes: is torch.uint8"),
        (ChangeForm(8), "codes", lambda t: t[:-1], "codes: is torch.uint8"),
        (TURNED, "window", lambda t: t * 0 - 1, "window: must begin from 0 to 973"),
        (TURNED, "window", lambda t: t * 0 + 974, "window: must begin from 0 to 973"),
        (TURNED, "window", lambda t: t.repeat(2), "window: is torch.int16"),
    ],
)
def test_a_message_that_is_none_is_refused(form: ChangeForm, name: str, change: Any, words: str) -> None:
    wire = Wire(DeltaCodec(StateCodec("fp32"), form, ChangeForm()))
    message = encode_change(drawn(), form)
    wire.check(message, SHAPES, True)
    with pytest.raises(WireError, match=words):
        wire.check({**message, name: change(message[name])}, SHAPES, True)
    with pytest.raises(WireError, match="names differ"):
        wire.check({**message, "more": EMPTY}, SHAPES, True)
    with pytest.raises(WireError, match="names differ"):
        wire.check({}, SHAPES, True)


def test_two_equal_places_are_refused() -> None:
    """A place that is sent twice would count twice, or once, by whose turn it is."""
    form = ChangeForm(8, 0.01)
    message = encode_change({"w": torch.arange(1000.0)}, form)
    check_change(message, {"w": (1000,)}, form)
    low = message["places"].clone()
    low[:7] = 0  # the low six bits of each: what differed in them alone is now equal
    with pytest.raises(WireError, match="places: are not ascending places below 1000"):
        check_change({**message, "places": low}, {"w": (1000,)}, form)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_a_change_that_is_not_finite_is_refused_by_its_receiver(form: ChangeForm, value: float) -> None:
    change = drawn()
    change["b.weight"][3, 4] = value
    wire = Wire(DeltaCodec(StateCodec("fp32"), form, form))
    message, _ = wire.encode(change, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    with pytest.raises(WireError, match="scales: holds a value that is not finite"):
        wire.check(message, SHAPES, True)


def test_without_a_reference_whole_states_travel() -> None:
    codec = job_codec("fp16", ((8, 1.0, False), (1, 0.1, False)))
    assert isinstance(codec, DeltaCodec)
    assert (codec.up, codec.down) == (ChangeForm(8), ChangeForm(1, 0.1))
    message, left = codec.encode(drawn(), None, {})
    assert left == {}
    assert all(torch.equal(tensor, drawn()[name].half()) for name, tensor in message.items())
    assert all(
        torch.equal(tensor, drawn()[name].half().float()) for name, tensor in codec.decode(message, None).items()
    )
    assert isinstance(job_codec("fp16", None), StateCodec)


def test_eight_bits_of_everything_are_close_to_the_change_itself() -> None:
    codec = DeltaCodec(StateCodec("fp32"), ChangeForm(8), ChangeForm(8))
    change = drawn(power=1)
    _, left = codec.encode(change, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, {})
    assert squares(left) < 1e-4 * squares(change)
    coarser = replace(codec, up=ChangeForm(4))
    _, more = coarser.encode(change, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, {})
    assert squares(left) < squares(more) < 1e-1 * squares(change)
