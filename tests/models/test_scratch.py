"""Models from a config alone: presets, keys, tokenizers, and the folder a run starts from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import fedstrata
from fedstrata.cost.bytes import payload
from fedstrata.errors import UserError
from fedstrata.events import StageStarted
from fedstrata.models import scratch
from fedstrata.models.checkpoints import auto_class, fast_tokenizer
from fedstrata.models.families import FAMILIES, PRESETS, SPLITTABLE
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.plan.streams import SERVER, Streams
from tiny import SENTENCES, gpt2_tokenizer, tokenizer

Jobs = Callable[..., dict[str, Any]]
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 300}
ROBERTA = {"preset": "roberta-small", **SMALL, "intermediate_size": 64, "max_position_embeddings": 66}
GPT2 = {"preset": "gpt2-small", **SMALL, "max_position_embeddings": 64}
DISTILBERT = {"model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
"""Its config has no ``use_cache``."""


@pytest.fixture
def new(job: Jobs) -> Callable[..., dict[str, Any]]:
    """A job that starts from no checkpoint: ``new("clm", GPT2)``."""

    def make(kind: str = "mlm", config: dict[str, Any] = ROBERTA, **tables: Any) -> dict[str, Any]:
        made = job("fedavg", kind, 3, **tables)
        made["model"] = {"config": config, **tables.get("model", {})}
        return made

    return make


def parts(settings: dict[str, Any], kind: str) -> Parts:
    with torch.device("meta"):
        return find_parts(auto_class(kind).from_config(scratch.new_config(settings)))


@pytest.mark.parametrize(
    ("preset", "hidden", "ffn", "embeddings", "layers"),
    [
        ("roberta-base", 768, 3072, 155_999_232, 340_217_856),
        ("roberta-small", 256, 1024, 51_999_744, 37_908_480),
    ],
)
def test_presets_of_roberta_in_bytes(preset: str, hidden: int, ffn: int, embeddings: int, layers: int) -> None:
    """Beside them Hugging Face's RoBERTa has one row of token types."""
    found = parts({"preset": preset}, "mlm")
    assert embeddings == 4 * hidden * (50265 + 514 + 2)
    assert payload(found, ["embeddings"]) == embeddings + 4 * hidden
    assert layers == 4 * 12 * (4 * (hidden**2 + hidden) + 2 * hidden * ffn + ffn + hidden + 4 * hidden)
    assert payload(found, found.layers(0)) == layers
    config = scratch.new_config({"preset": preset})
    assert (config.num_attention_heads, config.pad_token_id) == (12 if hidden == 768 else 4, 1)
    assert (config.type_vocab_size, config.layer_norm_eps) == (1, 1e-5)


def test_the_preset_of_gpt2_in_bytes() -> None:
    """The matrix that reads words also predicts them; only the last norm is above the layers."""
    found = parts({"preset": "gpt2-small"}, "clm")
    assert payload(found, ["embeddings"]) == 157_535_232
    assert found.shapes["head"] == {"transformer.ln_f.weight": (768,), "transformer.ln_f.bias": (768,)}
    assert payload(found, found.names) == 4 * 124_439_808
    assert (found.depth, found.tied, found["head"].linear) == (12, 50257 * 768, (50257 * 768,))


def test_families_are_one_table() -> None:
    assert set(SPLITTABLE) == {"bert", "roberta", "distilbert", "electra", "gpt2"}
    assert PRESETS.keys() == {"roberta-small", "roberta-base", "gpt2-small"}
    assert all(model_type in transformers.CONFIG_MAPPING for model_type in FAMILIES)


def test_keys_lie_over_a_preset_by_either_name() -> None:
    for key in ("num_hidden_layers", "n_layer"):
        config = scratch.new_config({"preset": "gpt2-small", key: 3})
        assert (config.n_layer, config.num_hidden_layers, config.n_embd) == (3, 3, 768)
    assert scratch.new_config({"model_type": "bert", "hidden_size": 64}).hidden_size == 64


