"""Models from a config instead of a checkpoint: the job's ``[model.config]``.

First a folder with a config and a tokenizer, which is all that costs depend on; then weights, drawn with the run's
seed, which make it a Hugging Face folder like any other.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fedstrata.errors import UserError, did_you_mean, first_words
from fedstrata.models.checkpoints import Loaded, class_of, fast_tokenizer, max_positions, save
from fedstrata.models.configs import HF_LOAD_ERRORS, config_of, fit_config
from fedstrata.models.families import FAMILIES, PRESETS, UNLISTED
from fedstrata.models.folders import write_config, write_tokenizer
from fedstrata.models.heads import HeadConfig
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.wire.files import copy_folder

END = "<|endoftext|>"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""RoBERTa's, by their ids."""


def new_config(settings: Mapping[str, Any]) -> Any:
    """The config that a job's ``[model.config]`` describes.

    Raises:
        UserError: the preset, the model type or a key is not known, or a value is invalid.
    """
    given = dict(settings)
    preset = given.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise UserError(f"[model.config] preset: {preset!r} is not known; {did_you_mean(str(preset), PRESETS)}")
    below = PRESETS.get(preset, {})
    family = given.pop("model_type", below.get("model_type"))
    if family not in transformers.CONFIG_MAPPING:
        found = "is missing" if family is None else f"{family!r} is not known"
        raise UserError(f"[model.config] model_type: {found}; {did_you_mean(str(family), FAMILIES)}")
    kind = transformers.CONFIG_MAPPING[family]
    names: Mapping[str, str] = kind.attribute_map
    listed = {*kind().to_dict(), *names, *UNLISTED.get(family, ())}
    known = sorted(listed - {"_name_or_path", "architectures", "transformers_version"})
    for key in given:
        if key not in known:
            raise UserError(
                f"[model.config] {key}: no such key of {family}; {did_you_mean(key, ['preset', *known])}"
            )
    keys = {names.get(key, key): value for key, value in [*below.items(), *given.items()] if key != "model_type"}
    try:
        config = kind(**keys)
    except HF_LOAD_ERRORS as error:
        raise _invalid(error) from None
    if config.num_hidden_layers < 1:
        raise UserError(f"[model.config] num_hidden_layers: is {config.num_hidden_layers}; expected 1 or more")
    return config


def init_from_config(
    settings: Mapping[str, Any],
    tokenizer: str | None,
    texts: Iterable[str] | None,
    folder: Path,
    kind: str,
    labels: Sequence[str] | None,
    head: HeadConfig | None,
) -> Path:
    """Write a new model's config and tokenizer into a folder; checks that a model can be made of them.

    Args:
        settings: the job's ``[model.config]``.
        tokenizer: folder or hub id of its tokenizer; None to train one.
        texts: what it is then trained on; None where there are none, and so no tokenizer is written.
        folder: where to write.
        kind: the task's kind.
        labels: class names, for a task with classes.
        head: one of our own heads.

    Raises:
        UserError: the config or the tokenizer is not usable, or they do not go together.
    """
    config = new_config(settings)
    fast = None
    if tokenizer is not None:
        fast = fast_tokenizer(tokenizer, kind)
    elif texts is not None:
        fast = train_tokenizer(texts, config.vocab_size, type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING)
    if fast is not None:
        _fit_to_tokenizer(config, fast, "vocab_size" in settings)
    write_config(config, folder)
    try:
        with torch.device("meta"):
            fit = fit_config("of [model.config]", config_of(str(folder)), kind, labels, head)
            model = class_of(kind, fit).from_config(fit)
            find_parts(model)
    except HF_LOAD_ERRORS as error:
        raise _invalid(error) from None
    if fast is not None:
        write_tokenizer(fast, folder, max_positions(model))
    return folder


def _fit_to_tokenizer(config: Any, tokenizer: Any, fixed: bool) -> None:
    """Take the vocabulary's size, unless it is ``fixed``, and the special tokens' ids from the tokenizer."""
    if not fixed:
        config.vocab_size = len(tokenizer)
    elif len(tokenizer) > config.vocab_size:
        raise UserError(
            f"[model.config] vocab_size: is {config.vocab_size}, but the tokenizer has {len(tokenizer)} words; "
            f"expected {len(tokenizer)} or more"
        )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if hasattr(config, name) and getattr(tokenizer, name) is not None:
            setattr(config, name, getattr(tokenizer, name))


def train_tokenizer(texts: Iterable[str], size: int, masked: bool) -> Any:
    """A byte-level BPE trained on texts: with RoBERTa's special tokens, or with GPT-2's one.

    Args:
        texts: the texts.
        size: most words it learns, special tokens and the 256 bytes included.
        masked: for a model that reads both ways.
    """
    special = list(SPECIAL if masked else [END])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if not masked:
        bpe.post_processor = processors.ByteLevel(trim_offsets=False)
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=bpe, bos_token=END, eos_token=END, unk_token=END
        )
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def add_weights(folder: Path, kind: str, labels: Sequence[str] | None, head: HeadConfig | None, seed: int) -> None:
    """Add weights, as the architecture draws them, to a folder with a config and a tokenizer."""
    config = config_of(str(folder), kind, labels, head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = class_of(kind, config).from_config(config)
    parts = find_parts(model)
    tokenizer = fast_tokenizer(str(folder), kind)
    loaded = Loaded(model, tokenizer, parts, (), {}, getattr(config, "use_cache", None))
    save(loaded, part_tensors(model, parts, parts.names), folder)


def publish(folder: Path, target: Path) -> None:
    """Copy a folder to another place, whole or not at all."""
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    copy_folder(folder, partial)
    os.replace(partial, target)


def _invalid(error: Exception) -> UserError:
    return UserError(f"[model.config]: {first_words(error)}")
