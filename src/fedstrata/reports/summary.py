"""What a run did, what came of it and what it cost, in plain sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from fedstrata.errors import plural
from fedstrata.reports.partial_results import SETUP
from fedstrata.reports.parts import part_words
from fedstrata.reports.runs import Run, curve
from fedstrata.reports.tables import MB, client_rows, figure, result_rows, score_figure
from fedstrata.reports.times import duration

SENTENCES = 60
"""Most clients of which each has a sentence."""
STATUS = {
    "finished": "The run finished",
    "stopped": "The run stopped before its end",
    "failed": "The run failed",
    "running": "The run is going on",
}


def summary(run: Run) -> str:
    """What was trained, by whom, what came of it and what it cost; of a run or a stage."""
    row = result_rows([run])[0]
    work = _stages(run) if run.stages else _work(run)
    return " ".join(
        filter(
            None,
            [work, _outcome(run, row), _cost(run, row), _late(run), _missed(run), _lost(run), _outside(run)],
        )
    )


def _work(run: Run) -> str:
    rounds = len({line["round"] for line in run.work})
    planned = run.job.get("method", {}).get("rounds", rounds)
    method = f"by {run.result['method']} ({run.result['task']})"
    if planned == 0:
        return f"Nothing was trained ({run.result['task']}): the start model is scored and saved as it is."
    if not rounds:
        return f"No client finished a round {method}."
    worked = {line["client"] for line in run.work}
    trained = [client for client in run.holders if client in worked] or run.holders  # or the server, for all
    clients = plural(len(run.holders), "client")
    if len(trained) < len(run.holders):  # the others were never sampled
        clients = f"{len(trained):,} of {clients}"
    examples = plural(_examples(run, trained), "example")
    span = f"{rounds} of {plural(planned, 'round')}" if rounds < planned else plural(rounds, "round")
    return f"{clients} with {examples} {_trained(run)} {method} in {span}."


def _examples(run: Run, clients: Iterable[str]) -> int:
    records = (run.result["clients"].get(client) or run.partition["clients"][client] for client in clients)
    return sum(record["examples"] for record in records)


def _trained(run: Run) -> str:
    """Which parts were trained, which were sent, and which were the server's."""
    trained, sent, served = (_named(run, key) for key in ("trained", "sent", "server"))
    did = f"trained {part_words(trained, run.parts) or 'nothing'}"
    if sent == trained:
        did = f"trained and sent {part_words(trained, run.parts)}"
    elif sent:
        did += f" and sent {part_words(sent, run.parts)},"
    if served:
        did += f"{'' if did.endswith(',') else ','} the server {part_words(served, run.parts)},"
    return did


def _named(run: Run, key: str) -> list[str]:
    """The parts that any client's line names under ``key``, in the model's order."""
    names = {name for line in run.work for name in line.get(key, ())}
    return [name for name in run.named_parts if name in names]


def _stages(run: Run) -> str:
    names = ", then ".join(stage.name for stage in run.stages)
    return f"A job of {plural(len(run.stages), 'stage')}: {names}. Scores are the last stage's, costs are sums."


def _outcome(run: Run, row: dict[str, Any]) -> str:
    status = STATUS.get(row["status"], f"The run is {row['status']}")
    if row["score"] is None:
        return f"{status}; no score was recorded."
    score = f"{row['headline']} {score_figure(row['score'])}"
    if row["spread"] is not None:
        score += f" ± {score_figure(row['spread'])} (mean and standard deviation over the clients)"
    before = [point.score for point in curve(run) if point.round == -1]
    reached = f"{status}, so far with {score}" if row["status"] == "running" else f"{status} with {score}"
    return reached + (f"; before training it was {score_figure(before[0])}." if before else ".")


def _cost(run: Run, row: dict[str, Any]) -> str:
    planned = any(stage.job.get("method", {}).get("rounds") for stage in run.stage_runs)
    if planned and not row["total_mb"] and not any(stage.work for stage in run.stage_runs):
        return "No round has ended, so neither communication nor work was counted."
    download = f"{figure(row['setup_mb'])} MB"
    communication = (
        f"Each client sent {figure(row['up_mb'])} MB and received {figure(row['down_mb'])} MB on average, "
        f"plus {download} of initial download."
    )
    if not row["total_mb"]:
        communication = f"There was no communication but the initial download, {download} per client."
    if not row["total_mb"] and not row["setup_mb"]:
        communication = "There was no communication."
    served = any(line.get("server") for stage in run.stage_runs for line in stage.work)
    workers = "Clients and server" if served else "All clients"
    work = f"{workers} together computed {figure(row['tflops'])} TFLOP"
    if row["tflops"] is None:
        work = "Sites that add noise do not say how much they computed"
    return f"{communication} {work}; wall time {duration(row['seconds'])}."


