"""Bad sites: whatever one sends, it is recorded as missing with a reason in plain text, and the run goes on."""

from __future__ import annotations

import errno
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_memory import NAMES, Village, lines

import fedstrata
from attacks.bad_site import GREETINGS, REPLIES, SCORES, Attack, Replay, header, metadata_of, weights
from fedstrata import UserError
from fedstrata.events import Asked, Noted, RoundEnded
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.server.records import FileRecords
from fedstrata.server.trainer import ServerTrainer
from fedstrata.sites import engine as between
from fedstrata.sites.engine import RemoteEngine
from fedstrata.sites.release_log import now
from fedstrata.sites.reply_checks import weight_notes

Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Village:
    return Village(tmp_path, monkeypatch)


def attacked(village: Village, name: str, kind: str, attacks: Sequence[Attack], when: str = "") -> None:
    """A site answers honestly, but for messages of a kind: of those each is attacked in another way, in turn."""
    host, left = village.post.hosts[name], list(attacks)
    honest = host.answer

    def answer(message: bytes) -> bytes:
        own = bytes(honest(message))
        found = metadata_of(own)
        asked = metadata_of(message)
        if found["kind"] != kind or when not in asked["header"] or not left:
            return own
        return left.pop(0)(own)

    host.answer = answer  # type: ignore[method-assign,assignment]


def check_clean(folder: Path) -> None:
    """Nothing that steers a terminal or a page stands in any record."""
    page = fedstrata.report(folder).read_text("utf-8")
    assert "<script" not in page
    for path in (*folder.glob("*.json*"), folder / "report.html"):
        text = path.read_text("utf-8")
        assert not {sign for sign in text if unicodedata.category(sign)[0] == "C" and sign != "\n"}, path
        assert "\\u001b" not in text
        assert "\\u202e" not in text


def tried(
    monkeypatch: pytest.MonkeyPatch, village: Village, name: str, attacks: Sequence[Attack]
) -> list[NoReply]:
    """In the first round a site is asked once for every attack, all with the same honest reply; then as usual."""
    host, honest, found = village.post.hosts[name], village.post.hosts[name].answer, list[NoReply]()
    exchange, left, first = RemoteEngine.exchange, list(attacks), list[bytes]()

    def answer(message: bytes) -> bytes:
        if metadata_of(message)["kind"] != "request":
            return bytes(honest(message))
        first[:] = first or [bytes(honest(message))]
        return left.pop(0)(first[0]) if left else first.pop()

    def asking(engine: RemoteEngine, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
        batch = list(requests)
        for request in [one for one in batch if one.client == name and left]:
            for _ in attacks:
                welcomes = dict(engine.welcomes)
                [reply] = exchange(engine, [request])
                assert isinstance(reply, NoReply)
                found.append(reply)
                engine.welcomes.update(welcomes)
        yield from exchange(engine, batch)

    monkeypatch.setattr(host, "answer", answer)
    monkeypatch.setattr(RemoteEngine, "exchange", asking)
    return found


def test_whatever_a_reply_holds_it_counts_as_none(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 1}))
    found = tried(monkeypatch, village, "b", [attack for attack, _ in REPLIES.values()])
    run = fedstrata.run(there)
    assert len(found) == len(REPLIES)
    for (name, (_, reason)), reply in zip(REPLIES.items(), found, strict=True):
        assert reply.reason.startswith(reason), (name, reply.reason)
        assert "sends what cannot be read" not in reply.reason, f"{name}: refused for what it is, not as an error"
        assert reply.reason.isprintable()
    assert [line["client"] for line in lines(run.folder / "rounds.jsonl")] == ["server", "a", "b", "c", "server"]


def test_no_reply_ends_a_run(job: Jobs, village: Village) -> None:
    chosen = ["a head of nested brackets", "a weight that is no number", "escape sequences and HTML"]
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 3}))
    attacked(village, "b", "reply", [REPLIES[name][0] for name in chosen])
    run = fedstrata.run(there)
    assert run.status == "finished"
    missing = lines(run.folder / "missing.jsonl")
    assert [(line["round"], line["client"]) for line in missing] == [(i, "b") for i in range(3)]
    answered = [line["client"] for line in lines(run.folder / "rounds.jsonl")]
    assert (answered.count("a"), answered.count("b"), answered.count("c")) == (3, 0, 3)
    check_clean(run.folder)


