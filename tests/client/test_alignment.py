"""Where a model's tensors begin: a library's products may depend on it in their last bits."""

from __future__ import annotations

import torch

from fedstrata.client.working_model import WorkingModel
from fedstrata.models.parts import find_parts
from fedstrata.wire.on_disk import ALIGNED
from tiny import tiny_model


def test_weights_that_stand_anywhere_in_a_file_are_moved_to_where_torch_would_put_them() -> None:
    model = tiny_model("bert")
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for parameter in model.parameters():
        elsewhere = torch.empty(parameter.numel() + 1)[1:].view(parameter.shape)
        parameter.data = elsewhere.copy_(parameter.data)
    assert all(parameter.data_ptr() % ALIGNED for parameter in model.parameters())
    identities = [id(parameter) for parameter in model.parameters()]
    working = WorkingModel(model, find_parts(model))
    tensors = [*working.model.parameters(), *working.model.buffers()]
    assert not any(tensor.data_ptr() % ALIGNED for tensor in tensors)
    assert [id(parameter) for parameter in working.model.parameters()] == identities
    assert all(torch.equal(parameter, before[name]) for name, parameter in working.model.named_parameters())
