"""A model for use elsewhere: as ONNX, compared with the original, and pushed."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import fedstrata
from fedstrata.cli import app, main
from fedstrata.errors import UserError
from fedstrata.job.toml import read_toml
from fedstrata.runs.handover import export, export_sentences, model_folder, push
from full_disk import full_after
from tiny import SENTENCES, gpt2_tokenizer, tokenizer

Jobs = Callable[..., dict[str, Any]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_the_exported_model_gives_the_models_logits(job: Jobs, kind: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    rows = [
        {
            "text": text.split() if kind == "tag" else text,
            "label": ["O"] * len(text.split()) if kind == "tag" else label,
        }
        for text, label in SENTENCES
    ]
    if kind == "tag":
        rows[0]["label"][1] = "B-X"  # type: ignore[index]
    result = fedstrata.run(job("fedavg", kind, data={"train": rows, "test": rows}, method={"rounds": 1}))
    [whole, small], where = export(result.folder, int8=True)
    assert "plain texts, as the test rows cannot be read" in where, "they were in memory"
    assert whole.difference < 1e-4
    assert whole.agreement == 1
    assert small.bytes < whole.bytes
    assert result.model_folder is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.folder / "onnx")
    auto = {"classify": "AutoModelForSequenceClassification", "tag": "AutoModelForTokenClassification"}[kind]
    model = getattr(transformers, auto).from_pretrained(result.model_folder).eval()
    inputs = tokenizer(["the heart", "a stone in the kidney of the eye"], return_tensors="pt", padding=True)
    session = onnxruntime.InferenceSession(str(whole.path))
    [found] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    with torch.inference_mode():
        assert np.allclose(found, model(**inputs).logits.numpy(), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_of_numbers_no_share_of_equal_predictions_is_told(
    job: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was 100 %, however far 8-bit weights were off: of one logit the largest is always the first."""
    pytest.importorskip("onnxruntime")
    rows = tmp_path / "numbers.csv"
    rows.write_text("text,label\n" + "".join(f'"{text}",{len(text)}\n' for text, _ in SENTENCES), "utf-8")
    made = job("fedavg", "regress", data={"train": str(rows), "test": str(rows)}, method={"rounds": 1})
    result = fedstrata.run(made)
    caplog.clear()
    logging.getLogger("torch").addHandler(caplog.handler)
    done = CliRunner().invoke(app, ["export", str(result.folder), "--onnx", "--int8"])
    logging.getLogger("torch").removeHandler(caplog.handler)
    assert done.exit_code == 0, done.output
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings, "torch's exporter wrote lines of its log between the command's"
    assert done.output.count("MB  predicted numbers within ") == 2
    assert "of the predictions" not in done.output


