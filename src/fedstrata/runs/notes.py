"""What a user should know, or permit, before the first round."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from fedstrata.client.device import idle_gpu
from fedstrata.client.sharing import sharing_notes
from fedstrata.data.prepare import Prepared, data_notes, dropped_rows
from fedstrata.errors import UserError, plural
from fedstrata.exchanges import EXCHANGES
from fedstrata.job.adapter_rules import check_adapter
from fedstrata.job.aggregate_rules import ROBUST, check_aggregate
from fedstrata.job.buffer_rules import check_buffer
from fedstrata.job.privacy_rules import check_privacy
from fedstrata.job.sharing_rules import check_turns
from fedstrata.job.tables import Job, method_name
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.job.unused_keys import unused_keys
from fedstrata.models.checkpoints import Loaded
from fedstrata.models.configs import read_config
from fedstrata.models.headed import plain_config
from fedstrata.models.heads import KEY
from fedstrata.plan.disclosure import POOLED, channels, sentence
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.plan.unused_options import unused_options
from fedstrata.server.aggregate import make_aggregate
from fedstrata.server.optimizer import make_server_optimizer
from fedstrata.wire.delta import job_codec

UNNAMED = re.compile(r"LABEL_\d+")
"""What transformers calls a class that has no name."""


def check_names(job: Job) -> None:
    """Look up what a job names in the registries of codecs, aggregates and server optimizers.

    Raises:
        UserError: one of them has no such name, or a table of the job does not go with the others.
    """
    job_codec(job.wire.dtype, job.wire.forms)
    make_aggregate(job.server.aggregate)
    make_server_optimizer(job.server)
    check_adapter(job)
    check_privacy(job)
    check_aggregate(job)
    check_turns(job)
    check_buffer(job)


def check_permission(job: Job) -> None:
    """Nothing leaves a client that it does not allow.

    Raises:
        UserError: the method sends something else.
    """
    if job.method.exchange not in job.client.may_send:
        raise UserError(
            f"[client] may_send: is {job.client.may_send}, but {method_name(job.method)} as set here sends "
            f"{EXCHANGES[job.method.exchange].permission}; "
            f"may_send = {[*job.client.may_send, job.method.exchange]} permits it"
        )


def notes(job: Job, loaded: Loaded, data: Prepared, tokens: int, own: Collection[str] = ()) -> tuple[str, ...]:
    """What the user should know before the first round, a sentence each.

    Args:
        job: the stage's job.
        loaded: its model.
        data: its rows.
        tokens: of all training examples.
        own: which objects of the caller's own the run has.
    """
    lines = data_notes(job, data) + idle_gpu(job.train.device == "cuda" or job.between_sites)
    if data.dropped:
        lines.append(dropped_rows(data))
    if job.model is not None and job.model.config is not None and job.model.tokenizer is None:
        lines.append("the tokenizer was trained on all clients' training rows")
    if loaded.fresh:
        lines.append(f"newly initialized: {', '.join(loaded.fresh)}")
    lines += _other_head(loaded, data.labels)
    lines += EXCHANGES[job.method.exchange].notes(job, loaded.parts, len(data.shards), tokens)
    if job.server.aggregate in ROBUST and "aggregate" not in own:
        lines.append(
            f"{job.server.aggregate} counts every client once, not by its examples, and keeps a round's replies "
            "on the disk until they are merged"
        )
    if job.engine.buffer is not None:
        first = plural(job.engine.buffer, "answer")
        lines.append(f"asynchronous: a round ends with its first {first}; {_who(job)}")
    lines += sharing_notes(job, loaded.parts)
    streams = Streams(job.train.seed)
    rounds = range(job.method.rounds)
    plans = [make_plan(job.method, loaded.parts, job.task.kind, round, SERVER, streams) for round in rounds]
    kind, sent = TASK_KINDS[job.task.kind], {part for plan in plans for part in plan.send}
    lines += _averaged_apart(job, loaded.parts, plans)
    lines += [] if "codec" in own else _left_behind(job, plans)
    if job.method.population == "pooled":
        lines.append(POOLED)
    found = channels(loaded.parts, sent, kind.target)
    if readable := sentence(found, job.privacy.level, job.privacy.sum_only):
        lines.append(readable)
    if never := set(loaded.fresh) - {part for plan in plans for part in plan.train}:
        lines.append(f"{', '.join(sorted(never))}: newly initialized, and this method never trains it")
    lines += without_effect(job, loaded.parts, list(data.shards), own)
    return tuple(lines)


def _other_head(loaded: Loaded, labels: Sequence[str] | None) -> list[str]:
    """A note on a head that goes on as another kind, or for other classes: it starts from what that learned."""
    now = getattr(loaded.model.config, KEY, None) or {}
    if "head" in loaded.fresh or not (labels or now):
        return []
    config = plain_config(read_config(loaded.name))
    before = getattr(config, KEY, None) or {}
    changed = [f"{key} {now[key]!r} was {was!r}" for key, was in before.items() if now.get(key, was) != was]
    names = [str(name) for _, name in sorted(config.id2label.items())]
    pairs = zip(labels or (), names, strict=False)  # a config may name fewer than its head has
    changed += [
        f"{new!r} was {old!r}"
        for new, old in pairs
        if new.casefold() != old.casefold() and not UNNAMED.fullmatch(old)
    ]
    if not changed:
        return []
    listed = ", ".join(changed[:3])
    return [f"the head goes on as the start model has it, where {listed}{', …' if changed[3:] else ''}"]


def _averaged_apart(job: Job, parts: Parts, plans: Sequence[Plan]) -> list[str]:
    """A note on A and B averaged apart, where clients send some or the server averages copies of its layers."""
    schedule = job.method.client_schedule
    if job.adapter.merge != "plain" or schedule == "sequential":
        return []
    copies = schedule == "parallel"
    averaged = {name for plan in plans for name in (*plan.send, *(plan.away(parts) if copies else ()))}
    if not any(parts[name].kind == "adapter" for name in averaged):
        return []
    return ["the adapters' A and B are averaged apart, which is not the average of their products B A"]


def _left_behind(job: Job, plans: Sequence[Plan]) -> list[str]:
    """Of changes: parts that from some round on are not sent any more, so that none brings what the last left out.

    Args:
        job: the job.
        plans: one for each of its rounds.
    """
    rounds: dict[str, list[int]] = {}
    for round, plan in enumerate(plans):
        for part in plan.send if job.wire.codec == "delta" else ():
            rounds.setdefault(part, []).append(round)
    done = [
        part
        for part, own in rounds.items()
        if len(plans) - 1 - own[-1] > max((after - before for before, after in pairwise(own)), default=0)
    ]
    if not done:
        return []
    return [
        f"{', '.join(done)}: not sent any more when other parts are; what their last changes left out ([wire] "
        "codec = 'delta') never reaches the clients, which go on without it"
    ]


def without_effect(job: Job, parts: Parts, clients: Sequence[str], own: Collection[str] = ()) -> list[str]:
    """Which keys are set and change nothing, a sentence for each reason."""
    kind, streams, base = job.task.kind, Streams(job.train.seed), parts.without_adapters
    rounds = range(job.method.rounds)
    plans = [make_plan(job.method, parts, kind, round, SERVER, streams) for round in rounds]
    lines = unused_keys(job, plans, own) + _idle_adapters(job, parts, plans)
    if unread := unused_options(job.method, base, kind, clients, streams):
        as_set = f"{method_name(job.method)!r} as set here plans the same without it"
        lines.append(f"[method] {', '.join(unread)}: no effect here, as {as_set}")
    return lines


def _idle_adapters(job: Job, parts: Parts, plans: Sequence[Plan]) -> list[str]:
    """That no round trains the adapters, or those of the embeddings, so that the job trains less than it says."""
    adapters = {part.name: part.depth for part in parts.each if part.kind == "adapter"}
    moved = {adapters[name] for plan in plans for name in (*plan.train, *plan.away(parts)) if name in adapters}
    with_method = f"with {method_name(job.method)!r} as set here"
    if adapters and not moved:
        return [f"[adapter] kind: no adapter is ever trained {with_method}; the model is as it would be without"]
    if None in set(adapters.values()) - moved:
        return [f"[adapter] targets: adapters of embeddings are never trained {with_method}"]
    return []


def _who(job: Job) -> str:
    """What decides who answers first."""
    if job.between_sites:
        return "who answers when is recorded in arrivals.jsonl"
    if job.engine.arrivals is not None:
        return f"who answers when is in {job.engine.arrivals}"
    return "who answers when is simulated: a client takes as long as its examples, times a factor that is drawn"
