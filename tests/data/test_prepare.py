"""Rows to examples: holdout, labels, shards, populations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstrata
from fedstrata.data.prepare import data_notes, dropped_rows, population, prepare
from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.tasks.examples import examples
from tiny import SENTENCES, tokenizer

Jobs = Callable[..., dict[str, Any]]


def test_labels_come_from_all_rows_numbers_by_value(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na b,10\nc d,9\ne f,9\n")
    (tmp_path / "test.csv").write_text("text,label\na b,2\nc d,9\n")
    made = job("fedavg", "classify", data={"train": "train.csv", "test": "test.csv"}, clients={"count": 1})
    data = prepare(load(made)[0], tmp_path)
    assert data.labels == ("2", "9", "10")
    classes = examples(load(made)[0], data.train, data.labels, tokenizer()).labels
    assert classes is not None
    assert classes.tolist() == [2, 1, 1]


def test_a_holdout_is_disjoint_and_depends_on_the_seed_alone(job: Jobs) -> None:
    made = job("fedavg", "classify")
    del made["data"]["test"]
    made["data"]["holdout"] = 0.25
    held = []
    for changes in ([], ["method.name=fedbt", "clients.count=2"], ["train.seed=1"]):
        data = prepare(load(made, changes)[0])
        assert len(data.test) == 3
        assert sorted(data.train.columns["text"] + data.test.columns["text"]) == sorted(t for t, _ in SENTENCES)
        held.append(data.test.columns["text"])
    assert held[0] == held[1] != held[2]


def test_a_holdout_that_leaves_nothing_is_refused(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only one line\n")
    made = job("fedavg", "mlm", data={"train": "one.txt"}, clients={"count": 1})
    del made["data"]["test"]
    with pytest.raises(UserError, match="holdout: leaves none of 1 row to train on"):
        prepare(load(made)[0], tmp_path)


def test_the_same_rows_are_dealt_in_the_same_way_for_every_task(job: Jobs) -> None:
    shards = [
        prepare(load(job("fedavg", kind, clients={"partition": "dirichlet", "alpha": 0.3}))[0]).shards
        for kind in ("mlm", "classify")
    ]
    assert all(np.array_equal(shards[0][name], shards[1][name]) for name in shards[0])


def test_clients_by_column_and_empty_ones(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "wards.csv").write_text("text,label,ward\na,x,north\nb,y,south\nc,x,north\n")
    made = job("fedavg", "classify", data={"train": "wards.csv", "test": "wards.csv"})
    made["clients"] = {"partition": "column", "column": "ward"}
    data = prepare(load(made)[0], tmp_path)
    assert {name: rows.tolist() for name, rows in data.shards.items()} == {"north": [0, 2], "south": [1]}
    made["clients"] = {"count": 5, "min_examples": 0}
    assert len(prepare(load(made)[0], tmp_path).shards) == 3, "clients without rows are dropped"


def test_sentences_of_words_and_tags_have_clients_by_column(job: Jobs, tmp_path: Path) -> None:
    """Lists with the client beside them were refused; in a file of words each pattern of words was a client."""
    words = [["The", "kidney"], ["A", "stone", "hurts"], ["The", "eye"]]
    wards = ["north", "south", "north"]
    lists = [
        {"w": row, "t": ["B-x", *["O"] * (len(row) - 1)], "ward": ward}
        for row, ward in zip(words, wards, strict=True)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lists)), encoding="utf-8")
    table = [
        (str(number), word, wards[number] if number != 1 or not i else "", "O" if i else "B-x")
        for number, row in enumerate(words)
        for i, word in enumerate(row)
    ]
    (tmp_path / "a.csv").write_text("sent,w,ward,t\n" + "\n".join(map(",".join, table)))
    for name in ("a.jsonl", "a.csv"):
        made = job("fedavg", "tag", data={"train": name, "test": name, "text": "w", "label": "t"})
        made["clients"] = {"partition": "column", "column": "ward"}
        data = prepare(load(made)[0], tmp_path)
        assert {name: rows.tolist() for name, rows in data.shards.items()} == {"north": [0, 2], "south": [1]}
        assert data.train.columns["w"] == ["The\nkidney", "A\nstone\nhurts", "The\neye"]
    (tmp_path / "a.csv").write_text("sent,w,ward,t\n1,The,north,O\n1,eye,south,O\n")
    with pytest.raises(
        UserError, match="'ward' holds 'north' and 'south' in one sentence, expected one value for"
    ):
        prepare(load(made)[0], tmp_path)


def test_dropped_rows_are_told_with_the_column_that_had_no_value(job: Jobs, tmp_path: Path) -> None:
    lines = "text,label,ward\na,x,north\nb,y,south\nc,x,\nd,y, \n,x,\n"
    (tmp_path / "wards.csv").write_text(lines, encoding="utf-8")
    made = job("fedavg", "classify", data={"train": "wards.csv", "test": "wards.csv"})
    made["clients"] = {"partition": "column", "column": "ward"}
    data = prepare(load(made)[0], tmp_path)
    # Test rows need no client, so that the last row alone is dropped of them.
    assert dropped_rows(data) == "2 rows without a value in 'ward' and 2 rows without a value in 'text' dropped"
    assert data.dropped == 4
    made["data"]["train"] = {"one": "wards.csv", "two": "wards.csv"}
    assert prepare(load(made)[0], tmp_path).lacking == {"text": 3, "ward": 4}
    rows = [{"text": text, "label": label} for text, label in SENTENCES]
    made = job("fedavg", "classify", data={"train": rows, "test": rows}, clients={"count": 2})
    assert dropped_rows(prepare(load(made)[0])) == "no row dropped"


def test_clients_that_seem_to_be_one_are_a_note(job: Jobs, tmp_path: Path) -> None:
    lines = "text,label,ward\na,x,North\nb,y,north\nc,x,NORTH \nd,y,south\n"
    (tmp_path / "wards.csv").write_text(lines, encoding="utf-8")
    made = job("fedavg", "classify", data={"train": "wards.csv", "test": "wards.csv"})
    made["clients"] = {"partition": "column", "column": "ward"}
    [stage] = load(made)
    assert data_notes(stage, prepare(stage, tmp_path)) == [
        "column 'ward': 'North' and 'north' differ in capital letters alone; "
        "'NORTH ' and 'North' differ in blanks, capital letters or Unicode form alone; "
        "'NORTH ' and 'north' differ in blanks, capital letters or Unicode form alone; each is a client of its own"
    ]
    (tmp_path / "wards.csv").write_text(lines.replace("North", "west").replace("NORTH ", "east"), "utf-8")
    assert data_notes(stage, prepare(stage, tmp_path)) == []
    (tmp_path / "wards.csv").write_text(lines.replace("North", "nan").replace("NORTH ", "east"), "utf-8")
    assert data_notes(stage, prepare(stage, tmp_path)) == [
        "column 'ward': 'nan' stands for a missing value, but is a client of its own"
    ]


def test_a_label_that_may_be_none_is_a_note_unless_all_are_named(job: Jobs) -> None:
    rows = [{"text": text, "label": i % 3 - 1} for i, (text, _) in enumerate(SENTENCES)]

    def said(**task: object) -> list[str]:
        made = job("fedavg", "classify", data={"train": rows, "test": rows}, clients={"count": 2}, task=task)
        [stage] = load(made)
        return data_notes(stage, prepare(stage))

    what = "may mark rows without a label, but is a class here; if it is none, leave these rows out"
    assert said() == [f"column 'label': '-1' {what}"]
    assert said(labels=["-1", "0", "1"]) == []


def test_tags_that_name_no_entities_are_a_note_where_entities_are_counted(job: Jobs) -> None:
    def said(tag: str, metric: str) -> list[str]:
        rows = [{"words": ["a", "cat"], "tags": ["O", tag]}, {"words": ["cats"], "tags": [tag]}]
        made = job("fedavg", "tag", task={"metric": metric}, data={"train": rows, "test": rows})
        made["data"] |= {"text": "words", "label": "tags"}
        made["clients"] = {"count": 2}
        [stage] = load(made)
        return data_notes(stage, prepare(stage))

    assert said("NN", "f1") == [
        "tag 'NN' is not O and begins with none of B-, I-, E-, S-: f1 counts entities, so it means little here; "
        "task.metric = 'accuracy' counts words"
    ]
    assert said("ORG", "f1")[0].startswith("tag 'ORG' is not O and begins with none of"), "seqeval takes it for O"
    assert not said("B-NN", "f1")
    assert not said("NN", "accuracy")


def test_populations() -> None:
    shards = {"a": np.array([3, 5]), "b": np.array([0, 4])}
    assert population("each", shards) == shards
    assert population("pooled", shards)["all"].tolist() == [0, 3, 4, 5]
    assert population("one", shards) == {"a": shards["a"]}
    assert population("pooled", {"a": shards["a"]}) == {"a": shards["a"]}, "pooling one client changes nothing"


def test_columns_of_text_are_joined_for_mlm_and_refused_elsewhere(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("title,body,label\nthe heart,the kidney,x\nthe eye,blood,y\n")
    made = job("fedavg", "mlm", data={"train": "two.csv", "test": "two.csv", "text": ["title", "body"]})
    [loaded] = load(made)
    data = prepare(loaded.model_copy(update={"clients": loaded.clients.model_copy(update={"count": 1})}), tmp_path)
    tokens = examples(loaded, data.train, None, tokenizer()).tokens
    assert tokenizer().decode(tokens[0], skip_special_tokens=True) == "the heart the kidney"
    made["task"]["kind"] = "classify"
    with pytest.raises(UserError, match="reads one column, found 2"):
        prepare(load(made)[0], tmp_path)


def test_long_texts_become_more_examples_in_mlm_only(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("text,label\n" + "heart " * 40 + ",x\neye,y\n")
    counts = {}
    for kind in ("mlm", "classify"):
        made = job("fedavg", kind, data={"train": "long.csv", "test": "long.csv"}, clients={"count": 1})
        [loaded] = load(made)
        data = prepare(loaded, tmp_path)
        counts[kind] = len(examples(loaded, data.train, data.labels, tokenizer()))
    assert counts == {"mlm": 3, "classify": 2}


def test_dirichlet_over_plain_text_deals_sizes(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("".join(f"the heart {i}\n" for i in range(60)))
    made = job("fedavg", "mlm", data={"train": "plain.txt", "test": "plain.txt"})
    made["clients"] = {"count": 3, "partition": "dirichlet", "alpha": 0.5}
    data = prepare(load(made)[0], tmp_path)
    assert sum(map(len, data.shards.values())) == 60
    assert data.by is None
    made["data"]["label"] = "topic"
    with pytest.raises(UserError, match="'topic'"):
        prepare(load(made)[0], tmp_path)


def test_class_names_may_be_numbers(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_text("text,label\na,1\nb,0\n")
    made = job("fedavg", "classify", data={"train": "numbers.csv", "test": "numbers.csv"}, clients={"count": 1})
    made["task"] |= {"labels": [0, 1], "positive": [1]}
    assert prepare(load(made)[0], tmp_path).labels == ("0", "1")


def test_numbers_are_split_like_classes(job: Jobs, tmp_path: Path) -> None:
    """Sorted cuts, and shares of each fifth; no row stands twice."""
    numbers = np.random.default_rng(0).permutation([f"{i / 20:.3f}" for i in range(101)])
    (tmp_path / "n.csv").write_text("a,b,label\n" + "".join(f"the heart,the eye,{n}\n" for n in numbers))
    made = job("fedavg", "regress", data={"train": "n.csv", "text": ["a", "b"]})
    del made["data"]["test"]
    made["data"]["holdout"] = 0.01
    held = []
    for partition in ("label_sorted", "dirichlet"):
        made["clients"] = {"partition": partition, "count": 3, "alpha": 0.1}
        data = prepare(load(made)[0], tmp_path)
        every = np.concatenate(list(data.shards.values()))
        assert len(np.unique(every)) == len(every)
        held.append([[float(data.train.columns["label"][i]) for i in rows] for rows in data.shards.values()])
        assert data.by is not None
        assert len(set(data.by)) == 5
    low, middle, high = held[0]
    assert max(low) <= min(middle) <= max(middle) <= min(high)
    fifths = [[sum(value < edge for value in each) for edge in (1, 2, 3, 4)] for each in held[1]]
    assert np.ptp(np.asarray(fifths), axis=0).max() > 15, "each fifth is dealt by shares of its own"


def test_numbers_of_a_table_are_told_by_value(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("text,label\n" + "the heart,5.000\n" * 6 + "the eye,0.0\n" * 6)
    made = job("fedavg", "regress", data={"train": "n.csv", "test": "n.csv"})
    made["clients"] = {"partition": "label_table", "table": [{"5": 100}, {"0": 50, "5": 50}]}
    shards = prepare(load(made)[0], tmp_path).shards
    assert {name: len(rows) for name, rows in shards.items()} == {"client-0": 4, "client-1": 4}


def test_the_order_of_the_classes_is_the_job_s_or_the_data_set_s(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MRPC's classes are "not_equivalent", "equivalent": by the alphabet the shares would be swapped."""
    import datasets

    names = ["not_equivalent", "equivalent"]
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    rows = {"text": ["the heart"] * 40, "label": [0, 1] * 20}
    data = datasets.Dataset.from_dict(rows, datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: data)
    made = job("fedavg", "classify", data={"train": "glue:mrpc", "test": "glue:mrpc"})
    made["clients"] = {"partition": "label_table", "table": "mrpc-3"}
    prepared = prepare(load(made)[0])
    assert prepared.labels == tuple(names)
    first = [prepared.train.columns["label"][i] for i in prepared.shards["client-0"]]
    assert first.count("equivalent") >= 0.9 * len(first)
    made["task"]["labels"] = names[::-1]
    prepared = prepare(load(made)[0])
    first = [prepared.train.columns["label"][i] for i in prepared.shards["client-0"]]
    assert first.count("equivalent") <= 0.1 * len(first)


