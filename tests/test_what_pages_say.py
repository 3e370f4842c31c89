"""What pages say beyond commands and keys: rules, fields, files and words, held to the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import tomli_w
import torch
import transformers
import typer
from typer.testing import CliRunner

import fedstrata
from fedstrata.cli import app
from fedstrata.client.facts import baseline
from fedstrata.client.precision import LEAST_STATES, LEAST_WIDTH, TYPICAL_TOKENS
from fedstrata.cost.target import Reached, reached
from fedstrata.data import first_job
from fedstrata.data.dealing import named_after
from fedstrata.data.forms.how import How
from fedstrata.data.forms.plain import document_records
from fedstrata.data.prepare import prepare_own, prepare_test
from fedstrata.data.tokens import cache_folder
from fedstrata.errors import UserError
from fedstrata.events import Noted
from fedstrata.exchanges.sums import tell_closed
from fedstrata.job.file import load
from fedstrata.job.metrics import Predictions, macro_f1
from fedstrata.job.tables import Job, Server
from fedstrata.methods import METHODS
from fedstrata.models.families import FAMILIES, NOT_TRAINED, SPLITTABLE
from fedstrata.models.parts import find_parts
from fedstrata.plan.disclosure import beside
from fedstrata.plan.kinds import FORMAT, LOWER_IS_BETTER
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.streams import SERVER, Streams
from fedstrata.privacy.accounting import calibrate
from fedstrata.privacy.sum_terms import Group
from fedstrata.reports.privacy import privacy_lines
from fedstrata.runs.notes import check_names
from fedstrata.runs.privacy import combined_privacy, settle_privacy
from fedstrata.runs.resume import FREE, changes, same_job
from fedstrata.server.records import MemoryRecords
from fedstrata.sites.answers import SESSIONS, Answer, Answers
from fedstrata.sites.gate import Gate
from fedstrata.sites.limit_tables import Limits
from fedstrata.sites.permission import NotNow, Refused
from fedstrata.sites.release_log import Release, ReleaseLog, now, read_log
from fedstrata.sites.settings import Data
from fedstrata.sweeps.cells import cells
from fedstrata.wire.codec import payload_bytes
from fedstrata.wire.tensor_file import pack
from pages import DOCS
from tiny import tiny_model

ROOT = DOCS.parent
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
BRITISH = re.compile(
    r"\b(defence|travell|labell|modell|learnt|behaviour|colour|favour|neighbour|grey|"
    r"(organ|optim|initial|normal|recogn|summar|random|minim|maxim|real)is(e|es|ed|ing)\b)",
    re.IGNORECASE,
)
TABLES = {"Train": "[train]", "Head": "a kind of head", "Engine": "an engine"}
"""Class of a table of the job file -> the row of CONTRIBUTING that says where it is."""


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def section(name: str, title: str) -> str:
    return page(name).split(f"\n## {title}\n")[1].partition("\n## ")[0]


def test_readme_shows_what_forecast_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of BERT-base's config in a folder of the hub's name; its memory was that of an earlier version."""
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text("utf-8")
    [(words, shown)] = re.findall(r"^\$ fedstrata (forecast .*)\n((?:.*\n)*?)```$", readme, re.MULTILINE)
    transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained("bert-base-uncased")
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    bare = [re.sub(r"[\s─]+", " ", text).strip() for text in (shown, done.output)]
    assert bare[0] in bare[1]


def test_the_job_page_has_the_rule_of_the_precision() -> None:
    said = page("job.md").split("\nprecision = ")[1].partition("\nmlm_head = ")[0]
    rule = rf"at least {LEAST_WIDTH} and, times batch_size and #? *min\(max_tokens, {TYPICAL_TOKENS}\), "
    assert re.search(rf"{rule}at least {LEAST_STATES:,}", re.sub(r"\s+#?\s*", " ", said))


def test_the_job_page_names_every_key_that_may_differ_when_a_run_goes_on() -> None:
    said = section("job.md", "What may change when a run is resumed")
    for table, keys in FREE.items():
        for key in keys:
            assert f"`{table}.{key}`" in said or f"`[{table}]`" in said, f"[{table}] {key}"


