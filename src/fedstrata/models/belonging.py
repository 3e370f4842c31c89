"""Whether what stands in a model's folder belongs together: its tokenizer, its config and its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedstrata.errors import UserError
from fedstrata.models.folders import INDEX
from fedstrata.plan.parts import Parts

INDICES = (INDEX, "pytorch_model.bin.index.json")
"""What says which of several files has a tensor."""


def check_files(name: str) -> None:
    """Refuse weights of a folder that would be read from elsewhere: of another model, perhaps a private one.

    Raises:
        UserError: an index names a file in another folder.
    """
    for index in (Path(name) / file for file in INDICES):
        try:
            places = list(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # whoever loads the weights says so
        for place in places:
            if isinstance(place, str) and Path(place).name != place:
                raise UserError(
                    f"model {name}: its {index.name} names {place!r}; expected files in its own folder"
                )


def check_vocabulary(name: str, tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer with words beyond the embeddings: an error in training, for whoever has one and no other.

    Raises:
        UserError: there are some, or the config has no vocab_size, as CANINE's by default, which reads characters.
    """
    if getattr(config, "vocab_size", None) is None:
        raise UserError(
            f"model {name}: its config.json ({config.model_type}) has no vocab_size; expected a model with a "
            "table of tokens, such as bert"
        )
    around = [*tokenizer("")["input_ids"], *tokenizer("", " ")["input_ids"]]  # of one text, and of a pair
    numbers = [len(tokenizer) - 1, *tokenizer.get_vocab().values(), *around]
    if (words := max(numbers) + 1) > config.vocab_size:
        raise UserError(
            f"model {name}: its tokenizer knows {words} words, its embeddings {config.vocab_size}; they must "
            "belong together"
        )


def check_types(name: str, tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer that marks the texts of a pair by numbers beyond the embeddings: an error in training.

    Raises:
        UserError: it does.
    """
    table = getattr(config, "type_vocab_size", 0)  # without such embeddings, as DeBERTa, a model takes any number
    if not table or "token_type_ids" not in tokenizer.model_input_names:
        return
    processor = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
    if (most := max(_types_of_pairs(processor or {}), default=0)) >= table:
        raise UserError(
            f"model {name}: its tokenizer marks a text of a pair by {most}, its embeddings take 0 to "
            f"{table - 1} (type_vocab_size); they must belong together"
        )


def _types_of_pairs(processor: Any) -> Iterator[int]:
    """The numbers by which a tokenizer's templates mark the texts of a pair, and what stands around them."""
    for step in processor.get("processors", ()):
        yield from _types_of_pairs(step)
    for piece in processor.get("pair", ()):
        yield from (own["type_id"] for own in piece.values())


def check_tied(name: str, model: Any) -> None:
    """Refuse weights with two values of what the config ties: a forecast and workers go by the config alone.

    Raises:
        UserError: there are some, which transformers then leaves apart.
    """
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other):
            raise UserError(
                f"model {name}: its config.json ties {one} to {other}, and its weights have both, with other "
                "numbers; expected: one of them, or tie_word_embeddings = false in config.json"
            )


def fresh_parts(name: str, config: Any, parts: Parts, info: Any, remote: Sequence[str]) -> tuple[str, ...]:
    """The parts with tensors that a checkpoint lacks, by transformers' ``info``: pooler and head at most.

    Raises:
        UserError: it lacks others, or has some in another shape; but for layers of ``remote``.
    """
    other = {key: (list(found), list(asked)) for key, found, asked in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) | other.keys()
    fresh = tuple(part for part in parts.names if missing & parts.shapes[part].keys())
    lacking = [part for part in fresh if part not in ("pooler", "head", *remote)]
    for key in (key for part in lacking for key in parts.shapes[part] if key in other):
        found, asked = other[key]
        raise UserError(
            f"model {name}: its weights have {key} in the shape {found}, its config.json ({config.model_type}) "
            f"asks for {asked}; weights and config must belong together"
        )
    if lacking:
        raise UserError(
            f"model {name}: its weights lack tensors of {', '.join(lacking[:3])} that its config.json "
            f"({config.model_type}) asks for; weights and config must belong together"
        )
    return fresh
