"""The folder in which the cases are tried: jobs, data, models, runs and a federation, whole and damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from fedstrata import run
from fedstrata.plan.kinds import FORMAT
from fedstrata.sites.provision import init
from tiny import SENTENCES, gpt2_tokenizer, tiny_model, tokenizer

JOB: dict[str, Any] = {
    "model": {"name": "models/bert"},
    "task": {"kind": "classify"},
    "data": {"train": "rows.csv", "test": "test.csv"},
    "clients": {"count": 3},
    "method": {"name": "fedavg", "rounds": 1},
    "train": {"batch_size": 4, "max_tokens": 32, "precision": "fp32", "device": "cpu"},
    "output": {"dir": "out"},
}
FULL = '{"text": "a", "label": "b"}'
UNREADABLE = {
    "digits": f'{{"text": "a", "label": "b", "other": {"9" * 5000}}}',
    "deep": f'{{"text": "a", "label": "b", "other": {"[" * 100_000}{"]" * 100_000}}}',
    "twice": '{"text": "a", "label": "b", "label": "c"}',
}
"""Rows that are JSON and are not read."""
PANICS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
"""A tokenizer's step in which its library panics on a text such as that of ``letters.csv``."""
TWO = {"name": "two"}
STAGES: dict[str, Any] = {
    "stages": [{"name": "one"}, TWO],
    "stages-none": [],
    "stages-number": 3,
    "stages-numbers": [3],
    "stages-table": {"name": "one"},
    "stages-twice": [TWO, TWO],
    "stages-empty-name": [{"name": ""}, TWO],
    "stages-number-name": [{"name": 3}, TWO],
    "stages-dots": [{"name": ".."}, TWO],
    "stages-table-name": [{"name": "train"}, TWO],
    "stages-sweep-name": [{"name": "sweep"}, TWO],
    "stages-key": [{"name": "one", "trian": {}}, TWO],
    "stages-word": [{"name": "one", "method": "fedavg"}, TWO],
    "start-of-first": [{"name": "one", "start": "one"}, TWO],
    "start-itself": [{"name": "one"}, {"name": "two", "start": "two"}],
    "start-circle": [{"name": "one"}, {"name": "two", "start": "three"}, {"name": "three", "start": "two"}],
    "start-number": [{"name": "one"}, {"name": "two", "start": 1}],
    "start-and-model": [{"name": "one"}, {"name": "two", "start": "one", "model": {"name": "models/bert"}}],
}
SWEEPS: dict[str, Any] = {
    "sweep": {"seeds": [0, 1]},
    "sweep-number": 3,
    "sweep-list": [1],
    "sweep-key": {"paralel": 2},
    "sweep-seeds-none": {"seeds": []},
    "sweep-seeds-word": {"seeds": "0"},
    "sweep-seeds-negative": {"seeds": [-1]},
    "sweep-seeds-huge": {"seeds": [2**70]},
    "sweep-seed-key": {"seeds": [0, 1], "seed": "train.sed"},
    "sweep-seed-other": {"seeds": [1, 2], "seed": "train.epochs"},
    "sweep-parallel": {"parallel": 10**22},
    "sweep-grid-number": {"grid": {"train.epochs": 3}},
    "sweep-grid-empty": {"grid": {"train.epochs": []}},
    "sweep-grid-value": {"grid": {"method.rounds": [0]}},
    "sweep-grid-folder": {"grid": {"output.dir": ["a", "b"]}},
    "sweep-grid-huge": {"grid": {"train.epochs": list(range(1, 200)), "train.batch_size": list(range(1, 200))}},
    "sweep-rows-word": {"rows": "a"},
    "sweep-rows-words": {"rows": ["a"]},
    "sweep-rows-name": {"rows": [{"name": ["a"]}]},
    "sweep-rows-twice": {"rows": [{"name": "a"}, {"name": "a"}]},
    "sweep-rows-key": {"rows": [{"name": "a", "train.epoch": 1}]},
    "sweep-rows-misplaced": {"rows": [{"name": "a", "rounds": 1}]},
    "sweep-against": {"against": "fedavg", "rows": [{"name": "FedAvg"}]},
}


def make_folder(folder: Path) -> None:
    """Fill an empty folder, which has to be the working directory."""
    _jobs(folder)
    _data(folder)
    _models(folder / "models")
    _runs(folder)
    init(folder / "federation", ["a", "b"])
    _federations(folder)


