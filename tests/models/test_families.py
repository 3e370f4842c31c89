"""Architectures beside those that the README names: they work, or are refused in a sentence of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fedstrata
import tiny
from fedstrata.errors import UserError
from fedstrata.models import checkpoints
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.plan.disclosure import channels
from tiny import gpt2_tokenizer, model_of, saved_tensors, tiny_config, tokenizer

Jobs = Callable[..., dict[str, Any]]
SIZES = {**tiny.SIZES, "num_hidden_layers": 4}
RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
OTHERS: dict[str, Callable[[], Any]] = {
    "deberta": lambda: transformers.DebertaConfig(**SIZES, **RELATIVE),
    "deberta-v2": lambda: transformers.DebertaV2Config(**SIZES, **RELATIVE, position_buckets=8),
    "layoutlm": lambda: transformers.LayoutLMConfig(**SIZES),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES),
    "roformer": lambda: transformers.RoFormerConfig(**SIZES, embedding_size=32),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SIZES),
}


@pytest.fixture
def other(job: Jobs, tmp_path: Path) -> Jobs:
    """Jobs of one round of one step for a model of another architecture."""

    def make(architecture: str, method: str, kind: str, /, **tables: Any) -> dict[str, Any]:
        folder = tmp_path / architecture
        auto = transformers.AutoModelForMaskedLM.from_config(OTHERS[architecture]())
        auto.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        tables["train"] = {"steps": 1, **tables.get("train", {})}
        return job(method, kind, model={"name": str(folder)}, method={"rounds": 1}, **tables)

    return make


@pytest.mark.parametrize(
    ("architecture", "method", "kind", "tables"),
    [
        ("deberta", "fedavg", "classify", {"head": {"kind": "psum"}}),
        ("deberta-v2", "fedavg", "classify", {"head": {"kind": "hsum"}, "train": {"precision": "bf16"}}),
        ("deberta-v2", "fedfreezebert", "classify", {"head": {"kind": "psum"}}),
        ("mpnet", "fedfreezebert", "classify", {"head": {"kind": "hsum"}}),
        ("layoutlm", "fedavg", "classify", {"head": {"kind": "mean"}}),
        ("mpnet", "fedbfpt", "mlm", {"train": {"precision": "bf16"}}),
    ],
)
def test_others_that_are_built_like_bert_work(
    other: Jobs, architecture: str, method: str, kind: str, tables: dict[str, Any]
) -> None:
    assert fedstrata.run(other(architecture, method, kind, **tables)).status == "finished"


def test_a_language_model_whose_head_stands_before_its_base_is_fine_tuned_in_the_next_stage(other: Jobs) -> None:
    """XLM-R's table of words was saved by the decoder's name alone; workers have the parts by the same names."""
    made = other("xlm-roberta", "fedbfpt", "mlm", engine={"name": "pool", "workers": 2})
    made["stages"] = [{"name": "pretrain"}, {"name": "finetune", "task": {"kind": "classify"}}]
    result = fedstrata.run(made)
    ledger = map(json.loads, (result.folder / "stages/pretrain/ledger.jsonl").read_text().splitlines())
    sent = {(line["part"], line["bytes"]) for line in ledger if line["direction"] == "up"}
    width, words = SIZES["hidden_size"], SIZES["vocab_size"]
    assert dict(sent)["head"] == 4 * (width**2 + 3 * width + words)
    assert result.status == "finished"


@pytest.mark.parametrize("kind", ["mlm", "classify"])
def test_a_model_that_computes_in_fp32_alone_is_refused_in_bf16(other: Jobs, kind: str) -> None:
    made = other("deberta", "fedavg", kind, train={"precision": "bf16"})
    with pytest.raises(UserError, match=r"\[train\] precision: is 'bf16' .* deberta computes in fp32 alone"):
        fedstrata.run(made)
    assert not Path(made["output"]["dir"]).exists()


def test_a_config_without_the_number_of_tokens_is_refused(job: Jobs, tmp_path: Path) -> None:
    transformers.CanineConfig(**{key: size for key, size in SIZES.items() if key != "vocab_size"}).save_pretrained(
        tmp_path / "canine"
    )
    tokenizer().save_pretrained(tmp_path / "canine")
    with pytest.raises(UserError, match=r"canine: its config.json \(canine\) has no vocab_size; expected"):
        fedstrata.run(job("fedavg", "classify", model={"name": str(tmp_path / "canine")}))


BLOCKS = {key: SIZES[key] for key in ("vocab_size", "pad_token_id")} | {"d_model": 32, "n_head": 2, "d_head": 16}


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        (
            transformers.AlbertConfig(**SIZES, embedding_size=16),
            "mlm",
            "albert .* same weights",
        ),
        (
            transformers.AlbertConfig(**SIZES, num_hidden_groups=4),
            "tag",
            "albert .* layer by layer",
        ),
        (transformers.FunnelConfig(**BLOCKS, block_sizes=[2, 2]), "classify", "funnel .* stand in blocks"),
        (transformers.FunnelConfig(**BLOCKS, block_sizes=[1, 1, 1]), "mlm", "funnel .* stand in blocks"),
        (transformers.XLNetConfig(d_model=32, n_layer=2, n_head=2), "classify", "xlnet .* where padding stands"),
        (
            tiny_config("bert", is_decoder=True),
            "mlm",
            "is_decoder, so it sees only .* and 'mlm'",
        ),
        (tiny_config("roberta", is_decoder=True), "mlm", "says is_decoder"),
        (
            transformers.NystromformerConfig(**SIZES, num_landmarks=8, segment_means_seq_len=24),
            "classify",
            "num_landmarks = 8, segment_means_seq_len = 24; expected the same number for both",
        ),
        (
            transformers.XmodConfig(**SIZES, languages=["en_XX", "de_DE"]),
            "mlm",
            "says default_language is None; expected one of: en_XX, de_DE",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(config: Any, kind: str, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    labels = None if kind == "mlm" else ("a", "b")
    with pytest.raises(UserError, match=rf"^model {tmp_path}: .*{words}"):
        checkpoints.parts_of(str(tmp_path), kind, labels)


def test_a_decoder_is_welcome_where_no_token_is_predicted_from_both_sides(tmp_path: Path) -> None:
    tiny_config("bert", is_decoder=True).save_pretrained(tmp_path)
    for kind, labels in (("clm", None), ("classify", ("a", "b"))):
        assert checkpoints.parts_of(str(tmp_path), kind, labels).depth == 3


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_classifier_over_a_decoder_finds_the_end_of_a_text(family: str, tmp_path: Path) -> None:
    """Whatever is padded behind it, and by whatever token the config says."""
    sizes = {**SIZES, "vocab_size": SIZES["vocab_size"] + 1, "ffn_dim": 64, "word_embed_proj_dim": 32}
    config = transformers.CONFIG_MAPPING[family](**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    gpt2_tokenizer().save_pretrained(tmp_path)
    loaded = checkpoints.load(str(tmp_path), "classify", ("a", "b"), 0)
    model, pad = loaded.model.eval(), loaded.tokenizer.pad_token_id
    assert pad != config.pad_token_id
    text = loaded.tokenizer("the heart")["input_ids"]
    alone = model(input_ids=torch.tensor([text])).logits
    padded, mask = torch.tensor([[*text, pad, pad]]), torch.tensor([[1] * len(text) + [0, 0]])
    torch.testing.assert_close(model(input_ids=padded, attention_mask=mask).logits, alone)


@pytest.mark.parametrize("method", ["fedbfpt", "fedbt"])
def test_a_language_model_whose_head_has_no_tensor_of_its_own(job: Jobs, tmp_path: Path, method: str) -> None:
    """OPT's is the table of words alone; a method that names a head ended with a KeyError."""
    sizes = {**SIZES, "vocab_size": SIZES["vocab_size"] + 1, "ffn_dim": 64, "word_embed_proj_dim": 32}
    transformers.OPTForCausalLM(transformers.OPTConfig(**sizes)).save_pretrained(tmp_path / "opt")
    gpt2_tokenizer().save_pretrained(tmp_path / "opt")
    made = job(method, "clm", model={"name": str(tmp_path / "opt")}, train={"steps": 1})
    costs = fedstrata.forecast(made)[method]["clients"]
    result = fedstrata.run(made)
    ledger = map(json.loads, (result.folder / "ledger.jsonl").read_text().splitlines())
    sent = {line["part"] for line in ledger if line["direction"] == "up"}
    assert sent == {"layer.0", "layer.1"}
    assert (result.bytes["up"], result.bytes["down"]) == (costs["up_bytes"], costs["down_bytes"])
    assert result.flops == costs["train_flops"]


