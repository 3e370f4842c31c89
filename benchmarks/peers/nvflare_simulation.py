"""NVFlare's simulator with its FedAvg recipe. With ten clients each has a process that stays, of one thread; with
more, as many processes as there are cores, which NVFlare starts anew for every client of every round."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from common import OUT, WORKLOAD, finish
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import SimEnv
from nvflare_model import Net

if __name__ == "__main__":
    count, cores = len(WORKLOAD["sizes"]), os.cpu_count() or 1
    started = time.perf_counter()
    recipe = FedAvgRecipe(
        name="peer",
        model={"class_path": "nvflare_model.Net", "args": {}},
        min_clients=count,
        num_rounds=WORKLOAD["rounds"],
        train_script=str(Path(__file__).with_name("nvflare_client.py")),
        server_expected_format=ExchangeFormat.PYTORCH,
    )
    recipe.execute(SimEnv(num_clients=count, num_threads=count if count <= 10 else cores, workspace_root=str(OUT)))
    (found,) = OUT.rglob("FL_global_model.pt")
    net = Net()
    saved = torch.load(found, weights_only=False)
    net.load_state_dict(saved.get("model", saved))
    finish(net.model, started)
