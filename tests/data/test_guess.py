"""First jobs for rows of which nothing is said."""

from __future__ import annotations

import importlib.util
import json
import random
import tomllib
from pathlib import Path

import datasets
import pandas
import pytest

from fedstrata.data.first_job import first_job
from fedstrata.data.forms.how import notes
from fedstrata.data.guess import guess
from fedstrata.data.prepare import prepare
from fedstrata.data.sample import sample
from fedstrata.data.values import is_number
from fedstrata.errors import UserError
from fedstrata.job.file import load

WORDS = ["patient", "stone", "kidney", "fever", "heart", "the", "has", "a", "no", "in", "one", "all", "since"]


def text(number: int, words: int = 12) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=words))


def table(**columns: list[object]) -> pandas.DataFrame:
    return pandas.DataFrame({"text": [text(i) for i in range(60)], **columns})


LABELS = ["kidney", "heart", "eye"] * 20


def written(tmp_path: Path, frame: pandas.DataFrame, name: str = "rows.csv", **how: object) -> Path:
    path = tmp_path / name
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, **{"index": False, **how})  # type: ignore[call-overload]
    return path


@pytest.mark.parametrize("header", ["What did you see, and where?;Organ, or none\n", "text;label\n", ""])
def test_commas_in_titles_and_texts_are_no_delimiter(tmp_path: Path, header: str) -> None:
    """The sign that stands most often in the first line was taken for it, and the file refused as ragged."""
    lines = [f"{text(i).replace(' ', ', ', 9 - i % 5)};{label}\n" for i, label in enumerate(LABELS)]
    path = tmp_path / "rows.csv"
    path.write_text(header + "".join(lines), "utf-8")
    made, _ = first_job([path], tmp_path / "job.toml", model="demo:minilm")
    data = prepare(load(tomllib.loads(made))[0])
    assert data.labels == ("eye", "heart", "kidney")
    assert len(data.train) + len(data.test) == len(LABELS)


@pytest.mark.parametrize(
    ("columns", "kind", "label", "client"),
    [
        ({"label": LABELS}, "classify", "label", None),
        ({"id": list(range(60)), "Diagnosis": LABELS}, "classify", "Diagnosis", None),
        ({"label": LABELS, "hospital": ["a", "b"] * 30}, "classify", "label", "hospital"),
        ({"score": [i / 7 for i in range(60)]}, "regress", "score", None),
        ({"score": [i % 5 for i in range(60)]}, "classify", "score", None),
        ({"id": list(range(60))}, "mlm", None, None),
        ({"year": [1990 + i % 9 for i in range(60)]}, "mlm", None, None),
    ],
)
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_columns_say_what_they_are(
    tmp_path: Path, columns: dict[str, list[object]], kind: str, label: str | None, client: str | None, name: str
) -> None:
    found = guess(sample(written(tmp_path, table(**columns), name)))
    assert (found.kind, found.text, found.label, found.client) == (kind, "text", label, client)


def test_numbers_may_have_decimal_commas(tmp_path: Path) -> None:
    path = written(tmp_path, table(score=[i / 8 for i in range(60)]), sep=";", decimal=",")
    out = tmp_path / "job.toml"
    out.write_text(first_job([path], out)[0], encoding="utf-8")
    [stage] = load(out)
    assert (stage.task.kind, stage.data.text, stage.data.label) == ("regress", "text", "score")
    prepare(stage)


def test_two_texts_and_a_label_are_a_pair(tmp_path: Path) -> None:
    frame = table(label=LABELS).rename(columns={"text": "sentence1"})
    frame.insert(1, "sentence2", [text(100 + i) for i in range(60)])
    found = guess(sample(written(tmp_path, frame)))
    assert (found.kind, found.text) == ("pair", ["sentence1", "sentence2"])


def test_words_and_tags_are_found_whatever_the_extension(tmp_path: Path) -> None:
    lines = "\n\n".join(
        "\n".join(f"{word}\t{'B-X' if word == 'stone' else 'O'}" for word in ["Sentinel", *WORDS])
        for _ in range(9)
    )
    comment = "# sent_id = 0\n"
    for name, above in (("rows.conll", ""), ("rows.conllu", comment), ("rows.txt", comment), ("rows.tsv", "")):
        (tmp_path / name).write_text(above + lines.replace("\t", "\t" if name == "rows.tsv" else " "), "utf-8")
        found = guess(sample(tmp_path / name))
        assert (found.kind, found.text, found.label) == ("tag", "text", "label")


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.xlsx"])
def test_words_with_a_column_that_numbers_the_sentences(tmp_path: Path, name: str, blank: bool) -> None:
    names = ["Sentence #", "Word", "POS", "Tag"]
    rows = [
        (
            "" if blank and i else f"Sentence: {number}",
            word,
            "NN",
            "B-organ" if word in ("heart", "kidney") else "O",
        )
        for number in range(20)
        for i, word in enumerate(WORDS)
    ]
    frame = pandas.DataFrame(rows, columns=names)
    if name == "rows.xlsx":
        pytest.importorskip("openpyxl")
        frame.to_excel(tmp_path / name, index=False)
    else:
        written(tmp_path, frame, name, sep="\t" if name.endswith("tsv") else ",")
    out = tmp_path / "job.toml"
    out.write_text(first_job([tmp_path / name], out)[0], encoding="utf-8")
    [stage] = load(out)
    assert (stage.task.kind, stage.data.text, stage.data.label) == ("tag", "Word", "Tag")
    prepared = prepare(stage)
    assert len(prepared.train) + len(prepared.test) == 20
    assert prepared.labels == ("B-organ", "O")


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("name", ["rows.csv", "rows.xlsx", "rows.tsv", "rows.conll", "rows.txt"])
@pytest.mark.parametrize("order", [["Word", "Tag", "Hospital"], ["Hospital", "Word", "Tag"]])
def test_a_column_of_clients_beside_words_and_tags(
    tmp_path: Path, name: str, order: list[str], blank: bool
) -> None:
    """It was not seen; as the last column of a file of words its values were taken for the tags."""
    table = name in ("rows.csv", "rows.xlsx")
    if blank and not table:
        pytest.skip("no field of a line between blanks may be blank")
    frame = pandas.DataFrame(
        [
            (number, word, "B-organ" if word == "heart" else "O", "" if blank and i else "ab"[number % 2])
            for number in range(20)
            for i, word in enumerate(WORDS)
        ],
        columns=["sentence", "Word", "Tag", "Hospital"],
    )
    path = tmp_path / name
    if name == "rows.xlsx":
        pytest.importorskip("openpyxl")
        frame[["sentence", *order]].to_excel(path, index=False)
    elif table:
        frame[["sentence", *order]].to_csv(path, index=False)
    else:
        lines = ["\n".join(map("\t".join, own[order].values)) for _, own in frame.groupby("sentence")]
        path.write_text("\n\n".join(["\t".join(order) + "\n" + lines[0], *lines[1:]]), encoding="utf-8")
    out = tmp_path / "job.toml"
    content, said = first_job([path], out)
    out.write_text(content, encoding="utf-8")
    assert "clients column 'Hospital': 2 values" in said
    prepared = prepare(load(out)[0])
    assert set(prepared.shards) == {"a", "b"}
    assert prepared.labels == ("B-organ", "O")
    assert len(prepared.train) + len(prepared.test) == 20