@pytest.mark.filterwarnings("ignore")
def test_texts_longer_than_the_model_reads_are_compared_as_far_as_it_does(job: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    rows = tmp_path / "long.csv"
    lines = "".join(f'"{text * 20}",{label}\n' for text, label in SENTENCES)
    rows.write_text(f"text,label\n{lines}", "utf-8")
    result = fedstrata.run(job("fedavg", "classify", data={"test": str(rows)}, method={"rounds": 1}))
    [report], where = export(result.folder)
    assert (report.texts, where) == (12, "12 test rows")
    assert report.difference < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_tokenizer_has_no_token_for_padding_pads_with_its_last_one(
    model_folder: Callable[..., Path],
) -> None:
    """GPT-2's has none; the export ended with a traceback of the tokenizer."""
    pytest.importorskip("onnxruntime")
    [report], _ = export(model_folder("gpt2", head="classify"))
    assert report.difference < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_a_form_that_does_not_run_is_told_and_removed(tmp_path: Path) -> None:
    """Qwen2's takes texts of the exporter's example alone; the export ended with a traceback of onnxruntime."""
    pytest.importorskip("onnxruntime")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Qwen2Config(**sizes, num_key_value_heads=1, vocab_size=200, pad_token_id=0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    gpt2_tokenizer().save_pretrained(tmp_path)
    for _ in range(2):  # what is left is taken for no other model
        with pytest.raises(UserError, match=r"cannot be run by onnxruntime, so nothing is written .*Expand"):
            export(tmp_path)
    assert not (tmp_path / "onnx").exists()


@pytest.mark.filterwarnings("ignore")
def test_clients_that_test_on_rows_of_their_own_are_compared_on_these(job: Jobs) -> None:
    """It was on all rows, most of which are training rows."""
    pytest.importorskip("onnxruntime")
    made = job("fedavg", "classify", clients={"test": 0.25}, method={"rounds": 1})
    del made["data"]["test"]
    [report], where = export(fedstrata.run(made).folder)
    assert (report.texts, where) == (3, "3 test rows")


@pytest.mark.filterwarnings("ignore")
def test_the_last_stages_rows_are_compared_on_whatever_the_times_of_files(job: Jobs, tmp_path: Path) -> None:
    """In a copy of the folder they were an earlier stage's, if its files were written later."""
    pytest.importorskip("onnxruntime")
    rows = tmp_path / "rows.csv"
    rows.write_text("".join(f'"{text}",{label}\n' for text, label in [("text", "label"), *SENTENCES[:4]]), "utf-8")
    made = job("fedavg", method={"rounds": 1})
    del made["task"]
    first, second = ({"name": name, "task": {"kind": kind}} for name, kind in (("a", "mlm"), ("b", "classify")))
    folder = fedstrata.run({**made, "stages": [first, {**second, "data": {"test": str(rows)}}]}).folder
    os.utime(folder / "stages" / "b" / "job.toml", (1, 1))
    [report], where = export(folder)
    assert (report.texts, where) == (4, "4 test rows")


@pytest.mark.filterwarnings("ignore")
def test_a_run_records_sources_by_their_names_so_that_its_job_is_played_and_exported(
    job: Jobs, tmp_path: Path
) -> None:
    """They were written as one text, which is the name of no file."""
    pytest.importorskip("onnxruntime")
    made = job("fedavg", "classify", method={"rounds": 1})
    file = made["data"]["test"]
    sources = {"north": file, "south": [file]}
    made["data"] |= {"train": sources, "test": {"b": file, "a": file}}
    del made["clients"]
    result = fedstrata.run(made)
    recorded = read_toml(result.folder / "job.toml")
    assert recorded["data"]["train"] == sources
    again = fedstrata.run(result.folder / "job.toml", {"output.dir": str(tmp_path / "again")})
    assert again.score == result.score
    assert export(result.folder)[1] == "24 test rows"
    made["data"]["train"] = {name: sources[name] for name in reversed(sources)}
    with pytest.raises(UserError, match=r"its run began with data\.train = .* the job now says"):
        fedstrata.run(made, resume=True)


@pytest.mark.parametrize("form", ["--onnx", "--sentence-transformers"])
def test_another_model_or_a_file_is_not_written_over(
    form: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """ONNX wrote its config and tokenizer over those of the model that was there."""
    other, file = model_folder(layers=1), tmp_path / "notes"
    file.write_text("stays")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    for place, sentence in ((other, "holds another model"), (file, "is a file")):
        done = CliRunner().invoke(app, ["export", str(model_folder()), form, "--out", str(place)])
        assert done.exit_code == 2, done.output
        assert done.stderr == f"fedstrata: {place}: {sentence}; name a new or empty folder with --out\n"
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    assert file.read_text() == "stays"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "package"), [("--onnx", "onnxruntime"), ("--sentence-transformers", "sentence_transformers")]
)
def test_a_full_disk_leaves_the_export_of_before_or_none(
    form: str, package: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Half of one was left, which the next call took for another model's; torch's library ended in a traceback."""
    pytest.importorskip(package)
    whole, new = tmp_path / "whole", tmp_path / "new"
    words = ["export", str(model_folder(layers=1)), form, "--out"]
    assert CliRunner().invoke(app, [*words, str(whole)]).exit_code == 0
    files = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    for place in (whole, new):
        with full_after(20_000):
            done = CliRunner().invoke(app, [*words, str(place)])
        assert done.exit_code == 1, done.output
        assert re.fullmatch(rf"fedstrata: {place}(/\S+)?: File too large", done.stderr.splitlines()[-1])
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == files
    assert not new.exists()
    assert CliRunner().invoke(app, [*words, str(new)]).exit_code == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", [None, "psum"])
def test_sentence_transformers_gives_the_mean_of_the_models_hidden_states(job: Jobs, head: str | None) -> None:
    package = pytest.importorskip("sentence_transformers")
    own = {"head": {"kind": head}} if head else {}
    result = fedstrata.run(job("fedavg", "classify", 4, method={"rounds": 1}, **own))
    done = CliRunner().invoke(app, ["export", str(result.folder), "--sentence-transformers"])
    assert done.exit_code == 0, done.output
    assert "compared on 12 test rows" in done.output
    over = ["export", str(result.folder), "--sentence-transformers", "--out", str(result.model_folder)]
    assert "holds another model" in CliRunner().invoke(app, over).output
    texts = ["the heart", "a stone in the kidney of the eye"]
    found = package.SentenceTransformer(str(result.folder / "sentence-transformers"), device="cpu").encode(texts)
    model, tokenizer = result.model()
    encoder = getattr(model, model.base_model_prefix).eval()
    for text, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            states = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert np.allclose(vector, states.mean(0).numpy(), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_an_exported_encoder_cuts_texts_at_what_it_reads(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where the tokenizer names no number, and the model counts its places from the padding's on."""
    package = pytest.importorskip("sentence_transformers")
    folder, words = model_folder("roberta", head="classify"), tokenizer()
    words.model_max_length = int(1e30)
    words.save_pretrained(folder)
    done = CliRunner().invoke(
        app, ["export", str(folder), "--sentence-transformers", "--out", str(tmp_path / "st")]
    )
    assert done.exit_code == 0, done.output
    made = package.SentenceTransformer(str(tmp_path / "st"), device="cpu")
    assert made.encode("the heart " * 99).shape == (32,)
    assert made.max_seq_length == 65


@pytest.mark.filterwarnings("ignore")
def test_texts_are_cut_to_what_the_model_reads_where_its_tokenizer_does_not_say_it(
    job: Jobs, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """As the one of a model from scratch does not: a pipeline that truncates, and a text's vector, were errors."""
    package = pytest.importorskip("sentence_transformers")
    folder, rows = model_folder("roberta", max_position_embeddings=34), tmp_path / "long.csv"
    kept = transformers.AutoTokenizer.from_pretrained(folder)
    kept.model_max_length = int(1e30)
    kept.save_pretrained(folder)
    lines = "".join(f'"{text * 9}",{label}\n' for text, label in SENTENCES)
    rows.write_text(f"text,label\n{lines}", "utf-8")
    made = job("fedavg", "classify", data={"test": str(rows)}, model={"name": str(folder)}, method={"rounds": 1})
    result = fedstrata.run(made)
    assert result.pipeline()("the heart " * 50, truncation=True)[0]["label"]
    for name in (folder, result.folder):  # of a hub's, too
        report, _ = export_sentences(name, tmp_path / "vectors")
        assert report.difference < 1e-5
        found = package.SentenceTransformer(str(tmp_path / "vectors"), device="cpu")
        assert found.encode("the heart " * 50).shape == (32,)


def test_a_model_that_is_no_encoder_has_no_form_of_one(model_folder: Callable[..., Path]) -> None:
    pytest.importorskip("sentence_transformers")
    done = CliRunner().invoke(app, ["export", str(model_folder("gpt2", head="clm")), "--sentence-transformers"])
    assert done.exit_code == 2
    assert "GPT2LMHeadModel reads from left to right" in done.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "names no form; expected --onnx or --sentence-transformers"),
        (["--onnx", "--sentence-transformers"], "names two forms"),
        (["--int8", "--sentence-transformers"], "--int8 is a form of --onnx alone"),
    ],
)
def test_one_form_at_a_time(options: list[str], sentence: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(tmp_path), *options])
    assert done.exit_code == 2
    assert sentence in done.output


