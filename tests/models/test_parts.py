"""Parts: disjoint, complete, in order, with tied tensors counted once; and the papers' byte figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fedstrata.cost.bytes import payload
from fedstrata.errors import UserError
from fedstrata.models.checkpoints import auto_class, load, parts_of
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.parts import Parts
from tiny import CONFIGS, tiny_config, tiny_model, tokenizer

KINDS = ["mlm", "classify", "tag"]
STACKS = {
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
    "electra": "electra.encoder.layer",
    "modernbert": "model.layers",
}
DECODERS = {
    "bert": "bert.embeddings.word_embeddings.weight",
    "roberta": "roberta.embeddings.word_embeddings.weight",
    "distilbert": "distilbert.embeddings.word_embeddings.weight",
    "electra": "electra.embeddings.word_embeddings.weight",
    "modernbert": "model.embeddings.tok_embeddings.weight",
}
BERT_HEAD = {
    "cls.predictions.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
}


def base(**changes: Any) -> transformers.BertConfig:
    """BERT-base of the papers."""
    return transformers.BertConfig(**changes)


def roberta() -> transformers.RobertaConfig:
    return transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)


def parts(config: Any, kind: str = "mlm") -> Parts:
    """Of a model without weights."""
    with torch.device("meta"):
        return find_parts(auto_class(kind).from_config(config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_parts_are_disjoint_complete_and_in_order(architecture: str, kind: str) -> None:
    model = tiny_model(architecture, kind)
    found = find_parts(model)
    pooler = ("pooler",) if (architecture, kind) == ("bert", "classify") else ()
    assert found.names == ("embeddings", "layer.0", "layer.1", "layer.2", *pooler, "head")
    listed = [name for shapes in found.shapes.values() for name in shapes]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    assert len(listed) == len(set(listed))
    for shapes in found.shapes.values():
        for name, shape in shapes.items():
            assert shape == tuple(model.get_parameter(name).shape)
    assert (found.stack, found.depth, found.hidden) == (STACKS[architecture], 3, 32)
    assert model.get_submodule(found.stack)[1].state_dict().keys() == {
        name.removeprefix(f"{found.stack}.1.") for name in found.shapes["layer.1"]
    }


@pytest.mark.parametrize(("kind", "head"), [("clm", set()), ("classify", {"score.weight"})])
def test_parts_of_gpt2(kind: str, head: set[str]) -> None:
    """Its layers multiply with Conv1D, whose weight is [in, out]: fused Q, K, V, output, and the FFN's two."""
    model = tiny_model("gpt2", kind)
    found = find_parts(model)
    assert found.names == ("embeddings", "layer.0", "layer.1", "layer.2", "head")
    assert found.shapes["embeddings"].keys() == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert found.shapes["head"].keys() == {"transformer.ln_f.weight", "transformer.ln_f.bias"} | head
    assert all(name.startswith("transformer.h.1.") for name in found.shapes["layer.1"])
    listed = [name for shapes in found.shapes.values() for name in shapes]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    assert (found.stack, found.depth, found.hidden) == ("transformer.h", 3, 32)
    assert found["layer.1"].linear == (3 * 32**2, 32**2, 32 * 64, 64 * 32)
    assert found["head"].linear == ((69 * 32,) if kind == "clm" else (2 * 32,))
    assert found.tied == (69 * 32 if kind == "clm" else 0)
    assert all(part.norm_first for part in found.each)
    assert found.names == ("embeddings", "layer.0", "layer.1", "layer.2", "head")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_everything_above_the_layers_and_nothing_else_is_the_head(architecture: str, kind: str) -> None:
    model = tiny_model(architecture, kind)
    found = find_parts(model)
    below = f"{model.base_model_prefix}."
    above = {"model.final_norm.weight"} if architecture == "modernbert" else set()
    outside = {name for name, _ in model.named_parameters() if not name.startswith(below)}
    assert found.shapes["head"].keys() == outside | above
    assert all(name.startswith(f"{below}embeddings") for name in found.shapes["embeddings"])


