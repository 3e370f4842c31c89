"""Adapters as a folder that peft loads: its config, and the factors and heads by peft's names.

from peft import PeftModel
model = PeftModel.from_pretrained(AutoModel….from_pretrained(BASE), FOLDER)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fedstrata.models.adapter_names import BASE, FACTOR
from fedstrata.models.adapters import adapted_modules
from fedstrata.models.checkpoints import Loaded, save, write_files
from fedstrata.models.folders import (
    ADAPTER_WEIGHTS,
    CODE,
    link_files,
    partial_folder,
    publish,
    write_card,
    write_config,
)
from fedstrata.plan.kinds import Tensors
from fedstrata.wire.store import write_tensors

PREFIX = "base_model.model."
"""Under which peft saves a model's tensors."""
CARD = """\
Adapters and heads, to be loaded by peft over the model that they were trained beside:

    {head}from peft import PeftModel
    from transformers import AutoConfig, {auto}
    model = {auto}.from_pretrained({base!r}, config=AutoConfig.from_pretrained(folder))
    model = PeftModel.from_pretrained(model, folder)
"""
TASK_AUTO = {"HeadedModel": "AutoModelForSequenceClassification"}
"""Class of a model -> the one of transformers that loads it, where that is another."""


def save_adapters(
    loaded: Loaded, weights: Tensors, folder: Path, base: str, card: str = "", like: Path | None = None
) -> None:
    """Write the adapters and the heads of a model as a folder that ``PeftModel.from_pretrained`` loads.

    The segments of a rank become one adapter. Heads are saved as whole modules, as peft wants them: a decoder that
    is tied to the embeddings is in there too.

    Args:
        loaded: the model with its adapters.
        weights: all its tensors.
        folder: where to write.
        base: folder or hub id of the model that the adapters belong to.
        card: what else a reader of the folder should know.
        like: a folder of the same model: config and tokenizer are then second names for its files.
    """
    import peft

    adapter, model = loaded.adapter, loaded.model
    assert adapter is not None
    adapted, heads = adapted_modules(model), _heads(loaded)
    tensors: Tensors = {}
    for matrix in adapted:
        for letter, names, along in zip("AB", zip(*matrix.factors, strict=True), (0, 1), strict=True):
            name = (
                f"{matrix.module}.lora_embedding_{letter}"
                if matrix.table
                else f"{matrix.module}.lora_{letter}.weight"
            )
            tensors[PREFIX + name] = torch.cat([weights[one] for one in names], along)
    tensors |= _module_tensors(model, heads, weights)
    config = peft.LoraConfig(
        base_model_name_or_path=base,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        modules_to_save=heads or None,
        fan_in_fan_out=any(matrix.transposed and not matrix.table for matrix in adapted),
        lora_dropout=adapter.dropout,
        inference_mode=True,
    )
    config.target_modules = [matrix.module for matrix in adapted]  # peft makes a set of them, of any order
    partial = partial_folder(folder)
    write_config(config, partial)
    write_tensors(partial / ADAPTER_WEIGHTS, {name: tensor.contiguous() for name, tensor in tensors.items()})
    if like is None:
        write_files(loaded, partial)
    else:
        link_files(like, partial)
    head = "import fedstrata.models.heads\n    " if (partial / f"{CODE}.py").exists() else ""
    auto = TASK_AUTO.get(type(loaded.model).__name__, type(loaded.model).__name__)
    write_card(partial, card, CARD.format(head=head, auto=auto, base=base))
    publish(partial, folder)


def save_base(loaded: Loaded, weights: Tensors, folder: Path, stays: bool = True) -> str:
    """The model that the adapters belong to: the start model, or where its matrices were moved, one saved here.

    Args:
        loaded: the model with its adapters.
        weights: its tensors.
        folder: where to save it.
        stays: the start model is a plain one and stays where it was loaded from; else one is saved in any case.

    Returns:
        Hub id, or the full path of a folder: peft looks for it from wherever the adapters are loaded.
    """
    assert loaded.adapter is not None
    if stays and loaded.adapter.merge != "exact" and loaded.adapter.init != "svd":
        return str(Path(loaded.name).resolve()) if Path(loaded.name).is_dir() else loaded.name
    plain = {name.replace(f"{BASE}.", "."): t for name, t in weights.items() if not FACTOR.fullmatch(name)}
    save(loaded, plain, folder)
    return str(folder.resolve())


def _heads(loaded: Loaded) -> list[str]:
    """The modules that hold what a model has above its layers."""
    prefix = f"{loaded.model.base_model_prefix}."
    names = [name for part in loaded.parts.each if part.kind in ("pooler", "head") for name in part.shapes]
    inside = (prefix * name.startswith(prefix) + name.removeprefix(prefix).split(".")[0] for name in names)
    return list(dict.fromkeys(inside))


def _module_tensors(model: nn.Module, modules: list[str], weights: Tensors) -> Tensors:
    """The tensors of whole modules by peft's names; of a tied one those of the part that it belongs to."""
    names: Mapping[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{PREFIX}{module}.{name}": weights[names[id(parameter)]].clone()
        for module in modules
        for name, parameter in model.get_submodule(module).named_parameters(remove_duplicate=False)
    }
