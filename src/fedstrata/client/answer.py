"""A client's answer to a request: load, train or score, keep, send. The same on every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from fedstrata.client.between import keep_own, own_values
from fedstrata.client.feature_cache import FEATURES, ROWS, FeatureCache
from fedstrata.client.model_pass import ModelPass
from fedstrata.client.private import Draw, Private
from fedstrata.client.scorer import FeatureCaches, Scorer
from fedstrata.client.sum_rules import SumRules
from fedstrata.client.trainer import StepCallback, Trainer
from fedstrata.client.working_model import WorkingModel
from fedstrata.errors import UserError
from fedstrata.models.cut import SplitLink
from fedstrata.plan.kinds import Index, Phase, Tensors, Weights
from fedstrata.plan.messages import Reply, Request, Tagged
from fedstrata.privacy.noise import DIVERGED, LOG
from fedstrata.tasks import Examples
from fedstrata.wire.activations import StreamForm
from fedstrata.wire.codec import Wire
from fedstrata.wire.finite import not_finite
from fedstrata.wire.partial import filled, travelling
from fedstrata.wire.store import Store


@dataclass(frozen=True)
class ClientRuntime:
    """The roles that play a client, over one model.

    Attributes:
        working: the model.
        trainer: trains it.
        scorer: scores it.
        caches: of a frozen encoder's hidden states.
        wire: how parts travel.
        dtype: how hidden states travel that are sent once.
        stream: how those of batches travel, and their gradients.
        sums: of the masked sums in which parts travel; None where they travel as they are.
        private: noise over what leaves a client; None without any.
    """

    working: WorkingModel
    trainer: Trainer
    scorer: Scorer
    caches: FeatureCaches
    wire: Wire
    dtype: str
    stream: StreamForm
    sums: SumRules | None = None
    private: Private | None = None


@dataclass(frozen=True)
class ClientData:
    """What one client has.

    Attributes:
        train: training examples, of which
        index: these are the client's own.
        test: test examples.
        tests: whose test examples it is scored on -> those; empty where all of ``test`` serves everyone.
        store: its own disk.
    """

    train: Examples
    index: Index
    test: Examples
    tests: Mapping[str, Index]
    store: Store


@dataclass(frozen=True)
class Work:
    """One request at the client that it is for.

    Attributes:
        runtime: plays the client.
        request: what is asked.
        shared: the shared parts that the client holds, the request's own included, fp32.
        data: what the client has.
        callback: called after every step.
        copied: the reply holds copies of the model's tensors; else some may be the model's own, which the next
            request changes.
        link: the way to the layers that the server holds, where the plan says so.
    """

    runtime: ClientRuntime
    request: Request
    shared: Tagged
    data: ClientData
    callback: StepCallback
    link: SplitLink | None = None
    copied: bool = True


Handler = Callable[[Work], Generator[None, None, Reply]]
Handlers = Mapping[Phase, Handler]
"""Phase -> what a client does in it. A handler yields after every training step."""
PassOf = Callable[[Work, FeatureCache | None], ModelPass]
"""Makes the way of a client's batches through the model."""
Connect = Callable[[Request], AbstractContextManager[SplitLink | None]]
"""Opens the way to the server's layers for a request; None where there are none."""


def answer_request(work: Work, handlers: Handlers) -> Generator[None, None, Reply]:
    """Answer a request by the handler of its phase; it yields after every training step."""
    started = time.perf_counter()
    reply = yield from handlers[work.request.phase](work)
    if reply.seconds:
        return reply
    return replace(reply, seconds=time.perf_counter() - started)


def load_parts(work: Work) -> None:
    """Put the parts that the request needs into the model: shared ones, and the client's personal ones."""
    request, parts = work.request, work.runtime.working.parts
    before = request.round + (request.phase == "evaluate")
    kept = work.data.store.load(before) if request.plan.keep else {}
    personal = {
        part: (None, {name: kept[name] for name in parts.shapes[part]}) if kept else work.shared[part]
        for part in request.plan.keep
    }
    own = {
        part: (None, value) for part, value in own_values(work.data.store, request, work.runtime.working).items()
    }
    work.runtime.working.load({**{part: work.shared[part] for part in request.versions}, **personal, **own})


def training_start(work: Work, memory: Tensors) -> Weights:
    """All tensors that a round of training starts from, by where they come from; the parts must be loaded.

    Args:
        work: the request.
        memory: of the optimizer.
    """
    request, working = work.request, work.runtime.working
    received = {part: work.shared[part][1] for part, _ in request.plan.between}  # the client may have its own
    return {"memory": memory, "model": working.tensors(request.plan.builds(working.parts)), **received}


def feature_cache(work: Work) -> FeatureCache | None:
    """The client's cache where its plan freezes the encoder; the model must be loaded."""
    if not work.request.plan.freeze_encoder:
        return None
    data, private = work.data, work.runtime.private
    rows = 1 if private and private.alone else ROWS
    return work.runtime.caches.open(data.train, data.index, data.store.folder / FEATURES, rows)