@pytest.mark.parametrize(
    ("name", "header", "sentence"),
    [("rows.txt", "", " "), ("rows.tsv", "", "\t"), ("rows.csv", "sentence_id,word,tag\n", ",")],
)
def test_tags_may_look_like_any_word_where_the_task_says_that_they_are(
    tmp_path: Path, name: str, header: str, sentence: str
) -> None:
    """Of parts of speech init --task tag said that no column holds a list of words beside a list of tags."""
    lines = "\n\n".join("\n".join(f"{word}{sentence}NN" for word in [*WORDS, f"w{i}"]) for i in range(20))
    if header:
        lines = "".join(f"{i},{word},NN\n" for i in range(20) for word in WORDS)
    (tmp_path / name).write_text(header + lines.replace("NN", "VB", 5), encoding="utf-8")
    out = tmp_path / "job.toml"
    out.write_text(first_job([tmp_path / name], out, task="tag")[0], encoding="utf-8")
    data = prepare(load(out)[0])
    assert (len(data.train) + len(data.test), data.labels) == (20, ("NN", "VB"))


def test_a_first_row_without_words_hides_no_tags(tmp_path: Path) -> None:
    """No column looked like text."""
    rows = {"tokens": [[], *[WORDS] * 20], "ner_tags": [[], *[["O"] * len(WORDS)] * 20]}
    assert guess(sample(written(tmp_path, pandas.DataFrame(rows), "rows.jsonl"))).kind == "tag"


def test_no_column_of_which_a_sentence_has_two_values_is_the_clients(tmp_path: Path) -> None:
    rows = [
        (number, word, "B-x" if i else "O", "ab"[i % 2]) for number in range(20) for i, word in enumerate(WORDS)
    ]
    frame = pandas.DataFrame(rows, columns=["sentence", "word", "tag", "source"])
    found = guess(sample(written(tmp_path, frame)))
    assert (found.kind, found.client) == ("tag", None)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.conll"])
def test_tags_that_are_numbers_are_to_be_named(tmp_path: Path, name: str) -> None:
    """init said nothing of them, and the run refused its job; the file has a place for the names now."""
    tags = [2 if word == "heart" else 0 for word in WORDS]
    if name == "rows.jsonl":
        written(tmp_path, pandas.DataFrame({"tokens": [WORDS] * 20, "ner_tags": [tags] * 20}), name)
    else:
        sentence = "\n".join(f"{word} {tag}" for word, tag in zip(WORDS, tags, strict=True))
        (tmp_path / name).write_text("\n\n".join([sentence] * 20), encoding="utf-8")
    out = tmp_path / "job.toml"
    content, said = first_job([tmp_path / name], out)
    label = "ner_tags" if name == "rows.jsonl" else "label"
    assert said[-1] == f"labels  {label!r} holds numbers: write the names of these tags into {out} before a run"
    assert 'labels = ["0", "1", "2"]    # write here the names of the tags in this order, such as' in content
    out.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"are numbers \(0, 2\); expected names, or those .* in \[task\] labels"):
        prepare(load(out)[0])
    named = load(out, [("task.labels", ["O", "B-eye", "B-heart"])])[0]
    assert prepare(named).labels == ("O", "B-eye", "B-heart")


def test_a_named_label_of_lists_is_refused(tmp_path: Path) -> None:
    """They counted as classes, and the run then refused them."""
    pandas.DataFrame({"text": map(text, range(40)), "labels": [["a"], ["a", "b"]] * 20}).to_json(
        tmp_path / "rows.jsonl", orient="records", lines=True
    )
    for kind in (None, "classify"):
        with pytest.raises(UserError, match="--label: 'labels' holds lists; expected a text, a number or a truth"):
            guess(sample(tmp_path / "rows.jsonl"), kind=kind, label="labels")
    assert guess(sample(tmp_path / "rows.jsonl"), kind="mlm", label="labels").kind == "mlm"


def test_lists_of_words_and_tags_beside_a_client(tmp_path: Path) -> None:
    """init ended with a KeyError."""
    rows = {
        "tokens": [WORDS] * 20,
        "ner_tags": [["B-x", *["O"] * (len(WORDS) - 1)]] * 20,
        "hospital": ["a", "b"] * 10,
    }
    pandas.DataFrame(rows).to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    out = tmp_path / "job.toml"
    content, lines = first_job([tmp_path / "rows.jsonl"], out)
    out.write_text(content, encoding="utf-8")
    assert "clients column 'hospital': 2 values" in lines
    assert set(prepare(load(out)[0]).shards) == {"a", "b"}


def test_a_file_without_a_header_gets_names(tmp_path: Path) -> None:
    frame = pandas.DataFrame({0: [f"{text(i)}." for i in range(60)], 1: [i % 2 for i in range(60)]})
    rows = sample(written(tmp_path, frame, "rows.tsv", sep="\t", header=False))
    assert rows.names == ["column1", "column2"]
    assert len(rows) == 60
    found = guess(rows)
    assert (found.kind, found.text, found.label) == ("classify", "column1", "column2")


