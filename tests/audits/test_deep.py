"""What a trained model tells of the texts it was trained on: membership, and texts put in on purpose."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import fedstrata
from fedstrata.audits import canaries, short_training, text_gradients
from fedstrata.audits.canaries import exposures
from fedstrata.audits.membership import LEAST, SHADOWS, confidence, halves, likelihood_ratio, membership
from fedstrata.audits.some_texts import masked_in_turn, taken, together
from fedstrata.audits.text_gradients import ATTACK
from fedstrata.cli import app
from fedstrata.client.private import Private
from fedstrata.data.tokens import Tokens
from fedstrata.tasks import Examples
from fedstrata.tasks.mlm import MaskedLM
from tiny import words

Jobs = Callable[..., dict[str, Any]]
Stage = dict[str, Any]
HARD = {"learning_rate": 3e-3, "epochs": 15, "batch_size": 8, "dropout": False}
"""A training after which every text is known by heart."""
STILL = {"learning_rate": 1e-12, "epochs": 1, "batch_size": 8}
"""One that changes nothing."""


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A file with 80 texts of random words and classes drawn without regard to them."""
    draw, known = random.Random(1), [word for word in words() if word != "."]
    lines = [f"{' '.join(draw.choices(known, k=8))},{draw.choice(['a', 'b', 'c'])}" for _ in range(80)]
    path = tmp_path / "texts.csv"
    path.write_text("text,label\n" + "\n".join(lines) + "\n", "utf-8")
    return str(path)


