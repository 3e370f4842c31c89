"""Damage is found when a run is resumed: the same weights with a sentence, or a refusal; never another model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.errors import UserError
from fedstrata.runs import stages
from fedstrata.server.commits import read_commit
from fedstrata.server.state import RunState, manifests
from fedstrata.wire.files import checksum_of, write_sealed
from tiny import SENTENCES, saved_models

pytestmark = pytest.mark.run  # its fixture and each case play runs

Jobs = Callable[..., dict[str, Any]]
ROUNDS = 4
DONE = 3


class KilledError(BaseException):
    """Not an Exception: nothing in the program may catch it, as nothing catches SIGKILL."""


Broken = tuple[dict[str, Any], Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def broken(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Broken]:
    """Runs that were killed in their last round: job, folder, and the weights that the unbroken run came to.

    ``personal`` has all that clients and server may keep; ``split`` has layers at the server.
    """
    root = tmp_path_factory.mktemp("broken")
    rows = root / "rows.csv"
    rows.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in SENTENCES), "utf-8")
    model = str(model_folder(layers=2))
    common = {
        "model": {"name": model},
        "task": {"kind": "classify"},
        "data": {"train": str(rows), "test": str(rows)},
        "clients": {"count": 3, "fraction": 0.67},
        "train": {
            "batch_size": 2,
            "max_tokens": 32,
            "precision": "fp32",
            "device": "cpu",
            "optimizer_state": "persist",
        },
    }
    personal = {"name": "fedsplitbert", "rounds": ROUNDS}
    split = {"name": "fedbert", "rounds": ROUNDS}
    jobs = {
        "personal": {
            **common,
            "method": personal,
            "server": {"optimizer": "momentum"},
            "wire": {"dtype": "int8"},
            "output": {"client_models": True},
        },
        "split": {**common, "task": {"kind": "mlm"}, "method": split},
        "frozen": {**common, "method": {"name": "fedfreezebert", "rounds": ROUNDS}, "head": {"kind": "cls"}},
    }

    def dying(event: Any) -> None:
        if type(event).__name__ == "Replied" and event.round == DONE:
            raise KilledError

    found = {}
    for name, job in jobs.items():
        whole = fedstrata.run(job, {"output.dir": str(root / name / "whole")})
        with pytest.raises(KilledError):
            fedstrata.run(job, {"output.dir": str(root / name / "killed")}, progress=dying)
        found[name] = job, root / name / "killed", models(whole.folder)
    return found


def models(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every model that a run has saved."""
    return saved_models(folder)


