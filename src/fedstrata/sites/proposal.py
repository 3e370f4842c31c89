"""What a run would have a site send, from its job, the model's config and the site's rows; nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.client.model_options import adapter_of, head_of
from fedstrata.client.setup import fit_positions
from fedstrata.client.sharing import parts_with_sharing
from fedstrata.data.prepare import Prepared, prepare_own
from fedstrata.errors import plural
from fedstrata.exchanges import EXCHANGES
from fedstrata.exchanges.dry import batches_of, round_work
from fedstrata.exchanges.exchange import DryContext, dry_context
from fedstrata.exchanges.hidden_states_form import hidden_states_spec
from fedstrata.job.tables import Job, method_name
from fedstrata.models import checkpoints
from fedstrata.models.configs import config_of
from fedstrata.models.parts import find_parts
from fedstrata.plan.messages import Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.streams import Streams
from fedstrata.privacy.fixed_point import WIDTHS
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.noise_account import protection_of
from fedstrata.sites.permission import Refused, own_component
from fedstrata.sites.rows_behind import distinct_rows, rows_sampled, rows_trained_on
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_job import site_job
from fedstrata.tasks import Examples, TaskContext, build_task
from fedstrata.tasks.examples import examples
from fedstrata.wire.activations import message_bytes
from fedstrata.wire.codec import spec_bytes

WEIGHT, TRAINED = 4, 16
"""Bytes of a weight, and of one that is trained: itself, its gradient and the optimizer's state."""


@dataclass(frozen=True)
class Proposal:
    """What a run would do at a site.

    Attributes:
        method: its name.
        payload: what leaves: weights, hidden_states or activations.
        rounds: rounds of the run.
        rows: the site's training rows.
        examples: made of them.
        tests: the site's test rows; 0 where it is not scored.
        steps: of a round, the first one.
        least: fewest distinct rows behind a message of the first round that is made of training rows.
        parameters: of the model.
        round_bytes: most bytes that leave in a round.
        bytes: that leave in all rounds; of activations as many in every round as in the first.
        sent: names of the parts that leave in some round.
        protection: whether the server sees messages or sums, and what noise is over them, a sentence.
        start: bytes of the start model.
        memory: bytes that weights, buffers, gradients and the optimizer take, without what a batch does.
    """

    method: str
    payload: str
    rounds: int
    rows: int
    examples: int
    tests: int
    steps: int
    least: int
    parameters: int
    round_bytes: int
    bytes: int
    sent: tuple[str, ...]
    protection: str
    start: int
    memory: int

    def lines(self) -> list[str]:
        """For the site's owner."""
        words = EXCHANGES[self.payload].permission  # type: ignore[index]
        sent = f" ({', '.join(self.sent[:8])}{', ...' if len(self.sent) > 8 else ''})" if self.sent else ""
        return [
            f"{self.method}, {plural(self.rounds, 'round')}, a model of {self.parameters:,} parameters",
            f"leaves this site: {words}{sent}",
            self.protection,
            f"at most {self.round_bytes / 1e6:,.3f} MB in a round, {self.bytes / 1e6:,.3f} MB in all",
            f"of {plural(self.rows, 'row')} of its own, {plural(self.steps, 'step')} in a round; at least "
            f"{plural(self.least, 'row')} behind each message",
            f"scored on {plural(self.tests, 'test row')} of its own" if self.tests else "not scored here",
            f"memory: {self.memory / 1e6:,.0f} MB, and what a batch takes",
        ]


def propose(settings: SiteSettings, hello: HelloHeader, folder: Path, memory: int) -> Proposal:
    """Build the model without weights, read the rows, tokenize them, make the plans; and add up what would leave.

    Args:
        settings: the site's.
        hello: the run's first message.
        folder: the run's, with the model's files.
        memory: bytes that the model may take.

    Raises:
        Refused: the model takes more memory.
        UserError: the site's rows cannot be used, or the model cannot be built.
    """
    job, start = site_job(settings, hello, folder), str(folder / "start")
    config = config_of(start, job.task.kind, hello.labels, head_of(job))
    parts = checkpoints.parts_of(start, job.task.kind, hello.labels, head_of(job), adapter_of(job))
    parts = parts_with_sharing(job, parts, start)
    plans = [
        make_plan(job.method, parts, job.task.kind, round, settings.name, Streams(job.train.seed))
        for round in range(job.method.rounds)
    ]
    with torch.device("meta"):
        bare = checkpoints.class_of(job.task.kind, config).from_config(config)
    needed = _memory(parts, plans) + sum(buffer.nbytes for buffer in bare.buffers())
    if needed > memory:
        raise Refused(f"the model takes {needed / 1e6:,.0f} MB of memory to train, more than it gives a run")
    data = prepare_own(job, settings.name, settings.home)
    tokenizer = checkpoints.tokenizer_of(start, job.task.kind)
    find_parts(bare)
    job = fit_positions(job, checkpoints.max_positions(bare))
    train = examples(job, data.train, data.labels, tokenizer, data.shards.values())
    own = None if data.tests is None else data.tests.values()
    test = examples(job, data.test, data.labels, tokenizer, own)
    return _added_up(settings, job, hello, parts, plans, (data, train, test, tokenizer), needed)


