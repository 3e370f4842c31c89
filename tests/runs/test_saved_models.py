"""Every folder of a model, loaded in another process by transformers, scores what the run said."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers

import fedstrata
from fedstrata.client.setup import make_ready
from fedstrata.data.batching import batches
from fedstrata.data.prepare import prepare
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.plan.streams import EVALUATE, SERVER
from fedstrata.runs.result import Result
from tiny import SENTENCES, saved_models

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
    "fedsplitbert alone": (
        "fedsplitbert",
        "classify",
        {"clients": {"count": 1}, "wire": {"codec": "delta", "bits": 1, "down_density": 0.01}},
    ),
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
            "server": {"evaluate": "end"},
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
        folders = {name: result.model_folder} if result.model_folder else self.of_clients(name)
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
    assert result.model_folder is None
    assert "clients/NAME/model" in str(result.scored)
    found = {client: runs.scores[f"{name} {client}"] for client in result.clients}
    assert len(found) == 3
    for client, told in result.clients.items():
        if told["score"]:
            same(found[client], told["score"])
    same({"loss": fmean(each["loss"] for each in found.values())}, result.score)


def test_code_that_nobody_has_trusted_is_not_a_new_head(runs: Runs) -> None:
    assert len(runs.refusals) == len(HEADS) * 3 + 2 + 3
    for refusal in runs.refusals.values():
        assert "trust_remote_code=True" in refusal


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_shared_tensors_are_on_the_disk_once(runs: Runs) -> None:
    folder = runs.results["fedsplitbert"].folder
    shared, clients = (
        inodes(folder / "shared"),
        [inodes(path) for path in runs.of_clients("fedsplitbert").values()],
    )
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert {each[first] for each in clients} == {shared["model.safetensors"]}
    assert {each["tokenizer.json"] for each in clients} == {shared["tokenizer.json"]}
    own = {path.stat().st_ino for path in folder.glob("state/clients/*/round-*.safetensors")}
    assert len({each[second] for each in clients} & own) == 3


def test_clients_that_were_never_sampled_share_what_they_start_from(runs: Runs) -> None:
    shared = runs.results["fedsplitbert sampled"].shared
    assert shared is not None
    clients = [inodes(path) for path in runs.of_clients("fedsplitbert sampled").values()]
    start = (shared / "personal" / "untrained.safetensors").stat().st_ino
    assert sum(start in each.values() for each in clients) == 2


def test_the_folders_say_what_they_are(runs: Runs) -> None:
    result = runs.results["fedsplitbert psum"]
    shared = (result.folder / "shared" / "README.md").read_text("utf-8")
    assert "no whole model: it holds embeddings, layer.0, layer.1, which all clients have in common" in shared
    assert "layer.2, layer.3, head of its own" in shared
    own = (result.folder / "clients" / "client-1" / "model" / "README.md").read_text("utf-8")
    assert "The model of the client client-1. " in own
    assert "HeadedModel.from_pretrained(folder)" in own
    data = json.loads((result.folder / "result.json").read_text("utf-8"))
    assert (data["model"], data["shared"]) == (None, "shared")
    assert data["clients"]["client-1"]["model"] == "clients/client-1/model"


def test_own_models_may_be_left_out_and_made_later(runs: Runs, tmp_path: Path) -> None:
    whole = runs.results["fedsplitbert"]
    made = tomllib.loads((whole.folder / "job.toml").read_text("utf-8"))
    made = {table: made[table] for table in ("model", "task", "data", "clients", "method", "train", "server")}
    made["output"] = {"dir": str(tmp_path / "run"), "client_models": False}
    result = fedstrata.run(made)
    assert not (tmp_path / "run" / "clients").exists()
    assert str(result.scored).endswith("not saved; --resume with output.client_models=true saves them")
    for client in ("client-0", "client-1"):  # as a call leaves them that was killed while it cleared them
        (tmp_path / "run" / "clients" / client / "model").mkdir(parents=True)
    own = tmp_path / "run" / "clients" / "client-1" / "model" / "notes.txt"
    own.write_text("somebody's own")
    again = fedstrata.run(made, ["output.client_models=true"], resume=True)
    assert own.read_text() == "somebody's own"
    assert again.scored == whole.scored
    assert again.clients == whole.clients
    one, other = saved_models(tmp_path / "run"), saved_models(whole.folder)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_a_later_stage_loses_no_personal_part(runs: Runs, tmp_path: Path) -> None:
    made = {
        "model": {"name": str(runs.models["bert"])},
        "data": {"train": str(runs.folder / "classify.csv"), "test": str(runs.folder / "classify.csv")},
        "clients": {"count": 2},
        "train": {"batch_size": 4, "max_tokens": 32, "precision": "fp32", "device": "cpu"},
        "output": {"dir": str(tmp_path / "run")},
        "stages": [
            {
                "name": "one",
                "task": {"kind": "mlm"},
                "method": {"name": "fedbert", "mode": "emb-avg", "rounds": 1},
            },
            {"name": "two", "task": {"kind": "classify"}, "method": {"name": "fedavg", "rounds": 1}},
        ],
    }
    result = fedstrata.run(made)
    assert result.model_folder == tmp_path / "run" / "model"
    assert result.stages[0].start == tmp_path / "run" / "stages" / "one" / "shared"
    made["stages"][0] = {
        "name": "one",
        "task": {"kind": "classify"},
        "method": {"name": "fedsplitbert", "rounds": 1},
    }
    sentence = "two: starts from 'one', after which each client has its own layer.2, layer.3, pooler, head; "
    with pytest.raises(UserError, match=re.escape(sentence)):
        fedstrata.run(made, {"output.dir": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match=re.escape(sentence)):
        fedstrata.forecast(made)


def test_a_run_does_not_silence_transformers(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """Who loads ``shared/`` as a model is told by transformers that the rest of it is new."""
    library = transformers.logging.get_logger("transformers")
    library.addHandler(caplog.handler)
    try:
        transformers.AutoModelForSequenceClassification.from_pretrained(runs.results["fedsplitbert"].shared)
    finally:
        library.removeHandler(caplog.handler)
    assert "MISSING" in caplog.text
