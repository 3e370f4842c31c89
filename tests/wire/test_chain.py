"""Changes on the way down: whatever versions a client missed, it ends with the same bits as all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.wire.chain import Chains, check_received, named, receive, saved, steps_of
from fedstrata.wire.codec import Codec, StateCodec, Wire, WireError, make_codec, payload_bytes
from fedstrata.wire.delta import job_codec
from fedstrata.wire.dry import DryWire

SHAPES = {"b.weight": (40, 50), "a.bias": (50,)}
FORMS = [
    ("fp32", (8, 1.0, False)),
    ("fp32", (1, 1.0, False)),
    ("fp16", (1, 0.05, False)),
    ("bf16", (2, 0.05, True)),
    ("fp32", (1, 0.001, False)),
]


def wire_of(dtype: str, form: tuple[int, float, bool]) -> Wire:
    return Wire(job_codec(dtype, (form, form)))


def drawn(seed: int, size: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def moved(weights: Tensors, seed: int) -> Tensors:
    change = drawn(seed, 0.01)
    return {name: weights[name] + change[name] for name in weights}


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("dtype", "form"), FORMS)
def test_clients_that_missed_versions_hold_what_the_others_hold(dtype: str, form: tuple[int, float, bool]) -> None:
    """Some take every version, some every third; versions that nobody is sent are no step of the chain."""
    wire, weights = wire_of(dtype, form), drawn(0)
    chains = Chains(wire, {"part": weights})
    clients: dict[int, tuple[int, Tensors]] = dict.fromkeys((1, 2, 3, 7), (0, weights))
    whole, kinds = wire.size(SHAPES), set()
    for version in range(1, 30):
        weights = moved(weights, version)
        for every, held in clients.items():
            if version % every == 0 and version not in (10, 11):
                shared = chains.advance("part", version, weights)
                message = chains.message("part", held[0])
                assert message is chains.message("part", held[0]), "encoded once"
                before = check_received(wire, message, SHAPES, version)
                assert before in (None, held[0])
                assert payload_bytes(message) <= whole
                kinds.add((before is None, len(steps_of(message)) > 1))
                clients[every] = version, receive(wire, message, held)
                assert equal(clients[every][1], shared)
                assert equal(wire.decode(wire.encode(shared)[0]), shared), "a whole part leads to the same bits"
                all_steps = chains.message("part", 0)
                assert equal(receive(wire, all_steps, held), shared), "steps that were taken are not taken again"
    assert kinds == {(False, False), (False, True), (True, False)} or form[1] < 1 or form[0] < 8
    assert not equal(chains.each["part"].held, weights)


@pytest.mark.parametrize(("dtype", "form"), FORMS[:4])
def test_what_one_change_leaves_out_the_next_ones_bring(dtype: str, form: tuple[int, float, bool]) -> None:
    wire, weights = wire_of(dtype, form), drawn(0)
    chains, target = Chains(wire, {"part": weights}), moved(weights, 1)
    far = [
        sum(float((held[name] - target[name]).square().sum()) for name in target)
        for held in (chains.advance("part", version, target) for version in range(1, 150))
    ]
    start = sum(float((weights[name] - target[name]).square().sum()) for name in target)
    rounding = {"fp32": 1e-12, "fp16": 2.0**-22, "bf16": 2.0**-14}[dtype] * sum(
        float(tensor.square().sum()) for tensor in target.values()
    )
    assert far[0] < start
    assert far[-1] < 1e-3 * start + rounding


def test_a_whole_part_is_sent_where_the_changes_are_longer() -> None:
    wire, weights = wire_of("fp32", (8, 1.0, False)), drawn(0)
    chains = Chains(wire, {"part": weights})
    for version in range(1, 6):
        weights = moved(weights, version)
        chains.advance("part", version, weights)
    assert len(chains.each["part"].steps) == 3, "four changes of 8 bits with their scales are longer than fp32"
    assert [len(steps_of(chains.message("part", before))) for before in range(6)] == [0, 0, 3, 2, 1, 0]
    assert payload_bytes(chains.message("part", 1)) == wire.size(SHAPES)
    assert equal(chains.message("part", 0), chains.each["part"].held)


def test_a_change_that_is_longer_than_the_part_is_not_sent() -> None:
    """Of a rotated vector of 65 entries 128 are sent."""
    wire = wire_of("fp16", (8, 1.0, True))
    start = {"bias": torch.zeros(65)}
    chains = Chains(wire, {"part": start})
    held = chains.advance("part", 1, {"bias": torch.full((65,), 1 / 3)})
    assert steps_of(chains.message("part", 0)) == []
    assert torch.equal(held["bias"], torch.full((65,), 1 / 3).half().float()), "as good as states are"


def test_a_chain_that_was_saved_goes_on_as_it_would_have() -> None:
    wire, weights = wire_of("fp16", (1, 0.05, False)), drawn(0)
    one, other = Chains(wire, {"part": weights}), Chains(wire, {"part": weights})
    for version in range(1, 12):
        weights = moved(weights, version)
        one.advance("part", version, weights)
        other.advance("part", version, weights)
        files = saved(other.each["part"])
        other = Chains(wire, {"part": drawn(0)})
        other.restore("part", version, files["held-"], files["changes-"])
        assert equal(one.message("part", 0), other.message("part", 0))
    assert len(steps_of(one.message("part", 0))) == 11


@pytest.mark.parametrize(("dtype", "form"), FORMS)
def test_a_forecast_sends_the_same_bytes(dtype: str, form: tuple[int, float, bool]) -> None:
    wire, weights = wire_of(dtype, form), drawn(0)
    dry = DryWire(wire.codec)
    meta = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    chains, costs = Chains(wire, {"part": weights}), Chains(dry, {"part": meta})
    for version in range(1, 8):
        weights = moved(weights, version)
        chains.advance("part", version, weights)
        costs.advance("part", version, meta)
        for before in range(version):
            sizes = [payload_bytes(each.message("part", before)) for each in (chains, costs)]
            assert sizes[0] == sizes[1] == sum(t.nbytes for t in chains.message("part", before).values())


def chain_message() -> tuple[Wire, Tensors]:
    wire, weights = wire_of("fp32", (1, 0.05, False)), drawn(0)
    chains = Chains(wire, {"part": weights})
    for version in (3, 4, 6):
        weights = moved(weights, version)
        chains.advance("part", version, weights)
    return wire, dict(chains.message("part", 0))


def only(*steps: str) -> Any:
    return lambda message: {key: t for key, t in message.items() if key.partition(":")[0] in steps}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only("0-3", "4-6"), "its changes do not lead to version 6"),
        (only("0-3", "3-4"), "its changes do not lead to version 6"),
        (
            lambda m: {**m, **{f"4-5:{key[4:]}": t for key, t in only("4-6")(m).items()}},
            "do not lead to version 6",
        ),
        (lambda m: {f"6-6:{key[4:]}": t for key, t in only("4-6")(m).items()}, "do not lead to version 6"),
        (lambda m: {f"7-6:{key[4:]}": t for key, t in only("4-6")(m).items()}, "do not lead to version 6"),
        (lambda m: {**m, "b.weight": torch.zeros(40, 50)}, "names differ"),
        (lambda m: {**m, "4-6:more": torch.zeros(1)}, "names differ from the plan's: more"),
        (
            lambda m: {key: t for key, t in m.items() if key != "3-4:places"},
            "names differ from the plan's: places",
        ),
        (lambda m: {**m, "3-4:places": m["3-4:places"] * 0}, "places: are 0 places"),
        (lambda m: {**m, "3-4:codes": m["3-4:codes"][1:]}, "codes: is torch.uint8"),
        (lambda m: {**m, "0-3:scales": m["0-3:scales"] * torch.nan}, "scales: holds a value that is not finite"),
        (lambda m: {}, "names differ"),
    ],
)
def test_a_chain_that_leads_nowhere_is_refused(change: Any, words: str) -> None:
    wire, message = chain_message()
    assert check_received(wire, message, SHAPES, 6) == 0
    assert check_received(wire, only("3-4", "4-6")(message), SHAPES, 6) == 3
    with pytest.raises(WireError, match=words):
        check_received(wire, change(message), SHAPES, 6)


def test_changes_are_refused_where_whole_parts_travel() -> None:
    _, message = chain_message()
    with pytest.raises(WireError, match="names differ"):
        check_received(Wire(StateCodec("fp32")), message, SHAPES, 6)
    step = steps_of(message)[0]
    assert named(step).keys() == {"0-3:codes", "0-3:scales", "0-3:places"}


@pytest.mark.parametrize("codec", [make_codec("int8"), job_codec("fp32", ((8, 1.0, True),) * 2)])
def test_scales_with_which_weights_are_no_numbers_are_refused(codec: Codec) -> None:
    """A site took them, as each scale is finite, trained on infinity and answered a loss that is no number."""
    wire, old = Wire(codec), drawn(0)
    chains = Chains(wire, {"part": old}) if wire.chained else None
    message = chains.message("part", 0) if chains and chains.advance("part", 1, drawn(1)) else wire.encode(old)[0]
    huge = {name: torch.full_like(t, 3e38) if "scale" in name else t for name, t in message.items()}
    assert check_received(wire, huge, SHAPES, 1) == (0 if chains else None)
    with pytest.raises(WireError, match="is not finite once multiplied by its scale"):
        receive(wire, huge, (0, old))
