"""Folders of models as files: put together without a model in memory, and put in place whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedstrata.wire.files import link, named, replace_folder, write_bytes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Hugging Face's names: of the file with all weights, and of the one that says which of several has a tensor."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""peft's name of the file with all adapters."""
CARD = "README.md"
CODE = "modeling_fedstrata"
"""Name of the Python file of a model with one of our heads (:mod:`fedstrata.models.headed`), without ``.py``."""
FILES = (
    *(WEIGHTS, "model-0*.safetensors", INDEX, "config.json", "generation_config.json", CARD, f"{CODE}.py"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template.jinja", "client-*.safetensors", "untrained.safetensors"),
    *(ADAPTER_WEIGHTS, "adapter_config.json"),
)
"""What the folders that FedStrata writes models into may hold of its own; anything else in them stays there."""


def stand_alone(tokenizer: Any) -> Any:
    """The tokenizer, which reads each word of a list as in a text, with a blank before it.

    transformers sees to that in classes of an architecture, such as RoBERTa's, and not in the general one.
    """
    from tokenizers import Tokenizer, normalizers  # here: slow to load

    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    splits, around = state["pre_tokenizer"] or {}, state["post_processor"] or {}
    first = splits["pretokenizers"][0] if splits.get("type") == "Sequence" else splits
    if first.get("type") == "ByteLevel" and not first["add_prefix_space"]:
        first["add_prefix_space"] = True
        if "add_prefix_space" in around:
            around["add_prefix_space"] = True  # so that the places of words in a text are right
        made = Tokenizer.from_str(json.dumps(state))
        backend.pre_tokenizer, backend.post_processor = made.pre_tokenizer, made.post_processor
    elif not _as_in_a_text(backend):  # as of Llama 3 and EuroBERT, which split before the bytes, or of Gemma
        before = backend.normalizer
        blank = normalizers.Prepend(" ")
        backend.normalizer = blank if before is None else normalizers.Sequence([blank, before])
        if not _as_in_a_text(backend):
            backend.normalizer = before
    return tokenizer


def _as_in_a_text(backend: Any) -> bool:
    """Whether a word falls into the same pieces in a list and in a text."""
    text, words = (
        backend.encode(two, is_pretokenized=listed, add_special_tokens=False).ids
        for two, listed in (("the the", False), (["the", "the"], True))
    )
    word = words[len(words) // 2 :]
    return bool(text[len(text) - len(word) :] == word)


def write_tokenizer(tokenizer: Any, folder: Path, most: int | None = None) -> None:
    """Write a tokenizer, without what it was last called with.

    Else its file would cut texts by itself, at the job's ``train.max_tokens``, where a run has tokenized its rows
    and has not found their tokens kept.

    Args:
        tokenizer: it.
        folder: where to write.
        most: tokens that its model reads, to which a pipeline is to cut texts; not every tokenizer says it.
    """
    if most is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, most)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    with _system_errors(folder):
        tokenizer.save_pretrained(folder)


def write_config(config: Any, folder: Path) -> None:
    """Write a model's or an adapter's config; on a full disk their libraries do not say where."""
    with named(folder):
        config.save_pretrained(folder)


def write_generation(model: Any, folder: Path) -> None:
    """Write how a model is to generate text, where its own folder said so and not its config alone."""
    settings = getattr(model, "generation_config", None)
    if settings is not None and not settings._from_model_config:
        with named(folder):
            settings.to_json_file(folder / "generation_config.json")  # whatever it holds: saving would check it


@contextmanager
def _system_errors(folder: Path) -> Iterator[None]:
    """Inside, what a library in Rust raises of the system is an OSError, as that of Python, with a name."""
    try:
        with named(folder):
            yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


@contextmanager
def written_whole(folder: Path, first: str) -> Iterator[Path]:
    """A new folder in ``folder``, whose files take their places there once all are written, or never.

    Args:
        folder: where to write; its other files stay.
        first: the file that takes its place before the others, by which ``folder`` is known.

    Raises:
        OSError: the disk is full, whichever library met it.
    """
    new, partial = not folder.exists(), folder / ".export.part"
    try:
        with _system_errors(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            for path in sorted(partial.rglob("*"), key=lambda path: path != partial / first):
                target = folder / path.relative_to(partial)
                target.parent.mkdir(exist_ok=True)
                if path.is_file():
                    os.replace(path, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if new:
            with suppress(OSError):
                folder.rmdir()


def partial_folder(folder: Path) -> Path:
    """A new empty folder beside ``folder``, which :func:`publish` puts in its place."""
    partial = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, folder: Path) -> None:
    """Put a finished folder in place of what is there; its files are on the disk before it has its name."""
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    replace_folder(partial, folder, FILES)


def write_card(folder: Path, *paragraphs: str) -> None:
    """Write a folder's card; without a paragraph there is none."""
    if text := "\n".join(filter(None, paragraphs)):
        write_bytes(folder / CARD, text.encode())


def tensor_sizes(path: Path) -> dict[str, int]:
    """Name -> bytes of every tensor of a safetensors file; only its header is read."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def write_client_folder(common: Path, personal: Path, folder: Path, *card: str) -> None:
    """A client's whole model, of which everything is a second name for a file that is there.

    Args:
        common: a folder like a model's, with what all clients have in common; weights only where there are any.
        personal: safetensors file with the client's own tensors.
        folder: where to put it.
        card: what to say of it, in paragraphs.
    """
    partial = partial_folder(folder)
    link_files(common, partial)
    _link_weights([path for path in (common / WEIGHTS, personal) if path.exists()], partial)
    write_card(partial, *card)
    publish(partial, folder)


def link_files(common: Path, folder: Path) -> None:
    """Give a folder second names for all files of another one but its weights and its card."""
    for path in common.iterdir():
        if path.is_file() and path.name not in (WEIGHTS, CARD):
            link(path, folder / path.name)


def _link_weights(files: Sequence[Path], folder: Path) -> None:
    if len(files) == 1:
        link(files[0], folder / WEIGHTS)
        return
    places: dict[str, str] = {}
    total = 0
    for number, path in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        link(path, folder / name)
        sizes = tensor_sizes(path)
        places |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_bytes(folder / INDEX, json.dumps(index, indent=2, ensure_ascii=False).encode())
