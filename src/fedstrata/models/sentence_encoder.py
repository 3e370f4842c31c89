"""A saved model's encoder for sentence-transformers: a text's vector is the mean of its tokens' hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from fedstrata.errors import UserError
from fedstrata.models.checkpoints import fast_tokenizer, max_positions
from fedstrata.models.configs import HF_LOAD_ERRORS, read_config, unusable
from fedstrata.models.quiet import quiet

INSTALL = "pip install 'fedstrata[sentence-transformers]'"
BATCH = 16


@dataclass(frozen=True)
class EncoderReport:
    """An exported encoder and its distance from the original.

    Attributes:
        path: the folder.
        width: numbers in the vector of a text.
        difference: largest absolute difference of such a number from the mean of the model's own hidden states.
    """

    path: Path
    width: int
    difference: float


@quiet()
def export_encoder(folder: Path, out: Path, texts: Sequence[str]) -> EncoderReport:
    """Write the encoder, without its head, with mean pooling over a text's tokens; compare it with the model.

    Args:
        folder: the model's folder.
        out: the folder to write, which ``SentenceTransformer(out)`` loads.
        texts: what to compare on.

    Raises:
        UserError: the library is missing, or the model is no encoder.
    """
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    except ImportError as error:
        raise UserError(f"export: --sentence-transformers needs {error.name}: {INSTALL}") from None
    encoder, tokenizer = _encoder(folder)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as plain:
        encoder.save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        words = Transformer(plain)
        pooling = Pooling(words.get_embedding_dimension(), "mean")
        made = SentenceTransformer(modules=[words, pooling], device="cpu")
        made.save_pretrained(str(out), create_model_card=False)
    loaded = SentenceTransformer(str(out), device="cpu")
    found = torch.from_numpy(loaded.encode(list(texts), batch_size=BATCH, show_progress_bar=False))
    expected = _means(encoder, tokenizer, texts, loaded.max_seq_length)
    return EncoderReport(out, found.shape[1], float((found - expected).abs().max()))


def _encoder(folder: Path) -> tuple[Any, Any]:
    """The model without its head, and its tokenizer.

    Raises:
        UserError: it is no encoder, or its files cannot be used.
    """
    try:
        config = read_config(str(folder))
        names = config.architectures or [""]
        if "gpt2" in config.model_type or any("CausalLM" in name or "LMHead" in name for name in names):
            raise UserError(
                f"{folder}: {names[0]} reads from left to right; --sentence-transformers is for encoders, such as "
                "BERT"
            )
        encoder = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False)
    except HF_LOAD_ERRORS as error:
        raise unusable(str(folder), error) from None
    tokenizer = fast_tokenizer(str(folder), "classify")
    tokenizer.model_max_length = min(tokenizer.model_max_length, max_positions(encoder))  # cuts longer texts
    return encoder.eval(), tokenizer


def _means(encoder: Any, tokenizer: Any, texts: Sequence[str], tokens: int) -> torch.Tensor:
    """The mean hidden state of each text, cut to a number of tokens, ``[texts, width]``."""
    how = {"padding": True, "truncation": True, "max_length": tokens, "return_tensors": "pt"}
    rows = []
    for start in range(0, len(texts), BATCH):
        inputs = tokenizer(list(texts[start : start + BATCH]), **how)
        with torch.inference_mode():
            states = encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"][:, :, None]
        rows.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)
