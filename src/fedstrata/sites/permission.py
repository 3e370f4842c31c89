"""What a site permits: methods, payloads, rounds, bytes, rows behind a message, installed classes of the run's."""

from __future__ import annotations

import json
from typing import Any, Literal

from fedstrata.errors import UserError
from fedstrata.exchanges import EXCHANGES
from fedstrata.job.tables import Job, Train, method_name
from fedstrata.plan.components import identity, load_installed
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import make_plan
from fedstrata.sites.limit_tables import Limits
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.noise_account import NoiseAccount, refusal_of_epsilon, refusal_of_level
from fedstrata.sites.reply_size import sizes_of
from fedstrata.sites.rows_behind import distinct_rows, rows_behind
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site import Site

MOST_EPOCHS = 1000
"""Local epochs of a round: more are counted before training, which keeps a site busy."""
LEAST_MASKED = 0.02
"""With fewer tokens masked, a batch of many rows may learn from one of them alone."""
MOST_DROPOUT = 0.5
"""Share that dropout sets to 0: the server chooses the seed, and with more it may be nearly all of most rows."""
MOST_PULL = 0.1
"""Share of its way that a step may take a weight back: with more the last rows alone would be behind a message."""
MOST_CROWDING = 1e-3
"""FedProx's pull by what weight decay takes off in a step, in weights, and with AdamW by a step itself. Where it
outgrows the rows' gradients, a clip of both, or AdamW's steps, whose length the rate alone says, leave next to
nothing of these, but in the first step, which feels no pull yet."""


class Refused(Exception):
    """A sentence without its subject; it holds nothing of the site's own but what its settings say."""


class NotNow(Refused):
    """The same where time alone may change the answer: the site is asked again in later rounds."""


def permit(settings: SiteSettings, job: Job) -> None:
    """Refuse a job whose method or payload the site does not allow.

    Raises:
        Refused: it does not.
    """
    allow = settings.allow
    name, payload = method_name(job.method), job.method.exchange
    if allow.methods is not None and name not in allow.methods:
        raise Refused(f"{name} is not one of the methods it allows ({', '.join(allow.methods)})")
    if payload not in allow.payloads:
        raise Refused(
            f"{name} sends {payload} ({EXCHANGES[payload].permission}); nothing leaves it but "
            f"{', '.join(allow.payloads)}"
        )
    if job.method.population != "each":
        raise Refused(f"{name} needs all rows in one place")
    if reason := refusal_of_level(settings.require, settings.limits.epsilon, job):
        raise Refused(reason)


def check_job(settings: SiteSettings, job: Job) -> None:
    """Refuse a job that is out of the site's bounds, before anything is built for it.

    Raises:
        Refused: it is.
    """
    limits = settings.limits
    if job.method.rounds > limits.max_rounds:
        raise Refused(f"the run has {job.method.rounds} rounds, its limit is {limits.max_rounds} (max_rounds)")
    if job.train.epochs > MOST_EPOCHS:
        raise Refused(f"a round has {job.train.epochs} epochs, its limit is {MOST_EPOCHS}")
    if limits.min_examples > 1:
        _check_learned(job)


def _check_learned(job: Job) -> None:
    """Refuse settings by which a message of many rows would be learned from few.

    Raises:
        Refused: the job has them.
    """
    task, train = job.task, job.train
    if task.kind == "mlm" and task.mask_probability < LEAST_MASKED:
        raise Refused(
            f"task.mask_probability is {task.mask_probability:g}, so that few of its rows would be learned "
            f"from; it takes part from {LEAST_MASKED:g} on"
        )
    if train.dropout and job.adapter.dropout > MOST_DROPOUT:
        raise Refused(
            f"adapter.dropout is {job.adapter.dropout:g}, so that few of its rows may be learned from; it takes "
            f"part up to {MOST_DROPOUT:g}"
        )
    pulls = {"weight_decay": train.weight_decay, "proximal_mu": train.proximal_mu}
    for name, value in pulls.items():
        if (pull := train.learning_rate * value) > MOST_PULL:
            raise Refused(
                f"train.learning_rate times train.{name} is {pull:g}, so that each step would undo what "
                f"earlier rows have taught; it takes part up to {MOST_PULL:g}"
            )
    _check_crowding(train)


