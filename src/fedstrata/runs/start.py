"""The model that a stage starts from: its weights, and what tells it from another one."""

from __future__ import annotations

from fedstrata.client.answer import ClientRuntime
from fedstrata.models import checkpoints
from fedstrata.models.configs import config_text
from fedstrata.models.parts import part_tensors
from fedstrata.plan.kinds import Weights
from fedstrata.server.state import fingerprint


def start_weights(runtime: ClientRuntime) -> Weights:
    """A copy of the model's parts."""
    model, parts = runtime.working.model, runtime.working.parts
    return {
        part: {name: t.to("cpu", copy=True) for name, t in part_tensors(model, parts, [part]).items()}
        for part in parts.names
    }


def start_digest(weights: Weights, loaded: checkpoints.Loaded) -> str:
    """Tells whether a run that goes on starts from the same model: from its weights, config and tokenizer."""
    return fingerprint(weights, config_text(loaded.model.config) + checkpoints.tokenizer_text(loaded.tokenizer))