def flip(path: Path, folder: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path, folder: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def delete(path: Path, folder: Path) -> None:
    path.unlink()


def edit(path: Path, folder: Path) -> None:
    """Another number in a text, other bytes at the end of tensors."""
    content = path.read_bytes()
    after = range(len(content) // 2, len(content))
    digit = next(i for i in after if path.suffix not in TEXT or chr(content[i]).isdigit())
    path.write_bytes(
        content[:digit] + (b"7" if content[digit : digit + 1] != b"7" else b"3") + content[digit + 1 :]
    )


def swap(path: Path, folder: Path) -> None:
    """The content of another file of the same kind."""
    others = sorted({*path.parent.glob(f"*{path.suffix}"), *folder.rglob(f"*{path.suffix}")} - {path}, key=str)
    same = (b"", path.read_bytes())
    path.write_bytes(next((content for o in others if (content := o.read_bytes()) not in same), b"name = 1"))


TEXT = (".json", ".jsonl", ".toml")
DAMAGES = (flip, truncate, delete, edit, swap)
FILES = {
    "personal": [
        "state/manifest-000003.json",
        "state/journal.jsonl",
        "state/rows.json",
        "state/embeddings@3.safetensors",
        "state/moments-layer.0@3.safetensors",
        "state/residual-layer.0@3.safetensors",
        "state/clients/*/round-*.safetensors",
        "state/clients/*/residual/round-*.safetensors",
        "state/clients/*/optimizer/round-*.safetensors",
        "ledger.jsonl",
        "rounds.jsonl",
        "job.toml",
        "partition.json",
        "parts.json",
        "result.json",
        ".fedstrata",
    ],
    "frozen": ["state/clients/*/features/features.f32"],
    "split": ["state/head@*.safetensors", "state/layers/all/round-000002.safetensors"],
}
CASES = [(name, file, damage) for name, files in FILES.items() for file in files for damage in DAMAGES]


class OpenedError(Exception):
    """The state was opened, and is about to be trained from."""


def opened(stage: Any) -> None:
    raise OpenedError


@pytest.mark.parametrize(("name", "file", "damage"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_damage_is_found(
    broken: dict[str, Broken],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    file: str,
    damage: Callable[[Path, Path], None],
) -> None:
    """Of one damage to each file the run is played to its end; of the others it is enough what is found."""
    job, killed, whole = broken[name]
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    path = folder / "result.json"  # a killed run has written none
    path.write_text(json.dumps({"status": "failed", "score": {"accuracy": 0.125}}), "utf-8")
    damage(sorted(folder.glob(file))[-1], folder)
    said: list[Any] = []
    if damage is not flip:
        monkeypatch.setattr(stages, "train_stage", opened)
    try:
        fedstrata.run(job, {"output.dir": str(folder)}, resume=True, progress=said.append)
    except UserError as error:
        refused = str(error)
    except OpenedError:
        refused = ""
    else:
        refused, found = "", models(folder)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[key], whole[key]) for key in whole)
    if refused:
        assert str(folder) in refused
        return
    notes = [event.sentence for event in said if type(event).__name__ == "Noted"]
    state = (file.startswith("state/") and "features" not in file) or file in ("ledger.jsonl", "rounds.jsonl")
    lost_commit = damage is delete and "manifest" in file  # as if it had been killed before it
    assert bool(notes) == (state and not lost_commit), notes


def test_an_unfinished_run_is_not_called_finished(broken: dict[str, Broken], tmp_path: Path) -> None:
    """Whatever its result.json says."""
    job, killed, whole = broken["split"]
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    (folder / "result.json").write_text(json.dumps({"status": "finished", "score": {}}), "utf-8")
    assert fedstrata.run(job, {"output.dir": str(folder)}, resume=True).score
    assert all(torch.equal(models(folder)[key], whole[key]) for key in whole)


def test_what_happens_to_a_finished_run_is_found(broken: dict[str, Broken], tmp_path: Path) -> None:
    job = broken["split"][0]
    folder = tmp_path / "run"
    first = fedstrata.run(job, {"output.dir": str(folder)})
    result = (folder / "result.json").read_bytes()
    (folder / "result.json").write_bytes(result[:50])
    said: list[Any] = []
    assert fedstrata.run(job, {"output.dir": str(folder)}, resume=True, progress=said.append) == first
    assert (folder / "result.json").read_bytes() == result
    assert "result.json was damaged or missing; it is made again" in said[0].sentence
    weights = folder / "model" / "model.safetensors"
    flip(weights, folder)
    said.clear()
    assert fedstrata.run(job, {"output.dir": str(folder)}, resume=True, progress=said.append) == first
    assert f"{weights} is damaged, missing or another one since its run has written it" in said[0].sentence
    delete(folder / "ledger.jsonl", folder)
    with pytest.raises(UserError, match=r"is finished, but .*ledger.jsonl is damaged or missing since"):
        fedstrata.run(job, {"output.dir": str(folder)}, resume=True)


@pytest.mark.parametrize("damage", [edit, truncate, delete])
def test_a_finished_runs_result_is_not_made_again_from_a_damaged_partition(
    broken: dict[str, Broken], tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    """Where clients have models of their own it is made anew at each call: without rows, or with others."""
    job, folder = broken["personal"][0], tmp_path / "run"
    fedstrata.run(job, {"output.dir": str(folder)})
    result = (folder / "result.json").read_bytes()
    damage(folder / "partition.json", folder)
    with pytest.raises(UserError, match=r"is finished, but .*partition.json is damaged or missing since"):
        fedstrata.run(job, {"output.dir": str(folder)}, resume=True)
    assert (folder / "result.json").read_bytes() == result


def test_clients_models_are_not_made_of_a_damaged_shared_one(broken: dict[str, Broken], tmp_path: Path) -> None:
    job, folder = broken["personal"][0], tmp_path / "run"
    fedstrata.run(job, {"output.dir": str(folder), "output.client_models": False})
    flip(folder / "shared" / "model.safetensors", folder)
    with pytest.raises(UserError, match=r"shared/model.safetensors is damaged, .* clients' models are made"):
        fedstrata.run(job, {"output.dir": str(folder)}, resume=True)
    assert not (folder / "clients").exists()


def test_with_no_commit_left_nothing_is_begun_anew(broken: dict[str, Broken], tmp_path: Path) -> None:
    job, killed, _ = broken["split"]
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    for path in (folder / "state").glob("manifest-*.json"):
        path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"manifest-\*.json is missing, while there is ledger.jsonl"):
        fedstrata.run(job, {"output.dir": str(folder)}, resume=True)
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    "change",
    [
        {"start": None},
        {"records": 3},
        {"records": {"ledger": ["x", "y"]}},
        {"versions": {"embeddings": "x"}},
        {"done": -3},
        {"done": "x"},
        {"late": {"x": 3}},
    ],
    ids=str,
)
def test_a_manifest_that_no_run_has_written_is_damaged_whatever_its_checksum(
    broken: dict[str, Broken], tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(broken["split"][1], folder)
    newest, before = manifests(folder)
    table = read_commit(newest) or {}
    write_sealed(newest, table | change)
    state = RunState(folder, table["start"])
    done, sentence = state.reopen()
    state.writer.close()
    assert (done, newest.name in sentence) == ((read_commit(before) or {})["done"], True)


@pytest.mark.parametrize(
    "line", ['{"key": 3}', "[1]", '{"key": "embeddings", "file": "../../rows.csv", "checksum": ""}']
)
def test_a_journal_that_no_run_has_written_is_damaged_whatever_its_checksum(
    broken: dict[str, Broken], tmp_path: Path, line: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(broken["split"][1], folder)
    path, newest = folder / "state" / "journal.jsonl", manifests(folder)[0]
    with path.open("a") as file:
        file.write(f"{line}\n")
    table = read_commit(newest) or {}
    table["records"]["state/journal"] = path.stat().st_size, checksum_of(path)
    write_sealed(newest, table)
    state = RunState(folder, table["start"])
    assert "journal.jsonl is damaged" in state.reopen()[1]
    state.writer.close()


def test_brackets_without_end_are_no_sealed_table(tmp_path: Path) -> None:
    (tmp_path / "manifest-000001.json").write_text("[" * 100_000)
    assert read_commit(tmp_path / "manifest-000001.json") is None


def test_a_pipe_in_a_runs_folder_is_refused_and_not_waited_for(broken: dict[str, Broken], tmp_path: Path) -> None:
    job, killed, _ = broken["split"]
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    (folder / "job.toml").unlink()
    os.mkfifo(folder / "job.toml")
    with pytest.raises(UserError, match=r"job.toml is a pipe or a device; a run that goes on expects"):
        fedstrata.run(job, {"output.dir": str(folder)}, resume=True)
