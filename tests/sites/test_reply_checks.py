"""What a score must hold is what an honest site's score holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.job.tables import Task
from fedstrata.plan.kinds import Phase, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Part, Parts
from fedstrata.plan.plan import Plan
from fedstrata.server.server import Server
from fedstrata.sites.reply_checks import check_reply, needed_metrics
from fedstrata.tasks.classify import Classify, positive_classes
from fedstrata.tasks.clm import CausalLM
from fedstrata.tasks.mlm import masked_lm
from fedstrata.tasks.regress import Regress
from fedstrata.tasks.tag import Tag
from fedstrata.tasks.task import Predicted
from fedstrata.wire.codec import Wire, WireError, make_codec

PAIR, THREE = ("no", "yes"), ("eye", "heart", "kidney")


@pytest.mark.parametrize(
    ("table", "labels"),
    [
        ({"kind": "mlm"}, None),
        ({"kind": "clm"}, None),
        ({"kind": "classify"}, PAIR),
        ({"kind": "classify"}, THREE),
        ({"kind": "classify", "positive": ["eye"]}, THREE),
        ({"kind": "pair"}, PAIR),
        ({"kind": "pair"}, THREE),
        ({"kind": "regress"}, None),
        ({"kind": "tag"}, ("O", "B-x", "I-x")),
    ],
)
def test_every_score_has_the_metrics_that_are_needed(
    table: dict[str, Any], labels: tuple[str, ...] | None
) -> None:
    task, names, one = Task(**table), labels or (), np.ones(1, np.int64)
    made: dict[str, Any] = {
        "mlm": masked_lm(None, 10, 0.15, False),
        "clm": CausalLM(0),
        "classify": Classify(0, names, positive_classes(names, task.positive, False), task.kind),
        "regress": Regress(0),
        "tag": Tag(0, names),
    }
    made["pair"] = made["classify"]
    tags = [["O"]] if task.kind == "tag" else one
    assert needed_metrics(task, labels) == set(made[task.kind].metrics([Predicted(tags, tags, 1.0)]))


@pytest.mark.parametrize(("name", "taken", "refused"), [("features", 7e4, 2e6), ("labels", 1e9, 1e13)])
def test_hidden_states_and_numbers_by_which_a_training_overflows_are_refused(
    name: str, taken: float, refused: float
) -> None:
    server: Any = None  # which holds nothing that they are compared with
    for value in (taken, -taken, -refused, refused):
        message = {"features": torch.zeros(2, 1, 4), "labels": torch.zeros(2)}
        message[name][1] = value
        reply = Reply("a", 2, weights={"hidden_states": message})
        request = Request(0, "a", Plan((), ()), "hidden_states", {}, {})
        if abs(value) == taken:
            check_reply(server, request, reply, None)
        else:
            with pytest.raises(WireError, match=f"{name} hold a number of {refused:.0e}".replace("+", ".")):
                check_reply(server, request, reply, None)


@pytest.mark.parametrize(("share", "taken"), [(0.9 / 127, True), (1.1 / 127, False)])
def test_a_scale_of_int8_counts_with_the_whole_numbers_that_it_is_for(share: float, taken: bool) -> None:
    """In int8 numbers of 127 times the largest were taken, of hidden states and of weights."""
    part = Part("head", "head", None, {"w": (2, 4)})
    server = Server(Parts((part,), "", (), 4), {"head": {"w": torch.zeros(2, 4)}}, Wire(make_codec("int8")))
    states = {"features": torch.full((2, 1, 4), 127, dtype=torch.int8), "features:scale": scales(share * 1e6)}
    change = {"w": torch.full((2, 4), 127, dtype=torch.int8), "w:scale": scales(share * 1e4)}
    sent: list[tuple[Phase, Weights]] = [("hidden_states", {"hidden_states": states}), ("train", {"head": change})]
    for phase, weights in sent:
        request = Request(0, "a", Plan((), ("head",), ("head",)), phase, {}, {})
        with nullcontext() if taken else pytest.raises(WireError, match=r":scale .*number of 1.1"):
            check_reply(server, request, Reply("a", 2, weights, loss=1.0), None)


def scales(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.bfloat16)


def test_of_a_task_of_one_s_own_no_score_is_taken_whose_mean_over_the_sites_cannot_be_told() -> None:
    """Two sites with scores of 1.7e308 ended a run: their sum is beyond all floats."""
    server: Any = None
    request = Request(0, "a", Plan((), ()), "evaluate", {}, {})
    for sign in (1.0, -1.0):
        check_reply(server, request, Reply("a", 2, scores={"a": {"luck": sign * 1e300}}), None)
        with pytest.raises(WireError, match=r"its score of luck is .*308, which cannot be"):
            check_reply(server, request, Reply("a", 2, scores={"a": {"luck": sign * 1.7e308}}), None)
