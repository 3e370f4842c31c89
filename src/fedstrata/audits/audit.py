"""An audit: every stage of a job played for one client, attacked, and written down as ``audit.json``."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.audits import activations, class_head, embeddings, hidden_states, layers, token_head
from fedstrata.audits.bench import Bench
from fedstrata.audits.deep import deep
from fedstrata.audits.finding import Finding, View
from fedstrata.audits.fitting import Fitting, check_fitting, fitting, left_out, unread
from fedstrata.audits.later import both, later_bench
from fedstrata.audits.options import AuditOptions
from fedstrata.audits.play import Played
from fedstrata.audits.public import check_known, public_examples, public_texts
from fedstrata.audits.settings import played_pair, settings
from fedstrata.client.model_options import adapter_of, head_of
from fedstrata.client.setup import check_plans, fit_positions, init_seed, make_ready, resolve_jobs
from fedstrata.client.sharing import parts_with_sharing
from fedstrata.client.start_model import model_path, write_outline
from fedstrata.data.prepare import Prepared, population, prepare
from fedstrata.errors import UserError, did_you_mean
from fedstrata.events import Noted
from fedstrata.job.file import JobSource, Overrides, load
from fedstrata.job.tables import Job, method_name
from fedstrata.models import checkpoints, scratch
from fedstrata.models.fresh_torch import fresh_torch
from fedstrata.models.quiet import quiet
from fedstrata.plan.disclosure import POOLED, beside
from fedstrata.plan.kinds import AUDIT, AUDIT_FORMAT
from fedstrata.runs.engines import threads_set
from fedstrata.runs.folder import check_output_dir
from fedstrata.runs.notes import check_names, check_permission
from fedstrata.runs.privacy import settle_privacy
from fedstrata.runs.resume import without_none
from fedstrata.wire.files import write_bytes

ATTACKS = {
    "embeddings": embeddings.attack,
    "token_head": token_head.attack,
    "class_head": class_head.attack,
    "layers": layers.attack,
}
"""Attacks on parts of the model; those on other payloads are their exchange's."""
DECIDE = ("task", "method", "head", "adapter", "train", "wire", "privacy")
"""Tables of a job that decide what a client sends of its rows."""
STREAMS = {"hidden_states": hidden_states.attack, "activations": activations.attack}


@quiet()
@fresh_torch()
def audit(source: JobSource, overrides: Overrides, options: AuditOptions) -> dict[str, Any]:
    """See :func:`fedstrata.audit`."""
    started = time.monotonic()
    base_dir = Path(source).resolve().parent if isinstance(source, str | Path) else None
    jobs = load(source, overrides)
    if any(job.between_sites for job in jobs):
        raise UserError(
            "audit: between sites the rows are at the sites; a site audits with rows of its own, "
            "engine.name=inprocess and data.train=FILE"
        )
    jobs = resolve_jobs([_on_cpu(job) for job in jobs], base_dir)
    for job in jobs:
        check_names(job)
        check_permission(job)
    folder = Path(jobs[0].output.dir)
    _check_place(folder)
    starts: dict[str, tuple[str, str]] = {}
    stages: list[dict[str, Any]] = []
    fits: list[Fitting] = []
    with tempfile.TemporaryDirectory() as scratch_folder:
        for job in jobs:
            data = prepare(job, base_dir)
            job = settle_privacy(job, population(job.method.population, data.shards))
            place = Path(scratch_folder) / (job.stage or "start")
            starts[job.stage] = _start(job, data, base_dir, place, folder, starts)
            with threads_set(job.engine.threads):
                stage, found = _stage(job, data, starts[job.stage], base_dir, options, Path(scratch_folder))
            stages.append(stage)
            fits.append(found)
    if not options.deep:
        check_fitting(fits, options.attacks)
    record = {"format": AUDIT_FORMAT, "stages": stages, "seconds": time.monotonic() - started}
    if any(stage["findings"] or stage["notes"] for stage in stages):
        write_bytes(folder / AUDIT, json.dumps(record, indent=1, ensure_ascii=False).encode())
    return record


def _on_cpu(job: Job) -> Job:
    """The job on a processor, where attacks compute: what a GPU would send differs by rounding alone."""
    return job.model_copy(update={"train": job.train.model_copy(update={"device": "cpu"})})


def _check_place(folder: Path) -> None:
    """Refuse an output folder that is not FedStrata's, or cannot be written, before anything is played."""
    check_output_dir(folder, resume=True)
    if (folder / AUDIT).is_dir():
        raise UserError(f"[output] dir: {folder / AUDIT} is a folder, where the audit writes a file; move it away")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise UserError(f"[output] dir: {folder} cannot be written ({error.strerror})") from None


def _start(
    job: Job,
    data: Prepared,
    base_dir: Path | None,
    place: Path,
    folder: Path,
    starts: Mapping[str, tuple[str, str]],
) -> tuple[str, str]:
    """Folder or hub id of the stage's model, and a note where it is not the one that a run would have."""
    if job.model is None:
        trained = folder / "stages" / job.start / "model"
        if trained.is_dir():
            return str(trained), ""
        note = f"stage {job.start!r} has not been run in {folder}: this one is played from its start model"
        return starts[job.start][0], note
    if job.model.config is None:
        return model_path(job, base_dir), ""
    start = write_outline(job, data, base_dir, place)
    scratch.add_weights(Path(start), job.task.kind, data.labels, head_of(job), init_seed(job))
    return start, ""