def test_pages_say_what_may_not_change_in_a_run_with_noise(tmp_path: Path) -> None:
    """They said that a lower rate and more rounds always may."""

    def job(rounds: int, rate: float, **privacy: Any) -> Job:
        made = Job(
            task={"kind": "classify", "labels": ["a", "b"]},
            model={"name": "m"},
            data={"train": "a.csv", "test": "b.csv"},
            method={"name": "fedavg", "rounds": rounds},
            train={"learning_rate": rate, "device": "cpu", "precision": "fp32"},
            privacy={"level": "client", "single_message": True, **privacy},
        )
        return settle_privacy(made, ["x", "y"])

    same_job(job(2, 1e-3, epsilon=8.0), tmp_path)
    with pytest.raises(UserError, match="would spend its epsilon twice"):
        changes(job(2, 1e-4, epsilon=8.0), tmp_path)
    with pytest.raises(UserError, match="calibrated for the rounds that it began with"):
        changes(job(3, 1e-3, epsilon=8.0), tmp_path)
    same_job(job(2, 1e-3, epsilon=8.0, participations=3), tmp_path / "more")
    assert changes(job(3, 1e-3, epsilon=8.0, participations=3), tmp_path / "more")
    said = " ".join(section("job.md", "What may change when a run is resumed").split())
    assert "Not with noise (`[privacy] level`)" in said
    assert "nor with `[privacy] epsilon`, unless `participations` was set for so many" in said
    assert "with a lower rate, but not if `[privacy]` adds noise" in page("troubleshooting.md")


def test_the_job_page_names_every_column_of_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    (tmp_path / "north" / "a.txt").write_text("A text.", "utf-8")
    [(_, row)] = document_records(tmp_path, [tmp_path / "north" / "a.txt"], How(("text",)))
    [said] = re.findall(r"^\| a folder \| (.*) \|$", page("job.md"), re.MULTILINE)
    assert all(f"`{column}`" in said for column in row)


def test_the_job_page_says_how_clients_of_a_column_are_called() -> None:
    """By these names `local_layers` and `rank` know them."""
    [(value, name)] = re.findall(
        r"^column = .* called as a file can be: (.*) is (\S+)$", page("job.md"), re.MULTILINE
    )
    assert list(named_after({value: np.arange(1)})) == [name]


def test_the_job_page_says_what_noise_of_several_stages_comes_to() -> None:
    noise = {"level": "client", "epsilon": 1.0, "clients": {}}
    found = combined_privacy([("one", noise), ("two", None)])
    assert found is not None
    assert all(f"`{field}`" in section("job.md", "Noise") for field in found)


def test_the_page_of_output_files_says_whose_privacy_stands_at_the_top_of_stages() -> None:
    """It said that it is the last stage's; the sum of both is more, and of a stage without noise there is none."""
    own = {"a": {"rounds": 2, "noise": 1.0, "rate": 1.0, "releases": 2, "epsilon": 6.0}}
    noise = {"level": "client", "delta": 1e-5, "accountant": "pld", "honest": None, "epsilon": 6.0, "clients": own}
    both, one = (
        combined_privacy([("one", noise), ("two", noise)]),
        combined_privacy([("one", noise), ("two", None)]),
    )
    assert both is not None
    assert one is not None
    assert both["epsilon"] > noise["epsilon"]
    assert one["epsilon"] is None
    [said] = re.findall(r"^\| `stages` \| (.*) \|$", page("output-files.md"), re.MULTILINE)
    assert "`privacy` is what [all stages together]" in said
    assert {field for own in both["clients"].values() for field in own} == {"rounds", "epsilon"}
    said = " ".join(section("job.md", "Noise").split())
    assert "Of several stages together `clip` is the last one's, and `clients` has each one's `rounds` and" in said


