"""The folders of adapters: peft loads them in a fresh process and computes what the saved model computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedstrata
from fedstrata.errors import UserError
from tiny import SENTENCES

pytest.importorskip("peft", reason="adapters need the extra 'lora'")

Jobs = Callable[..., dict[str, Any]]
RANKS = {"default": 2, "client-1": 4}
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
FRESH = """
import json, sys
import fedstrata.models.heads
import torch, transformers
from peft import PeftModel
from safetensors.torch import save_file
for out, auto, adapter, model in json.loads(sys.argv[1]):
    kind = getattr(transformers, auto)
    config = transformers.AutoConfig.from_pretrained(adapter)
    base = json.load(open(adapter + "/adapter_config.json"))["base_model_name_or_path"]
    with_peft = PeftModel.from_pretrained(kind.from_pretrained(base, config=config), adapter).eval()
    plain = kind.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
    rows = tokenizer(json.loads(sys.argv[2]), padding=True, return_tensors="pt")
    save_file({"peft": with_peft(**rows).logits.contiguous(), "plain": plain(**rows).logits.contiguous()}, out)
"""
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("fedavg", "classify", {"merge": "plain", "rank": RANKS}, {}),
    ("fedavg", "mlm", {"merge": "alternate"}, {}),
    ("fedavg", "classify", {"merge": "exact"}, {}),
    ("fedavg", "tag", {"merge": "freeze_a", "init": "svd"}, {}),
    ("fedavg", "classify", {"merge": "plain", "targets": ["word_embeddings", "dense"]}, {}),
    ("fedavg", "classify", {"merge": "plain"}, {"head": {"kind": "mean"}}),
    ("fedsplitbert", "classify", {"merge": "exact"}, {"clients": {"test": 0.3}}),
]


def test_peft_loads_the_adapters_in_a_fresh_process(job: Jobs, tmp_path: Path) -> None:
    todo, runs = [], []
    for i, (name, kind, adapter, tables) in enumerate(CASES):
        auto = {"mlm": "AutoModelForMaskedLM", "tag": "AutoModelForTokenClassification"}.get(kind)
        table = {"kind": "lora", "rank": 2, "alpha": 16.0, **adapter}
        rate = {"learning_rate": 2e-2}
        config = job(name, kind, 3, adapter=table, train=rate, output={"dir": str(tmp_path / f"{i}")}, **tables)
        if kind == "tag":
            config["data"] = dict.fromkeys(("train", "test"), str(words(tmp_path)))
        if "test" in config["clients"]:
            del config["data"]["test"]
        run = fedstrata.run(config)
        folder = run.folder / "clients" / "client-1" if run.model_folder is None else run.folder
        assert (run.adapter is None) == (run.model_folder is None)
        assert (run.folder / "base").exists() == (table["merge"] == "exact" or table.get("init") == "svd")
        pair = [str(folder / "adapter"), str(folder / "model")]
        todo.append([str(tmp_path / f"{i}.safetensors"), auto or "AutoModelForSequenceClassification", *pair])
        runs.append(run)
    texts = json.dumps([text for text, _ in SENTENCES])
    subprocess.run([sys.executable, "-c", FRESH, json.dumps(todo), texts], check=True, timeout=300)
    for i in range(len(runs)):
        logits = load_file(tmp_path / f"{i}.safetensors")
        assert torch.allclose(logits["peft"], logits["plain"], atol=2e-6, rtol=1e-6), CASES[i]
    own = load_file(tmp_path / "0.safetensors")["peft"]
    labels = torch.tensor([["eye", "heart", "kidney"].index(label) for _, label in SENTENCES])
    loss = torch.nn.functional.cross_entropy(own, labels)
    assert float(loss) == pytest.approx(runs[0].score["loss"], abs=1e-5), "it is the model that was scored"
    one = load_file(runs[0].adapter / "adapter_model.safetensors")
    assert {t.shape for k, t in one.items() if "lora_A" in k} == {(4, 32)}, "segments of a rank are one adapter"


def words(folder: Path) -> Path:
    path = folder / "words.jsonl"
    rows = [
        {"text": text.split(), "label": ["B" if word == "the" else "O" for word in text.split()]}
        for text, _ in SENTENCES
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_adapters_of_many_clients_share_one_config_and_tokenizer(job: Jobs) -> None:
    table = {"kind": "lora", "rank": 2}
    run = fedstrata.run(job("fedsplitbert", "classify", 4, adapter=table, head={"kind": "psum"}))
    folders = sorted(run.folder.glob("clients/*/adapter"))
    assert len(folders) == 3
    for folder in folders:
        own = {path.name for path in folder.iterdir()} - {"README.md", *ADAPTERS}
        assert {"config.json", "tokenizer.json", "modeling_fedstrata.py"} <= own
        assert all((folder / name).samefile(run.folder / "shared" / name) for name in own)
        assert "import fedstrata.models.heads" in (folder / "README.md").read_text("utf-8")


def test_without_the_merged_model_the_adapters_are_the_result(job: Jobs) -> None:
    table = {"kind": "lora", "rank": 2, "merged_model": False}
    run = fedstrata.run(job("fedavg", "classify", adapter=table))
    assert (run.model_folder, run.adapter) == (None, run.folder / "adapter")
    assert run.scored == "adapter"
    assert not (run.folder / "model").exists()


def test_the_config_names_the_adapted_modules_in_the_models_order(job: Jobs) -> None:
    """peft keeps them in a set, so that the file differed from process to process."""
    table = {"kind": "lora", "rank": 2, "targets": ["query", "key", "value", "dense"]}
    run = fedstrata.run(job("fedavg", "classify", adapter=table, method={"rounds": 1}))
    named = json.loads((run.adapter / "adapter_config.json").read_text("utf-8"))["target_modules"]
    assert len(named) > 8
    assert named == [name for name, _ in run.model()[0].named_modules() if name in named]


def test_a_finished_run_without_merged_models_gets_none_when_it_is_resumed(job: Jobs) -> None:
    made = job("fedsplitbert", "classify", adapter={"kind": "lora", "rank": 2, "merged_model": False})
    first = fedstrata.run(made)
    before = (first.folder / "result.json").read_bytes()
    fedstrata.run(made, resume=True)
    assert sorted(path.name for path in first.folder.glob("clients/client-0/*")) == ["adapter"]
    assert (first.folder / "result.json").read_bytes() == before


def test_a_stage_starts_from_the_merged_model(job: Jobs) -> None:
    config = job("fedavg", "mlm")
    config["adapter"] = {"kind": "lora", "rank": 2, "merged_model": False}
    config["stages"] = [{"name": "one"}, {"name": "two", "task": {"kind": "classify"}}]
    for tried in (fedstrata.forecast, fedstrata.run):
        with pytest.raises(UserError, match=r"merged_model: must be true in stage 'one', whose model is next"):
            tried(config)
    config["adapter"]["merged_model"] = True
    run = fedstrata.run(config)
    assert run.adapter == run.folder / "adapter"
    base = json.loads((run.adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(run.folder / "stages" / "one" / "model")


@pytest.mark.parametrize("merge", ["plain", "exact"])
def test_the_base_is_found_from_any_working_directory(
    job: Jobs, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job("fedavg", "classify", adapter={"kind": "lora", "rank": 2, "merge": merge})
    start, out = Path(made["model"]["name"]), Path(made["output"]["dir"])
    monkeypatch.chdir(start.parent)
    run = fedstrata.run(made, {"model.name": start.name, "output.dir": os.path.relpath(out)})
    assert run.adapter is not None
    base = json.loads((run.adapter / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"]
    assert Path(base) == (start if merge == "plain" else out / "base").resolve()
    assert repr(base) in (run.adapter / "README.md").read_text("utf-8")