@pytest.mark.parametrize("loss", ["a loss that is no number", "a loss of 1e300"])
def test_no_loss_beside_a_masked_sum_ends_a_run(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """An honest site tells none there; one that is no number stopped the run, and each --resume as well."""
    village = Village(tmp_path, monkeypatch, ("a", "b", "c", "d"))
    _, there = village.jobs(job("fedavg", "classify", privacy={"sum_only": True}))
    attack, reason = REPLIES[loss]
    attacked(village, "b", "reply", [attack], '"phase": "train"')
    run = fedstrata.run(there)
    [missing] = lines(run.folder / "missing.jsonl")
    assert (missing["round"], missing["client"]) == (0, "b")
    assert missing["reason"].startswith(reason)
    assert {line["loss"] for line in lines(run.folder / "rounds.jsonl") if line["client"] != "server"} == {None}


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EINVAL, "Invalid argument")])
def test_an_error_of_the_reader_s_own_ends_no_run(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 1}), quorum=0.3)
    monkeypatch.setattr(between, "check_answered", fails)
    each = rf"sends what cannot be read \({type(error).__name__}\)"
    unread = f"round 1: {'; '.join(f'{name} {each}' for name in NAMES)}; fewer"
    with pytest.raises(UserError, match=unread):
        fedstrata.run(there)


