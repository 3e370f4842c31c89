"""Trainers, scorers and servers over tiny models, put together as a run does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.client.answer import ClientRuntime
from fedstrata.client.model_pass import WholePass
from fedstrata.client.scorer import FeatureCaches, Scorer
from fedstrata.client.trainer import StepCallback, Trainer, drain
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.tokens import tokenize
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.kinds import Index, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Batch, Examples, Task
from fedstrata.wire.activations import stream_form
from fedstrata.wire.codec import Wire, make_codec
from tiny import SENTENCES, tokenizer, train_config


def make_runtime(
    model: Any, task: Task, dtype: str = "fp32", parts: Parts | None = None, **train: Any
) -> ClientRuntime:
    """The roles over a model; ``train`` are keys of ``[train]``."""
    working, streams = WorkingModel(model, parts or find_parts(model)), Streams(0)
    config = train_config(**train)
    return ClientRuntime(
        working=working,
        trainer=Trainer(working, task, config, streams),
        scorer=Scorer(working, task, config, streams),
        caches=FeatureCaches(working, task, config, lambda done, total: None),
        wire=Wire(make_codec(dtype)),
        dtype=dtype,
        stream=stream_form((dtype, 1.0), (dtype, 1.0)),
    )


def weights_of(working: WorkingModel) -> Weights:
    """A copy of every part's tensors."""
    return {
        part: {name: t.clone() for name, t in part_tensors(working.model, working.parts, [part]).items()}
        for part in working.parts.names
    }


def sentences() -> Examples:
    """The sentences with their labels as classes."""
    tokens = tokenize([text for text, _ in SENTENCES], tokenizer(), 32, "truncate")
    names = sorted({label for _, label in SENTENCES})
    return Examples(tokens, np.asarray([names.index(label) for _, label in SENTENCES]))


def train_request(plan: Plan, round: int = 0, client: str = "a") -> Request:
    """To train, with nothing to receive."""
    return Request(round, client, plan, "train", {}, {})


def drawn_batches(
    trainer: Trainer, index: Index, examples: Examples | None = None, round: int = 0, client: str = "a"
) -> list[Batch]:
    """The batches of a round as the client draws them."""
    request = train_request(Plan((), ()), round, client)
    drawn = trainer._steps(request, examples or sentences(), index)
    return [batch for _, batches in drawn for _, batch in batches]


def train_round(
    runtime: ClientRuntime,
    plan: Plan,
    index: Index | None = None,
    client: str = "a",
    callback: StepCallback = lambda *_: None,
    round: int = 0,
) -> Reply:
    """Train one round on the sentences with the whole of the plan's local model."""
    index = np.arange(len(SENTENCES)) if index is None else index
    model_pass, request = WholePass(runtime.working, plan), train_request(plan, round, client)
    return drain(runtime.trainer.run(request, sentences(), index, model_pass, {}, callback))[0]


def assert_same_tensors(one: Path, other: Path) -> None:
    """Every file of tensors below one run's folder has the same bytes below the other's."""
    files = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert files
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
