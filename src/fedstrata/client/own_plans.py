"""What is asked of a method of the caller's own and its plans, before anything is trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedstrata.errors import UserError
from fedstrata.job.tables import Job, method_name
from fedstrata.methods import METHODS
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import Streams

FIELDS = {"layers": int, "train": str, "send": str, "keep": str, "server": str}
"""Field of a plan -> what it is a tuple of."""


def check_own_plans(
    job: Job, parts: Parts, round: int, clients: Sequence[str], kept: dict[str, set[frozenset[str]]]
) -> None:
    """Refuse a plan of a method of the caller's own that is none, or that the model cannot carry out.

    Args:
        job: the job.
        parts: the model's.
        round: 0-based round.
        clients: whose plans.
        kept: client -> what it keeps, in each of the rounds before; it is added to.

    Raises:
        UserError: it is no plan, is another at every call, cannot be carried out, trains nothing, or does not go
            with what the method sends.
    """
    method, name, base = job.method, method_name(job.method), parts.without_adapters
    streams = Streams(job.train.seed)
    for client in clients if name not in METHODS else ():
        plan = method.plan(base, job.task.kind, round, client, streams)
        if not isinstance(plan, Plan):
            raise UserError(f"{name}.plan: gave {plan!r} for {client} in round {round + 1}; expected a Plan")
        where = f"{name}.plan: {client}, round {round + 1}"
        if why := _mistyped(plan) or _misfit(job, plan, base.depth):
            raise UserError(f"{where}: {why}")
        if method.plan(base, job.task.kind, round, client, streams) != plan:
            raise UserError(
                f"{where}: asked twice, it gives two plans; expected random numbers from "
                "streams.numpy(round, client, use) alone, and nothing that a call leaves behind"
            )
        kept.setdefault(client, set()).add(frozenset(plan.keep))
        try:
            plan.check(base)
        except ValueError as error:
            known = ", ".join(base.names)
            raise UserError(f"{where}: {error}; its parts are: {known}") from None


def check_throughout(
    job: Job, parts: Parts, plans: Collection[Plan], own: Mapping[str, Collection[frozenset[str]]]
) -> None:
    """Refuse plans of which one contradicts another.

    Args:
        job: the job.
        parts: the model's.
        plans: all plans.
        own: of a method of the caller's own, client -> what it keeps, in each of the rounds.

    Raises:
        UserError: there are such plans.
    """
    _check_frozen(job, parts, plans)
    _check_cut(job, plans)
    _check_kept(job, parts, plans, own)


def _check_frozen(job: Job, parts: Parts, plans: Collection[Plan]) -> None:
    """Refuse an encoder that is frozen in one plan and trained in another: cached states would be old ones.

    Raises:
        UserError: there is such an encoder.
    """
    trained = {name for plan in plans for name in plan.train if parts[name].kind not in ("pooler", "head")}
    if trained and any(plan.freeze_encoder for plan in plans):
        raise UserError(
            f"{method_name(job.method)}.plan: some plans freeze the encoder and others train {min(trained)!r}; "
            "expected freeze_encoder in all plans, or in none"
        )


def _check_cut(job: Job, plans: Collection[Plan]) -> None:
    """Refuse plans that leave other layers to the server than others do: it holds those of the first plan.

    Raises:
        UserError: there are such plans.
    """
    found = sorted({plan.server for plan in plans})
    if len(found) > 1:
        raise UserError(
            f"{method_name(job.method)}.plan: the server holds {', '.join(found[0])} in some plans and "
            f"{', '.join(found[1])} in others; expected the same layers in server in all plans"
        )


def _check_kept(
    job: Job, parts: Parts, plans: Collection[Plan], own: Mapping[str, Collection[frozenset[str]]]
) -> None:
    """Refuse a part that some plans keep and others take from the server: whose it is would depend on the round.

    And one that a client keeps in some rounds and does not build in others: on its disk are the last round's.

    Raises:
        UserError: there is such a part.
    """
    kept = {name for plan in plans for name in plan.keep}
    if taken := kept and {name for plan in plans for name in plan.received(parts) if name in kept}:
        raise UserError(
            f"{method_name(job.method)}.plan: some plans keep {min(taken)!r} and others take it from the server; "
            "expected it in keep in all plans that build it, or in none"
        )
    for client, sets in own.items():
        if other := frozenset.union(*sets) - frozenset.intersection(*sets):
            raise UserError(
                f"{method_name(job.method)}.plan: {client} keeps {min(other)!r} in some rounds only; expected the "
                "same parts in keep in all rounds"
            )


def _mistyped(plan: Plan) -> str | None:
    """What is wrong with the type of a field; None where nothing is."""
    for field, kind in FIELDS.items():
        found = getattr(plan, field)
        if not isinstance(found, tuple) or not all(type(one) is kind for one in found):
            items = "whole numbers" if kind is int else "names of parts"
            return f"plan.{field}: found {found!r}; expected a tuple of {items}"
    return None


def _misfit(job: Job, plan: Plan, depth: int) -> str | None:
    """Why a plan does not go with its method or its job; None where it does."""
    sends = job.method.exchange
    if not plan.train:
        return "plan.train: is empty; expected a part that the client trains"
    if plan.server and sends != "activations":
        return f"plan.server: goes with exchange 'activations', and the method's is {sends!r}"
    if sends == "activations" and not plan.server:
        return "plan.server: is empty; with exchange 'activations' expected the layers that the server holds"
    if plan.freeze_encoder and job.head.kind is None:
        return "plan.freeze_encoder: goes with a head of the job; expected [head] kind: cls, mean, psum or hsum"
    if plan.freeze_encoder and plan.layers != tuple(range(depth)):
        return (
            f"plan.layers: is {plan.layers}; with freeze_encoder expected all {depth} layers in order, as the "
            "head takes the hidden states of the whole encoder"
        )
    if sends == "hidden_states" and not plan.freeze_encoder:
        return "plan.freeze_encoder: is False; exchange 'hidden_states' sends those of a frozen encoder"
    return None