def test_the_head_of_bert_is_the_papers_output_layer() -> None:
    assert find_parts(tiny_model()).shapes["head"].keys() == BERT_HEAD
    assert find_parts(tiny_model(head="classify")).shapes["head"].keys() == {
        "classifier.weight",
        "classifier.bias",
    }


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_tied_decoder_is_counted_in_the_embeddings_and_multiplies_in_the_head(architecture: str) -> None:
    model = tiny_model(architecture)
    found = find_parts(model)
    shape = found.shapes["embeddings"][DECODERS[architecture]]
    assert found.tied == shape[0] * shape[1]
    assert found["head"].linear[-1] == found.tied
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert find_parts(tiny_model(architecture, "classify")).tied == 0


@pytest.mark.parametrize("family", [transformers.XLMRobertaConfig, transformers.CamembertConfig])
def test_a_head_that_stands_before_its_base_does_not_take_the_table_of_words(family: type[Any]) -> None:
    """The head that FedBFPT sends would be the whole table, and ``omit`` of embeddings would leave it in."""
    same = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    found, like = parts(family(**same)), parts(transformers.RobertaConfig(**same))
    assert {part.name: dict(part.shapes) for part in found.each} == {
        part.name: dict(part.shapes) for part in like.each
    }
    assert found.tied == like.tied > 0


def test_an_untied_decoder_is_the_heads_own() -> None:
    tied, untied = parts(base()), parts(base(tie_word_embeddings=False))
    assert untied.tied == 0
    assert [part.linear for part in untied.each] == [part.linear for part in tied.each]
    assert payload(untied, ["embeddings"]) == payload(tied, ["embeddings"])
    assert untied.shapes["head"]["cls.predictions.decoder.weight"] == (30_522, 768)
    assert payload(untied, ["head"]) >= payload(tied, ["head"]) + 93_763_584


