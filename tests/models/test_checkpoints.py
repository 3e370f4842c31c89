"""Models in and out of Hugging Face folders."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from fedstrata.errors import UserError
from fedstrata.models import checkpoints, configs
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.belonging import check_types
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.models.quiet import quiet
from fedstrata.plan.kinds import Tensors
from tiny import CONFIGS, tiny_model, tokenizer

LABELS = ("NEG", "NEU", "POS")
Folder = Callable[..., Path]


def weights(loaded: checkpoints.Loaded) -> Tensors:
    return part_tensors(loaded.model, loaded.parts, loaded.parts.names)


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(5, 68, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits  # type: ignore[no-any-return]


def change(folder: Path, **changes: Any) -> None:
    """Edit a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")


def refused(folder: Path | str, kind: str = "mlm") -> str:
    """The sentence of the refusal; one line."""
    with pytest.raises(UserError) as error:
        checkpoints.load(str(folder), kind, LABELS if kind == "classify" else None, 0)
    assert str(error.value).startswith(f"model {folder}: ")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_whole_checkpoint_comes_as_it_is(model_folder: Folder, architecture: str) -> None:
    loaded = checkpoints.load(str(model_folder(architecture)), "mlm", None, 0)
    assert loaded.fresh == ()
    assert loaded.parts == find_parts(tiny_model(architecture))
    for name, parameter in tiny_model(architecture).named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter), name
    assert loaded.tokenizer("the heart")["input_ids"] == tokenizer()("the heart")["input_ids"]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_fresh_head_depends_on_the_seed_alone(model_folder: Folder, architecture: str) -> None:
    folder = str(model_folder(architecture))
    torch.manual_seed(1)
    one = checkpoints.load(folder, "classify", LABELS, 5)
    torch.manual_seed(2)
    same, other = (checkpoints.load(folder, "classify", LABELS, seed) for seed in (5, 6))
    assert one.fresh == (("pooler", "head") if architecture == "bert" else ("head",))
    fresh = weights(one).keys() - {name for name, _ in tiny_model(architecture).named_parameters()}
    assert fresh
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(same)[name]), name
        if name in fresh and name.endswith("weight") and tensor.ndim == 2:
            assert not torch.equal(tensor, weights(other)[name]), name
        elif name not in fresh:
            assert torch.equal(tensor, weights(other)[name]), name


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *((kind, architecture) for kind in ("mlm", "classify", "tag") for architecture in CONFIGS),
        *((kind, "gpt2") for kind in ("clm", "classify", "tag")),
    ],
)
def test_dropout_false_leaves_none(model_folder: Folder, architecture: str, kind: str) -> None:
    loud = {"attention_dropout": 0.1, "mlp_dropout": 0.1, "embedding_dropout": 0.1, "classifier_dropout": 0.1}
    if architecture != "modernbert":
        loud = {"classifier_dropout": 0.3} if architecture not in ("distilbert", "gpt2") else {}
    folder = str(model_folder(architecture, **loud, **({"head": "clm"} if architecture == "gpt2" else {})))
    labels = LABELS if kind in ("classify", "tag") else None
    with_dropout, without = (
        checkpoints.load(folder, kind, labels, 0, dropout).model.train() for dropout in (True, False)
    )
    ids = torch.full((2, 12), 7)
    assert not torch.equal(with_dropout(input_ids=ids).logits, with_dropout(input_ids=ids).logits)
    once = without(input_ids=ids).logits
    assert torch.equal(once, without(input_ids=ids).logits)
    torch.testing.assert_close(once, without.eval()(input_ids=ids).logits)
    assert {module.p for module in without.modules() if isinstance(module, torch.nn.Dropout)} <= {0.0}


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_the_pooler_is_carried_through_mlm(model_folder: Folder, tmp_path: Path, architecture: str) -> None:
    """Bare checkpoint with a pooler -> mlm stage -> mlm stage -> classify."""
    bare = tiny_model(architecture, "none")
    names = {f"{architecture}.pooler.dense.weight", f"{architecture}.pooler.dense.bias"}
    place = str(model_folder(architecture, head="none"))
    for stage in ("one", "two"):
        loaded = checkpoints.load(place, "mlm", None, 0)
        assert "pooler" not in loaded.parts.names
        assert loaded.carried.keys() == names
        trained = {name: tensor + 1 for name, tensor in weights(loaded).items()}
        checkpoints.save(loaded, trained, tmp_path / stage)
        place = str(tmp_path / stage)
    kept = load_file(tmp_path / "two" / "model.safetensors")
    assert torch.equal(kept[f"{architecture}.pooler.dense.weight"], bare.pooler.dense.weight)
    again = checkpoints.load(place, "classify", LABELS, 0)
    assert again.fresh == ("head",)
    if architecture == "bert":
        assert again.carried == {}
        assert torch.equal(again.model.bert.pooler.dense.weight, bare.pooler.dense.weight)
        assert torch.equal(again.model.bert.pooler.dense.bias, bare.pooler.dense.bias)
    layer = f"{again.parts.stack}.1.output.dense.weight"
    torch.testing.assert_close(
        again.model.get_parameter(layer), bare.get_parameter(layer.partition(".")[2]) + 2, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("architecture", "head"), [("bert", "mlm"), ("distilbert", "none"), ("electra", "none")])
