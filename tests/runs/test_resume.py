"""What a resumed run must share with the one that began; what may change; whose folder it is; what ends it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedstrata
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.job.toml import read_toml
from fedstrata.models.parts import find_parts
from fedstrata.plan.plan import make_plan
from fedstrata.plan.schedule import sample_clients
from fedstrata.plan.streams import Streams
from fedstrata.runs import resume
from fedstrata.runs.folder import own_folder
from fedstrata.wire.files import clear, replace_folder
from tiny import tiny_model

Jobs = Callable[..., dict[str, Any]]


class KilledError(BaseException):
    """Nothing in the program may catch it."""


def killed_in(round: int) -> Callable[[Any], None]:
    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == round:
            raise KilledError

    return dying


def kill(made: dict[str, Any], round: int = 1) -> None:
    with pytest.raises(KilledError):
        fedstrata.run(made, progress=killed_in(round))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def equal(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return all(torch.equal(a[name], b[name]) for name in a | b)


# -- the folder
def test_resume_leaves_a_foreign_folder_alone(job: Jobs, tmp_path: Path) -> None:
    files = {"model/precious.bin": "keep me", "ledger.jsonl": "mine", "result.json": "{}", "state/notes.txt": "x"}
    for name, text in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    with pytest.raises(UserError, match=r"is not a folder that FedStrata has written .* nothing in it is touched"):
        fedstrata.run(job(), resume=True)
    found = {
        str(path.relative_to(tmp_path / "run")): path.read_text()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    assert found == files


def test_a_folder_of_the_format_before_is_refused_as_one(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.toml").write_text("format = 2\n")
    with pytest.raises(UserError, match=r"it has format 2, .* since format 3 every file of a run's state"):
        fedstrata.run(job(), resume=True)


def test_two_runs_in_one_folder_exclude_each_other(job: Jobs, tmp_path: Path) -> None:
    made, refused = job("fedavg"), []

    def second(event: Any) -> None:
        if type(event).__name__ == "Replied" and not refused:
            for resume in (False, True):
                with pytest.raises(UserError, match="another process is running in this folder") as error:
                    fedstrata.run(made, resume=resume)
                refused.append(str(error.value))

    alone = fedstrata.run(made, {"output.dir": str(tmp_path / "alone")})
    fedstrata.run(made, progress=second)
    assert len(refused) == 2
    assert equal(tmp_path / "alone", tmp_path / "run")
    assert len((tmp_path / "run" / "ledger.jsonl").read_text()) == len((alone.folder / "ledger.jsonl").read_text())


def test_a_folder_that_nothing_was_written_to_is_gone_again(tmp_path: Path) -> None:
    with pytest.raises(UserError), own_folder(tmp_path / "a" / "b", False):
        raise UserError("no")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_a_call_that_was_killed_while_it_marked_it_is_taken(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "..fedstrata.part").touch()
    with own_folder(tmp_path, resume):
        assert (tmp_path / ".fedstrata").exists()


def test_a_users_own_files_survive_in_a_runs_folder(job: Jobs, tmp_path: Path) -> None:
    """Beside the models, in the state, in the model that is saved once more."""
    made = job("fedsplitbert", "classify", output={"client_models": True})
    kill(made)
    own = [
        tmp_path / "run" / name
        for name in ("notes.txt", "state/notes.txt", "model/notes.txt", "state/mine@1.safetensors")
    ]
    own.append(tmp_path / "run" / "state" / "clients" / "client-0" / "optimizer" / "notes.txt")
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    fedstrata.run(made, resume=True)
    assert [path.read_text() for path in own] == ["mine"] * len(own)


def test_clear_and_replace_take_only_what_is_named(tmp_path: Path) -> None:
    for name in ("old/a.json", "old/mine.txt", "new/a.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "old", ["stale"])
    assert {path.name: path.read_text() for path in (tmp_path / "old").iterdir()} == {
        "a.json": "new/a.json",
        "mine.txt": "old/mine.txt",
    }
    clear(tmp_path / "old", ["*.json"])
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["mine.txt"]
    clear(tmp_path / "old", ["*"])
    assert not (tmp_path / "old").exists()
    assert tmp_path.exists()


def test_a_replaced_folder_keeps_links_of_others(tmp_path: Path) -> None:
    """To a folder, or to nothing any more: only what was written here is replaced."""
    for name in ("old", "new", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere" / "mine.txt").write_text("mine")
    (tmp_path / "old" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "old" / "dangling").symlink_to("nowhere")
    replace_folder(tmp_path / "new", tmp_path / "old", ["stale"])
    assert (tmp_path / "old" / "link" / "mine.txt").read_text() == "mine"
    assert os.readlink(tmp_path / "old" / "dangling") == "nowhere"


@pytest.mark.parametrize("name", ["rounds.jsonl", "ledger.jsonl", "state/journal.jsonl"])
def test_a_record_that_is_a_link_is_not_added_to(job: Jobs, tmp_path: Path, name: str) -> None:
    """In a folder from somebody else it led to a file of whoever goes on with the run, which was cut."""
    made = job("fedavg")
    kill(made)
    record, own = Path(made["output"]["dir"]) / name, tmp_path / "own"
    own.write_bytes(record.read_bytes() + b"more")
    record.unlink()
    record.symlink_to(own)
    before = own.read_bytes()
    with pytest.raises(UserError, match=rf"{name}: is a link, and a run that goes on adds to it; expected a file"):
        fedstrata.run(made, resume=True)
    assert own.read_bytes() == before


@pytest.mark.parametrize("name", ["model", "clients", "stages/one", "stages/one/shared"])
def test_a_folder_that_is_a_link_is_not_replaced(job: Jobs, tmp_path: Path, name: str) -> None:
    """Files of the folder that it led to were moved away, and deleted by the next call."""
    made, own = job("fedavg"), tmp_path / "own"
    kill(made)
    own.mkdir()
    (own / "mine.txt").write_text("mine")
    place = Path(made["output"]["dir"]) / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(own)
    with pytest.raises(UserError, match=rf"{name} is a link, and a run that goes on replaces what is there; "):
        fedstrata.run(made, resume=True)
    assert [path.name for path in own.iterdir()] == ["mine.txt"]
    place.unlink()
    assert fedstrata.run(made, resume=True).status == "finished"


def test_nothing_is_cleared_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("mine")
    (tmp_path / "model").symlink_to(tmp_path / "own")
    clear(tmp_path / "model", ["*.json"])
    assert (tmp_path / "own" / "config.json").exists()


def test_a_feature_cache_that_is_a_link_is_not_written_through(job: Jobs, tmp_path: Path) -> None:
    made = job("fedfreezebert", "classify", method={"head": "mean"})
    kill(made)
    cache, own = next(Path(made["output"]["dir"]).glob("state/clients/*/features/features.f32")), tmp_path / "own"
    own.write_text("kept")
    cache.unlink()
    cache.symlink_to(own)
    fedstrata.run(made, resume=True)
    assert own.read_text() == "kept"


# -- the rows
def test_other_rows_are_refused_and_named(job: Jobs, sentences_csv: Path, tmp_path: Path) -> None:
    made = job("fedavg", "classify", data={"test": str(tmp_path / "test.csv")})
    text = sentences_csv.read_text("utf-8")
    (tmp_path / "test.csv").write_text(text, "utf-8")
    kill(made)
    lines = text.splitlines(keepends=True)
    for changed, sentence in [
        ("".join(lines[:-1]), r"the rows of client-\d are not those it began with \(there were 4, now [35]\)"),
        (text.replace(",eye", ",heart", 1), r"the rows of client-\d are not those .* \(4 of them, as before\)"),
        ("".join([lines[0], *reversed(lines[1:])]), r"the rows of client-0"),
    ]:
        sentences_csv.write_text(changed, "utf-8")
        with pytest.raises(UserError, match=f"cannot be resumed: {sentence}"):
            fedstrata.run(made, resume=True)
    sentences_csv.write_text(text, "utf-8")
    (tmp_path / "test.csv").write_text("".join(lines[:-1]), "utf-8")
    with pytest.raises(UserError, match=r"the test rows are not those it began with \(there were 12, now 11\)"):
        fedstrata.run(made, resume=True)
    (tmp_path / "test.csv").write_text(text, "utf-8")
    fedstrata.run(made, resume=True)
    sentences_csv.write_text("".join(lines[:-1]), "utf-8")
    with pytest.raises(UserError, match=r"the rows of client-\d are not those"):
        fedstrata.run(made, resume=True)


# -- changes
def test_the_key_that_matters_most_is_named(job: Jobs) -> None:
    made = job("fedbfpt")
    fedstrata.run(made)
    with pytest.raises(UserError, match=r"began with method.name = 'fedbfpt', the job now says 'fedavg'"):
        fedstrata.run({**made, "method": {"name": "fedavg", "rounds": 1}}, ["train.seed=9"], resume=True)
    with pytest.raises(
        UserError, match=r"train.seed = 0, the job now says 9; a resumed job must be the same, but"
    ):
        fedstrata.run(made, ["train.seed=9", "wire.dtype=bf16"], resume=True)


def test_lower_rates_and_client_models_are_taken_and_recorded(job: Jobs, tmp_path: Path) -> None:
    made = job("fedsplitbert", "classify", method={"rounds": 3})
    kill(made, 2)
    lower = ["train.learning_rate=1e-5", "server.learning_rate=0.5", "output.client_models=true"]
    run = fedstrata.run(made, lower, resume=True)
    assert (run.folder / "clients" / "client-0" / "model" / "config.json").exists()
    record = read_toml(run.folder / "job.toml")
    assert record["train"]["learning_rate"] == 1e-5
    assert record["changes"] == [
        {"round": 2, "key": "train.learning_rate", "was": 5e-5, "now": 1e-5},
        {"round": 2, "key": "server.learning_rate", "now": 0.5},
        {"round": 2, "key": "output.client_models", "now": True},
    ]
    with pytest.raises(UserError, match=r"1e-05, the job now says 5e-05; a learning rate may be lowered"):
        fedstrata.run(made, resume=True)
    with pytest.raises(UserError, match=r"train.learning_rate: its run is finished, so nothing is trained"):
        fedstrata.run(made, [*lower, "train.learning_rate=1e-6"], resume=True)


def test_more_rounds_where_the_state_was_kept(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", wire={"dtype": "int8"}, server={"optimizer": "momentum"}, output={"keep_state": True})
    made["train"]["optimizer_state"] = "persist"
    more = {"method.rounds": 4}
    fedstrata.run(made)
    fedstrata.run(made, more, resume=True)
    fedstrata.run(made, {**more, "output.dir": str(tmp_path / "whole")})
    assert equal(tmp_path / "whole", tmp_path / "run")
    [change] = read_toml(tmp_path / "run" / "job.toml")["changes"]
    assert change == {"round": 2, "key": "method.rounds", "was": 2, "now": 4}
    with pytest.raises(UserError, match=r"method.rounds = 4, the job now says 3; .*more rounds, not fewer"):
        fedstrata.run(made, {"method.rounds": 3}, resume=True)


@pytest.mark.parametrize(
    ("name", "kind", "tables", "sentence"),
    [
        ("fedavg", "mlm", {}, r"its run has ended after 2 rounds and its state was not kept"),
        ("fedavg", "mlm", {"train": {"lr_schedule": "polynomial"}}, r"instead of 2, as train.lr_schedule"),
        ("fedavg", "mlm", {"train": {"warmup_ratio": 0.1}}, r"instead of 2, as train.lr_schedule and"),
    ],
)
def test_more_rounds_are_refused_where_they_would_be_others(
    job: Jobs, name: str, kind: str, tables: dict[str, Any], sentence: str
) -> None:
    made = job(name, kind, output={"keep_state": bool(tables)}, **tables)
    fedstrata.run(made)
    with pytest.raises(UserError, match=sentence):
        fedstrata.run(made, {"method.rounds": 3}, resume=True)


def test_of_many_clients_the_plans_of_those_that_took_part_are_compared(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 clients of which 100 train in a round all took minutes."""
    made, clients = load(job("fedavg", clients={"count": 200, "fraction": 0.05}))[0], [f"{i}" for i in range(200)]
    seen = list[tuple[int, str]]()

    def counted(method: Any, parts: Any, task: str, round: int, client: str, streams: Streams) -> Any:
        seen.append((round, client))
        return make_plan(method, parts, task, round, client, streams)

    monkeypatch.setattr(resume, "make_plan", counted)
    resume.check_more_rounds(made, tmp_path, 3, find_parts(tiny_model()), clients)
    sampled = [(at, name) for at in range(3) for name in sample_clients(clients, 0.05, at, Streams(0))]
    assert len(sampled) == 30
    assert set(seen) == set(sampled)


