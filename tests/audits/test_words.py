"""What can be read is said in the same words everywhere."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from typer.testing import CliRunner

import fedstrata
from fedstrata.cli import app
from fedstrata.events import Event, StageStarted
from fedstrata.exchanges import EXCHANGES
from fedstrata.plan.disclosure import LENGTH, NAMES, POOLED, READ, SENT, Channel, beside, sentence
from fedstrata.plan.messages import Reply
from fedstrata.plan.plan import Plan
from fedstrata.server.server import Server
from fedstrata.sites.templates import SITE
from fedstrata.tasks.classify import Classify

Jobs = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]


def plain(text: str) -> str:
    return re.sub(r"[\s#]+", " ", text)


def test_permission_texts_and_site_toml_take_their_words_from_the_table() -> None:
    for payload, words in SENT.items():
        assert EXCHANGES[payload].permission == words
        assert plain(words) in plain(SITE)


@pytest.mark.parametrize("page", ["docs/security.md", "docs/deploy.md"])
def test_documents_have_the_words_of_the_table(page: str) -> None:
    text = plain((ROOT / page).read_text("utf-8"))
    for words in SENT.values():
        assert plain(words) in text


def test_the_page_on_security_has_every_channel() -> None:
    text = plain((ROOT / "docs" / "security.md").read_text("utf-8"))
    for channel, words in READ.items():
        assert f"| {NAMES[channel]} | {words} |" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.toml"], "nowhere.toml: cannot be read"),
        (["job.toml", "--attacks", "dager"], "--attacks: 'dager' is no attack"),
        (["job.toml", "--attacks", ","], "--attacks: names none"),
        (["job.toml", "--client", "north"], "--client: 'north' is no client"),
        (["job.toml", "--public", "nowhere.csv"], "--public: nowhere.csv: there is no such file"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, public: str
) -> None:

    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job("fedavg", "classify")), "utf-8")
    done = CliRunner().invoke(app, ["audit", *words])
    assert done.exit_code == 2
    assert f"fedstrata: {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_prints_a_table_and_sentences(job: Jobs, tmp_path: Path, public: str) -> None:

    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(job("fedbt", "classify")), "utf-8")
    done = CliRunner().invoke(app, ["audit", str(path), "--public", public, "--client", "client-1"])
    assert done.exit_code == 0, done.output
    assert "from the classifier's bias the server reads" in done.stdout
    assert "audit.json" in done.stdout


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_an_audit_after_a_run_is_on_its_page(job: Jobs, tmp_path: Path, public: str, words: list[str]) -> None:
    path, made = tmp_path / "job.toml", job("fedbt", "classify", method={"rounds": 1}, train={"steps": 1})
    path.write_text(tomli_w.dumps(made), "utf-8")
    page = fedstrata.report(fedstrata.run(made).folder)
    assert "bias the server reads" not in page.read_text("utf-8")
    done = CliRunner().invoke(app, ["audit", str(path), "--public", public, "--attacks", "class_head", *words])
    assert done.exit_code == 0, done.output
    assert "bias the server reads" in page.read_text("utf-8")
    assert bool(words) == done.stdout.startswith("{")


def test_a_masked_reply_keeps_its_loss_and_a_noised_one_its_rows() -> None:
    said = [beside(*each) for each in (("none", False), ("none", True), ("example", False), ("client", True))]
    assert ["loss" in words for words in said] == [True, False, False, False]
    assert ["examples" in words for words in said] == [True, True, True, False]
    assert ["tokens" in words for words in said] == [True, True, False, False]


def test_a_reply_tells_how_many_tokens_went_through_the_model(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so about the length of the texts, which no part of the model need tell."""
    told, check = list[int](), Server.check

    def noted(server: Server, plan: Plan, reply: Reply) -> None:
        told.append(reply.work.tokens)
        check(server, plan, reply)

    monkeypatch.setattr(Server, "check", noted)
    fedstrata.run(job("fedbt", "classify", method={"rounds": 1}))
    assert told
    assert all(told)
    assert "steps and tokens" in beside("none", False)


