"""The in-process engine: one model, one copy of shared parts, whatever the number of clients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fedstrata
from tiny import SENTENCES


def live_elements() -> int:
    """Elements of all distinct live tensors."""
    gc.collect()
    found = {t.data_ptr(): t.numel() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)}
    return sum(found.values())


def test_memory_does_not_grow_with_the_number_of_clients(
    job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    text = "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in SENTENCES * 4)
    (tmp_path / "sentences.csv").write_text(text)
    most = {}
    for count in (4, 24):
        seen: list[int] = []

        def watch(event: Any, seen: list[int] = seen) -> None:
            if type(event).__name__ == "Replied" and event.round == 1:
                seen.append(live_elements())

        made = job("fedavg", "classify", clients={"count": count}, output={"dir": str(tmp_path / str(count))})
        made["server"] = {"evaluate": "end"}
        fedstrata.run(made, ["train.steps=1"], progress=watch)
        assert len(seen) == count
        most[count] = max(seen)
    assert most[24] <= 1.01 * most[4]