def test_the_pooler_is_a_part_of_its_own() -> None:
    found = find_parts(tiny_model(head="classify"))
    assert dict(found.shapes["pooler"]) == {"bert.pooler.dense.weight": (32, 32), "bert.pooler.dense.bias": (32,)}
    assert found["pooler"].linear == (32 * 32,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_config_alone_gives_the_parts_of_the_real_model(architecture: str, kind: str, tmp_path: Path) -> None:
    labels = ["a", "b", "c", "d", "e"]
    changes = {"num_labels": 5} if kind == "classify" else {}
    tiny_config(architecture).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    found = parts_of(str(tmp_path), kind, labels if kind == "classify" else None)
    assert found == find_parts(tiny_model(architecture, kind, **changes))
    assert list(found.shapes) == list(found.names)


@pytest.mark.parametrize("sines", [False, True])
def test_a_table_of_sines_is_never_trained(sines: bool, tmp_path: Path) -> None:
    """DistilBERT's class lets it take gradients; its own code says that none are meant."""
    config = tiny_config("distilbert", sinusoidal_pos_embds=sines)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = load(str(tmp_path), "mlm", None, seed=0)
    fixed = ["distilbert.embeddings.position_embeddings.weight"] if sines else []
    assert [name for name, own in loaded.model.named_parameters() if not own.requires_grad] == fixed
    assert parts_of(str(tmp_path), "mlm").fixed == loaded.parts.fixed == loaded.parts.sharing.omitted == set(fixed)


def test_tensors_are_the_models_own() -> None:
    model = tiny_model()
    found = find_parts(model)
    own = part_tensors(model, found, ["layer.1", "head"])
    assert own.keys() == found.shapes["layer.1"].keys() | found.shapes["head"].keys()
    own["cls.predictions.bias"].fill_(7.0)
    assert model.get_parameter("cls.predictions.bias").tolist() == [7.0] * 68
    assert not any(tensor.requires_grad for tensor in own.values())


def test_layers_and_elements() -> None:
    found = find_parts(tiny_model(layers=4))
    assert found.layers(2) == ("layer.2", "layer.3")
    assert found.layers(1, 3) == ("layer.1", "layer.2")
    assert found.layers(4) == ()
    assert found.elements(()) == 0
    assert found.elements(found.names) == sum(p.numel() for p in tiny_model(layers=4).parameters())


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth_is_the_number_of_layers(depth: int) -> None:
    assert find_parts(tiny_model(layers=depth)).depth == depth


def test_final_norm_of_a_pre_norm_model_is_above_the_layers() -> None:
    config = transformers.RobertaPreLayerNormConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    found = parts(config)
    assert "roberta_prelayernorm.LayerNorm.weight" in found.shapes["head"]
    assert "roberta_prelayernorm.LayerNorm.weight" not in found.shapes["embeddings"]


@pytest.mark.parametrize(
    ("config", "stacks"),
    [
        (transformers.AlbertConfig(num_hidden_layers=3, vocab_size=50), 0),
        (transformers.BartConfig(encoder_layers=2, decoder_layers=2, vocab_size=50), 2),
    ],
)
def test_a_model_without_one_stack_is_refused(config: Any, stacks: int) -> None:
    with pytest.raises(UserError, match=rf"{stacks} stacks of . layers.*exactly one; expected .*BERT, RoBERTa"):
        parts(config)


def test_a_model_without_a_task_head_is_refused() -> None:
    with pytest.raises(UserError, match="BertModel"):
        find_parts(tiny_model(head="none"))


def test_an_unsuitable_config_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    transformers.AlbertConfig(num_hidden_layers=3, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="albert cannot be trained layer by layer"):
        parts_of(str(tmp_path), "mlm")


def test_bert_base_in_bytes() -> None:
    """FedBFPT's 29.42 (MiB), 417.83 (MiB) and what they are made of."""
    found = parts(base())
    assert [len(shapes) for shapes in found.shapes.values()] == [5, *[16] * 12, 5]
    assert payload(found, ["embeddings"]) == 95_348_736
    assert all(payload(found, [layer]) == 28_351_488 for layer in found.layers(0))
    assert payload(found, ["head"]) == 2_490_600
    assert payload(found, ["layer.3", "head"]) == 30_842_088
    assert payload(found, found.names) == 438_057_192
    assert found["layer.0"].linear == (768**2,) * 4 + (768 * 3072,) * 2  # 12 H^2


@pytest.mark.parametrize(
    ("config", "tensors", "size"),
    [
        (base(num_hidden_layers=6), 106, 267_948_264),
        (transformers.DistilBertConfig(), 105, 267_942_120),
        (base(num_hidden_layers=4, hidden_size=312, intermediate_size=1200), 74, 57_525_576),
    ],
    ids=["bert-6", "distilbert", "tinybert-4"],
)
def test_small_models_in_bytes(config: Any, tensors: int, size: int) -> None:
    found = parts(config)
    assert sum(map(len, found.shapes.values())) == tensors
    assert payload(found, found.names) == size


@pytest.mark.parametrize(
    ("config", "size", "pooler"),
    [
        (base(vocab_size=100_000, num_labels=3), 651_374_604, 2_362_368),
        (base(num_labels=13), 437_968_948, 2_362_368),
    ],
    ids=["marbert", "bert-base"],
)
def test_sequence_classifiers_in_bytes(config: Any, size: int, pooler: int) -> None:
    found = parts(config, "classify")
    assert sum(map(len, found.shapes.values())) == 201
    assert payload(found, found.names) == size
    assert payload(found, ["pooler"]) == pooler
    assert payload(found, ["head"]) == 4 * (config.num_labels * 768 + config.num_labels)


def test_marbert_embeddings_in_bytes() -> None:
    assert payload(parts(base(vocab_size=100_000)), ["embeddings"]) == 308_785_152


def test_roberta_base_in_bytes() -> None:
    """FedBERT's RoBERTa-base; Hugging Face's one row of token types (3,072 bytes) is in its embeddings."""
    found = parts(roberta())
    assert round(payload(found, found.names) / 1e6, 2) == 498.79
    assert payload(found, ["embeddings"]) == 155_999_232 + 3_072
    assert payload(found, ["head"]) == 2_569_572
    assert payload(found, found.layers(0)) == 340_217_856


def test_parts_need_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of any size is divided on the meta device: not one weight is made."""
    made: list[torch.Tensor] = []
    register: Callable[..., None] = torch.nn.Module.register_parameter

    def spy(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        made.extend([] if parameter is None else [parameter])
        register(self, name, parameter)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", spy)
    tiny_config().save_pretrained(tmp_path)
    parts_of(str(tmp_path), "mlm")
    assert made
    assert {tensor.device.type for tensor in made} == {"meta"}
