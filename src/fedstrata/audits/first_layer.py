"""What goes into the lowest layer's matrices for every token at every position: candidates of the span check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.audits.bench import Bench
from fedstrata.audits.play import Played
from fedstrata.client.dropout import DropoutRng
from fedstrata.models.dropout import drawing
from fedstrata.models.parts import LINEAR
from fedstrata.plan.streams import DROPOUT

CHUNK = 512
"""Tokens whose vectors are in memory at a time."""


class _Seen(Exception):
    """The input of the lowest layer's first matrix has been seen; the rest need not be computed."""


@dataclass(frozen=True)
class Matrix:
    """A matrix whose input the server can compute.

    Attributes:
        name: of the weight.
        turned: it is ``[in, out]``.
        factor: name of the A that its input goes through first, for the B of an adapter; empty for none.
    """

    name: str
    turned: bool
    factor: str = ""

    def rows(self, change: torch.Tensor) -> torch.Tensor:
        """The change with inputs along the rows, ``[out, in]``."""
        return change.T if self.turned else change


@dataclass(frozen=True)
class Masks:
    """Dropout's masks of a step with a single text: the server knows their seed, and draws them again.

    Attributes:
        seed: of the client's stream.
        width: tokens of the text, padding included.
    """

    seed: int
    width: int

    @contextmanager
    def replayed(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model drops what it dropped of the text, of every text of a batch."""
        draw = DropoutRng(self.seed, torch.device("cpu")).words

        def words(shape: Sequence[int]) -> torch.Tensor:
            return draw((1, self.width, *shape[2:]))[:, : shape[1]].expand(*shape)

        model.train()
        try:
            with drawing(words):
                yield
        finally:
            model.eval()


def masks_of(bench: Bench, played: Played) -> Masks | None:
    """The masks of a round; None where it is of several texts or steps, or where nobody else knows them."""
    secret = bench.job.privacy.level == "example"
    if secret or bench.job.train.cache_frozen_layers or (played.texts, played.reply.steps) != (1, 1):
        return None
    streams = bench.runtime.trainer.streams
    seed = streams.integer(bench.round, played.reply.client, DROPOUT)
    return Masks(seed, played.seen[0].batch.inputs["input_ids"].shape[1])


def first_matrices(bench: Bench) -> list[Matrix]:
    """The matrices of the lowest layer that take its input: query, key and value, and their adapters."""
    inputs: dict[str, tuple[torch.Tensor, bool]] = {}
    lowest = f"{bench.parts.stack}.{bench.lowest}"
    with bench.model() as model:
        layer = model.get_submodule(lowest)
        handles = [
            module.register_forward_pre_hook(_noting(inputs, f"{lowest}.{name}", module))
            for name, module in layer.named_modules()
            if isinstance(module, LINEAR)
        ]
        try:
            with bench.local_layers():
                model(input_ids=torch.arange(8)[None] % bench.vocabulary, attention_mask=torch.ones(1, 8).long())
        finally:
            for handle in handles:
                handle.remove()
    first = next(iter(inputs.values()))[0]
    same = {
        path for path, (found, _) in inputs.items() if found.shape == first.shape and torch.equal(found, first)
    }
    made = [Matrix(f"{path}.weight", inputs[path][1]) for path in inputs if path in same]
    for path in inputs:  # the B of an adapter takes what its A makes
        factor = path.replace(".lora_B.", ".lora_A.")
        if factor != path and factor in same:
            made.append(Matrix(f"{path}.weight", inputs[path][1], f"{factor}.weight"))
    return made


def _noting(inputs: dict[str, tuple[torch.Tensor, bool]], path: str, module: nn.Module) -> Any:
    def note(_module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs[path] = arguments[0].detach().clone(), not isinstance(module, nn.Linear)

    return note


def text_types(bench: Bench) -> list[int]:
    """The types of tokens in texts of this task: which text of a pair they are of; [0] where there are none."""
    return sorted({0, *np.unique(bench.public.tokens.types).tolist()})


def candidates(
    bench: Bench, first: Matrix, positions: int, tokens: torch.Tensor, kind: int = 0, masks: Masks | None = None
) -> Iterator[torch.Tensor]:
    """The input of the lowest layer for tokens at positions 0 to ``positions``, in chunks ``[c, P, H]``.

    A text of one token repeated shows it at every place; what stands below the layers acts on each place alone.

    Args:
        bench: the stage.
        first: a matrix that takes the layer's input, or the layer itself.
        positions: how many.
        tokens: their ids.
        kind: the tokens' type, one of :func:`text_types`.
        masks: of dropout, if they are known.
    """
    caught: list[torch.Tensor] = []

    def types(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"token_type_ids": torch.full_like(ids, kind)} if kind else {}

    def catch(_module: nn.Module, arguments: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        caught.append((arguments[0] if arguments else named["hidden_states"]).detach())
        raise _Seen

    with bench.model() as model:
        handle = model.get_submodule(first.name.removesuffix(".weight")).register_forward_pre_hook(
            catch, with_kwargs=True
        )
        try:
            for chunk in torch.split(tokens, CHUNK):
                ids = chunk[:, None].expand(-1, positions).contiguous()
                try:
                    with bench.local_layers(), masks.replayed(model) if masks else nullcontext():
                        model(input_ids=ids, attention_mask=torch.ones_like(ids), **types(ids))
                except _Seen:
                    yield caught.pop().float()
        finally:
            handle.remove()
