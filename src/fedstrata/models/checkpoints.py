"""Models and tokenizers: loaded from Hugging Face folders and hub ids, saved as folders."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fedstrata.errors import UserError, failed, tokenizing
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models import folders
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.adapters import (
    WITHOUT_BASE,
    adapted_modules,
    add_adapters,
    factors_in,
    take_adapters,
    without_adapters,
)
from fedstrata.models.belonging import check_files, check_tied, check_types, check_vocabulary, fresh_parts
from fedstrata.models.buffers import saved_buffers
from fedstrata.models.configs import HF_LOAD_ERRORS, config_of, reads_last_token, unusable, with_adapters
from fedstrata.models.dropout import disable_dropout
from fedstrata.models.headed import write_headed
from fedstrata.models.heads import KEY, HeadConfig, HeadedModel
from fedstrata.models.parts import find_parts, fixed_tensors
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.parts import Parts
from fedstrata.wire.store import write_tensors


@dataclass(frozen=True)
class Loaded:
    """A model ready to train.

    Attributes:
        model: the model, fp32.
        tokenizer: its fast tokenizer.
        parts: the model's parts.
        fresh: newly initialized parts: with tensors that the checkpoint lacks.
        carried: the checkpoint's pooler where this task's model has none, and the model's buffers; saved again
            with the model, so that a later stage finds them.
        use_cache: what the checkpoint's config says; training itself keeps no past keys and values.
        adapter: the adapters that were put into the model; None where it has none.
        name: folder or hub id that the model was loaded from.
    """

    model: Any
    tokenizer: Any
    parts: Parts
    fresh: tuple[str, ...]
    carried: Tensors
    use_cache: bool | None = None
    adapter: AdapterConfig | None = None
    name: str = ""


def load(
    name: str,
    kind: str,
    labels: Sequence[str] | None,
    seed: int,
    dropout: bool = True,
    head: HeadConfig | None = None,
    remote: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
) -> Loaded:
    """Load a checkpoint for a task.

    Args:
        name: folder or hub id.
        kind: the task's kind.
        labels: class names, for a task with classes.
        seed: of the tensors that the checkpoint lacks.
        dropout: False sets every dropout of the model to 0.
        head: one of our own heads; None for what the checkpoint has or the architecture's own.
        remote: layers that the server holds; the model is made without them.
        adapter: adapters to put into the model; their values are the folder's where it has some.

    Raises:
        UserError: nothing usable is found there, the checkpoint lacks encoder tensors, or the adapters do not fit.
    """
    config = config_of(name, kind, labels, head)
    if not dropout:
        _disable_dropout(config)
    if adapter is None and (factors := factors_in(name)):
        raise with_adapters(name, next(iter(factors)))
    use_cache, config.use_cache = getattr(config, "use_cache", None), False
    tokenizer = tokenizer_of(name, kind)
    check_vocabulary(name, tokenizer, config)
    if 2 in TASK_KINDS[kind].texts:
        check_types(name, tokenizer, config)
    if config.pad_token_id is None or reads_last_token(config):
        config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = _pretrained(class_of(kind, config), name, config)
        if not dropout:
            disable_dropout(model)
        _fix(model, config)
        new = find_parts(model)
        check_tied(name, model)
        fresh = fresh_parts(name, config, new, info, remote)
        parts = find_parts(_with_adapters(model, name, adapter), adapter) if adapter else new
        carried = saved_buffers(model) | ({} if "pooler" in parts.names else _pooler(name, config))
    stack = model.get_submodule(parts.stack)
    for part in remote:
        stack[parts[part].depth] = nn.Identity()
    return Loaded(model, tokenizer, parts, fresh, carried, use_cache, adapter, name)


def _fix(model: Any, config: Any) -> None:
    """Let what the class does not train take no gradient again, which transformers forgets as it loads."""
    with torch.device("meta"):
        bare = type(model)._from_config(copy.deepcopy(config))
    for name in fixed_tensors(bare):
        model.get_parameter(name).requires_grad_(False)


def _with_adapters(model: Any, name: str, adapter: AdapterConfig) -> Any:
    """The model, with adapters: new ones, or those of its folder."""
    if not factors_in(name):
        add_adapters(model, adapter)
        return model
    add_adapters(model, replace(adapter, init="gaussian"))  # the folder's matrices lack what its factors hold
    take_adapters(model, name)
    return model


def _disable_dropout(config: Any) -> None:
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)


def max_positions(model: Any) -> int:
    """Most tokens that a model reads at once: the rows of its position table, if it has one."""
    limit: int = getattr(model.config, "max_position_embeddings", 1 << 30)  # BLOOM looks any way back
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    offset = getattr(table, "padding_idx", None)
    return limit if offset is None else limit - offset - 1  # RoBERTa counts positions from the padding id on


def class_of(kind: str, config: Any) -> Any:
    """The class of a task's models; with one of our own heads where the config names one."""
    return HeadedModel if getattr(config, KEY, None) else auto_class(kind)


def auto_class(kind: str) -> Any:
    """The Hugging Face class of a task's models."""
    return getattr(transformers, TASK_KINDS[kind].model)