def test_a_first_line_taken_as_a_row_is_said_on_the_screen(tmp_path: Path) -> None:
    lines = "".join(f"{text(i)}.,{i % 2},{i}\n" for i in range(20))
    for header, end in (
        ("text,label,number\n", "columns text, label, number"),
        (f"{text(99)}.,1,4\n", "columns column1, column2, column3; the first line is taken as a row"),
    ):
        (tmp_path / "rows.csv").write_text(header + lines, encoding="utf-8")
        assert first_job([tmp_path / "rows.csv"], tmp_path / "job.toml")[1][0].endswith(end)


@pytest.mark.parametrize(
    ("header", "row", "columns"),
    [
        (",text,label", "{n},{text},{label}", ["text", "label"]),
        ("text,label,", "{text},{label},", ["text", "label"]),
        ("id.,text,label", "{n},{text},{label}", ["id.", "text", "label"]),
        ("report.text,report.label", "{text},{label}", ["report.text", "report.label"]),
        (
            "The text of the report as written by the doctor,label",
            "{text},{label}",
            ["The text of the report as written by the doctor", "label"],
        ),
        (
            "Timestamp,Please paste the report here,What is the finding?",
            "1/{n}/2026 9:05:00,{text},{label}",
            ["Timestamp", "Please paste the report here", "What is the finding?"],
        ),
        (
            "text,label,size (cm),2nd reader",
            "{text},{label},{n},Ann",
            ["text", "label", "size (cm)", "2nd reader"],
        ),
        ("Sep=,\ntext,label", "{text},{label}", ["text", "label"]),
        ("Befund;Klasse", "{text};{label}", ["Befund", "Klasse"]),
        ("Befund;Klasse;;", "{text};{label};;", ["Befund", "Klasse"]),
    ],
)
def test_a_line_of_titles_is_a_header(tmp_path: Path, header: str, row: str, columns: list[str]) -> None:
    rows = [row.format(n=i + 1, text=text(i), label=LABELS[i]) for i in range(60)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([header, *rows]), encoding="utf-8")
    found = sample(path)
    assert (found.names, list(found.columns), len(found)) == (None, columns, 60)
    out = tmp_path / "job.toml"
    out.write_text(first_job([path], out)[0], encoding="utf-8")
    assert prepare(load(out)[0]).labels == ("eye", "heart", "kidney")


@pytest.mark.parametrize(
    ("head", "names", "count"),
    [
        ([["Befund", None, "Klasse"]], None, 60),
        ([["text", "label"]], None, 60),
        ([["Der Befund ist da.", "eye"]], ["column1", "column2"], 61),
        ([["Der Befund ist da.", None, "eye"]], ["column1", "column2", "column3"], 61),
    ],
)
def test_the_first_row_of_a_sheet_may_be_a_row_like_the_others(
    tmp_path: Path, head: list[list[str | None]], names: list[str] | None, count: int
) -> None:
    pytest.importorskip("openpyxl")
    gap = [None] if None in head[0] else []
    rows = [[text(i), *gap, LABELS[i]] for i in range(60)]
    path = tmp_path / "rows.xlsx"
    pandas.DataFrame([*head, *rows]).to_excel(path, index=False, header=False)
    found = sample(path)
    assert (found.names, len(found)) == (names, count)
    out = tmp_path / "job.toml"
    out.write_text(first_job([path], out)[0], encoding="utf-8")
    data = prepare(load(out)[0])
    assert len(data.train) + len(data.test) == count
    assert data.labels == ("eye", "heart", "kidney")


