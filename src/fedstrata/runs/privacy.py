"""What a run promises: epsilon of every client, before the run and after it, by the same sums."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fedstrata.client.private import noise_of, share_of_noise, spending
from fedstrata.data.prepare import population
from fedstrata.errors import UserError
from fedstrata.events import Counted, Event
from fedstrata.job.tables import Job
from fedstrata.plan.kinds import Index
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.privacy.accounting import Accountant, Spending, epsilon_of

Record = dict[str, Any]
"""``level``, ``clip``, ``delta``, ``accountant``, ``honest`` (of sums: so many clients' noise counts; else None),
``noise_from`` (``train.seed``, or ``sites``: secrets of theirs), ``epsilon`` (the largest of any client), and
``clients``: client -> its ``rounds``, ``noise``, ``rate``, ``releases`` and ``epsilon``; at level ``example`` none
of sites that have never said how many examples they have."""


def settle_privacy(job: Job, clients: Collection[str]) -> Job:
    """The job with the number of rounds that its noise is calibrated for.

    Args:
        job: the job.
        clients: the clients' names.

    Raises:
        UserError: clients take part in more rounds than ``participations`` says.
    """
    table = job.privacy
    if table.level == "none" or table.noise is not None:
        if table.shared_noise:
            share_of_noise(table, noise_of(table, job.train, 1))
        return job
    most = job.method.rounds
    if not job.between_sites:
        most = max(scheduled(job, clients).values(), default=0)
    if table.participations is not None and table.participations < most:
        raise UserError(
            f"[privacy] participations: is {table.participations}, but a client may be asked in {most} rounds; "
            "epsilon would be larger than what the job says"
        )
    settled = table.model_copy(update={"participations": table.participations or max(1, most)})
    if table.shared_noise:
        share_of_noise(settled, noise_of(settled, job.train, 1))
    return job.model_copy(update={"privacy": settled})


def scheduled(job: Job, clients: Collection[str]) -> Counter[str]:
    """Client -> the rounds in which it will be asked."""
    streams, names = Streams(job.train.seed), list(clients)
    counts = Counter[str]()
    for round in range(job.method.rounds):
        counts.update(sample_clients(names, job.clients.fraction, round, streams))
    return counts


def participated(
    job: Job,
    lines: Iterable[Mapping[str, Any]],
    missing: Iterable[Mapping[str, Any]],
    asked: Iterable[tuple[str, int]] = (),
) -> Counter[str]:
    """Client -> the rounds of a run's records in which something of it may have left.

    A client that was asked and did not answer counts too: its message may be on its way.

    Args:
        job: the stage's job.
        lines: of ``rounds.jsonl``.
        missing: of ``missing.jsonl``.
        asked: client and round where neither has a line yet.
    """
    key = "trained" if job.privacy.level == "example" else "sent"
    told = {(line["client"], line["round"]) for line in lines if line["client"] != SERVER and line.get(key)}
    told |= {(line["client"], line["round"]) for line in missing if line["round"] >= 0}
    return Counter(client for client, _ in told.union(asked))


def privacy_record(
    job: Job,
    examples: Mapping[str, int],
    rounds: Mapping[str, int],
    tell: Callable[[Event], None] = lambda event: None,
) -> Record | None:
    """What a stage spends; None where it has no noise.

    Args:
        job: the stage's job, settled.
        examples: client -> its training examples; 0 where they are not known.
        rounds: client -> in how many rounds it takes part.
        tell: told of clients whose noise is known; noise for another number of examples takes up to a second.

    Raises:
        UserError: dp-accounting is not installed.
    """
    table = job.privacy
    if table.level == "none":
        return None
    known = dict[tuple[int, int], Record]()
    clients = dict[str, Record]()
    for client, count in examples.items():
        if not count and table.level == "example":
            continue
        kind = max(1, count), rounds.get(client, 0)
        if kind not in known:
            known[kind] = _spent(job, *kind)
            tell(Counted("clients", len(clients) + 1, len(examples)))
        clients[client] = dict(known[kind])
    return {
        "level": table.level,
        "clip": table.clip,
        "delta": table.delta,
        "accountant": table.counted_by,
        "honest": (table.honest or 1) if table.shared_noise else None,
        "noise_from": "sites" if job.between_sites else "train.seed",
        "epsilon": max((own["epsilon"] for own in clients.values()), default=0.0),
        "clients": clients,
    }


def unknown_lines(job: Job, examples: Mapping[str, int]) -> list[str]:
    """Of which sites nothing is told of what is spent; arguments as of :func:`privacy_record`."""
    away = [client for client, count in examples.items() if not count]
    if job.privacy.level != "example" or not away:
        return []
    return [
        f"privacy: that is without {', '.join(away)}: epsilon of a site is known once it has said how many "
        "examples it has"
    ]


def _spent(job: Job, examples: int, rounds: int) -> Record:
    """What a client with so many examples spends in so many rounds."""
    spent = spending(job.privacy, job.train, examples, rounds)
    return {
        "rounds": rounds,
        "noise": spent.noise,
        "rate": spent.rate,
        "releases": spent.count,
        "epsilon": epsilon_of([spent], job.privacy.delta, job.privacy.counted_by),
    }


def dealt_otherwise(jobs: Sequence[Job], texts: Sequence[Callable[[], Mapping[str, Index]]]) -> bool:
    """Whether some stages deal the same texts to their clients in different ways, from whichever files.

    What a text has spent is then not what the client of one name has: it is at another one in each of them.
    Between sites nobody deals rows.

    Args:
        jobs: the stages' jobs.
        texts: of each stage, makes client -> digests of its texts, see
            :func:`fedstrata.data.fingerprint.text_digests`.
    """
    if len(jobs) == 1 or all(job.privacy.level == "none" for job in jobs):
        return False
    held = [
        _held(population(job.method.population, own()))
        for job, own in zip(jobs, texts, strict=True)
        if not job.between_sites
    ]
    return any(
        one[text] != other[text] for one, other in itertools.combinations(held, 2) for text in one.keys() & other
    )


def _held(texts: Mapping[str, Index]) -> dict[int, set[str]]:
    """Text -> whose it is."""
    held: dict[int, set[str]] = {}
    for client, own in texts.items():
        for text in own.tolist():
            held.setdefault(text, set()).add(client)
    return held


def combined_privacy(stages: Sequence[tuple[str, Record | None]], otherwise: bool = False) -> Record | None:
    """What several stages spend together; None where none has noise.

    ``epsilon`` is None, with the reason as ``why``, where the stages promise nothing together. It relies on the
    noise of the largest ``honest``, whichever stage has it.

    Args:
        stages: each one's name, and its record.
        otherwise: some of them deal the same rows in different ways, see :func:`dealt_otherwise`.
    """
    records = [record for _, record in stages if record]
    if not records:
        return None
    if len(stages) == 1:
        return records[0]
    without = [name for name, record in stages if not record]
    levels = sorted({record["level"] for record in records})
    if why := _no_whole(without, levels, otherwise):
        return {"level": levels[0], "epsilon": None, "why": why, "clients": {}}
    delta = max(record["delta"] for record in records)
    accountant: Accountant = "rdp" if any(record["accountant"] == "rdp" for record in records) else "pld"
    clients = {}
    for client in dict.fromkeys(name for record in records for name in record["clients"]):
        own = [record["clients"][client] for record in records if client in record["clients"]]
        spent = [Spending(one["noise"], one["rate"], one["releases"]) for one in own]
        rounds = sum(one["rounds"] for one in own)
        clients[client] = {"rounds": rounds, "epsilon": epsilon_of(spent, delta, accountant)}
    return {
        **records[-1],
        "delta": delta,
        "accountant": accountant,
        "honest": max((record["honest"] for record in records if record["honest"]), default=None),
        "epsilon": max((own["epsilon"] for own in clients.values()), default=0.0),
        "clients": clients,
    }


def _no_whole(without: Sequence[str], levels: Sequence[str], otherwise: bool) -> str:
    """Why stages promise nothing together; empty where they do."""
    if without:
        return f"stage {without[0]!r} has no noise"
    if len(levels) > 1:
        return f"the stages have levels {' and '.join(levels)}"
    return "its stages deal the same rows to their clients in different ways" if otherwise else ""
