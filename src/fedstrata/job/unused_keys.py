"""Keys that are set and change nothing in this job: said before a run, so that nobody believes they act.

A base file of several rows may hold keys that one row has no use for, so they are named and not refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fedstrata.job.tables import Job, method_name
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.plan import Plan

Unused = tuple[str, tuple[str, ...], str]
"""Table, keys of it, and why they change nothing."""

DELTA = ("codec", "bits", "density", "rotation", "up_bits", "down_bits", "up_density", "down_density")
STREAM = ("activations", "activations_density", "gradients", "gradients_density", "activations_changed")
MERGE = ("aggregate", "optimizer", "learning_rate", "momentum", "beta2", "tau", "max_norm")
MOMENTS = {
    "sgd": ("momentum", "beta2", "tau"),
    "momentum": ("beta2", "tau"),
    "adagrad": ("momentum", "beta2"),
}
"""Server optimizer -> keys of ``[server]`` that it does not take."""
REPLACED = {
    "codec": ("wire", ("dtype", *DELTA)),
    "aggregate": ("server", ("aggregate", "malicious", "clip_radius", "clip_steps")),
    "server_optimizer": ("server", ("optimizer", "learning_rate", "momentum", "beta2", "tau")),
}
"""Object of the caller's own -> the table, and its keys, in whose place it stands."""


def unused_keys(job: Job, plans: Sequence[Plan], own: Collection[str] = ()) -> list[str]:
    """A sentence for each reason why keys that are set change nothing.

    Args:
        job: the stage's job.
        plans: one for each of its rounds; which parts are trained, sent and kept is the same for all clients.
        own: which objects of the caller's own the run has.
    """
    if not plans:
        return []
    lines = []
    for table, keys, why in (*_messages(job, plans, own), *_training(job, plans), *_rows(job), *_head(job)):
        if changed := [key for key in keys if _is_set(job, table, key)]:
            lines.append(f"[{table}] {', '.join(changed)}: no effect here, as {why}")
    return lines


def _is_set(job: Job, table: str, key: str) -> bool:
    """It is neither the default nor what the method's name stands for."""
    tables = getattr(job, table)
    default = type(tables).model_fields[key].get_default(call_default_factory=True)
    return getattr(tables, key) not in (default, job.method.presets().get(table, {}).get(key, default))


def _messages(job: Job, plans: Sequence[Plan], own: Collection[str]) -> Iterator[Unused]:
    """Of what is sent, and of what the server does with it."""
    name, sends, wire = method_name(job.method), job.method.exchange, job.wire
    if sends != "activations":
        yield "wire", STREAM, f"it is for split learning, while {name!r} sends {sends.replace('_', ' ')}"
    if not any(plan.send or plan.between for plan in plans):
        nothing = f"with {name!r} clients send no part of the model"
        if sends == "weights":
            yield "wire", ("dtype", *DELTA), nothing
        yield "server", MERGE, nothing
        yield "train", ("proximal_mu",), nothing
    else:
        yield from _merging(job, own)
    for key in ("bits", "density"):
        if None not in (getattr(wire, f"up_{key}"), getattr(wire, f"down_{key}")):
            yield "wire", (key,), f"up_{key} and down_{key} say it for both ways"
    if job.method.population != "each":
        yield "clients", ("fraction",), f"with {name!r} one client trains"
    if sends == "hidden_states":
        yield "clients", ("fraction",), "every client sends its hidden states once"
    if not any(plan.keep for plan in plans) or job.method.population != "each":
        yield "output", ("client_models",), f"with {name!r} clients have no models of their own"
    if not job.between_sites:
        yield "engine", ("deadline", "quorum"), "it is for sites, which may fail to answer"


def _merging(job: Job, own: Collection[str]) -> Iterator[Unused]:
    """Of how parts travel and are merged."""
    for name in (name for name in REPLACED if name in own):
        table, keys = REPLACED[name]
        if job.method.exchange != "weights":  # hidden states and gradients still travel in that type
            keys = tuple(key for key in keys if key != "dtype")
        yield table, keys, f"the run has {'an' if name == 'aggregate' else 'a'} {name} of its own"
    if "server_optimizer" not in own:
        unread = MOMENTS.get(job.server.optimizer, ())
        yield "server", unread, f"[server] optimizer {job.server.optimizer!r} has no use for it"


def _training(job: Job, plans: Sequence[Plan]) -> Iterator[Unused]:
    """Of the steps of a client."""
    train, kind = job.train, job.task.kind
    if train.optimizer == "sgd":
        yield "train", ("betas", "epsilon", "optimizer_state"), "it is for AdamW, and [train] optimizer is 'sgd'"
    if train.lr_schedule == "constant":
        yield "train", ("lr_power",), "it goes with lr_schedule = 'polynomial'"
    if train.epochs == 1:
        yield "train", ("lr_decay",), "it acts from a round's second epoch on, and [train] epochs is 1"
    if not train.dropout:
        yield "adapter", ("dropout",), "[train] dropout is false, which sets every dropout to 0"
    if not TASK_KINDS[kind].masks:
        yield "train", ("mlm_head",), f"it goes with 'mlm', not with {kind!r}"
        yield "task", ("mask_probability",), f"it goes with 'mlm', not with {kind!r}"
    changed = job.method.exchange == "activations" and job.wire.activations_changed is not None
    if not (train.cache_frozen_layers or changed or any(plan.freeze_encoder for plan in plans)):
        yield "train", ("feature_cache_gb", "keep_feature_cache"), "nothing is cached"


def _rows(job: Job) -> Iterator[Unused]:
    """Of who holds which rows."""
    if job.data.test is not None or job.clients.test is not None:
        where = "data" if job.data.test is not None else "clients"
        yield "data", ("holdout",), f"[{where}] test says which rows are for testing"
    if job.clients.partition not in ("dirichlet", "dirichlet_mix"):
        yield "clients", ("alpha",), f"it goes with 'dirichlet' and 'dirichlet_mix', not {job.clients.partition!r}"
    if not TASK_KINDS[job.task.kind].classes:
        yield "task", ("labels",), f"{job.task.kind!r} has no classes"


def _head(job: Job) -> Iterator[Unused]:
    """Of the head over the encoder."""
    kind = job.head.kind
    if kind not in ("psum", "hsum"):
        yield "head", ("classifier", "average"), f"it is for the branches of psum and hsum, not for {kind!r}"
    if kind != "mean":
        yield "head", ("tokens",), f"it goes with 'mean', not with {kind!r}"