def test_a_title_above_the_header_of_a_sheet_is_told(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    path = tmp_path / "rows.xlsx"
    rows = [["Report", None], ["text", "label"], ["a", "b"]]
    pandas.DataFrame(rows).to_excel(path, index=False, header=False)
    with pytest.raises(UserError, match="row 2: found 2 fields, expected 1"):
        sample(path)


@pytest.mark.parametrize("end", [".", ""])
@pytest.mark.parametrize("words", [2, 12])
def test_a_first_line_whose_values_come_again_is_a_row(tmp_path: Path, words: int, end: str) -> None:
    # A class may be called as a column usually is.
    lines = [f"{text(i, words)}{end},{'question' if i % 3 else 'note'}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    assert len(sample(tmp_path / "rows.csv")) == 60


def test_a_header_that_is_repeated_in_the_file_is_one(tmp_path: Path) -> None:
    lines = ["text,label", *(f"{text(i)},{LABELS[i]}" for i in range(20))] * 2
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    assert list(sample(tmp_path / "rows.csv").columns) == ["text", "label"]


def test_columns_that_the_user_names_make_a_header(tmp_path: Path) -> None:
    lines = ["1. Befund!,2. Klasse!", *(f"{text(i)},{LABELS[i]}" for i in range(60))]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert sample(path).names == ["column1", "column2"]
    job, said = first_job([path], tmp_path / "job.toml", text=["1. Befund!"], label="2. Klasse!")
    assert "\ncolumns = " not in job
    assert "60 rows" in said[0]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    lines = "".join(f"{text(i)},{LABELS[i]},{i}\n" for i in range(20))
    (tmp_path / "rows.csv").write_text(f"text,label,label\n{lines}", encoding="utf-8")
    with pytest.raises(UserError, match="has 2 columns 'label'; expected one"):
        sample(tmp_path / "rows.csv")


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_the_job_file_that_is_written_reads_the_rows(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, table(label=LABELS, hospital=["a", "b", "c"] * 20), name)
    job, lines = first_job([path], tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text(job, encoding="utf-8")
    stage = load(tmp_path / "job.toml")[0]
    prepared = prepare(stage, tmp_path)
    assert set(prepared.shards) == {"a", "b", "c"}
    assert prepared.labels == ("eye", "heart", "kidney")
    assert any("classify" in line for line in lines)


def test_a_file_for_each_client(tmp_path: Path) -> None:
    files = [written(tmp_path, table(label=LABELS), f"{name}.csv") for name in ("north", "süd")]
    for data in (files, [tmp_path]):
        out = tmp_path / "out" / "job.toml"
        out.parent.mkdir(exist_ok=True)
        out.write_text(first_job(data, out)[0], encoding="utf-8")
        assert set(prepare(load(out)[0]).shards) == {"north", "süd"}


def test_each_client_may_have_a_class_of_its_own(tmp_path: Path) -> None:
    """init looked at the first file alone, and had the model trained without labels."""
    files = [written(tmp_path, table(label=[name] * 60), f"{name}.csv") for name in ("eye", "heart")]
    out = tmp_path / "job.toml"
    content, said = first_job(files, out)
    out.write_text(content, encoding="utf-8")
    assert said[:2] == [
        f"rows    {files[0]} and 1 file more: 120 rows, columns text, label",
        "task    classify: 'label' holds 2 classes",
    ]
    assert prepare(load(out)[0]).labels == ("eye", "heart")


def test_a_folder_for_each_client_is_called_by_its_whole_name(tmp_path: Path) -> None:
    """What follows a dot is no extension of a folder: two saints were said to have the same name."""
    folders = [placed(tmp_path / name, "a.csv", "b.csv") for name in ("St.Mary", "St.John")]
    job = first_job(folders, tmp_path / "job.toml")[0]
    assert list(tomllib.loads(job)["data"]["train"]) == ["St-Mary", "St-John"]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-{i:05}-of-00002.parquet", "test-{i:05}-of-00002.parquet"),
        ("data/train-{i:05}-of-00002.parquet", "data/validation-{i:05}-of-00002.parquet"),
        ("train-{i:05}-of-00002-b42a775f407cee4{i}.parquet", "test-{i:05}-of-00002-b42a775f407cee4{i}.parquet"),
        ("c4-train.{i:05}-of-00002.csv.gz", "c4-validation.{i:05}-of-00002.csv.gz"),
    ],
)
def test_parts_of_a_data_set_are_no_clients(tmp_path: Path, train: str, test: str) -> None:
    """Those with more in their names were a client each; of two parts of test rows one was read, or none."""
    rows, out = tmp_path / "rows", tmp_path / "job.toml"
    parts = [[name.format(i=i) for i in range(2)] for name in (train, test)]
    placed(rows, *parts[0])
    assert tomllib.loads(first_job([rows], out)[0])["data"]["train"] == str(rows)
    placed(rows, *parts[1])
    job = tomllib.loads(first_job([rows], out)[0])
    assert [job["data"][key] for key in ("train", "test")] == [[str(rows / part) for part in one] for one in parts]
    data = prepare(load(job)[0])
    assert (len(data.train), len(data.test), len(data.shards)) == (120, 120, 6)
    (rows / parts[0][0]).unlink()
    job_again, said = first_job([rows], out)
    assert tomllib.loads(job_again)["data"]["test"] == job["data"]["test"]
    assert said[-1] == f"parts   {rows / parts[0][1]}: of 2 parts 1 is read"


def test_a_folder_that_lacks_parts_of_its_data_set_is_told(tmp_path: Path) -> None:
    rows = placed(tmp_path / "rows", "train-00000-of-00003.parquet", "train-00002-of-00003.parquet")
    _, said = first_job([rows], tmp_path / "job.toml")
    assert said[-1] == f"parts   {rows}/train-00000-of-00003.parquet: of 3 parts 2 are read"
    placed(rows, "train-00001-of-00003.parquet")
    named = rows / "train-00001-of-00003.parquet"
    assert first_job([named], tmp_path / "job.toml")[1][-1] == f"parts   {named}: of 3 parts 1 is read"
    assert not [line for line in first_job([rows], tmp_path / "job.toml")[1] if line.startswith("parts")]


def test_a_folder_of_several_kinds_is_refused_as_a_run_would(tmp_path: Path) -> None:
    """A first job would name the folder."""
    written(tmp_path, table(label=LABELS), "rows.csv")
    (tmp_path / "words.txt").write_text("A text.\n", "utf-8")
    with pytest.raises(UserError, match=r"files of several kinds \(rows.csv, words.txt\)"):
        first_job([tmp_path], tmp_path / "job.toml")


def test_test_rows_beside_training_rows_are_found_unless_they_lack_labels(tmp_path: Path) -> None:
    written(tmp_path, table(label=LABELS), "train.csv")
    written(tmp_path, table(), "test.csv")
    job, said = first_job([tmp_path / "train.csv"], tmp_path / "job.toml")
    assert 'test = "' not in job
    unused = f"unused  {tmp_path / 'test.csv'}: its rows lack columns or labels of the training rows"
    assert unused in said
    written(tmp_path, table(label=LABELS), "dev.csv")
    job, said = first_job([tmp_path], tmp_path / "job.toml")
    assert f'test = "{tmp_path / "dev.csv"}"' in job
    assert unused in said
    assert unused not in first_job([tmp_path], tmp_path / "job.toml", test=tmp_path / "dev.csv")[1]


def test_columns_that_were_guessed_have_a_comment_and_those_that_were_named_have_none(tmp_path: Path) -> None:
    """The file says of itself that guesses have a comment; a column of two texts stood there like a fact."""
    path = written(tmp_path, table(label=LABELS, title=[text(i + 1) for i in range(60)]))
    made = first_job([path], tmp_path / "job.toml")[0]
    assert 'text = "text"    # guessed; --text names another' in made
    assert 'label = "label"    # guessed; --label names another' in made
    made = first_job([path], tmp_path / "job.toml", text=["title"], label="label")[0]
    assert {'text = "title"', 'label = "label"'} <= set(made.splitlines())


def test_of_columns_that_differ_in_capital_letters_alone_none_is_guessed(tmp_path: Path) -> None:
    """The first one was taken without a word."""
    path = written(tmp_path, table(label=LABELS, Label=["a", "b"] * 30))
    with pytest.raises(UserError, match=r"columns 'label' and 'Label' have nearly the same name; .* with --label"):
        first_job([path], tmp_path / "job.toml")
    assert 'label = "Label"' in first_job([path], tmp_path / "job.toml", label="Label")[0]
    path = written(tmp_path, table(label=LABELS, TEXT=[text(i + 1) for i in range(60)]))
    with pytest.raises(UserError, match=r"columns 'text' and 'TEXT' have nearly the same name; .* with --text"):
        first_job([path], tmp_path / "job.toml")
    assert 'text = "TEXT"' in first_job([path], tmp_path / "job.toml", text=["TEXT"])[0]


@pytest.mark.parametrize("name", ["rows.txt", "rows.tsv", "rows"])
def test_tags_without_b_and_i_are_tags_where_blank_lines_part_sentences(tmp_path: Path, name: str) -> None:
    """Words were trained on, each as a text of its own; or a word was taken for a column's name."""
    path, between = tmp_path / name, "\t" if name == "rows.tsv" else " "
    words = [f"{word}{between}{'organ' if word in ('heart', 'kidney') else 'O'}" for word in text(1, 60).split()]
    path.write_text("\n\n".join("\n".join(words[at : at + 6]) for at in range(0, 60, 6)) + "\n", "utf-8")
    assert guess(sample(path)).kind == "tag"
    path.write_text("\n".join(words) + "\n", "utf-8")
    assert not sample(path).words, "no blank line parts sentences"


def test_of_folders_in_a_folder_it_is_told_that_they_are_no_clients(tmp_path: Path) -> None:
    """Only a comment in the job file said so."""
    rows = placed(tmp_path / "rows", "north/a.csv", "south/b.csv")
    said = first_job([rows], tmp_path / "job.toml")[1]
    assert (
        f"clients the rows of north, south in {rows} are dealt together, at random; to make each folder a client, "
        f"name it: fedstrata init {rows}/*"
    ) in said
    each = first_job([rows / "north", rows / "south"], tmp_path / "job.toml")[1]
    assert not any(line.startswith("clients") for line in each)


def test_of_texts_in_folders_of_folders_it_is_told_which_folder_is_the_label(tmp_path: Path) -> None:
    for at, place in enumerate(["north/good", "north/bad", "south/good", "south/bad"] * 6):
        (tmp_path / "rows" / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / "rows" / place / f"{at}.txt").write_text(text(at), "utf-8")
    job, said = first_job([tmp_path / "rows"], tmp_path / "job.toml")
    assert f"labels  the folders north, south in {tmp_path / 'rows'}, not those further down" in said
    (tmp_path / "job.toml").write_text(job, "utf-8")
    [stage] = load(tmp_path / "job.toml")
    [note] = notes(prepare(stage).train.found)
    assert note.endswith("labels are the names of the folders in it, not of those further down")


@pytest.mark.parametrize(
    ("test", "why"),
    [
        (table(), "has no column 'label' as the training rows have; expected one of: text"),
        (table(label=[""] * 60), "no row has a value in column 'label', which test rows need"),
        (table(label=["?"] * 60), "column 'label' holds '\\?', and no class of the training rows"),
        (table(label=LABELS).rename(columns={"text": "sentence"}), "has no column 'text'"),
    ],
)
def test_test_rows_that_do_not_go_with_the_training_rows_are_refused(
    tmp_path: Path, test: pandas.DataFrame, why: str
) -> None:
    """The job that named them was refused by the next command."""
    rows, unfit = written(tmp_path, table(label=LABELS), "train.csv"), written(tmp_path, test, "test.csv")
    with pytest.raises(UserError, match=rf"^--test: .*test.csv: {why}"):
        first_job([rows], tmp_path / "job.toml", test=unfit)
    assert 'test = "' not in first_job([rows], tmp_path / "job.toml")[0], "found beside them, they are unused"


def test_test_rows_of_one_number_are_unused(tmp_path: Path) -> None:
    """Every row of a test part that keeps its labels back has -1; a run correlated with that, and scored 0."""
    rows = written(tmp_path, table(score=[i / 7 for i in range(60)]), "train.csv")
    test = written(tmp_path, table(score=[-1.0] * 60), "test.csv")
    job, said = first_job([rows], tmp_path / "job.toml")
    assert f"unused  {test}: its rows lack columns or labels of the training rows" in said
    with pytest.raises(UserError, match=r"column 'score' is -1.0 in every row"):
        first_job([rows], tmp_path / "job.toml", test=test)
    (tmp_path / "job.toml").write_text(job, "utf-8")
    [stage] = load(tmp_path / "job.toml", [f"data.test='{test}'"])
    what = "column 'score': is -1.0 in every row of a source, and a correlation with it means nothing"
    assert what in notes(prepare(stage).test.found)


def test_a_column_that_says_which_rows_are_test_rows_is_told_to_be_unused(tmp_path: Path) -> None:
    """Its test rows were trained on without a word."""
    path = written(tmp_path, table(label=LABELS, split=["train"] * 50 + ["Test"] * 10, site=["a"] * 60))
    assert (
        "unused  column 'split' (test, train): rows are trained on whatever it says; put its test rows into a "
        "file of their own"
    ) in first_job([path], tmp_path / "job.toml")[1]
    path = written(tmp_path, table(label=["train", "test"] * 30))
    assert not any(line.startswith("unused") for line in first_job([path], tmp_path / "job.toml")[1])


def test_words_in_nested_columns_are_told_to_be_unused(tmp_path: Path) -> None:
    """Of question sets, where texts stand below titles, the titles alone were trained on without a word."""
    path, job = tmp_path / "rows.json", tmp_path / "job.toml"
    asked = [{"question": text(7, 5)}, {"question": text(8, 5)}]
    nested = [
        {"title": text(i, 3), "paragraphs": [{"context": text(i), "qas": asked}], "spans": [[0, 1, "A"]]}
        for i in range(60)
    ]
    path.write_text(json.dumps({"version": "1", "data": nested}), "utf-8")
    unused = [line for line in first_job([path], job)[1] if line.startswith("unused")]
    assert unused == [
        "unused  column 'paragraphs': most words stand there, in lists or tables, which are not read; expected a "
        "row for each text"
    ]
    path.write_text(json.dumps([{**row, "body": text(i, 40)} for i, row in enumerate(nested)]), "utf-8")
    assert not any(line.startswith("unused") for line in first_job([path], job)[1])


def test_a_client_s_file_without_a_column_of_the_first_is_refused(tmp_path: Path) -> None:
    """The job that named it was refused by the next command."""
    north = written(tmp_path, table(label=LABELS), "north.csv")
    south = written(tmp_path, table(target=LABELS), "south.csv")
    with pytest.raises(UserError, match=r"south.csv: has no column 'label' as .*north.csv has; expected one of"):
        first_job([north, south], tmp_path / "job.toml")


def test_lists_where_texts_are_expected_are_refused(tmp_path: Path) -> None:
    """Python's spelling of lists was trained on as text."""
    lists = [text(i).split() for i in range(60)]
    path = written(tmp_path, pandas.DataFrame({"tokens": lists, "tags": [["O"] * 12] * 60}))
    with pytest.raises(UserError, match=r"^column 'tokens' holds lists written as text; expected them in JSON"):
        guess(sample(path))


def placed(folder: Path, *names: str) -> Path:
    """Files of rows in a folder and below."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written(folder, table(label=LABELS), name)
    return folder


@pytest.mark.parametrize(
    ("names", "clients"),
    [
        (["all.csv", "test.csv"], []),
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], []),
        (["train/a.csv", "test/a.csv"], []),
        (["train.csv", "test.jsonl"], []),
        (["north.csv", "south.csv", "test.csv"], ["north", "south"]),
        (["snli_1.0_train.csv", "snli_1.0_test.csv"], []),
    ],
)
def test_test_rows_of_a_folder_are_not_trained_on(tmp_path: Path, names: list[str], clients: list[str]) -> None:
    placed(tmp_path / "rows", *names)
    out = tmp_path / "job.toml"
    out.write_text(first_job([tmp_path / "rows"], out)[0], encoding="utf-8")
    data = load(out)[0].data
    assert data.test == str(tmp_path / "rows" / names[-1])
    assert list(data.train) == clients if clients else data.train == str(tmp_path / "rows" / names[0])


def test_folders_of_clients_may_hold_their_test_rows(tmp_path: Path) -> None:
    """All files of such a folder were trained on."""
    placed(
        tmp_path, "north/train.csv", "north/test.csv", "south/a.csv", "south/b.csv", "south/dev.csv", "east/a.csv"
    )
    folders = [tmp_path / name for name in ("north", "south", "east")]
    job = tomllib.loads(first_job(folders, tmp_path / "job.toml")[0])
    data = prepare(load(job)[0])
    assert job["data"]["test"] == {"north": f"{folders[0]}/test.csv", "south": f"{folders[1]}/dev.csv"}
    assert {name: len(rows) for name, rows in data.shards.items()} == {"east": 60, "north": 60, "south": 120}
    assert data.test.pools == ["north"] * 60 + ["south"] * 60


def test_a_compressed_file_of_a_client_gives_it_the_name_that_it_has_without(tmp_path: Path) -> None:
    placed(tmp_path, "north.csv.gz", "st.mary.CSV")
    job = first_job([tmp_path / "north.csv.gz", tmp_path / "st.mary.CSV"], tmp_path / "job.toml")[0]
    assert list(tomllib.loads(job)["data"]["train"]) == ["north", "st-mary"]


def test_test_rows_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    rows = placed(tmp_path / "rows", "north/train.csv", "south/train.csv", "south/test.csv")
    with pytest.raises(
        UserError, match=r"rows: holds test rows among others \(south/test.csv\); expected .* by --test"
    ):
        first_job([rows], tmp_path / "job.toml")
    with pytest.raises(UserError, match=r"test.csv: has a name of test rows, but each .* expected --test FILE"):
        first_job([rows / "south" / "train.csv", rows / "south" / "test.csv"], tmp_path / "job.toml")
    reviews = tmp_path / "reviews"
    for number, name in enumerate(["train/good", "train/bad", "test/good", "test/bad"] * 2):
        (reviews / name).mkdir(parents=True, exist_ok=True)
        (reviews / name / f"{number}.txt").write_text(text(number), "utf-8")
    with pytest.raises(UserError, match=r"reviews: holds test rows among others \(test/bad/3.txt\)"):
        first_job([reviews], tmp_path / "job.toml")
    found = first_job([reviews / "train"], tmp_path / "job.toml", test=reviews / "test")[0]
    assert f'test = "{reviews / "test"}"' in found


def test_a_text_is_a_text_whatever_its_name_says(tmp_path: Path) -> None:
    for number, name in enumerate(["training-notes", "test-results", "report"]):
        (tmp_path / f"{name}.txt").write_text(text(number), "utf-8")
    assert f'train = "{tmp_path}"' in first_job([tmp_path], tmp_path / "job.toml")[0]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.xlsx"])
@pytest.mark.parametrize("title", ["Reports of 2024", "Reports"])
def test_a_title_above_the_names_of_columns_is_refused(tmp_path: Path, name: str, title: str) -> None:
    """The table was taken for one without a header, or of one column, and a job trained on the text itself."""
    rows = [[text(i), "eye", i] for i in range(9)]
    frame = pandas.DataFrame([[title, None, None], ["Report", "label", "id"], *rows])
    if name == "rows.xlsx":
        pytest.importorskip("openpyxl")
        frame.to_excel(tmp_path / name, index=False, header=False)
    else:
        frame.to_csv(tmp_path / name, index=False, header=False, sep="," if name == "rows.csv" else "\t")
    with pytest.raises(UserError, match=f"{name}: the first line, '{title}', is a title; expected the names"):
        sample(tmp_path / name)


def test_a_first_line_with_one_usual_name_is_no_title(tmp_path: Path) -> None:
    """The other columns of these tables have no names."""
    for first, second in ((",text", "0,label"), ("text,", "label,text"), ("a title,", "of a,table")):
        (tmp_path / "rows.csv").write_text(f"{first}\n{second}\n1,one\n2,two\n", "utf-8")
        assert sample(tmp_path / "rows.csv").columns


TXT_TABLE = "text\tlabel\nThe heart is enlarged.\teye\nThe skin is dry.\theart\n"
TXT_WORDS = "The O\nheart B-organ\n\nA O\nlung B-organ\n"
TXT_JSON = '{"text": "The heart is enlarged.", "label": "eye"}\n'
TXT_ABSTRACT = "###1\nAIM\tTo see.\nEND\tIt was seen.\n"
TXT_FASTTEXT = "__label__eye The heart is enlarged.\n__label__heart The skin is dry.\n"
TXT_QUESTIONS = "DESC:def What is a heart ?\nNUM:count How many are there ?\n"


TXT_ROWS = (TXT_TABLE, TXT_WORDS, TXT_JSON, TXT_ABSTRACT, TXT_FASTTEXT, TXT_QUESTIONS)


@pytest.mark.parametrize("rows", TXT_ROWS)
def test_txt_files_of_rows_are_told_apart_by_their_names(tmp_path: Path, rows: str) -> None:
    """They were taken for documents, as MRPC's msr_paraphrase_train.txt."""
    for name in ("small_train.txt", "small_test.txt", "north/one.txt", "north/two.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(rows, "utf-8")
    both = tomllib.loads(first_job([tmp_path], tmp_path / "job.toml")[0])["data"]
    assert (both["train"], both["test"]) == (str(tmp_path / "small_train.txt"), str(tmp_path / "small_test.txt"))
    data = tomllib.loads(first_job([tmp_path / "north"], tmp_path / "job.toml")[0])["data"]
    assert list(data["train"]) == ["one", "two"]


@pytest.mark.parametrize("name", ["rows", "rows.md"])
def test_a_file_with_an_extension_that_says_nothing_is_looked_at_as_a_txt_file(tmp_path: Path, name: str) -> None:
    """Lines with commas were taken for CSV: line 2 was said to have 11 fields instead of 5."""
    for rows in (*TXT_ROWS, "A, b, c.\nA text, too.\n"):
        for file in (tmp_path / name, tmp_path / "rows.txt"):
            file.write_text(rows, "utf-8")
        assert sample(tmp_path / name) == sample(tmp_path / "rows.txt")
    (tmp_path / name).write_bytes(b"PK\0\1")
    with pytest.raises(UserError, match=rf"{name}: the extension '.*' is not known and the content is no text"):
        sample(tmp_path / name)


@pytest.mark.parametrize("document", ["", "\tIndented.\n\tTwice.\n", "One line\twith a tab.\n", "a\tb\nc\n"])
def test_txt_files_are_documents_if_one_of_them_is(tmp_path: Path, document: str) -> None:
    (tmp_path / "old_train.txt").write_text(TXT_TABLE, "utf-8")
    (tmp_path / "old_test.txt").write_text(document, "utf-8")
    assert tomllib.loads(first_job([tmp_path], tmp_path / "job.toml")[0])["data"]["train"] == str(tmp_path)


def test_a_data_set_saved_to_a_folder_is_read_as_a_run_reads_it(tmp_path: Path) -> None:
    """Also one without splits, beside whose rows there are files of JSON."""
    datasets.Dataset.from_pandas(table(label=LABELS)).save_to_disk(tmp_path / "rows")
    out = tmp_path / "job.toml"
    out.write_text(first_job([tmp_path / "rows"], out)[0], encoding="utf-8")
    assert len(prepare(load(out)[0]).train) == 54


@pytest.mark.parametrize(("lacking", "test"), [(False, "test"), (True, "validation")])
def test_a_data_set_is_tested_on_its_own_split(tmp_path: Path, lacking: bool, test: str) -> None:
    """On one with labels: those of GLUE's test splits are all missing. It held out training rows instead."""
    every = table(label=LABELS)
    splits = {name: datasets.Dataset.from_pandas(every) for name in ("train", "validation", "test")}
    if lacking:
        splits["test"] = splits["test"].map(lambda row: {"label": None})
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "rows")
    job = tomllib.loads(first_job([tmp_path / "rows"], tmp_path / "job.toml")[0])
    assert job["data"]["test"] == str(tmp_path / "rows" / test)
    assert len(prepare(load(job)[0]).test) == len(every)


@pytest.mark.parametrize("name", ["a b.csv", "ünïcode.csv", 'quo"te.csv'])
def test_any_file_name_is_written_so_that_it_is_read(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, table(label=LABELS), name)
    out = tmp_path / "job.toml"
    out.write_text(first_job([path], out)[0], encoding="utf-8")
    assert len(prepare(load(out)[0]).train) == 54


def test_what_cannot_be_guessed_is_asked_for(tmp_path: Path) -> None:
    numbers = pandas.DataFrame({"a": range(60), "b": range(60)})
    with pytest.raises(UserError, match="no column looks like text; name it with --text, one of: a, b"):
        guess(sample(written(tmp_path, numbers)))
    rows = sample(written(tmp_path, table()))
    with pytest.raises(UserError, match="no column looks like a label"):
        guess(rows, "classify")
    single = sample(written(tmp_path, table(label=["kidney"] * 60)))
    with pytest.raises(UserError, match="'label' holds a single value; name it with --label, one of: text, label"):
        guess(single, "classify")
    assert guess(single).reasons["task.kind"].startswith("'label' holds a single value, ")
    many = sample(written(tmp_path, table(label=[f"code {i}" for i in range(60)])))
    assert guess(many).reasons["task.kind"].startswith("'label' holds too many different or too long values, ")
    lists = sample(written(tmp_path, table(label=[["eye", "heart"]] * 60), "rows.jsonl"))
    assert guess(lists).reasons["task.kind"].startswith("'label' holds lists, ")
    with pytest.raises(UserError, match="column 'lable' is not there"):
        guess(rows, label="lable")
    with pytest.raises(UserError, match="no such file"):
        sample(tmp_path / "nothing.csv")
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="empty"):
        sample(tmp_path / "empty.csv")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="column 'text': is empty in all rows"):
        guess(sample(tmp_path / "texts"))


