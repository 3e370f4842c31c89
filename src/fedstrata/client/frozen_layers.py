"""Hidden states that enter the lowest trained layer, computed once per round: ``train.cache_frozen_layers``.

A plan that trains nothing below some layer passes every text through the same frozen layers in every epoch. Here
they are computed without dropout, when a batch first needs them and padded as that batch is, and then kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.client.feature_cache import fitting
from fedstrata.client.model_pass import WholePass
from fedstrata.cost.flops import over_kept_states_flops
from fedstrata.errors import UserError
from fedstrata.job.tables import Job, Train, method_name
from fedstrata.models.depth import in_stack
from fedstrata.models.dropout import drawing
from fedstrata.models.families import FAMILIES
from fedstrata.plan.kinds import Index
from fedstrata.plan.messages import Positions
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.tasks import Batch
from fedstrata.wire.files import reserve


class StackEntry(nn.Module):
    """Stands in the stack in place of a layer: notes the states that come in, or puts others in their place.

    Args:
        layer: the layer whose settings the model may ask for (ModernBERT's kind of attention).
        states: ``[B, S, H]``, which go on from here; None: those that come in.
    """

    def __init__(self, layer: nn.Module, states: torch.Tensor | None = None) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)
        self.states = states

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The states."""
        if self.states is None:
            self.states = hidden
        return self.states


class KeptTexts:
    """Which texts of a client are kept, and which have been computed.

    Args:
        lengths: tokens of each of the client's texts, ``[n]``.
        width: of the hidden states.
        train: the job's ``[train]``: the first texts are kept, as far as ``feature_cache_gb`` reaches.
    """

    def __init__(self, lengths: Index, width: int, train: Train) -> None:
        self.width = train.width
        self.rows = lengths if self.width is None else np.full_like(lengths, self.width)
        self.elements = self.rows * width
        self.fits = fitting(self.elements, train.feature_cache_bytes)
        self.there = np.zeros(len(lengths), bool)
        self.computed = Positions()

    def take(self, positions: Index) -> Index:
        """Places within a batch of the texts that have to be computed for it; from now on those are there."""
        columns = int(self.rows[positions].max())
        missing: Index = np.flatnonzero(~self.there[positions])
        self.there[positions] = self.fits[positions]
        self.computed += Positions(len(missing) * columns, len(missing) * columns**2)
        return missing


class KeptStates:
    """The states themselves, on the client's disk in a file without a name, which ends with this object.

    Args:
        texts: what is kept.
        width: of the hidden states.
        folder: where there is room.
    """

    def __init__(self, texts: KeptTexts, width: int, folder: Path) -> None:
        self.texts, self.width = texts, width
        self.starts = np.cumsum(texts.elements) - texts.elements
        total = int(texts.elements[texts.fits].sum())
        self.disk = torch.empty(0)
        if total:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                reserve(file, folder, 4 * total)
                self.disk = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(total,)))

    def put(self, position: int, states: torch.Tensor) -> None:
        """Keep a text's states ``[S, H]``, without what pads them beyond its rows."""
        if self.texts.fits[position]:
            self.get(position).copy_(states[: int(self.texts.rows[position])])

    def get(self, position: int) -> torch.Tensor:
        """A text's states, ``[T, H]``: a view of what is kept."""
        start, size = int(self.starts[position]), int(self.texts.elements[position])
        return self.disk[start : start + size].view(-1, self.width)