def test_named_sources_are_pools(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "mm.csv").write_text("text,label\nc,x\nd,\ne,y\n")
    made = job("fedavg", "classify", data={"test": {"matched": "m.csv", "mismatched": ["mm.csv", "m.csv"]}})
    made["data"]["train"] = "m.csv"
    made["clients"]["count"] = 1
    data = prepare(load(made)[0], tmp_path)
    assert data.test.columns["text"] == ["a", "b", "c", "e", "a", "b"]
    assert data.test.pools == ["matched"] * 2 + ["mismatched"] * 4
    assert data.dropped == 1
    pools = examples(load(made)[0], data.test, data.labels, tokenizer()).pools
    assert {name: index.tolist() for name, index in pools.items()} == {
        "matched": [0, 1],
        "mismatched": [2, 3, 4, 5],
    }
    made["data"]["test"] = {"not a word": "m.csv"}
    with pytest.raises(UserError, match=r"\[data\] test"):
        load(made)


@pytest.mark.parametrize("own", [False, True])
def test_every_source_of_the_training_rows_is_a_client(job: Jobs, tmp_path: Path, own: bool) -> None:
    for name, count in (("north", 9), ("south", 6)):
        rows = "".join(f"the heart,{'xy'[i % 2]}\n" for i in range(count))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows},x\n")
    made = job("fedavg", "classify", data={"train": {"south": "south.csv", "north": "north.csv"}})
    made["clients"] = {"partition": "files"}
    if own:
        made["clients"]["test"] = 0.3
    del made["data"]["test"]
    made["data"]["holdout"] = 0.2
    data = prepare(load(made)[0], tmp_path)
    assert list(data.shards) == ["north", "south"]
    tests = data.tests or {}
    for name, count in (("north", 9), ("south", 6)):
        rows_of = np.concatenate([data.shards[name], tests.get(name, np.empty(0, np.int64))]).astype(int)
        assert {data.train.pools[i] for i in rows_of} == {name}
        assert len(rows_of) == count - (0 if own else data.test.pools.count(name))
    assert data.dropped == 2
    assert (
        sum(map(len, data.shards.values())) + len(data.test if not own else np.concatenate([*tests.values()]))
        == 15
    )
    limited = prepare(load(made, {"data.limit": 4})[0], tmp_path)
    assert limited.train.pools.count("north") + (0 if own else limited.test.pools.count("north")) == 4
    made["data"]["train"] = ["north.csv", "south.csv"]
    with pytest.raises(UserError, match=r"\[clients\] partition: 'files' needs named sources, one"):
        prepare(load(made)[0], tmp_path)


