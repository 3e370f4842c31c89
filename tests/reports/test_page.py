"""The page: complete, offline, safe, the same bytes every time."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedstrata.errors import UserError
from fedstrata.reports.page import write_page
from fedstrata.reports.parts import part_words, read_parts
from fedstrata.reports.report import write_report
from fedstrata.reports.runs import load_run
from fedstrata.reports.summary import client_sentences, summary
from full_disk import full_after

Make = Callable[..., Path]


class Balance(HTMLParser):
    """Counts open elements; void ones do not count."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(tmp_path: Path, *folders: Path) -> str:
    return write_page([load_run(folder) for folder in folders], tmp_path / "out" / "report.html").read_text(
        "utf-8"
    )


def test_the_page_is_well_formed_offline_and_deterministic(run: Make, staged: Make, tmp_path: Path) -> None:
    folders = [run(labels=["eye", "heart"]), staged("pretrain", "finetune")]
    text = page(tmp_path, *folders)
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    outside = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(https?:[^"\')]+)', text)
    assert outside == []
    assert "<script" not in text
    assert "@import" not in text
    assert text == page(tmp_path, *folders)


def test_it_holds_the_numbers_of_the_files(run: Make, tmp_path: Path) -> None:
    text = unescape(page(tmp_path, run()))
    for word in (
        "loss 2.000",
        "9.00 MB",
        "plus 22.0 MB of initial download",
        "12.0 TFLOP;",
        "wall time 76 s",
        "120",
        "121",
    ):
        assert word in text, word


@pytest.mark.parametrize("word", ["<script>alert(1)</script>", '"><img src=x>'])
def test_what_users_name_is_escaped(run: Make, tmp_path: Path, word: str) -> None:
    text = page(tmp_path, run(labels=[word, "plain"], clients=[word, "client-1"], message=word, status="failed"))
    assert word not in text


@pytest.mark.parametrize("sign", ["\u202e", "\u2066", "\x1b", "\x9b"])
def test_a_label_that_turns_the_direction_of_writing_is_spelled_out(run: Make, tmp_path: Path, sign: str) -> None:
    """The labels of somebody else's rows stood in another order on the page, and figures beside them."""
    text = page(tmp_path, run(labels=[f"eye{sign}53", "heart"]))
    assert sign not in text
    assert f"eye{ascii(sign)[1:-1]}53" in text
    pictures = [base64.b64decode(svg).decode() for svg in re.findall(r"image/svg\+xml;base64,([^\"]+)", text)]
    assert pictures
    assert not [svg for svg in pictures if sign in svg], "nor in a picture that is downloaded"


def test_a_folder_whose_name_is_no_unicode_has_a_page(run: Make, tmp_path: Path) -> None:
    folder = os.fsdecode(b"ni\xe9r")
    one = run(f"{folder}/one", labels=["eye", "heart"])
    assert "one" in write_report([one]).read_text("utf-8")
    moved = one.rename(tmp_path / folder / folder)
    assert "ni\\udce9r" in write_report([moved]).read_text("utf-8")


def test_arabic_labels_are_there_and_may_run_from_right_to_left(run: Make, tmp_path: Path) -> None:
    text = page(tmp_path, run(labels=["سلبي", "إيجابي"], clients=["مستشفى", "client-1"]))
    assert "مستشفى" in text
    assert 'dir="auto"' in text
    assert "<li>مستشفى trained on" in text, "an English sentence, whatever its first word"


@pytest.mark.parametrize(
    "missing", [["result.json"], ["result.json", "rounds.jsonl", "ledger.jsonl", "partition.json"]]
)
def test_a_killed_run_has_a_page(run: Make, tmp_path: Path, missing: list[str]) -> None:
    folder = run()
    for name in missing:
        (folder / name).unlink()
    assert "stopped" in page(tmp_path, folder)


def test_a_stopped_run_has_the_rounds_that_it_came_to(run: Make, tmp_path: Path) -> None:
    """Beside costs of those that ended stood the job's number of rounds."""
    folder = run(rounds=3, status="stopped")
    (folder / "job.toml").write_text((folder / "job.toml").read_text().replace("rounds = 3", "rounds = 8"))
    result = json.loads((folder / "result.json").read_text("utf-8"))
    (folder / "result.json").write_text(json.dumps({**result, "rounds": 8}))
    assert '<td role="cell" data-label="rounds" class="nowrap">3 of 8</td>' in page(tmp_path, folder)


def test_a_failed_run_says_why(run: Make, tmp_path: Path) -> None:
    text = page(tmp_path, run(status="failed", score={}, message="round 1, client-0: its training diverged"))
    assert "its training diverged" in text
    assert "no score was recorded" in text


@pytest.mark.parametrize("stages", [False, True])
def test_a_run_that_diverged_in_its_first_round_says_that_none_ended(
    run: Make, staged: Make, tmp_path: Path, stages: bool
) -> None:
    folder = staged("one", "two") if stages else run()
    for path in [folder, *folder.glob("stages/*")] if stages else [folder]:
        result = json.loads((path / "result.json").read_text("utf-8"))
        result |= {"status": "failed", "bytes": {"up": 0, "down": 0, "setup": 0}, "flops": 0, "seconds": 0.0}
        (path / "result.json").write_text(json.dumps(result), "utf-8")
        for name in ("rounds.jsonl", "ledger.jsonl"):
            (path / name).unlink(missing_ok=True)
    said = page(tmp_path, folder)
    assert "No round has ended, so neither communication nor work was counted." in said
    assert "There was no communication" not in said


def test_fifty_clients_fit(run: Make, tmp_path: Path) -> None:
    names = [f"client-{i:02}" for i in range(50)]
    text = page(tmp_path, run(clients=names))
    assert all(name in text for name in names)


def test_clients_own_models_are_shown_with_their_spread(run: Make) -> None:
    folder = run(method="local")
    result = json.loads((folder / "result.json").read_text())
    clients = {f"client-{i}": {"examples": 120, "score": {"loss": 1.0 + i}} for i in range(2)}
    (folder / "result.json").write_text(json.dumps({**result, "score": {"loss": 1.5}, "clients": clients}))
    assert "1.500 ± 0.707" in summary(load_run(folder))


def test_clients_that_test_one_model_on_their_own_rows_have_a_score_and_no_model(
    run: Make, tmp_path: Path
) -> None:
    """As with ``clients.test``: FedAvg's clients have no models of their own."""
    clients = {f"client-{i}": {"examples": 120, "score": {"loss": 1.0 + i}, "model": None} for i in range(2)}
    folder = run(method="fedavg", score={"loss": 1.5})
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "clients": clients}))
    text = page(tmp_path, folder)
    assert "Its own score is loss 2.000." in unescape(text)
    assert "own model" not in text


