"""Tiny models, a tokenizer and a little text, made on the spot: no test needs a hub or a file from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from fedstrata.job.tables import Train

SENTENCES = [
    ("The kidney filters the blood and keeps salt in balance.", "kidney"),
    ("A stone in the kidney can block the flow of urine.", "kidney"),
    ("Protein in the urine is a sign that the kidney leaks.", "kidney"),
    ("Cysts in the kidney grow slowly over many years.", "kidney"),
    ("The heart pumps blood through the body.", "heart"),
    ("An irregular beat of the heart may be harmless.", "heart"),
    ("The valve between the chambers of the heart does not close.", "heart"),
    ("High pressure makes the wall of the heart thick.", "heart"),
    ("Light falls through the lens of the eye.", "eye"),
    ("A cloudy lens of the eye is called a cataract.", "eye"),
    ("The eye cannot focus on near objects.", "eye"),
    ("Pressure in the eye can harm the nerve.", "eye"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONFIGS = {
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
    "distilbert": transformers.DistilBertConfig,
    "electra": transformers.ElectraConfig,
    "modernbert": transformers.ModernBertConfig,
}
END = "<|endoftext|>"
"""The one special token of the tiny GPT-2, whose id follows the words."""


def words() -> list[str]:
    return sorted({word.strip(".").lower() for text, _ in SENTENCES for word in text.split()} | {"."})


SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(words()),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
"""Of a model of any family that has these keys."""


def tiny_config(kind: str = "bert", layers: int = 3, **changes: Any) -> Any:
    """A config of 3 layers of width 32 over the words above, in any of the five architectures or GPT-2."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 66,
        "vocab_size": len(SPECIAL) + len(words()),
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    if kind == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        sizes = {names.get(key, key): value for key, value in sizes.items()} | {"hidden_dim": 64}
        del sizes["intermediate_size"]
    if kind == "electra":
        sizes["embedding_size"] = 16
    if kind == "modernbert":
        sizes |= {"cls_token_id": 2, "sep_token_id": 3, "global_attn_every_n_layers": 2, "local_attention": 8}
    if kind == "gpt2":
        end = sizes["vocab_size"]
        sizes |= {"vocab_size": end + 1, "n_inner": 64, "bos_token_id": end, "eos_token_id": end}
        del sizes["intermediate_size"], sizes["pad_token_id"]
        return transformers.GPT2Config(**sizes | changes)
    return CONFIGS[kind](**sizes | changes)


def tokenizer() -> Any:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + words())}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=64, **dict(zip(names, SPECIAL, strict=True))
    )


def gpt2_tokenizer() -> Any:
    """The same words with nothing around a text, and no token for padding."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words(), END])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END, unk_token=END)


def tiny_model(kind: str = "bert", head: str = "mlm", layers: int = 3, **changes: Any) -> Any:
    """A model with random weights, the same at every call."""
    auto = {
        "mlm": transformers.AutoModelForMaskedLM,
        "clm": transformers.AutoModelForCausalLM,
        "classify": transformers.AutoModelForSequenceClassification,
        "pair": transformers.AutoModelForSequenceClassification,
        "regress": transformers.AutoModelForSequenceClassification,
        "tag": transformers.AutoModelForTokenClassification,
        "none": transformers.AutoModel,
    }[head]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto.from_config(tiny_config(kind, layers, **changes))


def train_config(**keys: Any) -> Train:
    """A job's ``[train]`` as it is once "auto" is resolved on a processor without bf16."""
    return Train(**{"device": "cpu", "precision": "fp32", **keys})


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's folder, whether they are in one file or in several."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def saved_models(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of all models that a run has saved, by their folders and names."""
    folders = [path for name in ("model", "shared", "clients/*/model") for path in run.glob(name)]
    return {
        f"{folder.relative_to(run)}/{name}": tensor
        for folder in folders
        for name, tensor in saved_tensors(folder).items()
    }


def model_of(result: Any) -> Path:
    """The folder of a run's model; where each client has its own, of the first one's."""
    folder: Path = result.model_folder or result.folder / next(iter(result.clients.values()))["model"]
    return folder


def resident(tensor: torch.Tensor) -> int:
    """Kilobytes of a tensor's mapping that are in this process's memory. Linux only."""
    address, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            begin, end = (int(each, 16) for each in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "Rss:":
            return int(line.split()[1])
    raise LookupError