@pytest.mark.parametrize("damage", ["pickle", "half", "logging", "pipeline", {}, None])
def test_a_folder_whose_model_cannot_be_loaded_is_refused_in_a_sentence(
    model_folder: Callable[..., Path], damage: Any
) -> None:
    """It ended with a traceback: of weights that are a pickle, or that were cut, and of a class that is none."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("sentence_transformers")
    folder = model_folder(head="classify")
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "pickle":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(os.getcwd, 2))
    elif damage == "half":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [damage]}))
        with pytest.raises(UserError, match=r"its config names the model .*, which transformers does not"):
            export(folder)
        return
    for use in (export, export_sentences):
        with pytest.raises(UserError, match="holds no usable model: "):
            use(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for use in (model_folder, export, export_sentences, lambda folder: push(folder, "a/b")):
        with pytest.raises(UserError, match="holds no model"):
            use(tmp_path)


def test_a_run_of_personal_models_says_where_they_are(job: Jobs) -> None:
    """It said that the run's folder is none."""
    folder = fedstrata.run(job("fedsplitbert", "classify", method={"rounds": 1})).folder
    with pytest.raises(
        UserError, match=r"each client has a model of its own; .* such as .*clients/client-0/model$"
    ):
        model_folder(folder)
    assert model_folder(folder / "clients" / "client-0" / "model").name == "model"