def _added_up(
    settings: SiteSettings,
    job: Job,
    hello: HelloHeader,
    parts: Parts,
    plans: list[Plan],
    rows: tuple[Prepared, Examples, Examples, Any],
    memory: int,
) -> Proposal:
    name, (data, train, test, tokenizer) = settings.name, rows
    index = train.tokens.of_rows(data.shards[name])
    tests = test.tokens.of_rows((data.tests or {}).get(name, data.shards[name][:0]))
    context = _context(name, job, hello, parts, train.tokens.lengths[index], tokenizer)
    request = Request(0, name, plans[0], "train", {}, {})
    payload = job.method.exchange
    least, steps = distinct_rows(train, index), 0
    if plans[0].train and payload != "hidden_states":
        if job.privacy.level == "example":
            least = rows_sampled(job.train, least, len(index), request)
        else:
            least = rows_trained_on(job.train, Streams(job.train.seed), train, index, request)
        steps = round_work(context, request)[0]
    sizes = list(_round_bytes(context, payload, plans, request))
    return Proposal(
        method=method_name(job.method),
        payload=payload,
        rounds=job.method.rounds,
        rows=distinct_rows(train, index),
        examples=len(index),
        tests=distinct_rows(test, tests),
        steps=steps,
        least=least,
        parameters=parts.elements(parts.names),
        round_bytes=max(sizes),
        bytes=sum(sizes),
        sent=tuple(part for part in parts.names if any(part in plan.send for plan in plans)),
        protection=protection_of(settings.require, job, len(index)),
        start=WEIGHT * parts.elements(_held(parts, plans)),
        memory=memory,
    )


def _context(name: str, job: Job, hello: HelloHeader, parts: Parts, lengths: Any, tokenizer: Any) -> DryContext:
    codec = own_component(hello, "codec", {}) if "codec" in hello.components else None
    build = own_component(hello, "task", None) if "task" in hello.components else build_task
    task = build(TaskContext(job, hello.labels, tokenizer, len(tokenizer)))
    return dry_context(job, parts, codec, {name: lengths}, dict, task.head_positions)


def _round_bytes(context: DryContext, payload: str, plans: list[Plan], request: Request) -> Iterator[int]:
    """Bytes of tensors that leave in each round."""
    parts, wire, lengths = context.parts, context.wire, context.lengths[request.client]
    passed = 0
    if payload == "activations":
        batches = batches_of(context, request)
        through = lengths[np.concatenate(batches)]
        sizes = message_bytes(int(through.sum()), len(through), parts.hidden, context.stream, len(batches))
        passed = sum(size for (way, _), size in sizes.items() if way == "up")
    once = 0
    if payload == "hidden_states":
        branches = max(1, len(parts.head_layers))
        once = spec_bytes(hidden_states_spec(lengths, branches, parts.hidden, context.dtype))
    for plan in plans:
        if context.sums:  # as integers as wide as they can be, since the others' rows are not known yet
            yield WIDTHS[-1] * sum(map(parts.travelling, plan.send))
            continue
        yield once + passed + sum(wire.size(parts.shapes[part], wire.changes) for part in plan.send)
        once = 0


def _memory(parts: Parts, plans: list[Plan]) -> int:
    """Bytes of the weights that the site holds, and of the gradients and optimizer of those that it trains."""
    held = parts.elements(_held(parts, plans))
    trained = max(plan.learning_elements(parts) for plan in {plan.train: plan for plan in plans}.values())
    return WEIGHT * held + (TRAINED - WEIGHT) * trained


def _held(parts: Parts, plans: list[Plan]) -> list[str]:
    """The parts that the site holds, which those at the server are not among."""
    away = plans[0].away(parts)
    return [part for part in parts.names if part not in away]
