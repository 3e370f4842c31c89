"""What methods give away, and what defenses leave of it: ``fedstrata audit`` of jobs, over seeds.

    python benchmarks/audit.py measure --model demo:minilm [--only "FedAvg;FedBT"] [--seeds 0,1,2]
    python benchmarks/audit.py table

``measure`` adds a line to docs/results/audit.jsonl for each job that has none; ``table`` writes the tables of
docs/results/privacy.md from these lines.

Text of the clients: definitions of the Human Phenotype Ontology (the demo's), six clients by Dirichlet 0.5 over
organ systems, of which the first is audited. Public text: Python's documentation. Each round has 10 steps of 8
texts of at most 48 tokens, in fp32 and with dropout, unless the row says otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tables import fill

import fedstrata
from fedstrata.data import demo

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FILE, PAGE = RESULTS / "audit.jsonl", RESULTS / "privacy.md"
RAW = {"optimizer": "sgd", "learning_rate": 10.0, "dropout": False, "steps": 1}
"""One step of plain SGD at so high a rate that fp32 rounds little off: what arrives is the gradient."""
EXAMPLE = {"level": "example", "clip": 0.5, "epsilon": 8.0}
SHARE = {"level": "client", "clip": 1.0, "noise": 0.14, "single_message": True}
"""One of 60 clients' share of the noise by which their sum has epsilon 8 over three rounds."""
LINEAR = {"method": {"name": "fedfreezebert"}, "head": {"kind": "mean"}}
"""A linear classifier over the mean of the frozen encoder's hidden states."""
HIDDEN = {"client": {"may_send": ["hidden_states"]}}
CLASSIFY: dict[str, dict[str, Any]] = {
    "FedAvg": {"method": {"name": "fedavg"}},
    "FedAvg, one SGD step": {"method": {"name": "fedavg"}, "train": RAW},
    "FedAvg, int8": {"method": {"name": "fedavg"}, "wire": {"dtype": "int8"}},
    "FedAvg, delta 1 %": {"method": {"name": "fedavg"}, "wire": {"codec": "delta", "density": 0.01}},
    "FedProx": {"method": {"name": "fedprox"}},
    "FedSplitBERT": {"method": {"name": "fedsplitbert"}},
    "FedBT": {"method": {"name": "fedbt"}},
    "D-FedFreezeBERT": {"method": {"name": "fedfreezebert"}},
    "D-FedFreezeBERT, mean": LINEAR,
    "FedBERT": {"method": {"name": "fedbert"}},
    "C-FedFreezeBERT, P-SUM": {"method": {"name": "fedfreezebert", "variant": "centralized"}, **HIDDEN},
    "C-FedFreezeBERT, mean": {
        "method": {"name": "fedfreezebert", "variant": "centralized", "head": "mean"},
        **HIDDEN,
    },
    "FedAvg, LoRA 8": {"method": {"name": "fedavg"}, "adapter": {"kind": "lora"}},
    "FedAvg, LoRA 8, one SGD step": {"method": {"name": "fedavg"}, "adapter": {"kind": "lora"}, "train": RAW},
    "FedAvg, omit embeddings": {"method": {"name": "fedavg"}, "privacy": {"omit": ["embeddings"]}},
    "FedAvg, omit position rows": {"method": {"name": "fedavg"}, "privacy": {"omit": ["position_rows"]}},
    "FedAvg, omit unlisted rows": {"method": {"name": "fedavg"}, "privacy": {"omit": ["unlisted_rows"]}},
    "FedAvg, example noise, epsilon 8": {"method": {"name": "fedavg"}, "privacy": EXAMPLE},
    "FedBT, example noise, epsilon 8": {"method": {"name": "fedbt"}, "privacy": EXAMPLE},
    "D-FedFreezeBERT, mean, example noise, epsilon 8": {**LINEAR, "privacy": EXAMPLE},
    "FedAvg, a share of client noise": {"method": {"name": "fedavg"}, "privacy": SHARE},
}
MLM: dict[str, dict[str, Any]] = {
    "FedAvg": {"method": {"name": "fedavg"}},
    "FedBFPT": {"method": {"name": "fedbfpt"}},
    "FedBFPT, one SGD step": {"method": {"name": "fedbfpt"}, "train": RAW},
    "FedBT": {"method": {"name": "fedbt"}},
    "FedBERT": {"method": {"name": "fedbert"}},
    "FedBERT, 4 lower layers": {"method": {"name": "fedbert", "lower": 4}},
    "FedBFPT, omit decoder bias": {"method": {"name": "fedbfpt"}, "privacy": {"omit": ["decoder_bias"]}},
    "FedBFPT, example noise, epsilon 8": {"method": {"name": "fedbfpt"}, "privacy": EXAMPLE},
}
HEADS = ("D-FedFreezeBERT", "D-FedFreezeBERT, mean", "D-FedFreezeBERT, mean, example noise, epsilon 8")
DEEP: dict[str, dict[str, Any]] = {
    name: CLASSIFY[name]
    for name in ("FedAvg", "FedBT", "FedAvg, LoRA 8", "FedAvg, example noise, epsilon 8", *HEADS)
}
"""Jobs of which short trainings are attacked as well (``--deep``)."""
ROWS = (*CLASSIFY, *MLM, *(f"{name}, deep" for name in DEEP))
NAMES = {"demo:minilm": "MiniLM, 6 layers", "minilm-12l": "12 layers of the same width"}
TASKS = {"classify": "classification", "mlm": "masked language modeling"}
KEY = ("model", "task", "row", "seed")
FIGURE = ("value", "low", "high", "chance")
SETTINGS = (("1 step, 1 text",), ("1 step",), ("10 steps", "all texts"))
"""What the columns show."""
SHOWN = {
    "precision": "P",
    "recall": "R",
    "tokens": "tokens",
    "labels": "labels",
    "ROUGE-L": "ROUGE-L",
    "auc": "AUC",
    "AUC": "AUC",
    "total variation": "TV",
    "exact texts": "exact texts",
    "TPR at 1 % FPR": "TPR at 1 % FPR",
    "exposure": "exposure",
    "ranked first": "ranked first",
}
"""Figures of the tables, and how a cell calls them."""
LEFT_OUT = {"control group", "places precision", "places recall", "FPR there"}
"""Figures that stand beside these in an audit's report alone."""
GUESSED = ("precision", "recall", "labels", "exposure")
"""Of these a cell has the value that a guess without the message comes to."""
ROUND, TRAINING = "benchmarks/audit.py table", "benchmarks/audit.py table, trainings"
"""The page's tables: one round's messages, and models after short trainings."""


