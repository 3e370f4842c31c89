"""The training of one stage: server, exchange, engine and clients put together, and the loop run over them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from fedstrata.client.answer import ClientData
from fedstrata.client.model_pass import plain_pass
from fedstrata.client.scorer import Keep
from fedstrata.client.setup import Ready
from fedstrata.client.sum_rules import least_of
from fedstrata.data.prepare import Prepared
from fedstrata.engines.choice import Choice
from fedstrata.engines.local import LocalEngine
from fedstrata.engines.pool import PoolEngine
from fedstrata.engines.processes import Nursery
from fedstrata.errors import UserError
from fedstrata.events import Baseline, Encoded, Event, Noted, StageStarted
from fedstrata.exchanges import EXCHANGES
from fedstrata.exchanges.exchange import ServerContext, SumSigning
from fedstrata.job.aggregate_rules import check_senders
from fedstrata.job.tables import Job, method_name
from fedstrata.models import checkpoints
from fedstrata.models.adapters import adapted_modules
from fedstrata.plan.kinds import Weights
from fedstrata.plan.messages import Engine
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.reports.privacy import privacy_lines
from fedstrata.runs.arrivals import arriving
from fedstrata.runs.committing import committing
from fedstrata.runs.components import Components
from fedstrata.runs.engines import pool_engine, spread_score
from fedstrata.runs.holdings import examples_before, facts_of, note_greeted
from fedstrata.runs.models import Trained, last_plans, personal_parts, save_models, whole_model
from fedstrata.runs.notes import notes
from fedstrata.runs.predictions import LastPredictions, score_whole, wants_predictions, write_predictions
from fedstrata.runs.privacy import privacy_record, scheduled, unknown_lines
from fedstrata.server.aggregate import aggregate_of
from fedstrata.server.cohort import RoundSettings
from fedstrata.server.late import Late
from fedstrata.server.optimizer import make_server_optimizer
from fedstrata.server.products import ExactMean
from fedstrata.server.rounds import Half, Rounds
from fedstrata.server.server import Server
from fedstrata.server.state import ASKED, RunState
from fedstrata.sites.federation import Federation, remote_engine
from fedstrata.sites.remote_run import RemoteStage
from fedstrata.sites.signing import remote_signing
from fedstrata.tasks.task import is_spread
from fedstrata.wire.files import write_bytes

Tell = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        job: its job, every "auto" resolved.
        data: its rows.
        folder: its output folder.
        tell: receives events.
        components: objects of the caller's own.
        federation: the sites; None where the clients are here.
        choice: the engine that plays the clients here.
        nursery: makes worker processes.
        noisy: some stage of the same job has noise.
    """

    job: Job
    data: Prepared
    folder: Path
    tell: Tell
    components: Components = field(default_factory=Components)
    federation: Federation | None = None
    choice: Choice | None = None
    nursery: Nursery | None = None
    noisy: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadyStage(Stage):
    """A stage whose model and examples are loaded.

    Attributes:
        ready: them.
        weights: the server's: at first the start model's, then what they become.
        start: the start model's, for sites; empty where the clients are here.
        state: the run's state on disk, reopened at the round from which it goes on.
    """

    ready: Ready
    weights: Weights
    start: Weights
    state: RunState

    @property
    def clients(self) -> list[str]:
        """The clients' names, in canonical order."""
        return list(self.ready.shards) if self.federation is None else self.federation.names


