"""The exchange of weights: clients train parts of the model and send them; their aggregate is the next model."""

from __future__ import annotations

from collections.abc import Generator

from fedstrata.client.answer import Work, evaluate_with, receive, train_with
from fedstrata.client.feature_cache import FeatureCache
from fedstrata.client.frozen_layers import FrozenLayersPass, KeptStates, KeptTexts
from fedstrata.client.model_pass import ModelPass, plain_pass
from fedstrata.client.sums import sum_step, train_for_sum
from fedstrata.exchanges.buffered import BoundHalf, BufferedHalf
from fedstrata.exchanges.dry import dry_evaluate, dry_receive, dry_train
from fedstrata.exchanges.dry_sums import dry_sum_step, dry_summed
from fedstrata.exchanges.exchange import (
    DryContext,
    Exchange,
    PlainHalf,
    SumSigning,
    fits_plan,
    no_notes,
    nothing_more,
)
from fedstrata.exchanges.sums import DrySummedHalf, SummedHalf
from fedstrata.plan.disclosure import SENT
from fedstrata.plan.kinds import SUM_PHASES
from fedstrata.plan.messages import Reply


def pass_of(work: Work, cache: FeatureCache | None) -> ModelPass:
    """The client holds the whole of its local model."""
    train, plan, working = work.runtime.trainer.train, work.request.plan, work.runtime.working
    if work.request.phase == "train" and train.cache_frozen_layers and plan.frozen_layers(working.parts):
        index, width = work.data.index, working.parts.hidden
        texts = KeptTexts(work.data.train.tokens.lengths[index], width, train)
        kept = KeptStates(texts, width, work.data.store.folder / "frozen-layers")
        return FrozenLayersPass(working, plan, train, index, kept)
    return plain_pass(work.runtime.working, work.request.plan, cache, work.request.first)


def train(work: Work) -> Generator[None, None, Reply]:
    """The phase ``train``: parts travel as they are, or in masked sums."""
    return (_train_for_sum if work.runtime.sums else _train)(work)


def _plain(buffer: int | None) -> PlainHalf:
    """The server's half where parts travel as they are."""
    return PlainHalf() if buffer is None else BufferedHalf(buffer)


def _dry(context: DryContext) -> PlainHalf:
    """The server's half as a forecast plays it."""
    if context.sums:
        return DrySummedHalf(SumSigning(equal_weights=context.equal_weights))
    return BoundHalf() if context.bound else _plain(context.buffer)


_train, _train_for_sum = train_with(pass_of), train_for_sum(pass_of)

EXCHANGE = Exchange(
    payload="weights",
    permission=SENT["weights"],
    handlers={
        "train": train,
        "evaluate": evaluate_with(pass_of),
        "receive": receive,
        **dict.fromkeys(SUM_PHASES, sum_step),
    },
    sends=lambda plan: bool(plan.send),
    fits=fits_plan,
    server=lambda context: _plain(context.buffer) if context.sums is None else SummedHalf(context.sums),
    dry_handlers={
        "train": lambda context, request: (dry_summed if context.sums else dry_train)(context, request),
        "evaluate": dry_evaluate,
        "receive": dry_receive,
        **dict.fromkeys(SUM_PHASES, dry_sum_step),
    },
    dry_server=_dry,
    forecast=nothing_more,
    notes=no_notes,
)
