"""What a site permits: methods, payloads, bytes, and classes of the run's own that it has installed."""

from __future__ import annotations

from typing import Any, Literal

from fedstrata.errors import UserError
from fedstrata.exchanges import EXCHANGES
from fedstrata.job.tables import Job, method_name
from fedstrata.plan.components import identity, load_installed
from fedstrata.plan.plan import make_plan
from fedstrata.sites.messages import HelloHeader
from fedstrata.sites.noise_account import NoiseAccount, refusal_of_epsilon, refusal_of_level
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site import Site


class Refused(Exception):
    """A sentence without its subject; it holds nothing of the site's own but what its settings say."""


def permit(settings: SiteSettings, job: Job) -> None:
    """Refuse a job whose method or payload the site does not allow.

    Raises:
        Refused: it does not.
    """
    allow = settings.allow
    name, payload = method_name(job.method), job.method.exchange
    if allow.methods is not None and name not in allow.methods:
        raise Refused(f"{name} is none of the methods it takes part in ({', '.join(allow.methods)})")
    if payload not in allow.payloads:
        raise Refused(
            f"{name} sends {payload} ({EXCHANGES[payload].permission}); nothing leaves it but "
            f"{', '.join(allow.payloads)}"
        )
    if job.method.population != "each":
        raise Refused(f"{name} needs all rows in one place")
    if reason := refusal_of_level(settings.require, settings.limits.epsilon, job):
        raise Refused(reason)


def check_limits(settings: SiteSettings, site: Site) -> None:
    """Refuse a run that takes more, or has fewer examples, than the site's settings allow.

    Raises:
        Refused: it does.
    """
    limits, count = settings.limits, len(site.data.index)
    if count < limits.min_examples:
        raise Refused(f"it has fewer examples than the {limits.min_examples} it wants to train on")
    runtime, parts = site.runtime, site.runtime.working.parts
    if reason := refusal_of_epsilon(settings.require, runtime.private, count, site.method.rounds):
        raise Refused(reason)
    site.account = NoiseAccount(settings.folder, limits.epsilon, limits.delta)
    for round in range(site.method.rounds):
        plan = make_plan(site.method, parts, site.task, round, site.name, runtime.trainer.streams)
        leaves = sum(runtime.wire.size(parts.shapes[part], runtime.wire.changes) for part in plan.send)
        if limits.bytes_per_round is not None and leaves > limits.bytes_per_round:
            raise Refused(f"round {round + 1} sends {leaves} bytes, its limit is {limits.bytes_per_round}")


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
        component = kind if options is None else kind(**options)
    except (UserError, ValueError, TypeError) as error:
        raise Refused(f"the run's own {part} cannot be used: {error}") from None
    if identity(component) != announced:
        raise Refused(f"the run's own {part} {name!r} is not the one that is installed here")
    return component