def train_stage(stage: ReadyStage) -> None:
    """Train a stage, or go on with it from its last committed round, and save its models."""
    job, runtime, folder = stage.job, stage.ready.runtime, stage.folder
    if not stage.components.aggregate:
        check_senders(job, runtime.working.parts, stage.clients)
    runtime.caches.on_encoded = lambda done, total: stage.tell(Encoded(done, total))
    server = _make_server(stage)
    done, seconds = stage.state.restore(server, stage.federation is not None)
    streams = runtime.trainer.streams
    plan = make_plan(job.method, server.parts, job.task.kind, 0, stage.clients[0], streams)
    half = _server_half(stage, server, plan)
    predicted = LastPredictions(len(stage.ready.test))
    with _engine(stage, server, half) as (engine, sizes):
        began = time.monotonic() - seconds  # the wait for sites to connect is no time of the rounds
        lines, always, write = facts_of(folder, job, stage.ready, stage.data, sizes, bool(plan.keep))
        write_bytes(folder / "parts.json", json.dumps(server.parts.records(), indent=1).encode())
        disks = stage.state.store.below("clients")
        rounds = Rounds(
            method=job.method,
            task=job.task.kind,
            server=server,
            engine=arriving(job, engine, sizes, disks, stage.state.records, done),
            half=half,
            streams=streams,
            settings=round_settings(job),
            score=_score(stage, plan, engine, predicted.keep),
            records=stage.state.records,
            commit=committing(stage.state, server, stage.tell, began, (done, job.method.rounds)),
            tell=stage.tell,
        )
        note_greeted(engine, sizes, write)
        stage.tell(_started(stage, done, sizes, lines, always))
        rounds.run(done)
        trained = Trained(job, stage.clients, server, stage.ready.loaded, folder)
        _keep_predictions(trained, stage, rounds, predicted, done)
    save_models(trained)


def _keep_predictions(
    trained: Trained, stage: ReadyStage, rounds: Rounds, last: LastPredictions, done: int
) -> None:
    """Write what the final model predicts; a call that found all rounds ``done`` has to score it for that."""
    job, ready, server = stage.job, stage.ready, trained.server
    several = job.clients.test is not None or personal_parts(job, server.parts, stage.clients)
    if wants_predictions(job) and not several:
        [plan] = last_plans(job, server.parts, stage.clients[:1]).values()
        if plan.keep:  # it is the only client's
            score_whole(ready, whole_model(trained), plan, last.keep)
        elif last.found is None and done == job.method.rounds:
            rounds.score(server)
    if why := write_predictions(job, ready, stage.data.labels, None if several else last, stage.folder):
        stage.tell(Noted(why))


def _started(
    stage: ReadyStage, done: int, sizes: dict[str, int], lines: Sequence[str], always: Baseline
) -> StageStarted:
    """What is said before the first round, after ``done`` rounds of earlier calls."""
    job, tokens = stage.job, int(stage.ready.train.tokens.lengths.sum())
    spent = privacy_record(job, sizes, scheduled(job, stage.clients), stage.tell)
    noted = notes(job, stage.ready.loaded, stage.data, tokens, stage.components.identities())
    said = (*noted, *privacy_lines(spent), *unknown_lines(job, sizes))
    where = stage.choice.line if stage.choice else ""
    name, last = method_name(job.method), job.method.rounds
    epsilon = spent["epsilon"] if spent and spent["clients"] else None
    return StageStarted(job.stage, name, last, done, sizes, said, tuple(lines), always, where, epsilon)


def round_settings(job: Job) -> RoundSettings:
    """How many clients take part, and how often the model is scored."""
    return RoundSettings(
        fraction=job.clients.fraction,
        quorum=job.engine.quorum,
        each_round=job.server.evaluate == "rounds",
        own_tests=job.clients.test is not None,
        sites=job.between_sites,
    )


def _make_server(stage: ReadyStage) -> Server:
    table, own, runtime, weights = stage.job.server, stage.components, stage.ready.runtime, stage.weights
    begin = own.aggregate or aggregate_of(table, stage.folder / "state")
    optimizer = own.server_optimizer or make_server_optimizer(table)
    if stage.job.adapter.kind == "lora" and stage.job.adapter.merge == "exact":
        if own.aggregate or own.server_optimizer:
            raise UserError("[adapter] merge: 'exact' goes with no aggregate or server optimizer of one's own")
        begin = partial(ExactMean, adapted_modules(runtime.working.model), weights)
    late = Late() if stage.job.engine.buffer is None else Late(dict(weights), stage.folder / "state" / ASKED)
    return Server(
        runtime.working.parts, weights, runtime.wire, begin, optimizer, max_norm=table.max_norm, late=late
    )