@pytest.mark.parametrize(
    "config",
    [
        transformers.LongformerConfig(**SIZES, attention_window=8),
        transformers.XmodConfig(**SIZES, languages=["en"], default_language="en"),
    ],
)
def test_a_model_that_looks_at_its_text_to_decide_what_it_computes_is_not_forecast(
    config: Any, job: Jobs, tmp_path: Path
) -> None:
    """A forecast ended with an exception of torch's; a run needs none."""
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "it")
    tokenizer().save_pretrained(tmp_path / "it")
    made = job("fedavg", "classify", model={"name": str(tmp_path / "it")}, train={"steps": 1})
    sentence = f"what {config.model_type} computes depends on .*; fedstrata run trains it"
    with pytest.raises(UserError, match=sentence):
        fedstrata.forecast(made)
    assert fedstrata.run(made).status == "finished"


@pytest.mark.parametrize("method", ["fedavg", "fedbfpt"])
def test_a_model_that_makes_the_kinds_of_its_layers_when_asked(method: str, job: Jobs, tmp_path: Path) -> None:
    """Mamba's config has no place to put others: a run ended with an AttributeError."""
    vocabulary = SIZES["vocab_size"] + 1
    config = transformers.MambaConfig(vocab_size=vocabulary, hidden_size=32, num_hidden_layers=4, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "it")
    gpt2_tokenizer().save_pretrained(tmp_path / "it")
    made = job(method, "clm", model={"name": str(tmp_path / "it")}, train={"steps": 1})
    costs = fedstrata.forecast(made)[method]["clients"]
    assert fedstrata.run(made).bytes["up"] == costs["up_bytes"]


