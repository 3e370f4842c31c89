"""The forecast against the run: every line of the ledger, every line of work; and the papers' figures.

The forecast is the run's own loop over an engine without tensors, so a case here stands for what that engine
itself decides: an exchange, a codec, a schedule, a way to make batches. :mod:`test_recount` counts again by other
means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from typer.testing import CliRunner

import fedstrata
from fedstrata.cli import app
from fedstrata.engines.dry import dry_run
from fedstrata.errors import UserError
from fedstrata.events import Counted
from fedstrata.exchanges import EXCHANGES
from fedstrata.forecasts import stage as forecast_module
from fedstrata.forecasts.forecast import forecast as compute
from fedstrata.forecasts.options import ForecastOptions
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.methods import METHODS
from fedstrata.methods.fedavg import FedAvg
from fedstrata.models.checkpoints import auto_class
from fedstrata.models.memory import saved_bytes, step_memory
from fedstrata.models.parts import find_parts
from fedstrata.plan.kinds import LANGUAGE, ClientSchedule, Population
from fedstrata.plan.plan import Plan
from fedstrata.plan.sharing import Sharing
from fedstrata.reports.privacy import privacy_lines
from fedstrata.server.records import MemoryRecords
from fedstrata.wire.codec import CODECS
from tiny import CONFIGS, SIZES, tiny_config, tiny_model

Jobs = Callable[..., dict[str, Any]]


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def test_only_sampled_clients_are_planned(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[int, str]] = []
    plan = FedAvg.plan

    def counted(self: FedAvg, parts: Any, task: str, round: int, client: str, streams: Any) -> Plan:
        planned.append((round, client))
        return plan(self, parts, task, round, client, streams)

    monkeypatch.setattr(FedAvg, "plan", counted)
    of_many = job("fedavg", "mlm", data={"train": "-"}, clients={"count": 500, "fraction": 0.004})
    costs = fedstrata.forecast(of_many, {"method.rounds": 3})["fedavg"]
    assert costs["clients"]["count"] == 500
    assert len(set(planned)) <= 3 * 2 + 1, "two of 500 in each round, and the client whose costs are told"


OWN_ROWS = {"clients": {"test": 0.3}}
THIRD = {"clients": {"fraction": 0.34}}
STATES = {"client": {"may_send": ["weights", "hidden_states"]}}
CENTRALIZED = {"variant": "centralized"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    # parts of the model, by every kind of plan
    ("fedavg", "mlm", {}),
    ("fedavg", "classify", {"server": {"evaluate": "end"}, "clients": {"partition": "quantity_skew"}}),
    ("fedavg", "mlm", {"train": {"mlm_head": "full", "steps": 1, "padding": "max"}}),
    ("fedavg", "classify", {"head": {"kind": "hsum"}, "wire": {"dtype": "bf16"}}),
    ("fedadam", "classify", {**OWN_ROWS, "wire": {"dtype": "int8"}}),
    ("fedbfpt", "mlm", {**THIRD, "wire": {"dtype": "fp16"}, "method": {"rounds": 5}}),
    ("fedbfpt", "mlm", {**THIRD, "wire": {"dtype": "int8"}, "method": {"rounds": 5}}),
    ("fedbfpt", "mlm", {"train": {"epochs": 3, "group_by_length": False}, "method": {"variant": "all"}}),
    ("fedbt", "classify", {"clients": {"fraction": 0.5, "count": 4}, "method": {"rounds": 4}}),
    ("fedbt", "classify", {"clients": {"test": 0.3, "fraction": 0.5}, "server": {"evaluate": "end"}}),
    ("fedsplitbert", "classify", {**THIRD, "method": {"rounds": 4}}),
    ("fedsplitbert", "classify", {**OWN_ROWS, "head": {"kind": "mean"}, "wire": {"dtype": "int8"}}),
    # nothing is sent
    ("centralized", "classify", OWN_ROWS),
    ("single", "mlm", {}),
    ("local", "classify", {"server": {"evaluate": "end"}}),
    ("none", "classify", OWN_ROWS),
    # a frozen encoder
    ("fedfreezebert", "classify", {"head": {"kind": "cls"}, "train": {"epochs": 2}}),
    (
        "fedfreezebert",
        "classify",
        {
            "head": {"kind": "hsum"},
            "train": {"feature_cache_gb": 2e-5, "padding": "max"},
            "clients": {"fraction": 0.67},
        },
    ),
    # its hidden states
    (
        "fedfreezebert",
        "classify",
        {"method": CENTRALIZED, "head": {"kind": "mean"}, "wire": {"dtype": "fp16"}, **STATES},
    ),
    (
        "fedfreezebert",
        "classify",
        {"method": CENTRALIZED, "head": {"kind": "hsum"}, "wire": {"dtype": "int8"}, **STATES, **OWN_ROWS},
    ),
    # activations, by every schedule
    ("fedbert", "classify", {"method": {"mode": "parallel"}, "wire": {"dtype": "fp16"}}),
    ("fedbert", "mlm", {"method": {"mode": "share"}, "train": {"mlm_head": "full"}}),
    (
        "fedbert",
        "classify",
        {
            "method": {"mode": "share"},
            "clients": {"fraction": 0.67},
            "server": {"evaluate": "end"},
            "train": {"epochs": 2, "steps": 3},
        },
    ),
    ("fedbert", "classify", {"method": {"mode": "emb-avg"}, **OWN_ROWS}),
    (
        "fedbert",
        "classify",
        {
            "method": {"mode": "head-emb-avg", "lower": 1, "upper": 1},
            "train": {"padding": "max"},
            "wire": {"dtype": "bf16"},
        },
    ),
]
WORK = ("round", "client", "examples", "steps", "tokens", "layers", "trained", "sent")
"""What a forecast's line of work has exactly as the run's."""


def plain(line: dict[str, Any]) -> dict[str, Any]:
    """As it is after a way through a file."""
    made: dict[str, Any] = json.loads(json.dumps(line))
    return made


@pytest.mark.parametrize(("name", "kind", "tables"), CASES)
def test_the_forecast_is_the_measurement(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, tables: dict[str, Any]
) -> None:
    """Bytes to the byte, line by line; FLOPs to the last one but for the number of masked positions."""
    made = job(name, kind, 4 if "head" in tables else 3, **tables)
    if "test" in made["clients"]:
        del made["data"]["test"]
    records: list[MemoryRecords] = []

    def watched(*words: Any) -> MemoryRecords:
        records.append(dry_run(*words))
        return records[-1]

    monkeypatch.setattr(forecast_module, "dry_run", watched)
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    folder = tmp_path / "run"
    ledger = lines(folder, "ledger.jsonl")
    [dry] = records
    assert dry.lines("ledger") == ledger

    work = [line for line in lines(folder, "rounds.jsonl") if line["client"] != "server"]
    exact = kind == "classify" or tables.get("train", {}).get("mlm_head") == "full"
    expected = [plain(line) for line in dry.lines("rounds") if line["client"] != "server"]
    assert [[line[key] for key in WORK] for line in expected] == [[line[key] for key in WORK] for line in work]
    for dry_line, line in zip(expected, work, strict=True):
        for flops in ("flops", "server_flops"):
            near = line.get(flops) if exact else pytest.approx(line.get(flops), rel=0.08)  # 16 positions a batch
            assert dry_line.get(flops) == near

    mine, sums = forecast["client"], forecast["clients"]
    assert {way: sums[f"{way}_bytes"] for way in ("up", "down", "setup")} == result.bytes
    assert forecast["setup"]["down_bytes"] == sum(
        e["bytes"] for e in ledger if e["phase"] == "setup" and e["client"] == mine
    )
    for round in forecast["rounds"]:
        number = round["round"]
        rounds = (-1, 0) if number == 0 else (number,)  # the score before training goes with the first round
        own = [e for e in ledger if e["client"] == mine and e["round"] in rounds and e["phase"] != "setup"]
        for way in ("up", "down"):
            assert round[f"{way}_bytes"] == sum(e["bytes"] for e in own if e["direction"] == way)
        done = [line for line in work if (line["client"], line["round"]) == (mine, number)]
        flops = sum(line["flops"] for line in done)
        assert round["train_flops"] == (flops if exact else pytest.approx(flops, rel=0.08))
        assert round["trained"] == (done[0]["trained"] if done else [])
    total = sum(line["flops"] + line.get("server_flops", 0) for line in work)
    assert sums["train_flops"] == (total if exact else pytest.approx(total, rel=0.03))
    assert result.flops == total
    trains = tables.get("method") == CENTRALIZED  # the server, on what the clients sent once
    assert sums["server_flops"] == sum(
        line["flops"] if trains and line["steps"] else line.get("server_flops", 0) for line in work
    )


def test_every_exchange_codec_schedule_and_population_is_among_the_cases() -> None:
    methods = [METHODS[name](**{"rounds": 2, **tables.get("method", {})}) for name, _, tables in CASES]
    assert {method.exchange for method in methods} == set(EXCHANGES)
    assert {method.client_schedule for method in methods} == set(get_args(ClientSchedule))
    assert {method.population for method in methods} == set(get_args(Population))
    for codec in CODECS:
        assert any(tables.get("wire", {}).get("dtype", "fp32") == codec for _, _, tables in CASES)
    presets = {name for name, method in METHODS.items() if issubclass(method, FedAvg)}  # who plan as it does
    assert set(METHODS) - presets <= {name for name, _, _ in CASES}


def test_expected_masked_positions_come_within_two_percent(job: Jobs, tmp_path: Path) -> None:
    """Over some hundred batches."""
    made = job("fedbfpt", "mlm", 3, train={"epochs": 60}, method={"rounds": 2})
    [forecast] = fedstrata.forecast(made).values()
    fedstrata.run(made)
    flops = sum(line.get("flops", 0) for line in lines(tmp_path / "run", "rounds.jsonl"))
    assert forecast["clients"]["train_flops"] == pytest.approx(flops, rel=0.02)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with nothing but BERT-base's config.json."""
    transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bare")
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["config.json"]
    return tmp_path / "bare"


