"""A method, a task and a codec of one's own between sites: installed at both ends, and the same, or refused.

The server and every site have a folder each in which a package is installed as ``pip`` leaves it: a module and
its entry points. While a program works, its folder alone is on the path.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_in_memory import NAMES, Village, lines, same

import fedstrata
from fedstrata import UserError
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.sites.messages import RefusalHeader, decode_message
from fedstrata.tasks import TASKS

Jobs = Callable[..., dict[str, Any]]
MODULE = "own_components"
SOURCE = '''
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from fedstrata import Method, Plan
from fedstrata.tasks import build_task


class Top(Method):
    """The first edition."""

    layers: int = 1

    def plan(self, parts, task, round, client, streams):
        own = (*parts.layers(parts.depth - min(self.layers + round, parts.depth)), "head")
        return Plan(layers=tuple(range(parts.depth)), train=own, send=own)


class Smooth:
    """The first edition."""

    def __init__(self, context):
        self.plain = build_task(context)

    def __getattr__(self, name):
        return getattr(self.plain, name)

    def loss(self, model, batch):
        return functional.cross_entropy(model(**batch.inputs).logits, batch.targets, label_smoothing=0.3)


@dataclass(frozen=True)
class Changes:
    """The first edition."""

    step: float = 2.0**-10
    name: str = "changes"
    changes: bool = True

    def wire_spec(self, shapes, change):
        return {name: (torch.int16 if change else torch.float32, shape) for name, shape in shapes.items()}

    def encode(self, tensors, reference, residual):
        if reference is None:
            return {name: tensor.float() for name, tensor in tensors.items()}, {}
        exact = {name: tensor - reference[name] + residual.get(name, 0.0) for name, tensor in tensors.items()}
        message = {name: (change / self.step).round().to(torch.int16) for name, change in exact.items()}
        return message, {name: change - message[name] * self.step for name, change in exact.items()}

    def decode(self, message, reference):
        if reference is None:
            return dict(message)
        return {name: reference[name] + steps * self.step for name, steps in message.items()}
'''
CLASSES = {"method": "Top", "task": "Smooth", "codec": "Changes"}
ENTRIES = "".join(f"[fedstrata.{part}s]\nown = {MODULE}:{name}\n" for part, name in CLASSES.items())


def install(folder: Path, edition: str = "first") -> Path:
    """A folder with the package, of this edition."""
    information = folder / f"{MODULE}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRIES)
    (folder / f"{MODULE}.py").write_text(SOURCE.replace("first", edition))
    return folder


class Machines:
    """The server's and the sites' installed packages."""

    def __init__(self, folder: Path, village: Village, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders = {name: folder / "installed" / name for name in ("server", *NAMES)}
        self.folder, self.village, self.monkeypatch = folder, village, monkeypatch
        self.modules: dict[Path, Any] = {}

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Inside, a program of this machine works."""
        path, module = list(sys.path), sys.modules.pop(MODULE, None)
        sys.path[:] = [str(self.folders[name]), *(entry for entry in path if entry not in self.paths())]
        importlib.invalidate_caches()
        if self.folders[name] in self.modules:
            sys.modules[MODULE] = self.modules[self.folders[name]]
        try:
            yield
            if MODULE in sys.modules:
                self.modules[self.folders[name]] = sys.modules[MODULE]
        finally:
            sys.path[:] = path
            sys.modules.pop(MODULE, None)
            if module is not None:
                sys.modules[MODULE] = module

    def paths(self) -> set[str]:
        return {str(folder) for folder in self.folders.values()}

    def start(self) -> None:
        """Start the sites' programs, each on its own machine."""
        for name, host in self.village.post.hosts.items():
            answer = host.answer

            def elsewhere(message: bytes, name: str = name, answer: Callable[[bytes], bytes] = answer) -> bytes:
                with self.at(name):
                    return answer(message)

            self.monkeypatch.setattr(host, "answer", elsewhere)

    def own(self, *parts: str, **settings: Any) -> dict[str, Any]:
        """Objects of the server's package."""
        module = importlib.import_module(MODULE)
        made = {"method": lambda: module.Top(rounds=2, layers=2), "task": lambda: module.Smooth}
        return {part: made[part]() if part in made else module.Changes(**settings) for part in parts}


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """The first edition is installed at the server and at all sites but ``b``."""
    machines = Machines(tmp_path, Village(tmp_path, monkeypatch), monkeypatch)
    for name in ("server", "a", "c"):
        install(machines.folders[name])
    machines.start()
    with machines.at("server"):
        yield machines


def run(machines: Machines, job: Jobs, own: dict[str, Any]) -> tuple[fedstrata.Result, list[dict[str, Any]]]:
    """A run between the sites, and what was missing in it."""
    _, there = machines.village.jobs(job("fedavg", "classify"))
    result = fedstrata.run(there, **own)
    return result, lines(result.folder / "missing.jsonl") if (result.folder / "missing.jsonl").exists() else []


@pytest.mark.parametrize("parts", [("method",), ("task",), ("codec",), tuple(CLASSES)], ids="-".join)
def test_installed_at_both_ends_a_run_ends_in_the_bits_of_one_process(
    machines: Machines, job: Jobs, parts: tuple[str, ...]
) -> None:
    install(machines.folders["b"])
    here, _ = machines.village.jobs(job("fedavg", "classify"))
    between, missing = run(machines, job, machines.own(*parts))
    same(fedstrata.run(here, **machines.own(*parts)), between)
    assert missing == []
    built = {machines.modules[machines.folders[name]] for name in NAMES}
    assert len(built | {sys.modules[MODULE]}) == 4, "each used the package of its own"
    plain = fedstrata.run({**here, "output": {"dir": str(machines.folder / "plain")}})
    tensors = [load_file(result.model_folder / "model.safetensors") for result in (between, plain)]
    assert any(not torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[1])
    messages = b"".join(message for _, way, message in machines.village.post.messages if way == "down")
    assert b"edition" not in messages, "no code is sent"


