"""Files on a disk that takes no more: nothing half written stays, and the error names the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.data.tokens import tokenize
from fedstrata.models import checkpoints, scratch
from fedstrata.models.adapter_folder import save_adapters
from fedstrata.models.adapter_names import AdapterConfig
from fedstrata.models.folders import write_tokenizer
from fedstrata.wire.files import append_bytes, append_lines, copy_folder, read_lines, reserve, write_bytes
from full_disk import full_after
from tiny import SENTENCES, tokenizer

Jobs = Callable[..., dict[str, Any]]


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"round": 0}])
    before = path.read_bytes()
    with full_after(len(before) + 5), pytest.raises(OSError, match="File too large") as found:
        append_bytes(path, b"x" * 100_000)
    assert (found.value.errno, found.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before
    append_lines(path, [{"round": 1}])
    assert read_lines(path) == [{"round": 0}, {"round": 1}]


def test_a_file_that_does_not_fit_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with full_after(10), pytest.raises(OSError, match="File too large") as found:
        write_bytes(path, b"x" * 100_000)
    assert found.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_what_is_half_written_is_not_followed(tmp_path: Path) -> None:
    """A folder that somebody else has made held one to a file of the reader's, over which a report was written."""
    (tmp_path / "own").write_text("kept")
    (tmp_path / ".page.part").symlink_to(tmp_path / "own")
    write_bytes(tmp_path / "page", b"written")
    assert (tmp_path / "own").read_text() == "kept"
    assert (tmp_path / "page").read_text() == "written"
    assert not (tmp_path / "page").is_symlink()


def _other_disk(source: Any, target: Any) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)


@pytest.mark.parametrize("copy", [copy_folder, scratch.publish])
def test_a_folder_that_does_not_fit_on_another_disk_names_its_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: Callable[[Path, Path], None]
) -> None:
    """A run with a new model ended with a list of pairs of files, half of which took the last room."""
    (tmp_path / "from").mkdir()
    for name, size in (("a", 10), ("b", 2000)):
        (tmp_path / "from" / name).write_bytes(bytes(size))
    for call in ("link", "rename"):
        monkeypatch.setattr(os, call, _other_disk)
    with full_after(1000), pytest.raises(OSError, match="File too large") as found:
        copy(tmp_path / "from", tmp_path / "to")
    assert found.value.errno == errno.EFBIG
    assert Path(found.value.filename).name == "b"
    assert Path(found.value.filename).parent != tmp_path / "from"
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_a_last_line_that_a_kill_cut_short_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"round": 0}\n{"round"')
    assert read_lines(path) == [{"round": 0}]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves nothing")
@pytest.mark.parametrize(
    ("method", "tables"),
    [("fedfreezebert", {}), ("fedbt", {"train": {"cache_frozen_layers": True, "dropout": False, "epochs": 2}})],
)
def test_hidden_states_that_find_no_room_end_the_run(
    method: str, tables: dict[str, Any], job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their file has its whole room before it is mapped: a page that finds none is SIGBUS."""
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as found:
        fedstrata.run(job(method, "classify", 4, engine={"name": "inprocess"}, **tables))
    assert str(tmp_path / "run") in str(found.value.filename)
    assert not [path for path in tmp_path.rglob("features.f32") if path.stat().st_size]


def test_a_reserved_file_has_its_room(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("w+b") as file:
        reserve(file, path, 1 << 20)
    assert path.stat().st_size == 1 << 20
    if hasattr(os, "posix_fallocate"):
        assert path.stat().st_blocks * 512 >= 1 << 20


def test_a_file_system_that_reserves_nothing_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unable, raising=False)
    path = tmp_path / "x"
    with path.open("w+b") as file:
        reserve(file, path, 100)
    assert path.stat().st_size == 100


def test_a_tokenizer_that_does_not_fit_names_its_folder(tmp_path: Path) -> None:
    """What its library raises is no OSError."""
    with full_after(500), pytest.raises(OSError, match="File too large") as found:
        write_tokenizer(tokenizer(), tmp_path)
    assert found.value.filename == str(tmp_path)


@pytest.mark.parametrize("adapter", [None, AdapterConfig((("default", 2),), 4.0, None, 0.0, "gaussian", "plain")])
def test_a_config_that_does_not_fit_names_its_folder(
    model_folder: Callable[..., Path], tmp_path: Path, adapter: AdapterConfig | None
) -> None:
    """A run that saved its model on a full disk ended with a system error that named no file."""
    if adapter:
        pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    loaded = checkpoints.load(str(model_folder()), "mlm", None, 0, adapter=adapter)
    weights = {name: tensor.detach() for name, tensor in loaded.model.named_parameters()}
    save = partial(save_adapters, base="base") if adapter else checkpoints.save
    with full_after(50), pytest.raises(OSError, match="File too large") as found:
        save(loaded, weights, tmp_path / "to")
    assert str(tmp_path) in str(found.value.filename)


def test_tokens_that_do_not_fit_name_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path))
    texts = [text for text, _ in SENTENCES]
    with full_after(100), pytest.raises(OSError, match="File too large") as found:
        tokenize(texts, tokenizer(), 32, "truncate")
    assert str(tmp_path) in str(found.value.filename)
    assert list(tmp_path.iterdir()) == []
