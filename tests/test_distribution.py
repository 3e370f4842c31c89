"""What is shipped: a source distribution that has what its tests read, a wheel that has what the package reads."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "configs", "docs", "examples", "src/fedstrata", "tests")
BUILD = "from setuptools import build_meta as b; b.build_sdist('.'); b.build_wheel('.')"
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with both distributions in it."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=IGNORED)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copyfile(path, copy / path.name)
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True, timeout=120)
    return copy


@pytest.mark.run
def test_the_source_distribution_has_every_file_that_its_tests_read(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        path.relative_to(built).as_posix() for folder in FOLDERS for path in (built / folder).rglob("*.*")
    } | {path.name for path in ROOT.glob("[!.]*") if path.is_file()}
    assert {name for name in wanted - found if (ROOT / name).is_file()} == set()


@pytest.mark.run
def test_the_wheel_has_every_file_of_the_package(built: Path) -> None:
    [path] = built.glob("*.whl")
    names = set(zipfile.ZipFile(path).namelist())
    source = built / "src"
    wanted = {
        path.relative_to(source).as_posix() for path in (source / "fedstrata").rglob("*.*") if path.is_file()
    }
    assert wanted - names == set()
    assert {"fedstrata/cli/demo.toml", "fedstrata/py.typed"} <= names


@pytest.mark.run
def test_the_description_on_the_index_leads_nowhere_that_the_index_does_not_have(built: Path) -> None:
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    text = str(metadata.get_payload(decode=True), "utf-8")
    assert text.startswith("# FedStrata\n")
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert text.count("docs/") < (ROOT / "README.md").read_text("utf-8").count("docs/")


def test_with_an_address_the_descriptions_links_and_picture_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    description = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_file")["description"]
    text = "![parts](docs/parts.svg) [how](docs/job.md#stages) [flower](https://flower.ai)"
    project = {"version": "1.2.0", "urls": {"Source": "https://example.org/fedstrata/"}}
    assert description(text, project) == (
        "![parts](https://example.org/fedstrata/raw/v1.2.0/docs/parts.svg) "
        "[how](https://example.org/fedstrata/blob/v1.2.0/docs/job.md#stages) [flower](https://flower.ai)"
    )
    assert description(text, {"version": "1.2.0"}) == "*parts* how [flower](https://flower.ai)"


def test_every_extra_is_one_that_readme_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    install = (ROOT / "README.md").read_text("utf-8").partition("## Install")[2].partition("\n## ")[0]
    for extra in set(project["optional-dependencies"]) - {"dev", "docs"}:
        assert f"`{extra}`" in install or f"[{extra}]" in install
