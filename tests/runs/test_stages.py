"""Whole jobs: stages, the output folder, what is refused and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fedstrata
from fedstrata.client import device, precision
from fedstrata.engines import choice
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.toml import read_toml
from fedstrata.plan.kinds import FORMAT
from fedstrata.privacy.accounting import Spending, epsilon_of
from fedstrata.runs.privacy import combined_privacy
from fedstrata.runs.resume import same_job
from tiny import SENTENCES

Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def staged(job: Jobs, model_folder: Callable[..., Path]) -> dict[str, Any]:
    made = job("fedbt", "mlm", 3, method={"rounds": 1})
    made["model"]["name"] = str(model_folder(head="none"))
    made["stages"] = [{"name": "pretrain"}, {"name": "finetune", "task": {"kind": "classify"}}]
    return made


def test_stages_follow_each_other(staged: dict[str, Any], tmp_path: Path) -> None:
    result = fedstrata.run(staged)
    folder = tmp_path / "run"
    pretrain, finetune = result.stages
    assert result.score == finetune.score
    assert result.flops == pretrain.flops + finetune.flops
    assert result.bytes["up"] == pretrain.bytes["up"] + finetune.bytes["up"] > 0
    assert sum(line["bytes"] for line in result.transfers if line["direction"] == "up") == result.bytes["up"]
    assert {line["stage"] for line in result.transfers} == {"pretrain", "finetune"}
    before, after = (load_file(stage.model_folder / "model.safetensors") for stage in (pretrain, finetune))
    frozen = "bert.encoder.layer.0.attention.self.query.weight"
    assert before[frozen].equal(after[frozen]), "fine-tuning started from the pre-trained weights"
    trained = load_file(Path(staged["model"]["name"]) / "model.safetensors")
    assert not trained[frozen.removeprefix("bert.")].equal(before[frozen])
    pooler = "pooler.dense.weight"
    assert trained[pooler].equal(after[f"bert.{pooler}"]), "the checkpoint's pooler came through"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.config.label2id == {"eye": 0, "heart": 1, "kidney": 2}
    transformers.AutoTokenizer.from_pretrained(folder / "model")
    written = {path.name for path in folder.iterdir()}
    assert written == {"result.json", "model", "stages", "choices.toml", ".fedstrata", ".fedstrata.lock"}
    for stage in ("pretrain", "finetune"):
        names = {path.name for path in (folder / "stages" / stage).iterdir()}
        assert names >= {
            "result.json",
            "job.toml",
            "rounds.jsonl",
            "ledger.jsonl",
            "partition.json",
            "parts.json",
            "model",
        }


def test_a_finished_stage_is_not_run_again(staged: dict[str, Any], tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if type(event).__name__ == "StageStarted" and event.stage == "finetune":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(staged, progress=stop)
    status = json.loads((tmp_path / "run" / "stages" / "finetune" / "result.json").read_text())
    assert status["status"] == "stopped"
    events: list[Any] = []
    result = fedstrata.run(staged, resume=True, progress=events.append)
    assert result.status == "finished"
    assert [(e.stage, e.reused) for e in events if type(e).__name__ == "StageEnded"] == [
        ("pretrain", True),
        ("finetune", False),
    ]
    whole = fedstrata.run(staged, {"output.dir": str(tmp_path / "whole")})
    one, other = (load_file(made.model_folder / "model.safetensors") for made in (result, whole))
    assert all(one[name].equal(other[name]) for name in other)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plays another machine: with how many cores, and whether its processor multiplies bf16."""
    monkeypatch.setattr(precision, "LEAST_WIDTH", 1)
    monkeypatch.setattr(precision, "LEAST_STATES", 1)

    def turn(cores: int, bf16: bool) -> None:
        monkeypatch.setattr(choice, "cores", lambda: cores)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(precision.FEATURES, bf16))

    return turn


def stopped(made: dict[str, Any]) -> None:
    """Begins a run of stages and stops it before the second begins."""

    def stop(event: Any) -> None:
        if type(event).__name__ == "StageEnded":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(made, progress=stop)


