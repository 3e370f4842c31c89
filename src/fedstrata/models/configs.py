"""Configs of Hugging Face folders and hub ids, made to fit a task; no weights are read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from safetensors import SafetensorError

from fedstrata.errors import UserError, first_words
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.models.families import check_layers
from fedstrata.models.headed import plain_config
from fedstrata.models.heads import KEY, HeadConfig

ADAPTERS = "adapter_config.json"
"""What peft writes beside adapters."""
HF_LOAD_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError, SafetensorError, StrictDataclassError, pickle.UnpicklingError,
)  # fmt: skip
"""What transformers raises on folders without a model, with half of one, or with another one."""
ATTENTION = (None, "sdpa", "eager")
"""What a config may ask for: of other kinds transformers loads the code from another package or from the hub."""
MOST_LAYERS = 4096
"""More than any model has: a model of a damaged config with more takes minutes to make, even without memory."""
MOST_CLASSES = 10_000_000
"""transformers makes a name for each of a config's ``num_labels``."""
ORIGIN = ("_name_or_path", "_commit_hash", "transformers_version", "architectures", "dtype")
"""Keys of a config that tell whence it comes, and no more."""


def config_of(
    name: str, kind: str = "", labels: Sequence[str] | None = None, head: HeadConfig | None = None
) -> Any:
    """The config of a folder or hub id, made to fit a task, its classes and its head.

    Raises:
        UserError: there is none, or one of adapters.
    """
    _ask_hub(name)
    if (Path(name) / ADAPTERS).exists():
        raise with_adapters(name)
    try:
        config = plain_config(read_config(name))
    except HF_LOAD_ERRORS as error:
        raise unusable(name, error) from None
    return fit_config(name, config, kind, labels, head)


def read_config(name: str) -> Any:
    """The config of a folder or hub id as it is, read without code from there.

    Raises:
        UserError: it asks for attention whose code transformers would take from elsewhere, or for more layers or
            classes than a model has.
        Exception: one of :data:`HF_LOAD_ERRORS`.
    """
    _at_most(name, "num_labels", transformers.PreTrainedConfig.get_config_dict(name)[0], MOST_CLASSES)
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    for one in (config, plain_config(config)):
        _at_most(name, "num_hidden_layers", one, MOST_LAYERS)
        if not isinstance(one.architectures, (list, type(None))):
            raise ValueError("architectures in config.json is no list")
        HeadConfig(**(getattr(one, KEY, None) or {"kind": "cls"}))  # a TypeError for what is no head's
        if (attention := one._attn_implementation) not in ATTENTION:
            raise UserError(
                f"model {name}: its config.json asks for attention {attention!r}, whose code comes from elsewhere"
                "; expected 'sdpa', 'eager' or none"
            )
    return config


def _at_most(name: str, key: str, config: Any, most: int) -> None:
    found = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
    if isinstance(found, (int, float)) and found > most:
        raise UserError(f"model {name}: its config.json says {key} is {found:.6g}; expected {most:,} or fewer")


def with_adapters(name: str, where: str = ADAPTERS) -> UserError:
    """The sentence about a model that has adapters, in its weights or beside it, where transformers puts them in.

    They would be trained and saved by their own names, and a plain model would lack the matrices beside them.
    """
    return UserError(
        f"model {name}: has adapters of peft ({where}); expected a plain model, as merge_and_unload() of peft "
        "makes one"
    )


def _ask_hub(name: str) -> None:
    """Ask the hub once for a model that is not on this machine, where transformers would try a dozen times.

    Raises:
        UserError: the hub does not answer; what it answers is left to transformers.
    """
    if Path(name).is_dir() or constants.HF_HUB_OFFLINE:
        return
    try:
        if try_to_load_from_cache(name, "config.json") is None:
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, ValueError):
        return
    except Exception as error:  # of the library beneath, which differs between versions
        unreachable = OSError(f"{constants.ENDPOINT} cannot be reached ({first_words(error)})")
        raise unusable(name, unreachable) from None


