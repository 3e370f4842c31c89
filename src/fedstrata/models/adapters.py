"""Adapters in a model: peft's layers, put beside the linear modules of its layers.

A base matrix stays as it is and frozen; heads and poolers have none, they are trained as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedstrata.errors import UserError
from fedstrata.models.adapter_names import BASE, FACTOR, AdapterConfig
from fedstrata.models.configs import with_adapters
from fedstrata.models.folders import WEIGHTS
from fedstrata.models.parts import LINEAR, Division, divide
from fedstrata.plan.kinds import Tensors

TARGETS: Mapping[str, tuple[str, ...]] = {
    "bert": ("query", "value"),
    "roberta": ("query", "value"),
    "electra": ("query", "value"),
    "distilbert": ("q_lin", "v_lin"),
    "modernbert": ("Wqkv",),
    "gpt2": ("c_attn",),
}
"""``model_type`` in Hugging Face's configs -> the targets where the job names none: query and value, as in LoRA's
paper (Hu et al. 2021, section 4.2), or the one matrix that holds them."""
WITHOUT_BASE: Mapping[str, str] = {r"\.base_layer\.": "."}
"""Names of a model with adapters -> those of the plain one, as ``from_pretrained`` takes it."""
INSTALL = "[adapter] kind: 'lora' needs the extra 'lora': pip install 'fedstrata[lora]'"


@dataclass(frozen=True)
class Adapted:
    """One matrix with its adapter.

    Attributes:
        module: its dotted path.
        base: name of the matrix W.
        factors: for each segment the names of A and B.
        scaling: what B A is multiplied by.
        transposed: W is ``[in, out]``, so that B A is added turned around.
    """

    module: str
    base: str
    factors: tuple[tuple[str, str], ...]
    scaling: float
    transposed: bool

    @property
    def table(self) -> bool:
        """W is an embedding's."""
        return "lora_embedding_" in self.factors[0][0]

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """What a segment adds to W, in W's shape and fp64."""
        product = self.scaling * (b.double() @ a.double())
        return product.T if self.transposed else product


def add_adapters(model: Any, config: AdapterConfig, shapes_only: bool = False) -> None:
    """Put adapters into a model; drawn from torch's global generator.

    Args:
        model: a Hugging Face model with a task head.
        config: which.
        shapes_only: make them on the meta device.

    Raises:
        UserError: a target is not there or cannot have one, or peft is not installed.
    """
    names = target_names(model, config)
    try:
        import peft  # here: it takes seconds
    except ImportError:
        raise UserError(INSTALL) from None
    if largest := [name for name in names if min(model.get_submodule(name).weight.shape) < config.rank]:
        shape = tuple(model.get_submodule(largest[0]).weight.shape)
        raise UserError(f"[adapter] rank: is {config.rank}, but {largest[0]} is only {shape[0]} by {shape[1]}")
    turned = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
    svd = config.init == "svd" and not shapes_only
    for segment, (_, components) in config.segments.items():
        lora = peft.LoraConfig(
            r=components,
            lora_alpha=config.alpha * components / config.rank,
            target_modules=names,
            lora_dropout=config.dropout,
            init_lora_weights="pissa" if svd else "gaussian",
            fan_in_fan_out=turned,
        )
        with _one_thread():
            peft.inject_adapter_in_model(lora, model, segment, low_cpu_mem_usage=shapes_only)
        del model.peft_config  # else the next segment is warned of, and transformers saves in another form
    for name in names:
        layer = model.get_submodule(name)
        layer.set_adapter(list(config.segments))
        layer.scaling.update(dict.fromkeys(config.segments, config.scaling))
        if config.merge in ("alternate", "freeze_a"):
            _draw_a(layer)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, one thread computes: singular values and vectors have other last bits with more of them.

    Whoever resumes a run, or has the start model's folder, is to begin with the same, by whatever cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw_a(layer: Any) -> None:
    """Of a table's adapters draw A and let B be zero, as peft does beside matrices.

    Beside tables it does the reverse, so that B, which is trained first or alone, would have no gradient.
    """
    for segment, factor in layer.lora_embedding_A.items():
        nn.init.normal_(factor, std=1 / layer.r[segment])
        nn.init.zeros_(layer.lora_embedding_B[segment])


