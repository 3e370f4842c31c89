"""Model cards: what a saved model is, what it was trained on (by counts alone), its scores, costs and limits.

Cards are published. Of a job with noise, in whichever stage, they tell nothing that was counted of the clients'
rows, nor the seed, if noise comes from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedstrata.errors import four_decimals, megabytes, plural
from fedstrata.job.task_kinds import CLASSIFIER, TASK_KINDS
from fedstrata.job.toml import read_toml
from fedstrata.models.folders import CARD, CODE
from fedstrata.reports.tables import TERA, figure
from fedstrata.wire.files import write_bytes
from fedstrata.wire.foreign import plain_text

END = "<!-- end of what fedstrata writes; what follows stays -->"
ADAPTERS = "Adapters: `peft.PeftModel.from_pretrained(base, folder)`, with the base model that the config names."
PIPELINES = {
    "mlm": "fill-mask",
    "clm": "text-generation",
    "classify": "text-classification",
    "pair": "text-classification",
    "regress": "text-classification",
    "tag": "token-classification",
}
"""Kind of task -> the hub's name for it, and that of the transformers pipeline that its models serve."""
LEFT_OUT = (
    "The numbers of the clients' rows and FLOPs, and the score of always predicting the most frequent class or "
    "the mean, are left out: no noise covers them."
)
"""Said in place of what was counted of the clients' rows, of a run with noise."""
TASKS = {
    "mlm": "masked language modeling",
    "clm": "causal language modeling",
    "classify": "classification of texts",
    "pair": "classification of pairs of texts",
    "regress": "regression",
    "tag": "tagging of words",
}
MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\|[]`*"})
"""What Markdown takes for tables, links and code: a score of a site's has the name of the site's own test rows,
and classes have the names that stand in files."""


def write_cards(folder: Path, start: str | None, noisy: bool = False) -> None:
    """Write the card of every model in a finished run's folder; what else a card says stays below it.

    Args:
        folder: the run's, or a stage's.
        start: folder or hub id of the model that it began with.
        noisy: another stage of the same job, over the same rows and with the same seed, has noise.
    """
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    result["noisy"] = noisy or bool(result.get("privacy"))
    last = [folder, *(folder / "stages" / name for name in result.get("stages", ()))][-1]
    job = read_toml(last / "job.toml")
    stages = [read_toml(folder / "stages" / name / "job.toml") for name in result.get("stages", ())]
    for place in (folder / "model", folder / "adapter", *sorted(folder.glob("clients/*/model"))):
        if place.is_dir():
            path = place / CARD
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            kept = before.rpartition(END)[2].strip()
            code = ", trust_remote_code=True" if (place / f"{CODE}.py").exists() else ""
            loading = ADAPTERS if place.name == "adapter" else _loading(result["task"], code)
            text = _card(_of_model(result, place) | {"start": start}, job, stages, loading, kept)
            write_bytes(path, text.encode())


def _of_model(result: dict[str, Any], place: Path) -> dict[str, Any]:
    """The result with the scores of the model in ``place``; ``mean`` is the run's, where each client has one."""
    if place.parent.parent.name != "clients":
        return result
    own = result["clients"].get(place.parent.name, {}).get("score") or {}
    return {**result, "score": own, "mean": result["score"]}


def _card(
    result: Mapping[str, Any], job: Mapping[str, Any], stages: Sequence[Mapping[str, Any]], loading: str, kept: str
) -> str:
    task = result["task"]
    first = (stages[0] if stages else job).get("model") or {}
    new = f"the model of stage {job['start']!r}" if job.get("start") and not first else "a new model from a config"
    base = first.get("name") or new
    methods = " → ".join(stage["method"]["name"] for stage in stages) or result["method"]
    lines = [
        _header(result, base, methods),
        f"# {base_name(base)}, trained by {methods}",
        "",
        f"A model for {TASKS.get(task, task)}, trained with FedStrata {_where(methods)}.",
        "",
        *_section("How to load", [loading]),
        *_section("Training", _training(result, job, stages, base, methods)),
        *_section("Data", _data(result)),
        *_section("Scores", _scores(result)),
        *_section("Costs", [_costs(result)]),
        *_section("Limits", _limits(result)),
        END,
    ]
    return "\n".join(lines) + "\n" + (f"\n{kept}\n" if kept else "")


def _where(methods: str) -> str:
    """Where the text was while it was trained on."""
    pooled = "centralized" in methods.split(" → ")
    return "in one place that held the rows of all clients" if pooled else "by clients whose text stayed with them"


def base_name(base: str) -> str:
    """The last part of a hub id or path: the rest may say where things lie on a machine."""
    return re.split(r"[/\\]", base.rstrip("/\\"))[-1]


def _header(result: Mapping[str, Any], base: str, methods: str) -> str:
    """The block that the hub reads, by its own tools."""
    from huggingface_hub import EvalResult, ModelCardData  # here: slow to load

    task = PIPELINES.get(result["task"], "text-classification")
    scores = [
        EvalResult(
            task_type=task,
            dataset_type="private",
            dataset_name="held-out rows of the run",
            metric_type=name,
            metric_value=round(float(value), 6),
        )
        for name, value in result["score"].items()
    ]
    hub = base if base == result["start"] and not Path(base).exists() else None  # a folder has its path as start
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        base_model=hub,
        tags=["federated-learning", "fedstrata", *methods.split(" → ")],
        model_name=f"{base_name(base)}-{result['method']}",
        eval_results=scores or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""] if lines else []


def _loading(task: str, code: str) -> str:
    """The lines of Python that load a whole model; ``code`` is what a head of FedStrata's own needs besides."""
    kind = TASK_KINDS[task].model if task in TASK_KINDS else CLASSIFIER
    return (
        "```python\n"
        f"from transformers import AutoTokenizer, {kind}\n\n"
        f"model = {kind}.from_pretrained(folder{code})\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "```"
    )


def _training(
    result: Mapping[str, Any],
    job: Mapping[str, Any],
    stages: Sequence[Mapping[str, Any]],
    base: str,
    methods: str,
) -> list[str]:
    train = job.get("train", {})
    rounds = [int(stage["method"].get("rounds", 0)) for stage in stages] or [result["rounds"]]
    lines = [
        f"* start model: {base_name(base)}; its license holds for this model, too",
        f"* method: {methods}, {' and '.join(plural(count, 'round') for count in rounds)}",
        f"* learning rate {train.get('learning_rate')}, batches of {train.get('batch_size', 'a token budget')}, "
        f"at most {train.get('max_tokens')} tokens",
    ]
    privacy = result.get("privacy")
    if not result["noisy"] or (privacy or {}).get("noise_from") == "sites":  # else by it noise can be taken away
        lines[-1] += f", seed {train.get('seed')}"
    if privacy:
        promise = {key: value for key, value in privacy.items() if key != "clients"}  # their rates tell their rows
        whose = " of what the client sent" if _keeps_without_noise(result) else ""
        lines.append(f"* differential privacy{whose}: {json.dumps(promise)}")
    else:
        lines.append("* differential privacy: none")
    return lines


def _data(result: Mapping[str, Any]) -> list[str]:
    clients = result.get("clients", {}).values()
    what = "rows" if all(client["rows"] is not None for client in clients) else "examples"  # of sites
    rows = [client[what] for client in clients if client[what]]
    known = result.get("data") or {}
    lines = []
    if result["noisy"]:
        lines += [f"* {plural(len(result.get('clients', {})), 'client')}", f"* {LEFT_OUT}"]
    elif rows:
        spread = f"{min(rows):,} to {max(rows):,}, median {median(rows):,.0f}" if len(rows) > 1 else f"{rows[0]:,}"
        lines.append(f"* {plural(len(rows), 'client')}, training {what} of each: {spread}")
    if known.get("test_rows"):
        lines.append(f"* {plural(known['test_rows'], 'test row')}")
    if classes := known.get("classes") or known.get("test_classes"):
        names = (plain_text(name).translate(MARKS) for name in classes)
        lines.append(f"* {len(classes)} classes: {', '.join(names)}")
    return lines


def _scores(result: Mapping[str, Any]) -> list[str]:
    if not result["score"]:
        return ["None was measured."]
    beside, other, about = _beside(result)
    lines = [f"| metric | this model |{beside and f' {beside} |'}", "|---|---|---|" if beside else "|---|---|"]
    for name, value in result["score"].items():
        than = f"{other[name]:.4f}" if other.get(name) is not None else ""
        lines.append(f"| {name.translate(MARKS)} | {four_decimals(value)} |" + (f" {than} |" if beside else ""))
    lines += ["", "One run, one seed" + (f"; baseline: {about}." if about else ".")]
    each = [client["score"] for client in result.get("clients", {}).values() if client.get("score")]
    values = [score[result["headline"]] for score in each if result["headline"] in score]
    if values:
        least, most = map(four_decimals, (min(values), max(values)))
        lines.append(f"Over the clients {result['headline']} is {least} to {most}.")
    return lines


def _beside(result: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """What stands beside a model's scores: its name, metric -> value, and what is always predicted for it."""
    if "mean" in result:
        return "mean of all clients' models", result["mean"], ""
    if result["noisy"]:
        return "", {}, ""
    baseline = result.get("baseline") or {}
    return "baseline", baseline.get("score", {}), plain_text(baseline.get("what", "")).translate(MARKS)


def _costs(result: Mapping[str, Any]) -> str:
    sent, flops = result["bytes"], result["flops"]
    counted = "" if result["noisy"] else f"; training took {figure(flops / TERA)} TFLOP"
    return (
        f"All clients together sent {megabytes(sent['up'])} and received {megabytes(sent['down'])} in the rounds, "
        f"and {megabytes(sent.get('setup', 0))} at the start{counted}."
    )


def _limits(result: Mapping[str, Any]) -> list[str]:
    lines = [
        "* The scores hold for texts like those of the test rows; nothing was tested beyond them.",
        "* Its errors and biases are those of its start model and of the clients' texts.",
    ]
    if not result.get("privacy"):
        lines.append(
            "* It was trained without differential privacy: whoever has the weights may learn something of the "
            "training texts from them."
        )
    elif _keeps_without_noise(result):
        lines.append(
            "* The parts that the client keeps were trained without noise: whoever has their weights may learn "
            "something of its training texts from them."
        )
    return lines


def _keeps_without_noise(result: Mapping[str, Any]) -> bool:
    """Whether this is a client's own model, at the level at which only its messages have noise."""
    return "mean" in result and (result.get("privacy") or {}).get("level") == "client"
