"""The models that a stage leaves behind: the folders of what was scored, and what they have in common.

    model/                  the one model, where there is one: of the server, or of the only client
    clients/NAME/model/     where clients keep parts: each client's model; the score is the mean over these
    shared/                 then also: the parts that all clients have in common, which are no whole model
    adapter/                with adapters: those of the one model, for peft; clients/NAME/adapter/ likewise
    base/                   the model that they belong to, where the run moved matrices of the start model

A client's folder costs next to no disk: its weights are second names (hard links) of the file in ``shared/`` and
of the one with the client's own parts in ``state/clients/``; its config and tokenizer are those in ``shared/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstrata.errors import UserError
from fedstrata.job.tables import Job
from fedstrata.models import checkpoints
from fedstrata.models.adapter_folder import save_adapters, save_base
from fedstrata.models.adapter_names import BASE
from fedstrata.models.adapters import adapted_modules, without_adapters
from fedstrata.models.folders import CODE, FILES, tensor_sizes, write_client_folder
from fedstrata.models.headed import CARD
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan, make_plan
from fedstrata.plan.streams import Streams
from fedstrata.server.server import Server
from fedstrata.wire.files import clear
from fedstrata.wire.store import Store, write_tensors

SHARED_CARD = """\
This is no whole model: it holds {shared}, which all clients have in common. Each client has {personal} of its own.
No score belongs to this folder; loaded as a model, the rest of it would be new and untrained.
"""
CLIENT_CARD = """\
The model of the client {client}. The run's score is the mean over the models of all its clients.
"""


@dataclass(frozen=True)
class Trained:
    """What a stage has come to.

    Attributes:
        job: its job.
        clients: the clients' names.
        server: after the last round.
        loaded: the model's config and tokenizer.
        folder: the stage's output folder.
    """

    job: Job
    clients: Sequence[str]
    server: Server
    loaded: checkpoints.Loaded
    folder: Path


def last_plans(job: Job, parts: Parts, clients: Sequence[str]) -> dict[str, Plan]:
    """Each client's plan of the last round, by which it is scored at the end."""
    streams, last = Streams(job.train.seed), max(job.method.rounds - 1, 0)
    return {client: make_plan(job.method, parts, job.task.kind, last, client, streams) for client in clients}


def personal_parts(job: Job, parts: Parts, clients: Sequence[str]) -> tuple[str, ...]:
    """The parts that some client keeps at the end, in the model's order.

    In one process a single client's model is the model, so there are none.
    """
    if len(clients) == 1 and not job.between_sites:
        return ()
    kept = {part for plan in last_plans(job, parts, clients).values() for part in plan.keep}
    return tuple(part for part in parts.names if part in kept)


def save_models(trained: Trained) -> None:
    """Save what was scored, see above; between sites each saves its own model, and here is ``shared/`` alone."""
    job, clients, server = trained.job, trained.clients, trained.server
    personal = personal_parts(job, server.parts, clients)
    if not personal:
        _save_whole(trained)
        return
    plans = last_plans(job, server.parts, clients)
    held = _as_held(server, next(iter(plans.values())).away(server.parts))
    common = [part for part in server.parts.names if part not in personal]
    card = SHARED_CARD.format(shared=", ".join(common) or "no weights", personal=", ".join(personal))
    shared = {name: tensor for part in common for name, tensor in held[part].items()}
    if trained.loaded.adapter:
        moved = _personal_matrices(trained.loaded, server.parts, personal)
        shared = {name: tensor for name, tensor in shared.items() if name not in moved}
    checkpoints.save(trained.loaded, shared, trained.folder / "shared", card)
    if trained.loaded.adapter:
        _save_personal(trained, plans, held, personal)
    if not job.between_sites:
        if not trained.loaded.adapter:
            _complete(trained, plans, {part: held[part] for part in personal})
            clear(trained.folder / "clients", FILES)  # of a call that was killed here
        if job.output.client_models is not False and job.adapter.merged_model:
            save_client_models(trained.folder, clients)


def whole_model(trained: Trained) -> Tensors:
    """The weights of the one model: the server's, or as clients received it where these have scored it."""
    job, server, held = trained.job, trained.server, trained.server.weights
    own, alone = Tensors(), len(trained.clients) == 1 and not job.between_sites
    [(client, plan)] = last_plans(job, server.parts, trained.clients[:1]).items()
    if job.clients.test is not None or (alone and plan.keep):
        held = _as_held(server, plan.away(server.parts))
    if alone:
        own = Store(trained.folder / "state" / "clients" / client).load(job.method.rounds)
    return {name: tensor for tensors in held.values() for name, tensor in tensors.items()} | own


def _save_whole(trained: Trained) -> None:
    job, weights = trained.job, whole_model(trained)
    if job.adapter.merged_model:
        checkpoints.save(trained.loaded, weights, trained.folder / "model")
    if trained.loaded.adapter:
        base = save_base(trained.loaded, weights, trained.folder / "base")
        save_adapters(trained.loaded, weights, trained.folder / "adapter", base)