def _jobs(folder: Path) -> None:
    jobs = {
        "job": JOB,
        "words": {**JOB, "task": {"kind": "mlm"}},
        "scratch": {**JOB, "model": {"config": {"model_type": "bert", "num_hidden_layers": 2}}},
        "own-tests": {**JOB, "data": {"train": "rows.csv"}, "clients": {"count": 3, "test": 0.3}},
        "nul-folder": {**JOB, "output": {"dir": "a\0b"}},
        "nul-data": {**JOB, "data": {"train": "a\0b.csv"}},
        "nul-model": {**JOB, "model": {"name": "a\0b"}},
        "start-alone": {**JOB, "start": "job"},
        "rounds-on-top": {"rounds": 3, **JOB},
        "model-list": {**JOB, "model": [{"name": "models/bert"}]},
        "task-word": {**JOB, "task": "mlm"},
        "no-model": {key: table for key, table in JOB.items() if key != "model"},
        "no-method": {key: table for key, table in JOB.items() if key != "method"},
        **{name: {**JOB, "stages": stages} for name, stages in STAGES.items()},
        **{name: {**JOB, "sweep": sweep} for name, sweep in SWEEPS.items()},
    }
    for name, job in jobs.items():
        (folder / f"{name}.toml").write_text(tomli_w.dumps(job), "utf-8")
    text = tomli_w.dumps(JOB)
    texts = {
        "empty": "",
        "twice": text + "[model]\n",
        "key-twice": text + "dir = 'b'\n",
        "json": json.dumps(JOB),
        "nul": "a\0b",
        "deep": f"a = {'[' * 5000}{']' * 5000}",
        "digits": text.replace("rounds = 1", f"rounds = {'9' * 5000}"),
        "hex": text.replace("rounds = 1", f"rounds = 0x{'f' * 5000}"),
        "date": text.replace("rounds = 1", "rounds = 2020-01-01"),
    }
    for name, content in texts.items():
        (folder / f"{name}.toml").write_text(content, "utf-8")
    (folder / "bytes.toml").write_bytes(bytes(range(256)))
    for name in ("gone.toml", "gone.csv"):
        (folder / name).symlink_to("nowhere")
    for name in ("loop.toml", "loop.csv", "loop"):
        (folder / name).symlink_to(name)