def test_part_words_draw_layers_together() -> None:
    kinds = [("low", "embeddings", None), *((f"block-{i}", "layer", i) for i in range(6)), ("top", "head", None)]
    parts = read_parts([{"name": name, "kind": kind, "depth": depth} for name, kind, depth in kinds])
    assert part_words(["low", "block-0", "block-1", "block-2", "block-5", "top"], parts) == (
        "low, layers 0–2, 5, top"
    )
    assert part_words(["block-3"], parts) == "layer 3"
    assert part_words([], parts) == ""


def test_adapters_have_their_layers_depths() -> None:
    parts = read_parts([{"name": f"lora-{i}", "kind": "adapter", "depth": i} for i in range(3)])
    assert part_words([*parts, "head"], parts) == "adapters 0–2, head"


def test_rounds_count_from_1(run: Make) -> None:
    missing = [{"client": "client-1", "reason": "is not connected", "round": at} for at in (0, 2)]
    assert "Without client-1 in rounds 1, 3: it is not connected." in summary(load_run(run(missing=missing)))


def test_a_page_takes_the_place_of_a_page_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("<html>mine</html>")
    with pytest.raises(
        UserError, match=r"report.html is there and is no page of FedStrata; --out names another file"
    ):
        write_page([], path)
    assert path.read_text() == "<html>mine</html>"
    path.unlink()
    assert write_page([], write_page([], path)) == path


def test_a_page_that_does_not_fit_on_the_disk_is_not_there_and_can_be_written_later(run: Make) -> None:
    folder = run()
    with full_after(1000), pytest.raises(UserError, match=r"report.html cannot be written") as found:
        write_report([folder])
    assert isinstance(found.value.__cause__, OSError), "by which the command line exits with 1"
    assert write_report([folder]).exists()


def test_each_client_has_a_sentence_for_its_owner(run: Make) -> None:
    sentences = client_sentences(load_run(run(clients=["Anna", "Bela"])))
    assert sentences[0] == (
        "Anna trained on 120 examples in 3 rounds: 9.00 MB left it (layers 0–2, head), and 31.0 MB came to it, "
        "22.0 MB of them in the initial download."
    )
    assert len(sentences) == 2