def test_named_sources_are_clients_unless_the_job_says_otherwise(job: Jobs, tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + f"the heart of {name},x\nthe eye,y\n" * 3)
    sources = {name: str(tmp_path / f"{name}.csv") for name in ("south", "north")}
    made = job("fedavg", "classify", data={"train": sources, "test": sources["north"]})
    with pytest.raises(
        UserError, match=r"count: is 3, but .* names 2 sources, each of them a client; partition = 'iid'"
    ):
        prepare(load(made)[0])
    del made["clients"]
    [resolved] = load(made)
    data = prepare(resolved)
    assert (resolved.clients.partition, list(data.shards)) == ("files", ["north", "south"])
    assert data_notes(resolved, data) == []
    assert load(made, ["clients.partition=iid"])[0].clients.partition == "iid"
    made["clients"] = {"partition": "iid", "count": 2}
    [resolved] = load(made)
    [note] = data_notes(resolved, prepare(resolved))
    assert note.startswith(
        "rows of all named sources (south, north) are dealt together by partition = 'iid'; 'files'"
    )
    flower = {**made, "clients": {}, "engine": {"name": "flower", "federation": "x"}}
    assert load(flower)[0].clients.partition == "iid", "the sites are the clients"


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet_mix", "label_sorted"])
def test_sentences_are_dealt_by_the_types_of_their_entities(job: Jobs, tmp_path: Path, partition: str) -> None:
    types = ["O", "organ", "organ", "drug"] * 30
    tags = {"O": "O O", "organ": "O B-organ", "drug": "B-drug I-drug"}
    lines = [f"the {tags[kind].split()[0]}\neye {tags[kind].split()[1]}\n" for kind in types]
    (tmp_path / "a.conll").write_text("\n".join(lines))
    made = job("fedavg", "tag", data={"train": "a.conll", "test": "a.conll"})
    made["clients"] = {"count": 3, "partition": partition, "alpha": 0.1}
    data = prepare(load(made)[0], tmp_path)
    assert data.by == types
    held = [{types[i] for i in rows} for rows in data.shards.values()]
    if partition == "label_sorted":
        assert held == [{"O", "drug"}, {"drug", "organ"}, {"organ"}]
    else:
        mixes = [[types[i] for i in rows].count("organ") / len(rows) for rows in data.shards.values()]
        assert max(mixes) > 0.8
        assert min(mixes) < 0.2