def test_columns_of_which_each_may_be_the_label_are_named(tmp_path: Path) -> None:
    """Ages are figures as classes may be, but none of the two first ones."""
    frame = table(age=[20 + i % 5 for i in range(60)], finding=LABELS)
    rows = sample(written(tmp_path, frame))
    which = "'age' or 'finding' may be the label"
    why = f"{which}, and --label names none: the model is trained on the text itself"
    assert guess(rows).reasons["task.kind"] == why
    with pytest.raises(UserError, match=f"{which}; name it with --label"):
        guess(rows, "classify")
    coded = sample(written(tmp_path, frame.assign(age=[i % 2 for i in range(60)])))
    assert guess(coded).label == "age"


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%y", "%Y-%m-%dT%H:%M", ""])
def test_a_column_of_days_is_no_label(tmp_path: Path, form: str) -> None:
    """Days come again as classes do: beside them no label was guessed, and a model of the text alone trained."""
    days = pandas.to_datetime([f"2024-03-{1 + i % 9:02}" for i in range(60)])
    frame = table(Aufnahmedatum=list(days.strftime(form) if form else days), Diagnose=LABELS)
    found = guess(sample(written(tmp_path, frame, "rows.csv" if form else "rows.parquet")))
    assert (found.kind, found.label) == ("classify", "Diagnose")
    named = frame.drop(columns="Diagnose").rename(columns={"Aufnahmedatum": "label"})
    assert guess(sample(written(tmp_path, named, "rows.parquet"))).label == "label"