def target_names(model: Any, config: AdapterConfig) -> list[str]:
    """The modules that get an adapter: linear ones of the layers, and embeddings that the job names.

    Raises:
        UserError: a target is not there or cannot have one.
    """
    division, targets = divide(model), config.targets or TARGETS.get(model.config.model_type)
    if targets is None:
        raise UserError(
            f"[adapter] targets: is missing; for {model.config.model_type!r} none are known, expected some of: "
            f"{', '.join(_ends(model, division))}"
        )
    found: dict[str, list[str]] = {target: [] for target in targets}
    for name, module in model.named_modules():
        kind = division.place(name).kind
        table = kind == "embeddings" and isinstance(module, nn.Embedding)
        if table or (kind == "layer" and isinstance(module, LINEAR)):
            for target in found:
                if f".{name}".endswith(f".{target}"):
                    found[target].append(name)
                    if table:
                        _check_table(model, name, target, config)
    if missing := [target for target, names in found.items() if not names]:
        raise UserError(
            f"[adapter] targets: no linear module of the layers is called {missing[0]!r}; expected some of: "
            f"{', '.join(_ends(model, division))}"
        )
    chosen = {name for names in found.values() for name in names}
    return [name for name, _ in model.named_modules() if name in chosen]


def _ends(model: Any, division: Division) -> list[str]:
    """What the linear modules of the lowest layer are called."""
    start = f"{division.stack}.0."
    names = [name for name, own in model.named_modules() if name.startswith(start) and isinstance(own, LINEAR)]
    ends = [name.split(".")[-1] for name in names]
    longer = (
        end if ends.count(end) == 1 else ".".join(name.split(".")[-2:])
        for name, end in zip(names, ends, strict=True)
    )
    return list(dict.fromkeys(longer))  # one that still stands for two modules is named once


def _check_table(model: Any, name: str, target: str, config: AdapterConfig) -> None:
    """Refuse an adapter beside a table that something else uses, or that merging would have to move."""
    weight = model.get_submodule(name).weight
    if any(own.weight is weight for own in model.modules() if isinstance(own, LINEAR)):
        raise UserError(
            f"[adapter] targets: {target!r} is also the decoder of this task's head, which its adapter would not "
            "move; expected targets without it"
        )
    for key, wanted, does in (("merge", "exact", "moves"), ("init", "svd", "takes apart")):
        if getattr(config, key) == wanted:
            raise UserError(f"[adapter] targets: {key} = {wanted!r} {does} matrices of the layers, not {target!r}")


def adapted_modules(model: nn.Module) -> list[Adapted]:
    """The matrices of a model that have an adapter, in its order."""
    names: dict[str, dict[str, dict[str, str]]] = {}
    for name, _ in model.named_parameters():
        if found := FACTOR.fullmatch(name):
            names.setdefault(found["module"], {}).setdefault(found["segment"], {})[found["factor"]] = name
    made = []
    for module, segments in names.items():
        layer: Any = model.get_submodule(module)
        turned = isinstance(layer.base_layer, (Conv1D, nn.Embedding))
        factors = tuple((own["A"], own["B"]) for own in segments.values())
        scaling = next(iter(layer.scaling.values()))
        made.append(Adapted(module, f"{module}{BASE}.weight", factors, scaling, turned))
    return made


def factors_in(folder: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the adapters' tensors among a folder's weights, by the names they have here."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            names = filter(FACTOR.fullmatch, file.keys())
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError):  # whoever loads the weights says so
        return {}


def take_adapters(model: nn.Module, folder: str) -> None:
    """Give the adapters of a model the values that such a folder has.

    Raises:
        UserError: they are others.
    """
    found = factors_in(folder)
    own = {name: tuple(tensor.shape) for name, tensor in model.named_parameters() if FACTOR.fullmatch(name)}
    if not found.items() <= own.items():  # fewer where the server holds layers
        raise with_adapters(folder, next(iter(found)))
    with safe_open(Path(folder) / WEIGHTS, "pt") as file:
        for name in found:
            model.get_parameter(name).detach().copy_(file.get_tensor(name))


def without_adapters(adapted: list[Adapted], weights: Tensors) -> Tensors:
    """The weights of the plain model: every product added to its matrix, by the plain names.

    A matrix without its factors stays as it is; factors without their matrix are left out.
    """
    merged = {name.replace(f"{BASE}.", "."): t for name, t in weights.items() if not FACTOR.fullmatch(name)}
    for matrix in adapted:
        present = [(a, b) for a, b in matrix.factors if a in weights and b in weights]
        if present and matrix.base in weights:
            total = weights[matrix.base].double()
            for a, b in present:
                total = total + matrix.product(weights[a], weights[b])
            merged[matrix.base.replace(f"{BASE}.", ".")] = total.float().contiguous()
    return merged