@dataclass
class FrozenLayersPass(WholePass):
    """The layers from the lowest trained one up, over the kept states of those below.

    Attributes:
        train: the job's ``[train]``.
        index: the client's examples, ``[n]``.
        kept: their states.
    """

    train: Train
    index: Index
    kept: KeptStates
    states: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the current batch, ``[B, S, H]``, in the type that the layers below give."""
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.count = self.plan.frozen_layers(self.working.parts)
        self.places = {int(example): place for place, example in enumerate(self.index)}

    def inputs(self, chosen: Index, batch: Batch) -> Batch:
        """The batch as it is; its states are made ready."""
        positions = np.asarray([self.places[i] for i in chosen.tolist()], np.int64)
        missing = self.kept.texts.take(positions)
        rows, columns = batch.inputs["input_ids"].shape
        states = torch.zeros(rows, columns, self.kept.width)
        for row in set(range(rows)) - set(missing.tolist()):
            own = self.kept.get(int(positions[row]))
            states[row, : len(own)] = own
        if len(missing):
            made = self._compute(batch, missing)
            self.dtype = made.dtype
            for row, own in zip(missing.tolist(), made.float().cpu(), strict=True):
                states[row] = own
                self.kept.put(int(positions[row]), own)
        self.states = states.to(self.working.device, self.dtype)
        return batch

    @contextmanager
    def local_model(self) -> Iterator[None]:
        """The plan's layers from the lowest trained one up; the embeddings' output is not used."""
        working, layers = self.working, self.plan.layers
        base = _base(working.model)
        with (
            in_stack(
                working.model,
                working.parts,
                lambda stack: [
                    StackEntry(stack[layers[0]], self.states),
                    *(stack[i] for i in layers[self.count :]),
                ],
            ),
            working.frozen_in_bf16(self.plan.builds(working.parts)),
        ):
            learning = base.training
            stack = working.model.get_submodule(working.parts.stack)
            base.eval()
            stack.train(learning)
            try:
                yield
            finally:
                base.train(learning)

    def flops(self, parts: Parts, work: Positions) -> int:
        """Of the steps from the lowest trained layer up, and of those below as often as they were computed."""
        return over_kept_states_flops(parts, self.plan, work, self.kept.texts.computed)

    def _compute(self, batch: Batch, rows: Index) -> torch.Tensor:
        """The states that enter the lowest trained layer for some rows of a batch, ``[R, S, H]``."""
        working, layers = self.working, self.plan.layers
        base, device = _base(working.model), working.device
        chosen = torch.from_numpy(rows)
        inputs = {name: tensor[chosen].to(device) for name, tensor in batch.inputs.items()}
        seen: list[StackEntry] = []

        def below(stack: nn.ModuleList) -> list[nn.Module]:
            seen.append(StackEntry(stack[layers[0]]))
            return [*(stack[i] for i in layers[: self.count]), seen[0]]

        learning = base.training
        with (
            torch.no_grad(),
            drawing(_nothing),  # attention as in a training step
            torch.autocast(device.type, torch.bfloat16, enabled=self.train.precision == "bf16"),
            in_stack(working.model, working.parts, below),
            working.frozen_in_bf16(self._below()),
            _without_pooler(base),
        ):
            base.eval()
            base(**inputs)
        base.train(learning)
        assert seen[0].states is not None
        return seen[0].states

    def _below(self) -> list[str]:
        parts = self.working.parts
        own = {None, *self.plan.layers[: self.count]}
        return [part.name for part in parts.each if part.depth in own and part.kind not in ("pooler", "head")]


def over_kept_states(
    work_lengths: Index, train: Train, plan: Plan, parts: Parts, work: Positions, batches: Iterable[Index]
) -> int:
    """FLOPs of a round as :class:`FrozenLayersPass` will have counted them.

    Args:
        work_lengths: tokens of each of the client's texts.
        train: the job's ``[train]``.
        plan: the client's.
        parts: the model's.
        work: of the steps.
        batches: positions of each batch's texts, in their order.
    """
    texts = KeptTexts(work_lengths, parts.hidden, train)
    for batch in batches:
        texts.take(batch)
    return over_kept_states_flops(parts, plan, work, texts.computed)


def check_frozen_layers(job: Job, parts: Parts, plans: Collection[Plan]) -> None:
    """Refuse ``train.cache_frozen_layers`` where there is nothing to keep.

    Args:
        job: the job.
        parts: the model's.
        plans: of all rounds.

    Raises:
        UserError: no plan freezes a layer below a trained one, the head takes more than the last layer, or the
            family is not known.
    """
    if not job.train.cache_frozen_layers:
        return
    if parts.architecture not in FAMILIES:
        raise UserError(
            f"[train] cache_frozen_layers: does not go with {parts.architecture}; "
            f"expected one of: {', '.join(FAMILIES)}"
        )
    if parts.head_layers:  # the start model's: one that the job names is refused before
        raise UserError(
            "[train] cache_frozen_layers: the start model's head takes the states of four layers, and only those "
            "that enter the lowest trained layer are kept; expected [head] kind = 'cls' or 'mean'"
        )
    if any(plan.freeze_encoder for plan in plans):
        raise UserError(
            f"[train] cache_frozen_layers: {method_name(job.method)!r} freezes the whole encoder and keeps its "
            "states anyway; leave the key out"
        )
    if not any(plan.frozen_layers(parts) for plan in plans if plan.train):
        raise UserError(
            f"[train] cache_frozen_layers: {method_name(job.method)!r} as set here trains from the lowest layer "
            "up in every round; leave the key out"
        )


def _base(model: Any) -> Any:
    """The encoder within a model with a head."""
    return getattr(model, model.base_model_prefix)


@contextmanager
def _without_pooler(base: Any) -> Iterator[None]:
    pooler = getattr(base, "pooler", None)
    if pooler is None:
        yield
        return
    base.pooler = None
    try:
        yield
    finally:
        base.pooler = pooler


def _nothing(shape: Sequence[int]) -> torch.Tensor:
    """Dropout's bits, of which layers that are evaluated take none."""
    raise AssertionError(f"dropout below the lowest trained layer draws {shape}")