def _data(folder: Path) -> None:
    rows = "".join(f'"{text}",{label}\n' for text, label in SENTENCES)
    texts = {
        "rows.csv": f"text,label\n{rows}",
        "test.csv": "text,label\nThe kidney.,kidney\nThe heart.,heart\nThe eye.,eye\n",
        "unknown-label.csv": "text,label\nThe kidney.,kidney\nThe lung.,lung\n",
        "letters.csv": f"text,label\n{rows}{'a' * 60} b,eye\n",
        "words-alone.conll": "Kidney B-X\nfails O\n\n" * 6,
        "header.csv": "text,label\n",
        "nothing.csv": "",
        "blank.csv": "text,label\n,kidney\n ,heart\n",
        "truths.csv": "text,label\nA stone,True\nA beat,False\n",
        "one-class.csv": "text,label\na,kidney\nb,kidney\nc,kidney\nd,kidney\n",
        "ragged.csv": "text,label\na,b,c\n",
        "quote.csv": 'text,label\n"a,b\n',
        "twice.csv": "text,text\na,b\n",
        "values.csv": "text,label\n" + "".join(f"a,{i}\n" for i in range(8)) + "a,many\n",
        "underscore.csv": "text,label\n" + "".join(f"a,{i}\n" for i in range(8)) + "a,1_5\n",
        "infinite.csv": "text,label\n" + "".join(f"a,{i}\n" for i in range(8)) + "a,inf\n",
        "broken.jsonl": '{"text": "a", "label": "b"}\n{"text": \n',
        "numbers.jsonl": "1\n2\n",
        "lists.jsonl": '{"text": ["a"], "label": "b"}\n',
        "words.jsonl": '{"words": ["a", "b"], "tags": ["O"]}\n',
        "word.jsonl": '{"words": "a", "tags": "O"}\n',
        "array.json": '[{"text": "a"',
        **{f"{name}.jsonl": f"{FULL}\n{row}\n" for name, row in UNREADABLE.items()},
        **{f"{name}.json": f"[\n{FULL},\n{row},\n{FULL}\n]\n" for name, row in UNREADABLE.items()},
        "deep.txt": f"{UNREADABLE['deep']}\n{FULL}\n",
        "fake.parquet": "text,label\n",
        "words.conll": "Kidney B-ORGAN\nfails\n",
        "data.xyz": "text,label\n",
        "plain.txt": "".join(f"{text}\n" for text, _ in SENTENCES),
        "afile": "x",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    (folder / "returns.csv").write_bytes(b"text,label\rA stone,kidney\rA beat,heart\r")
    (folder / "returns.txt").write_bytes(b"A stone.\rA beat.\r")
    (folder / "returns.conll").write_bytes(b"A O\rstone B-x\r\rA O\rbeat B-y\r")
    (folder / "latin1.csv").write_bytes(b"text,label\nNi\x81r,kidney\n")
    for name in ("empty", "folder.csv", "mixed", "pipes"):
        (folder / name).mkdir()
    for name in ("a.csv", "b.jsonl"):
        (folder / "mixed" / name).write_text("x")
    for name in ("pipe.csv", "pipe.parquet", "pipes/a.csv"):
        os.mkfifo(folder / name)


def _models(folder: Path) -> None:
    for kind, head, words in (("bert", "mlm", tokenizer()), ("gpt2", "clm", gpt2_tokenizer())):
        tiny_model(kind, head).save_pretrained(folder / kind)
        words.save_pretrained(folder / kind)
    config = json.loads((folder / "bert" / "config.json").read_text())

    def damaged(name: str, damage: Callable[[Path], object]) -> None:
        shutil.copytree(folder / "bert", folder / name)
        damage(folder / name)

    def with_config(**keys: Any) -> Callable[[Path], object]:
        return lambda at: (at / "config.json").write_text(json.dumps(config | keys))

    damaged("no-config", lambda at: (at / "config.json").unlink())
    damaged("no-weights", lambda at: (at / "model.safetensors").unlink())
    damaged("no-tokenizer", lambda at: [path.unlink() for path in at.glob("tok*")])
    damaged("cut-weights", lambda at: (at / "model.safetensors").write_bytes(b"\1" * 20))
    damaged("cut-config", lambda at: (at / "config.json").write_text('{"model_'))
    damaged("cut-tokenizer", lambda at: (at / "tokenizer.json").write_text("{"))
    damaged("panics", _tokenizer(pre_tokenizer=PANICS))
    damaged("panics-loading", _tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}))
    damaged("no-unknown", _tokenizer(model={"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[U]"}))
    damaged("list-config", lambda at: (at / "config.json").write_text("[]"))
    damaged("unknown-type", with_config(model_type="bart-of-mine"))
    damaged("wide", with_config(hidden_size=48))
    damaged("vocabulary", with_config(vocab_size=200))
    damaged("heads", with_config(num_attention_heads=5))
    damaged("word-size", with_config(hidden_size="x"))
    damaged("no-heads", with_config(num_attention_heads=0))
    damaged("far-padding", with_config(pad_token_id=10**6))
    damaged("nan-dropout", with_config(hidden_dropout_prob=float("nan")))
    damaged("other-attention", with_config(attn_implementation="somebody/kernels"))
    damaged("own-code", with_config(model_type="own", auto_map={"AutoConfig": "own.Own"}))
    damaged("deep", with_config(num_hidden_layers=7))
    damaged("endless", with_config(num_hidden_layers=10**9))
    damaged("endless-classes", with_config(num_labels=10**9))
    damaged("no-words", with_config(vocab_size=0))
    damaged("number-class", with_config(architectures=3))
    damaged("strange-head", with_config(fedstrata_head={"kind": "mean", "twist": 1}))
    damaged("no-shards", _without_shards)
    damaged("elsewhere", _of_another)
    damaged("decoder", with_config(is_decoder=True))
    names = {"architectures": ["BertForSequenceClassification"], "id2label": {0: "kidney", 1: "heart", 2: "eye"}}
    damaged("other-order", with_config(**names))