def test_nothing_is_carried_where_the_checkpoint_has_no_pooler(
    model_folder: Folder, architecture: str, head: str
) -> None:
    assert checkpoints.load(str(model_folder(architecture, head=head)), "mlm", None, 0).carried == {}


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("kind", ["mlm", "classify"])
def test_a_saved_folder_is_a_hugging_face_folder(
    model_folder: Folder, tmp_path: Path, architecture: str, kind: str
) -> None:
    labels = LABELS if kind == "classify" else None
    loaded = checkpoints.load(str(model_folder(architecture)), kind, labels, 3)
    moved = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in weights(loaded).items()}
    checkpoints.save(loaded, moved, tmp_path / "model")
    again = checkpoints.auto_class(kind).from_pretrained(tmp_path / "model")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, moved[name]), name
        loaded.model.get_parameter(name).data.copy_(moved[name])
    assert again.dtype == torch.float32
    assert torch.equal(logits(again), logits(loaded.model))
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert words("The eye.", "lens")["input_ids"] == loaded.tokenizer("The eye.", "lens")["input_ids"]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == [type(again).__name__]
    if labels:
        assert config["id2label"] == {"0": "NEG", "1": "NEU", "2": "POS"}
        assert config["label2id"] == {"NEG": 0, "NEU": 1, "POS": 2}
        assert again.config.num_labels == 3
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def named(folder: Path, labels: list[str], **changes: Any) -> Path:
    """A folder's model with a head of its own for these classes."""
    model = tiny_model("bert", "classify", num_labels=3)
    model.save_pretrained(folder)
    change(
        folder, id2label=dict(enumerate(labels)), label2id={label: i for i, label in enumerate(labels)}, **changes
    )
    return folder


