"""A site that has the start model is not sent it; whatever else its folder holds, it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import NAMES, Village, same

import fedstrata
from fedstrata.errors import UserError
from fedstrata.sites.messages import decode_message
from fedstrata.sites.settings import read_site
from tiny import saved_models

Jobs = Callable[..., dict[str, Any]]
LORA = {"adapter": {"kind": "lora", "rank": 2, "merge": "alternate", "init": "svd"}}
SPLIT = {"client": {"may_send": ["weights", "activations"]}, "method": {"lower": 1}}


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    return Village(tmp_path, monkeypatch)


def has_model(village: Village, site: str, folder: Any) -> None:
    village.site(site, '# path = "minilm"', f'path = "{folder}"\n#')


def shipped(village: Village) -> list[str]:
    """The sites to which a start model went."""
    down = [(name, message) for name, way, message in village.post.messages if way == "down"]
    kinds = [(name, decode_message(m, "hello", "start", "request", "farewell").header) for name, m in down]
    return sorted(name for name, header in kinds if type(header).__name__ == "StartHeader")


@pytest.mark.parametrize(("name", "tables"), [("fedavg", {}), ("fedavg", LORA), ("fedbert", SPLIT)])
def test_a_site_with_the_model_is_not_sent_it_and_the_bits_are_the_same(
    job: Jobs, village: Village, name: str, tables: dict[str, Any]
) -> None:
    if "adapter" in tables:
        pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    config = job(name, "classify", 3, **tables)
    here, there = village.jobs(config)
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    has_model(village, "a", config["model"]["name"])
    has_model(village, "b", config["model"]["name"])
    run, one = fedstrata.run(there), fedstrata.run(here)
    models, others = saved_models(run.folder), saved_models(one.folder)
    assert all(torch.equal(models[key], others[key]) for key in others)
    assert shipped(village) == ["c"]
    assert run.bytes == {**one.bytes, "setup": one.bytes["setup"] // 3}
    assert {line["client"] for line in run.transfers if line["phase"] == "setup"} == {"c"}
    assert fedstrata.forecast(here)[name]["clients"]["setup_bytes"] == 3 * run.bytes["setup"]
    state = village.folder / "federation" / "sites" / "a" / "state"
    assert not list(state.glob("runs/*/*")), "of a run that is over nothing stays"


def test_another_model_or_none_that_can_be_read_is_as_good_as_none(
    job: Jobs, village: Village, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config = job("fedavg", "mlm", 3)
    here, there = village.jobs(config)
    has_model(village, "a", model_folder(layers=3, initializer_range=0.5))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}", "utf-8")
    has_model(village, "b", tmp_path / "broken")
    run = fedstrata.run(there)
    assert shipped(village) == ["a", "b", "c"]
    same(fedstrata.run(here), run)


def test_a_site_that_starts_again_still_has_it(job: Jobs, village: Village) -> None:
    config = job("fedavg", "mlm", 3)
    here, there = village.jobs(config)
    for site in NAMES:
        has_model(village, site, config["model"]["name"])

    def restart(event: Any) -> None:
        if type(event).__name__ == "Scored" and event.round == 0:
            village.start()

    run = fedstrata.run(there, progress=restart)
    assert shipped(village) == []
    assert run.bytes == {**fedstrata.run(here).bytes, "setup": 0}


def test_a_folder_without_a_model_is_refused_when_the_settings_are_read(village: Village, tmp_path: Path) -> None:
    path = village.folder / "federation" / "sites" / "a" / "site.toml"
    path.write_text(path.read_text("utf-8").replace('# path = "minilm"', f'path = "{tmp_path}"'), "utf-8")
    with pytest.raises(
        UserError, match=r"\[model\] path: .* holds no config.json; expected the folder of a model"
    ):
        read_site(path.parent)