def save_client_models(folder: Path, clients: Iterable[str]) -> None:
    """Write the models that are not in ``clients/NAME/model/``, from the other folders of a stage."""
    shared = folder / "shared"
    head = CARD if (shared / f"{CODE}.py").exists() else ""
    for client in clients:
        place, own = folder / "clients" / client / "model", Store(folder / "state" / "clients" / client)
        found = (_completed(folder, client), own.newest(), _completed(folder, ""))
        personal = next((path for path in found if path and path.exists()), None)
        if personal and not any(place.glob("*.safetensors")):  # emptied by a killed call, or with files of others
            write_client_folder(shared, personal, place, CLIENT_CARD.format(client=client), head)


def _save_personal(trained: Trained, plans: Mapping[str, Plan], held: Weights, personal: Sequence[str]) -> None:
    """Save each client's adapters, and its personal tensors as those of a plain model."""
    loaded, folder, parts = trained.loaded, trained.folder, trained.server.parts
    common = {name: tensor for own in held.values() for name, tensor in own.items()}
    base = save_base(loaded, common, folder / "base")
    if trained.job.between_sites:
        return
    clear(folder / "clients", FILES)  # of a call that was killed here
    moved = {name.replace(f"{BASE}.", ".") for name in _personal_matrices(loaded, parts, personal)}
    moved |= {name for part in personal for name in parts.shapes[part]}
    for client, plan in plans.items():
        kept = {name for part in plan.keep for name in parts.shapes[part]}
        own = Store(folder / "state" / "clients" / client).load(trained.job.method.rounds)
        weights = {**common, **{name: tensor for name, tensor in own.items() if name in kept}}
        card = CLIENT_CARD.format(client=client)
        place = folder / "clients" / client / "adapter"
        save_adapters(loaded, weights, place, base, card, like=folder / "shared")
        plain = without_adapters(adapted_modules(loaded.model), weights)
        write_tensors(_completed(folder, client), {name: t for name, t in plain.items() if name in moved})


def _personal_matrices(loaded: checkpoints.Loaded, parts: Parts, personal: Sequence[str]) -> set[str]:
    """The matrices that have adapters of which each client has its own."""
    own = {name for part in personal for name in parts.shapes[part]}
    adapted = adapted_modules(loaded.model)
    return {matrix.base for matrix in adapted if any(own & set(factors) for factors in matrix.factors)}


def _as_held(server: Server, away: Sequence[str]) -> Weights:
    """Every part as the clients hold it; the layers that the server holds as they are there."""
    return {part: server.weights[part] if part in away else server.received(part) for part in server.parts.names}


def _complete(trained: Trained, plans: Mapping[str, Plan], held: Weights) -> None:
    """Write the personal parts of the clients that have not all of them on their own disk.

    A client that was never sampled has none: it was scored with the parts as the server has them.
    """
    shapes, rounds = trained.server.parts.shapes, trained.job.method.rounds
    all_of_them = {name: tensor for tensors in held.values() for name, tensor in tensors.items()}
    for client, plan in plans.items():
        store = Store(trained.folder / "state" / "clients" / client)
        path = store.newest(rounds)
        if path is None:
            write_tensors(_completed(trained.folder, ""), all_of_them)
        elif not held.keys() <= set(plan.keep) or tensor_sizes(path).keys() != all_of_them.keys():
            kept = {name for part in plan.keep for name in shapes[part]}
            own = {name: tensor for name, tensor in store.load(rounds).items() if name in kept}
            write_tensors(_completed(trained.folder, client), {**all_of_them, **own})


def _completed(folder: Path, client: str) -> Path:
    """Where the personal parts of such a client are; without a name, of one that was never sampled."""
    return folder / "shared" / "personal" / f"{f'client-{client}' if client else 'untrained'}.safetensors"


def check_start(job: Job, own: Parts, start: Job, begin: Parts, clients: Sequence[str]) -> None:
    """Refuse a stage before which no plain model is, or that would lose what clients have learned for themselves.

    Args:
        job: the stage's job.
        own: the parts of its model.
        start: the job of the stage whose model it starts from.
        begin: the parts of that model.
        clients: the clients of the stage that it starts from.

    Raises:
        UserError: there are adapters alone, or its model has tensors that each of those clients has its own of.
    """
    if not start.adapter.merged_model:
        raise UserError(f"[adapter] merged_model: must be true in stage {start.stage!r}, whose model is next")
    personal = personal_parts(start, begin, clients)
    taken = {name: shape for part in own.names for name, shape in own.shapes[part].items()}
    lost = [part for part in personal if taken.items() & begin.shapes[part].items()]
    if lost:
        raise UserError(
            f"[[stages]] {job.stage}: starts from {start.stage!r}, after which each client has its own "
            f"{', '.join(lost)}; a stage starts from one model for all clients, so these would be lost; expected "
            "a start whose clients share them"
        )
