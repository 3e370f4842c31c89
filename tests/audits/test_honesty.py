"""An audit says what it did not attack, what it took wrongly, and refuses what would look like an all-clear."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fedstrata
from fedstrata.audits.bench import Bench
from fedstrata.audits.play import Played
from fedstrata.audits.settings import Setting, played_pair
from fedstrata.errors import UserError
from fedstrata.plan.kinds import AUDIT, AUDIT_FORMAT
from fedstrata.reports.audit import audit_lines, read_audit
from tiny import SENTENCES, tiny_config, tokenizer

Jobs = Callable[..., dict[str, Any]]
Audited = Callable[..., dict[str, Any]]
SAMPLED: dict[str, Any] = {
    "privacy": {"level": "example", "noise": 1.0},
    "task": {"labels": ["eye", "heart", "kidney"]},
}
"""At level ``example`` a coin decides for each text whether it takes part in a step."""
LOWEST = re.compile(
    r"reads (?:the text exactly: )?(\d+) of (\d+) tokens at their places, and wrongly names ([\d,]+) others"
)


def test_wrong_places_are_told_and_chance_is_called_chance(audited: Audited) -> None:
    lora = {"kind": "lora", "rank": 4, "merge": "freeze_a"}
    stages = [audited("fedavg", "classify"), audited("fedavg", "classify", adapter=lora)]
    by_chance = 0
    for finding in (finding for stage in stages for finding in stage["findings"]):
        if "places recall" not in finding["figures"]:
            continue
        hits, cases, wrong = (int(n.replace(",", "")) for n in LOWEST.search(finding["sentence"]).groups())  # type: ignore[union-attr]
        precision = finding["figures"]["places precision"]
        assert precision["count"] == [hits, hits + wrong]
        assert finding["figures"]["places recall"]["count"] == [hits, cases]
        assert ("as chance would" in finding["sentence"]) == precision["holds_chance"]
        by_chance += precision["holds_chance"]
    assert by_chance, "in one of these the threshold lets every token pass"


def test_the_worst_case_and_its_public_round_have_one_text(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[tuple[Setting, Played, Played]] = []

    def noted(bench: Bench, setting: Setting) -> tuple[Played, Played]:
        client, shadow = played_pair(bench, setting)
        pairs.append((setting, client, shadow))
        return client, shadow

    monkeypatch.setattr("fedstrata.audits.audit.played_pair", noted)
    for seed in range(4):
        stage = audited("fedavg", "classify", train={"seed": seed}, **SAMPLED)
        assert not any("took none" in note for note in stage["notes"] if note.startswith("1 step, 1 text"))
        [worst] = [finding for finding in stage["findings"] if finding["channel"] == "class_head"][:1]
        assert worst["setting"] == "1 step, 1 text"
        assert worst["figures"]["recall"]["count"][1]
    assert all(shadow.texts for _, _, shadow in pairs)
    assert [(client.texts, shadow.texts) for setting, client, shadow in pairs if setting.worst] == [(1, 1)] * 4


def test_an_empty_draw_has_no_shares(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.audits.class_head._shares", lambda played, classes: np.zeros(classes))
    found = [each for each in audited("fedavg", "classify")["findings"] if each["channel"] == "class_head"]
    assert {each["sentence"] for each in found} == {
        f"from the classifier's {what} nothing is read: nothing that has a class took part"
        for what in ("bias", "rows")
    }
    assert not any(each["figures"] for each in found)


def test_a_draw_of_nobody_is_no_defense(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.audits.settings.DRAWS", 1)
    for seed in range(4):
        stage = audited("fedavg", "classify", train={"seed": seed}, **SAMPLED)
        played = {play["setting"]: play["texts"] for play in stage["plays"]}
        empty = [setting for setting, texts in played.items() if not texts]
        assert {finding["setting"] for finding in stage["findings"]} == played.keys() - set(empty)
        for setting in empty:
            assert (
                f"{setting}: the draw of examples took none of the client's, so nothing was attacked"
                in stage["notes"]
            )
        if empty:
            return
    raise AssertionError("one of four draws of a text in four is expected to be empty")


def test_parts_of_later_rounds_and_attacks_left_out_are_named(audited: Audited, job: Jobs, public: str) -> None:
    stage = audited("fedavg", "classify", wire={"part_period": 3}, method={"rounds": 4})
    [later] = [note for note in stage["notes"] if "sent in a later round" in note]
    attacked = {finding["channel"] for finding in stage["findings"]}
    assert ("embeddings" in later) == ("embeddings" not in attacked)
    [stage] = fedstrata.audit(job("fedavg", "classify"), attacks=["layers"], public=public)["stages"]
    assert "embeddings: not attacked, as --attacks leaves out embeddings" in stage["notes"]
    assert "head: not attacked, as --attacks leaves out class_head" in stage["notes"]
    with pytest.raises(
        UserError, match=r"--attacks: hidden_states, token_head fits nothing .* embeddings, class_head"
    ):
        fedstrata.audit(job("fedavg", "classify"), attacks=["hidden_states", "token_head"], public=public)
    with pytest.raises(UserError, match="--attacks: names one more than once: layers, layers"):
        fedstrata.audit(job("fedavg", "classify"), attacks=["layers", "layers"], public=public)
    with pytest.raises(UserError, match="--client: '' is no client"):
        fedstrata.audit(job("fedavg", "classify"), client="", public=public)


@pytest.mark.parametrize(
    ("name", "tables", "parts"),
    [
        ("fedavg", {"adapter": {"kind": "lora", "rank": 2}}, {"adapter.0.a", "adapter.1.a", "adapter.2.a"}),
        ("fedbt", {"method": {"cycle": 3, "rounds": 3}}, {"layer.0", "layer.1"}),
        ("fedbt", {"method": {"cycle": 3, "rounds": 2}}, {"layer.1"}),
        ("fedavg", {}, set()),
    ],
)
def test_what_the_first_round_does_not_send_is_attacked_or_named(
    audited: Audited, name: str, tables: dict[str, Any], parts: set[str]
) -> None:
    """By default adapters send B in the first round and A, which tells of their inputs, in the second."""
    stage = audited(name, "classify", **tables)
    lowest = parts & {"adapter.0.a", "layer.0"}
    later = {finding["channel"] for finding in stage["findings"] if " of round " in finding["setting"]}
    assert bool(lowest) == bool(later & {"adapters", "layers"})
    named = {part for note in stage["notes"] for part in note.partition(":")[0].split(", ")}
    assert parts - lowest <= named
    assert not lowest & named


def test_an_audit_of_a_job_for_a_gpu_is_played_on_the_processor(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attacks compute there; a model on a GPU would not take what they give it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda"):
        assert audited("fedavg", "classify", train={"device": device, "steps": 1})["findings"]


def test_attacks_need_to_fit_one_stage_only(job: Jobs, public: str) -> None:
    first, second = job("fedavg", "mlm"), job("fedbt", "classify")
    shared = {name: first[name] for name in first if name not in ("task", "method", "data")}
    tables = {**shared, "data": second["data"]}
    own = ({"name": "pre", **_stage_of(first)}, {"name": "fine", **_stage_of(second)})
    for stages, fitting in ((own, "class_head"), (own, "token_head")):
        record = fedstrata.audit({**tables, "stages": list(stages)}, attacks=[fitting], public=public)["stages"]
        assert [{each["channel"] for each in stage["findings"]} for stage in record].count({fitting}) == 1
        [without] = [stage for stage in record if not stage["findings"]]
        assert not without["plays"], "no attack of those that were chosen fits there"
        assert any("not attacked, as --attacks leaves out" in note for note in without["notes"])
    with pytest.raises(UserError, match=r"activations fits nothing .* embeddings, token_head, class_head, layers"):
        fedstrata.audit({**tables, "stages": list(own)}, attacks=["activations"], public=public)


def _stage_of(made: dict[str, Any]) -> dict[str, Any]:
    return {"task": made["task"], "method": made["method"]}


@pytest.mark.parametrize(
    ("kind", "attack", "tables"),
    [("regress", "class_head", {}), ("regress", "token_head", {"privacy": {"omit": ["position_rows"]}})],
)
def test_a_head_that_no_attack_reads_is_said_to_be_unread(
    job: Jobs, public: str, tmp_path: Path, kind: str, attack: str, tables: dict[str, Any]
) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"the kidney {n},{n}\n" for n in range(24)))
    made = job("fedavg", kind, **tables)
    made["data"] |= {"train": str(tmp_path / "rows.csv"), "test": str(tmp_path / "rows.csv")}
    [stage] = fedstrata.audit(made, attacks=["layers"], public=public)["stages"]
    assert any(re.search(r"\bhead: no attack here reads them", note) for note in stage["notes"])
    assert not any(attack in note for note in stage["notes"])
    with pytest.raises(UserError, match=f"--attacks: {attack} fits nothing .* embeddings, layers"):
        fedstrata.audit(made, attacks=[attack], public=public)


@pytest.mark.parametrize("omit", [[], ["position_rows"]])
def test_a_table_of_distances_that_no_attack_reads_is_named(
    audited: Audited, tmp_path: Path, omit: list[str]
) -> None:
    """Which of its rows have moved tells about the length of the longest text."""
    config = transformers.MPNetConfig(**tiny_config("bert", 2).to_diff_dict() | {"model_type": "mpnet"})
    transformers.MPNetForMaskedLM(config).save_pretrained(tmp_path / "mpnet")
    tokenizer().save_pretrained(tmp_path / "mpnet")
    stage = audited("fedavg", "classify", model={"name": str(tmp_path / "mpnet")}, privacy={"omit": omit})
    said = "mpnet.encoder.relative_attention_bias.weight: no attack here reads tables of distances; others may"
    assert (said in stage["notes"]) is not bool(omit)


@pytest.mark.parametrize("merge", ["freeze_a", "plain"])
def test_adapters_of_the_lowest_layer_that_no_attack_reads_are_named(audited: Audited, merge: str) -> None:
    """Those of matrices that take what other ones have made."""
    lora = {"kind": "lora", "rank": 2, "merge": merge, "targets": ["dense"]}
    stage = audited("fedavg", "classify", adapter=lora)
    assert {finding["channel"] for finding in stage["findings"]} == {"class_head"}
    assert any(note.startswith("adapter.0") and "no attack here reads them" in note for note in stage["notes"])


@pytest.mark.parametrize("most", [3, 512])
def test_texts_whose_hidden_states_are_not_played_are_counted(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("fedstrata.audits.settings.STATES", most)
    method = {"variant": "centralized", "head": "mean"}
    stage = audited("fedfreezebert", "classify", method=method, client={"may_send": ["hidden_states"]})
    said = "of the client's 4 texts the hidden states of the first 3 are played, and at most 256 of these are read"
    assert (said in stage["notes"]) == (most == 3)


@pytest.mark.parametrize(
    ("kind", "method", "words"),
    [
        ("classify", {"upper": 1}, "labels from them through layers of the client's own"),
        ("mlm", {"upper": 1}, "words from them through layers of the client's own"),
        ("classify", {}, ""),
    ],
)
def test_gradients_that_no_attack_reads_are_named(
    audited: Audited, kind: str, method: dict[str, Any], words: str
) -> None:
    notes = [note for note in audited("fedbert", kind, method=method)["notes"] if note.startswith("gradients:")]
    assert notes == ([f"gradients: no attack here reads {words}; others may"] if words else [])


def test_public_text_without_a_known_word_is_refused(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("zzz qqq xxx\n" * 30, "utf-8")
    with pytest.raises(UserError, match=r"--public: .*other.txt has no token that the model's tokenizer knows"):
        fedstrata.audit(job("fedavg", "classify"), public=str(tmp_path / "other.txt"))


@pytest.mark.parametrize("name", ["PUBLIC.TXT", "public.txt.gz"])
def test_public_text_is_a_txt_file_however_its_name_ends(job: Jobs, tmp_path: Path, name: str) -> None:
    """It was asked for the job's column, which plain lines do not have."""
    content = "".join(f"{text}\n" for text, _ in SENTENCES * 2).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = tmp_path / "own.csv"
    rows.write_text("words,label\n" + "".join(f'"{text}",{label}\n' for text, label in SENTENCES), "utf-8")
    made = job("fedavg", "classify", data={"train": str(rows), "test": str(rows), "text": "words"})
    [stage] = fedstrata.audit(made, attacks=["class_head"], public=str(tmp_path / name))["stages"]
    assert stage["public"]["texts"] == 2 * len(SENTENCES)