def test_a_head_with_the_same_classes_in_another_order_is_refused(model_folder: Folder) -> None:
    """Each class would be taken for another; case does not matter, as hub models shout."""
    expected = (
        "its head has the classes in another order than the job; expected [task] labels = ['POS', 'NEG', 'NEU']"
    )
    assert refused(named(model_folder(), ["pos", "neg", "neu"]), "classify").endswith(expected)
    for labels in (["neg", "neu", "pos"], ["a", "b", "c"]):
        assert checkpoints.load(str(named(model_folder(), labels)), "classify", LABELS, 0).fresh == ()
    further = named(model_folder(), ["pos", "neg", "neu"])
    pretrained = checkpoints.load(str(further), "mlm", None, 0)
    checkpoints.save(pretrained, weights(pretrained), further)
    assert "head" in checkpoints.load(str(further), "classify", LABELS, 0).fresh


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_saved_classifier_gives_shares_of_one_whatever_its_start_was_made_for(
    model_folder: Folder, tmp_path: Path, problem: str
) -> None:
    folder = named(model_folder(), ["a", "b", "c"], problem_type=problem)
    loaded = checkpoints.load(str(folder), "classify", LABELS, 0)
    checkpoints.save(loaded, weights(loaded), tmp_path / "model")
    answers = transformers.pipeline("text-classification", str(tmp_path / "model"), top_k=None)(["The eye."])[0]
    assert sum(answer["score"] for answer in answers) == pytest.approx(1)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "model").problem_type is None


def test_a_saved_tokenizer_cuts_and_pads_nothing_by_itself(model_folder: Folder, tmp_path: Path) -> None:
    loaded = checkpoints.load(str(model_folder()), "mlm", None, 3)
    loaded.tokenizer(["The eye.", "The lens of the eye."], truncation=True, max_length=4, padding=True)
    checkpoints.save(loaded, weights(loaded), tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "tokenizer.json").read_text("utf-8"))
    assert saved["truncation"] is None
    assert saved["padding"] is None


@pytest.mark.parametrize(("architecture", "kind"), [("bert", "classify"), ("gpt2", "classify"), ("gpt2", "clm")])
def test_a_saved_tokenizer_pads_a_batch_on_the_side_that_the_model_was_trained_with(
    model_folder: Folder, tmp_path: Path, architecture: str, kind: str
) -> None:
    """With the left side of its start model plain code got other scores from a batch than the run."""
    folder = model_folder(architecture, head="clm" if architecture == "gpt2" else "mlm")
    left = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    left.save_pretrained(folder)
    loaded = checkpoints.load(str(folder), kind, LABELS if kind == "classify" else None, 3)
    checkpoints.save(loaded, weights(loaded), tmp_path / "model")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert words.padding_side == ("left" if kind == "clm" else "right")  # to generate, the left is needed
    if kind == "classify":
        model = checkpoints.auto_class(kind).from_pretrained(tmp_path / "model").eval()
        rows = ["The eye.", "High pressure makes the wall of the heart thick."]
        with torch.no_grad():
            alone = torch.cat([model(**words(row, return_tensors="pt")).logits for row in rows])
            batch = model(**words(rows, padding=True, return_tensors="pt")).logits
        torch.testing.assert_close(batch, alone, rtol=0, atol=1e-5)


def test_saving_replaces_all_of_a_folder_but_what_is_somebody_elses(model_folder: Folder, tmp_path: Path) -> None:
    loaded = checkpoints.load(str(model_folder()), "mlm", None, 0)
    (tmp_path / "model").mkdir()
    for name in ("vocab.txt", "notes.txt"):
        (tmp_path / "model" / name).write_text("x")
    (tmp_path / ".model.part").mkdir()
    (tmp_path / ".model.part" / "left over").write_text("x")
    checkpoints.save(loaded, weights(loaded), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "notes.txt"} <= names
    assert not {"vocab.txt", "left over"} & names


