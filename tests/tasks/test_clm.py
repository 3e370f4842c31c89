"""Causal language modeling: what is predicted, from what, and the loss against Hugging Face's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

import fedstrata
from fedstrata.data.tokens import Tokens
from fedstrata.errors import UserError
from fedstrata.models import checkpoints, configs
from fedstrata.models.parts import part_tensors
from fedstrata.plan.messages import Positions
from fedstrata.tasks import Batch, Examples
from fedstrata.tasks.clm import CausalLM
from tiny import gpt2_tokenizer, model_of, tiny_config, tiny_model

Jobs = Callable[..., dict[str, Any]]
LENGTHS = (9, 16, 1, 5)
TASK = CausalLM(68)


def made_of(lengths: tuple[int, ...]) -> Examples:
    ids = np.random.default_rng(0).integers(5, 68, sum(lengths)).astype(np.int32)
    return Examples(Tokens(ids, np.cumsum([0, *lengths]), np.arange(len(lengths))))


def batch(lengths: tuple[int, ...] = LENGTHS, width: int | None = None) -> Batch:
    return TASK.batch(made_of(lengths), np.arange(len(lengths)), np.random.default_rng(0), width)


def test_every_token_with_one_before_it_is_predicted() -> None:
    examples, made = made_of(LENGTHS), batch(width=20)
    wanted = [examples.tokens[i][1:] for i in range(4)]
    assert made.targets.tolist() == np.concatenate(wanted).tolist()
    assert made.positions is not None
    assert [row.nonzero().flatten().tolist() for row in made.positions] == [list(range(n - 1)) for n in LENGTHS]
    assert made.inputs["attention_mask"].sum(1).tolist() == list(LENGTHS)
    assert made.work == Positions(80, 4 * 400, sum(LENGTHS) - 4)
    assert TASK.head_positions(np.array(LENGTHS), 20) == made.work.predicted


def test_the_loss_is_hugging_faces() -> None:
    """Of rows of one length, where its own loss has nothing padded to leave out."""
    model, made = tiny_model("gpt2", "clm").eval(), batch((12, 12, 12))
    ids = made.inputs["input_ids"]
    torch.testing.assert_close(TASK.loss(model, made), model(input_ids=ids, labels=ids).loss)


@torch.no_grad()
def test_the_loss_of_padded_rows_is_that_of_each_row_alone() -> None:
    model, examples = tiny_model("gpt2", "clm").eval(), made_of(LENGTHS)
    total = right = 0.0
    for i in range(4):
        ids = torch.from_numpy(examples.tokens[i].astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0, :-1]
        total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        right += float((logits.argmax(-1) == ids[0, 1:]).sum())
    count = sum(LENGTHS) - 4
    for width in (None, 24):
        assert float(TASK.loss(model, batch(width=width))) == pytest.approx(total / count, rel=1e-5)
    halves = [TASK.batch(examples, np.array(half), np.random.default_rng(0)) for half in ([0, 2], [1, 3])]
    scores = TASK.score(model, halves)
    mean = total / count
    expected = {"loss": mean, "perplexity": math.exp(mean), "accuracy": right / count}
    assert scores == pytest.approx(expected, rel=1e-4)


def test_a_batch_of_single_tokens_has_nothing_to_learn() -> None:
    model = tiny_model("gpt2", "clm")
    loss = TASK.loss(model, batch((1, 1)))
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def decoder() -> Any:
    """A BERT that its config says is a decoder."""
    return tiny_model("bert", "clm", is_decoder=True)


@pytest.mark.parametrize("make", [lambda: tiny_model("gpt2", "clm"), decoder], ids=["gpt2", "bert as a decoder"])
def test_a_later_token_changes_nothing_before_it(make: Callable[[], Any]) -> None:
    model = make().eval()
    assert configs.causal(model.config)
    ids = batch((12, 12)).inputs["input_ids"]
    other = ids.clone()
    other[:, 7] = (other[:, 7] + 1) % 60 + 5
    before, after = model(input_ids=ids).logits, model(input_ids=other).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra", "distilbert", "modernbert"])
def test_models_that_read_both_ways_are_refused(model_folder: Callable[..., Path], architecture: str) -> None:
    folder = str(model_folder(architecture))
    for refuse in (lambda: checkpoints.load(folder, "clm", None, 0), lambda: checkpoints.parts_of(folder, "clm")):
        with pytest.raises(UserError, match=f"{architecture} reads a text both ways, and 'clm' needs"):
            refuse()


def test_gpt2_is_refused_where_tokens_are_masked(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="gpt2 is not made to predict masked tokens"):
        checkpoints.load(str(model_folder("gpt2", head="clm")), "mlm", None, 0)


def test_gpt2_pads_with_its_end_and_keeps_no_past(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_folder("gpt2", head="clm")
    loaded = checkpoints.load(str(folder), "clm", None, 0, dropout=False)
    end = gpt2_tokenizer().eos_token_id
    assert (loaded.tokenizer.pad_token_id, loaded.model.config.pad_token_id) == (end, end)
    assert loaded.model(input_ids=torch.tensor([[5, 6]])).past_key_values is None
    assert {m.p for m in loaded.model.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    assert loaded.model.train()(input_ids=torch.full((2, 9), 7)).logits.equal(
        loaded.model.eval()(input_ids=torch.full((2, 9), 7)).logits
    )
    weights = {name: tensor.detach() for name, tensor in loaded.model.named_parameters()}
    checkpoints.save(loaded, weights, tmp_path / "model")
    saved, given = (json.loads((place / "config.json").read_text()) for place in (tmp_path / "model", folder))
    assert saved["use_cache"] is given["use_cache"] is True
    assert "transformer.wte.weight" in weights
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize("pads", [{}, {"pad_token_id": 0}])
def test_a_classifier_over_gpt2_reads_the_last_token(
    model_folder: Callable[..., Path], pads: dict[str, int]
) -> None:
    """Of each text, whatever is padded behind it, and by whatever token the config says."""
    loaded = checkpoints.load(str(model_folder("gpt2", head="clm", **pads)), "classify", ("a", "b"), 0)
    assert loaded.fresh == ("head",)
    short, long = (loaded.tokenizer(text)["input_ids"] for text in ("the heart", "the kidney filters the blood"))
    pad = loaded.tokenizer.pad_token_id
    model = loaded.model.eval()
    together = model(
        input_ids=torch.tensor([[*short, *[pad] * (len(long) - len(short))], long]),
        attention_mask=torch.tensor([[1] * len(short) + [0] * (len(long) - len(short)), [1] * len(long)]),
    ).logits
    torch.testing.assert_close(together[0], model(input_ids=torch.tensor([short])).logits[0])
    hidden = model.transformer(input_ids=torch.tensor([long])).last_hidden_state[0, -1]
    torch.testing.assert_close(together[1], model.score(hidden))


@pytest.mark.parametrize("method", ["fedavg", "fedbfpt", "fedbt", "fedsplitbert", "centralized"])
def test_a_job_and_its_forecast(job: Jobs, model_folder: Callable[..., Path], tmp_path: Path, method: str) -> None:
    """To the FLOP: nothing is drawn at random but the order."""
    made = job(method, "clm", train={"learning_rate": 1e-2, "epochs": 2})
    made["model"]["name"] = str(model_folder("gpt2", head="clm"))
    result = fedstrata.run(made)
    rel = 1e-2 if method == "fedsplitbert" else 1e-6  # the mean of the clients' perplexities
    assert result.score["perplexity"] == pytest.approx(math.exp(result.score["loss"]), rel=rel)
    lines = map(json.loads, (tmp_path / "run/rounds.jsonl").read_text().splitlines())
    losses = [line["score"]["loss"] for line in lines if line["client"] == "server"]
    assert losses[-1] < losses[0]
    [forecast] = fedstrata.forecast(made).values()
    assert forecast["clients"]["train_flops"] == result.flops
    assert forecast["clients"]["up_bytes"] == result.bytes["up"]
    tensors = tiny_model("gpt2", "clm").num_parameters()
    saved = checkpoints.auto_class("clm").from_pretrained(model_of(result))
    assert sum(p.numel() for p in saved.parameters()) == tensors


@pytest.mark.parametrize("kind", ["classify", "pair", "regress", "tag"])
def test_gpt2_under_the_other_tasks(
    job: Jobs, model_folder: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    rows = [{"text": ["the", "heart"], "more": "b", "label": ["O", "B-x"]}] * 6
    if kind != "tag":
        rows = [{"text": f"the heart {'eye' * (i % 2)}", "more": "the", "label": i % 2} for i in range(8)]  # type: ignore[misc]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    text = ["text", "more"] if kind == "pair" else "text"
    made = job("fedavg", kind, data={"train": str(path), "test": str(path), "text": text}, clients={"count": 2})
    made["model"]["name"] = str(model_folder("gpt2", head="clm"))
    assert fedstrata.run(made).status == "finished"
    [forecast] = fedstrata.forecast(made).values()
    assert forecast["total"]["peak_memory_bytes"] > 0


def test_fedbt_takes_it_for_pre_training(job: Jobs, model_folder: Callable[..., Path]) -> None:
    made = job("fedbt", "clm", method={"variant": "pl"})
    made["model"]["name"] = str(model_folder("gpt2", head="clm"))
    [forecast] = fedstrata.forecast(made).values()
    assert [round["layers"] for round in forecast["rounds"]] == [[0], [0]]


def test_the_tiny_gpt2_is_causal_by_its_kind() -> None:
    assert configs.causal(tiny_config("gpt2"))
    assert not configs.causal(tiny_config("bert"))


@pytest.mark.parametrize("settings", [{"eos_token_id": [7, 9], "max_new_tokens": 3}, {"temperature": 0.7}])
def test_a_model_generates_text_as_its_start_model_is_told_to(
    model_folder: Callable[..., Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """What ends a text, and how tokens are drawn, was left out; transformers refuses to save the second."""
    folder = model_folder("gpt2", head="clm")
    (folder / "generation_config.json").write_text(json.dumps(settings), "utf-8")
    for place in ("one", "two"):
        loaded = checkpoints.load(str(folder), "clm", None, 0)
        checkpoints.save(loaded, part_tensors(loaded.model, loaded.parts, loaded.parts.names), tmp_path / place)
        folder = tmp_path / place
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert {key: getattr(again, key) for key in settings} == settings
    classifier = checkpoints.load(str(folder), "classify", ("a", "b"), 0)
    checkpoints.save(classifier, {}, tmp_path / "three")
    assert not (tmp_path / "three" / "generation_config.json").exists()
