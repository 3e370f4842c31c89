"""A run between sites holds no model more than it needs: what else there is of weights waits on the disk."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import Post, Village, same

import fedstrata
from fedstrata.server.commits import CommitWriter
from fedstrata.server.server import Server
from fedstrata.sites import service
from fedstrata.sites.answers import Answers
from fedstrata.sites.engine import Presence
from fedstrata.sites.site import Site
from fedstrata.wire import on_disk, tensor_file
from fedstrata.wire.on_disk import is_on_disk
from fedstrata.wire.tensor_file import Reader, TensorFile

Jobs = Callable[..., dict[str, Any]]


def across(message: TensorFile, folder: Path) -> TensorFile:
    """A message as its receiver has it."""
    reader = Reader(len(message), folder=folder)
    for piece in message.pieces():
        reader.feed(piece)
    return reader.finish()


class Wire(Post):
    """A transport whose messages wait on their receiver's disk, as those of :mod:`fedstrata.sites.flower` do."""

    def __init__(self, village: Village) -> None:
        super().__init__(village.post.hosts)
        self.disk = village.folder

    def send(self, to: Presence, message: TensorFile, seconds: float, answer_bytes: int) -> str:
        self.messages.append((list(self.hosts)[to[0]], "down", b""))
        self.waiting[str(len(self.messages))] = message  # type: ignore[assignment]
        return str(len(self.messages))

    def receive(self, numbers: Iterable[str]) -> Iterator[tuple[str, Any]]:
        for number in list(numbers):
            name, message = self.messages[int(number) - 1][0], self.waiting.pop(number)
            yield number, across(self.hosts[name].answer(across(message, self.disk)), self.disk)  # type: ignore[arg-type]


def held() -> int:
    """Bytes of all tensors in memory."""
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)  # to ask lazy modules for their class imports them
        if kind in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu" and not is_on_disk(thing):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize(("name", "tables"), [("fedavg", {}), ("fedbfpt", {"task": {"kind": "mlm"}})])
def test_of_weights_every_process_holds_what_it_computes_with(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tables: dict[str, Any]
) -> None:
    monkeypatch.setattr(on_disk, "LEAST", 0)
    monkeypatch.setattr(tensor_file, "LEAST", 0)
    village = Village(tmp_path, monkeypatch)
    village.post = Wire(village)
    here, there = village.jobs(job(name, tables.get("task", {"kind": "classify"})["kind"]))
    expected, model, found = fedstrata.run(here), list[int](), dict[str, int]()
    merge, keep, begin = Server.merge, Answers.keep, CommitWriter.begin
    gc.collect()
    before = held()

    def watch(when: str) -> None:
        found[when] = max(found.get(when, 0), held() - before)

    def merging(server: Server) -> list[str]:
        model[:] = [sum(t.nbytes for own in server.weights.values() for t in own.values())]
        watch("replies are there")
        return merge(server)

    def keeping(*words: Any) -> Any:
        watch("a reply leaves")
        return keep(*words)

    def committing(writer: CommitWriter, commit: Any) -> None:
        begin(writer, commit)
        writer.wait()  # nothing else runs while objects are counted

    monkeypatch.setattr(Server, "merge", merging)
    monkeypatch.setattr(Answers, "keep", keeping)
    monkeypatch.setattr(CommitWriter, "begin", committing)
    same(expected, fedstrata.run(there))
    # the server's model and weights, and the model of each of three sites
    assert found.keys() == {"replies are there", "a reply leaves"}
    assert all(4.5 < taken / model[0] < 5.5 for taken in found.values()), (found, model)


@pytest.mark.parametrize("privacy", [{}, {"sum_only": True}])
def test_of_a_run_that_is_over_a_site_holds_no_model(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privacy: dict[str, Any]
) -> None:
    """Python looks for cycles so seldom that the models of several runs, or of a job's stages, would pile up."""
    models, make = [], service.make_site

    def making(*words: Any) -> Site:
        site = make(*words)
        models.append(weakref.ref(site.runtime.working.model))
        return site

    _, there = Village(tmp_path, monkeypatch).jobs(job("fedavg", privacy=privacy))
    monkeypatch.setattr(service, "make_site", making)
    gc.disable()
    try:
        fedstrata.run(there)
        assert models
        assert not any(model() for model in models)
    finally:
        gc.enable()