def test_a_broken_save_leaves_the_old_folder(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = checkpoints.load(str(model_folder()), "mlm", None, 0)
    checkpoints.save(loaded, weights(loaded), tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def crash(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(loaded.tokenizer, "save_pretrained", crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(
            loaded, {name: tensor + 1 for name, tensor in weights(loaded).items()}, tmp_path / "model"
        )
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_a_classifier_for_other_labels_is_made_anew(model_folder: Folder) -> None:
    """A checkpoint of two classes, a job of three: the head is new, the pooler stays."""
    folder = model_folder(head="classify", num_labels=2)
    loaded = checkpoints.load(str(folder), "classify", LABELS, 0)
    assert loaded.fresh == ("head",)
    assert loaded.model.classifier.weight.shape == (3, 32)
    assert checkpoints.load(str(folder), "classify", LABELS[:2], 0).fresh == ()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_a_model_with_adapters_of_peft_beside_it_is_refused(model_folder: Folder) -> None:
    """transformers puts them in; what was saved then lacked the matrices that they stand beside."""
    peft = pytest.importorskip("peft")
    folder = model_folder(head="classify", num_labels=3)
    auto = transformers.AutoModelForSequenceClassification
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    peft.get_peft_model(auto.from_pretrained(folder), lora).save_pretrained(folder)
    words = "has adapters of peft (adapter_config.json); expected a plain model, as merge_and_unload() of peft "
    words += "makes one"
    assert refused(folder, "classify") == f"model {folder}: {words}"
    with pytest.raises(UserError, match=re.escape(words)):
        find_parts(auto.from_pretrained(folder))  # as of a hub id


@pytest.mark.parametrize("rank", [None, 4, 8])
def test_a_model_with_adapters_of_its_own_among_its_weights_is_refused(
    model_folder: Folder, rank: int | None
) -> None:
    """They were left out without a word; with ``[adapter]`` a run ended with an exception of torch's."""
    peft = pytest.importorskip("peft")
    folder = model_folder(head="classify", num_labels=3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    name = "default" if rank == 8 else "mine"
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["query"]), model, name)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    ours = AdapterConfig((("default", rank or 0),), 8.0, ("query",), 0.0, "gaussian", "plain")
    with pytest.raises(
        UserError, match=rf"has adapters of peft \(bert\.\S+\.lora_[AB]\.{name}\.weight\); expected"
    ):
        checkpoints.load(str(folder), "classify", LABELS, 0, adapter=ours if rank else None)


@pytest.mark.parametrize("keys", [{"output_attentions": True}, {"architectures": [3]}])
def test_a_model_whose_config_asks_for_more_than_training_does_is_saved(
    model_folder: Folder, tmp_path: Path, keys: dict[str, Any]
) -> None:
    folder = model_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    loaded = checkpoints.load(str(folder), "classify", ["x", "y"], 0)
    checkpoints.save(loaded, part_tensors(loaded.model, loaded.parts, loaded.parts.names), tmp_path / "saved")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert again(torch.tensor([[2, 5, 3]])).logits.shape == (1, 2)


@pytest.mark.parametrize(("key", "value"), [("chunk_size_feed_forward", 7), ("return_dict", False)])
def test_what_a_config_says_of_the_form_of_its_computation_ends_no_training(
    model_folder: Folder, key: str, value: object
) -> None:
    folder = model_folder("bert")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    model = checkpoints.load(str(folder), "classify", LABELS, 0).model
    assert model(input_ids=torch.full((1, 5), 7)).logits.shape == (1, 3)


def test_a_bf16_checkpoint_loads_as_fp32(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = checkpoints.load(str(tmp_path), "mlm", None, 0)
    assert {tensor.dtype for tensor in weights(loaded).values()} == {torch.float32}
    for name, parameter in tiny_model().named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter.to(torch.bfloat16).float()), name
    checkpoints.save(loaded, weights(loaded), tmp_path / "made")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "float32"


def test_weights_that_lack_a_layer_are_refused(model_folder: Folder) -> None:
    folder = model_folder()
    change(folder, num_hidden_layers=4)
    sentence = refused(folder)
    assert "lack tensors of layer.3 that its config.json (bert) asks for" in sentence


def test_weights_with_two_values_of_what_the_config_ties_are_refused(model_folder: Folder) -> None:
    """transformers leaves them apart: more was sent than the forecast said, and workers ended with a KeyError."""
    folder = model_folder()
    tensors = load_file(folder / "model.safetensors")
    table, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    for change, word in ((0, None), (1, decoder)):
        save_file({**tensors, decoder: tensors[table] + change}, folder / "model.safetensors", {"format": "pt"})
        if word is None:
            assert checkpoints.load(str(folder), "mlm", None, 0).parts.tied
        else:
            assert f"its config.json ties {decoder} to {table}, and its weights have both" in refused(folder)
    assert checkpoints.load(str(folder), "classify", LABELS, 0).fresh == ("pooler", "head")


def test_weights_of_another_size_are_refused(model_folder: Folder) -> None:
    folder = model_folder()
    change(folder, intermediate_size=48)
    assert "intermediate.dense.weight in the shape [64, 32], its config.json (bert) asks for [48, 32]" in refused(
        folder
    )


def test_weights_of_another_architecture_are_refused(model_folder: Folder) -> None:
    """DistilBERT weights under a BERT config, which Hugging Face alone would initialize at random."""
    folder = model_folder("distilbert")
    tiny_model("bert").config.save_pretrained(folder)
    assert "lack tensors of embeddings, layer.0, layer.1 " in refused(folder)


def test_a_folder_without_config_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "config.json").unlink()
    assert "the folder holds no usable model: " in refused(folder)
    with pytest.raises(UserError, match="the folder holds no usable model"):
        checkpoints.parts_of(str(folder), "mlm")


@pytest.mark.parametrize("content", ["{", '{"model_type": "nonsense"}', "[]"])
def test_a_bad_config_is_refused(model_folder: Folder, content: str) -> None:
    folder = model_folder()
    (folder / "config.json").write_text(content)
    assert "the folder holds no usable model: " in refused(folder)


def test_a_runs_folder_is_refused_with_the_name_of_its_model(model_folder: Folder, tmp_path: Path) -> None:
    model_folder().rename(tmp_path / "model")
    (tmp_path / "job.toml").touch()
    with pytest.raises(UserError, match=rf"no usable model: .*; a run's model is its folder model, {tmp_path}/m"):
        checkpoints.parts_of(str(tmp_path), "mlm")


def test_a_folder_without_weights_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refused(folder)


def test_a_tokenizer_that_cannot_be_read_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "tokenizer.json").write_text("{")
    assert "the folder holds no usable tokenizer: " in refused(folder)


def test_a_length_of_texts_that_is_no_number_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "model_max_length": "long"}), "utf-8")
    assert "no usable tokenizer: model_max_length in tokenizer_config.json is no number" in refused(folder)