@pytest.fixture
def deep_job(job: Jobs, texts: str) -> Jobs:
    """A job over those texts: two clients, a third of the rows held out."""

    def make(kind: str, /, **tables: Any) -> dict[str, Any]:
        made = job("fedavg", kind, 2, **{"clients": {"count": 2}, "method": {"rounds": 1}, **tables})
        made["data"] = {"train": texts, "holdout": 0.4}
        return made

    return make


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer candidates and canaries: a tiny model is quick, and the suite is long."""
    monkeypatch.setattr(canaries, "CANDIDATES", 60)
    monkeypatch.setattr(canaries, "EACH", 2)


def deep(job: dict[str, Any], public: str) -> Stage:
    [stage] = fedstrata.audit(job, attacks=["class_head"], public=public, deep=True)["stages"]
    found: Stage = stage
    return found


def figures(stage: Stage, channel: str, attack: str) -> dict[str, Any]:
    return dict(next(f for f in stage["findings"] if f["channel"] == channel and attack in f["attack"])["figures"])


def test_what_is_learned_by_heart_is_told_apart(
    deep_job: Jobs, public: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canaries, "EACH", 8)  # of two the order would be left to chance
    job = deep_job("classify", train=HARD)
    fedstrata.run(job)
    stage = deep(job, public)
    for attack in ("calibrated loss", "LiRA"):
        found = figures(stage, "short training", attack)
        assert found["AUC"]["low"] > 0.6
        assert not found["AUC"]["holds_chance"]
        assert found["TPR at 1 % FPR"]["value"] > 3 * found["TPR at 1 % FPR"]["chance"]
        assert figures(stage, "final model", attack)["AUC"]["low"] > 0.5
    bits = [figures(stage, "short training", f"put {n}")["exposure"]["value"] for n in ("once", "10", "100")]
    assert bits[0] <= bits[1] <= bits[2]
    assert bits[2] > 3
    assert all(play["steps"] for play in stage["plays"])


@pytest.mark.parametrize("kind", ["classify", "mlm"])
def test_what_has_not_been_trained_is_at_chance(kind: str, deep_job: Jobs, public: str) -> None:
    stage = deep(deep_job(kind, train=STILL), public)
    found = [f for f in stage["findings"] if f["channel"] == "short training"]
    assert len(found) == 4 + len(canaries.TIMES)
    for each in found[:4]:
        assert each["figures"]["AUC"]["holds_chance"]
    for each in found[4:]:
        assert each["figures"]["exposure"]["value"] < 5
    assert any("no final model is attacked" in note for note in stage["notes"])


def test_a_masked_model_remembers_what_it_saw_often(deep_job: Jobs, public: str) -> None:
    stage = deep(deep_job("mlm", train={**HARD, "learning_rate": 1e-3, "epochs": 4}), public)
    once, often = (figures(stage, "short training", f"put {n}")["exposure"] for n in ("once", "100"))
    assert once["value"] < often["value"]
    assert not often["holds_chance"]


def test_a_run_of_another_job_is_not_attacked(deep_job: Jobs, public: str) -> None:
    job = deep_job("classify", train=STILL)
    fedstrata.run(job)
    job["train"] = {**job["train"], "seed": 5}
    stage = deep(job, public)
    assert any("another job's" in note and "train.seed" in note for note in stage["notes"])
    assert not any(f["channel"] == "final model" for f in stage["findings"])


@pytest.mark.parametrize("place", ["start", "final"])
def test_a_model_that_has_changed_since_is_not_attacked(
    place: str, deep_job: Jobs, public: str, tmp_path: Path
) -> None:
    job = deep_job("classify", train=STILL)
    fedstrata.run(job)
    assert figures(deep(job, public), "final model", "calibrated loss")
    folder = Path(job["model"]["name"]) if place == "start" else tmp_path / "run" / "model"
    tensors = load_file(folder / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].numel())
    save_file({**tensors, name: tensors[name] * 1.5}, folder / "model.safetensors", {"format": "pt"})
    stage = deep(job, public)
    reason = "began from other weights" if place == "start" else "not as the run has left it"
    assert any("no final model is attacked" in note and reason in note for note in stage["notes"])
    assert not any(f["channel"] == "final model" for f in stage["findings"])


def test_noise_on_every_example_brings_it_to_chance(deep_job: Jobs, public: str) -> None:
    """And a step for which nobody is drawn is no error."""
    privacy = {"level": "example", "noise": 20.0}
    stage = deep(
        deep_job("classify", train={**HARD, "epochs": 3}, task={"labels": list("abc")}, privacy=privacy), public
    )
    for attack in ("calibrated loss", "LiRA", ATTACK):
        assert figures(stage, "short training", attack)["AUC"]["holds_chance"]
    assert figures(stage, "short training", "put 100")["exposure"]["value"] < 5.5
    assert any("more than its epsilon" in note for note in stage["notes"])


def test_a_step_for_which_nobody_is_drawn_is_named(deep_job: Jobs, public: str) -> None:
    """Its message has no finding, which is no all-clear."""
    tables = {"task": {"labels": list("abc")}, "privacy": {"level": "example", "noise": 20.0}}
    for seed in range(8):
        stage = deep(deep_job("classify", train={**STILL, "batch_size": 1, "seed": seed}, **tables), public)
        [step] = [play for play in stage["plays"] if play["setting"] == "membership, 1 step"]
        attacked = any(f["attack"] == ATTACK and f["setting"] == "1 step" for f in stage["findings"])
        assert attacked is bool(step["texts"])
        said = "membership, 1 step: the draw of examples took none of the texts, so its message was not attacked"
        assert (said in stage["notes"]) is not attacked
        if not attacked:
            return
    raise AssertionError("one of eight draws of one text is expected to be empty")


def test_every_training_has_the_noise_of_the_clients_own_rounds(
    deep_job: Jobs, public: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrated anew, that of fewer texts would be larger: the run has less of it."""
    told, made = [], Private.example_noise

    def noted(self: Private, draw: Any, examples: int) -> Any:
        found = made(self, draw, examples)
        assert found is not None
        told.append((examples, found.noise))
        return found

    monkeypatch.setattr(Private, "example_noise", noted)
    job = deep_job("classify", task={"labels": list("abc")}, privacy={"level": "example", "epsilon": 4.0})
    job["clients"]["count"] = 1
    notes = deep(job, public)["notes"]
    before = fedstrata.forecast(job)["fedavg"]["privacy"]["clients"]["client-0"]["noise"]
    assert len({examples for examples, _ in told}) > 2
    assert {noise for _, noise in told} == {before}
    assert any("draw from 40 texts or more, where the run takes 24 and draws from 48" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "tables", "note"),
    [
        ("fedavg", {"privacy": {"sum_only": True}, "clients": {"count": 3}}, "single messages are masked"),
        ("local", {}, "nothing leaves the clients"),
    ],
)
def test_where_no_message_is_seen_the_final_model_is_attacked(
    name: str, tables: dict[str, Any], note: str, deep_job: Jobs, public: str
) -> None:
    job = deep_job("classify", train={**HARD, "epochs": 2}, **tables)
    job["method"]["name"] = name
    fedstrata.run(job)
    stage = deep(job, public)
    assert any("no short training" in line and note in line for line in stage["notes"])
    assert {(f["channel"], f["attack"]) for f in stage["findings"]} == {("final model", "calibrated loss")}