def test_tags_that_are_numbers_are_scored_by_their_names(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ["the", "eye"], "label": [0, 1]}\n' * 4)
    made = job("fedavg", "tag", data={"train": "a.jsonl", "test": "a.jsonl"}, clients={"count": 1})
    with pytest.raises(UserError, match=r"the tags in column 'label' are numbers \(0, 1\); expected names"):
        prepare(load(made)[0], tmp_path)
    made["task"]["labels"] = ["O", "B-organ"]
    [resolved] = load(made)
    data = prepare(resolved, tmp_path)
    assert (data.labels, set(data.by or ())) == (("O", "B-organ"), {"organ"})
    assert data_notes(resolved, data) == [
        "column 'label': the tags are numbers, named in the order of [task] labels"
    ]


def test_decimal_commas_are_numbers_and_lists_of_labels_are_refused(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;label\nthe heart;4,5\nthe eye;1\nblood;0,25\n")
    made = job("fedavg", "regress", data={"train": "a.csv", "test": "a.csv"}, clients={"count": 1})
    [resolved] = load(made)
    data = prepare(resolved, tmp_path)
    assert data.train.columns["label"] == ["4.5", "1", "0.25"]
    file = tmp_path / "a.csv"
    assert data_notes(resolved, data) == [
        f"{file}: delimiter ';'",
        "column 'label': the numbers have decimal commas",
    ]
    file.write_text("text,label\nthe heart,a|b\nthe eye,a\nblood,b\n")
    made["task"]["kind"] = "classify"
    with pytest.raises(UserError, match=r"column 'label' holds several labels in one row \('a\|b'\)"):
        prepare(load(made)[0], tmp_path)
    made["task"]["labels"] = ["a", "a|b", "b"]
    assert prepare(load(made)[0], tmp_path).labels == ("a", "a|b", "b"), "classes that are meant"


def test_plain_text_by_file_is_told_apart_by_the_files(job: Jobs, tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 5)):
        (tmp_path / f"{name}.txt").write_text("the heart\n" * count)
    sources = {name: str(tmp_path / f"{name}.txt") for name in "ab"}
    made = job("fedavg", "mlm", data={"train": sources, "test": sources["a"]}, clients={"partition": "files"})
    del made["clients"]["count"]
    data = prepare(load(made)[0])
    assert (data.by, data.labels) == (["a"] * 3 + ["b"] * 5, None)
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    assert forecast["clients"]["up_bytes"] == result.bytes["up"]
    clients = json.loads((tmp_path / "run" / "partition.json").read_text())["clients"]
    assert {name: client["rows"] for name, client in clients.items()} == {"a": 3, "b": 5}
    [without_data] = fedstrata.forecast(made, count=10).values()
    assert without_data["clients"]["count"] == 2
    assert without_data["client"] == "a"