def _check_crowding(train: Train) -> None:
    """Refuse a pull of FedProx beside which, in steps of a given length, the rows' gradients are next to nothing.

    Raises:
        Refused: it is such a one.
    """
    adamw = train.optimizer == "adamw"
    way = max(1.0, train.weight_decay) if adamw else train.weight_decay
    crowding = train.proximal_mu * way * train.learning_rate
    if (adamw or train.max_grad_norm is not None) and crowding > MOST_CROWDING:
        times = " times weight_decay" if way == train.weight_decay else ""
        raise Refused(
            f"with {'adamw' if adamw else 'max_grad_norm'}, train.learning_rate{times} times proximal_mu is "
            f"{crowding:g}, so that the first step's rows alone would be learned from; it takes part up to "
            f"{MOST_CROWDING:g}"
        )


def check_limits(settings: SiteSettings, site: Site, scored: bool = False) -> None:
    """Refuse a run that takes more, or has fewer rows behind a message, than the site's settings allow.

    Args:
        settings: the site's.
        site: what answers the run's requests.
        scored: the run scores models on rows of the site's own.

    Raises:
        Refused: it does.
    """
    limits, data = settings.limits, site.data
    runtime, parts = site.runtime, site.runtime.working.parts
    count, streams = len(data.index), runtime.trainer.streams
    if reason := refusal_of_epsilon(settings.require, runtime.private, count, site.method.rounds):
        raise Refused(reason)
    site.account = NoiseAccount(settings.folder, limits.epsilon, limits.delta)
    least = distinct_rows(data.train, data.index)
    total, plan, sizes = 0, None, sizes_of(site)
    for round in range(site.method.rounds):
        plan = make_plan(site.method, parts, site.task, round, site.name, streams)
        if round == 0 and plan.train and site.method.exchange != "hidden_states" and least >= limits.min_examples:
            first = Request(0, site.name, plan, "train", {}, {}, span=(0.0, 1 / site.method.rounds))
            check_rows(limits, rows_behind(site, first))
        leaves = sum(sizes[part] for part in plan.send)
        total += leaves
        if limits.bytes_per_round is not None and leaves > limits.bytes_per_round:
            raise Refused(f"round {round + 1} sends {leaves} bytes, its limit is {limits.bytes_per_round}")
    if least < limits.min_examples:
        raise Refused(f"it has fewer examples than the {limits.min_examples} it wants to train on")
    if limits.bytes_per_run is not None and total > limits.bytes_per_run:
        raise Refused(f"the run sends {total} bytes, its limit is {limits.bytes_per_run}")
    tests = data.tests.get(site.name, data.index[:0])
    if scored:
        check_tests(limits, distinct_rows(data.test, tests))


def check_tests(limits: Limits, rows: int) -> None:
    """Refuse a score of too few test rows.

    Raises:
        Refused: it is one.
    """
    if rows < limits.min_examples:
        raise Refused(f"it has fewer test rows than the {limits.min_examples} it wants behind a score")


def check_rows(limits: Limits, rows: int) -> None:
    """Refuse a message with too few rows behind it. Their number stays here: it would tell something of the rows.

    Raises:
        Refused: it has.
    """
    if rows < limits.min_examples:
        raise Refused(
            f"fewer than {limits.min_examples} rows of its own would be behind a message (min_examples): by the "
            "steps, the batches or the learning rate that the job asks for"
        )


def own_component(
    hello: HelloHeader, part: Literal["method", "task", "codec"], options: dict[str, Any] | None
) -> Any:
    """The run's own method, task or codec, as it is installed here; no code comes from the server.

    Args:
        hello: names its entry point and its identity.
        part: which one.
        options: what it is made with; None for a function, which is taken as it is.

    Raises:
        Refused: nothing of that name is installed here, or it differs from the server's.
    """
    name, announced = hello.components[part]
    try:
        kind = load_installed(part, name)
        if part == "method":  # its options have come as JSON, in which a tuple is a list
            component = kind.model_validate_json(json.dumps(options))
        else:
            component = kind if options is None else kind(**options)
    except (UserError, ValueError, TypeError) as error:
        raise Refused(f"the run's own {part} cannot be used: {error}") from None
    if identity(component) != announced:
        raise Refused(f"the run's own {part} {name!r} is not the one that is installed here")
    return component