def test_a_model_is_saved_with_what_its_weights_hold_besides_parameters(job: Jobs, tmp_path: Path) -> None:
    """LFM2's routers choose experts by a buffer, which was left out: a plain reader's model chose others."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    sizes = {**SIZES, "vocab_size": SIZES["vocab_size"] + 1, "num_hidden_layers": 2, "num_key_value_heads": 1}
    config = transformers.Lfm2MoeConfig(**sizes, **experts, layer_types=["conv", "full_attention"])
    model = transformers.Lfm2MoeForCausalLM(config)
    bias = model.model.layers[1].feed_forward.expert_bias
    bias.copy_(torch.tensor([0.5, 0.0, 0.25, 1.0]))
    model.save_pretrained(tmp_path / "it")
    gpt2_tokenizer().save_pretrained(tmp_path / "it")
    result = fedstrata.run(job("fedavg", "clm", model={"name": str(tmp_path / "it")}, train={"steps": 1}))
    again = transformers.AutoModelForCausalLM.from_pretrained(result.model_folder)
    assert again.model.layers[1].feed_forward.expert_bias.equal(bias)


def test_a_mixture_of_experts_is_trained_without_a_forecast(job: Jobs, tmp_path: Path) -> None:
    """Torch has no shapes for its products in fp32: a forecast ended with a RuntimeError of torch's."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    sizes = {**SIZES, "vocab_size": SIZES["vocab_size"] + 1, "num_hidden_layers": 2, "num_key_value_heads": 1}
    config = transformers.Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=32)
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "it")
    gpt2_tokenizer().save_pretrained(tmp_path / "it")
    made = job("fedavg", "classify", model={"name": str(tmp_path / "it")}, train={"steps": 1})
    with pytest.raises(UserError, match=r"without numbers what qwen2_moe computes .*; fedstrata run needs none"):
        fedstrata.forecast(made)
    assert fedstrata.run(made).status == "finished"


def test_a_model_without_a_limit_on_its_texts(job: Jobs, tmp_path: Path) -> None:
    """BLOOM's config has no max_position_embeddings."""
    config = transformers.BloomConfig(vocab_size=SIZES["vocab_size"] + 1, hidden_size=32, n_layer=2, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    gpt2_tokenizer().save_pretrained(tmp_path / "bloom")
    made = job("fedavg", "clm", model={"name": str(tmp_path / "bloom")}, train={"steps": 1})
    costs = fedstrata.forecast(made)["fedavg"]["clients"]
    assert fedstrata.run(made).bytes["up"] == costs["up_bytes"]


DECODER: dict[str, Any] = {
    **SIZES,
    "vocab_size": SIZES["vocab_size"] + 1,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
}


@pytest.mark.parametrize(
    ("config", "kind", "tables"),
    [
        (transformers.EuroBertConfig(**SIZES), "mlm", ["model.embed_tokens.weight", "lm_head.weight"]),
        (transformers.OPTConfig(**DECODER), "clm", ["model.decoder.embed_tokens.weight"]),
        (
            transformers.GPTNeoXConfig(**{**DECODER, "bos_token_id": 1}),
            "classify",
            ["gpt_neox.embed_in.weight"],
        ),
    ],
)
def test_rows_of_unlisted_tokens_stay_whatever_the_table_is_called(
    config: Any, kind: str, tables: list[str], job: Jobs, tmp_path: Path
) -> None:
    """They were trained and sent, and a note said that the model has none."""
    auto = transformers.AutoModelForMaskedLM if kind == "mlm" else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path / "it")
    words = tokenizer() if kind == "mlm" else gpt2_tokenizer()
    words.save_pretrained(tmp_path / "it")
    (tmp_path / "public.txt").write_text("the\nheart\n", "utf-8")
    made = job(
        "fedavg",
        kind,
        model={"name": str(tmp_path / "it")},
        privacy={
            "omit": ["unlisted_rows", "position_rows"],
            "public_vocabulary": str(tmp_path / "public.txt"),
        },
    )
    costs = fedstrata.forecast(made)["fedavg"]["clients"]
    result = fedstrata.run(made)
    assert (result.bytes["up"], result.bytes["down"]) == (costs["up_bytes"], costs["down_bytes"])
    start, end = saved_tensors(tmp_path / "it"), saved_tensors(model_of(result))
    listed = {words.get_vocab()[word] for word in ("the", "heart")} | set(words.all_special_ids)
    stay = [row for row in range(config.vocab_size) if row not in listed]
    for name in tables:
        assert torch.equal(start[name][stay], end[name][stay]), name
        assert not torch.equal(start[name], end[name]), name
    for name in (name for name in start if "position" in name):
        assert torch.equal(start[name], end[name]), name