def test_pages_say_that_between_sites_there_is_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\nA text.,a\nAnother.,b\n", "utf-8")
    job = Job(
        task={"kind": "classify", "labels": ["a", "b"]},
        data={"train": str(tmp_path / "rows.csv"), "test": str(tmp_path / "rows.csv")},
        method={"name": "fedavg"},
        engine={"name": "flower", "federation": str(tmp_path)},
    )
    data = prepare_test(job, None)
    assert (len(data.train), len(data.test)) == (0, 2)
    train, test = (
        MagicMock(labels=np.zeros(len(rows)), __len__=MagicMock(return_value=len(rows)))
        for rows in (data.train, data.test)
    )
    assert baseline(job, MagicMock(train=train, test=test), data.labels, personal=False) == ("", {})
    [said] = re.findall(r"^\| `baseline` \| (.*) \|$", page("output-files.md"), re.MULTILINE)
    assert said.endswith("null for `mlm` and `clm`, and between sites")
    rows = " ".join(section("job.md", "What a run says of its rows").split())
    assert "`mlm` and `clm` have none, nor has a run between sites" in rows


@pytest.mark.parametrize(
    "recorded", [{"stage": "one"}, {"components": {"method": "mine"}}, {"changes": [{"key": "method.rounds"}]}]
)
def test_the_page_of_output_files_says_which_record_of_a_job_does_not_run_again(
    tmp_path: Path, recorded: dict[str, Any]
) -> None:
    """It said that each does."""
    job, path = (
        {"task": {"kind": "mlm"}, "model": {"name": "m"}, "data": {"train": "a.txt"}},
        tmp_path / "job.toml",
    )
    whole = {"format": FORMAT, **job, "method": {"name": "fedavg"}}
    path.write_text(tomli_w.dumps(whole), "utf-8")
    assert load(path)
    path.write_text(tomli_w.dumps({**whole, **recorded}), "utf-8")
    with pytest.raises(UserError, match=r"is the record of stage|does not repeat it"):
        load(path)
    [said] = re.findall(r"^\| `job.toml` \| (.*) \|$", page("output-files.md"), re.MULTILINE)
    assert "Refused are the record of one stage of several, and that of a run with objects of your own" in said
    assert "or whose keys were changed on the way" in said


def test_the_page_of_errors_says_with_which_code_a_file_that_cannot_be_read_ends(tmp_path: Path) -> None:
    """It said that this is 1."""
    done = CliRunner().invoke(app, ["validate", str(tmp_path)])
    assert "cannot be read" in done.output
    [said] = re.findall(rf"^\| {done.exit_code} \| ([^|]*) \|", page("errors.md"), re.MULTILINE)
    assert "a file that cannot be read" in said


def test_pages_say_that_a_part_can_be_missing_too() -> None:
    """Whoever counted the lines of ``missing.jsonl`` by client took a part for one."""
    group, records = Group(("layer.1",), ("a", "b", "c")), MemoryRecords()
    opening = MagicMock(roster=MagicMock(groups=(group,)), survivors=("a", "b"))
    told: list[object] = []
    tell_closed(MagicMock(records=records, tell=told.append), 0, opening, set())
    assert told == [Noted("round 1: layer.1 stays as it was: its sum would be that of 2 clients, fewer than 3")]
    assert [line["client"] for line in records.lines("missing")] == ["layer.1"]
    [said] = re.findall(r"^\| `missing.jsonl` \| (.*) \|$", page("output-files.md"), re.MULTILINE)
    assert "With `sum_only` also a part, named as `client`," in said
    [said] = re.findall(r"^\| `missing.jsonl` \| (.*) \|$", page("errors.md"), re.MULTILINE)
    assert "with masked sums also which part stayed as it was" in said


def test_the_job_page_says_which_layers_a_forecast_lists() -> None:
    """Those that are trained; ``layers`` of a run's records are those that are built."""
    assert "the `layers` that it trains" in section("job.md", "What it will cost")


def test_the_page_of_output_files_says_what_stands_at_the_top_of_stages() -> None:
    [said] = re.findall(r"^\| `stages` \| (.*) \|$", page("output-files.md"), re.MULTILINE)
    assert "their names" in said
    assert "`bytes`, `flops` and `seconds` are sums" in said