def test_a_stage_begins_from_the_model_before_it_as_that_stage_has_left_it(
    staged: dict[str, Any], tmp_path: Path
) -> None:
    """Another model in its place was trained on, and the result told of one run."""
    stopped(staged)
    pretrain = tmp_path / "run" / "stages" / "pretrain"
    for name in ("model.safetensors", "config.json"):
        path = next(pretrain.glob(f"*/{name}"))
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"gelu", b"relu") if name == "config.json" else whole[:-4] + b"\0\0\0?")
        for _ in range(2):
            with pytest.raises(UserError, match=rf"{name}: is damaged, .*since stage 'pretrain' has written it"):
                fedstrata.run(staged, resume=True)
        path.write_bytes(whole)
    assert fedstrata.run(staged, resume=True).status == "finished"


def settled(folder: Path) -> list[tuple[str, str, int]]:
    """The stages' device, precision and threads."""
    found = [read_toml(folder / "stages" / name / "job.toml") for name in ("pretrain", "finetune")]
    return [(each["train"]["device"], each["train"]["precision"], each["engine"]["threads"]) for each in found]


def test_a_later_stage_goes_on_elsewhere_as_the_run_began(
    staged: dict[str, Any], tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged["train"] |= {"precision": "auto", "device": "auto"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine(cores=2, bf16=True)
    whole = fedstrata.run(staged, {"output.dir": str(tmp_path / "whole")})
    stopped(staged)
    assert not (tmp_path / "run" / "stages" / "finetune").exists()
    machine(cores=16, bf16=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    resumed = fedstrata.run(staged, resume=True)
    assert settled(tmp_path / "run") == settled(tmp_path / "whole") == [("cpu", "bf16", 1)] * 2
    one, other = (load_file(made.model_folder / "model.safetensors") for made in (resumed, whole))
    assert all(one[name].equal(other[name]) for name in other)


def test_what_a_job_says_of_a_stage_that_has_not_begun_holds(
    staged: dict[str, Any], tmp_path: Path, machine: Callable[..., None]
) -> None:
    staged["train"]["precision"] = "auto"
    machine(cores=2, bf16=True)
    stopped(staged)
    machine(cores=16, bf16=False)
    fedstrata.run(
        {**staged, "stages": [staged["stages"][0], {**staged["stages"][1], "train": {"precision": "fp32"}}]},
        resume=True,
    )
    assert settled(tmp_path / "run") == [("cpu", "bf16", 1), ("cpu", "fp32", 1)]


def test_damaged_choices_are_named(staged: dict[str, Any], tmp_path: Path) -> None:
    stopped(staged)
    (tmp_path / "run" / "choices.toml").write_text("stages = [", "utf-8")
    with pytest.raises(UserError, match=r"choices\.toml"):
        fedstrata.run(staged, resume=True)


def test_a_mistake_in_the_last_stage_is_found_before_the_first_is_trained(
    staged: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="cycle = 9"):
        fedstrata.run(staged, ["finetune.method.cycle=9"])
    with pytest.raises(UserError, match="nolabel"):
        fedstrata.run(staged, ["finetune.data.label=nolabel"])
    assert not (tmp_path / "run").exists(), "nothing was written, so the mended job needs no other folder"


def test_result_json_holds_what_scripts_rely_on(job: Jobs, tmp_path: Path) -> None:
    result = fedstrata.run(job("fedavg", "classify"))
    data = json.loads((tmp_path / "run" / "result.json").read_text("utf-8"))
    assert data["status"] == "finished"
    assert data["score"] == result.score
    assert set(data["score"]) >= {"accuracy", "macro_f1", "matthews"}
    assert data["bytes"]["up"] > 0
    assert data["bytes"]["down"] > 0
    assert data["flops"] > 0
    assert data["seconds"] > 0
    assert (tmp_path / "run" / data["model"] / "config.json").exists()
    assert "https://" not in fedstrata.report(tmp_path / "run").read_text("utf-8")


def test_a_filled_folder_is_refused_and_left_alone(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("keep me")
    with pytest.raises(UserError, match=r"not empty.*--resume"):
        fedstrata.run(job())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_another_job_cannot_take_over_a_run(job: Jobs) -> None:
    made = job("fedavg")
    fedstrata.run(made)
    with pytest.raises(
        UserError, match=r"train.learning_rate = 5e-05.*0.001.*may be lowered when a run is resumed, not raised"
    ):
        fedstrata.run(made, ["train.learning_rate=0.001"], resume=True)


def test_a_run_goes_on_with_another_deadline_and_quorum(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg")
    [begun] = load(made)
    [other] = load(made, ["engine.deadline=7", "engine.quorum=0.9"])
    same_job(begun, tmp_path)
    same_job(other, tmp_path)


def test_a_damaged_record_of_the_job_is_one_sentence(job: Jobs, tmp_path: Path) -> None:
    [made] = load(job("fedavg"))
    same_job(made, tmp_path)
    path = tmp_path / "job.toml"
    path.write_bytes(path.read_bytes()[:-1] + b"[")
    with pytest.raises(UserError, match=r"job.toml: is not TOML"):
        same_job(made, tmp_path)


@pytest.mark.parametrize(("line", "words"), [("format = 1", "has format 1"), ("", "has no format number")])
def test_a_run_of_another_format_is_not_resumed(job: Jobs, tmp_path: Path, line: str, words: str) -> None:
    [made] = load(job("fedavg"))
    same_job(made, tmp_path)
    same_job(made, tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(path.read_text("utf-8").replace(f"format = {FORMAT}", line), "utf-8")
    with pytest.raises(UserError, match=f"cannot be resumed: it {words}"):
        same_job(made, tmp_path)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.max_tokens=100", r"max_tokens: is 100, but the model reads at most 66"),
        ("data.text=body", r"body"),
        ("data.train=nowhere.csv", r"nowhere.csv"),
        ("model.name=./nowhere", r"no folder .*nowhere"),
        ("model.name=no-such-model", r"model no-such-model: is no folder, and loading it from the hub failed"),
        ("clients.count=50", r"client"),
        ("method.name=fedbfpt method.local_layers=7", r"local_layers: is 7, but the model has 3 layers"),
        ("task.labels=['eye','heart']", r"labels: the train rows also hold 'kidney'"),
        ("task.metric=f1", r"positive: metric 'f1' needs the classes"),
        ("task.positive=['hart']", r"positive: 'hart' is not a class; did you mean 'heart'"),
        ("train.device=cuda", r"device: 'cuda' is not available"),
        ("wire.dtype=fp8", r"\[wire\] dtype: 'fp8' is invalid; .*fp16"),
        ("server.optimizer=fedsgd", r"\[server\] optimizer: 'fedsgd' is invalid; .*sgd"),
        ("server.optimizer=fedadam", r"\[server\] optimizer: 'fedadam' is now 'adam'"),
        ("server.aggregate=medain", r"\[server\] aggregate: 'medain' is invalid; .*median"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    job: Jobs, tmp_path: Path, override: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        fedstrata.run(job("fedavg", "classify"), override.split())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_default_length_fits_itself_to_a_short_model(job: Jobs) -> None:
    made = job("fedavg", "classify")
    del made["train"]["max_tokens"]
    assert fedstrata.run(made).status == "finished"


@pytest.mark.parametrize(
    ("file", "usable", "hidden", "said"),
    [
        ("nvidia0", False, False, True),
        ("nvidia0", True, False, False),
        ("nvidia0", False, True, False),
        ("nvidiactl", False, False, False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, usable: bool, hidden: bool, said: bool
) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / file).touch()
    monkeypatch.setattr(device, "DEVICES", tmp_path / "devices")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told: list[str] = []
    fedstrata.run(job("none"), progress=lambda e: told.extend(getattr(e, "notes", ())))
    assert any("a GPU that the installed torch cannot use" in note for note in told) == said


def test_a_method_that_never_trains_a_new_part_says_so(job: Jobs) -> None:
    notes: list[str] = []
    fedstrata.run(job("fedbt", "classify"), progress=lambda e: notes.extend(getattr(e, "notes", ())))
    assert any("pooler: newly initialized, and this method never trains it" in note for note in notes)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["cat", "Heart", "dog"],
            ["the head goes on as the start model has it, where 'eye' was 'cat', 'kidney' was 'dog'"],
        ),
        (["EYE", "heart", "kidney"], []),
        (["LABEL_0", "LABEL_1", "LABEL_2"], []),
        (["a", "b"], []),  # it is new then
    ],
)
def test_a_head_that_goes_on_under_other_names_says_so(
    job: Jobs, model_folder: Callable[..., Path], names: list[str], said: list[str]
) -> None:
    """Classes of other rows were taken for the job's own without a word."""
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    folder = model_folder(head="classify", num_labels=len(names), **classes)
    notes: list[str] = []
    made = job("none", "classify", model={"name": str(folder)})
    fedstrata.run(made, progress=lambda e: notes.extend(getattr(e, "notes", ())))
    assert [note for note in notes if "the head goes on" in note] == said


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"kind": "mean"}, ["the head goes on as the start model has it, where kind 'mean' was 'cls'"]),
        ({"kind": "cls"}, []),
        (None, []),
    ],
)
def test_a_head_that_goes_on_as_another_kind_says_so(
    job: Jobs, tmp_path: Path, head: dict[str, Any] | None, said: list[str]
) -> None:
    """Weights that a classifier learned for one token were taken for a mean of all without a word."""
    first = fedstrata.run(job("fedavg", "classify", head={"kind": "cls"}, output={"dir": str(tmp_path / "first")}))
    tables = {"head": head} if head else {}
    notes: list[str] = []
    made = job("none", "classify", model={"name": str(first.model_folder)}, **tables)
    fedstrata.run(made, progress=lambda e: notes.extend(getattr(e, "notes", ())))
    assert [note for note in notes if "the head goes on" in note] == said


def test_a_holdout_is_the_same_for_every_method(job: Jobs, tmp_path: Path) -> None:
    splits = []
    for method in ("fedavg", "centralized"):
        made = job(method, "classify", output={"dir": str(tmp_path / method)})
        del made["data"]["test"]
        fedstrata.run(made, ["data.holdout=0.25"])
        splits.append(json.loads((tmp_path / method / "partition.json").read_text()))
    assert splits[0]["test"] == splits[1]["test"] == 3
    assert sum(made["rows"] for made in splits[0]["clients"].values()) == 9
    assert splits[1]["clients"]["all"]["rows"] == 9


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "electra", "modernbert"])
def test_other_architectures_run_too(
    staged: dict[str, Any], model_folder: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    staged["model"]["name"] = str(model_folder(kind))
    result = fedstrata.run(staged, ["method.rounds=2"])
    assert result.status == "finished"
    ledger = (tmp_path / "run" / "stages" / "pretrain" / "ledger.jsonl").read_text().splitlines()
    assert {json.loads(line)["part"] for line in ledger if '"train"' in line} == {"layer.0", "layer.1", "head"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(result.model_folder)
    assert model.config.model_type == kind


def test_a_stage_may_start_from_any_earlier_one(staged: dict[str, Any], tmp_path: Path) -> None:
    """Two fine-tunings of one pre-trained model; nothing of the first is in the second."""
    staged["stages"] += [{"name": "again", "task": {"kind": "classify"}, "start": "pretrain"}]
    result = fedstrata.run(staged)
    first, second = (load_file(stage.model_folder / "model.safetensors") for stage in result.stages[1:])
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    staged["stages"][2]["start"] = "finetune"
    other = fedstrata.run(staged, {"output.dir": str(tmp_path / "chain")})
    third = load_file(other.stages[2].model_folder / "model.safetensors")
    assert not all(first[name].equal(third[name]) for name in first)


@pytest.mark.parametrize("wrong", ["again", "nowhere", "last"])
def test_a_stage_cannot_start_from_a_later_one(staged: dict[str, Any], wrong: str) -> None:
    staged["stages"] += [{"name": "again", "start": wrong}, {"name": "last"}]
    with pytest.raises(
        UserError, match=r"stage 'again': start: must name an earlier stage \(pretrain, finetune\)"
    ):
        fedstrata.run(staged)


def test_without_training_the_start_model_is_scored_and_handed_on(staged: dict[str, Any], tmp_path: Path) -> None:
    """The stages after it end as if it had not been there."""
    result = fedstrata.run(staged, ["pretrain.method.name=none"])
    nothing, finetune = result.stages
    assert nothing.score["loss"] > 0
    assert (nothing.flops, nothing.bytes["up"], nothing.bytes["down"], nothing.bytes["setup"]) == (0, 0, 0, 0)
    del staged["stages"][0]
    alone = fedstrata.run(staged, {"output.dir": str(tmp_path / "alone")})
    assert finetune.score == alone.score
    mine, same = (load_file(one.model_folder / "model.safetensors") for one in (finetune, alone))
    assert all(mine[name].equal(same[name]) for name in mine)


def test_an_option_by_client_names_real_clients(job: Jobs, tmp_path: Path) -> None:
    made = job("fedbfpt", "mlm", 3, clients={"count": 3})
    made["method"]["local_layers"] = {"default": 2, "client-2": 1}
    fedstrata.run(made)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    built = {line["client"]: len(line["layers"]) for line in map(json.loads, lines) if "layers" in line}
    assert built == {"client-0": 2, "client-1": 2, "client-2": 1}
    made["method"]["local_layers"] = {"default": 2, "klient-2": 1}
    with pytest.raises(UserError, match=r"\[method\] local_layers: no client 'klient-2'; did you mean 'client-2'"):
        fedstrata.run(made, {"output.dir": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()


def test_a_resumed_run_counts_the_frozen_encoder_once(job: Jobs, tmp_path: Path) -> None:
    small = job("fedfreezebert", "classify", head={"kind": "cls"})

    def stop(event: Any) -> None:
        if type(event).__name__ == "Stepped" and event.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(small, progress=stop)
    resumed = fedstrata.run(small, resume=True)
    whole = fedstrata.run(small, {"output.dir": str(tmp_path / "whole")})
    assert resumed.flops == whole.flops


def test_a_run_that_fails_says_so_on_disk(job: Jobs) -> None:
    small = job("fedavg", train={"learning_rate": 1e30})
    with pytest.raises(UserError, match=r"diverged|not finite"):
        fedstrata.run(small)
    result = json.loads((Path(small["output"]["dir"]) / "result.json").read_text("utf-8"))
    assert result["status"] == "failed"
    assert "round" in result["message"]


def record(accountant: str, honest: int | None = None) -> dict[str, Any]:
    """What a stage of level ``client`` has spent."""
    client = {"rounds": 2, "noise": 1.1, "rate": 1.0, "releases": 2}
    told = {"level": "client", "delta": 1e-5, "accountant": accountant, "honest": honest}
    return {**told, "clients": {"a": client}}


@pytest.mark.parametrize(("each", "told"), [((6, 1), 6), ((1, 6), 6), ((3, None), 3), ((None, None), None)])
def test_stages_together_rely_on_the_most_honest_clients(each: tuple[int | None, ...], told: int | None) -> None:
    combined = combined_privacy([(f"stage {n}", record("rdp", honest)) for n, honest in enumerate(each)])
    assert combined is not None
    assert combined["honest"] == told


def test_epsilon_of_stages_does_not_depend_on_their_order() -> None:
    """Sums are counted by Rényi's bound, whatever the accountant of another stage."""

    stages = [("sums", record("rdp")), ("messages", record("pld"))]
    found = [combined_privacy(order) for order in (stages, stages[::-1])]
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0]["accountant"] == "rdp"
    assert found[0]["epsilon"] == epsilon_of([Spending(1.1, 1.0, 4)], 1e-5, "rdp")
    both = [("one", record("pld")), ("other", record("pld"))]
    assert combined_privacy(both)["epsilon"] < found[0]["epsilon"]  # type: ignore[index]


def test_a_stage_that_goes_on_with_the_head_before_it_costs_what_was_forecast(job: Jobs) -> None:
    made = job("fedavg", "classify")
    first = {"name": "one", "head": {"kind": "mean"}, "method": {"rounds": 1}}
    made["stages"] = [first, {"name": "two", "method": {"rounds": 1}}]
    [costs] = fedstrata.forecast(made).values()
    run = fedstrata.run(made)
    assert run.bytes == {kind: costs["clients"][f"{kind}_bytes"] for kind in ("up", "down", "setup")}
    assert not any(line["part"] == "pooler" for line in run.transfers), "the head over the mean has none"


def test_what_does_not_go_with_the_head_before_it_is_refused_before_anything_is_trained(job: Jobs) -> None:
    made = job("fedavg", "classify", 4)
    made["stages"] = [
        {"name": "one", "head": {"kind": "psum"}},
        {"name": "two", "method": {"name": "fedbert"}},
    ]
    for tried in (fedstrata.run, fedstrata.forecast):
        with pytest.raises(UserError, match="takes the hidden states of four layers; in split learning"):
            tried(made)
    assert not list(Path(made["output"]["dir"]).rglob("rounds.jsonl"))


@pytest.mark.parametrize(
    ("head", "tables", "complaint"),
    [
        (
            {"kind": "mean", "tokens": "all"},
            {},
            r"\[head\] tokens: 'all' needs train\.padding = 'max', else .*; the head is that of the start model",
        ),
        (
            {"kind": "psum", "average": "probabilities"},
            {"task": {"kind": "regress"}},
            r"\[head\] average: 'regress' has no probabilities; .*; the head is that of the start model",
        ),
        (
            {"kind": "hsum"},
            {"method": {"name": "fedbt", "local_layers": 3, "rounds": 1}},
            r"takes the last 4 layers, and with \[method\] name = 'fedbt', as set here, a client builds 3",
        ),
        (
            {"kind": "psum"},
            {"method": {"name": "fedbt", "rounds": 1}, "train": {"epochs": 2, "cache_frozen_layers": True}},
            r"\[train\] cache_frozen_layers: the start model's head takes the states of four layers",
        ),
    ],
)
def test_a_head_that_goes_on_is_held_to_the_rules_of_one_that_is_named(
    job: Jobs, tmp_path: Path, head: dict[str, Any], tables: dict[str, Any], complaint: str
) -> None:
    """Of the stage before, before anything is trained, and of a start model's folder."""
    rows = tmp_path / "numbers.csv"
    rows.write_text("text,label\n" + "".join(f"{text},{i}\n" for i, (text, _) in enumerate(SENTENCES)), "utf-8")
    data = {"data": {"train": str(rows), "test": str(rows)}} if "task" in tables else {}
    first = {"head": head, "train": {"padding": "max"}, "method": {"rounds": 1}}
    made = job("fedavg", "classify", 4)
    made["stages"] = [{"name": "one", **first}, {"name": "two", **tables, **data}]
    with pytest.raises(UserError, match=complaint):
        fedstrata.run(made)
    assert not list(tmp_path.rglob("rounds.jsonl"))
    run = fedstrata.run(job("fedavg", "classify", 4, **first, output={"dir": str(tmp_path / "first")}))
    made = {**job("fedavg", "classify", 4, **tables), "model": {"name": str(run.model_folder)}} | data
    with pytest.raises(UserError, match=complaint):
        fedstrata.run(made)


def test_a_head_that_a_stage_between_has_left_behind_is_in_no_forecast(job: Jobs, tmp_path: Path) -> None:
    first = job("fedavg", "classify", 4, head={"kind": "psum"}, output={"dir": str(tmp_path / "first")})
    made = job("fedavg", "classify", 4, method={"rounds": 1})
    made["model"] = {"name": str(fedstrata.run(first).model_folder)}
    made["stages"] = [{"name": "one", "task": {"kind": "mlm"}}, {"name": "two"}]
    [costs] = fedstrata.forecast(made).values()
    run = fedstrata.run(made)
    assert run.bytes == {kind: costs["clients"][f"{kind}_bytes"] for kind in ("up", "down", "setup")}
