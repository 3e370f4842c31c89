"""Hugging Face's Trainer, made anew for every client of every round, and FedAvg around it. Texts are tokenized
beforehand; batches are of similar length where the workload asks for it, else the Trainer's own random ones."""

from __future__ import annotations

import time

import torch
import transformers
from common import DEVICE, OUT, WORK, WORKLOAD, arrays, finish, load_model, plan


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A client's examples."""

    def __init__(self, index: list[int]) -> None:
        held = arrays("train")
        self.rows = [
            {
                "input_ids": held["ids"][held["offsets"][i] : held["offsets"][i + 1]].tolist(),
                "labels": int(held["labels"][i]),
            }
            for i in index
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, object]:
        return self.rows[i]


def main() -> None:
    torch.manual_seed(0)
    model = load_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(WORK / "start")
    collate = transformers.DataCollatorWithPadding(tokenizer)
    shards = [Rows(index) for index in plan()["shards"]]
    names = dict(model.named_parameters())
    grouped = WORKLOAD["group_by_length"]
    started, inside = time.perf_counter(), 0.0
    server = {name: p.detach().clone() for name, p in names.items()}
    for round in range(WORKLOAD["rounds"]):
        mean = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        for shard in shards:
            with torch.no_grad():
                torch._foreach_copy_(list(names.values()), list(server.values()))
            arguments = transformers.TrainingArguments(
                output_dir=str(OUT / "trainer"),
                max_steps=WORKLOAD["steps"] or -1,
                num_train_epochs=1,
                per_device_train_batch_size=WORKLOAD["batch_size"],
                learning_rate=WORKLOAD["learning_rate"],
                lr_scheduler_type="constant",
                weight_decay=0.01,
                max_grad_norm=0.0,
                train_sampling_strategy="group_by_length" if grouped else "random",
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=DEVICE == "cpu",
                bf16=DEVICE != "cpu",
                seed=round,
            )
            trainer = transformers.Trainer(model, arguments, data_collator=collate, train_dataset=shard)
            inside += trainer.train().metrics["train_runtime"]
            with torch.no_grad():
                share = len(shard) / sum(map(len, shards))
                torch._foreach_add_(list(mean.values()), list(names.values()), alpha=share)
        server = mean
    with torch.no_grad():
        torch._foreach_copy_(list(names.values()), list(server.values()))
    finish(model, started, epoch_seconds=inside)


if __name__ == "__main__":
    main()
