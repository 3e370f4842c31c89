"""What a user should know, or permit, before the first round."""

from __future__ import annotations

from fedstrata.cost.bytes import payload
from fedstrata.data.prepare import Prepared
from fedstrata.errors import UserError
from fedstrata.exchanges import EXCHANGES
from fedstrata.job.tables import Job, method_name
from fedstrata.models.checkpoints import Loaded
from fedstrata.plan.plan import make_plan
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.server.aggregate import make_aggregate
from fedstrata.server.optimizer import make_server_optimizer
from fedstrata.wire.codec import DTYPES, make_codec


def check_names(job: Job) -> None:
    """Look up what a job names in the registries of codecs, aggregates and server optimizers.

    Raises:
        UserError: one of them has no such name.
    """
    make_codec(job.wire.dtype)
    make_aggregate(job.server.aggregate)
    make_server_optimizer(job.server)


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


def notes(job: Job, loaded: Loaded, data: Prepared, tokens: int) -> tuple[str, ...]:
    """What the user should know before the first round, a sentence each; ``tokens`` of all training examples."""
    made = []
    if data.dropped:
        made.append(f"{data.dropped} rows without text or label were left out")
    if job.model is not None and job.model.config is not None and job.model.tokenizer is None:
        made.append("the tokenizer was trained on all clients' training rows")
    if loaded.fresh:
        made.append(f"newly initialized: {', '.join(loaded.fresh)}")
    if job.method.exchange != "weights":
        made.append(f"each client sends the server {EXCHANGES[job.method.exchange].permission}")
    if job.method.exchange == "activations" and tokens:
        epoch = 4 * tokens * loaded.parts.hidden * DTYPES[job.wire.dtype].itemsize
        whole = 2 * len(data.shards) * payload(loaded.parts, loaded.parts.names, job.wire.dtype)
        made.append(
            f"an epoch moves {epoch / 1e6:.4g} MB through the cut, {epoch / whole:.3g} times the "
            f"{whole / 1e6:.4g} MB of a round of FedAvg"
        )
    streams = Streams(job.train.seed)
    rounds = range(job.method.rounds)
    plans = [make_plan(job.method, loaded.parts, job.task.kind, round, SERVER, streams) for round in rounds]
    if never := set(loaded.fresh) - {part for plan in plans for part in plan.train}:
        made.append(f"{', '.join(sorted(never))}: newly initialized, and this method never trains it")
    return tuple(made)
