"""What ``[privacy] omit`` leaves out: against a plain loop, the forecast, a resumed run, and between sites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plain import plain_loop
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import AutoModelForMaskedLM

import fedstrata
from fedstrata.client.sharing import listed_tokens, tensors_of
from fedstrata.errors import UserError
from fedstrata.models import checkpoints
from fedstrata.plan.disclosure import LENGTH, channels

Jobs = Callable[..., dict[str, Any]]
BIAS, POSITIONS = "cls.predictions.bias", "bert.embeddings.position_embeddings.weight"
TABLE = "bert.embeddings.word_embeddings.weight"
STILL = {"dropout": False, "learning_rate": 1e-2, "batch_size": 2}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """Some words of the sentences, and one that no tokenizer knows."""
    path = tmp_path / "public.txt"
    path.write_text("the\nkidney\n\nheart\nof a\nxyzzy\n", "utf-8")
    return path


def frozen_rows(config: dict[str, Any]) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config["model"]["name"])
    listed = {tokenizer.get_vocab()[word] for word in ("the", "kidney", "heart", "of", "a")}
    listed |= set(tokenizer.all_special_ids)
    return torch.tensor([i for i in range(len(tokenizer)) if i not in listed])


@pytest.mark.parametrize(
    "omit",
    [["decoder_bias"], ["position_rows", "unlisted_rows"], ["unlisted_rows", "decoder_bias"], ["embeddings"]],
)
def test_what_is_left_out_stays_and_the_rest_learns_as_in_a_plain_loop(
    job: Jobs, vocabulary: Path, omit: list[str]
) -> None:
    table: dict[str, Any] = {"omit": omit}
    if "unlisted_rows" in omit:
        table["public_vocabulary"] = str(vocabulary)
    config = job(privacy=table, train={**STILL, "max_grad_norm": 0.5})
    loop, rows = plain_loop({**config, "privacy": {}}), frozen_rows(config)
    weights = loop.start()
    frozen: dict[str, Any] = {}
    if "unlisted_rows" in omit:
        frozen |= {TABLE: rows, BIAS: rows}
    if "decoder_bias" in omit:
        frozen[BIAS] = True
    if "position_rows" in omit:
        frozen[POSITIONS] = True
    if "embeddings" in omit:
        frozen |= {name: True for name in weights if name.startswith("bert.embeddings")}
    start = dict(weights)
    for round in range(2):
        models = {client: loop.train(client, round, weights, frozen) for client in loop.ready.shards}
        weights = {name: loop.mean(models, name) for name in weights}

    run = fedstrata.run(config)
    model = dict(AutoModelForMaskedLM.from_pretrained(run.folder / "model").named_parameters())
    for name, tensor in weights.items():
        assert torch.equal(model[name], tensor), name
        stays = frozen.get(name)
        if stays is not None:
            assert torch.equal(
                model[name][slice(None) if stays is True else stays],
                start[name][slice(None) if stays is True else stays],
            )
        elif name != "bert.embeddings.token_type_embeddings.weight":
            assert not torch.equal(model[name], start[name]), name


def test_a_mark_before_the_first_line_is_no_part_of_its_word(tmp_path: Path) -> None:
    """Some editors begin a file with it, and where the tokenizer keeps it, the first word was not listed."""
    path, vocabulary = tmp_path / "public.txt", {"[UNK]": 0, "kidney": 1, "the": 2, "\ufeff": 3}
    path.write_text("kidney\nthe\n", "utf-8-sig")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordPiece(vocabulary, unk_token="[UNK]")), unk_token="[UNK]"
    )
    assert listed_tokens(path, tokenizer, 4) == (0, 1, 2)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}


@pytest.mark.parametrize(
    ("family", "words", "positions"),
    [
        ("biogpt", "biogpt.embed_tokens", {"biogpt.embed_positions"}),
        ("eurobert", "model.embed_tokens", set()),
        ("gpt_neox", "gpt_neox.embed_in", set()),
        ("openai-gpt", "transformer.tokens_embed", {"transformer.positions_embed"}),
        (
            "mpnet",
            "mpnet.embeddings.word_embeddings",
            {"mpnet.embeddings.position_embeddings", "mpnet.encoder.relative_attention_bias"},
        ),
        ("deberta-v2", "deberta.embeddings.word_embeddings", {"deberta.encoder.rel_embeddings"}),
        ("canine", "", {"canine.char_embeddings.char_position_embeddings"}),
    ],
)
def test_rows_are_left_out_by_whatever_name_a_family_has_for_its_tables(
    tmp_path: Path, family: str, words: str, positions: set[str]
) -> None:
    """Else all of them leave, while the run says that the model has none."""
    changes = {"relative_attention": True, "position_biased_input": False} if family == "deberta-v2" else {}
    transformers.AutoConfig.for_model(family, **SIZES, **changes).save_pretrained(tmp_path)
    parts = checkpoints.parts_of(str(tmp_path), "classify", ["a", "b"])
    assert tensors_of(["position_rows"], parts) == {"position_rows": {f"{name}.weight" for name in positions}}
    assert (LENGTH in channels(parts, ["embeddings"], "class")["embeddings"]) is bool(positions)
    if words:
        assert tensors_of(["unlisted_rows"], parts) == {"unlisted_rows": {f"{words}.weight"}}
    else:
        with pytest.raises(UserError, match=r"omit: which tensor of 'canine' has .* expected: 'embeddings'"):
            tensors_of(["unlisted_rows"], parts)