@pytest.mark.parametrize(
    ("value", "number"), [("1_5", False), ("1.5", True), ("1,5", True), (15, True), ("a", False)]
)
def test_a_code_with_an_underscore_is_no_number(value: object, number: bool) -> None:
    """Python takes it for one, so that a column of codes could be guessed to hold numbers, which a run refuses."""
    assert is_number(value) is number


def test_labels_of_nli_are_found_by_their_usual_name(tmp_path: Path) -> None:
    """Files of SNLI and MNLI have the votes of annotators beside it, of which each might be the label."""
    frame = table(gold_label=LABELS, label1=LABELS).rename(columns={"text": "sentence1"})
    frame.insert(1, "sentence2", [text(100 + i) for i in range(60)])
    found = guess(sample(written(tmp_path, frame)))
    assert (found.kind, found.text, found.label) == ("pair", ["sentence1", "sentence2"], "gold_label")


def test_a_column_of_labels_in_which_nothing_stands_is_told(tmp_path: Path) -> None:
    """Excel saves no value of a formula that it has not computed."""
    frame = table(label=["=1+1"] * 60)
    names = ["rows.csv"]
    written(tmp_path, frame.assign(label=""))
    if importlib.util.find_spec("openpyxl"):
        frame.to_excel(tmp_path / "rows.xlsx", index=False)
        names.append("rows.xlsx")
    for name in names:
        why = guess(sample(tmp_path / name)).reasons["task.kind"]
        assert why.startswith("'label' is empty in all rows, "), name