@pytest.mark.filterwarnings("ignore")
def test_a_clients_model_is_compared_on_its_test_rows_and_the_shared_parts_are_none(job: Jobs) -> None:
    """It was compared on plain texts, and the shared parts were exported over an untrained rest."""
    pytest.importorskip("onnxruntime")
    made = job("fedsplitbert", "classify", clients={"test": 0.25}, method={"rounds": 1})
    del made["data"]["test"]
    folder = fedstrata.run(made).folder
    with pytest.raises(UserError, match=r"shared: holds what the clients have in common.*clients/NAME/model$"):
        export(folder / "shared")
    assert not (folder / "shared" / "onnx").exists()
    [report], where = export(folder / "clients" / "client-1" / "model")
    assert (report.texts, where) == (1, "1 test row")


def test_adapters_alone_are_no_model_to_export(job: Jobs) -> None:
    pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    made = job("fedavg", "classify", adapter={"kind": "lora", "rank": 2, "merged_model": False})
    folder = fedstrata.run(made).folder
    for use in (model_folder, export, export_sentences, lambda folder: push(folder, "a/b")):
        with pytest.raises(UserError, match=r"no plain model .* to push the adapters, .*adapter"):
            use(folder)
    for form in ("--onnx", "--sentence-transformers"):
        done = CliRunner().invoke(app, ["export", str(folder / "adapter"), form])
        assert done.exit_code == 2
        assert "holds adapters, which are exported with the model" in done.output
    assert model_folder(folder / "adapter") == folder / "adapter"


def test_push_uploads_nothing_that_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder from somebody else held a link to a file of whoever pushed it."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the hub is asked"))
    (tmp_path / "own").write_text("secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "notes.txt").symlink_to(tmp_path / "own")
    with pytest.raises(UserError, match=r"push: .*notes.txt is a link to .*own, which would be uploaded"):
        push(tmp_path, "a/b")


def test_push_uploads_the_models_folder_and_is_private(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls = list[tuple[str, Any]]()

    class Hub:
        token = "secret"

        def create_repo(self, name: str, **how: Any) -> str:
            calls.append((name, how["private"]))
            return f"https://hub/{name}"

        def upload_folder(self, **how: Any) -> None:
            calls.append((how["repo_id"], how["folder_path"]))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    result = fedstrata.run(job("fedavg", "classify", method={"rounds": 1}))
    assert push(result.folder, "lab/model") == "https://hub/lab/model"
    assert calls == [("lab/model", True), ("lab/model", str(result.model_folder))]


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_nothing_is_pushed_that_nobody_has_confirmed(
    answer: str,
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a terminal, as in a script, it ended with a traceback."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    with pytest.raises(SystemExit) as ended:
        main(["push", str(model_folder()), "our-lab/findings"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith("fedstrata: push: not confirmed; nothing was uploaded; --yes does not ask\n")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "adapter_config.json: cannot be read; expected a table in JSON"),
        ("[]", "adapter_config.json: cannot be read; expected a table in JSON"),
        ("{}", "push: not confirmed"),
        ('{"base_model_name_or_path": null}', "push: not confirmed"),
    ],
)
def test_a_push_of_adapters_whose_table_names_no_base_ends_in_a_sentence(
    tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text(content)
    end = CliRunner().invoke(app, ["push", str(tmp_path), "a/b"])
    assert (end.exit_code, sentence in end.output) == (2, True)


def test_a_push_counts_files_of_folders_and_says_which_path_adapters_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (tmp_path / "onnx").mkdir()
    for name in ("config.json", "onnx/model.onnx"):
        (tmp_path / name).write_bytes(bytes(600_000))
    for base, noted in (("lab/bert", False), ("/home/jane/bert", True)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        with pytest.raises(SystemExit):
            main(["push", str(tmp_path), "lab/findings"])
        said = capsys.readouterr().out
        assert f"3 files of {tmp_path}, 1.2 MB," in said
        assert (f"name {base}, which no other machine has, as the base" in said) == noted
