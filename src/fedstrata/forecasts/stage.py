"""What one stage will cost: the real round loop over the dry engine, and the memory of a step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.client.model_options import adapter_of, head_of
from fedstrata.client.setup import check_plans
from fedstrata.client.sharing import parts_with_sharing
from fedstrata.cost.ledger import SETUP
from fedstrata.data.prepare import population
from fedstrata.engines.dry import dry_run
from fedstrata.errors import UserError, did_you_mean, plural
from fedstrata.events import Event
from fedstrata.exchanges import EXCHANGES
from fedstrata.exchanges.dry_sums import sum_figures
from fedstrata.exchanges.exchange import DryContext, dry_context
from fedstrata.forecasts.options import ForecastOptions
from fedstrata.forecasts.profile import DataProfile, longest_text
from fedstrata.job.aggregate_rules import check_senders, job_least_senders
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models import checkpoints, configs
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.heads import HeadConfig
from fedstrata.models.memory import step_memory
from fedstrata.plan.disclosure import POOLED, SENT, channels, sentence
from fedstrata.plan.kinds import Index
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.schedule import round_half_up
from fedstrata.plan.sharing import Sharing
from fedstrata.runs.arrivals import arrivals_of
from fedstrata.runs.privacy import participated, privacy_record, settle_privacy
from fedstrata.runs.train import round_settings
from fedstrata.server.records import MemoryRecords
from fedstrata.tasks import Task, TaskContext, build_task

MOST_PLANS = 20_000_000
"""Rounds times clients: some minutes."""
MOST_REPLIES = 300_000
"""Rounds times sampled clients: some kilobytes each."""
Costs = dict[str, Any]
"""A stage's costs, as JSON would have them."""
Step = Callable[[Plan, int, int, int, bool, str], int]
"""Bytes of a training step, see :func:`fedstrata.models.memory.step_memory`."""


@dataclass(frozen=True)
class Known:
    """What is computed once per model, task, classes, head and adapters, however many methods are forecast."""

    parts: Callable[[str, str, tuple[str, ...] | None, HeadConfig | None, AdapterConfig | None], Parts]
    step: Callable[[str, str, tuple[str, ...] | None, HeadConfig | None, AdapterConfig | None, Sharing], Step]
    longest: Callable[[str, str], int]


def nothing_known() -> Known:
    """At the beginning of a forecast."""
    return Known(functools.cache(checkpoints.parts_of), functools.cache(_step_of), functools.cache(longest_text))


def stage_costs(job: Job, model: str, profile: DataProfile, known: Known, options: ForecastOptions) -> Costs:
    """One stage's costs: of each round of one client, and of all clients together.

    Raises:
        UserError: the method does not fit, there is no such client, or the rounds are too many.
    """
    of_model = (model, job.task.kind, profile.labels, head_of(job), adapter_of(job))
    parts, shards = known.parts(*of_model), population(job.method.population, profile.shards)
    parts = parts_with_sharing(job, parts, model)
    job, name = settle_privacy(job, shards), _whose(options.client, shards, profile.shards)
    _check(job, parts, profile, len(shards), options)
    task = (options.components.task or build_task)(TaskContext(job, profile.labels))
    lengths = {name: profile.lengths[index] for name, index in shards.items()}
    context = dry_context(job, parts, options.components.codec, lengths, profile.tests, task.head_positions)
    records, memory = _played(job, context, options), _memory(job, task, known.step(*of_model, parts.sharing))
    sums, work = _bytes(records.lines("ledger")), records.lines("rounds")
    own = {line["round"]: line for line in work if line["client"] == name}

    def costs(round: int) -> dict[str, Any]:
        line = own.get(round, {})
        asked = line.get("asked", round)  # of asynchronous rounds
        plan = _plan(context, asked, name) if line.get("trained") else Plan((), ())
        return {
            "round": round,
            "stage": job.stage,
            "up_bytes": sums[round, name, "up"],
            "down_bytes": sums[round, name, "down"],
            "train_flops": line.get("flops", 0),
            "peak_memory_bytes": memory(plan, context.lengths[name]) if line else 0,
            **_of_plan(parts, plan),
        }

    rounds = [costs(round) for round in range(job.method.rounds)]
    return {
        **_of_exchange(context, job, name, records.lines("ledger")),
        "client": name,
        "labels": profile.labels,
        "setup": {"down_bytes": sums[SETUP, name, "down"]},
        "rounds": rounds,
        "clients": _everyone(len(shards), sums, work, job.method.exchange == "hidden_states"),
        "holdings": profile.source,
        "examples": sum(map(len, shards.values())),
        "privacy": _privacy(job, context, work, options.tell),
        **_about(job, context, records.lines("ledger")),
    }


def _played(job: Job, context: DryContext, options: ForecastOptions) -> MemoryRecords:
    """The records of the stage's rounds."""
    order = arrivals_of(job, {name: len(own) for name, own in context.lengths.items()}) if context.buffer else []
    return dry_run(context, round_settings(job), options.tell, _least(job, options), order)