@pytest.mark.parametrize(
    ("architecture", "kind", "file"),
    [("roberta", "RobertaTokenizer", "vocab.txt"), ("bert", "BertTokenizer", "vocab.json")],
)
def test_a_tokenizer_whose_own_vocabulary_is_not_there_is_refused(
    model_folder: Folder, architecture: str, kind: str, file: str
) -> None:
    """transformers makes one of special tokens alone, to which every word is unknown."""
    folder = model_folder(architecture)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), "utf-8")
    (folder / file).write_text('{"the": 0, "heart": 1}', "utf-8")
    assert refused(folder) == f"model {folder}: has no words for its {kind}; expected tokenizer.json"


def test_a_padding_token_beyond_the_embeddings_is_refused(model_folder: Folder) -> None:
    """torch says so of the table, in an exception that is not among transformers' own."""
    folder = model_folder()
    change(folder, pad_token_id=500)
    assert "the folder holds no usable model: Padding_idx must be within num_embeddings" in refused(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    words.add_special_tokens({"pad_token": "[NEW]"})
    words.save_pretrained(folder)
    change(folder, pad_token_id=None)
    assert "its tokenizer knows 69 words, its embeddings 68" in refused(folder)


def test_a_token_around_pairs_beyond_the_embeddings_is_refused(model_folder: Folder) -> None:
    """Training ended with an IndexError; single texts have other tokens around them."""
    folder = model_folder()
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text("utf-8"))
    made["post_processor"]["special_tokens"]["[NEW]"] = {"id": "[NEW]", "ids": [500], "tokens": ["[NEW]"]}
    made["post_processor"]["pair"].append({"SpecialToken": {"id": "[NEW]", "type_id": 1}})
    path.write_text(json.dumps(made), "utf-8")
    assert "its tokenizer knows 501 words, its embeddings 68" in refused(folder)