def test_the_job_page_says_what_a_class_that_is_not_there_counts_in_macro_f1() -> None:
    right = np.array([0, 1])
    assert macro_f1(Predictions(right, right, labels=("a", "b", "c"))) == pytest.approx(2 / 3)
    said = " ".join(section("job.md", "GLUE, and clients that test on their own rows").split())
    assert "one that no scored row has and that is never predicted counts 0" in said


def test_the_job_page_says_that_scores_of_named_sources_have_masks_of_their_own(
    job: Callable[..., dict[str, Any]], sentences_csv: Path
) -> None:
    """The same rows twice: each source has the score that it has alone, and both together another one."""
    twice = dict.fromkeys(("a", "b"), str(sentences_csv))
    made = job("fedavg", "mlm", data={"test": twice}, method={"rounds": 1}, train={"steps": 1})
    score = fedstrata.run(made).score
    assert score["loss.a"] == score["loss.b"] != pytest.approx(score["loss"], rel=1e-4)
    assert "Of `mlm` each of these scores has masks of its own" in page("job.md")


def test_the_guide_on_tasks_says_which_metrics_are_better_when_smaller() -> None:
    names = " and ".join(f"`{name}`" for name in LOWER_IS_BETTER)
    said = " ".join(page("guides/add-a-task.md").split())
    assert f"Larger is better for every metric but {names}: `output.target`" in said
    start, better = (
        {"round": at - 1, "client": SERVER, "score": {"error": -error}} for at, error in enumerate((2, 1))
    )
    assert reached(-1, "error", [start, better], []) == Reached(1, {"up": 0, "down": 0})


def test_the_privacy_page_has_the_noise_of_the_whole_model_by_its_formula() -> None:
    [cells] = re.findall(
        r"^\| the whole model \| ([\d.]+) million \| (\d+) \| (\d+) \| (\d+) \|$", page("privacy.md"), re.M
    )
    times = calibrate(8.0, 1e-5, "rdp", 1.0, 3) * (float(cells[0]) * 1e6) ** 0.5
    assert [float(cell) for cell in cells[1:]] == [float(f"{times / clients:.2g}") for clients in (6, 60, 240)]


def test_readme_names_the_whole_run_that_was_no_faster_than_a_loop() -> None:
    table = page("results/speed.md").partition("<!-- end of table -->")[0]
    no_faster = []
    for row, lines in re.findall(r"^\*\*([^*]+)\*\*: .*\n\n((?:\|.*\n)+)", table, re.M):
        seconds = {name: float(found) for name, found in re.findall(r"^\| ([^|]+) \| ([\d.]+) \(", lines, re.M)}
        own = min(found for name, found in seconds.items() if name.startswith("fedstrata"))
        no_faster += [
            (row, name) for name, found in seconds.items() if not name.startswith("fed") and found <= own
        ]
    said = " ".join((ROOT / "README.md").read_text("utf-8").split("[Whole runs]")[1].split("\n* ")[0].split())
    assert no_faster == [("same", "careful loop")]
    assert "took as long as a careful loop" in said


def test_the_glossary_has_the_words_of_tables_in_their_order() -> None:
    words = re.findall(r"^\| ([^|]+) \| .* \|$", page("glossary.md"), re.MULTILINE)[1:]
    assert {"cell", "example", "part", "plan", "payload"} <= set(words)
    assert [word.casefold() for word in words] == sorted(word.casefold() for word in words)


def test_contributors_are_sent_to_the_file_that_has_a_table() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()
    for name, what in TABLES.items():
        [line] = [line for line in lines if line.startswith(("| a `", "| ")) and what in line.split("|")[1]]
        file = next(f for f in re.findall(r"`(job/\w+\.py)`", line))
        assert f"\nclass {name}(Table):" in (ROOT / "src" / "fedstrata" / file).read_text("utf-8"), line


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_in_american_spelling(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.name == "job.md":  # which names the old keys
        text = re.sub(r"^.*(optimiser|centralised).*$", "", text, flags=re.MULTILINE)
    assert not BRITISH.findall(text)


def test_what_a_user_reads_on_screen_is_in_american_spelling() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"\b([Gg]rey|learnt|labell|defence)", path.read_text("utf-8")), path


