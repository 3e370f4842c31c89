"""FedAvg: everything, for everyone, in every round."""

from __future__ import annotations

import pytest

from fedstrata.methods.fedavg import FedAvg
from fedstrata.models.parts import find_parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from tiny import CONFIGS, tiny_model


@pytest.mark.parametrize("kind", ["mlm", "classify"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_everything_is_trained_and_sent(architecture: str, kind: str) -> None:
    parts = find_parts(tiny_model(architecture, kind))
    whole = Plan(layers=(0, 1, 2), train=parts.names, send=parts.names, keep=())
    for round, client in ((0, "a"), (3, "a"), (0, "b")):
        made = FedAvg(rounds=4).plan(parts, kind, round, client, Streams(0))
        made.check(parts)
        assert made == whole


def test_every_client_is_asked_and_nothing_is_preset() -> None:
    assert FedAvg.population == "each"
    assert FedAvg.preset == {}
    assert FedAvg().rounds == 5