def test_a_key_that_a_model_reads_and_its_default_config_is_without_is_known() -> None:
    """DeBERTa-v3's shape could not be asked for: 'no such key of deberta-v2'."""
    keys = {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}
    config = scratch.new_config({"model_type": "deberta-v2", **keys})
    assert {key: getattr(config, key) for key in keys} == keys
    every = {"global_attn_every_n_layers": 2, "num_hidden_layers": 4}
    layers = scratch.new_config({"model_type": "modernbert", **every}).layer_types
    assert layers == ["full_attention", "sliding_attention"] * 2
    with pytest.raises(UserError, match="position_buckets: no such key of bert"):
        scratch.new_config({"model_type": "bert", "position_buckets": 8})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "roberta-bose"}, ["preset: 'roberta-bose' is not known", "did you mean 'roberta-base'"]),
        ({"preset": "roberta-small", "num_hidden_layer": 3}, ["num_hidden_layer: no", "'num_hidden_layers'"]),
        ({"hidden_size": 32}, ["model_type: is missing", "gpt2"]),
        ({"model_type": "gpt3"}, ["model_type: 'gpt3' is not known", "did you mean 'gpt2'"]),
        ({"model_type": "gpt2", "type_vocab_size": 1}, ["type_vocab_size: no such key of gpt2"]),
        ({**ROBERTA, "hidden_size": "wide"}, ["[model.config]", "hidden_size"]),
        ({**ROBERTA, "hidden_size": 33}, ["[model.config]", "33"]),
        ({**ROBERTA, "vocab_size": 100}, ["vocab_size: is 100", "261 or more"]),
        ({**ROBERTA, "num_hidden_layers": 0}, ["num_hidden_layers: is 0"]),
        (GPT2, ["model of [model.config]: gpt2 is not made to predict masked"]),
        ({"model_type": "albert"}, ["albert cannot be trained layer by layer"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    new: Jobs, tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    for call in (fedstrata.run, fedstrata.forecast):
        with pytest.raises(UserError) as error:
            call(new("mlm", settings))
        assert "\n" not in str(error.value)
        assert not [word for word in words if word not in str(error.value)], error.value
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "found neither of name and"),
        ({"name": "x", "config": ROBERTA}, "found both of name and"),
        ({"name": "x", "tokenizer": "y"}, "tokenizer: goes with"),
    ],
)
def test_a_job_starts_from_one_thing(new: Jobs, model: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=rf"\[model\] .*{words}"):
        fedstrata.run({**new(), "model": model})


def test_an_encoder_is_no_causal_model(new: Jobs) -> None:
    with pytest.raises(UserError, match=r"model of \[model.config\]: roberta reads a text both ways"):
        fedstrata.run(new("clm", ROBERTA))