def test_unlisted_rows_of_a_head_with_columns_are_refused(job: Jobs, tmp_path: Path) -> None:
    """Half of MobileBERT's decoder has a column for each token, which was trained and sent."""
    config = transformers.MobileBertConfig(**SIZES, embedding_size=16, intra_bottleneck_size=16)
    transformers.MobileBertForMaskedLM(config).save_pretrained(tmp_path / "it")
    tokenizer().save_pretrained(tmp_path / "it")
    (tmp_path / "public.txt").write_text("the\n", "utf-8")
    omit = {"omit": ["unlisted_rows"], "public_vocabulary": str(tmp_path / "public.txt")}
    made = job("fedavg", "mlm", model={"name": str(tmp_path / "it")}, privacy=omit)
    with pytest.raises(UserError, match=r"omit: 'unlisted_rows' does not go with mobilebert, .* column for each"):
        fedstrata.run(made)


@pytest.mark.parametrize("target", ["embed_tokens", "embed_positions"])
def test_an_adapter_of_a_table_tells_of_its_words_whatever_it_is_called(target: str, tmp_path: Path) -> None:
    transformers.OPTConfig(**DECODER).save_pretrained(tmp_path)
    adapter = AdapterConfig((("default", 4),), 8.0, (target, "q_proj"), 0.0, "gaussian", "plain")
    parts = checkpoints.parts_of(str(tmp_path), "classify", ("a", "b"), adapter=adapter)
    told = channels(parts, parts.adapted(parts.without_adapters.names), "class")
    assert ("embeddings" in told) == (target == "embed_tokens")


def test_a_model_without_a_table_of_tokens_is_trained(job: Jobs, tmp_path: Path) -> None:
    """CANINE hashes characters; a run ended with an exception of transformers'."""
    config = transformers.CanineConfig(**{**SIZES, "num_hidden_layers": 2}, num_hash_buckets=64, type_vocab_size=2)
    transformers.CanineModel(config).save_pretrained(tmp_path / "it")
    tokenizer().save_pretrained(tmp_path / "it")
    made = job("fedavg", "classify", model={"name": str(tmp_path / "it")}, train={"steps": 1})
    assert fedstrata.run(made).status == "finished"


TURNED = "roformer.encoder.embed_positions.weight"


@pytest.mark.parametrize(
    ("method", "level"), [("fedavg", "none"), ("fedavg", "example"), ("fedavg", "client"), ("local", "example")]
)
def test_a_table_that_the_model_never_trains_is_neither_noised_nor_sent(
    other: Jobs, method: str, level: str
) -> None:
    """RoFormer's sines, by which places are turned: with noise of their own the places would be gone."""
    noise: dict[str, Any] = {"level": level, "noise": 5.0, "clip": 1.0, "delta": 0.01}
    noise = {"none": {}, "example": noise, "client": {**noise, "single_message": True}}[level]
    made = other("roformer", method, "classify", task={"labels": ["kidney", "heart", "eye"]}, privacy=noise)
    [told] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    start, trained = saved_tensors(Path(made["model"]["name"])), saved_tensors(model_of(result))
    assert torch.equal(trained[TURNED], start[TURNED])
    lines = map(json.loads, (result.folder / "ledger.jsonl").read_text().splitlines())
    sent = [line for line in lines if line["direction"] == "up"]
    up = {line["bytes"] for line in sent if line["part"] == "embeddings"}
    tables = [tensor for name, tensor in start.items() if name.startswith("roformer.embeddings.")]
    assert up == ({4 * sum(tensor.numel() for tensor in tables)} if method == "fedavg" else set())
    assert told["clients"]["up_bytes"] == sum(line["bytes"] for line in sent)