def test_a_reply_tells_the_longest_texts_of_two_batches(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sum of the batches' lengths and that of their squares: no part of the model need be sent for it."""
    told, check = list[Reply](), Server.check
    widths, batch = list[int](), Classify.batch

    def noted(server: Server, plan: Plan, reply: Reply) -> None:
        told.append(reply)
        check(server, plan, reply)

    def made(*arguments: Any) -> Any:
        found = batch(*arguments)
        widths.append(found.inputs["input_ids"].shape[1])
        return found

    monkeypatch.setattr(Server, "check", noted)
    monkeypatch.setattr(Classify, "batch", made)
    train = {"group_by_length": False}
    fedstrata.run(job("fedbt", "classify", clients={"count": 1}, method={"rounds": 1}, train=train | {"steps": 2}))
    [reply] = told
    total, squares = reply.work.tokens / 2, reply.work.pairs / 2  # batches of two texts
    apart = (2 * squares - total**2) ** 0.5
    read = {(total + apart) / 2, (total - apart) / 2}
    assert any(read == set(pair) for pair in itertools.pairwise(widths))
    assert "if there are few batches, the length of the longest text of each" in beside("none", False)


@pytest.mark.parametrize("level", ["none", "example", "client"])
@pytest.mark.parametrize("sum_only", [False, True])
def test_of_sums_nobody_is_read_and_under_noise_no_word(level: str, sum_only: bool) -> None:
    found: dict[Channel, str] = {channel: READ[channel] for channel in ("embeddings", "class_head")}
    said = sentence(found, level, sum_only)
    assert ("of a round's clients together, not of each" in said) is sum_only
    assert ("of each client" in said) is not sum_only
    assert (READ["embeddings"] in said) is (level == "none")
    assert ("with noise" in said) is (level != "none")
    assert ("fedstrata audit" in said) is not sum_only
    assert sentence({}, level, sum_only) == ""


@pytest.mark.parametrize(
    ("omit", "words"),
    [
        ([], f"from the embeddings {READ['embeddings']}; from the language model's head {READ['token_head']}"),
        (["position_rows"], "every word of the texts; from"),
        (["unlisted_rows"], "from the embeddings every word of the public vocabulary in the texts"),
        (["decoder_bias"], f"{READ['embeddings']}; from the language model's head {READ['token_head']}"),
        (["embeddings"], f"can read of each client: from the language model's head {READ['token_head']}"),
    ],
)
def test_what_is_left_out_is_not_said_to_be_read(job: Jobs, tmp_path: Path, omit: list[str], words: str) -> None:
    (tmp_path / "words.txt").write_text("the\nof\n", "utf-8")
    listed = {"public_vocabulary": str(tmp_path / "words.txt")} if omit == ["unlisted_rows"] else {}
    [forecast] = fedstrata.forecast(job("fedavg", "mlm", 3, privacy={"omit": omit, **listed})).values()
    [said] = forecast["readable"]
    assert words in said


@pytest.mark.parametrize(("name", "method"), [("fedavg", {}), ("fedfreezebert", {"head": "mean"})])
def test_a_head_of_numbers_is_said_to_tell_them(
    job: Jobs, tmp_path: Path, name: str, method: dict[str, Any]
) -> None:
    """Where it alone is sent too, of which the audit reads nothing."""
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"the kidney {n},{n}\n" for n in range(24)))
    made = job(name, "regress", 3, method=method)
    made["data"] |= {"train": str(tmp_path / "rows.csv"), "test": str(tmp_path / "rows.csv")}
    [forecast] = fedstrata.forecast(made).values()
    [said] = forecast["readable"]
    assert f"from {NAMES['number_head']} {READ['number_head']}" in said
    assert ("fedstrata audit" in said) == (name == "fedavg")


@pytest.mark.parametrize(("head", "told"), [("psum", True), ("hsum", True), ("mean", False)])
def test_layers_of_a_head_are_said_to_tell_what_layers_tell(job: Jobs, public: str, head: str, told: bool) -> None:
    """FedFreezeBERT's default head has four: classes alone were named, and nothing said that none reads them."""
    made = job("fedfreezebert", "classify", 4, method={"head": head})
    [forecast] = fedstrata.forecast(made).values()
    assert (f"from the layers {READ['layers']}" in forecast["readable"][0]) is told
    notes = fedstrata.audit(made, public=public)["stages"][0]["notes"]
    assert ("layers of the head: no attack here reads layers above the lowest; others may" in notes) is told