def test_a_stage_that_another_began_from_gets_no_more_rounds(job: Jobs, model_folder: Callable[..., Path]) -> None:
    made = job("fedavg", "mlm", 2, output={"keep_state": True})
    made["model"]["name"] = str(model_folder(head="none", layers=2))
    made["stages"] = [{"name": "one", "method": {"rounds": 1}}, {"name": "two", "task": {"kind": "classify"}}]
    fedstrata.run(made)
    with pytest.raises(UserError, match=r"method.rounds: cannot be changed, as stage 'two' has begun"):
        fedstrata.run(made, {"one.method.rounds": 2}, resume=True)


# -- numbers that are not finite
def test_a_server_rate_that_blows_up_is_named_and_a_lower_one_goes_on(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", "classify", method={"rounds": 4})
    kill(made, 2)
    path = tmp_path / "run" / "job.toml"
    text = path.read_text().replace('optimizer = "sgd"', 'optimizer = "sgd"\nlearning_rate = 1e39')
    path.write_text(text)
    with pytest.raises(UserError, match=r"round 3: .* not finite; a smaller server.learning_rate helps"):
        fedstrata.run(made, {"server.learning_rate": 1e39}, resume=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], "server.learning_rate" in result["message"]) == ("failed", True)
    assert not (tmp_path / "run" / "model").exists()
    assert fedstrata.run(made, {"server.learning_rate": 0.5}, resume=True).status == "finished"
    assert read_toml(path)["changes"][-1]["round"] == 2
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "run").values())