def test_the_deploy_page_says_which_limit_of_bytes_costs_a_round_and_which_the_run(tmp_path: Path) -> None:
    """It said of all three that a round is sat out."""
    log = ReleaseLog(tmp_path)
    Gate(Limits(bytes_per_day=10), log).check_bytes("a" * 32, 10)
    log.append(Release(now().isoformat(), "a" * 32, 0, "weights", ("head",), 8, 9, "0" * 64))
    for limit, kind in (("bytes_per_run", Refused), ("bytes_per_day", NotNow)):
        with pytest.raises(kind, match=limit) as refused:
            Gate(Limits(**{limit: 10}), log).check_bytes("a" * 32, 8)
        assert type(refused.value) is kind
    [said] = re.findall(r"^\| `\[limits\] bytes_per_round` \| (.*) \|$", page("deploy.md"), re.MULTILINE)
    assert "more than a round's or a run's limit is refused before it begins" in said
    assert "sits out a round whose reply would be more than is left of a day's" in said


def test_the_deploy_page_says_which_messages_have_no_line_of_their_own_in_the_release_log(tmp_path: Path) -> None:
    """It promised one for every message: a refusal in the words of an earlier one leaves without."""
    log, message = ReleaseLog(tmp_path), pack({}, {"kind": "refusal"})
    for _ in range(2):
        Gate(Limits(), log).release(message, "a" * 32, -1, "refusal")
    assert log.count == 1
    for _ in range(2):
        Gate(Limits(), log).release(message, "a" * 32, 0, "weights", ("head",), 9)
    assert log.count == 3, "what is made of rows has one each time"
    tensors = {"states": torch.zeros(2, 3), "lengths": torch.tensor([1, 1])}
    asked = Request(1, "a", Plan((0,), ()), "train", {}, {})
    Gate(Limits(), log).release_batch("a" * 32, asked, tensors)
    [*_, (batch, _)] = read_log(tmp_path)
    assert batch.bytes == payload_bytes(tensors)
    said = " ".join(page("deploy.md").split("**What has left.**")[1].partition("```")[0].split())
    assert "such as a refusal, that repeats an earlier one word for word has no line of its own" in said
    assert "Of activations the bytes are those of the tensors" in said


def test_the_deploy_page_says_which_requests_do_not_get_the_same_bytes_again(tmp_path: Path) -> None:
    asked, answers = Request(0, "a", Plan((0,), ("head",), ("head",)), "train", {}, {}), Answers(tmp_path)
    answers.keep(Answer(0, "weights", "digest", 9), pack({}, {}))
    assert answers.find(asked, "weights", "digest", again=False) is not None
    for _ in range(SESSIONS):
        assert answers.find(asked, "weights", "digest", again=True) is None
        answers.begin(Answer(0, "weights", "digest", 9))
    with pytest.raises(Refused, match=f"has held {SESSIONS} sessions"):
        answers.find(asked, "weights", "digest", again=True)
    said = " ".join(page("deploy.md").split("A repeated request gets the same bytes again;")[1].split())
    ten = {10: "ten"}[SESSIONS]
    assert "In split learning and with masked sums, whose messages cannot be repeated, the site works" in said
    assert f"on the same request anew, {ten} times at most." in said