def _late(run: Run) -> str:
    """Of asynchronous rounds, how many answers came late and how late."""
    staleness = [line["staleness"] for line in run.work if isinstance(line.get("staleness"), int)]
    late = [number for number in staleness if number]
    if not staleness:
        return ""
    if not late:
        return "The rounds were asynchronous; no answer came late."
    return (
        f"The rounds were asynchronous: {len(late)} of {plural(len(staleness), 'answer')} came late, by "
        f"{figure(fmean(late))} versions of the model on average, {max(late)} at most."
    )


def _missed(run: Run) -> str:
    """Which clients did not reply, when and why."""
    rounds: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for line in run.result.get("missing") or ():
        rounds[line["client"], line["reason"]].add(line["round"])
    sentences = []
    for (client, reason), missed in rounds.items():
        listed = ", ".join(str(at + 1) for at in sorted(missed))
        sentences.append(f"Without {client} in {'round' if len(missed) == 1 else 'rounds'} {listed}: it {reason}.")
    return " ".join(sentences)


def _lost(run: Run) -> str:
    """Which clients lost what they kept of the run."""
    rounds: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for line in run.result.get("lost") or ():
        rounds[line["client"], " and ".join(line["what"])].append(str(line["round"] + 1))
    return " ".join(
        f"{client} lost what it kept ({what}) after {'round' if len(at) == 1 else 'rounds'} {', '.join(at)}, and "
        "went on without it."
        for (client, what), at in rounds.items()
    )


def _outside(run: Run) -> str:
    """Which clients sent what is far outside of what the others did."""
    rounds: defaultdict[str, set[int]] = defaultdict(set)
    most: defaultdict[str, float] = defaultdict(float)
    for line in run.result.get("outliers") or ():
        rounds[line["client"]].add(line["round"] + 1)
        most[line["client"]] = max(most[line["client"]], line["times"])
    return " ".join(
        f"{client} is far outside the others in {'round' if len(at) == 1 else 'rounds'} "
        f"{', '.join(map(str, sorted(at)))}: up to {most[client]:.3g} times the median client's distance."
        for client, at in rounds.items()
    )


def client_sentences(run: Run) -> list[str]:
    """A sentence for each client: what it trained on, what left it, what it got; none where there are many."""
    if not run.work or len(run.clients) > SENTENCES:
        return []
    return [_client_sentence(run, row) for row in client_rows(run)]


def _client_sentence(run: Run, row: dict[str, Any]) -> str:
    name = row["client"]
    sent = [line for line in run.transfers if line["client"] == name and line["direction"] == "up"]
    came = _came(run, name)
    metric = run.result["headline"]
    own = "" if row["score"] is None else f" Its own score is {metric} {score_figure(row['score'])}."
    if name not in run.holders:
        return f"{name} holds test rows of its own, on which the model is scored.{own}"
    if not row["rounds"]:
        return f"{name} took part in no round; {came}."
    named = {line["part"] for line in sent}
    what = part_words([part for part in run.named_parts if part in named], run.parts)
    left = f"{figure(row['up_mb'])} MB left it ({what})" if sent else "nothing of a model or text left it"
    examples, rounds = plural(row["examples"], "example"), plural(row["rounds"], "round")
    return f"{name} trained on {examples} in {rounds}: {left}, and {came}.{own}"


def _came(run: Run, client: str) -> str:
    """What a client received, and how much of it in the initial download, which no total of the page counts."""
    got = [line for line in run.ledger if line["client"] == client and line["direction"] == "down"]
    setup = sum(line["bytes"] for line in got if line["phase"] == SETUP)
    first = f", {figure(setup / MB)} MB of them in the initial download" if setup else ""
    return f"{figure(sum(line['bytes'] for line in got) / MB)} MB came to it{first}"