def test_the_words_of_a_canary_have_tags_of_their_own(deep_job: Jobs, public: str, tmp_path: Path) -> None:
    draw, known = random.Random(2), words()
    rows = [{"text": draw.choices(known, k=5), "label": draw.choices(["O", "B-X"], k=5)} for _ in range(40)]
    path = tmp_path / "tags.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    job = deep_job("tag", train={**HARD, "epochs": 2})
    job["data"] = {"train": str(path), "holdout": 0.5}
    assert not figures(deep(job, public), "short training", "put 100")["exposure"]["holds_chance"]


def test_taken_examples_keep_their_tokens_and_labels() -> None:
    """With a label for each example, and with one for each token."""
    offsets, ids = np.array([0, 2, 5, 9]), np.arange(9, dtype=np.int32)
    rows, types = np.arange(3), np.arange(9).astype(np.int8)
    plain = Examples(Tokens(ids, offsets, rows, types=types), np.array([7, 8, 9]))
    tagged = Examples(Tokens(ids, offsets, rows, words=10 + np.arange(9)), 20 + np.arange(9))
    for whole in (plain, tagged):
        found = together(taken(whole, np.array([2, 0])), taken(whole, np.array([1])))
        assert [found.tokens[i].tolist() for i in range(3)] == [[5, 6, 7, 8], [0, 1], [2, 3, 4]]
    mixed = together(taken(plain, np.array([2, 0])), taken(plain, np.array([1])))
    assert mixed.labels is not None
    assert mixed.labels.tolist() == [9, 7, 8]
    assert mixed.tokens.types.tolist() == [5, 6, 7, 8, 0, 1, 2, 3, 4]
    tags = taken(tagged, np.array([2, 0]))
    assert tags.labels is not None
    assert tags.labels.tolist() == [25, 26, 27, 28, 20, 21]
    assert tags.tokens.words.tolist() == [15, 16, 17, 18, 10, 11]


def test_a_masked_canary_is_read_token_by_token() -> None:
    """Each row of a canary's batch hides one token, special ones never, and asks for it."""
    task = MaskedLM(4, 0, np.array([0, 2, 3, 4]), 20)
    tokens = Tokens(np.array([2, 9, 8, 3], np.int32), np.array([0, 4]), np.arange(1))
    [batch] = masked_in_turn(task, Examples(tokens))
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 8, 3], [2, 9, 4, 3]]
    assert batch.targets.tolist() == [9, 8]
    assert isinstance(batch.positions, torch.Tensor)
    assert batch.positions.nonzero().tolist() == [[0, 1], [1, 2]]