@pytest.mark.parametrize(
    ("kind", "text", "label", "sentence"),
    [
        ("pair", (), None, "'pair' reads 2 columns of text, found text"),
        ("classify", ("text", "hospital"), "label", "'classify' reads 1 column of text, found text, hospital"),
        (None, ("text", "hospital", "id"), "label", "'classify' reads 1 column of text, found text, hospital, id"),
        (None, ("text",), "text", "--label: 'text' is also the text; expected another column"),
        ("regress", ("text",), "label", "'regress' needs numbers, but 'label' holds 'kidney'"),
    ],
)
def test_named_columns_that_do_not_go_with_the_task_are_refused(
    kind: str | None, text: tuple[str, ...], label: str | None, sentence: str, tmp_path: Path
) -> None:
    rows = sample(written(tmp_path, table(label=LABELS, hospital=["a", "b", "c"] * 20, id=range(60))))
    with pytest.raises(UserError, match=sentence):
        guess(rows, kind, text, label)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_lists_of_sentences_and_their_labels_are_a_row_each(tmp_path: Path, name: str) -> None:
    """As the abstracts of CSAbstruct are; no column looked like text."""
    abstracts = pandas.DataFrame(
        {
            "abstract_id": range(40),
            "sentences": [[text(i) if i else "Aim", text(100 + i), text(200 + i)][: i % 3 + 1] for i in range(40)],
            "labels": [["aim", "method", "result"][: i % 3 + 1] for i in range(40)],
            "confs": [[0.5, 0.25, 0.125][: i % 3 + 1] for i in range(40)],
        }
    )
    path, out = written(tmp_path, abstracts, name), tmp_path / "job.toml"
    content, said = first_job([path], out)
    out.write_text(content, encoding="utf-8")
    assert said[:2] == [
        f"rows    {path}: 79 rows, columns abstract_id, sentences, labels, confs",
        "task    classify: 'labels' holds 3 classes",
    ]
    data = prepare(load(out)[0])
    assert len(data.train) + len(data.test) == 79
    assert data.labels == ("aim", "method", "result")
    with pytest.raises(UserError, match="column 'sentences' holds lists; 'mlm' reads a text in each row"):
        guess(sample(path), "mlm")


