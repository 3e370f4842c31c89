"""The rows of ``benchmarks/peers.py``: start model, texts, tokens, batches and plans, made once for all peers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TEST_ROWS = 500
SEED = 0


@dataclass(frozen=True)
class Workload:
    """One row of the tables: what is trained, by how many clients.

    Attributes:
        name: of the row.
        about: a phrase for the table.
        data: ``demo`` (definitions of the Human Phenotype Ontology, 23 organ systems), ``words`` (made-up texts)
            or ``sst2`` (made-up texts of the lengths of SST-2's).
        model: ``minilm`` (6 layers of 384, of the demo), or random weights over made-up words: ``small`` (2 layers
            of 128), ``base`` (12 of 768), ``large`` (24 of 1,024).
        clients, rounds, steps, batch_size, learning_rate, max_tokens: as in a job; ``steps`` 0 is a whole epoch.
        peers: who takes part.
        method: the job's ``[method]``, without its rounds.
        kind: of the task.
        dropout: whether there is any.
        grouped: whether the Trainer groups texts of similar length.
        rows: training rows of made-up texts.
        words: the fewest and the most of a made-up text.
        device: ``cpu`` or ``cuda``.
    """

    name: str
    about: str
    peers: tuple[str, ...]
    data: str = "demo"
    model: str = "minilm"
    clients: int = 10
    rounds: int = 3
    steps: int = 5
    batch_size: int = 8
    learning_rate: float = 3e-4
    max_tokens: int = 48
    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    kind: str = "classify"
    dropout: bool = True
    grouped: bool = True
    rows: int = 2_400
    words: tuple[int, int] = (6, 20)
    device: str = "cpu"


ENGINES = ("fedstrata", "careful loop", "pfl-research", "Flower", "NVFlare")
LONG_TEXTS: dict[str, Any] = {
    "data": "words",
    "words": (60, 120),
    "rows": 4_000,
    "steps": 10,
    "batch_size": 32,
    "max_tokens": 128,
    "device": "cuda",
}
"""What fills a GPU."""
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "10",
            "10 clients, MiniLM, 3 rounds of 5 steps of 8 texts",
            ("fedstrata", "fedstrata fp32", *ENGINES[1:], "Trainer loop", "FL4Health"),
        ),
        Workload(
            "as written",
            "10 clients, MiniLM, 2 rounds of 6 steps of 16 texts",
            ("fedstrata", "loop as written"),
            rounds=2,
            steps=6,
            batch_size=16,
            max_tokens=128,
        ),
        Workload(
            "100",
            "100 clients, 2 layers of 128, 3 rounds of 2 steps of 8 texts",
            ENGINES,
            data="words",
            model="small",
            clients=100,
            steps=2,
            learning_rate=1e-2,
        ),
        Workload(
            "1000",
            "1,000 clients, 2 layers of 128, 3 rounds of 2 steps of 8 texts",
            ENGINES,
            data="words",
            model="small",
            clients=1_000,
            steps=2,
            learning_rate=1e-2,
            rows=24_000,
        ),
        Workload(
            "fedbfpt",
            "FedBFPT, 10 clients, MiniLM, 3 rounds of 5 steps of 8 texts",
            ("fedstrata", "careful loop"),
            method={"name": "fedbfpt"},
            kind="mlm",
        ),
        Workload(
            "fedbt",
            "FedBT, 10 clients, MiniLM, 3 rounds of 5 steps of 8 texts",
            ("fedstrata", "careful loop"),
            method={"name": "fedbt"},
            learning_rate=1e-3,
        ),
        Workload(
            "same",
            "10 clients, 2 layers of 128, no dropout, fp32: final weights compared",
            ("fedstrata fp32", "careful loop", "pfl-research", "Flower", "NVFlare"),
            data="words",
            model="small",
            rounds=2,
            steps=3,
            learning_rate=1e-2,
            dropout=False,
            rows=400,
        ),
        Workload(
            "epoch",
            "one epoch of 1,600 texts of SST-2's lengths in batches of 16, MiniLM, one client",
            ("fedstrata", "Trainer loop"),
            data="sst2",
            clients=1,
            rounds=1,
            steps=0,
            batch_size=16,
            max_tokens=128,
            grouped=False,
            rows=1_600,
        ),
        Workload(
            "base",
            "10 clients, 12 layers of 768, 3 rounds of 10 steps of 32 texts of 60 to 120 words, on a GPU",
            ("fedstrata", "fedstrata fp32", *ENGINES[1:], "Trainer loop", "loop as written"),
            model="base",
            learning_rate=1e-4,
            **LONG_TEXTS,
        ),
        Workload(
            "large",
            "10 clients, 24 layers of 1,024, 2 rounds of 10 steps of 32 texts of 60 to 120 words, on a GPU",
            ("fedstrata", *ENGINES[1:], "Trainer loop"),
            model="large",
            rounds=2,
            learning_rate=3e-5,
            **LONG_TEXTS,
        ),
        Workload(
            "quick on a GPU",
            "3 clients, 2 layers of 128, 1 round of 2 steps on a GPU: does it run",
            ("fedstrata", *ENGINES[1:], "Trainer loop", "loop as written"),
            dropout=False,
            data="words",
            model="small",
            clients=3,
            rounds=1,
            steps=2,
            rows=90,
            device="cuda",
        ),
        Workload(
            "quick",
            "3 clients, 2 layers of 128, 1 round of 2 steps: does it run",
            ("fedstrata", "careful loop"),
            dropout=False,
            data="words",
            model="small",
            clients=3,
            rounds=1,
            steps=2,
            rows=90,
        ),
    )
}

# ---- rows

WORDS, TELLING, CLASSES = 1_000, 12, 4
"""Words of the made-up language; how many of them tell a class; classes."""
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# fmt: off
SST2_LENGTHS = dict(enumerate((
    29, 79, 90, 79, 71, 62, 55, 49, 44, 39, 36, 32, 29, 26, 25, 22, 20, 19, 17, 16, 16, 13, 12, 12, 11, 10, 9, 8,
    7, 7, 7, 6, 5, 5, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1,
), start=3))
# fmt: on
"""Tokens of a text, special ones included -> how many of SST-2's 67,349 training texts have that length, in
per mille, with the vocabulary of BERT uncased."""


def vocabulary() -> list[str]:
    """Made-up words of three syllables."""
    rng = np.random.default_rng(SEED)
    drawn = rng.choice(len(SYLLABLES) ** 3, WORDS, replace=False)
    count = len(SYLLABLES)
    return [SYLLABLES[i // count**2] + SYLLABLES[i // count % count] + SYLLABLES[i % count] for i in drawn]


def made_up(count: int, least: int, most: int) -> Iterator[dict[str, str]]:
    """Texts of so many words, of which half tell the class."""
    words, rng = vocabulary(), np.random.default_rng(SEED + 1)
    for _ in range(count):
        label, length = int(rng.integers(CLASSES)), int(rng.integers(least, most + 1))
        chosen = rng.integers(CLASSES * TELLING, WORDS, length)
        chosen[: length // 2] = label * TELLING + rng.integers(TELLING, size=length // 2)
        rng.shuffle(chosen)
        yield {"text": " ".join(words[i] for i in chosen), "label": f"class-{label}"}


def like_sst2(count: int, tokenizer: Any) -> Iterator[dict[str, str]]:
    """Texts of SST-2's lengths, of common words that are one token each."""
    whole = [word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2]
    words, rng = sorted(whole)[::10], np.random.default_rng(SEED + 2)
    lengths = np.asarray(list(SST2_LENGTHS))
    shares = np.asarray(list(SST2_LENGTHS.values()), float)
    for length in rng.choice(lengths, count, p=shares / shares.sum()):
        text = " ".join(words[i] for i in rng.integers(len(words), size=max(1, length - 2)))
        yield {"text": text, "label": f"class-{rng.integers(2)}"}


def rows_of(workload: Workload, tokenizer: Any, data: Path | None) -> tuple[list[dict[str, str]], ...]:
    """Training and test rows."""
    if data is not None:
        rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
        order = np.random.default_rng(SEED).permutation(len(rows))
        rows = [{"text": str(rows[i]["text"]), "label": str(rows[i]["label"])} for i in order]
        return rows[TEST_ROWS:], rows[:TEST_ROWS]
    if workload.data == "demo":
        from fedstrata.data import demo

        found = []
        for name in ("hpo-train", "hpo-test"):
            columns = demo.rows(name)
            pairs = zip(columns["text"], columns["label"], strict=True)
            found.append([{"text": text, "label": label} for text, label in pairs])
        test = np.random.default_rng(SEED).permutation(len(found[1]))[:TEST_ROWS]
        return found[0], [found[1][i] for i in sorted(test)]
    test_rows = 100 if workload.name.startswith("quick") else TEST_ROWS
    count = workload.rows + test_rows
    rows = list(made_up(count, *workload.words) if workload.data == "words" else like_sst2(count, tokenizer))
    return rows[test_rows:], rows[:test_rows]


# ---- the model


SIZES = {"small": (2, 128, 2), "base": (12, 768, 12), "large": (24, 1024, 16)}
"""Layers, width, heads."""


def random_model(size: str, folder: Path) -> None:
    """The config and tokenizer of a model over the made-up words, and random weights."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    numbers = {word: i for i, word in enumerate([*special, *vocabulary()])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], special, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    torch.manual_seed(SEED)
    layers, width, heads = SIZES[size]
    config = transformers.BertConfig(
        vocab_size=len(numbers) if size == "small" else 30_522,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=130,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)


# ---- everything a peer reads


def prepare(workload: Workload, folder: Path, model: Path | None = None, data: Path | None = None) -> None:
    """Write the workload into a folder that does not exist yet.

    Args:
        workload: what.
        folder: where; ``workload.json`` is written last.
        model: a folder of a model to start from, in place of the workload's.
        data: a JSON lines file with ``text`` and ``label``, in place of the workload's.
    """
    import transformers

    from fedstrata.data import demo

    folder.mkdir(parents=True)
    if model is None and workload.model in SIZES:
        random_model(workload.model, folder / "base")
    base = model or (folder / "base" if workload.model in SIZES else demo.model_folder())
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    train, test = rows_of(workload, tokenizer, data)
    clients = [f"client-{i:0{len(str(workload.clients - 1))}}" for i in range(workload.clients)]
    rng = np.random.default_rng(SEED)
    least = max(1, workload.steps * workload.batch_size)
    # every client gets the rows that its steps take; who gets the others is chance, so the shards differ in size
    owners = [*np.repeat(np.arange(len(clients)), least), *rng.integers(len(clients), size=len(train))]
    owned = [{**row, "client": clients[i]} for row, i in zip(train, owners, strict=False)]
    write_lines(folder / "train.jsonl", owned)
    write_lines(folder / "test.jsonl", test)
    job = job_of(workload, folder)
    finish(workload, folder, {**job, "model": {"name": str(base)}}, clients)
    write_job(folder / "job.toml", job)


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_job(path: Path, job: dict[str, Any]) -> None:
    import tomli_w

    path.write_text(tomli_w.dumps(job), "utf-8")


def job_of(workload: Workload, folder: Path) -> dict[str, Any]:
    """FedStrata's job: what every peer does, and its own defaults for all else."""
    train: dict[str, Any] = {
        "batch_size": workload.batch_size,
        "learning_rate": workload.learning_rate,
        "max_tokens": workload.max_tokens,
        "device": workload.device,
        "seed": SEED,
    }
    if workload.steps:
        train["steps"] = workload.steps
    if not workload.dropout:
        train["dropout"] = False
    paths = {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}
    labeled = {"label": "label"} if workload.kind == "classify" else {}
    return {
        "model": {"name": str(folder / "start")},
        "task": {"kind": workload.kind},
        "data": {**paths, "text": "text", "long_text": "truncate", **labeled},
        "clients": {"partition": "column", "column": "client"},
        "method": {**workload.method, "rounds": workload.rounds},
        "train": train,
        "server": {"evaluate": "end"},
        "output": {"dir": str(folder / "run")},
    }


def finish(workload: Workload, folder: Path, job: dict[str, Any], clients: list[str]) -> None:
    """The start model with its head, the tokens, and what each client does, as FedStrata itself makes them."""
    from fedstrata.client.setup import make_ready, resolve_auto
    from fedstrata.data.prepare import prepare as read
    from fedstrata.job.file import load

    (settled,) = (resolve_auto(each) for each in load(job))
    data = read(settled)
    ready = make_ready(settled, data, job["model"]["name"])
    ready.loaded.model.save_pretrained(folder / "start")
    ready.loaded.tokenizer.save_pretrained(folder / "start")
    for name, examples in (("train", ready.train), ("test", ready.test)):
        tokens = examples.tokens
        labels = np.zeros(len(tokens), np.int64) if data.labels is None else examples.labels
        np.savez(folder / f"{name}.npz", ids=tokens.ids, offsets=tokens.offsets, labels=labels)
    shards = [ready.shards[client] for client in clients]
    plan = {
        "shards": [shard.tolist() for shard in shards],
        "batches": [batches_of(settled, ready.train, r, clients, shards) for r in range(workload.rounds)],
        **plans_of(workload, settled, ready.loaded.parts, clients),
    }
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")
    tokenizer = ready.loaded.tokenizer
    known = {
        "name": workload.name,
        "device": workload.device,
        "about": workload.about,
        "kind": workload.kind,
        "headline": settled.task.headline,
        "labels": data.labels,
        "clients": clients,
        "sizes": list(map(len, shards)),
        "rounds": workload.rounds,
        "steps": workload.steps,
        "batch_size": workload.batch_size,
        "learning_rate": workload.learning_rate,
        "max_tokens": workload.max_tokens,
        "group_by_length": workload.grouped,
        "pad_id": tokenizer.pad_token_id,
        "mask_id": tokenizer.mask_token_id,
        "special_ids": tokenizer.all_special_ids,
        "vocabulary": ready.loaded.model.config.vocab_size,
        "most_frequent": most_frequent(folder / "test.jsonl"),
    }
    (folder / "workload.json").write_text(json.dumps(known, indent=1), "utf-8")


def batches_of(
    job: Any, examples: Any, round: int, clients: list[str], shards: list[Any]
) -> list[list[list[int]]]:
    """The batches that FedStrata makes of each client's examples in a round."""
    from fedstrata.client.steps import steps
    from fedstrata.plan.streams import ORDER, Streams

    streams, found = Streams(job.train.seed), []
    for client, shard in zip(clients, shards, strict=True):
        order = streams.numpy(round, client, ORDER)
        made = steps(examples.tokens.lengths[shard], job.train, order)
        found.append([shard[positions].tolist() for step in made for positions in step.batches])
    return found


def plans_of(workload: Workload, job: Any, parts: Any, clients: list[str]) -> dict[str, Any]:
    """Every distinct plan, with the names of the parameters that it trains and sends, and who has which."""
    from fedstrata.plan.plan import make_plan
    from fedstrata.plan.streams import Streams

    if workload.method["name"] == "fedavg":
        return {"plans": [], "of": []}
    streams, plans, of = Streams(job.train.seed), [], []
    for round in range(workload.rounds):
        made = [make_plan(job.method, parts, job.task.kind, round, client, streams) for client in clients]
        plans += [plan for plan in dict.fromkeys(made) if plan not in plans]
        of.append([plans.index(plan) for plan in made])

    def names(of_parts: tuple[str, ...]) -> list[str]:
        return [name for part in of_parts for name in parts.shapes[part]]

    written = [{"layers": plan.layers, "train": names(plan.train), "send": names(plan.send)} for plan in plans]
    return {"plans": written, "of": of}


def most_frequent(test: Path) -> float:
    """Accuracy of always predicting the most frequent class of the test rows."""
    labels = [json.loads(line).get("label") for line in test.read_text("utf-8").splitlines()]
    return max(map(labels.count, set(labels))) / len(labels)