@pytest.mark.parametrize(("known", "refused"), [(1, "1 text with"), (19, "19 texts with"), (20, "")])
def test_texts_without_a_known_word_do_not_count(job: Jobs, tmp_path: Path, known: int, refused: str) -> None:
    (tmp_path / "other.txt").write_text("zzz qqq\n" * 30 + "zzz the\n" * known, "utf-8")
    made = job("fedavg", "classify")
    if not refused:
        assert fedstrata.audit(made, attacks=["class_head"], public=str(tmp_path / "other.txt"))["stages"]
        return
    with pytest.raises(UserError, match=f"other.txt has {refused} a token .* knows; expected 20 texts or more"):
        fedstrata.audit(made, attacks=["class_head"], public=str(tmp_path / "other.txt"))


def test_where_nothing_leaves_nothing_is_told(audited: Audited) -> None:
    assert audited("local", "classify")["notes"] == ["nothing leaves the clients: there is nothing to attack"]
    assert any("beside the attacks the server is told" in note for note in audited("fedavg", "classify")["notes"])


@pytest.mark.parametrize("place", ["file", "foreign", "taken", "/proc/none"])
def test_the_output_folder_is_tried_first(
    job: Jobs, public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("fedstrata.audits.audit._stage", lambda *args: pytest.fail("it was played"))
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    (tmp_path / "taken" / AUDIT).mkdir(parents=True)
    with pytest.raises(UserError, match=r"\[output\] dir: "):
        fedstrata.audit(job("fedavg", "classify"), {"output.dir": str(tmp_path / place)}, public=public)
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("audited_with", "keys"),
    [
        ({}, ""),
        ({"privacy.omit": ["embeddings"]}, "privacy.omit"),
        ({"method.variant": "half", "wire.dtype": "fp16"}, "method.variant, wire.dtype"),
    ],
)
@pytest.mark.parametrize("first", ["audit", "run"])
def test_a_page_says_that_its_run_is_of_another_job_than_the_audit(
    job: Jobs, public: str, first: str, audited_with: dict[str, Any], keys: str
) -> None:
    private = {"level": "example", "epsilon": 8.0}
    made = job("fedbt", "classify", privacy=private, task={"labels": ["eye", "heart", "kidney"]})
    folder = Path(made["output"]["dir"])
    if first == "run":
        fedstrata.run(made)
    record = fedstrata.audit(made, audited_with, public=public, attacks=["class_head"])
    if first == "audit":
        fedstrata.run(made)
    assert not any("not of the job" in note for note in record["stages"][0]["notes"])
    said = f"this run is not of the job that was audited: it has another {keys}"
    [stage] = read_audit(folder)
    assert [note for note in stage["notes"] if "not of the job" in note] == ([said] if keys else [])
    assert (said in fedstrata.report(folder).read_text("utf-8")) == bool(keys)


