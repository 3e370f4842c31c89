"""Word embeddings of which a round trains only the rows that its texts use; the others decay all the same.

A row that no text uses has no gradient, so AdamW that starts anew leaves it where it is but for its decay. Until
the round's end a table of the used rows alone stands in the model: a step neither fills nor reads gradients and
moments of the other rows. The weights after the round are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fedstrata.client.working_model import Parameters, WorkingModel
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index
from fedstrata.tasks import Examples, Task
from fedstrata.tasks.task import FixedTokens

LEAST_SAVED = 0.5
"""Share of the rows that must be unused: else the detour does not pay."""
LEAST_TABLE = 1 << 18
"""Elements of a table below which the detour takes as long as it saves, or longer; of 4,000 rows of 128 it pays in
a round of one step."""
LANES = 16
"""Numbers of a processor's widest register: rows of a multiple of it are computed alike in any table."""
BLOCK = 64
"""Rows that decay together: they stay in a core's cache for all steps."""

Rates = list[float]
"""The learning rate of every step so far."""


def used_rows(
    working: WorkingModel,
    trained: Parameters,
    train: Train,
    task: Task,
    examples: Examples,
    chosen: Iterable[Index],
) -> tuple[str, Index] | None:
    """The word embeddings' name and the rows that batches use; None where the whole table has to be trained.

    Args:
        working: the model.
        trained: what is trained.
        train: how.
        task: makes the batches.
        examples: all examples.
        chosen: those of each batch of the round.
    """
    plain = train.optimizer == "adamw" and train.optimizer_state == "reset"
    if not plain or train.max_grad_norm is not None or train.proximal_mu or working.device.type != "cpu":
        return None
    name = working.parts.words
    if name not in trained or name in working.parts.sharing.narrowed or not isinstance(task, FixedTokens):
        return None
    table = _looked_up_only(working, name)
    if table is None or table.embedding_dim % LANES or table.weight.numel() < LEAST_TABLE:
        return None
    texts = [position for batch in chosen for position in batch]
    rows = task.token_ids(examples, np.unique(np.asarray(texts, np.int64)))
    return (name, rows) if len(rows) <= (1 - LEAST_SAVED) * table.num_embeddings else None


def _looked_up_only(working: WorkingModel, name: str) -> nn.Embedding | None:
    """The table, if it is a plain one that stands in a single place: no decoder is tied to it."""
    for table, _ in working.only_place(name):
        if type(table) is nn.Embedding and table.max_norm is None and not table.sparse:
            return table
    return None


@contextmanager
def only_rows(
    working: WorkingModel, trained: Parameters, rows: tuple[str, Index] | None, decay: float
) -> Iterator[tuple[Parameters, Rates]]:
    """Inside, a table of the given rows stands in the model.

    Args:
        working: the model.
        trained: what is trained.
        rows: of :func:`used_rows`; with None nothing is replaced.
        decay: the optimizer's weight decay.

    Yields:
        what is trained inside, by the same names; and a list to which every step's learning rate must be added.
    """
    rates: Rates = []
    if rows is None:
        yield trained, rates
        return
    name, used = rows[0], torch.from_numpy(rows[1])
    table = _looked_up_only(working, name)
    assert table is not None
    whole = table.weight
    place = torch.full((len(whole),), -1)
    place[used] = torch.arange(len(used))
    small = nn.Parameter(whole.detach()[used])
    hook = table.register_forward_pre_hook(lambda module, inputs: (place[inputs[0]],))
    padding = table.padding_idx
    table.weight, table.num_embeddings = small, len(used)
    table.padding_idx = None if padding is None or place[padding] < 0 else int(place[padding])
    try:
        yield {key: small if key == name else p for key, p in trained.items()}, rates
    finally:
        hook.remove()
        table.weight, table.num_embeddings, table.padding_idx = whole, len(whole), padding
        with torch.no_grad():
            _decay(whole, [1 - rate * decay for rate in rates])
            whole[used] = small


def _decay(table: torch.Tensor, factors: Sequence[float]) -> None:
    """Multiply by one factor after the other, as that many steps would."""
    if all(factor == 1 for factor in factors):
        return
    for block in torch.split(table, BLOCK):
        for factor in factors:
            block.mul_(factor)
