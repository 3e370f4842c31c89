"""A plain PyTorch loop as people write it: a batch is drawn at random, tokenized and padded when it is needed."""

from __future__ import annotations

import copy
import json
import time

import torch
import transformers
from common import DEVICE, OUT, WORK, WORKLOAD, load_model
from torch.utils.data import DataLoader


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (WORK / name).read_text("utf-8").splitlines()]


def main() -> None:
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(WORK / "start")
    number = {label: i for i, label in enumerate(WORKLOAD["labels"])}
    model = load_model()
    rows = read("train.jsonl")
    shards = [[row for row in rows if row["client"] == client] for client in WORKLOAD["clients"]]
    started = time.perf_counter()

    def collate(batch: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        texts = [row["text"] for row in batch]
        options = {"padding": True, "truncation": True, "max_length": WORKLOAD["max_tokens"]}
        tokens = tokenizer(texts, return_tensors="pt", **options)
        tokens["labels"] = torch.tensor([number[row["label"]] for row in batch])
        return {name: tensor.to(DEVICE) for name, tensor in tokens.items()}

    for _ in range(WORKLOAD["rounds"]):
        begin = copy.deepcopy(model.state_dict())
        mean = {name: torch.zeros_like(tensor) for name, tensor in begin.items()}
        for shard in shards:
            model.load_state_dict(begin)
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=WORKLOAD["learning_rate"])
            loader = DataLoader(shard, batch_size=WORKLOAD["batch_size"], shuffle=True, collate_fn=collate)
            for step, batch in enumerate(loader):
                if step == WORKLOAD["steps"]:
                    break
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                mean[name] += (tensor * (len(shard) / len(rows))).to(mean[name].dtype)
        model.load_state_dict(mean)
    seconds = time.perf_counter() - started
    model.eval()
    right, test = 0, read("test.jsonl")
    with torch.no_grad():
        for batch in DataLoader(test, batch_size=2 * WORKLOAD["batch_size"], collate_fn=collate):
            labels = batch.pop("labels")
            right += int((model(**batch).logits.argmax(-1) == labels).sum())
    model.save_pretrained(OUT / "model")
    (OUT / "result.json").write_text(json.dumps({"score": right / len(test), "train_seconds": seconds}), "utf-8")


if __name__ == "__main__":
    main()