def parts_of(
    name: str,
    kind: str,
    labels: Sequence[str] | None = None,
    head: HeadConfig | None = None,
    adapter: AdapterConfig | None = None,
) -> Parts:
    """The parts of the model a task makes of a ``config.json``; no weights are read.

    Raises:
        UserError: there is no config, or the adapters do not fit.
    """
    try:
        with torch.device("meta"):
            config = config_of(name, kind, labels, head)
            model = class_of(kind, config).from_config(config)
    except HF_LOAD_ERRORS as error:
        raise unusable(name, error) from None
    if adapter:
        add_adapters(model, adapter, shapes_only=True)
    return find_parts(model, adapter)


def save(loaded: Loaded, weights: Tensors, folder: Path, card: str = "") -> None:
    """Write a model, or parts of one, and its tokenizer as a Hugging Face folder: whole or not at all.

    Adapters are added to the matrices that they stand beside: the folder is that of a plain model.

    Args:
        loaded: the model's config, tokenizer and carried pooler.
        weights: its tensors; without any only config, tokenizer and card are written.
        folder: where to write.
        card: what a reader of the folder should know.
    """
    partial = folders.partial_folder(folder)
    loader = write_files(loaded, partial)
    plain = without_adapters(adapted_modules(loaded.model), weights) if loaded.adapter else weights
    if tensors := {**plain, **loaded.carried}:
        write_tensors(partial / folders.WEIGHTS, tensors)
    folders.write_card(partial, card, loader)
    folders.publish(partial, folder)


def write_files(loaded: Loaded, folder: Path) -> str:
    """Write a model's config and tokenizer into a folder; returns what its card has to say of a head of ours."""
    config = copy.deepcopy(loaded.model.config)
    if loaded.use_cache is None:
        vars(config).pop("use_cache", None)  # a model from scratch may never have had it
    else:
        config.use_cache = loaded.use_cache
    config.architectures, config.dtype = [type(loaded.model).__name__], torch.float32
    folders.write_config(config, folder)
    folders.write_generation(loaded.model, folder)
    folders.write_tokenizer(loaded.tokenizer, folder, max_positions(loaded.model))
    return write_headed(folder) if getattr(config, KEY, None) else ""


def _pretrained(auto: Any, name: str, config: Any) -> tuple[Any, Any]:
    check_files(name)
    try:
        return auto.from_pretrained(  # type: ignore[no-any-return]
            name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            key_mapping=WITHOUT_BASE if factors_in(name) else None,
        )
    except HF_LOAD_ERRORS as error:
        raise unusable(name, error) from None


def tokenizer_of(name: str, kind: str) -> Any:
    """The fast tokenizer of a model in a folder or of a hub id, for a task.

    Raises:
        UserError: there is none.
    """
    tokenizer = fast_tokenizer(name, kind)
    types = getattr(config_of(name), "type_vocab_size", 0) > 1  # what the model takes, whatever the tokenizer says
    names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # the second is what is saved
    if TASK_KINDS[kind].attention != "causal":  # to generate, a batch is padded on the left
        tokenizer.padding_side = "right"  # as in training: with padding before it a token has another position
    return tokenizer


def fast_tokenizer(name: str, kind: str) -> Any:
    """The fast tokenizer of a folder or hub id; no config is needed. Without a padding token it pads with its eos.

    Raises:
        UserError: there is none.
    """
    options = {"add_prefix_space": True} if TASK_KINDS[kind].words else {}  # words of a list stand alone
    files = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
    if Path(name).is_dir() and not any(list(Path(name).glob(file)) for file in files):
        raise UserError(f"model {name}: the folder holds no tokenizer; expected one of: {', '.join(files)}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
        if not isinstance(tokenizer.model_max_length, (int, float)):
            raise ValueError("model_max_length in tokenizer_config.json is no number")
    except BaseException as error:  # of which tokenizers raises the plainest, or panics
        if not failed(error):
            raise
        raise unusable(name, error, "tokenizer") from None
    if not tokenizer.is_fast:
        raise UserError(f"model {name}: has no fast tokenizer (tokenizer.json)")
    if not {*tokenizer.get_vocab().values()}.difference(tokenizer.all_special_ids):  # its own files are not there
        raise UserError(f"model {name}: has no words for its {type(tokenizer).__name__}; expected tokenizer.json")
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(f"model {name}: its tokenizer has neither a padding token nor an end-of-text token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    with tokenizing(name):
        return folders.stand_alone(tokenizer) if options else tokenizer


def tokenizer_text(tokenizer: Any) -> str:
    """All that decides what a fast tokenizer makes of a text, apart from the length that it cuts at."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    rules = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
    roles = sorted((role, str(token)) for role, token in tokenizer.special_tokens_map.items())
    return json.dumps([rules, roles, tokenizer.truncation_side, tokenizer.split_special_tokens])


def _pooler(name: str, config: Any) -> Tensors:
    """The pooler of a checkpoint, by the names it has there; empty where it has none."""
    with torch.device("meta"):
        bare: nn.Module = transformers.AutoModel.from_config(config)
    names = [key for key, _ in bare.named_parameters() if key.startswith("pooler.")]
    if not names:
        return {}
    whole, info = _pretrained(transformers.AutoModel, name, config)
    if set(names) & set(info["missing_keys"]):
        return {}
    return {f"{whole.base_model_prefix}.{key}": whole.get_parameter(key).detach() for key in names}
