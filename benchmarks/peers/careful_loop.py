"""A plain PyTorch loop, carefully written: ready token arrays, batches of similar length, fused AdamW, FedAvg by
example counts. Where the workload has plans (FedBFPT, FedBT) it freezes, shortens and averages as they say."""

from __future__ import annotations

import time
from typing import Any

import torch
from common import (
    WORKLOAD,
    autocast,
    finish,
    groups,
    load_model,
    mask_tokens,
    plan,
    tensors,
    to_device,
    train_client,
)


def main() -> None:
    torch.manual_seed(0)
    model = load_model()
    names = dict(model.named_parameters())
    started = time.perf_counter()
    server = {name: p.detach().clone() for name, p in names.items()}
    masks = torch.Generator().manual_seed(0)
    for round in range(WORKLOAD["rounds"]):
        sums: dict[str, torch.Tensor] = {}
        weights: dict[str, float] = {}
        for client, size in enumerate(WORKLOAD["sizes"]):
            sent = list(names)
            with torch.no_grad():
                torch._foreach_copy_(list(names.values()), list(server.values()))
            if plan()["plans"]:
                sent = planned(model, round, client, masks)
            else:
                train_client(model, round, client)
            with torch.no_grad():
                fresh = [name for name in sent if name not in sums]
                sums |= {name: torch.zeros_like(names[name]) for name in fresh}
                torch._foreach_add_([sums[n] for n in sent], [names[n] for n in sent], alpha=size)
            for name in sent:
                weights[name] = weights.get(name, 0.0) + size
        for name, total in sums.items():
            server[name] = total / weights[name]
    with torch.no_grad():
        torch._foreach_copy_(list(names.values()), list(server.values()))
    finish(model, started)


def planned(model: Any, round: int, client: int, masks: torch.Generator) -> list[str]:
    """A client's steps on the layers and parameters of its plan; the names of what it sends."""
    own = plan()["plans"][plan()["of"][round][client]]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = [model.get_parameter(name).requires_grad_() for name in own["train"]]
    encoder, depth = model.base_model.encoder, model.config.num_hidden_layers
    everything = encoder.layer
    encoder.layer = torch.nn.ModuleList([everything[i] for i in own["layers"]])
    model.config.num_hidden_layers = len(own["layers"])
    optimizer = torch.optim.AdamW(groups(trained), lr=WORKLOAD["learning_rate"], fused=True)
    model.train()
    for index in plan()["batches"][round][client]:
        batch = tensors("train", index)
        if WORKLOAD["kind"] == "mlm":
            batch = mask_tokens(batch, masks)
        with autocast():
            loss = model(**to_device(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    encoder.layer, model.config.num_hidden_layers = everything, depth
    return list(own["send"])


if __name__ == "__main__":
    main()