STAGE: dict[str, Any] = {
    "stage": "",
    "method": "fedavg",
    "task": "classify",
    "client": "client-0",
    "public": {"texts": 120, "source": "public.txt"},
    "findings": [],
    "notes": ["a note of its own"],
}


def test_of_a_record_that_cannot_be_read_the_page_says_so(job: Jobs, tmp_path: Path) -> None:
    folder = fedstrata.run(job("fedavg", "classify")).folder
    figure = {"value": "high", "low": 0, "high": 1, "chance": None}
    finding = {"channel": "layers", "attack": "", "setting": "", "sentence": "", "figures": {"auc": figure}}
    said = f"{AUDIT} holds no audit that this version of FedStrata can read"
    foreign = (
        [{"stage": 5}],
        [5],
        5,
        [{**STAGE, "public": 5}],
        [{**STAGE, "settings": {"method": 5}}],
        [{**STAGE, "findings": [{}]}],
        [{**STAGE, "findings": [finding]}],
        [STAGE, {**STAGE, "notes": None}],
        [{**STAGE, "notes": ["\ud800"]}],
    )
    texts = [json.dumps({"format": AUDIT_FORMAT, "stages": stages}) for stages in foreign]
    for text in (*texts, "{", "[]", '{"format": 1}', json.dumps({"format": 99, "stages": [STAGE]})):
        (folder / AUDIT).write_text(text)
        [stage] = read_audit(folder)
        assert said in " ".join(audit_lines(stage)), text
    assert said in fedstrata.report(folder).read_text("utf-8")
    (folder / AUDIT).write_text(json.dumps({"format": AUDIT_FORMAT, "stages": [STAGE]}))
    page = fedstrata.report(folder).read_text("utf-8")
    assert "a note of its own" in page
    assert said not in page
    (folder / AUDIT).unlink()
    assert read_audit(folder) == []
    assert said not in fedstrata.report(folder).read_text("utf-8")