def test_words_and_tags_of_different_numbers_are_refused(tmp_path: Path) -> None:
    lists = pandas.DataFrame({"tokens": [["The", "kidney"], ["The"]], "ner_tags": [["O", "B-x"], ["O", "O"]]})
    rows = sample(written(tmp_path, lists, "rows.jsonl"))
    for kind in (None, "tag"):
        with pytest.raises(UserError, match="row 2: column 'tokens' has 1 word and column 'ner_tags' 2 tags; exp"):
            guess(rows, kind)


def test_several_texts_that_are_named_are_all_read(tmp_path: Path) -> None:
    rows = sample(written(tmp_path, table(title=[f"{text(i)} is here" for i in range(60)])))
    assert guess(rows, "mlm", ("title", "text")).text == ["title", "text"]


def test_letters_choose_the_model(tmp_path: Path) -> None:
    arabic = pandas.DataFrame({"text": ["المريض لديه حصاة في الكلى"] * 30, "label": ["a", "b"] * 15})
    assert "multilingual" in first_job([written(tmp_path, arabic)], tmp_path / "job.toml")[0]
    text = first_job([written(tmp_path, table(label=LABELS))], tmp_path / "job.toml")[0]
    assert "multilingual" not in text
    assert 'bert-base-uncased"    # folder or hub id; English\n' in text


def test_a_text_column_without_a_value_is_refused(tmp_path: Path) -> None:
    """It was written into a job that the next command refused."""
    path = written(tmp_path, table(label=LABELS, note=[""] * len(LABELS)))
    with pytest.raises(UserError, match=r"^--text: no row has a value in column 'note'$"):
        first_job([path], tmp_path / "job.toml", text=["note"])