@pytest.mark.parametrize(
    ("name", "tables", "rate"),
    [
        ("fedavg", {"train": {"learning_rate": 1e30}}, "train"),
        ("fedsplitbert", {"train": {"learning_rate": 1e30, "optimizer": "sgd"}}, "train"),
        ("fedadam", {"server": {"learning_rate": 1e20}}, "server"),
    ],
)
def test_a_diverged_run_fails_and_names_the_rate(job: Jobs, name: str, tables: dict[str, Any], rate: str) -> None:
    made = job(name, "mlm" if name == "fedadam" else "classify", method={"rounds": 4}, **tables)
    with pytest.raises(UserError, match=rf"a smaller {rate}.learning_rate helps"):
        fedstrata.run(made)


def test_a_checkpoint_with_nan_is_refused(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", "classify")
    path = Path(made["model"]["name"]) / "model.safetensors"
    tensors = load_file(path)
    tensors["bert.embeddings.LayerNorm.bias"][0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"model .*LayerNorm.bias holds a number that is not finite"):
        fedstrata.run(made)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "key",
    [
        "output.target=nan",
        "train.learning_rate=inf",
        "server.learning_rate=inf",
        "train.betas=[0.9, nan]",
        "clients.sizes=[inf, 1]",
        "engine.deadline=inf",
    ],
)
def test_numbers_of_a_job_are_finite(job: Jobs, key: str) -> None:
    with pytest.raises(UserError, match=r"finite|less than"):
        load(job(), [key])


def test_records_are_on_the_disk_before_they_are_committed(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstrata.server import state

    calls: list[str] = []
    monkeypatch.setattr(state, "flush", lambda path: calls.append(path.name))
    written = state.write_sealed
    monkeypatch.setattr(state, "write_sealed", lambda path, table: (calls.append(path.name), written(path, table)))
    fedstrata.run(job("fedavg", method={"rounds": 1}))
    first = calls.index("manifest-000001.json")
    assert {"ledger.jsonl", "rounds.jsonl", "journal.jsonl"} <= set(calls[:first])