def _stage(
    job: Job, data: Prepared, start: tuple[str, str], base_dir: Path | None, options: AuditOptions, folder: Path
) -> tuple[dict[str, Any], Fitting]:
    """One stage's record, and which attacks fit it."""
    clients = list(population(job.method.population, data.shards))
    client = clients[0] if options.client is None else options.client
    if client not in clients:
        raise UserError(f"--client: {client!r} is no client; {did_you_mean(client, clients)}")
    parts = checkpoints.parts_of(start[0], job.task.kind, data.labels, head_of(job), adapter_of(job))
    check_plans(job, parts_with_sharing(job, parts, start[0]), data.shards)
    ready = make_ready(job, data, start[0])
    job = fit_positions(job, checkpoints.max_positions(ready.loaded.model))
    texts, what = public_texts(job, options.public, base_dir)
    public = public_examples(job, data, ready, texts)
    bench = Bench(job, data, ready, client, public, folder, options.tell)
    check_known(job, public, bench.special, what)
    notes = [start[1]] if start[1] else []
    findings, plays, fits = _rounds(bench, options, notes)
    if options.deep:
        place = Path(job.output.dir) / "stages" / job.stage if job.stage else Path(job.output.dir)
        more, trained = deep(bench, place, notes)
        findings, plays = [*findings, *more], [*plays, *trained]
    if bench.exchange.sends(bench.plan):
        told = beside(job.privacy.level, job.privacy.sum_only)
        notes.append(f"beside the attacks the server is told {told}")
    record = {
        "stage": job.stage,
        "method": method_name(job.method),
        "task": job.task.kind,
        "payload": bench.exchange.payload,
        "client": client,
        "model": ready.loaded.name,
        "settings": _settings(job),
        "public": {"source": what, "texts": len(texts), "tokens": int(bench.frequencies.sum())},
        "plays": plays,
        "findings": [finding.record() for finding in findings],
        "notes": notes,
    }
    return record, fits


def _rounds(
    bench: Bench, options: AuditOptions, notes: list[str]
) -> tuple[list[Finding], list[dict[str, Any]], Fitting]:
    """What is found in the first round, and in a later one that sends more; what was played, and what fits."""
    if why := _unreadable(bench):
        notes.append(why)
        return [], [], {}
    fits = fitting(bench)
    findings, plays = _findings(bench, options, fits, notes)
    if later := later_bench(bench, options.attacks):
        more, trained = _findings(later, options, fitting(later), notes)
        findings, plays, fits = [*findings, *more], [*plays, *trained], both(fits, fitting(later))
    notes += [*unread(bench, later), *left_out(fits, options.attacks)]
    return findings, plays, fits


def _settings(job: Job) -> dict[str, Any]:
    """The tables of the job that decide what is sent, by which a page knows whether it shows a run of them."""
    tables = without_none(job.dump())
    found: dict[str, Any] = json.loads(json.dumps({name: tables[name] for name in DECIDE if name in tables}))
    return found


def _findings(
    bench: Bench, options: AuditOptions, fits: Fitting, notes: list[str]
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """What the attacks find in every setting, and what was played: nothing where none of them fits."""
    if not fits.keys() & set(options.attacks):
        return [], []
    findings: list[Finding] = []
    plays: list[dict[str, Any]] = []
    for setting in settings(bench):
        name = f"{setting.name} of round {bench.round + 1}" if bench.round else setting.name
        options.tell(Noted(f"{bench.job.stage or 'this job'}: simulating and attacking {name}"))
        client, shadow = played_pair(bench, setting)
        plays.append(_played(bench, name, client))
        if setting.cut:
            notes.append(f"of the round's {setting.cut:,} steps the first {client.reply.steps:,} are played")
        if client.sent and len(bench.index) > len(client.index):
            notes.append(
                f"of the client's {len(bench.index):,} texts the hidden states of the first {len(client.index):,} "
                f"are played, and at most {hidden_states.MOST} of these are read"
            )
        if not client.texts:
            notes.append(f"{name}: the draw of examples took none of the client's, so nothing was attacked")
            continue
        findings += _attacked(View(bench, name, client, shadow), options.attacks)
    if any(play["texts"] for play in plays) and not any(play["distinct_tokens"] for play in plays):
        notes.append(
            "the texts that were used have no token that the tokenizer knows: attacks on words had nothing to find"
        )
    return findings, plays


def _unreadable(bench: Bench) -> str:
    """Why there is no message to attack; empty where there is one."""
    if not bench.exchange.sends(bench.plan):
        pooled = bench.job.method.population == "pooled"
        return POOLED if pooled else "nothing leaves the clients: there is nothing to attack"
    if bench.job.privacy.sum_only:
        return (
            "single messages are masked ([privacy] sum_only): the server sees their sums alone, and no attack "
            "here reads these; others may"
        )
    return ""


def _attacked(view: View, names: Sequence[str]) -> list[Finding]:
    """What the named attacks find, as far as they fit."""
    payload = view.bench.exchange.payload
    attacks = {**ATTACKS, payload: STREAMS[payload]} if payload in STREAMS else ATTACKS
    chosen = [name for name in names if name in attacks and (name in STREAMS or view.client.after)]
    return [finding for name in chosen for finding in attacks[name](view)]


def _played(bench: Bench, name: str, client: Played) -> dict[str, Any]:
    """How much a play has used, in the record."""
    tokens = int(client.token_ids(bench.vocabulary, bench.special).sum())
    return {"setting": name, "steps": client.reply.steps, "texts": client.texts, "distinct_tokens": tokens}
