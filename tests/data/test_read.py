from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from fedstrata.data import read as reading
from fedstrata.data.forms.how import How, notes
from fedstrata.data.read import Rows
from fedstrata.errors import UserError

ROWS = {"text": ["one, two", 'say "hi"', "drei\u2028vier"], "label": ["a", "b", "a"]}


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(
    source: str | list[str], columns: list[str], limit: int | None = None, base_dir: Path | None = None, **how: Any
) -> Rows:
    return reading.read(source, How(tuple(columns), **how), limit, base_dir)


def write(name: str, content: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def write_parquet(name: str, columns: dict[str, list[Any]]) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), name)
    return name


def refused(*parts: str) -> Any:
    """The one sentence of an error, of which these parts are in this order."""
    return pytest.raises(UserError, match="^(?s:.*)" + "(?s:.*)".join(map(re.escape, parts)))


def test_every_form_gives_the_same_rows() -> None:
    objects = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
    sources = [
        write("a.csv", 'label,text\r\na,"one, two"\r\n\r\nb,"say ""hi"""\r\na,drei\u2028vier\r\n'),
        write("a.tsv", 'text\tlabel\none, two\ta\nsay "hi"\tb\n\ndrei\u2028vier\ta'),
        write("tabs.txt", 'text\tmore\tlabel\none, two\t1\ta\nsay "hi"\t2\tb\ndrei\u2028vier\t\ta\n'),
        write("a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in objects) + "\n\n"),
        write("lines.json", "\n".join(map(json.dumps, objects))),
        write("array.json", "\n" + json.dumps(objects, indent=2)),
        write("lines.txt", "\n".join(map(json.dumps, objects))),
        write_parquet("a.parquet", {"other": [1, 2, 3], **ROWS}),
        write("UPPER.TSV", 'text\tlabel\none, two\ta\nsay "hi"\tb\ndrei\u2028vier\ta\n'),
    ]
    for source in sources:
        assert read(source, ["text", "label"]) == Rows(ROWS, 0), source
        marked = write(f"marked-{source}", b"\xef\xbb\xbf" + Path(source).read_bytes())
        if not source.endswith(".parquet"):
            assert read(marked, ["label", "text"]).columns == ROWS, f"{source} with a byte order mark"


def test_plain_lines_keep_their_blanks_and_tabs() -> None:
    write("a.txt", " one \n\n  \ntwo\tthree\r\nfour")
    assert read("a.txt", ["text"]) == Rows({"text": [" one ", "two\tthree", "four"]}, 0)


def test_a_tab_in_the_first_plain_line_makes_no_header() -> None:
    write("a.txt", "one\ttwo\nthree\n")
    assert read("a.txt", ["text"]).columns == {"text": ["one\ttwo", "three"]}


ARTICLES = [
    *(" ", " = Lobster = ", " ", " It is blue . ", " ", " = = In food = = ", " "),
    *(" = 5 and k = ", " It is red . ", " = 7 and k = ", " ", " = = = Sauce = = = ", " = 2011 – 12 team = ", ""),
    *(" = = ", " ", " = Route 2 = ", " A road . ", ""),
]


def test_a_row_is_a_line_or_what_stands_between_blank_lines_or_an_article() -> None:
    write("a.txt", "\n".join(ARTICLES))
    whole = read("a.txt", ["text"]).columns["text"]
    assert whole == [line for line in ARTICLES if line.strip()]
    joined = {d: read("a.txt", ["text"], documents=d).columns["text"] for d in ("lines", "blank", "headings")}
    assert joined["lines"] == whole
    for rows in joined.values():
        assert "\n".join(rows) == "\n".join(whole), "every line once and in its order"
    begins = {name: [row.split("\n")[0] for row in rows] for name, rows in joined.items()}
    assert begins["blank"] == [whole[i] for i in (0, 1, 2, 3, 6, 8, 9)]
    assert begins["headings"] == [" = Lobster = ", " = 5 and k = ", " = Route 2 = "]
    assert joined["headings"][2] == " = Route 2 = \n A road . "


def test_what_stands_before_the_first_heading_is_a_row() -> None:
    write("a.txt", "of old\n\n= One =\n\nx\n\n= Two =\n")
    assert read("a.txt", ["text"], documents="headings").columns["text"] == ["of old", "= One =\nx", "= Two ="]
    assert read("a.txt", ["text"], documents="headings", limit=2).columns["text"] == ["of old", "= One =\nx"]


@pytest.mark.parametrize("documents", ["blank", "headings"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text\none\n"),
        ("a.tsv", "text\none\n"),
        ("a.jsonl", '{"text": "one"}'),
        ("json.txt", '{"text": "one"}'),
        ("rct.txt", "###1\nMETHODS\tone\n"),
        ("folder/a.txt", "one"),
    ],
)
def test_documents_are_of_plain_txt_files_alone(name: str, content: str, documents: str) -> None:
    write(name, content)
    source = "folder" if "/" in name else name
    with refused(f"{source}: [data] documents: '{documents}' goes with"):
        read(source, ["text"], documents=documents)


def test_documents_have_no_other_column() -> None:
    write("a.txt", "one")
    with refused("a.txt: [data] documents: 'blank' goes with plain txt files without columns"):
        read("a.txt", ["text"], names=["text"], documents="blank")
    with refused("a.txt: has no column 'label'"):
        read("a.txt", ["text", "label"], documents="blank")
    with refused("gone: [data] documents: 'blank' goes with txt files; there is none"):
        read("gone", ["text"], documents="blank")


def test_quotes_mean_nothing_in_tsv() -> None:
    write("a.tsv", 'text\tlabel\n"one\t1\ntwo"\t2\n""three""\t3\n')
    assert read("a.tsv", ["text"]).columns == {"text": ['"one', 'two"', '""three""']}


def test_a_quoted_csv_field_may_run_over_lines_and_be_big() -> None:
    big = "word " * 40_000  # beyond the csv module's own limit of 128 KiB
    write("a.csv", f'text,label\n"one\ntwo",a\n"{big}",b\n')
    assert read("a.csv", ["text", "label"]).columns == {"text": ["one\ntwo", big], "label": ["a", "b"]}


def test_pubmed_rct_gives_text_label_and_document() -> None:
    write("a.txt", "###12\nMETHODS\tWe saw.\nRESULTS\tIt is.\n\n###13\nRESULTS\tA\ttab.\n")
    found = read("a.txt", ["text", "label", "document"]).columns
    assert found == {
        "text": ["We saw.", "It is.", "A\ttab."],
        "label": ["METHODS", "RESULTS", "RESULTS"],
        "document": ["12", "12", "13"],
    }


@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.tsv", "\t"), ("a.txt", "\t")])
def test_names_stand_in_for_a_header(name: str, between: str) -> None:
    write(name, between.join(["gj04", "1", "", "One."]) + "\n" + between.join(["gj04", "0", "*", "Two."]))
    names = ["source", "label", "mark", "text"]
    assert read(name, ["text", "label"], names=names).columns == {"text": ["One.", "Two."], "label": ["1", "0"]}


def test_incomplete_rows_are_left_out_and_counted() -> None:
    rows = [{"text": "a", "label": 1}, {"text": None, "label": 1}, {"text": " ", "label": 1}, {"text": "b"}]
    rows += [{"text": "c", "label": float("nan")}, {"text": "d", "label": True}, {"text": "nan", "label": 0.5}]
    write("a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read("a.jsonl", ["text", "label"]) == Rows(
        {"text": ["a", "d", "nan"], "label": ["1", "True", "0.5"]}, 4
    )
    write_parquet("a.parquet", {"text": ["a", None, "c"], "label": [1, 2, None]})
    assert read("a.parquet", ["text", "label"]) == Rows({"text": ["a"], "label": ["1"]}, 2)


def test_limit_counts_full_rows_and_stops_before_what_follows() -> None:
    write("a.jsonl", '{"text": "one"}\n{"text": ""}\n{"text": "two"}\nnot JSON\n')
    assert read("a.jsonl", ["text"], limit=2) == Rows({"text": ["one", "two"]}, 1)
    with refused("a.jsonl, line 4"):
        read("a.jsonl", ["text"], limit=3)


def test_rows_are_numbered_as_they_stand_in_their_source_dropped_ones_included() -> None:
    write("a.csv", "text,label\n,x\none,x\n\n,x\ntwo,y\n")
    write("b.jsonl", '{"text": "three", "label": "x"}\n{"text": ""}\n{"text": "four", "label": "y"}\n')
    assert list(read("a.csv", ["text", "label"]).numbers) == [1, 3]
    assert list(read(["a.csv", "b.jsonl"], ["text", "label"]).numbers) == [1, 3, 4, 6]
    assert list(read(["a.csv", "b.jsonl"], ["text", "label"], limit=3).numbers) == [1, 3, 4]


def test_each_entry_of_a_list_of_texts_and_of_a_list_of_their_labels_is_a_row() -> None:
    whole = {"texts": ["one", "two"], "labels": ["a", 1], "owner": "north"}
    empty = {"texts": [], "labels": [], "owner": "south"}
    lines = "\n".join(map(json.dumps, [whole, empty, whole | {"texts": ["three", " "], "owner": "south"}]))
    found = read(write("a.jsonl", lines), ["texts", "labels", "owner"], owner="owner")
    columns = {"texts": ["one", "two", "three"], "labels": ["a", "1", "a"], "owner": ["north", "north", "south"]}
    assert (found.columns, found.dropped, list(found.numbers)) == (columns, 2, [0, 1, 3])
    assert list(found.found["a.jsonl"]) == ["lists of texts and of their labels, each entry of which is a row"]
    write("b.jsonl", json.dumps(whole | {"labels": ["a"]}))
    with refused("b.jsonl, line 1: columns texts, labels hold lists of different lengths; expected one label for"):
        read("b.jsonl", ["texts", "labels"])
    for column in ("texts", "labels"):
        write("c.jsonl", json.dumps(whole | {column: "one"}))
        with refused("c.jsonl, line 1: column", "holds a list, expected a text"):
            read("c.jsonl", ["texts", "labels"])


def test_a_list_is_read_in_its_order() -> None:
    sources = [write("b.txt", "one"), write("a.csv", "text\ntwo\n"), write("c/d.txt", "three"), "b.txt"]
    assert read(sources, ["text"]).columns == {"text": ["one", "two", "three", "one"]}
    assert len(read(sources, ["text"], limit=2)) == 2


def test_every_source_of_a_list_must_exist_before_one_is_read() -> None:
    write("a.jsonl", "not JSON")
    with refused("gone.csv: there is no such file"):
        read(["a.jsonl", "gone.csv"], ["text"])


def test_a_folder_of_text_files_has_one_row_per_file() -> None:
    write("mail/spam/b.txt", "cheap\nmore\n")
    write("mail/ham/deep/a.txt", b"\xef\xbb\xbfhello")
    write("mail/top.txt", "top")
    write("mail/.hidden/x.txt", "no")
    write("mail/README.md", "no")
    found = read("mail", ["text", "file", "folder"])
    assert sorted(zip(*found.columns.values(), strict=True)) == [
        ("cheap\nmore\n", "spam/b.txt", "spam"),
        ("hello", "ham/deep/a.txt", "ham"),
    ]
    assert found.dropped == 1, "a file at the top has no folder"
    assert read("mail", ["file"]).columns == {"file": ["ham/deep/a.txt", "spam/b.txt", "top.txt"]}


def test_a_folder_of_data_files_is_read_in_the_order_of_names() -> None:
    write("parts/2.jsonl", '{"text": "two"}')
    write("parts/1.json", '[{"text": "one"}]')
    write("parts/notes.md", "no")
    assert read("parts", ["text"]).columns == {"text": ["one", "two"]}


def test_the_working_directory_comes_before_the_folder_nearby(tmp_path: Path) -> None:
    write("job/a.txt", "near")
    assert read("a.txt", ["text"], base_dir=Path("job")).columns == {"text": ["near"]}
    write("a.txt", "here")
    rows = read("a.txt", ["text"], base_dir=Path("job"))
    assert rows.columns == {"text": ["here"]}
    assert notes(rows.found) == ["a.txt: that of the working directory, not job/a.txt"]
    assert notes(read("a.txt", ["text"], base_dir=Path.cwd()).found) == []
    assert read(str(tmp_path / "job" / "a.txt"), ["text"], base_dir=Path("x")).columns == {"text": ["near"]}


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": \n',
            ["a.jsonl, line 2: is not JSON", "expected one object per line"],
        ),
        ("a.json", '[{"text": "a"},\n {"text" "b"}]', ["a.json, line 2: is not JSON", "character 10"]),
        ("a.jsonl", '{"text": "a"}\n"b"', ['a.jsonl, line 2: found "b", expected a JSON object']),
        ("a.json", '[{"text": "a"}, 3]', ["a.json, entry 2: found 3, expected a JSON object"]),
        ("a.jsonl", '{"text": ["a"]}', ["a.jsonl, line 1: column 'text' holds a list"]),
        ("a.jsonl", '{"text": "\\ud83d"}', ["a.jsonl, line 1: column 'text'", "half a character"]),
        ("a.jsonl", '{"txt": "a"}\n{"txt": "b"}', ["a.jsonl: has no column 'text'; did you mean 'txt'?"]),
        ("a.csv", "text,b\n1,2\n\n3,4,5", ["a.csv, line 4: found 3 fields, expected 2"]),
        ("a.csv", 'text,b\n"1\n1",2\n3', ["a.csv, line 4: found 1 field, expected 2"]),
        ("a.csv", 'text,b\nx,y\n"1,2\n3,4\n', ["a.csv, line 3: is not CSV"]),
        ("a.csv", "text\rone\rtwo", ["a.csv, line 1: is not CSV"]),
        ("a.tsv", "text\tb\n1\t2\t3\n", ["a.tsv, line 2: found 3 fields, expected 2"]),
        ("a.tsv", "text\tb\r1\t2\r", ["a.tsv, line 1: is no line of fields (a carriage return stands alone"]),
        ("a.csv", "texts,b\n1,2\n", ["has no column 'text'; did you mean 'texts'?", "data.columns"]),
        ("a.csv", "text,text\n1,2\n", ["a.csv: has 2 columns 'text'"]),
        ("a.csv", "", ["a.csv: is empty, expected a header line"]),
        ("a.csv", "text\n", ["a.csv: is empty, expected rows"]),
        ("a.jsonl", "\n \n", ["a.jsonl: is empty, expected rows"]),
        ("a.json", "[]", ["a.json: is empty, expected rows"]),
        ("a.txt", "", ["a.txt: is empty, expected rows"]),
        ("a.csv", "text,b\n,1\n ,2\n", ["a.csv: found 2 rows, none with a value in each column of text"]),
        ("a.parquet", "PAR1 but no more", ["a.parquet: is not a readable Parquet file"]),
        (
            "a.docx",
            "PK\0",
            ["a.docx: the extension '.docx' is not known and the content is no text", ".csv, .tsv"],
        ),
        ("a.josnl", "\0", ["'.josnl' is not known", "no text; did you mean '.jsonl'?"]),
        ("###.txt", "###1\nA\ttext\nno tab\n", ["###.txt, line 3: found no tab, expected a label"]),
    ],
)
def test_a_malformed_file_is_told_with_its_place(name: str, content: str | bytes, parts: list[str]) -> None:
    write(name, content)
    with refused(*parts):
        read(name, ["text"])