def test_options_of_a_method_come_as_they_were_set(machines: Machines, job: Jobs) -> None:
    """JSON has neither tuples nor sets: sites refused lists in their places."""
    install(machines.folders["b"])
    options = "layers: int = 1\n    pair: tuple[int, ...] = ()\n    some: frozenset[str] = frozenset()"
    for folder in machines.folders.values():
        (folder / f"{MODULE}.py").write_text(SOURCE.replace("layers: int = 1", options))
    own = importlib.import_module(MODULE).Top(rounds=1, pair=(1, 2), some=frozenset({"b", "a"}))
    _, missing = run(machines, job, {"method": own})
    assert missing == []


@pytest.mark.parametrize("part", CLASSES)
@pytest.mark.parametrize("edition", [None, "second"])
def test_a_site_without_the_same_class_refuses(
    machines: Machines, job: Jobs, part: str, edition: str | None
) -> None:
    """And the run goes on without it."""
    if edition:
        install(machines.folders["b"], edition)
        reason = f"refuses: the run's own {part} 'own' is not the one that is installed here"
    else:
        reason = (
            f"refuses: the run's own {part} cannot be used: {part}: 'own' is not installed here "
            f"(entry points 'fedstrata.{part}s')"
        )
    own = machines.own(part)
    between, missing = run(machines, job, own)
    assert [(line["round"], line["client"], line["reason"]) for line in missing] == [
        (0, "b", reason),
        (1, "b", reason),
    ]
    *_, refusal = (m for name, way, m in machines.village.post.messages if (name, way) == ("b", "up"))
    header = decode_message(refusal, "refusal").header
    assert isinstance(header, RefusalHeader)
    assert header.final
    assert json.loads((between.folder / "result.json").read_text("utf-8"))["status"] == "finished"
    assert {line["client"] for line in between.transfers if line["direction"] == "up"} == {"a", "c"}


def test_a_site_takes_no_own_task_where_every_example_s_gradient_is_clipped(
    machines: Machines, job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such a loss it is not known whether examples mix; a bad server does not ask itself."""
    install(machines.folders["b"])
    monkeypatch.setattr("fedstrata.runs.stages.check_task", lambda job, own: None)
    made = machines.village.jobs(job("fedavg", "classify", privacy={"level": "example", "noise": 1.0}))[1]
    with pytest.raises(
        UserError, match=r"a refuses: the job's noise promises nothing: .*with a task of one's own"
    ):
        fedstrata.run(made, **machines.own("task"))


def test_a_codec_with_other_settings_than_the_installed_class_gives_it_is_refused(
    machines: Machines, job: Jobs
) -> None:
    """A site makes its codec without arguments, so a setting of the server's would not be known there."""
    install(machines.folders["b"])
    with pytest.raises(UserError, match=r"a refuses: the run's own codec 'own' is not the one that is installed"):
        run(machines, job, machines.own("codec", step=2.0**-9))


@pytest.mark.parametrize("part", CLASSES)
def test_what_is_not_installed_at_the_server_is_refused_before_anything_is_sent(
    machines: Machines, job: Jobs, part: str
) -> None:
    own = machines.own(part)
    (machines.folders["server"] / f"{MODULE}-1.0.dist-info" / "entry_points.txt").unlink()
    with pytest.raises(UserError, match=rf"{part}: {CLASSES[part]} is not installed; .*'fedstrata\.{part}s'"):
        run(machines, job, own)
    assert machines.village.post.messages == []


KIND = """
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.tasks import TASKS

TASK_KINDS["own"], TASKS["own"] = TASK_KINDS["classify"], TASKS["classify"]
"""


@contextmanager
def kinds(known: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, these kinds of tasks are known, and those that are added stay known."""
    tables: list[dict[str, Any]] = [TASK_KINDS, TASKS]

    def put(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        before = [dict(table) for table in tables]
        for table, new in zip(tables, found, strict=True):
            table.clear()
            table.update(new)
        return before

    before = put([dict(table) for table in known])
    try:
        yield
    finally:
        known[:] = put(before)


def test_a_kind_of_task_of_one_s_own_is_known_at_a_site_that_has_its_module(
    machines: Machines, job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site knew no kinds but FedStrata's: it failed, and the server was not told of what."""
    install(machines.folders["b"])
    for folder in machines.folders.values():
        (folder / f"{MODULE}.py").write_text(SOURCE + KIND)
    for host in machines.village.post.hosts.values():
        known: list[dict[str, Any]] = [dict(TASK_KINDS), dict(TASKS)]

        def elsewhere(message: bytes, answer: Any = host.answer, known: Any = known) -> Any:
            with kinds(known):
                return answer(message)

        monkeypatch.setattr(host, "answer", elsewhere)
    here, there = machines.village.jobs(job("fedavg", "classify"))
    here["task"]["kind"] = there["task"]["kind"] = "own"
    with kinds([dict(TASK_KINDS), dict(TASKS)]):
        own = machines.own("task")
        with pytest.raises(UserError, match=r"a refuses: task\.kind 'own' is not known here; a kind of one's own"):
            fedstrata.run(there)
        shutil.rmtree(there["output"]["dir"])
        same(fedstrata.run(here, **own), fedstrata.run(there, **own))