def _server_half(stage: ReadyStage, server: Server, plan: Plan) -> Half:
    labels = stage.data.labels
    context = ServerContext(
        method=stage.job.method,
        server=server,
        runtime=stage.ready.runtime,
        clients=tuple(stage.clients),
        plan=plan,
        classes=None if labels is None else len(labels),
        max_positions=checkpoints.max_positions(stage.ready.loaded.model),
        store=stage.state.store,
        sums=_sum_signing(stage),
        buffer=stage.job.engine.buffer,
    )
    return EXCHANGES[stage.job.method.exchange].server(context)


def _sum_signing(stage: ReadyStage) -> SumSigning | None:
    """What masked sums are signed with; in one process with nothing."""
    if not stage.job.privacy.sum_only:
        return None
    rules = SumSigning(least=least_of(stage.job), equal_weights=stage.job.privacy.level == "client")
    if stage.federation is None:
        return rules
    return remote_signing(rules, stage.folder, stage.federation.settings)


def _score(stage: ReadyStage, plan: Plan, engine: Engine, keep: Keep) -> Callable[[Server], dict[str, float]]:
    """Scores the server's model on the common test rows, by the workers where there are some."""
    runtime, test, folder = stage.ready.runtime, stage.ready.test, stage.folder / "state" / "test"
    working = runtime.working
    whole = replace(plan, layers=tuple(range(working.parts.depth)), server=())

    def score(server: Server) -> dict[str, float]:
        weights = {part: (_tag(server, part), server.weights[part]) for part in working.parts.names}
        spread = is_spread(runtime.scorer.task) and not plan.freeze_encoder  # whose states are cached
        if spread and isinstance(engine, PoolEngine) and len(test):
            return spread_score(engine, stage.ready, whole, weights, keep)
        working.load(weights)
        cache = None
        if plan.freeze_encoder:
            cache = runtime.caches.open(test, np.arange(len(test)), folder)
        return runtime.scorer.run(test, None, plain_pass(working, whole, cache), keep)

    return score


@contextmanager
def _engine(stage: ReadyStage, server: Server, half: Half) -> Iterator[tuple[Engine, dict[str, int]]]:
    """What reaches the clients, and how many examples each has."""
    if stage.federation is not None:
        remote = RemoteStage(
            job=stage.job,
            labels=stage.data.labels,
            loaded=stage.ready.loaded,
            server=server,
            start=stage.start,
            layers=half.layers,
            folder=stage.folder,
            records=stage.state.records,
            installed=stage.components.installed(),
            agreed=examples_before(stage.folder),
        )
        with remote_engine(remote, stage.federation, stage.tell) as reached:
            yield reached
        return
    ready, stores = stage.ready, stage.state.store.below("clients")
    sizes = {client: len(index) for client, index in ready.shards.items()}
    data = {
        client: ClientData(ready.train, index, ready.test, ready.tests.get(client, {}), stores.below(client))
        for client, index in ready.shards.items()
    }
    shared = {part: server.held(part) for part in server.parts.names}
    if stage.job.engine.name == "pool":
        assert stage.nursery is not None
        with pool_engine(stage.job, ready, data, shared, stage.nursery, stage.tell, stage.folder) as pool:
            yield pool, sizes
        return
    engine = LocalEngine(
        runtimes=[ready.runtime],
        handlers=EXCHANGES[stage.job.method.exchange].handlers,
        data=data,
        shared=shared,
        connect=half.connect,
        interleaved=half.interleaved,
        tell=stage.tell,
    )
    yield engine, sizes


def _tag(server: Server, part: str) -> object:
    """Cache tag: server weights and client weights are identical only for lossless wire types."""
    version = server.versions[part]
    return version if server.wire.lossless or not version else ("server", version)
