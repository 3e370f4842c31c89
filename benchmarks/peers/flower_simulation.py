"""Flower's simulator: its FedAvg over Ray's actors, as many as there are cores, with one thread; on a GPU four.

``$ACTOR_CPUS`` gives an actor that many cores and threads instead.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

from common import DEVICE, WORKLOAD, finish, load_model
from flower_client import app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

server = ServerApp()
FINAL: dict[str, Any] = {}


@server.main()
def main(grid: Grid, context: Context) -> None:
    count = len(WORKLOAD["sizes"])
    start = ArrayRecord(load_model().state_dict())
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    FINAL["arrays"] = strategy.start(grid, start, num_rounds=WORKLOAD["rounds"], timeout=3600).arrays


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.WARNING)
    cores, cpus = os.cpu_count() or 1, int(os.environ.get("ACTOR_CPUS", "1"))
    started = time.perf_counter()
    run_simulation(
        server,
        app,
        num_supernodes=len(WORKLOAD["sizes"]),
        backend_config={
            "init_args": {"num_cpus": cores, "logging_level": "error", "log_to_driver": False},
            "client_resources": {"num_cpus": cpus, "num_gpus": 0.0 if DEVICE == "cpu" else 0.25},
        },
    )
    model = load_model()
    model.load_state_dict(FINAL["arrays"].to_torch_state_dict())
    finish(model, started)