def _about(job: Job, context: DryContext, ledger: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The model's parts, what the server can read, a sentence each, and how far the bytes are known.

    What it can read is that of all clients: others may send more than the one whose costs are reported.
    """
    parts = context.parts
    sent = {line["part"] for line in ledger if line["direction"] == "up" and line["part"] in parts}
    opened = channels(parts, sent, TASK_KINDS[job.task.kind].target)
    found = sentence(opened, job.privacy.level, job.privacy.sum_only)
    payload = job.method.exchange
    whole = [] if payload == "weights" else [f"each client sends the server {SENT[payload]}"]
    if job.method.population == "pooled":
        whole = [POOLED]
    return {
        "parts": parts.records(),
        "readable": [*whole, *([found] if found else [])],
        "asynchronous": None if job.engine.buffer is None else "bound" if job.between_sites else "exact",
    }


def _privacy(
    job: Job, context: DryContext, work: Sequence[Mapping[str, Any]], tell: Callable[[Event], None]
) -> dict[str, Any] | None:
    """What the stage will spend."""
    examples = {client: len(lengths) for client, lengths in context.lengths.items()}
    return privacy_record(job, examples, participated(job, work, ()), tell)


def _of_exchange(context: DryContext, job: Job, name: str, ledger: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the exchange tells of a stage beside bytes and FLOPs."""
    return {
        "split": EXCHANGES[job.method.exchange].forecast(context, context.lengths[name]),
        "sums": sum_figures(context, job, ledger),
        "collects": any(line["phase"] == "hidden_states" for line in ledger),
    }


def _least(job: Job, options: ForecastOptions) -> int:
    """Clients that must have sent a part for it to be merged."""
    return 1 if options.components.aggregate else job_least_senders(job)


def _check(job: Job, parts: Parts, profile: DataProfile, clients: int, options: ForecastOptions) -> None:
    """Refuse what would take hours or more memory than there is, then what the method objects to."""
    rounds, each = job.method.rounds, max(1, round_half_up(job.clients.fraction * clients))
    plans, replies = rounds * clients, rounds * (each if job.clients.test is None else each + clients)
    for number, most, what in ((plans, MOST_PLANS, "plans"), (replies, MOST_REPLIES, "replies")):
        if number > most:
            raise UserError(
                f"forecast: {plural(rounds, 'round')} of {plural(clients, 'client')} are {number:,} {what}; "
                f"at most {most:,} can be counted: set method.rounds, clients.count or clients.fraction lower"
            )
    check_plans(job, parts, profile.shards, options.tell)
    if not options.components.aggregate:
        check_senders(job, parts, list(population(job.method.population, profile.shards)))


def _of_plan(parts: Parts, plan: Plan) -> dict[str, list[Any]]:
    return {"layers": list(parts.depths(plan.train)), "trained": list(plan.train), "sent": list(plan.send)}


def _plan(context: DryContext, round: int, client: str) -> Plan:
    return make_plan(context.method, context.parts, context.task, round, client, context.streams)


def _whose(client: str | None, shards: Mapping[str, Index], named: Mapping[str, Index]) -> str:
    """The client whose costs are reported.

    Raises:
        UserError: there is no such client.
    """
    first = next(iter(shards))
    if client is not None and client not in shards and client not in named:
        raise UserError(f"--client: no client {client!r}; {did_you_mean(client, shards)}")
    return client if client is not None and client in shards else first


def _bytes(ledger: Iterable[Mapping[str, Any]]) -> Counter[tuple[int, str, str]]:
    """(round, client, direction) -> bytes; the score before training goes with the first round."""
    sums = Counter[tuple[int, str, str]]()
    for line in ledger:
        round = SETUP if line["phase"] == "setup" else max(0, line["round"])
        sums[round, line["client"], line["direction"]] += line["bytes"]
    return sums


def _everyone(
    count: int,
    sums: Mapping[tuple[int, str, str], int],
    work: Sequence[Mapping[str, Any]],
    server_trains: bool,
) -> dict[str, int]:
    """All clients' costs together, the server's training included.

    Where the server trains by itself (``server_trains``) clients take no steps, and every step is its own.
    """
    halves = sum(line.get("server_flops", 0) for line in work)
    steps = sum(line["flops"] for line in work if line.get("steps")) if server_trains else 0
    return {
        "count": count,
        "setup_bytes": sum(n for (round, _, _), n in sums.items() if round < 0),
        "up_bytes": sum(n for (round, _, way), n in sums.items() if round >= 0 and way == "up"),
        "down_bytes": sum(n for (round, _, way), n in sums.items() if round >= 0 and way == "down"),
        "train_flops": sum(line.get("flops", 0) for line in work) + halves,
        "server_flops": halves + steps,
    }


def _memory(job: Job, task: Task, step: Step) -> Callable[[Plan, Index], int]:
    train = job.train

    def memory(plan: Plan, lengths: Index) -> int:
        width = train.max_tokens if train.padding == "max" else int(lengths.max())
        budget = train.tokens_per_batch
        rows = min(
            train.batch_size if budget is None else -(-budget // width), len(lengths)
        )  # no batch takes more
        predicted = task.head_positions(np.full(rows, width), width) if task.gathers else 0
        return step(plan, rows, width, predicted, train.precision == "bf16", train.optimizer)

    return memory


def _step_of(
    model: str,
    kind: str,
    labels: tuple[str, ...] | None,
    head: HeadConfig | None,
    adapter: AdapterConfig | None,
    sharing: Sharing,
) -> Step:
    config = configs.config_of(model, kind, labels, head)
    return step_memory(checkpoints.class_of(kind, config), config, adapter, sharing)