@pytest.mark.parametrize("inside", [0, 2])
def test_a_text_of_a_pair_marked_beyond_the_embeddings_is_refused(model_folder: Folder, inside: int) -> None:
    """Training ended with an IndexError, on a GPU with an assertion after which nothing runs there any more."""
    folder = model_folder()
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text("utf-8"))
    for piece in made["post_processor"]["pair"][1:]:
        next(iter(piece.values()))["type_id"] = 2
    for _ in range(inside):
        made["post_processor"] = {"type": "Sequence", "processors": [made["post_processor"]]}
    path.write_text(json.dumps(made), "utf-8")
    for kind in ("pair", "regress"):
        assert "marks a text of a pair by 2, its embeddings take 0 to 1 (type_vocab" in refused(folder, kind)
    checkpoints.load(str(folder), "classify", LABELS, 0)


@pytest.mark.parametrize("config", [transformers.DebertaV2Config(), transformers.XLNetConfig()])
def test_a_model_that_embeds_no_marks_of_texts_takes_any(model_folder: Folder, config: Any) -> None:
    words = checkpoints.tokenizer_of(str(model_folder()), "pair")
    assert "token_type_ids" in words.model_input_names
    check_types("m", words, config)


@pytest.mark.parametrize("file", ["spm.model", "sentencepiece.bpe.model"])
def test_a_vocabulary_of_sentencepiece_is_a_tokenizer(model_folder: Folder, file: str) -> None:
    """That of DeBERTa-v3 and of XLM-RoBERTa; whether it can be read is another question."""
    folder = model_folder()
    (folder / "tokenizer.json").rename(folder / file)
    kind = {"spm.model": "DebertaV2Tokenizer"}.get(file, "XLMRobertaTokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), "utf-8")
    assert "the folder holds no usable tokenizer: " in refused(folder)


@pytest.mark.parametrize("name", ["some-org/some-model", "bert-base-uncased", "/nowhere/at/all", "a b"])
def test_a_hub_id_that_cannot_be_had_is_refused_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert "is no folder, and loading it from the hub failed: " in refused(name)
    assert waits == [], "it is not asked again and again"


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_answer(url: str) -> None:
        asked.append(url)
        raise ConnectionError("[Errno 111] Connection refused")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(configs, "get_hf_file_metadata", no_answer)
    said = refused("some-org/some-model")
    assert said.endswith(f"{constants.ENDPOINT} cannot be reached ([Errno 111] Connection refused)")
    assert len(asked) == 1


def test_the_libraries_of_models_are_quiet_and_then_as_they_were() -> None:
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    before = [logger.level for logger in loggers]
    with quiet():
        assert [logger.level for logger in loggers] == [logging.ERROR] * 2
    assert [logger.level for logger in loggers] == before


@pytest.mark.parametrize(
    ("architecture", "most"), [("bert", 66), ("roberta", 65), ("distilbert", 66), ("electra", 66)]
)
def test_longest_is_the_most_that_goes_through(architecture: str, most: int) -> None:
    model = tiny_model(architecture).eval()
    assert checkpoints.max_positions(model) == most
    with torch.no_grad():
        model(input_ids=torch.full((1, most), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, most + 1), 7))


def test_longest_of_published_shapes() -> None:
    with torch.device("meta"):
        roberta = transformers.RobertaForMaskedLM(transformers.RobertaConfig(max_position_embeddings=514))
        modern = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(num_hidden_layers=1))
    assert (checkpoints.max_positions(roberta), checkpoints.max_positions(modern)) == (512, 8192)