def _tokenizer(**keys: Any) -> Callable[[Path], object]:
    def change(at: Path) -> None:
        path = at / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def _without_shards(at: Path) -> None:
    (at / "model.safetensors").unlink()
    (at / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')


def _of_another(at: Path) -> None:
    (at / "model.safetensors").unlink()
    places = {"bert.embeddings.word_embeddings.weight": "../bert/model.safetensors"}
    index = {"metadata": {}, "weight_map": places}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))


def _runs(folder: Path) -> None:
    run("job.toml", ["output.dir=finished"])

    def damaged(name: str, file: str, damage: Callable[[str], str]) -> None:
        shutil.copytree(folder / "finished", folder / name)
        path = folder / name / file
        path.write_text(damage(path.read_text("utf-8")), "utf-8")

    damaged("cut-result", "result.json", lambda text: text[:50])
    damaged("list-result", "result.json", lambda text: "[]")
    damaged(
        "old-result", "result.json", lambda text: text.replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}')
    )
    damaged("new-result", "result.json", lambda text: text.replace(f'"format": {FORMAT}', '"format": 99'))
    damaged("no-job", "job.toml", lambda text: "x")
    damaged("bytes-way", "result.json", lambda text: text.replace('"up": ', '"upwards": '))
    damaged("digits-result", "result.json", lambda text: re.sub('"flops": ', f'"flops": {"9" * 400}', text))
    damaged("noise", "result.json", lambda text: re.sub('"privacy": null', '"privacy": {"delta": 1e-5}', text))
    damaged("rounds-word", "rounds.jsonl", lambda text: f"x\n{text}")
    damaged("rounds-list", "rounds.jsonl", lambda text: f"[]\n{text}")
    damaged("word-result", "result.json", lambda text: text.replace('"rounds": 1', '"rounds": "one"'))
    damaged(
        "word-score", "rounds.jsonl", lambda text: re.sub(r'"seconds": [^,}]+', '"seconds": "x"', text, count=1)
    )
    damaged("ledger-empty", "ledger.jsonl", lambda text: f"{{}}\n{text}")
    damaged("partition-list", "partition.json", lambda text: "[]")
    damaged("parts-short", "parts.json", lambda text: '[{"name": 3}]')
    damaged("parts-table", "parts.json", lambda text: '{"name": 3}')
    damaged("parts-kind", "parts.json", lambda text: text.replace('"kind": "embeddings"', '"kind": []'))
    damaged("parts-depth", "parts.json", lambda text: text.replace('"depth": 0', '"depth": "low"'))
    _classes(damaged)
    damaged(
        "rounds-loss", "rounds.jsonl", lambda text: text.replace('"loss": ', '"lost": ').replace("lost", "loss", 1)
    )
    damaged("rounds-score", "rounds.jsonl", lambda text: text.replace('"score": ', '"scored": ', 1))
    damaged("client-examples", "result.json", lambda text: text.replace('"examples": ', '"example": '))
    for name, table in (("cut-table", '{"for'), ("list-table", "[]")):
        (folder / name).mkdir()
        (folder / name / "table.json").write_text(table, "utf-8")


def _classes(damaged: Callable[[str, str, Callable[[str], str]], None]) -> None:
    def short(text: str) -> str:
        content = json.loads(text)
        return json.dumps({**content, "confusion": content["confusion"][1:]})

    damaged("classes-examples", "classes.json", lambda text: text.replace('"examples": ', '"example": '))
    damaged("classes-name", "classes.json", lambda text: text.replace('"class": ', '"name": '))
    damaged("classes-none", "classes.json", lambda text: text.replace('"classes": ', '"class": '))
    damaged("classes-row", "classes.json", short)


def _federations(folder: Path) -> None:
    def damaged(name: str, file: str, damage: Callable[[str], str]) -> None:
        shutil.copytree(folder / "federation", folder / name)
        path = folder / name / file
        path.write_text(damage(path.read_text("utf-8")), "utf-8")

    damaged("fed-cut", "server.toml", lambda text: text[: len(text) // 2] + "[")
    damaged("fed-format", "server.toml", lambda text: text.replace("format = 2", "format = 1"))
    damaged("fed-key", "server.toml", lambda text: text.replace("port = ", "prot = ", 1))
    damaged("fed-certificate", "tls/server.pem", lambda text: "x")
    damaged("fed-site-key", "sites/a/a.key", lambda text: "x")
    damaged("fed-site", "sites/a/site.toml", lambda text: text.replace("[data]", "[dat]"))