def test_held_out_texts_are_nobodys(deep_job: Jobs, texts: str, public: str) -> None:
    """Test rows that are training rows too are left out: here all are, so that nothing is left to compare with."""
    job = deep_job("classify", train=STILL)
    job["data"] = {"train": texts, "test": texts}
    fedstrata.run(job)
    stage = deep(job, public)
    assert any("0 test texts that no client trains on" in note for note in stage["notes"])
    assert not any(f["channel"] == "final model" for f in stage["findings"])


def test_too_few_texts_are_said(job: Jobs, public: str) -> None:
    stage = deep(job("fedavg", "classify", 2, train=STILL, method={"rounds": 1}), public)
    assert any(f"fewer than {LEAST} distinct texts" in note for note in stage["notes"])
    assert not any("AUC" in f["figures"] for f in stage["findings"])


def test_long_trainings_are_cut_and_it_is_said(
    deep_job: Jobs, public: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_training, "WORK", 1e8)
    stage = deep(deep_job("classify", train={**HARD, "epochs": 40}), public)
    assert any("fewer times than the run's 40" in note for note in stage["notes"])
    steps = {play["setting"]: play["steps"] for play in stage["plays"]}
    assert steps["membership target"] < 40


def test_the_command_shows_and_writes_it(
    deep_job: Jobs, public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(deep_job("classify", train=STILL)), "utf-8")
    done = CliRunner().invoke(app, ["audit", str(path), "--public", public, "--deep", "--attacks", "class_head"])
    assert done.exit_code == 0, done.output
    assert "canary put 100 times: among 60 others" in done.stdout
    record = (tmp_path / "run" / "audit.json").read_text("utf-8")
    assert "short training" in record
    assert not any(line.split(",")[0] in record for line in (tmp_path / "texts.csv").read_text().splitlines()[1:])
    assert json.loads(record)["stages"][0]["findings"]


def test_exposure_is_that_of_the_paper() -> None:
    """Of 7 candidates: the first of 8 has 3 bits, the last none; the chance is the mean over all ranks."""
    others = np.arange(7.0)
    assert exposures(np.array([7.5]), others)["exposure"].value == 3.0
    assert exposures(np.array([-1.0]), others)["exposure"].value == 0.0
    assert exposures(np.array([5.5]), others)["exposure"].value == 2.0
    chance = exposures(np.array([7.5]), others)["exposure"].chance
    assert chance == pytest.approx(np.mean([3 - np.log2(rank) for rank in range(1, 9)]))
    assert exposures(np.array([7.5, 3.5]), others)["ranked first"].count == (1, 2)


def test_the_interval_of_an_exposure_holds_chance_where_there_is_nothing_else() -> None:
    """Five canaries among 250, their ranks drawn: it is outside in about one of twenty cases."""
    rng = np.random.default_rng(0)
    found = [exposures(rng.random(5), rng.random(250))["exposure"] for _ in range(1000)]
    below, above = (sum(way) for way in zip(*((f.high < f.chance, f.low > f.chance) for f in found), strict=True))
    assert 10 <= below <= 40
    assert 10 <= above <= 40
    first = exposures(np.full(5, 2.0), rng.random(250))["exposure"]
    assert first.low > 2 * first.chance
    assert first.value == first.high


def test_the_threshold_is_not_set_by_what_is_counted() -> None:
    """Of many texts whose scores tell nothing 1 % stand above it, of members as of others."""
    rng = np.random.default_rng(0)
    member = np.arange(8000) < 4000
    found = membership(rng.normal(size=8000), member, rng)
    assert found["AUC"].holds_chance
    assert found["TPR at 1 % FPR"].holds_chance
    assert found["FPR there"].holds_chance
    assert found["TPR at 1 % FPR"].chance == pytest.approx(0.01, rel=0.01)
    assert found["FPR there"].count[1] == 2000
    few = membership(rng.normal(size=40), np.arange(40) < 20, rng)
    assert few["TPR at 1 % FPR"].chance == pytest.approx(1 / 11)  # the highest of ten


