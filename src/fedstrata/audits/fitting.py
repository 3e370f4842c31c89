"""Which attacks fit a stage: what each of them reads of that which is sent, and what none of them reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstrata.audits.bench import Bench
from fedstrata.audits.class_head import told_by_class
from fedstrata.audits.embeddings import is_factor
from fedstrata.audits.first_layer import first_matrices
from fedstrata.audits.options import ATTACKS
from fedstrata.audits.token_head import read_of
from fedstrata.errors import UserError
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.parts import Part
from fedstrata.plan.plan import make_plan
from fedstrata.plan.sharing import DISTANCES

Fitting = Mapping[str, Sequence[str]]
"""Attack -> the parts, or the payload, that it reads; attacks that find nothing to read are left out."""


def fitting(bench: Bench) -> Fitting:
    """What each attack reads of a client's message in the round."""
    kinds: dict[str, list[str]] = {name: [] for name in ATTACKS}
    for part in _sent(bench):
        if part.kind == "embeddings" or _has_columns(bench, part):
            kinds["embeddings"].append(part.name)
        if part.kind == "head" and (attack := _head_attack(bench, part)):
            kinds[attack].append(part.name)
    kinds["layers"] = _first(bench)
    if bench.exchange.payload in kinds:
        kinds[bench.exchange.payload].append(bench.exchange.payload)
    return {name: read for name, read in kinds.items() if read}


def check_fitting(stages: Sequence[Fitting], attacks: Sequence[str]) -> None:
    """Refuse attacks of which none fits any stage.

    Args:
        stages: what fits, stage by stage; empty for one in which there is nothing to attack.
        attacks: those that were asked for.

    Raises:
        UserError: other attacks would fit, and none of these does.
    """
    fits = [name for name in ATTACKS if any(name in stage for stage in stages)]
    if fits and not set(fits) & set(attacks):
        raise UserError(
            f"--attacks: {', '.join(attacks)} fits nothing that is sent here; expected one or more of: "
            f"{', '.join(fits)}"
        )


def left_out(fits: Fitting, attacks: Sequence[str]) -> list[str]:
    """A sentence for each attack that fits and was not asked for."""
    return [
        f"{', '.join(read)}: not attacked, as --attacks leaves out {attack}"
        for attack, read in fits.items()
        if attack not in attacks
    ]


def unread(bench: Bench, played: Bench | None) -> list[str]:
    """What is sent, in whatever round, and is not attacked: that nothing is found there says nothing.

    Args:
        bench: the stage, in its first round.
        played: the later round that is played too, if any.
    """
    found = [line for each in (bench, played) if each for line in _unread(each)]
    sent = set() if played is None else {*played.plan.send}
    if later := [name for name in sent_later(bench) if name not in sent]:
        rounds = "the first is" if played is None else f"the first and round {played.round + 1} are"
        found.append(f"{', '.join(later)}: sent in a later round, and not attacked here, where {rounds} played")
    if played and (own := _trained_before(played)):
        found.append(
            f"{', '.join(own)}: what is sent in round {played.round + 1} also tells of the texts of the rounds "
            "since the last sending ([wire] part_period); here that round's alone are trained on and counted"
        )
    return [*dict.fromkeys(found)]


def _trained_before(bench: Bench) -> list[str]:
    """Sent parts of which a client goes on with its own values of earlier rounds, where it took part in them."""
    return [part for part, since in bench.plan.between if part in bench.plan.send and since < bench.round]


def _unread(bench: Bench) -> list[str]:
    """What is sent in a round that no attack reads."""
    parts = _sent(bench)
    layers = [part for part in parts if part.kind in ("layer", "adapter") and part.depth is not None]
    upper = [part.name for part in layers if part.depth != bench.lowest]
    upper += [f"layers of the {part.name}" for part in parts if part.kind == "head" and bench.parts.head_layers]
    read = _first(bench)
    others = [part.name for part in layers if part.depth == bench.lowest and part.name not in read]
    others += [part.name for part in parts if part.kind in ("pooler", "base")]
    others += [p.name for p in parts if p.kind == "adapter" and p.depth is None and not _has_columns(bench, p)]
    others += [part.name for part in parts if part.kind == "head" and not _head_attack(bench, part)]
    found = []
    if upper:
        found.append(f"{', '.join(upper)}: no attack here reads layers above the lowest; others may")
    if others:
        found.append(f"{', '.join(others)}: no attack here reads them; others may")
    tables = {name for part in parts for name in part.shapes if DISTANCES.search(name)}
    if tables := tables - bench.parts.sharing.omitted:
        found.append(f"{', '.join(sorted(tables))}: no attack here reads tables of distances; others may")
    if words := _of_gradients(bench):
        found.append(f"gradients: no attack here reads {words}; others may")
    return found


def _of_gradients(bench: Bench) -> str:
    """What no attack reads from the gradients of batches; empty where all is read, or none are sent."""
    if bench.exchange.payload != "activations":
        return ""
    target, plan = TASK_KINDS[bench.job.task.kind].target, bench.plan
    if target == "number":
        return "numbers from them"
    if bench.parts.layer(plan.layers[-1]) in plan.server:
        return ""
    return f"{'words' if target == 'token' else 'labels'} from them through layers of the client's own"


def sent_later(bench: Bench) -> list[str]:
    """Parts that the client sends in some round, and not in the first."""
    job, parts, streams = bench.job, bench.parts, bench.ready.runtime.trainer.streams
    sent: set[str] = set()
    for round in range(1, job.method.rounds):
        sent.update(make_plan(job.method, parts, job.task.kind, round, bench.client, streams).send)
    return [name for name in parts.names if name in sent and name not in bench.plan.send]


def _sent(bench: Bench) -> list[Part]:
    return [bench.parts[name] for name in bench.plan.send]


def _first(bench: Bench) -> list[str]:
    """The parts with a matrix that takes the lowest layer's input; adapters may be of other matrices alone."""
    lowest = [part for part in _sent(bench) if part.kind in ("layer", "adapter") and part.depth == bench.lowest]
    names = {matrix.name for matrix in first_matrices(bench)} if lowest else set[str]()
    return [part.name for part in lowest if names & part.shapes.keys()]


def _has_columns(bench: Bench, part: Part) -> bool:
    """Whether it is an adapter of the embeddings, with a column for each token or position."""
    return part.kind == "adapter" and any(is_factor(bench.parts, name) for name in part.shapes)


def _head_attack(bench: Bench, head: Part) -> str:
    """The attack that reads a head; empty where none does, or what it would read does not travel."""
    labels = bench.data.labels
    if TASK_KINDS[bench.job.task.kind].target == "token":
        return "token_head" if read_of(bench, head) else ""
    return "class_head" if labels is not None and told_by_class(head, len(labels)) else ""