@pytest.mark.parametrize(
    ("kind", "config"), [("mlm", ROBERTA), ("clm", GPT2), ("classify", ROBERTA), ("mlm", DISTILBERT)]
)
def test_the_start_is_a_hugging_face_folder(new: Jobs, tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    """Whose weights are those that the architecture draws with the run's seed; no part of it counts as new."""
    told: list[Any] = []
    fedstrata.run(new(kind, config, method={"name": "none", "rounds": 0}), progress=told.append)
    start = tmp_path / "run" / "start"
    assert sorted(path.name for path in start.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    torch.manual_seed(Streams(0).integer(-1, SERVER, "init"))
    made = auto_class(kind).from_config(transformers.AutoConfig.from_pretrained(start))
    model = auto_class(kind).from_pretrained(start)
    for (name, ours), (_, drawn) in zip(model.named_parameters(), made.named_parameters(), strict=True):
        assert torch.equal(ours, drawn), name
    [event] = [event for event in told if isinstance(event, StageStarted)]
    assert event.notes == ("the tokenizer was trained on all clients' training rows",)
    unchanged, end = (load_file(place / "model.safetensors") for place in (start, tmp_path / "run/model"))
    assert all(torch.equal(unchanged[name], end[name]) for name in unchanged)
    assert str(Path(os.environ.get("TMPDIR", "/tmp"))) not in (tmp_path / "run/model/config.json").read_text()


def test_a_trained_tokenizer_gives_back_every_text(tmp_path: Path) -> None:
    texts = [text for text, _ in SENTENCES] * 3
    for masked, specials in ((True, list(scratch.SPECIAL)), (False, [scratch.END])):
        made = scratch.train_tokenizer(texts, 320, masked)
        assert len(made) == 320
        assert made.convert_ids_to_tokens(range(len(specials))) == specials
        for text in ("The kidney filters the blood.", "Zażółć 猫\n\t"):
            ids = made(text)["input_ids"]
            assert made.decode(ids, skip_special_tokens=True) == text
            plain = made(text, add_special_tokens=False)["input_ids"]
            assert ids == ([0, *plain, 2] if masked else plain)
        assert (
            made.backend_tokenizer.to_str()
            == scratch.train_tokenizer(texts, 320, masked).backend_tokenizer.to_str()
        )


@pytest.mark.parametrize("masked", [True, False])
def test_words_of_a_list_are_read_as_in_the_texts_that_a_tokenizer_was_trained_on(
    masked: bool, tmp_path: Path
) -> None:
    """Without the blank before it a word fell into other pieces than those that a model was pre-trained on."""
    made = scratch.train_tokenizer([text for text, _ in SENTENCES] * 3, 320, masked)
    made.save_pretrained(tmp_path)
    words = ["The", "kidney", "filters"]
    tagging, plain = fast_tokenizer(str(tmp_path), "tag"), fast_tokenizer(str(tmp_path), "mlm")
    read = tagging(words, is_split_into_words=True)
    assert read["input_ids"] == plain(" The kidney filters")["input_ids"]
    assert [word for word in dict.fromkeys(read.word_ids()) if word is not None] == [0, 1, 2]
    tagging.save_pretrained(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved(words, is_split_into_words=True)["input_ids"] == read["input_ids"]
    text = "kidney the"
    pieces = saved(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    if masked:
        assert "".join(text[begin:end] for begin, end in pieces) == "kidneythe"
    assert plain(text)["input_ids"] == made(text)["input_ids"]


@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_words_of_a_list_are_read_as_in_a_text_also_where_the_blank_is_no_matter_of_bytes(
    form: str, tmp_path: Path
) -> None:
    made = Tokenizer(models.BPE())
    if form == "llama":
        split = pre_tokenizers.Split(Regex(r" ?\w+|\W"), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.train_from_iterator([text for text, _ in SENTENCES] * 3, trainers.BpeTrainer(special_tokens=["<pad>"]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>").save_pretrained(tmp_path)
    tagging, plain = fast_tokenizer(str(tmp_path), "tag"), fast_tokenizer(str(tmp_path), "mlm")
    read = tagging(["the", "kidney", "the"], is_split_into_words=True)
    assert read["input_ids"] == plain(" the kidney the")["input_ids"]
    assert [word for word in dict.fromkeys(read.word_ids()) if word is not None] == [0, 1, 2]
    tagging.save_pretrained(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved("the kidney the")["input_ids"] == read["input_ids"], "a text, too"


def vocabulary(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def test_the_vocabulary_is_the_tokenizers_unless_the_job_says_so(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "words")
    given = str(tmp_path / "words")
    size = len(tokenizer())
    free = {key: value for key, value in ROBERTA.items() if key != "vocab_size"}
    texts = [text for text, _ in SENTENCES]

    def made(settings: dict[str, Any], name: str | None) -> Path:
        return scratch.init_from_config(
            settings, name, texts, tmp_path / str(time.monotonic_ns()), "mlm", None, None
        )

    assert vocabulary(made(free, given)) == size
    assert vocabulary(made({**free, "vocab_size": size + 9}, given)) == size + 9
    with pytest.raises(UserError, match=rf"vocab_size: is {size - 1}, but the tokenizer has {size} words"):
        made({**free, "vocab_size": size - 1}, given)
    learnt = made(free, None)
    assert 261 < vocabulary(learnt) == len(transformers.AutoTokenizer.from_pretrained(learnt)) < 50265
    assert vocabulary(made({**free, "vocab_size": 9000}, None)) == 9000
    config = transformers.AutoConfig.from_pretrained(made(free, given))
    assert config.pad_token_id == tokenizer().pad_token_id == 0, "the tokenizer's, not the preset's"
    cut = transformers.AutoTokenizer.from_pretrained(learnt)("the heart " * 999, truncation=True)["input_ids"]
    assert len(cut) == 64, "the config's 66 places, less the padding's and the one below it"


def test_a_given_tokenizer_is_looked_up_beside_the_job(new: Jobs, tmp_path: Path) -> None:
    gpt2_tokenizer().save_pretrained(tmp_path / "words")
    config = {key: value for key, value in GPT2.items() if key != "vocab_size"}
    made = new("clm", config, model={"tokenizer": "words"})
    (tmp_path / "job.toml").write_text(tomli_w.dumps(made))
    told: list[Any] = []
    fedstrata.run(tmp_path / "job.toml", progress=told.append)
    assert vocabulary(tmp_path / "run/start") == len(gpt2_tokenizer())
    notes = next(event for event in told if isinstance(event, StageStarted)).notes
    assert [note for note in notes if "the server can read" not in note] == []
    made["model"]["tokenizer"] = "./gone"
    with pytest.raises(UserError, match=r"\[model\] tokenizer: there is no folder"):
        fedstrata.run(made, {"output.dir": str(tmp_path / "other")})


def test_only_clients_training_rows_make_the_tokenizer(new: Jobs, tmp_path: Path) -> None:
    """No test row, and no row that no client holds."""
    (tmp_path / "train.csv").write_text("text,ward\n" + "aaaa bbbb,a\n" * 20)
    (tmp_path / "test.csv").write_text("text,ward\n" + "qqqq xxxx,a\n" * 20)
    data = {"train": str(tmp_path / "train.csv"), "test": str(tmp_path / "test.csv")}
    fedstrata.run(new("mlm", data=data, clients={"count": 2}))
    words = set(json.loads((tmp_path / "run/start/tokenizer.json").read_text())["model"]["vocab"])
    assert "aaaa" in words
    assert not {"qq", "xx"} & words


@pytest.mark.parametrize(("kind", "config"), [("mlm", ROBERTA), ("clm", GPT2)])
def test_a_forecast_is_the_runs_and_writes_nothing(
    new: Jobs, tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    made = new(kind, {key: value for key, value in config.items() if key != "vocab_size"})
    [forecast] = fedstrata.forecast(made).values()
    assert not (tmp_path / "run").exists()
    result = fedstrata.run(made)
    assert forecast["clients"]["up_bytes"] == result.bytes["up"]
    assert forecast["clients"]["setup_bytes"] == result.bytes["setup"]
    if kind == "clm":
        assert forecast["clients"]["train_flops"] == result.flops


def test_a_forecast_without_data_has_the_configs_vocabulary() -> None:
    made = {
        "model": {"config": {"preset": "gpt2-small"}},
        "task": {"kind": "clm"},
        "data": {"train": "-"},
        "method": {"name": "fedavg", "rounds": 1},
    }
    [forecast] = fedstrata.forecast(made).values()
    assert forecast["setup"]["down_bytes"] == 4 * 124_439_808


def test_stages_pre_train_from_nothing_and_classify(new: Jobs, tmp_path: Path) -> None:
    made = new("mlm", method={"rounds": 1})
    made["stages"] = [{"name": "pretrain"}, {"name": "finetune", "task": {"kind": "classify"}}]
    [forecast] = fedstrata.forecast(made).values()
    told: list[Any] = []
    result = fedstrata.run(made, progress=told.append)
    assert forecast["clients"]["up_bytes"] == result.bytes["up"]
    assert [event.notes for event in told if isinstance(event, StageStarted)][1][0] == "newly initialized: head"
    assert (tmp_path / "run/stages/pretrain/start/model.safetensors").exists()
    assert not (tmp_path / "run/stages/finetune/start").exists()


KILLED = """
import os, signal, sys, fedstrata
from fedstrata.models import scratch
place, when, job = sys.argv[1:]
moved = scratch.publish
def publish(folder, target):
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    moved(folder, target)
    if when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
scratch.publish = publish
fedstrata.run(job, {"output.dir": place})
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_killed_around_its_start_goes_on_to_the_same_bits(new: Jobs, tmp_path: Path, when: str) -> None:
    made = new("clm", GPT2)
    (tmp_path / "job.toml").write_text(tomli_w.dumps(made))
    whole = fedstrata.run(made)
    place = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, place, when, tmp_path / "job.toml"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL
    assert (place / "start").exists() == (when == "after")
    if when == "after":  # what is there is not made again
        stamp = (place / "start/model.safetensors").stat().st_mtime_ns
    result = fedstrata.run(made, {"output.dir": str(place)}, resume=True)
    if when == "after":
        assert (place / "start/model.safetensors").stat().st_mtime_ns == stamp
    ours, theirs = (load_file(each.model_folder / "model.safetensors") for each in (result, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_config_is_another_run(new: Jobs) -> None:
    fedstrata.run(new())
    with pytest.raises(UserError, match=r"its run began with model.config"):
        fedstrata.run(new("mlm", {**ROBERTA, "intermediate_size": 96}), resume=True)