def test_shadow_models_come_in_complements() -> None:
    inside = halves(np.random.default_rng(0), 41)
    assert inside.shape == (1 + SHADOWS, 41)
    assert (inside[1:].sum(0) == SHADOWS // 2).all()
    assert inside[0].sum() == 20
    assert (inside[1] != inside[3]).any()


def test_the_ratio_looks_at_models_without_the_text() -> None:
    """By hand: two shadow models per text outside, whatever those inside say."""
    inside = np.array([[True, False], [False, True], [True, False], [False, True]])
    shadows = np.array([[9.0, 0.5], [0.2, 9.0], [9.0, 0.7], [0.4, 9.0]])
    trust = confidence(np.array([[0.2, 0.4], [0.5, 0.7]]))
    spread = np.sqrt(((trust - trust.mean(1, keepdims=True)) ** 2).sum() / 2)
    target = np.array([0.1, 0.6])
    expected = (confidence(target) - trust.mean(1)) / spread
    assert likelihood_ratio(target, shadows, inside) == pytest.approx(expected)


def test_confidence_is_the_logit() -> None:
    p = np.array([0.01, 0.5, 0.99])
    assert confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert confidence(np.array([60.0, 4e4])).tolist() == [-60, -4e4], "squared errors are told apart, too"


STEP = {"optimizer": "sgd", "learning_rate": 0.1, "epochs": 1, "batch_size": 4, "dropout": False}
"""One whose steps have few texts."""


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("fedavg", {}),
        ("fedbt", {}),
        ("fedbt", {"method": {"local_layers": 1}}),  # without the layer below
        ("fedavg", {"adapter": {"kind": "lora"}}),
    ],
)
def test_the_texts_of_a_step_are_told_from_its_message(
    name: str, tables: dict[str, Any], deep_job: Jobs, public: str
) -> None:
    """Whatever is sent: upper layers and adapters too."""
    job = deep_job("classify", train=STEP, **tables)
    job["method"]["name"] = name
    [step, _] = [f for f in deep(job, public)["findings"] if f["attack"] == ATTACK]
    assert step["setting"] == "1 step"
    assert step["figures"]["AUC"]["value"] > 0.85
    assert step["figures"]["AUC"]["low"] > 0.6


def test_they_are_not_told_from_the_message_of_other_texts(
    deep_job: Jobs, public: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, scores, others = short_training.ShortTrainings.train, text_gradients.scores, []

    def both(self: Any, name: str, examples: Examples, index: Any, steps: int | None = None) -> Any:
        if steps == 1:
            rest = np.setdiff1d(np.arange(len(examples)), index)
            others.append(train(self, "others", examples, rest, 1))
        return train(self, name, examples, index, steps)

    monkeypatch.setattr(short_training.ShortTrainings, "train", both)
    monkeypatch.setattr(text_gradients, "scores", lambda *args: scores(*args[:-1], [others[0]] * 2))
    found = [f for f in deep(deep_job("classify", train=STEP), public)["findings"] if f["attack"] == ATTACK]
    assert [each["figures"]["AUC"]["low"] <= 0.5 for each in found] == [True, True]


def test_all_numbers_of_a_change_are_read(deep_job: Jobs, public: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise on each of them a draw tells too little: the texts are found by the others alone, too."""
    change = text_gradients._change

    def others(*args: Any) -> torch.Tensor:
        numbers = change(*args)
        drawn = torch.randint(len(numbers), (text_gradients.NUMBERS,), generator=torch.Generator().manual_seed(0))
        return numbers.index_fill(0, drawn, 0.0)

    monkeypatch.setattr(text_gradients, "_change", others)
    monkeypatch.setattr(text_gradients, "NUMBERS", 4000)
    [step, _] = [f for f in deep(deep_job("classify", train=STEP), public)["findings"] if f["attack"] == ATTACK]
    assert step["figures"]["AUC"]["value"] > 0.65  # 0.5 from those drawn
