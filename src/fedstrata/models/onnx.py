"""A saved model as ONNX, by torch's exporter, whole or with 8-bit weights; and how far it is from the original."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from fedstrata.errors import UserError
from fedstrata.models.checkpoints import fast_tokenizer, max_positions
from fedstrata.models.configs import HF_LOAD_ERRORS, read_config, unusable
from fedstrata.models.folders import write_tokenizer
from fedstrata.models.headed import HeadedConfig
from fedstrata.models.heads import HeadedModel
from fedstrata.models.quiet import quiet

INSTALL = "pip install 'fedstrata[onnx]'"
EXAMPLE = ("a text", "another text, which is longer")
BATCH = 16
LONGEST = 512
"""Tokens of a text that is compared, or fewer if the model reads fewer."""


@dataclass(frozen=True)
class OnnxReport:
    """An exported model and its distance from the original.

    Attributes:
        path: the file.
        bytes: its size.
        difference: largest absolute difference of a logit.
        agreement: share of the predictions that are the same; None where a prediction is a number.
        texts: number of texts that were compared.
    """

    path: Path
    bytes: int
    difference: float
    agreement: float | None
    texts: int


class Logits(nn.Module):
    """A model that takes its inputs in order and gives its logits alone."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The logits."""
        logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


@quiet()
def export_onnx(folder: Path, out: Path, texts: Sequence[Any], int8: bool = False) -> list[OnnxReport]:
    """Write ``model.onnx``, and with ``int8`` also ``model.int8.onnx``, and compare each with the model.

    Args:
        folder: the model's folder.
        out: where to write; tokenizer and config go beside the model.
        texts: what to compare on: texts, pairs, or lists of words.
        int8: also with weights of 8 bits, quantized dynamically.

    Raises:
        UserError: the libraries are missing, or the model has no logits to export.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # torch's exporter needs it
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise UserError(f"export: --onnx needs {error.name}: {INSTALL}") from None
    model, tokenizer = _loaded(folder)
    names = [name for name in tokenizer.model_input_names if name != "token_type_ids" or _has_types(model)]
    example = tokenizer(list(EXAMPLE), return_tensors="pt", padding=True)
    out.mkdir(parents=True, exist_ok=True)
    whole = out / "model.onnx"
    shapes = tuple({0: "batch", 1: "tokens"} for _ in names)
    with torch.inference_mode(), _plain_attention(model), _without_warnings():
        torch.onnx.export(
            Logits(model, names).eval(),
            tuple(example[name] for name in names),
            str(whole),
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=(shapes,),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    files = [whole]
    if int8:
        files.append(out / "model.int8.onnx")
        with _without_warnings():
            quantize_dynamic(whole, files[1], weight_type=QuantType.QInt8)
    reports = []
    with _run_by_onnxruntime(folder):
        for file in files:
            session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
            reports.append(_compared(file, session, model, tokenizer, names, texts))
    write_tokenizer(tokenizer, out)
    model.config.save_pretrained(out)
    return reports


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without those of the exporter's own parts, and advice about what these models do not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _run_by_onnxruntime(folder: Path) -> Iterator[None]:
    """Inside, of files that onnxruntime cannot run, and that are of no use, a sentence tells."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    try:
        yield
    except tuple(kinds) as error:
        why = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{folder}: what torch's exporter makes of this model cannot be run by onnxruntime, so nothing is "
            f"written ({why})"
        ) from None


def _loaded(folder: Path) -> tuple[Any, Any]:
    """The model as the class that its config names, and its tokenizer.

    Raises:
        UserError: it names none of transformers, or its files cannot be used.
    """
    try:
        config = read_config(str(folder))
        name = (config.architectures or [""])[0]
        kind: Any = HeadedModel if isinstance(config, HeadedConfig) else getattr(transformers, str(name), None)
        if not _is_model(kind):
            raise UserError(f"{folder}: its config names the model {name!r}, which transformers does not have")
        # words of a list stand alone already where they have to
        tokenizer = fast_tokenizer(str(folder), "classify")
        model = kind.from_pretrained(folder).eval()
    except HF_LOAD_ERRORS as error:
        raise unusable(str(folder), error) from None
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)


def _has_types(model: Any) -> bool:
    return getattr(model.config, "type_vocab_size", 0) > 0


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """The attention that every exporter knows."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _compared(
    file: Path, session: Any, model: Any, tokenizer: Any, names: Sequence[str], texts: Sequence[Any]
) -> OnnxReport:
    furthest, same, total, classes = 0.0, 0, 0, 0
    longest = min(LONGEST, max_positions(model))
    for start in range(0, len(texts), BATCH):
        inputs = _tokens(tokenizer, texts[start : start + BATCH], longest)
        with torch.inference_mode():
            expected = model(**{name: inputs[name] for name in names}).logits.float().numpy()
        [found] = session.run(None, {name: inputs[name].numpy() for name in names})
        real = inputs["attention_mask"].numpy().astype(bool) if expected.ndim == 3 else slice(None)
        furthest = max(furthest, float(np.abs(found - expected)[real].max()))
        equal = (found.argmax(-1) == expected.argmax(-1))[real]
        same, total, classes = same + int(equal.sum()), total + equal.size, expected.shape[-1]
    agreement = None if classes == 1 else same / max(1, total)
    return OnnxReport(file, file.stat().st_size, furthest, agreement, len(texts))


def _tokens(tokenizer: Any, texts: Sequence[Any], longest: int) -> Mapping[str, torch.Tensor]:
    how = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": longest}
    if isinstance(texts[0], tuple):
        return dict(tokenizer([one for one, _ in texts], [two for _, two in texts], **how))
    return dict(tokenizer(list(texts), is_split_into_words=isinstance(texts[0], list), **how))
