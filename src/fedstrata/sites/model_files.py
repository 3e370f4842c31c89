"""The files of a model that a site takes from the server: whitelists of names, keys and sizes, checked before use.

The server sends what passes here and leaves out the rest (:func:`sent_files`); a site refuses whatever does not
pass (:func:`check_files`). No key that passes names a path, a class to be loaded, or code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedstrata.errors import first_words
from fedstrata.models.families import UNLISTED
from fedstrata.models.heads import KEY
from fedstrata.sites.permission import MOST_DROPOUT, Refused

VOCABULARY = "public_vocabulary.txt"
"""The public vocabulary of ``[privacy] omit``, among the model's files."""
CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
MOST_BYTES: Mapping[str, int] = {
    CONFIG: 1 << 24,
    TOKENIZER: 1 << 26,  # the largest of known models, of 262,000 words, has half of it
    SETTINGS: 1 << 24,
    SPECIAL: 1 << 20,
    "added_tokens.json": 1 << 24,
    "vocab.json": 1 << 26,
    "vocab.txt": 1 << 26,
    "merges.txt": 1 << 26,
    VOCABULARY: 1 << 26,
}
"""Files that are taken with a model, with the most bytes of each: nothing in them runs."""
JSON_FILES = tuple(name for name in MOST_BYTES if name.endswith(".json"))
NEEDED = (CONFIG, TOKENIZER)

MOST_LAYERS = 512
MOST_NUMBER = 10_000_000
"""The largest whole number of a config: of a width, a vocabulary, a position."""
DROPPED = 2.0**-24
"""Likelihood with which dropout may drop all numbers of a vector: the server can try many seeds."""
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "max_position_embeddings")
"""Must be whole numbers above 0 where a config has them, under whichever name."""
TEXT = re.compile(r"[\w .:+-]{0,100}", re.ASCII)
"""A word of a config: no path and no address."""
OWN_KEYS = (
    *(KEY, "id2label", "label2id", "num_labels", "problem_type"),
    *("transformers_version", "architectures", "dtype"),
    *("head_dim", "partial_rotary_factor"),  # read by models whose default config is without them
    *(key for keys in UNLISTED.values() for key in keys),
)
"""Keys of a config that every model type may have."""
TABLES: Mapping[str, int] = {
    "id2label": 100_000,
    "label2id": 100_000,
    "rope_parameters": 50,
    "rope_scaling": 50,
    KEY: 50,
}
"""Keys of a config whose value may be a table, with the most entries of it."""
FREE_TEXT = ("id2label", "label2id")
"""Tables in which any text may stand: the names of classes."""
NEVER = re.compile(
    r"_.*|.*(auto_map|attn_implementation|experts_implementation|quantization|name_or_path|remote_code|_file|_path|"
    r"custom_|kernel(?!_size)|device_map|_plan|adapter_config|chunk_size_feed_forward).*"
)
"""Keys of a config that are refused whatever the model type: they lead to code, paths or other models. With the
last a text whose length is no multiple of it ends the training, which tells of the texts past any noise."""

SETTING_KEYS = frozenset({
    "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens",
    "backend", "bos_token", "clean_text", "clean_up_tokenization_spaces", "cls_token", "do_lower_case",
    "do_basic_tokenize", "eos_token", "errors", "extra_special_tokens", "keep_accents", "legacy", "lowercase",
    "mask_token", "max_length", "max_len", "model_input_names", "model_max_length", "never_split",
    "pad_to_multiple_of", "pad_token", "pad_token_type_id", "padding", "padding_side", "remove_space",
    "sep_token", "split_by_punct", "split_special_tokens", "stride", "strip_accents", "tokenize_chinese_chars",
    "tokenizer_class", "trim_offsets", "truncation", "truncation_side", "truncation_strategy", "unk_id",
    "unk_token", "vocab_size", "wordpieces_prefix",
})  # fmt: skip
"""Keys of ``tokenizer_config.json``."""
SPECIAL_KEYS = frozenset({
    "additional_special_tokens", "bos_token", "cls_token", "eos_token", "extra_special_tokens", "mask_token",
    "pad_token", "sep_token", "unk_token",
})  # fmt: skip
"""Keys of ``special_tokens_map.json``, each of which takes the place of a setting, paths of files among them."""
TOKENIZER_KEYS = frozenset({
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
    "decoder", "model",
})  # fmt: skip
"""Keys of ``tokenizer.json``."""
MOST_PATTERN = 2000
"""Characters of a regular expression. That it compiles and comes to an end is tried in a process of its own."""