def test_a_missing_column_is_told_in_every_form() -> None:
    with refused("a.txt: has no column 'label'; expected one of: text; plain lines"):
        read(write("a.txt", "one\n"), ["text", "label"])
    with refused("b.txt: has no column 'lable'; did you mean 'label'? (expected one of: text, label, document)"):
        read(write("b.txt", "###1\nA\tone\n"), ["lable"])
    with refused("c.txt: has no column 'Qualty'; did you mean 'Quality'?"):
        read(write("c.txt", "Quality\tText\n1\tone\n"), ["Text", "Qualty"])
    with refused("d.parquet: has no column 'label'; expected one of: text"):
        read(write_parquet("d.parquet", {"text": ["one"]}), ["text", "label"])
    with refused(
        "has no column 'topic'; expected one of: text, file, folder, label; a txt file in a folder is one row"
    ):
        read(str(Path(write("e/a.txt", "one")).parent), ["text", "topic"])
    with refused("f.csv: has no column 'label'; expected one of: one, two"):
        read(write("f.csv", "1,2"), ["label"], names=["one", "two"])


def test_a_missing_file_names_its_places_and_its_neighbor(tmp_path: Path) -> None:
    write("data/train.csv", "text\na\n")
    write("job/train.csv", "text\na\n")
    with refused("data/trian.csv: there is no such file", str(tmp_path / "data"), "did you mean 'train.csv'?"):
        read("data/trian.csv", ["text"])
    with refused(f"{tmp_path} or {tmp_path / 'job'}", "did you mean 'train.csv'?"):
        read("trein.csv", ["text"], base_dir=Path("job"))
    with refused("data/train.csv/x.csv: there is no such file"):
        read("data/train.csv/x.csv", ["text"])
    write("jobs/north-wing.toml", "")
    with pytest.raises(UserError) as error:
        read("jobs/north-wing.csv", ["text"])
    assert "did you mean" not in str(error.value), "a job file is no data"


