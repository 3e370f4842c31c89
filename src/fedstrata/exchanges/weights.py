"""The exchange of weights: clients train parts of the model and send them; their aggregate is the next model."""

from __future__ import annotations

from fedstrata.client.answer import Work, evaluate_with, receive, train_with
from fedstrata.client.feature_cache import FeatureCache
from fedstrata.client.frozen_layers import FrozenLayersPass, KeptStates, KeptTexts
from fedstrata.client.model_pass import ModelPass, plain_pass
from fedstrata.exchanges.dry import dry_evaluate, dry_receive, dry_train
from fedstrata.exchanges.exchange import Exchange, PlainHalf, fits_plan, no_notes, nothing_more
from fedstrata.plan.disclosure import SENT


def pass_of(work: Work, cache: FeatureCache | None) -> ModelPass:
    """The client holds the whole of its local model."""
    train, plan, working = work.runtime.trainer.train, work.request.plan, work.runtime.working
    if work.request.phase == "train" and train.cache_frozen_layers and plan.frozen_layers(working.parts):
        index, width = work.data.index, working.parts.hidden
        texts = KeptTexts(work.data.train.tokens.lengths[index], width, train)
        kept = KeptStates(texts, width, work.data.store.folder / "frozen-layers")
        return FrozenLayersPass(working, plan, train, index, kept)
    return plain_pass(work.runtime.working, work.request.plan, cache, work.request.first)


EXCHANGE = Exchange(
    payload="weights",
    permission=SENT["weights"],
    handlers={"train": train_with(pass_of), "evaluate": evaluate_with(pass_of), "receive": receive},
    sends=lambda plan: bool(plan.send),
    fits=fits_plan,
    server=lambda context: PlainHalf(),
    dry_handlers={"train": dry_train, "evaluate": dry_evaluate, "receive": dry_receive},
    dry_server=lambda context: PlainHalf(),
    forecast=nothing_more,
    notes=no_notes,
)
