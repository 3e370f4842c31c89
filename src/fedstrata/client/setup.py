"""Everything one stage needs, made ready and checked before anything is written or trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedstrata.client.answer import ClientRuntime
from fedstrata.client.frozen_layers import check_frozen_layers
from fedstrata.client.model_options import adapter_of, check_branches, check_head, head_of, with_heads
from fedstrata.client.own_plans import check_own_plans, check_throughout
from fedstrata.client.padding import check_padding
from fedstrata.client.precision import batch_tokens, resolve_precision
from fedstrata.client.private import private_of
from fedstrata.client.scorer import FeatureCaches, Scorer
from fedstrata.client.sharing import check_turns, with_sharing, with_vocabulary
from fedstrata.client.start_model import model_path
from fedstrata.client.sum_rules import check_senders, sum_rules_of
from fedstrata.client.trainer import Trainer
from fedstrata.client.working_model import WorkingModel
from fedstrata.data.prepare import Prepared, population, tested
from fedstrata.errors import UserError, did_you_mean
from fedstrata.events import Counted, Event
from fedstrata.job.buffer_rules import check_no_own_parts, with_arrivals
from fedstrata.job.tables import Job
from fedstrata.methods import METHODS
from fedstrata.models import checkpoints, scratch
from fedstrata.models.configs import config_of
from fedstrata.models.cut import check_cut
from fedstrata.models.families import FP32_ALONE
from fedstrata.plan.kinds import Index
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import INIT, SERVER, Streams
from fedstrata.privacy.per_example import mixing_module
from fedstrata.tasks import Examples, Task, TaskContext, build_task
from fedstrata.tasks.examples import examples
from fedstrata.tasks.tokens import TokenTask
from fedstrata.wire.activations import stream_form
from fedstrata.wire.codec import DTYPES, Codec, Wire
from fedstrata.wire.delta import job_codec

PLANS_TOLD = 20_000
"""Plans between two events about them."""
BuildTask = Callable[[TaskContext], Task]


@dataclass(frozen=True)
class Ready:
    """A stage that can start.

    Attributes:
        runtime: the model with its trainer and scorer.
        loaded: the model with its tokenizer, parts and what was new in it.
        train: all training examples.
        test: the test examples.
        shards: client -> its training examples.
        tests: client -> whose test examples it is scored on -> those; empty where all of ``test`` serves everyone.
    """

    runtime: ClientRuntime
    loaded: checkpoints.Loaded
    train: Examples
    test: Examples
    shards: dict[str, Index]
    tests: dict[str, dict[str, Index]]


def make_ready(
    job: Job,
    data: Prepared,
    start: str,
    away: Sequence[str] = (),
    task: BuildTask | None = None,
    codec: Codec | None = None,
) -> Ready:
    """Load the model, tokenize the rows.

    Args:
        job: the stage's job, settled.
        data: its rows.
        start: folder or hub id of the model to start from.
        away: layers that the server holds.
        task: builds the task, in place of the one that the job names.
        codec: in place of the one that the job names.

    Raises:
        UserError: the model is not usable, or does not fit the job.
    """
    loaded = checkpoints.load(
        start, job.task.kind, data.labels, init_seed(job), job.train.dropout, head_of(job), away, adapter_of(job)
    )
    loaded = replace(loaded, parts=with_sharing(job, loaded.parts, lambda: loaded.tokenizer))
    check_precision(job, loaded.parts)
    job = fit_positions(job, checkpoints.max_positions(loaded.model))
    check_head(job, loaded.model.config)
    check_padding(job, loaded.model)
    own = None if data.tests is None else data.tests.values()
    train = examples(job, data.train, data.labels, loaded.tokenizer, data.shards.values())
    test = examples(job, data.test, data.labels, loaded.tokenizer, own)
    shards = population(job.method.population, data.shards)
    context = TaskContext(job, data.labels, loaded.tokenizer, loaded.model.config.vocab_size)
    tests = tested(job.method.population, data.tests) if data.tests else {}
    built = (task or build_task)(context)
    if isinstance(built, TokenTask):
        for name, rows in (("train", train), ("test", test)):
            if len(rows) and not built.has_targets(rows):
                raise UserError(
                    f"[data] {name}: no token of its rows can be predicted; expected texts that the model's "
                    "tokenizer knows"
                )
    codec = codec or job_codec(job.wire.dtype, job.wire.forms)
    return Ready(
        runtime=make_runtime(job, loaded, built, codec),
        loaded=loaded,
        train=train,
        test=test,
        shards={client: train.tokens.of_rows(rows) for client, rows in shards.items()},
        tests={c: {name: test.tokens.of_rows(rows) for name, rows in each.items()} for c, each in tests.items()},
    )


def make_runtime(job: Job, loaded: checkpoints.Loaded, task: Task, codec: Codec) -> ClientRuntime:
    """The roles over a loaded model.

    Raises:
        UserError: at level ``example`` the model has a module that mixes the examples of a batch.
    """
    train, streams = job.train, Streams(job.train.seed)
    if job.privacy.level == "example" and (mixing := mixing_module(loaded.model)):
        raise UserError(
            f"[privacy] level: 'example' goes with models in which no example depends on others of its batch, and "
            f"{mixing} normalizes over the batch"
        )
    working = WorkingModel(loaded.model, loaded.parts, train.device, train.precision == "bf16")
    return ClientRuntime(
        working=working,
        trainer=Trainer(working, task, train, streams),
        scorer=Scorer(working, task, train, streams),
        caches=FeatureCaches(working, task, train, lambda done, total: None),
        wire=Wire(codec, loaded.parts.sharing),
        dtype=job.wire.dtype if job.wire.dtype in DTYPES else "fp32",
        stream=stream_form(*job.wire.stream),
        sums=sum_rules_of(job),
        private=private_of(job),
    )


def init_seed(job: Job) -> int:
    """The seed of every tensor that no checkpoint gives."""
    return Streams(job.train.seed).integer(-1, SERVER, INIT)


def check_plans(
    job: Job, parts: Parts, clients: Collection[str], tell: Callable[[Event], None] = lambda event: None
) -> None:
    """Make the plans of all rounds and their sampled clients, so that a method objects before any training.

    Args:
        job: the job.
        parts: the model's.
        clients: their names.
        tell: receives an event after every so many plans.

    Raises:
        UserError: the method's options do not fit the model, or name a client that is none.
    """
    _check_named(job, clients)
    check_precision(job, parts)
    streams, names = Streams(job.train.seed), list(clients)
    checked, sent, kept = set[Plan](), dict[str, tuple[str, ...]](), dict[str, set[frozenset[str]]]()
    for round in range(job.method.rounds):
        sampled = sample_clients(names, job.clients.fraction, round, streams)
        check_own_plans(job, parts, round, sampled, kept)
        if any(map(any, kept.values())):  # then all clients are scored, by their plans
            check_own_plans(job, parts, round, names, kept)
        plans = {name: make_plan(job.method, parts, job.task.kind, round, name, streams) for name in sampled}
        check_turns(job, parts, round, plans, sent)
        check_senders(job, round, plans)
        for plan in plans.values():
            if plan not in checked:
                checked.add(plan)
                plan.check(parts)
                check_no_own_parts(job, plan)
                check_branches(job, parts, plan)
                if plan.server:
                    check_cut(parts)
        done = (round + 1) * len(sampled)
        if done // PLANS_TOLD > (done - len(sampled)) // PLANS_TOLD:
            tell(Counted("plans", done, job.method.rounds * len(sampled)))
    check_throughout(job, parts, checked, kept)
    check_frozen_layers(job, parts, checked)
    if job.privacy.level == "client" and not any(plan.send for plan in checked):
        raise UserError(
            "[privacy] level: 'client' noises what clients send, and as set here they send nothing; expected "
            "'example' or 'none'"
        )


def _check_named(job: Job, clients: Collection[str]) -> None:
    """Refuse options by client that name one that there is not; a method of one's own may have other tables."""
    known = {key for kind in METHODS.values() if isinstance(job.method, kind) for key in kind.model_fields}
    options = [(f"[method] {key}", value) for key, value in job.method if key in known]
    for option, value in [*options, *_ranks(job)]:
        for client in value if isinstance(value, dict) else ():  # an option by client
            if client != "default" and client not in clients:
                raise UserError(f"{option}: no client {client!r}; {did_you_mean(client, clients)}")