def job(model: str, kind: str, tables: dict[str, Any], seed: int, folder: str) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"name": model},
        "data": {"train": "demo:hpo-train", "test": "demo:hpo-test"},
        "clients": {"count": 6, "partition": "dirichlet", "alpha": 0.5},
        "task": {"kind": kind},
        "method": {"rounds": 3},
        "train": {"steps": 10, "batch_size": 8, "max_tokens": 48, "precision": "fp32", "seed": seed},
        "output": {"dir": str(Path(folder, "run"))},
    }
    base["train"]["learning_rate"] = 1e-4
    if kind == "classify" and "level" in tables.get("privacy", {}):
        base["task"]["labels"] = sorted(set(demo.rows("hpo-train")["label"]))
    if "unlisted_rows" in tables.get("privacy", {}).get("omit", ()):
        listed = Path(folder, "words.txt")
        listed.write_text("\n".join(public_words()), "utf-8")
        tables = {**tables, "privacy": {**tables["privacy"], "public_vocabulary": str(listed)}}
    return {name: {**base.get(name, {}), **tables.get(name, {})} for name in {**base, **tables}}


def public_words() -> list[str]:
    """The words of Python's help topics, which are the audit's public text."""
    return sorted({word.lower() for text in topics.values() for word in re.findall(r"[A-Za-z]+", text)})


def measure(model: str, out: Path, only: set[str], seeds: list[int]) -> None:
    out.touch()
    rows = [("classify", row, tables, False) for row, tables in CLASSIFY.items()]
    rows += [("mlm", row, tables, False) for row, tables in MLM.items()]
    rows += [("classify", f"{row}, deep", tables, True) for row, tables in DEEP.items()]
    for seed in seeds:
        for kind, row, tables, deep in rows:
            key = (Path(model).name, kind, row, seed)
            if key in {key_of(line) for line in read(out)} or (only and row not in only):
                continue
            with tempfile.TemporaryDirectory() as folder:
                attacks = {"attacks": ["class_head"]} if deep else {}
                found = fedstrata.audit(job(model, kind, tables, seed, folder), deep=deep, **attacks)
            line = {**dict(zip(KEY, key, strict=True)), "seconds": round(found["seconds"], 1)}
            findings = [slim(finding) for finding in found["stages"][0]["findings"]]
            with out.open("a") as file:
                file.write(json.dumps({**line, "findings": findings}) + "\n")
            print(*key, f"{found['seconds']:.0f} s", flush=True)


def slim(finding: dict[str, Any]) -> dict[str, Any]:
    """A finding without its sentence; of each figure its value, interval and chance."""
    figures = {
        name: [None if figure[key] is None else round(figure[key], 4) for key in FIGURE]
        for name, figure in (finding["figures"] or {}).items()
    }
    return {**{key: finding[key] for key in ("channel", "attack", "setting")}, "figures": figures}


def read(out: Path) -> list[dict[str, Any]]:
    """Its lines, read anew each time, as several processes may add to it."""
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


Figures = dict[str, list[float | None]]
"""Figure -> value, ends of the interval, chance."""


def tables(lines: list[dict[str, Any]]) -> dict[str, str]:
    """The page's tables by their marks."""
    deep = [line for line in lines if line["row"].endswith(", deep")]
    return {ROUND: of_rounds([line for line in lines if line not in deep]), TRAINING: of_trainings(deep)}


