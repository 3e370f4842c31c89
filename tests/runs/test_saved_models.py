"""Every folder of a model, loaded in another process by transformers, scores what the run said."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.client.setup import make_ready
from fedstrata.data.batching import batches
from fedstrata.data.prepare import prepare
from fedstrata.job.file import load
from fedstrata.plan.streams import EVALUATE, SERVER
from fedstrata.runs.result import Result
from tiny import SENTENCES

HEADS = ("cls", "mean", "psum", "hsum")
AUTO = {
    "mlm": "AutoModelForMaskedLM",
    "clm": "AutoModelForCausalLM",
    "tag": "AutoModelForTokenClassification",
}
FEDBERT = {"method": {"mode": "emb-avg"}}
OWN_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fedsplitbert": ("fedsplitbert", "classify", {}),
    "fedsplitbert psum": ("fedsplitbert", "classify", {"head": {"kind": "psum"}}),
    "fedsplitbert fp16": ("fedsplitbert", "classify", {"wire": {"dtype": "fp16"}}),
    "fedsplitbert sampled": ("fedsplitbert", "classify", {"clients": {"fraction": 0.34}}),
    "fedbert classify": ("fedbert", "classify", FEDBERT),
    "fedbert mlm": ("fedbert", "mlm", FEDBERT),
    "local": ("local", "classify", {}),
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{kind: ("fedavg", kind, {}) for kind in ("mlm", "clm", "classify", "pair", "regress", "tag")},
    **{
        f"{kind} {head}": ("fedavg", kind, {"head": {"kind": head}})
        for kind in ("classify", "pair", "regress")
        for head in HEADS
    },
    "freeze": ("fedfreezebert", "classify", {"head": {"kind": "psum", "pooler": True}}),
    "pooler": ("fedavg", "classify", {"head": {"kind": "cls", "pooler": True}}),
    "probabilities": ("fedavg", "classify", {"head": {"kind": "hsum", "average": "probabilities"}}),
    **OWN_MODELS,
}


class Runs:
    """One tiny run for each case, and what another process made of the folders."""

    def __init__(self, folder: Path, model_folder: Callable[..., Path]) -> None:
        self.folder = folder
        self.models = {
            kind: model_folder(kind, head=head, layers=4) for kind, head in (("bert", "mlm"), ("gpt2", "clm"))
        }
        self.results: dict[str, Result] = {}
        self.told: list[dict[str, Any]] = []
        for name, case in CASES.items():
            self._run(name, *case)
        (folder / "cases.json").write_text(json.dumps(self.told), "utf-8")
        program = Path(__file__).parent.parent / "score_folders.py"
        made = subprocess.run(
            [sys.executable, str(program), str(folder / "cases.json"), str(folder / "scores.json")],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_MODULES_CACHE": str(folder / "modules")},
        )
        assert made.returncode == 0, made.stderr
        found = json.loads((folder / "scores.json").read_text("utf-8"))
        self.scores, self.refusals = found["scores"], found["refusals"]

    def _run(self, name: str, method: str, kind: str, tables: dict[str, Any]) -> None:
        rows, text = self._rows(kind)
        job = {
            "model": {"name": str(self.models["gpt2" if kind == "clm" else "bert"])},
            "task": {"kind": kind},
            "data": {"train": str(text), "test": str(text)},
            "clients": {"count": 3, **tables.get("clients", {})},
            "method": {"name": method, "rounds": 1, **tables.get("method", {})},
            "train": {
                "batch_size": 4,
                "max_tokens": 32,
                "precision": "fp32",
                "device": "cpu",
                "learning_rate": 0.01,
            },
            "output": {"dir": str(self.folder / name)},
            **{key: table for key, table in tables.items() if key in ("head", "wire")},
        }
        if kind in ("pair", "regress"):
            job["data"]["text"] = ["one", "two"]
        self.results[name] = result = fedstrata.run(job)
        labels = {"tag": ["B-organ", "O"], "pair": ["eye", "heart", "kidney"]}.get(
            kind, ["eye", "heart", "kidney"]
        )
        case = {
            "auto": AUTO.get(kind, "AutoModelForSequenceClassification"),
            "kind": kind,
            "labels": labels,
            "rows": str(self._masked(job, name)) if kind == "mlm" else rows,
            "trust": "head" in tables,
        }
        folders = {name: result.model} if result.model else self.of_clients(name)
        self.told += [{"name": of, "folder": str(folder), **case} for of, folder in folders.items()]

    def of_clients(self, name: str) -> dict[str, Path]:
        """(case and client) -> the folder of the client's model."""
        result = self.results[name]
        return {f"{name} {client}": result.folder / told["model"] for client, told in result.clients.items()}

    def _rows(self, kind: str) -> tuple[list[Any], Path]:
        """The rows as the other process reads them, and the file for the job."""
        path = self.folder / f"{kind}.{'conll' if kind == 'tag' else 'csv'}"
        if kind == "tag":
            words = [text.rstrip(".").split() for text, _ in SENTENCES]
            tagged = [
                [["O", "B-organ"][organ in word] for word in each]
                for each, (_, organ) in zip(words, SENTENCES, strict=True)
            ]
            pairs = [zip(*row, strict=True) for row in zip(words, tagged, strict=True)]
            path.write_text("\n\n".join("\n".join(map("\t".join, row)) for row in pairs) + "\n", "utf-8")
            return [list(row) for row in zip(words, tagged, strict=True)], path
        if kind in ("pair", "regress"):
            rows = [
                [text, SENTENCES[i - 1][0], organ if kind == "pair" else i / 4]
                for i, (text, organ) in enumerate(SENTENCES)
            ]
            header = ["one", "two", "label"]
        else:
            rows, header = [[text, organ] for text, organ in SENTENCES], ["text", "label"]
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        return [row[:1] for row in rows] if kind == "clm" else rows, path

    def _masked(self, made: dict[str, Any], name: str) -> Path:
        """The test batches with the masks of every score of a run."""
        [job] = load(made)
        ready = make_ready(job, prepare(job), made["model"]["name"])
        scorer, rng = ready.runtime.scorer, ready.runtime.scorer.streams.numpy(-1, SERVER, EVALUATE)
        order = batches(ready.test.tokens.lengths, 2 * job.train.batch_size, None)
        found = [scorer.task.batch(ready.test, index, rng) for index in order]
        path = self.folder / f"{name}.pt"
        torch.save([(batch.inputs, batch.targets, batch.positions) for batch in found], path)
        return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[..., Path]) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), model_folder)


def same(found: dict[str, float], said: dict[str, float]) -> None:
    assert {metric: said[metric] for metric in found if metric in said} == pytest.approx(found, abs=2e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name not in OWN_MODELS])
def test_a_model_scores_what_the_run_said(runs: Runs, name: str) -> None:
    result = runs.results[name]
    assert (result.scored, result.shared) == ("model", None)
    found = runs.scores[name]
    if name == "tag":
        found.pop("accuracy")  # of entities' tokens there
    same(found, result.score)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_every_clients_model_scores_what_the_run_said(runs: Runs, name: str) -> None:
    result = runs.results[name]
    assert result.model is None
    assert "clients/NAME/model" in str(result.scored)
    found = {client: runs.scores[f"{name} {client}"] for client in result.clients}
    assert len(found) == 3
    for client, told in result.clients.items():
        if told["score"]:
            same(found[client], told["score"])
    same({"loss": fmean(each["loss"] for each in found.values())}, result.score)


def test_code_that_nobody_has_trusted_is_not_a_new_head(runs: Runs) -> None:
    assert len(runs.refusals) == len(HEADS) * 3 + 3 + 3
    for refusal in runs.refusals.values():
        assert "trust_remote_code=True" in refusal