def sent_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of the files of a model's folder what a site takes: files and keys that it does not know are left out."""
    taken = {name: content for name, content in files.items() if name in MOST_BYTES}
    for name, keys in KEYS.items():
        if name in taken:
            table = json.loads(taken[name])
            known = keys(table)
            kept = {key: value for key, value in table.items() if key in known and not _never(name, key)}
            taken[name] = json.dumps(kept, ensure_ascii=False).encode()
    return taken


def check_files(files: Mapping[str, bytes]) -> None:
    """Refuse files of a model that could do more than describe one.

    Raises:
        Refused: a file, key or value is none of those that are taken, or a number is out of bounds.
    """
    for name, content in files.items():
        if name not in MOST_BYTES:
            plain = name[:100].encode("ascii", "backslashreplace").decode()
            raise Refused(f"the model comes with code of its own ({plain})")
        if len(content) > MOST_BYTES[name]:
            raise Refused(f"the model's {name} has {len(content)} bytes, at most {MOST_BYTES[name]} are taken")
    for name in sorted(files.keys() & {*CHECKS, *JSON_FILES}):
        try:
            table = _parsed(name, files[name])
            if _anywhere(table, "auto_map"):
                raise Refused(f"the model comes with code of its own ({name})")
            if not isinstance(table, dict):
                raise Refused(f"the model's {name} is no table")
            if name in CHECKS:
                CHECKS[name](table)
        except RecursionError:
            raise Refused(f"the model's {name} is nested too deep") from None
    if lacking := [name for name in NEEDED if name not in files]:
        raise Refused(f"the model comes without {lacking[0]}")


def _parsed(name: str, content: bytes) -> Any:
    try:
        return json.loads(content, parse_constant=_no_constant, parse_int=_short_int)
    except ValueError as error:
        raise Refused(f"the model's {name} cannot be read ({type(error).__name__})") from None


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _short_int(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)  # as of a model_max_length of 1e30


def _anywhere(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_anywhere(own, key) for own in value.values())
    return isinstance(value, list) and any(_anywhere(own, key) for own in value)


def _check_config(table: dict[str, Any]) -> None:
    known = _config_keys(table)
    for key, value in table.items():
        if key not in known or _never(CONFIG, key):
            raise Refused(f"the model's config.json has the key {_shown(key)}, which is not taken")
        _check_value(key, value)
    config = _config_class(table)()
    for name in (*SIZES, "num_hidden_layers"):
        value = table.get(config.attribute_map.get(name, name), table.get(name))
        if value is not None and (type(value) is not int or value < 1):
            raise Refused(f"the model's config.json: {name} is no whole number above 0")
        if name == "num_hidden_layers" and (value or 0) > MOST_LAYERS:
            raise Refused(f"the model has {value} layers, at most {MOST_LAYERS} are taken")
    _check_dropout({**config.to_dict(), **table}, config.attribute_map.get("hidden_size", "hidden_size"))


def _check_dropout(table: Mapping[str, Any], width: str) -> None:
    """Refuse rates by which all of a text's numbers may be dropped."""
    for key, rate in table.items():
        if "drop" not in key or type(rate) not in (int, float):
            continue
        if rate > MOST_DROPOUT or rate ** (table.get(width) or 1024) > DROPPED:
            raise Refused(
                f"the model's config.json: {_shown(key)} is {rate:g}, so that few rows may be learned from; "
                f"at most {MOST_DROPOUT:g} is taken, and less where {width} is below 24"
            )


def _check_value(key: str, value: Any) -> None:
    where = f"the model's config.json: {_shown(key)}"
    if isinstance(value, dict):
        if key not in TABLES:
            raise Refused(f"{where} is a table, which is not taken")
        if len(value) > TABLES[key]:
            raise Refused(f"{where} has more than {TABLES[key]} entries")
        entries = ([*entry.values()] if isinstance(entry, dict) else [entry] for entry in value.values())
        inner = [own for entry in entries for own in entry]
        if not all(_scalar(own, key in FREE_TEXT) for own in inner):
            raise Refused(f"{where} holds what is not taken")
    elif isinstance(value, list):
        if len(value) > MOST_LAYERS or not all(_scalar(own) for own in value):
            raise Refused(f"{where} is a list that is not taken")
    elif not _scalar(value):
        raise Refused(f"{where} is not taken: a text that is no plain word, or a number out of bounds")