def fit_config(name: str, config: Any, kind: str, labels: Sequence[str] | None, head: HeadConfig | None) -> Any:
    """A config made to fit a task, its classes and its head; ``name`` is what to call the model.

    Raises:
        UserError: the model has no layers of its own to train one by one, not the attention that the task needs,
            bidirectional or causal, or the job's classes in another order.
    """
    task = TASK_KINDS[kind] if kind else None
    check_layers(name, config)
    if strange := [key for key, value in config.to_dict().items() if value != value]:
        raise UserError(f"model {name}: its config.json says {strange[0]} is nan; expected a number")
    config.output_attentions = False  # which torch's attention lacks, so that nothing could be saved
    config.return_dict = True  # outputs are read by their names
    config.chunk_size_feed_forward = 0  # else a batch whose length is no multiple of it ends the training
    if task and task.attention == "bidirectional" and getattr(config, "is_decoder", False):
        raise UserError(
            f"model {name}: its config.json says is_decoder, so it sees only what came before, and {kind!r} needs "
            "a model that reads a text both ways"
        )
    if task and task.attention == "bidirectional" and type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        raise UserError(
            f"model {name}: {config.model_type} is not made to predict masked tokens, and {kind!r} needs a model "
            "that reads a text both ways, such as roberta"
        )
    if task and task.attention == "causal" and not causal(config):
        raise UserError(
            f"model {name}: {config.model_type} reads a text both ways, and {kind!r} needs a model that sees only "
            "what came before, such as gpt2"
        )
    if head is not None and head.kind:
        setattr(config, KEY, asdict(head))
    elif (head is not None or not (task and task.heads)) and hasattr(config, KEY):
        delattr(config, KEY)
    if task and task.target == "number":
        config.num_labels, config.problem_type = 1, "regression"
    if task and labels is not None:
        _name_classes(name, config, task.model.removeprefix("AutoModel"), labels)
    return config


def _name_classes(name: str, config: Any, purpose: str, labels: Sequence[str]) -> None:
    """Give a config the job's classes, one for each text or word, whatever its own head was made for.

    Args:
        name: what to call the model.
        config: the config.
        purpose: how the names of the task's classes of models end.
        labels: the job's classes.

    Raises:
        UserError: its own head has the same classes in another order, so each would be taken for another.
    """
    headed = any(str(kind).endswith((purpose, "HeadedModel")) for kind in config.architectures or ())
    known = [str(label).casefold() for _, label in sorted(config.id2label.items())]
    asked = {label.casefold(): label for label in labels}
    if headed and len(asked) == len(labels) and known != list(asked) and sorted(known) == sorted(asked):
        raise UserError(
            f"model {name}: its head has the classes in another order than the job; expected [task] labels = "
            f"{[asked[label] for label in known]}"
        )
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: i for i, label in enumerate(labels)}
    config.problem_type = None


def causal(config: Any) -> bool:
    """Whether a model of this config predicts a token from those before it alone."""
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING  # BERT and its kin too, where told to be
    return known and (reads_last_token(config) or getattr(config, "is_decoder", False))


def reads_last_token(config: Any) -> bool:
    """Whether a classifier over the model reads a text's last token, and finds it by the padding token.

    Those of GPT-2, Llama and others that are causal in any case do; BERT's and its kin's read the first.
    """
    both = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    return type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not both


def config_text(config: Any) -> str:
    """All that a config says of a model beyond its kind's defaults."""

    def kept(table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {str(key): kept(value) for key, value in table.items() if str(key) not in ORIGIN}

    return json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str)


def unusable(name: str, error: BaseException, what: str = "model") -> UserError:
    """The sentence about a folder or hub id that transformers cannot load."""
    first = first_words(error)
    if Path(name).is_dir():
        run = (Path(name) / "model" / "config.json").exists()
        hint = f"; a run's model is its folder model, {Path(name) / 'model'}" if run else ""
        return UserError(f"model {name}: the folder holds no usable {what}: {first}{hint}")
    return UserError(f"model {name}: is no folder, and loading it from the hub failed: {first}")