@pytest.mark.parametrize(
    ("name", "privacy", "words"),
    [
        ("fedavg", {}, "the server can read of each client: from the embeddings"),
        ("fedavg", {"sum_only": True}, "not of each by itself: from the embeddings"),
        ("fedbt", {"level": "example", "noise": 1.0}, "the server sees of each client, with noise: "),
        ("centralized", {}, POOLED),
    ],
)
def test_run_and_forecast_say_what_holds_for_the_job(
    job: Jobs, name: str, privacy: dict[str, Any], words: str
) -> None:
    made = job(name, "classify", 3, privacy=privacy, method={"rounds": 1}, train={"steps": 1})
    if "level" in privacy:
        made["task"]["labels"] = ["eye", "heart", "kidney"]
    events = list[Event]()
    fedstrata.run(made, progress=events.append)
    [started] = [event for event in events if isinstance(event, StageStarted)]
    [forecast] = fedstrata.forecast(made).values()
    said = [line for line in started.notes if words in line]
    assert len(said) == 1
    assert forecast["readable"] == said


def test_a_forecast_says_what_is_read_also_of_a_client_that_is_never_asked(job: Jobs) -> None:
    made = job("fedavg", "classify", 3, clients={"fraction": 0.34}, method={"rounds": 1})
    for client in ("client-0", "client-1", "client-2"):
        [forecast] = fedstrata.forecast(made, client=client).values()
        [said] = forecast["readable"]
        assert f"from the embeddings {READ['embeddings']}; " in said


@pytest.mark.parametrize(("merge", "told"), [("plain", True), ("alternate", True), ("freeze_a", False)])
def test_an_adapter_of_the_embeddings_tells_words_as_they_do(job: Jobs, merge: str, told: bool) -> None:
    lora = {"kind": "lora", "rank": 2, "targets": ["word_embeddings"], "merge": merge}
    [forecast] = fedstrata.forecast(job("fedavg", "classify", adapter=lora)).values()
    [said] = forecast["readable"]
    assert (f"from the embeddings {READ['embeddings'].removesuffix(LENGTH)}; " in said) is told
    assert LENGTH not in said, "of positions nothing is sent"


@pytest.mark.parametrize(("merge", "told"), [("plain", True), ("alternate", True), ("freeze_a", False)])
def test_an_adapter_of_positions_alone_tells_the_length_of_the_longest_text(
    job: Jobs, public: str, merge: str, told: bool
) -> None:
    """No word does it tell, so nothing was said of the embeddings, and nothing of the length."""
    lora = {"kind": "lora", "rank": 2, "targets": ["position_embeddings"], "merge": merge}
    made = job("fedavg", "classify", adapter=lora)
    [forecast] = fedstrata.forecast(made).values()
    [said] = forecast["readable"]
    assert ("; the length of the longest text" in said) is told
    findings = fedstrata.audit(made, public=public, attacks=["embeddings", "class_head"])["stages"][0]["findings"]
    read = [one["attack"] for one in findings if one["channel"] == "adapters"]
    assert ("columns of positions" in read) is told


def test_what_was_trained_since_a_part_was_last_sent_is_said_not_to_be_attacked(
    job: Jobs, public: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit starts a later round from a model, while a client has gone on with its own values of the part."""
    one = {"steps": 1, "batch_size": 1, "weight_decay": 0.0, "seed": 1}
    made = job("fedavg", "classify", train=one, wire={"part_period": 2}, method={"rounds": 4})
    told, check = dict[int, torch.Tensor](), Server.check

    def noted(server: Server, plan: Plan, reply: Reply) -> None:
        if reply.client == "client-0" and "embeddings" in reply.weights:
            table = server.parts.words
            change = reply.weights["embeddings"][table] - server.received("embeddings")[table]
            told.setdefault(len(told), change.any(1))
        check(server, plan, reply)

    monkeypatch.setattr(Server, "check", noted)
    fedstrata.run(made)
    monkeypatch.undo()
    record = fedstrata.audit(made, public=public)["stages"][0]
    words = [f for f in record["findings"] if f["setting"] == "1 step of round 2" and f["attack"] == "rows moved"]
    [found] = [finding["figures"]["recall"]["count"][1] for finding in words]
    assert found < int(told[0].sum()) - 2, "without what begins and ends a text"
    line = "also tells of the texts of the rounds since the last sending ([wire] part_period)"
    [said] = [note for note in record["notes"] if line in note]
    assert said.startswith("embeddings, layer.1, pooler, head: what is sent in round 2 ")
