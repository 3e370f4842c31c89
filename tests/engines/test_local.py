"""The in-process engine: one model, one copy of shared parts, whatever the number of clients."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedstrata
from fedstrata.client.answer import ClientRuntime
from fedstrata.client.scorer import FeatureCaches
from fedstrata.client.working_model import WorkingModel
from fedstrata.engines.local import LocalEngine
from fedstrata.runs import train as train_module
from tiny import SENTENCES, saved_models

Jobs = Callable[..., dict[str, Any]]


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
        replies: list[str] = []

        def watch(event: Any, seen: list[int] = seen, replies: list[str] = replies, count: int = count) -> None:
            if type(event).__name__ == "Replied" and event.round == 1:
                replies.append(event.client)
                if len(replies) in (1, count // 2, count):
                    seen.append(live_elements())

        made = job("fedavg", "classify", clients={"count": count}, output={"dir": str(tmp_path / str(count))})
        made["server"] = {"evaluate": "end"}
        result = fedstrata.run(made, ["train.steps=1"], progress=watch)
        assert (len(replies), len(seen)) == (count, 3)
        most[count] = max(seen)
    assert result.model_folder is not None
    reply = sum(tensor.numel() for tensor in load_file(result.model_folder / "model.safetensors").values())
    assert most[24] <= 1.01 * (most[4] + 6 * reply), "six replies at most wait to be summed"


def twin(runtime: ClientRuntime) -> ClientRuntime:
    """The same roles over a copy of the model."""
    working = WorkingModel(copy.deepcopy(runtime.working.model), runtime.working.parts)
    trainer, scorer, caches = (
        replace(runtime.trainer, working=working),
        replace(runtime.scorer, working=working),
        FeatureCaches(working, runtime.caches.task, runtime.caches.train, runtime.caches.on_encoded),
    )
    return replace(runtime, working=working, trainer=trainer, scorer=scorer, caches=caches)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "mlm", {"wire": {"dtype": "int8"}, "clients": {"fraction": 0.67}}),
    ("fedbfpt", "mlm", {"train": {"optimizer_state": "persist"}}),
    ("fedavg", "mlm", {"wire": {"codec": "delta", "bits": 1, "density": 0.05}, "clients": {"fraction": 0.67}}),
    ("fedsplitbert", "classify", {"clients": {"fraction": 0.67}}),
    ("fedfreezebert", "classify", {"head": {"kind": "mean"}, "clients": {"fraction": 0.67}}),
    ("fedbert", "classify", {"method": {"mode": "parallel"}}),
]


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_two_models_give_the_same_bits_as_one(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, tables: dict[str, Any]
) -> None:
    """Clients meet a model that another client used, or not, and it makes no difference."""
    made = job(name, kind, 4 if "head" in tables else 3, **tables)
    one = fedstrata.run(made, {"output.dir": str(tmp_path / "one")})
    steps: list[int] = []

    def doubled(**fields: Any) -> LocalEngine:
        [first] = fields["runtimes"]
        second = twin(first)
        second.working.model.register_forward_hook(lambda *_: steps.append(1))
        return LocalEngine(**{**fields, "runtimes": [first, second]})

    monkeypatch.setattr(train_module, "LocalEngine", doubled)
    two = fedstrata.run(made, {"output.dir": str(tmp_path / "two")})
    assert steps, "the second model had its share"
    a, b = (saved_models(result.folder) for result in (one, two))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[tensor], b[tensor]) for tensor in a)
    assert (one.score, one.transfers, one.flops) == (two.score, two.transfers, two.flops)
    stores = [sorted((tmp_path / run / "state" / "clients").glob("*/round-*")) for run in ("one", "two")]
    assert len(stores[0]) == len(stores[1])
    for mine, other in zip(*stores, strict=True):
        assert mine.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("wire", "optimizer"),
    [
        ({"dtype": "int8"}, "adam"),
        ({"dtype": "bf16"}, "sgd"),
        ({"codec": "delta", "bits": 2, "density": 0.1, "dtype": "fp16"}, "yogi"),
        ({"codec": "delta", "bits": 1, "rotation": True}, "sgd"),
    ],
)
def test_a_run_that_learns_nothing_ends_in_the_weights_it_began_with(
    job: Jobs, wire: dict[str, Any], optimizer: str
) -> None:
    """The wire rounds on both ways, and a client misses a round now and then."""
    tables: dict[str, Any] = {"wire": wire, "server": {"optimizer": optimizer, "evaluate": "end"}}
    learns_nothing = {"learning_rate": 1e-300, "steps": 1}
    made = job("fedavg", train=learns_nothing, clients={"fraction": 0.67}, method={"rounds": 4}, **tables)
    result = fedstrata.run(made)
    start = load_file(Path(made["model"]["name"]) / "model.safetensors")
    end = load_file(result.model_folder / "model.safetensors")
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)