def told(*words: str | Path) -> Any:
    done = CliRunner().invoke(app, ["forecast", *map(str, words)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_config_is_enough(bare: Path) -> None:
    """The published figures: one layer and the head of BERT-base, layers 0, 0, 0, 1, 2."""
    made = told("--model", bare, "--task", "mlm", "--method", "fedbfpt", "--set", "method.rounds=5", "--json")
    assert made["setup"] == {"down_bytes": 438_057_192}
    assert [round["up_bytes"] for round in made["rounds"]] == [30_842_088] * 5
    assert [round["down_bytes"] for round in made["rounds"]] == [0] + [30_842_088] * 4
    assert [round["layers"] for round in made["rounds"]] == [[0], [0], [0], [1], [2]]
    assert [round["round"] for round in made["rounds"]] == [0, 1, 2, 3, 4]
    assert made["total"]["up_bytes"] == 5 * 30_842_088
    assert made["total"]["train_flops"] == sum(round["train_flops"] for round in made["rounds"])
    memory = [round["peak_memory_bytes"] for round in made["rounds"]]
    assert memory[0] == memory[2] > memory[3] > memory[4] > 438_057_192, "the gradient goes less deep"
    assert made["total"]["peak_memory_bytes"] == memory[0]


@pytest.mark.parametrize(("layers", "ratio"), [(4, 33.8), (6, 42.6), (8, 51.5)])
def test_the_papers_compute_ratios(bare: Path, layers: int, ratio: float) -> None:
    """Full head, width 128; the papers' model, corrected, says 33.6, 42.4 and 51.1 % (docs/decisions.md)."""
    common = ["--model", bare, "--task", "mlm", "--json", "train.mlm_head=full", "method.rounds=1"]
    whole = told(*common, "--method", "fedavg")["total"]["train_flops"]
    part = told(*common, "--method", "fedbfpt", f"method.local_layers={layers}")["total"]["train_flops"]
    assert round(100 * part / whole, 1) == ratio


def test_methods_side_by_side(bare: Path) -> None:
    made = told("--model", bare, "--task", "mlm", "--methods", "fedavg,fedbfpt", "--json", "--examples", "64")
    assert list(made) == ["fedavg", "fedbfpt"]
    assert made["fedbfpt"]["total"]["up_bytes"] / made["fedavg"]["total"]["up_bytes"] == pytest.approx(
        0.0704, abs=1e-4
    )
    assert made["fedavg"]["holdings"] == ["64 examples of 128 tokens at each of 6 clients"]


def test_hours_follow_from_line_and_processor(bare: Path) -> None:
    made = told(
        "--model", bare, "--task", "mlm", "--method", "fedavg", "--json", "--bandwidth", "8", "--gflops", "100"
    )  # fmt: skip
    last = made["rounds"][-1]
    expected = (last["up_bytes"] + last["down_bytes"]) / 1e6 + last["train_flops"] / 1e11
    assert last["seconds"] == pytest.approx(expected)
    assert made["total"]["seconds"] == pytest.approx(sum(round["seconds"] for round in made["rounds"]))


def test_tables_fit_a_terminal(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--methods", "fedavg,fedbfpt,fedbt"], ["--method", "fedbfpt", "--bandwidth", "10"]):
        done = CliRunner().invoke(app, ["forecast", "--model", str(bare), "--task", "mlm", *words])
        assert done.exit_code == 0
        assert max(map(len, done.output.splitlines())) <= 80
        assert "438.1 MB of initial download" in " ".join(done.output.split())
    assert "layer 0, head" in done.output
    assert "hours" in done.output


def test_a_job_whose_data_is_elsewhere_is_forecast_on_assumptions(job: Jobs) -> None:
    made = job("fedavg", "classify", data={"train": "elsewhere.csv"})
    [forecast] = fedstrata.forecast(made).values()
    assert forecast["holdings"][0].startswith(
        "1000 examples of 32 tokens at each of 3 clients: the data cannot be"
    )
    with pytest.raises(UserError, match="local_layers: is 9"):
        fedstrata.forecast(made, ["method.name=fedbfpt", "method.local_layers=9"])


def test_epsilon_of_examples_that_are_assumed_says_so(job: Jobs) -> None:
    """With the noise as given, a client of 4 examples spends a multiple of what one of 1000 does."""
    table = {"level": "example", "noise": 0.8}
    made = job("fedavg", "classify", task={"labels": ["eye", "heart", "kidney"]}, privacy=table)
    elsewhere = {**made, "data": {"train": "elsewhere.csv"}}
    counted, assumed, said, two = (
        fedstrata.forecast(each, count=count)["fedavg"]["privacy"]
        for each, count in (
            (made, None),
            (elsewhere, None),
            (made, 64),
            ({**elsewhere, "stages": [{"name": "a"}, {"name": "b", "data": made["data"]}]}, None),
        )
    )
    assert "assumed" not in counted
    assert assumed["epsilon"] < counted["epsilon"]
    assert "for 1,000 examples at each client, which is assumed" in privacy_lines(assumed)[1]
    assert (said["assumed"], two["assumed"]) == ("64 examples", "1,000 examples")
    whole = job("fedavg", privacy={"level": "client", "noise": 1.0, "single_message": True})
    whole["data"] = {"train": "elsewhere.csv"}
    assert "assumed" not in fedstrata.forecast(whole)["fedavg"]["privacy"]


@pytest.mark.parametrize("clients", [{"test": 0.5}, {"partition": "sizes", "sizes": [1, 2, 3]}])
def test_a_forecast_tells_the_examples_that_are_trained_on(job: Jobs, clients: dict[str, Any]) -> None:
    """It named all that were read, also those that clients test on, and those that go to none."""
    made = job("fedavg", "classify", clients=clients)
    if "test" in clients:
        del made["data"]["test"]
    for tokens, what in ((None, "examples"), (32, "rows")):
        [costs] = fedstrata.forecast(made, tokens=tokens).values()
        assert costs["holdings"][0].startswith(f"6 training {what} of the job's data")


def test_tokens_and_classes_that_are_assumed_are_told(job: Jobs, bare: Path) -> None:
    made = job("fedavg", "classify")
    [own], [assumed] = (list(fedstrata.forecast(made, tokens=tokens).values()) for tokens in (None, 32))
    assert assumed["holdings"] == ["12 training rows of the job's data at 32 tokens each (--tokens says 32)"]
    assert assumed["clients"]["train_flops"] > own["clients"]["train_flops"]
    assert assumed["clients"]["up_bytes"] == own["clients"]["up_bytes"]
    assert told("--model", bare, "--task", "classify", "--method", "fedavg", "--json")["holdings"][0].endswith(
        "at each of 6 clients, 2 classes"
    )


def test_stages_are_summed(job: Jobs, tmp_path: Path) -> None:
    made = job("fedbt", "mlm", 3)
    made["stages"] = [{"name": "pretrain"}, {"name": "finetune", "task": {"kind": "classify"}}]
    [forecast] = fedstrata.forecast(made).values()
    assert [round["stage"] for round in forecast["rounds"]] == ["pretrain"] * 2 + ["finetune"] * 2
    result = fedstrata.run(made)
    assert forecast["clients"]["up_bytes"] == result.bytes["up"]
    assert forecast["clients"]["down_bytes"] == result.bytes["down"]
    assert forecast["clients"]["setup_bytes"] == result.bytes["setup"]


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *((kind, architecture) for kind in TASK_KINDS if kind != "clm" for architecture in CONFIGS),
        *((kind, "gpt2") for kind in TASK_KINDS if kind != "mlm"),
    ],
)
def test_saved_bytes_of_tensors_without_content_are_those_of_real_ones(architecture: str, kind: str) -> None:
    changes: dict[str, Any] = {} if kind in LANGUAGE else {"num_labels": 3}
    if architecture == "gpt2":
        changes |= {"use_cache": False, "pad_token_id": 0}
    model = tiny_model(architecture, kind, **changes)
    parts = find_parts(model)
    whole = Plan((0, 1, 2), parts.names)
    some = Plan((0, 2, 2), ("layer.0", "head"))
    memory = step_memory(auto_class(kind), tiny_config(architecture, **changes))
    predicted = 5 if kind in LANGUAGE else 0
    for plan in (whole, some):
        real = saved_bytes(model, parts, plan, (4, 16), predicted, bf16=False)
        trained = parts.elements(plan.train)
        expected = 4 * parts.elements(parts.names) + 12 * trained + real
        tolerance = 0.02 if architecture == "modernbert" else 0  # whose masks are made in another way
        assert memory(plan, 4, 16, predicted, False) == pytest.approx(expected, rel=tolerance, abs=0)
    assert memory(whole, 8, 16, predicted, False) > memory(whole, 4, 16, predicted, False)
    assert memory(Plan((0, 1, 2), ()), 4, 16, predicted, False) == 4 * parts.elements(parts.names)


def test_what_gets_no_gradient_takes_no_memory_for_one(job: Jobs) -> None:
    """A table of sines, which never changes, and a table of positions that clients do not send."""
    sines = transformers.RoFormerConfig(**SIZES)
    with torch.device("meta"):
        parts = find_parts(auto_class("mlm").from_config(sines))
    plan, ordinary = Plan((0, 1), parts.names), replace(parts, fixed=frozenset(), sharing=Sharing())
    table = math.prod(parts.shapes["embeddings"]["roformer.encoder.embed_positions.weight"])
    assert plan.learning_elements(ordinary) == parts.elements(parts.names)
    assert plan.learning_elements(parts) == parts.elements(parts.names) - table
    adamw, sgd = (step_memory(auto_class("mlm"), sines)(plan, 4, 16, 5, False, kind) for kind in ("adamw", "sgd"))
    assert adamw - sgd == 8 * plan.learning_elements(parts)

    def peak(**tables: Any) -> int:
        (costs,) = fedstrata.forecast(job("fedavg", "classify", **tables)).values()
        return int(costs["rounds"][0]["peak_memory_bytes"])

    omitted = tiny_model("bert", "classify").get_parameter("bert.embeddings.position_embeddings.weight")
    assert peak() - peak(privacy={"omit": ["position_rows"]}) >= 12 * omitted.numel()


def test_saved_bytes_by_hand() -> None:
    """One linear layer in front of the loss: its input and the log-probabilities."""
    model = tiny_model("bert", "classify", num_labels=3)
    parts = find_parts(model)
    with torch.random.fork_rng():
        made = saved_bytes(model, parts, Plan((0, 1, 2), ("head",)), (4, 16), 0, bf16=False)
    dropped, logs, targets, weight = 4 * 32 * 4, 4 * 3 * 4, 4 * 8, 4
    assert made == dropped + logs + targets + weight


def test_a_forecast_tells_how_far_it_is(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.client.setup.PLANS_TOLD", 4)
    told: list[Any] = []
    compute(job("fedbfpt"), (), ForecastOptions(tell=told.append))
    assert told == [Counted("plans", 6, 6), Counted("rounds", 1, 2), Counted("rounds", 2, 2)]


@pytest.mark.parametrize(
    "options", [{"bandwidth": float("nan")}, {"gflops": 0.0}, {"count": -1}, {"tokens": 10**7}]
)
def test_the_python_face_refuses_what_is_no_number_to_count_with(options: dict[str, Any], job: Jobs) -> None:
    with pytest.raises(fedstrata.UserError, match=r"^--\w+: expected a number"):
        fedstrata.forecast(job(), **options)


def test_a_length_that_the_model_does_not_read_is_a_runs_to_settle(
    job: Jobs, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A length of the job's own is refused as a run refuses it; the default is made to fit, as in a run."""
    texts = tmp_path / "long.csv"
    texts.write_text("text,label\n" + "".join(f"{'the heart ' * 20},{'ab'[i % 2]}\n" for i in range(12)), "utf-8")
    made = job("fedavg", "classify", model={"name": str(model_folder(max_position_embeddings=20))})
    made["data"] = {"train": str(texts)}
    with pytest.raises(UserError, match=r"\[train\] max_tokens: is 32, but the model reads at most 20"):
        fedstrata.forecast(made)
    del made["train"]["max_tokens"]
    [costs] = fedstrata.forecast(made).values()
    assert costs["clients"]["train_flops"] == fedstrata.run(made).flops
