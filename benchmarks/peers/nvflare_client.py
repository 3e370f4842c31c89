"""The client of NVFlare's simulation, by its Client API."""

from __future__ import annotations

import nvflare.client as flare
import torch
from common import WORKLOAD, train_client
from nvflare_model import Net


def main() -> None:
    flare.init()
    torch.set_num_threads(1)
    client = int(flare.get_site_name().removeprefix("site-")) - 1
    net = Net()
    while flare.is_running():
        message = flare.receive()
        if message is None:
            break
        round = message.current_round
        torch.manual_seed(1000 * round + client)
        net.load_state_dict({name: torch.as_tensor(value) for name, value in message.params.items()})
        train_client(net.model, round, client)
        size = WORKLOAD["sizes"][client]
        weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
        flare.send(flare.FLModel(params=weights, meta={"NUM_STEPS_CURRENT_ROUND": size}))


if __name__ == "__main__":
    main()