def _scalar(value: Any, free: bool = False) -> bool:
    if isinstance(value, str):
        return (free and len(value) <= 1000) or TEXT.fullmatch(value) is not None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return math.isfinite(value) and abs(value) <= MOST_NUMBER
    return value is None or isinstance(value, bool)


def _config_class(table: Mapping[str, Any]) -> Any:
    """The class of a config by its model type.

    Raises:
        Refused: transformers itself has none of that name.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        raise Refused(f"the model's config.json: model_type {_shown(kind)} is none that transformers knows itself")
    return CONFIG_MAPPING[kind]


def _config_keys(table: Mapping[str, Any]) -> frozenset[str]:
    """The keys that a config of this model type may have."""
    kind = _config_class(table)
    try:
        default = kind()
    except Exception as error:  # a config of several others, which is no encoder
        raise Refused(f"a model of this type cannot be trained ({first_words(error)[:100]})") from None
    return frozenset((*default.to_dict(), *default.attribute_map, *OWN_KEYS))


def _never(name: str, key: str) -> bool:
    return name == CONFIG and NEVER.fullmatch(key) is not None


def _check_settings(table: dict[str, Any]) -> None:
    for key, value in table.items():
        if key not in SETTING_KEYS:
            raise Refused(f"the model's tokenizer_config.json has the key {_shown(key)}, which is not taken")
        if isinstance(value, str) and len(value) > 1000:
            raise Refused(f"the model's tokenizer_config.json: {_shown(key)} is too long")
    if table.get("backend", "tokenizers") != "tokenizers":
        raise Refused("the model's tokenizer_config.json: backend is another than tokenizers")
    _check_class(table.get("tokenizer_class"))


def _check_special(table: dict[str, Any]) -> None:
    if strange := table.keys() - SPECIAL_KEYS:
        raise Refused(f"the model's {SPECIAL} has the key {_shown(min(strange))}, which is not taken")


def _check_class(name: Any) -> None:
    """Refuse a tokenizer that is not one of transformers' own over the library ``tokenizers``."""
    import transformers

    if name is None:
        return
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerFast)):
        where = "the model's tokenizer_config.json: tokenizer_class"
        raise Refused(f"{where} {_shown(name)} is no fast tokenizer of transformers'")


def _check_tokenizer(table: dict[str, Any]) -> None:
    if strange := table.keys() - TOKENIZER_KEYS:
        raise Refused(f"the model's tokenizer.json has the key {_shown(min(strange))}, which is not taken")
    for pattern in _patterns(table):
        if not isinstance(pattern, str) or len(pattern) > MOST_PATTERN:
            raise Refused("the model's tokenizer.json has a regular expression that is not taken")


def _patterns(value: Any) -> list[Any]:
    """All regular expressions in the steps of a tokenizer; vocabularies are not searched."""
    if isinstance(value, dict):
        found = [value["Regex"]] if "Regex" in value else []
        return found + [p for key, own in value.items() if key not in ("vocab", "merges") for p in _patterns(own)]
    return [p for own in value for p in _patterns(own)] if isinstance(value, list) else []


def _shown(key: Any) -> str:
    """A name that came from elsewhere, to be put into a sentence."""
    return repr(str(key)[:60].encode("ascii", "replace").decode())


CHECKS: Mapping[str, Callable[[dict[str, Any]], None]] = {
    CONFIG: _check_config,
    SETTINGS: _check_settings,
    TOKENIZER: _check_tokenizer,
    SPECIAL: _check_special,
}
KEYS: Mapping[str, Callable[[dict[str, Any]], frozenset[str]]] = {
    CONFIG: _config_keys,
    SETTINGS: lambda table: SETTING_KEYS,
    SPECIAL: lambda table: SPECIAL_KEYS,
}
"""File -> the keys of its table that are sent."""