def _ranks(job: Job) -> list[tuple[str, object]]:
    """The rank by client, where the clients are those that it names: not where one holds all the data."""
    return [("[adapter] rank", job.adapter.rank)] if job.method.population == "each" else []


def check_precision(job: Job, parts: Parts) -> None:
    """Refuse bf16 where the model cannot compute in it.

    Raises:
        UserError: it cannot.
    """
    if job.train.precision == "bf16" and parts.architecture in FP32_ALONE:
        raise UserError(
            f"[train] precision: is 'bf16' ('auto' means it on this machine), but {parts.architecture} computes "
            "in fp32 alone; expected: 'fp32'"
        )


def resolve_jobs(jobs: Sequence[Job], base_dir: Path | None) -> list[Job]:
    """Every "auto" of a job's stages replaced by what it is on this machine, and every head named.

    Args:
        jobs: the stages' jobs, in order.
        base_dir: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: the device is not there.
    """
    widths: dict[str, int | None] = {}
    for job in jobs:
        widths[job.stage] = _width(job, base_dir) if job.model else widths[job.start]
    jobs = [with_arrivals(resolve_auto(job, widths[job.stage]), base_dir) for job in with_heads(jobs)]
    return [with_vocabulary(job, base_dir) for job in jobs]


def resolve_auto(job: Job, width: int | None = None) -> Job:
    """Every "auto" replaced by what it is on this machine, for a model of a width; None is a wide one.

    Raises:
        UserError: the device is not there.
    """
    job = resolve_device(job)
    precision = resolve_precision(job.train.precision, job.train.device, width, batch_tokens(job))
    return job.model_copy(update={"train": job.train.model_copy(update={"precision": precision})})


def resolve_device(job: Job) -> Job:
    """The device "auto" replaced by what it is on this machine.

    Raises:
        UserError: the device is not there.
    """
    device = job.train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("[train] device: 'cuda' is not available here; expected one of: auto, cpu")
    return job.model_copy(update={"train": job.train.model_copy(update={"device": device})})


def _width(job: Job, base_dir: Path | None) -> int | None:
    """H of the model that a job names; None where there is none, which is said when it is loaded."""
    assert job.model is not None
    try:
        if job.model.config is not None:
            return int(scratch.new_config(job.model.config).hidden_size)
        return int(config_of(model_path(job, base_dir)).hidden_size)
    except UserError:
        return None


def fit_positions(job: Job, longest: int) -> Job:
    """The default ``max_tokens`` made to fit a model that reads less; the user's own must fit by itself.

    Raises:
        UserError: it does not.
    """
    if job.train.max_tokens <= longest:
        return job
    if "max_tokens" in job.train.model_fields_set:
        raise UserError(f"[train] max_tokens: is {job.train.max_tokens}, but the model reads at most {longest}")
    return job.model_copy(update={"train": job.train.model_copy(update={"max_tokens": longest})})
