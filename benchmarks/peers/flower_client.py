"""The client of Flower's simulation: one model for each of Ray's actors, ready batches of similar length."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from common import WORKLOAD, load_model, train_client
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@cache
def model() -> Any:
    """Loaded once for each actor."""
    return load_model()


@app.train()
def train(message: Message, context: Context) -> Message:
    client, round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
    torch.manual_seed(1000 * round + client)
    model().load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_client(model(), round, client)
    metrics = MetricRecord({"num-examples": WORKLOAD["sizes"][client]})
    arrays = ArrayRecord(model().state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