def test_the_deploy_page_says_when_a_site_connects_to_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that a site never does: one whose rows are a data set id loads them from the hub."""
    asked: list[str] = []

    def load_dataset(name: str, *_: Any, **__: Any) -> Any:
        asked.append(name)
        raise OSError("no network here")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    data = Data.model_validate({"train": "somebody/reviews"}, context={"home": tmp_path})
    job = Job(task={"kind": "mlm"}, data=data.model_dump(exclude_unset=True), method={"name": "fedavg"})
    with pytest.raises(UserError, match="no network here"):
        prepare_own(job, "a", tmp_path)
    assert asked == ["somebody/reviews"]
    said = " ".join(page("deploy.md").split("A site makes these connections and no others")[1].split())
    assert said.startswith(", unless its own `site.toml` names a data set of the Hugging Face hub as its rows")


def test_the_privacy_page_says_all_that_is_told_beside_a_masked_sum() -> None:
    """It left out the time, which the same run says in its first lines."""
    [said] = re.findall(
        r"^\| the server reads anything of a single site \| .* \| (.*) \|$", page("privacy.md"), re.M
    )
    told = {
        "examples": "examples",
        "steps": "steps",
        "tokens": "tokens",
        "training took": "how long training took",
    }
    assert all(word in beside("none", sum_only=True) for word in told)
    assert all(words in said for words in told.values())


def test_the_page_of_output_files_says_where_tokenized_text_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever cleared ``~/.cache/fedstrata`` by the page left the text of a machine with XDG_CACHE_HOME."""
    monkeypatch.delenv("FEDSTRATA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fedstrata"
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    [said] = [line for line in page("output-files.md").splitlines() if line.startswith("| `~/.cache/fedstrata`")]
    assert "with `$FEDSTRATA_CACHE` in that folder, else with `$XDG_CACHE_HOME` in `fedstrata` there" in said


PLAIN: dict[str, Any] = {
    "model": {"name": "m"},
    "task": {"kind": "mlm"},
    "data": {"train": "a.txt"},
    "method": {"name": "fedavg"},
}


@pytest.mark.parametrize(
    ("table", "name", "start", "end"),
    [
        (
            {"level": "client", "noise": 1.0, "single_message": True},
            "privacy.md",
            "## Refused, and why\n",
            "\nAllowed,",
        ),
        ({"sum_only": True}, "security.md", "**What it cannot be combined with**", "\n\n**"),
    ],
    ids=["noise", "sums"],
)
def test_pages_name_asynchronous_rounds_among_what_is_refused(
    table: dict[str, Any], name: str, start: str, end: str
) -> None:
    """Both lists left them out, so that the refusal came as a surprise."""
    with pytest.raises(UserError, match=r"\[engine\] buffer: does not go with \[privacy\]"):
        check_names(Job(**{**PLAIN, "engine": {"buffer": 2}, "privacy": table}))
    assert re.search(r"`(engine\.buffer|\[engine\] buffer)`", page(name).split(start)[1].partition(end)[0])


def test_the_guide_on_new_models_says_which_switch_of_privacy_needs_a_tokenizer() -> None:
    """It said any, also sums and omissions, with which one can be trained."""
    new = {**PLAIN, "model": {"config": {"preset": "roberta-small"}}}
    check_names(Job(**new, privacy={"sum_only": True, "omit": ["position_rows"]}))
    with pytest.raises(UserError, match=r"\[model\] tokenizer: is missing"):
        check_names(Job(**new, privacy={"level": "example", "noise": 1.0}))
    said = " ".join(page("guides/from-scratch.md").split())
    assert "between sites, and where `[privacy] level` adds noise, name an existing one" in said


def test_the_privacy_page_says_where_each_clients_own_epsilon_is() -> None:
    """It said of the screen and of the page what only the records have."""
    own = {"a": {"epsilon": 1.25}, "b": {"epsilon": 5.5}, "c": {"epsilon": 9.75}}
    record = {"level": "example", "clip": 1.0, "delta": 1e-5, "accountant": "pld", "epsilon": 9.75, "clients": own}
    told = "\n".join(privacy_lines(record))
    assert "epsilon 9.75 at most, 1.25 at least" in told
    assert "5.5" not in told
    said = " ".join(page("privacy.md").split("**Where epsilon is shown.**")[1].partition("\n\n")[0].split())
    assert (
        "the largest epsilon of any client and, where it differs, the smallest; `--json` and `result.json` also"
        in said
    )


def test_the_guide_from_scripts_says_which_line_to_delete_before_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followed word for word on a CPU, "one client with all rows" trained on a sixth of what six clients saw."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_job, "_gpu", lambda: False)
    rows = [f"A text of the number {i}.,{'ab'[i % 2]}" for i in range(40)]
    Path("train.csv").write_text("\n".join(["text,label", *rows]), "utf-8")
    assert CliRunner().invoke(app, ["init", "train.csv", "--model", "m"]).exit_code == 0
    [job] = load(Path("job.toml"), ["method.name=centralized"])
    assert job.train.steps == load(Path("job.toml"))[0].train.steps is not None
    said = " ".join(page("guides/from-scripts.md").split())
    assert "If `init` has written a key `steps`, which it does on a machine without a GPU, delete that" in said


def test_the_questions_say_which_other_models_work_and_which_do_not() -> None:
    """They named six architectures, as if no other worked, though the decisions had others that are tested."""
    [said] = re.findall(r"^\*\*Which models work\?\*\*(.*?)\n\n", page("faq.md"), re.MULTILINE | re.DOTALL)
    works, refused = " ".join(said.split()).lower().split(" only ")
    assert all(name in works.replace("-", "") for name in FAMILIES)  # test_families.py runs the others
    assert all(name in works for name in ("deberta", "mpnet", "xlm-roberta"))
    assert all(name in refused for name in (*NOT_TRAINED, *(set(FAMILIES) - set(SPLITTABLE))))
    assert all(name in page("decisions/models.md").lower() for name in NOT_TRAINED)


def test_the_page_of_plans_says_what_methods_with_equal_plans_differ_in() -> None:
    """It said that plans are all that distinguishes methods."""
    parts = find_parts(tiny_model())
    avg, prox, adam = (METHODS[name]() for name in ("fedavg", "fedprox", "fedadam"))
    plans = [method.plan(parts, "classify", 1, "a", Streams(0)) for method in (avg, prox, adam)]
    assert plans[0] == plans[1] == plans[2]
    assert "proximal_mu" in prox.presets()["train"]
    assert adam.presets()["server"]["optimizer"] == "adam"
    said = " ".join(section("concepts/parts-and-plans.md", "Plans").split())
    assert "FedProx sets a key, the proximal term, and FedAdam the server's optimizer" in said


def test_the_job_page_has_the_values_of_a_key_as_they_are_written() -> None:
    """Of ``evaluate`` it said "only at the end", from which nobody could tell that the value is ``end``."""
    [server] = re.findall(r"^evaluate = .*# (\w+): .* \| (\w+): ", page("job.md"), re.MULTILINE)
    assert server == get_args(Server.model_fields["evaluate"].annotation)
    assert re.search(r"^accountant = .* pld \(by privacy loss distributions\) \| rdp \(by R", page("job.md"), re.M)


@pytest.mark.parametrize("name", ["run", "forecast", "audit"])
def test_functions_take_the_three_forms_of_a_job_that_the_python_page_names(name: str) -> None:
    """By its annotation an audit took no Job, so that a type checker refused what the page says and works."""
    kinds = inspect.signature(getattr(fedstrata, name)).parameters["job"].annotation
    assert set(kinds.split(" | ")) == {"str", "Path", "Mapping[str, Any]", "Job"}
    assert "A job is the path of a job file, a dictionary with its tables, or a `fedstrata.Job`." in page(
        "python.md"
    )


def test_the_index_says_where_pages_are_that_a_clone_does_not_hold() -> None:
    """On GitHub and in a clone four of its links led nowhere, without a word."""
    made = {
        found
        for found in re.findall(r"\]\((reference/\w+\.md)\)", page("index.md"))
        if not (DOCS / found).exists()
    }
    assert made == {f"reference/{name}.md" for name in ("keys", "sites", "commands", "methods", "python")}
    said = " ".join(page("index.md").split())
    assert "The pages under `reference` are made from the code when `make docs` builds the site" in said


def test_the_page_of_output_files_says_in_which_folder_a_row_of_a_sweep_is() -> None:
    """Who wanted to delete a cell to run it anew found no folder of the row's name."""
    [said] = re.findall(r"^\| `cells/ROW/seed-N/` \| (.*) \|$", page("output-files.md"), re.MULTILINE)
    [(row, folder)] = re.findall(r"`([^`]+)` is in `([^`]+)`", said)
    job = {**PLAIN, "output": {"dir": "out"}, "sweep": {"grid": {"train.learning_rate": [1e-4]}}}
    [named] = cells({**job, "sweep": {**job["sweep"], "rows": [{"name": "FedAvg"}]}})[2]
    assert (named.row, named.folder.parent) == (row, Path("out/cells") / folder)
    [alone] = cells({**job, "sweep": {}})[2]
    assert alone.folder == Path("out/cells/all/seed-0")


def test_the_python_page_says_where_each_clients_own_model_is(job: Callable[..., dict[str, Any]]) -> None:
    """Of FedSplitBERT it named a folder of one model, which is None, and not how to get to the others."""
    result = fedstrata.run(job("fedsplitbert", "classify", method={"rounds": 1}, train={"steps": 1}))
    assert result.model_folder is None
    assert all((result.folder / own["model"] / "config.json").exists() for own in result.clients.values())
    assert "None where each client has its own model" in page("python.md")
    assert re.search(
        r"`result\.clients` \|.* its own `score` and `model`, a folder in `result\.folder`", page("python.md")
    )


def test_the_page_of_payloads_names_the_option_by_which_hidden_states_leave() -> None:
    """It said "a central head", a word that no option and no other page has."""
    [said] = re.findall(r"^\* \*\*hidden states\*\*:.*$", page("concepts/parts-and-plans.md"), re.MULTILINE)
    [(name, variant)] = re.findall(r'`(\w+)` with `variant = "(\w+)"`', said)
    assert METHODS[name](variant=variant).exchange == "hidden_states"


def test_the_deploy_page_says_which_commands_have_to_be_told_that_there_are_no_keys() -> None:
    """It left out ``federation status``, which then says that the server does not answer."""
    group: Any = typer.main.get_command(app)
    found = {
        **group.commands,
        **{f"federation {name}": own for name, own in group.commands["federation"].commands.items()},
    }
    has = {name for name, own in found.items() if any("--insecure" in option.opts for option in own.params)}
    [said] = re.findall(r"^\* `--insecure`, on (.*) alike", page("deploy.md"), re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", said)) == has


def test_pages_say_which_tests_make_test_leaves_out(pytestconfig: pytest.Config) -> None:
    """README, CONTRIBUTING and ``make help`` said all; and a page named a mark that pytest does not know."""
    assert "not deploy" in pytestconfig.getini("addopts")
    makefile, guide = (ROOT / "Makefile").read_text("utf-8"), (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert "## lint, layers, types and all tests but those of deploy-test" in makefile
    assert re.search(
        r"^make test .* all tests but those of the next line.*\n.*\nmake deploy-test ", guide, re.MULTILINE
    )
    assert "runs all tests" not in (ROOT / "README.md").read_text("utf-8")
    marks = {mark.partition(":")[0] for mark in pytestconfig.getini("markers")}
    for path in PAGES:
        assert set(re.findall(r"marked `(\w+)`", path.read_text("utf-8"))) <= marks, path.name


def test_the_tutorial_of_two_machines_says_where_south_types_its_commands() -> None:
    """Typed beside the folder, as on one machine, ``fedstrata join site.toml`` found no such file."""
    text = page("tutorials/two-machines.md")
    [folder] = re.findall(r"^scp -r \S+ \S+:(\w+)$", text, re.MULTILINE)
    assert f"the folder that it was sent (`{folder}`), in which it also types its commands" in text


def test_the_guide_on_clients_that_differ_says_that_test_rows_are_either_shared_or_the_clients_own() -> None:
    """Added to the job of ``init TRAIN --test FILE``, as the guide had it, ``clients.test`` was refused."""
    own = {**PLAIN, "clients": {"test": 0.2}}
    Job(**own)
    with pytest.raises(UserError, match=r"\[data\] test must go"):
        Job(**{**own, "data": {"train": "a.txt", "test": "b.txt"}})
    said = " ".join(section("guides/non-iid.md", "Score each client").split())
    assert "the page names the worst. Such a job has no `data.test`." in said