@pytest.mark.parametrize("own", [False, True])
def test_packing_joins_nobodys_texts_with_anothers(job: Jobs, tmp_path: Path, own: bool) -> None:
    """Every client's words are its own: 40 rows of one word each; test rows are joined apart, source by source."""
    words = ["kidney", "heart", "eye", "blood"]
    for name in ("train", "more"):
        rows = "".join(f"{word} {word},{word}\n" for word in words * 10)
        (tmp_path / f"{name}.csv").write_text("text,ward\n" + rows)
    named = {"a": "train.csv", "b": "more.csv"}
    made = job("centralized", "mlm", data={"train": named, "long_text": "pack"}, train={"max_tokens": 16})
    made["data"]["test"] = named
    made["clients"] = {"partition": "column", "column": "ward"}
    if own:
        del made["data"]["test"]
        made["clients"]["test"] = 0.3
    [resolved] = load(made)
    data = prepare(resolved, tmp_path)
    train = examples(resolved, data.train, None, tokenizer(), data.shards.values())
    tests = data.tests.values() if data.tests else None
    test = examples(resolved, data.test, None, tokenizer(), tests)
    for client, rows in data.shards.items():
        mine = train.tokens.of_rows(rows)
        word = tokenizer()(client)["input_ids"][1]
        inside = np.concatenate([train.tokens[i] for i in mine])
        assert set(inside[inside > 4].tolist()) == {word}
        assert (inside == word).sum() == 2 * len(rows)
        if data.tests:
            tested = np.concatenate([test.tokens[i] for i in test.tokens.of_rows(data.tests[client])])
            assert (tested == word).sum() == 2 * len(data.tests[client])
            assert set(tested[tested > 4].tolist()) == {word}
    for name, index in test.pools.items():
        count = sum(int((test.tokens[i] > 4).sum()) for i in index)
        rows_of = np.flatnonzero(np.asarray(data.test.pools) == name)
        held = np.concatenate(list(data.tests.values())) if data.tests else rows_of
        assert count == 2 * len(np.intersect1d(rows_of, held))