def test_a_folder_must_hold_one_kind() -> None:
    write("both/a.csv", "text\na")
    write("both/b.txt", "b")
    with refused("both: the folder holds files of several kinds (a.csv, b.txt)"):
        read("both", ["text"])
    write("none/a.pdf", "")
    with refused("none: the folder holds no file of a known kind (expected one of: .csv"):
        read("none", ["text"])


@pytest.mark.parametrize("source", ["", [], ["a.txt", ""]])
def test_a_source_must_have_a_name(source: str | list[str]) -> None:
    with refused("[data]: ", "names no source"):
        read(source, ["text"])


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_forbidden_file_or_folder_is_told() -> None:
    Path(write("a.csv", "text\na")).chmod(0)
    with refused("a.csv: cannot be read (Permission denied)"):
        read("a.csv", ["text"])
    write("deep/in/a.csv", "text\na")
    Path("deep/in").chmod(0)
    try:
        with refused("in: cannot be read (Permission denied)"):
            read("deep", ["text"])
    finally:
        Path("deep/in").chmod(0o700)


def test_glue_s_own_files_hold_lines_that_are_short_or_long() -> None:
    """QQP's has a few without all their columns; STS-B's has a license at the end of some."""
    write("short.tsv", "text\tother\tlabel\na\tb\t1\nc\td\ne\tf\t0\n")
    assert read("short.tsv", ["text", "label"]) == Rows({"text": ["a", "e"], "label": ["1", "0"]}, 1)
    assert read("short.tsv", ["text"]).columns["text"] == ["a", "c", "e"], "what is wanted is there"
    write("long.tsv", "4\ta\tb\n5\tc\td\thttp://license\n")
    names = ["score", "one", "two"]
    assert read("long.tsv", ["two", "score"], names=names) == Rows({"two": ["b", "d"], "score": ["4", "5"]}, 0)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A hub of one data set; the arguments of every request."""
    import datasets

    asked = []

    def load(name: str, config: str | None, *, split: str) -> Any:
        asked.append((name, config, split))
        if name != "glue":
            raise datasets.exceptions.DatasetNotFoundError(f"{name} is not there\nmore")
        features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
        rows = {"text": ["a", "b", "c"], "label": [1, -1, 0]}
        return datasets.Dataset.from_dict(rows, datasets.Features(features))

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_a_hub_id_is_read_with_the_names_of_its_classes(hub: list[Any]) -> None:
    rows = read("glue:cola#validation", ["label", "text"])
    assert rows == Rows({"label": ["yes", "no"], "text": ["a", "c"]}, 1, classes={"label": ["no", "yes"]})
    assert read("glue", ["text"], limit=2) == Rows({"text": ["a", "b"]}, 0)
    assert hub == [("glue", "cola", "validation"), ("glue", None, "train")]


def test_an_unknown_hub_id_or_column_is_told(hub: list[Any]) -> None:
    write("gleu/a.txt", "a")
    with refused("glu/x: is neither a file nor a folder", "nor reachable as a data set id (glu/x is not there)"):
        read("glu/x", ["text"])
    with refused("gluee: is neither", "did you mean 'gleu'?"):
        read("gluee", ["text"])
    with refused("glue#test: has no column 'texts'; did you mean 'text'?"):
        read("glue#test", ["texts"])
    assert len(hub) == 3


def test_a_path_of_a_known_kind_is_never_asked_of_the_hub(hub: list[Any]) -> None:
    with refused("there is no such file or folder"):
        read("name/train.csv", ["text"])
    assert not hub