def test_a_full_disk_at_the_server_is_no_fault_of_a_site(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first site that replied was told to send what cannot be read; then the others."""
    _, there = village.jobs(job("fedavg", "classify"), quorum=0.3)
    append = FileRecords.append

    def full(records: FileRecords, name: str, added: Iterable[Any]) -> None:
        added = list(added)
        if name == "transport" and added[0]["direction"] == "up" and added[0]["round"] == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(records.path(name)))
        append(records, name, added)

    monkeypatch.setattr(FileRecords, "append", full)
    with pytest.raises(OSError, match="No space left on device"):
        fedstrata.run(there)
    monkeypatch.undo()
    assert not (village.folder / "there" / "missing.jsonl").exists()


def test_no_score_ends_a_run_and_a_site_scores_itself_alone(job: Jobs, village: Village) -> None:
    config = job("fedavg", "classify", clients={"test": 0.3}, method={"rounds": len(SCORES)})
    _, there = village.jobs(config)
    attacked(village, "b", "reply", [lambda own: own, *(attack for attack, _ in SCORES.values())], "evaluate")
    run = fedstrata.run(there)
    missing = lines(run.folder / "missing.jsonl")
    assert [(line["round"], line["client"]) for line in missing] == [(i, "b") for i in range(len(SCORES))]
    for (name, (_, reason)), line in zip(SCORES.items(), missing, strict=True):
        assert line["reason"].startswith(reason), (name, line["reason"])
    scored = [line["clients"] for line in lines(run.folder / "rounds.jsonl") if line["client"] == "server"]
    assert [sorted(own) for own in scored] == [["a", "b", "c"], *[["a", "c"]] * len(SCORES)]
    check_clean(run.folder)


def test_no_greeting_ends_a_run(job: Jobs, village: Village) -> None:
    """A site is greeted before the first round, and again in every round for which it has not been."""
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": len(GREETINGS)}))
    attacked(village, "b", "welcome", [lambda own: own, *(attack for attack, _ in GREETINGS.values())])
    said: list[Any] = []
    run = fedstrata.run(there, progress=said.append)
    missed = [event for event in said if type(event).__name__ == "Missed"]
    assert [(event.round, event.client) for event in missed] == [(i - 1, "b") for i in range(len(GREETINGS))]
    for (name, (_, reason)), event in zip(GREETINGS.items(), missed, strict=True):
        assert event.reason.startswith(reason), (name, event.reason)
    assert [line["round"] for line in lines(run.folder / "rounds.jsonl") if line["client"] == "b"] == [4]
    check_clean(run.folder)


@pytest.mark.parametrize("name", ["accuracy.\x1b[2Jx", "accuracy.a\nroot login ok", "accuracy.<b>"])
def test_a_metric_has_a_plain_name(job: Jobs, village: Village, name: str) -> None:
    _, there = village.jobs(job("fedavg", "classify", clients={"test": 0.3}))
    attacked(village, "b", "reply", [header(scores={"b": {"accuracy": 0.5, name: 0.5}})] * 9, "evaluate")
    run = fedstrata.run(there)
    reasons = {line["reason"] for line in lines(run.folder / "missing.jsonl")}
    assert len(reasons) == 1
    assert "which is no plain name" in reasons.pop()
    check_clean(run.folder)


def test_a_metric_is_a_text_in_the_model_s_card(job: Jobs, village: Village) -> None:
    name = "accuracy.a | b ![x](https://example.org/x) `c`"

    def attack(message: bytes) -> bytes:
        scores = json.loads(metadata_of(message)["header"])["scores"]
        return header(scores={client: {**own, name: 0.5} for client, own in scores.items()})(message)

    _, there = village.jobs(job("fedavg", "classify", clients={"test": 0.3}))
    attacked(village, "b", "reply", [attack] * 9, "evaluate")
    run = fedstrata.run(there)
    assert run.score[name] == 0.5
    assert run.model_folder is not None
    card = (run.model_folder / "README.md").read_text("utf-8")
    assert r"| accuracy.a \| b !\[x\](https://example.org/x) \`c\` | 0.5000 |" in card


def test_a_reply_of_an_earlier_round_is_none(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 3}))
    replay = Replay()
    attacked(village, "b", "reply", [replay] * 3)
    run = fedstrata.run(there)
    assert [(line["round"], line["reason"]) for line in lines(run.folder / "missing.jsonl")] == [
        (1, "answers round 1, but was asked for round 2"),
        (2, "answers round 1, but was asked for round 3"),
    ]


def test_a_site_cannot_have_more_examples_than_at_its_first_greeting(job: Jobs, village: Village) -> None:
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 2}))
    attacked(village, "b", "welcome", [lambda own: own, lambda own: own, *[header(examples=10**9)] * 9])
    attacked(village, "b", "reply", [lambda own: b""])  # so that it is greeted again
    run = fedstrata.run(there)
    [_, second] = lines(run.folder / "missing.jsonl")
    assert second["reason"] == "says that it has 1000000000 examples, and had 4 when it was first greeted"


@pytest.mark.parametrize("late", [False, True])
def test_so_it_is_after_the_run_was_stopped(job: Jobs, village: Village, late: bool) -> None:
    """With every call of the server a site could state another number; it counts by that in the mean."""
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 3}), deadline=1.0)
    village.post.out = {"b"} if late else set()

    def stop(event: Any) -> None:
        if isinstance(event, RoundEnded):
            village.post.out = set()
            if event.round == 1:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fedstrata.run(there, progress=stop)
    village.start("b")
    attacked(village, "b", "welcome", [header(examples=10**9)] * 9)
    run = fedstrata.run(there, resume=True)
    missing = lines(run.folder / "missing.jsonl")
    assert missing[-1]["reason"] == "says that it has 1000000000 examples, and had 4 when it was first greeted"
    assert json.loads((run.folder / "partition.json").read_text())["clients"]["b"]["examples"] == 4


def server_settings(village: Village, text: str) -> None:
    path = village.folder / "federation" / "server.toml"
    path.write_text(path.read_text("utf-8").replace("[limits]\n", f"[limits]\n{text}\n"), "utf-8")


@pytest.mark.parametrize("limit", ["max_weight = 2", "max_weight = {b = 2, a = 2, c = 2}"])
def test_a_site_counts_for_no_more_than_the_server_allows(job: Jobs, village: Village, limit: str) -> None:
    """With all capped to the same number the mean is that of sites of equal size, as it is here without a cap."""
    here, there = village.jobs(job("fedavg", "classify"))
    server_settings(village, limit)
    said: list[Any] = []
    run = fedstrata.run(there, progress=said.append)
    assert {line["examples"] for line in lines(run.folder / "rounds.jsonl") if line["client"] != "server"} == {2}
    assert json.loads((run.folder / "partition.json").read_text())["clients"]["b"]["examples"] == 4
    notes = [event.sentence for event in said if type(event).__name__ == "Noted"]
    notes = [note for note in notes if not note.startswith("job sha256:")]
    assert notes[0] == "a says that it has 4 examples and counts for 2 ([limits] max_weight in server.toml)"
    assert len(notes) == 3
    one = fedstrata.run(here)
    assert all(torch.equal(own, other) for own, other in zip(saved(one), saved(run), strict=True))


def saved(run: Any) -> list[torch.Tensor]:
    from tiny import saved_tensors

    return [tensor for _, tensor in sorted(saved_tensors(run.model_folder).items())]


def test_a_limit_names_a_site_of_the_federation(job: Jobs, village: Village) -> None:
    server_settings(village, "max_weight = {z = 2}")
    _, there = village.jobs(job("fedavg", "classify"))
    with pytest.raises(UserError, match=r"server.toml: \[limits\] max_weight: 'z' is none of \[sites\]"):
        fedstrata.run(there)


def test_who_outweighs_all_others_is_told_before_the_run() -> None:
    [line] = weight_notes({"a": 5, "b": 10**9, "c": 5}, {})
    assert line.startswith(
        "b says that it has 100% of all examples, so it outweighs all others together in a mean"
    )
    assert weight_notes({"a": 5, "b": 10, "c": 5}, {}) == []
    [line] = weight_notes({"a": 5, "b": 10**9, "c": 5}, {"b": 5})
    assert line == (
        "b says that it has 1,000,000,000 examples and counts for 5 ([limits] max_weight in server.toml)"
    )


def test_who_outweighs_all_others_and_comes_late_is_told_too(job: Jobs, village: Village) -> None:
    """A site that kept away from the first greeting, and came in a later round, was not named."""
    _, there = village.jobs(job("fedavg", "classify", method={"rounds": 3}), deadline=2)
    attacked(village, "b", "welcome", [header(examples=10**6)] * 9)
    attacked(village, "b", "reply", [header(examples=10**6)] * 9)
    village.post.out.add("b")
    said: list[Any] = []

    def progress(event: Any) -> None:
        said.append(event)
        if isinstance(event, RoundEnded):
            village.post.out.discard("b")

    run = fedstrata.run(there, progress=progress)
    assert {line["examples"] for line in lines(run.folder / "rounds.jsonl") if line["client"] == "b"} == {10**6}
    notes = [event.sentence for event in said if isinstance(event, Noted)]
    assert [note.partition(" all examples")[0] for note in notes if note.startswith("b says")] == [
        "b says that it has 100% of"
    ]


def thousandfold(own: dict[str, dict[str, torch.Tensor]]) -> None:
    for tensors in own.values():
        for name in tensors:
            tensors[name] = tensors[name] * 1000


def test_a_site_far_outside_the_others_is_named_and_does_not_decide(job: Jobs, village: Village) -> None:
    here, there = village.jobs(job("fedavg", "classify", server={"aggregate": "median"}))
    attacked(village, "b", "reply", [weights(thousandfold)] * 2)
    said: list[Any] = []
    run = fedstrata.run(there, progress=said.append)
    outliers = lines(run.folder / "outliers.jsonl")
    assert [(line["round"], line["client"]) for line in outliers] == [(0, "b"), (1, "b")]
    assert json.loads((run.folder / "result.json").read_text())["outliers"] == outliers
    page = fedstrata.report(run.folder).read_text("utf-8")
    assert "b is far outside the others in rounds 1, 2: up to " in page
    assert any("round 1: b is far outside the others" in getattr(event, "sentence", "") for event in said)
    honest = fedstrata.run(here)
    largest = max(float((own - other).abs().max()) for own, other in zip(saved(honest), saved(run), strict=True))
    assert largest < 0.01


def test_a_site_whose_last_answer_cannot_be_used_saves_its_own_model_all_the_same(
    job: Jobs, village: Village
) -> None:
    tables = {"clients": {"test": 0.3}, "server": {"evaluate": "end"}, "method": {"rounds": 1}}
    _, there = village.jobs(job("fedsplitbert", "classify", 3, **tables))
    attacked(village, "b", "reply", [SCORES["NaN"][0]], "evaluate")
    run = fedstrata.run(there)
    assert [line["client"] for line in lines(run.folder / "missing.jsonl")] == ["b"]
    state = village.folder / "federation" / "sites" / "b" / "state"
    assert list((state / "models").glob("*/model.safetensors"))
    assert not list((state / "runs").iterdir()), "nothing of the run stays"


def test_a_site_that_reached_a_limit_on_the_way_hears_that_the_run_is_over(job: Jobs, village: Village) -> None:
    tables = {"clients": {"test": 0.3}, "server": {"evaluate": "end"}, "method": {"rounds": 2}}
    _, there = village.jobs(job("fedsplitbert", "classify", 3, **tables))
    village.site("b", "# bytes_per_day = 10_000_000_000", "bytes_per_day = 100_000")  # more than a round sends
    run = fedstrata.run(there)
    missing = lines(run.folder / "missing.jsonl")
    assert {(line["round"], line["client"]) for line in missing} == {(1, "b")}
    assert {line["reason"].partition(" (")[0] for line in missing} == {"refuses: its limit is 100000 bytes a day"}
    state = village.folder / "federation" / "sites" / "b" / "state"
    assert list((state / "models").glob("*/model.safetensors")), "what it has trained until then"
    assert not list((state / "runs").iterdir()), "nothing of the run stays"


@pytest.mark.parametrize("tables", [{}, {"privacy": {"sum_only": True}}])
def test_a_site_is_back_in_the_run_when_less_has_left_within_a_day(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any]
) -> None:
    """It refused for the rest of the run. Between two rounds 13 hours pass, and a day has room for one."""
    village = Village(tmp_path, monkeypatch, ("a", "b", "c", "d"))
    tables = {"method": {"rounds": 4}, "server": {"evaluate": "end"}, **tables}
    _, there = village.jobs(job("fedavg", "classify", 2, **tables))
    village.site("b", "# bytes_per_day = 10_000_000_000", "bytes_per_day = 150_000")
    rounds: set[int] = set()
    village.post.hosts["b"].tell = lambda event: rounds.add(event.round) if isinstance(event, Asked) else None
    monkeypatch.setattr("fedstrata.sites.gate.now", lambda: now() + timedelta(hours=13) * len(rounds))
    run = fedstrata.run(there)
    missing = lines(run.folder / "missing.jsonl")
    assert [(line["round"], line["client"]) for line in missing] == [(1, "b"), (3, "b")]
    assert all("bytes_per_day" in line["reason"] for line in missing)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("labels", 99, "labels: must be classes from 0 to 2 (int32)"),
        ("features", 1e30, "features hold a number of 1e+30, at most 1e+06 is taken"),
    ],
)
def test_hidden_states_that_cannot_be_used_leave_a_site_out(
    job: Jobs, village: Village, name: str, value: float, reason: str
) -> None:
    there = centralized(job, village, {"kind": "cls"})

    def spoil(own: dict[str, dict[str, torch.Tensor]]) -> None:
        own["hidden_states"][name][0] = value

    attacked(village, "b", "reply", [weights(spoil)], "hidden_states")
    run = fedstrata.run(there)
    [line] = lines(run.folder / "missing.jsonl")
    assert (line["client"], line["reason"]) == ("b", f"sends what cannot be used: {reason}")


def more_texts(own: dict[str, dict[str, torch.Tensor]]) -> None:
    message = own["hidden_states"]
    own["hidden_states"] = {name: tensor.repeat(10, *[1] * (tensor.ndim - 1)) for name, tensor in message.items()}


def one_long_text(own: dict[str, dict[str, torch.Tensor]]) -> None:
    message = own["hidden_states"]
    message["features"] = message["features"][:1].repeat(44, 1, 1)
    message["tokens"] = torch.tensor([1, 41, 1, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("head", "attack", "reason"),
    [
        ("cls", more_texts, "hidden states of 40 texts, and has 4 examples"),
        ("psum", one_long_text, "tokens: must be at most 32 (max_tokens)"),
    ],
)
def test_hidden_states_of_more_or_longer_texts_than_the_job_has_leave_a_site_out(
    job: Jobs, village: Village, head: str, attack: Any, reason: str
) -> None:
    """Ten times its examples counted ten times, and others' texts were filled up to one of a million tokens."""
    there = centralized(job, village, {"kind": head})
    attacked(village, "b", "reply", [weights(attack)], "hidden_states")
    run = fedstrata.run(there)
    [line] = lines(run.folder / "missing.jsonl")
    assert (line["client"], line["reason"]) == ("b", f"sends what cannot be used: {reason}")


def test_hidden_states_count_for_no_more_than_the_server_allows(
    job: Jobs, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run said that a site counts for 2 examples, and the head learned from all 4."""
    taken = list[dict[str, torch.Tensor]]()
    take = ServerTrainer.take

    def watched(self: ServerTrainer, client: str, tensors: dict[str, torch.Tensor]) -> None:
        taken.append(tensors)
        take(self, client, tensors)

    monkeypatch.setattr(ServerTrainer, "take", watched)
    there = centralized(job, village, {"kind": "psum"})
    server_settings(village, "max_weight = {b = 2}")
    fedstrata.run(there)
    assert [len(message["labels"]) for message in taken] == [4, 2, 4]
    assert all(len(message["features"]) == int(message["tokens"].sum()) for message in taken)


def centralized(job: Jobs, village: Village, head: dict[str, Any]) -> dict[str, Any]:
    """The job of a run in which the server trains on hidden states."""
    tables = {
        "head": head,
        "method": {"variant": "centralized"},
        "client": {"may_send": ["hidden_states"]},
    }
    _, there = village.jobs(job("fedfreezebert", "classify", 4, **tables))
    for site in NAMES:
        village.site(site, 'payloads = ["weights"]', 'payloads = ["weights", "hidden_states"]')
    return there