def test_packing_is_of_plain_text(job: Jobs) -> None:
    with pytest.raises(UserError, match=r"\[data\] long_text: 'pack' goes with mlm and clm, not with 'tag'"):
        load(job("fedavg", "tag", data={"long_text": "pack"}))


def test_a_packed_job_counts_rows_and_blocks(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", "mlm", data={"long_text": "pack"}, train={"max_tokens": 60}, clients={"count": 2})
    [forecast] = fedstrata.forecast(made).values()
    result = fedstrata.run(made)
    clients = json.loads((tmp_path / "run" / "partition.json").read_text())["clients"]
    assert [client["rows"] for client in clients.values()] == [6, 6]
    assert all(client["examples"] < 6 for client in clients.values())
    assert f"{sum(client['examples'] for client in clients.values())} training" in forecast["holdings"][0]
    assert result.status == "finished"


def test_clients_are_dealt_whole_articles(job: Jobs, tmp_path: Path) -> None:
    text = "".join(f" = Title {i} = \n\n" + f" line of {i} \n\n" * 3 for i in range(12))
    (tmp_path / "wiki.txt").write_text(text)
    made = job("fedavg", "clm", data={"train": "wiki.txt", "test": "wiki.txt", "documents": "headings"})
    data = prepare(load(made)[0], tmp_path)
    assert [len(rows) for rows in data.shards.values()] == [4, 4, 4]
    assert all(row.count("\n") == 3 for row in data.train.columns["text"])
    made["data"]["train"] = "demo:hpo-train"
    with pytest.raises(UserError, match=r"demo:hpo-train: \[data\] documents"):
        prepare(load(made)[0], tmp_path)