def of_rounds(lines: list[dict[str, Any]]) -> str:
    """For each model and task a line for each attack and jobs of the same figures, a column for each setting."""
    made = []
    groups = {(line["model"], line["task"]) for line in lines}
    for model, task in sorted(groups, key=lambda group: (group[0] != "demo:minilm", group)):
        own = [line for line in lines if (line["model"], line["task"]) == (model, task)]
        found = gathered(own)
        made += [f"### {NAMES.get(model, model)}: {TASKS[task]}", "", seeds_of(own), ""]
        heads = ["method", "read from", "attack", *(" or ".join(names) for names in SETTINGS)]
        made += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        same: dict[tuple[str, ...], list[str]] = {}
        for (row, *attack), settings in found.items():
            noised = "noise" in row
            columns = ([each for name in names for each in settings.get(name, [])] for names in SETTINGS)
            same.setdefault((*attack, *(cell(figures, noised) for figures in columns)), []).append(row)
        made += [f"| {'; '.join(rows)} | {' | '.join(cells)} |" for cells, rows in same.items()]
        made.append("")
    return "\n".join(made).strip()


def of_trainings(lines: list[dict[str, Any]]) -> str:
    """For each model a table with a line for each job and attack."""
    made = []
    for model in sorted({line["model"] for line in lines}, key=lambda model: (model != "demo:minilm", model)):
        own = [line for line in lines if line["model"] == model]
        made += [f"### {NAMES.get(model, model)}: short trainings", "", seeds_of(own), ""]
        made += ["| method | attack | steps | figures |", "|---|---|---|---|"]
        for (row, channel, attack), settings in gathered(own).items():
            one = {name for name in settings if name == "1 step"}
            for names in (one, settings.keys() - one) if channel == "short training" else ():
                figures = [each for name, found in settings.items() if name in names for each in found]
                steps = ", ".join(name.partition(" ")[0] for name in settings if name in names)
                if figures:
                    made.append(f"| {row.removesuffix(', deep')} | {attack} | {steps} | {cell(figures, True)} |")
        made.append("")
    return "\n".join(made).strip()


def seeds_of(lines: list[dict[str, Any]]) -> str:
    """How many seeds there are of each job."""
    counts = Counter(line["row"] for line in lines)
    fewer = [f"{row} ({n})" for row, n in counts.items() if n < max(counts.values())]
    return f"Seeds: {max(counts.values(), default=0)}{'; fewer of ' if fewer else ''}{'; '.join(fewer)}."


def gathered(lines: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, list[Figures]]]:
    """(row, channel, attack) -> setting -> a line's figures each, in the order of the jobs.

    A later round, which an audit plays where more is sent in it than in the first, is a row of its own.
    """
    found: dict[tuple[str, str, str], dict[str, list[Figures]]] = {}
    for line in sorted(lines, key=lambda line: (ROWS.index(line["row"]), line["seed"])):
        for finding in line["findings"]:
            attack = finding["attack"].removesuffix(", not exact")
            setting, _, later = finding["setting"].partition(" of round ")
            row = f"{line['row']}, round {later}" if later else line["row"]
            where = (row, finding["channel"].replace("_", " "), attack)
            found.setdefault(where, {}).setdefault(setting, []).append(finding["figures"])
    return found


def cell(found: list[Figures], noised: bool) -> str:
    """Means over seeds, with the lowest and highest where they differ, and what a guess comes to.

    Args:
        found: one seed's each.
        noised: say of how many seeds the area's interval holds chance.
    """
    if not found:
        return "–"
    if unknown := {name for figures in found for name in figures} - SHOWN.keys() - LEFT_OUT:
        raise ValueError(f"no column for {', '.join(sorted(unknown))}: a cell without figures reads 'nothing'")
    words = []
    for name, short in SHOWN.items():
        each = [figures[name] for figures in found if name in figures]
        values = [value for value, *_ in each if value is not None]
        if not values:
            continue
        said = f"{short} {statistics.fmean(values):.2f}"
        if max(values) - min(values) >= 0.01:
            said += f" ({min(values):.2f}–{max(values):.2f})"
        chances = [chance for *_, chance in each if chance is not None]
        if chances and name in GUESSED:
            said += f" [{statistics.fmean(chances):.2f}]"
        at_chance = sum(low <= chance <= high for _, low, high, chance in each if None not in (low, high, chance))
        if name in ("auc", "AUC") and noised:
            said += f", {at_chance} of {len(each)} at chance"
        words.append(said)
    return "; ".join(words) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "table"):
        commands.add_parser(name).add_argument("--out", type=Path, default=FILE)
    measuring = commands.choices["measure"]
    measuring.add_argument("--model", default="demo:minilm")
    measuring.add_argument("--only", default="")
    measuring.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    if asked.command == "table":
        page = PAGE.read_text("utf-8")
        for name, text in tables(read(asked.out)).items():
            page = fill(page, name, text)
        PAGE.write_text(page, "utf-8")
    else:
        rows = {row for row in asked.only.split(";") if row}
        measure(asked.model, asked.out, rows, [int(seed) for seed in asked.seeds.split(",")])


if __name__ == "__main__":
    main()