Encode = Callable[[Work, Draw | None], Weights]
"""Makes the sent parts as they travel; with noise that is drawn so."""


def encoded_parts(work: Work, draw: Draw | None) -> Weights:
    """The sent parts as they travel, noised if so; what they leave out is kept for the next message.

    Whatever the codec then does, and what it leaves out, depends on the noised message alone.
    """
    runtime, request, store = work.runtime, work.request, work.data.store
    residual, message = store.residual.load(request.round), {}
    for part, tensors in sent_parts(work, draw).items():
        reference = work.shared[part][1] if runtime.wire.changes else None
        encoded, left = runtime.wire.encode(tensors, reference, residual)
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        message[part] = {
            name: tensor.to("cpu", copy=work.copied and tensor.untyped_storage().data_ptr() in own)
            for name, tensor in encoded.items()
        }
        residual.update(left)
    if residual:
        store.residual.save(request.round, residual)
    return message


def sent_parts(work: Work, draw: Draw | None) -> Weights:
    """Part -> its tensors after training, with noise over the change of all that travels where there is noise."""
    request, working, private = work.request, work.runtime.working, work.runtime.private
    sharing = working.parts.sharing
    sent = {part: working.tensors([part]) for part in request.plan.send}
    if private is None or draw is None:
        return sent
    start = {part: work.shared[part][1] for part in sent}
    noised = private.message(
        {part: travelling(tensors, sharing) for part, tensors in sent.items()},
        {part: travelling(tensors, sharing) for part, tensors in start.items()},
        draw,
    )
    return {part: filled(tensors, start[part], sharing) for part, tensors in noised.items()}


def as_if_untrained(work: Work) -> bool:
    """Whether training came to what is not finite; the model is then as before it, and nobody else is told.

    To refuse would tell a server of the client's rows, past any noise, as often as it sends weights that overflow
    for some of them.
    """
    request, working = work.request, work.runtime.working
    plan = request.plan
    if not (name := not_finite(working.tensors((*plan.send, *plan.keep, *plan.later)))):
        return False
    where = f"round {request.round + 1}, client {request.client}: {name}"
    LOG.warning("%s is not finite, so that its training counts as none; %s", where, DIVERGED)
    load_parts(work)
    return True


def train_with(pass_of: PassOf, encode: Encode = encoded_parts) -> Handler:
    """The phase ``train``: what the plan trains is trained, kept and sent as ``encode`` makes it."""

    def handler(work: Work) -> Generator[None, None, Reply]:
        request, runtime, store = work.request, work.runtime, work.data.store
        plan, working = request.plan, runtime.working
        load_parts(work)
        persist = runtime.trainer.train.optimizer_state == "persist"
        memory = store.optimizer.load(request.round) if persist else {}
        model_pass = pass_of(work, feature_cache(work))
        private, examples = runtime.private, len(work.data.index)
        draw = private.draw(request, training_start(work, memory)) if private else None
        noise = private.example_noise(draw, examples) if private and draw else None
        reply, memory = yield from runtime.trainer.run(
            request, work.data.train, work.data.index, model_pass, memory, work.callback, noise
        )
        if private and as_if_untrained(work):
            memory = {}
        kept, later = working.tensors(plan.keep), working.tensors(plan.later)
        if name := not_finite({**kept, **later}):
            raise UserError(
                f"round {request.round + 1}, client {request.client}: its training diverged ({name}, which it "
                "keeps, is not finite); a smaller train.learning_rate helps, with --resume"
            )
        if memory:
            store.optimizer.save(request.round, memory)
        if kept:
            store.save(request.round, kept)
        if later:
            keep_own(store, request, later)
        reply = replace(reply, weights=encode(work, draw))
        return private.told(reply) if private else reply

    return handler


def evaluate_with(pass_of: PassOf) -> Handler:
    """The phase ``evaluate``: the model is scored on the client's test examples."""

    def handler(work: Work) -> Generator[None, None, Reply]:
        request, data, runtime = work.request, work.data, work.runtime
        load_parts(work)
        scores = {}
        on: Mapping[str, Index | None] = data.tests or {request.client: None}
        for name, index in on.items():
            cache = None
            if request.plan.freeze_encoder:
                folder = data.store.folder / f"test-features-{name}"
                every = np.arange(len(data.test)) if index is None else index
                cache = runtime.caches.open(data.test, every, folder)
            scores[name] = runtime.scorer.run(data.test, index, pass_of(work, cache))
        yield from ()
        return Reply(request.client, len(data.index), scores=scores)

    return handler


def receive(work: Work) -> Generator[None, None, Reply]:
    """The phase ``receive``: the parts that came with the request have been taken, and that is all."""
    yield from ()
    return Reply(work.request.client, len(work.data.index))
