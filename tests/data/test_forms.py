"""Files as people have them: what reading finds out by itself, what it says of it, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pandas
import pytest

from fedstrata.data.forms.how import How, notes
from fedstrata.data.read import WORD_END, Rows, read
from fedstrata.data.sample import sample
from fedstrata.errors import UserError

ROWS = {"text": ["Grüße; aus Köln", 'sie sagte "ja"\r\nund ging'], "label": ["gut", "schlecht"]}
QUOTED = 'text{0}label\r\n"Grüße; aus Köln"{0}gut\r\n"sie sagte ""ja""\r\nund ging"{0}schlecht\r\n'
"""The rows as Excel writes them: quoted line breaks, CRLF."""


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def found(source: str | list[str], *columns: str, **how: Any) -> Rows:
    return read(source, How(columns or ("text", "label"), **how))


def write(name: str, content: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def refused(*parts: str) -> Any:
    return pytest.raises(UserError, match="^(?s:.*)" + "(?s:.*)".join(map(re.escape, parts)))


@pytest.mark.parametrize("indent", [None, 2])
def test_rows_under_a_key_of_one_json_object(indent: int | None) -> None:
    """The object was taken for a row; where it stood on several lines, it was said to be no JSON."""
    rows = [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]
    read = found(write("a.json", json.dumps({"version": "1", "data": rows, "tags": ["a"]}, indent=indent)))
    assert (read.columns, list(read.numbers)) == (ROWS, [0, 1])
    assert notes(read.found) == ["a.json: the rows are those under 'data'"]
    assert found(write("b.json", json.dumps({**rows[0], "entities": rows}, indent=indent))).columns == {
        column: values[:1] for column, values in ROWS.items()
    }
    with refused("c.json: has no column 'label'"):
        found(write("c.json", json.dumps({"data": [{"text": "one"}]}, indent=indent)))
    with refused("d.json: has no column 'text'"):
        found(write("d.json", json.dumps({"train": rows, "test": rows}, indent=indent)))


@pytest.mark.parametrize(
    ("delimiter", "encoding", "note"),
    [
        (",", "utf-8-sig", []),
        (";", "utf-8", ["a.csv: delimiter ';'"]),
        (";", "utf-8-sig", ["a.csv: delimiter ';'"]),
        (",", "cp1252", ["a.csv: encoding cp1252, as it is not UTF-8"]),
        (";", "cp1252", ["a.csv: delimiter ';', encoding cp1252, as it is not UTF-8"]),
        ("\t", "utf-16", ["a.csv: encoding utf-16, delimiter '\\t'"]),
        ("|", "utf-8", ["a.csv: delimiter '|'"]),
    ],
)
def test_a_csv_file_as_excel_writes_it_is_found_out_and_told(
    delimiter: str, encoding: str, note: list[str]
) -> None:
    write("a.csv", QUOTED.format(delimiter).encode(encoding))
    rows = found("a.csv")
    assert rows.columns == ROWS
    assert notes(rows.found) == note
    said = found("a.csv", delimiter=delimiter, encoding=encoding)
    assert (said.columns, said.found) == (ROWS, {}), "what the job says need not be found out"


def test_quotes_in_a_file_with_tabs_count_where_they_hold_lines_together() -> None:
    """Excel's "Unicode text"; in GLUE's files, some of which have short lines, they mean nothing."""
    write("a.txt", QUOTED.format("\t").encode("utf-16"))
    rows = found("a.txt")
    assert rows.columns == ROWS
    assert notes(rows.found) == ["a.txt: encoding utf-16, fields between tabs, quoted fields with line breaks"]
    write("glue.tsv", 'text\tlabel\n"one\tx\ntwo\nthree"\ty\n')
    assert found("glue.tsv") == Rows({"text": ['"one', 'three"'], "label": ["x", "y"]}, 1)


def test_quotes_in_a_file_with_tabs_count_where_they_stand_around_all_fields() -> None:
    """As R writes it, and pandas with QUOTE_ALL."""
    whole = '"text"\t"label"\n"one ""and"" two"\t"x"\n"three\tfour"\t"y"\n'
    write("a.tsv", whole)
    rows = found("a.tsv")
    assert rows.columns == {"text": ['one "and" two', "three\tfour"], "label": ["x", "y"]}
    assert notes(rows.found) == ["a.tsv: fields in quotes"]
    write("a.tsv", whole.split("\n", 1)[1])
    assert found("a.tsv", names=["text", "label"]).columns == rows.columns, "without a header"
    write("a.tsv", whole + '"not whole\tz\n')
    with refused("a.tsv: has no column 'text'"):
        found("a.tsv")


def test_quotes_in_a_file_with_tabs_count_where_they_are_doubled() -> None:
    """As pandas and csv write it: the texts had quotes around them, and two in place of each of their own."""
    whole = 'text\tlabel\n"one ""and"" two"\tx\nthree, four\ty\n"five"\tx\n'
    write("a.tsv", whole)
    rows = found("a.tsv")
    assert rows.columns == {"text": ['one "and" two', "three, four", "five"], "label": ["x", "y", "x"]}
    assert notes(rows.found) == ["a.tsv: fields in quotes where they hold some"]
    for line in ('one "and"\tx\n', '"one\tx\n', '"one" two\tx\n'):
        write("a.tsv", whole + line)
        assert found("a.tsv").columns["text"][0] == '"one ""and"" two"', "some quotes are a text's own"
    write("a.tsv", 'text\tlabel\n"five"\tx\n""\ty\n')
    assert found("a.tsv").columns["text"] == ['"five"', '""'], "nothing says whose these are"
    write("a.tsv", whole.split("\n", 1)[1] + "six\tx\tlicense\n")
    assert found("a.tsv", names=["text", "label"]).columns["text"][3] == "six", "a long line"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_that_were_joined_with_their_marks_of_encoding_have_no_rows_of_headers(encoding: str) -> None:
    """As Excel's "CSV UTF-8": the second header, behind its mark, was a row with the class ``label``."""
    for name, between in (("a.csv", ";"), ("a.tsv", "\t")):
        one, two = (f"text;label\n{row}\n".replace(";", between) for row in ("one;x", "two;y"))
        write(name, one.encode(encoding) + two.encode(encoding))
        assert found(name).columns == {"text": ["one", "two"], "label": ["x", "y"]}
    rows = [f'{{"text": "{text}", "label": "x"}}\n'.encode(encoding) for text in ("one", "two")]
    write("a.jsonl", b"".join(rows))
    assert found("a.jsonl").columns == {"text": ["one", "two"], "label": ["x", "x"]}


def test_a_header_line_that_stands_again_is_no_row() -> None:
    """As in files that were joined: it was a class of its own."""
    for name, between in (("a.csv", ","), ("a.tsv", "\t")):
        write(name, "text,label\none,x\ntext,label\ntwo,y\n".replace(",", between))
        rows = found(name)
        assert rows.columns == {"text": ["one", "two"], "label": ["x", "y"]}
        assert notes(rows.found) == [f"{name}: the header line stands again among the rows, and is left out there"]
    write("text.csv", "text\none\ntext\n")
    assert found("text.csv", "text").columns == {"text": ["one", "text"]}, "a word may be a text"


def test_a_first_line_for_excel_alone_is_no_header() -> None:
    write("a.csv", "Sep=;\r\ntext;label\r\na;x\r\nb;y;z\r\n")
    with refused("a.csv, line 4: found 3 fields, expected 2; its fields are separated by ';'"):
        found("a.csv")


def test_files_without_a_header_are_told_by_the_number_of_fields() -> None:
    write("a.csv", "one, two;x\nthree;y\n")
    rows = found("a.csv", names=["text", "label"])
    assert rows.columns == {"text": ["one, two", "three"], "label": ["x", "y"]}
    write("b.csv", "text;label\none;x\n")
    rows = found("b.csv", names=["text", "label"])
    assert rows.columns == {"text": ["one"], "label": ["x"]}
    assert notes(rows.found) == [
        "b.csv: delimiter ';', first line taken as the header line that [data] columns repeats"
    ]


def test_a_wrong_column_of_a_semicolon_file_is_told_among_its_columns() -> None:
    write("a.csv", "Text;Label\na;x\n")
    with refused(
        "a.csv: has no column 'text'; did you mean 'Text'? (expected one of: Text, Label); its fields are"
    ):
        found("a.csv")
    with refused("a.csv: has no column 'Text'", "expected one of: Text;Label"):
        found("a.csv", "Text", delimiter=",")


def test_a_damaged_or_foreign_file_is_not_taken_for_western_text() -> None:
    write("damaged.txt", "Köln\n".encode() + b"K\xf6ln\n")
    with refused("damaged.txt, line 2: is not UTF-8 (byte 2 of the line); [data] encoding names another"):
        found("damaged.txt", "text")
    write("russian.csv", "text,label,id\nПривет мир,x,0123456789\nдо свидания,y,0123456789\n".encode("cp1251"))
    with refused("russian.csv, line 2: is not UTF-8 (byte 1 of the line)"):
        found("russian.csv")
    assert found("russian.csv", encoding="cp1251").columns["text"] == ["Привет мир", "до свидания"]
    with refused("russian.csv, line 2: is not ascii (byte 1 of the line)"):
        found("russian.csv", encoding="ascii")
    write("undefined.txt", b"caf\x81\n")
    with refused("undefined.txt, line 1: is not UTF-8 (byte 4"):
        found("undefined.txt", "text")
    write("wide.txt", "text".encode("utf-16-le"))
    with refused("wide.txt, line 1: holds a zero byte", "encoding = 'utf-16'"):
        found("wide.txt", "text")
    assert found("wide.txt", "text", encoding="utf-16-le").columns == {"text": ["text"]}
    with refused("wide.txt: is not utf-16-be (byte 1 of the file)"):
        write("wide.txt", b"\xd8\x00")
        found("wide.txt", "text", encoding="utf-16-be")


@pytest.mark.parametrize("orient", ["columns", "index", "split"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_table_in_one_json_object_is_refused_by_its_name(name: str, orient: Any) -> None:
    """It was taken as a row of columns that hold objects."""
    frame = pandas.DataFrame({"text": ["one", "two"], "label": ["x", "y"]})
    with refused(f"{name}, ", "is a whole table in one object, as pandas", "to_json(orient='records')"):
        found(write(name, frame.to_json(orient=orient)))
    assert len(found(write("b.json", frame.to_json(orient="records")))) == 2
    with refused("c.jsonl: has no column 'text'"):
        found(write("c.jsonl", '{"translation": {"en": "one", "de": "eins"}}\n'))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt", "a.dat"])
def test_compressed_files_are_read_as_what_they_hold(name: str) -> None:
    between = "," if name == "a.csv" else "\t"
    content = f"text{between}label\none{between}x\ntwo{between}y\n"
    if name == "a.jsonl":
        content = "".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in (("one", "x"), ("two", "y")))
    write(f"{name}.gz", gzip.compress(content.encode()))
    assert found(f"{name}.gz").columns == {"text": ["one", "two"], "label": ["x", "y"]}
    write("folder/part.csv.gz", gzip.compress(b"text,label\none,x\n"))
    write("folder/part2.csv", "text,label\ntwo,y\n")
    assert found("folder").columns["text"] == ["one", "two"]


def test_parquet_and_excel_files_may_be_compressed_too() -> None:
    from pyarrow import parquet, table

    parquet.write_table(table({"text": ["one"]}), "a.parquet")
    for name in ("a.parquet", excel("b.xlsx", [["text"], ["one"]])):
        packed = gzip.compress(Path(name).read_bytes())
        write(f"{name}.gz", packed)
        assert found(f"{name}.gz", "text").columns == {"text": ["one"]}
        write(f"cut.{name}.gz", packed[:40])
        with refused(f"cut.{name}.gz: cannot be read ("):
            found(f"cut.{name}.gz", "text")


def test_a_damaged_compressed_file_is_one_sentence() -> None:
    write("a.csv.gz", gzip.compress(b"text,label\none,x\n" * 50)[:40])
    with refused("a.csv.gz: cannot be read ("):
        found("a.csv.gz")


def excel(name: str, *sheets: list[list[Any]], merged: tuple[str, ...] = ()) -> str:
    import openpyxl

    book = openpyxl.Workbook()
    for i, rows in enumerate(sheets):
        sheet = book.create_sheet(f"S{i}")
        for row in rows:
            sheet.append(row)
        for cells in merged:
            sheet.merge_cells(cells)
    book.remove(book.worksheets[0])
    book.save(name)
    return name


def test_an_excel_file_is_read_from_its_first_sheet() -> None:
    rows = [["text", None, "label"], ["one\ntwo", 5, 1], [], ["drei", None, 0], ["four"], ["five", 1, 0.5]]
    read_rows = found(excel("a.xlsx", rows))
    assert read_rows == Rows({"text": ["one\ntwo", "drei", "five"], "label": ["1", "0", "0.5"]}, 1)
    assert notes(read_rows.found) == []
    whole = read_rows
    read_rows = found(excel("b.xlsx", [["a", "x"], ["b", True]], [["more"]]), names=["text", "label"])
    assert read_rows.columns == {"text": ["a", "b"], "label": ["x", "True"]}
    assert notes(read_rows.found) == ["b.xlsx: first of 2 sheets, 'S0'"]
    with refused("a.xlsx: has no column 'lable'; did you mean 'label'?"):
        found("a.xlsx", "lable")
    with refused("c.xlsx: is empty, expected a header line"):
        found(excel("c.xlsx", []))
    with refused("d.xlsx, row 2: found 2 fields, expected 1"):
        found(excel("d.xlsx", [["text"], ["a", "b"]]), "text")
    write("folder/~$a.xlsx", "locked")
    Path("a.xlsx").rename("folder/a.xlsx")
    assert found("folder") == whole, "without the lock of an open file"
    with refused("e.xlsx: is not a readable Excel file"):
        found(write("e.xlsx", "text"), "text")


def with_saved(name: str, formula: str, value: str) -> str:
    """The file with a value that was computed for a formula, as Excel saves it."""
    with zipfile.ZipFile(name) as old:
        files = {file: old.read(file).decode() for file in old.namelist()}
    sheet = files["xl/worksheets/sheet1.xml"]
    done = re.sub(rf"<f>{re.escape(formula)}</f><v ?/?>(</v>)?", f"<f>{formula}</f><v>{value}</v>", sheet)
    assert done != sheet
    with zipfile.ZipFile(name, "w") as new:
        for file, content in {**files, "xl/worksheets/sheet1.xml": done}.items():
            new.writestr(file, content)
    return name


@pytest.mark.parametrize("names", [None, ["text", "label"]])
def test_formulas_that_nothing_has_computed_are_refused(names: list[str] | None) -> None:
    """As openpyxl and pandas write them: their rows were dropped as ones without a value."""
    header = [] if names else [["text", "label"]]
    rows = [*header, ["one", 1], ["two", "=1+1"], ["three", "=1+2"], ["four"]]
    file = excel("a.xlsx", rows)
    line = 2 if names else 3
    with refused(f"a.xlsx, row {line}: column 'label' holds a formula without a saved value; open the"):
        found(file, names=names)
    assert found(with_saved(file, "1+1", "2"), names=names).columns["label"] == ["1", "2"]


def test_a_hidden_sheet_is_not_read_for_the_one_that_is_seen() -> None:
    import openpyxl

    file = excel("a.xlsx", [["text"], ["old"]], [["text"], ["new"]])
    book = openpyxl.load_workbook(file)
    book.active = 1
    book.worksheets[0].sheet_state = "hidden"
    book.save(file)
    read_rows = found(file, "text")
    assert read_rows.columns == {"text": ["new"]}
    assert notes(read_rows.found) == ["a.xlsx: first that is not hidden of 2 sheets, 'S1'"]
    book.create_chartsheet().add_chart(openpyxl.chart.BarChart())
    for sheet in list(book.worksheets):
        book.remove(sheet)
    book.active = 0
    book.save("b.xlsx")
    with refused("b.xlsx: holds no sheet of cells; expected a table"):
        found("b.xlsx", "text")


def test_merged_cells_of_a_column_count_in_each_of_their_rows() -> None:
    """All rows but the first of a group were dropped as ones without a label."""
    rows = [["text", "label"], ["one", "a"], ["two"], ["three"], ["four", "b"], ["five"]]
    read_rows = found(excel("a.xlsx", rows, merged=("B2:B4", "B5:B9")))
    assert read_rows == Rows({"text": ["one", "two", "three", "four", "five"], "label": [*"aaabb"]}, 0)
    assert notes(read_rows.found) == ["a.xlsx: merged cells of a column count in each of their rows"]
    assert found("a.xlsx", names=["text", "label"]) == read_rows
    assert sample(Path("a.xlsx")).columns["label"] == [*"aaabb"]


def test_merged_cells_that_are_no_group_of_rows_change_nothing() -> None:
    """Headers of two lines, headings across columns, and rows that are two lines high."""
    rows = [["text", "label"], ["sub"], ["one", "a"], [], ["Ward 3"], ["two"], ["three", "b"]]
    for merged in ((), ("B1:B2", "A3:A4", "B3:B4", "A5:B6")):
        read_rows = found(excel("a.xlsx", rows, merged=merged))
        assert read_rows == Rows({"text": ["one", "three"], "label": ["a", "b"]}, 3 if not merged else 2)
        assert notes(read_rows.found) == []


def test_errors_of_formulas_are_blank_cells_and_hidden_rows_are_read() -> None:
    """A text #REF! was trained on."""
    import openpyxl

    file = excel("a.xlsx", [["text", "label"], ["one", "a"], ["#REF!", "a"], ["three", "#N/A"], ["four", "b"]])
    book = openpyxl.load_workbook(file)
    book.worksheets[0].row_dimensions[5].hidden = True
    book.save(file)
    read_rows = found(file)
    assert read_rows == Rows({"text": ["one", "four"], "label": ["a", "b"]}, 2)
    assert notes(read_rows.found) == ["a.xlsx: errors such as #REF! count as blank cells"]


def test_excel_files_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with refused("a.xlsx: reading Excel files needs openpyxl: pip install 'fedstrata[excel]'"):
        found(write("a.xlsx", b"PK"), "text")


def save(folder: str, **rows: Any) -> Any:
    """A data set with names of classes, saved to a folder."""
    import datasets

    names = datasets.ClassLabel(names=["O", "B-organ"])
    features = {
        "text": datasets.Value("string"),
        "label": names,
        "tokens": datasets.List(datasets.Value("string")),
    }
    features["tags"] = datasets.List(names)
    columns = {"text": ["a", "b"], "label": [1, 0], "tokens": [["The", "eye"], ["so"]], "tags": [[0, 1], [0]]}
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict(columns, datasets.Features(features))
    whole = datasets.DatasetDict(dict.fromkeys(rows["splits"], data)) if rows else data
    whole.save_to_disk(folder)
    return data


def test_a_folder_of_save_to_disk_is_a_data_set_with_the_names_of_its_classes() -> None:
    data = save("one")
    rows = found("one")
    assert rows == Rows({"text": ["a", "b"], "label": ["B-organ", "O"]}, 0, classes={"label": ["O", "B-organ"]})
    assert notes(rows.found) == ["one: data set of save_to_disk"]
    tags = {"tokens": [f"The{WORD_END}eye", "so"], "tags": [f"O{WORD_END}B-organ", "O"]}
    words = found("one", "tokens", "tags", words=True)
    assert (words.columns, words.classes) == (tags, {"tags": ["O", "B-organ"]})
    data.to_parquet("one.parquet")
    assert found("one.parquet", "tokens", "tags", words=True).columns == tags
    table = found("one.parquet")
    assert (table.columns, table.classes) == (rows.columns, rows.classes)
    assert notes(table.found) == ["one.parquet: class names of label"]
    data.map(lambda row, place: {"label": place - 1}, with_indices=True).to_parquet("half.parquet")
    half = found("half.parquet")
    assert (half.columns, half.dropped) == ({"text": ["b"], "label": ["O"]}, 1), "-1 marks a label that is missing"
    save("both", splits=["train", "test"])
    assert found("both") == found("both/test")
    assert notes(found("both").found) == ["both: data set of save_to_disk, split train of train, test"]
    save("none", splits=["dev", "test"])
    with refused("none: holds the splits dev, test; name the folder of one, such as none/dev"):
        found("none")
    with refused("one: has no column 'lable'; did you mean 'label'?"):
        found("one", "lable")
    Path("one/state.json").write_text("{}")
    with refused("one: is no readable folder of save_to_disk"):
        found("one")


def test_lines_of_fasttext() -> None:
    write("ft.txt", "__label__pos A fine film .\n\n__label__neg  It is __label__ , not more .\n")
    rows = found("ft.txt")
    assert rows.columns == {"text": ["A fine film .", "It is __label__ , not more ."], "label": ["pos", "neg"]}
    assert notes(rows.found) == ["ft.txt: lines in fastText's form"]
    assert found("ft.txt", "text").columns["text"] == rows.columns["text"], "without the labels"
    write("several.txt", "__label__a __label__b Two of them .\n")
    assert found("several.txt", "text").columns["text"] == ["Two of them ."]
    with refused("several.txt, line 1: column 'label' holds a list"):
        found("several.txt")
    write("tabs.txt", "__label__pos\tA fine film .\n")
    assert found("tabs.txt", "kind", "words", names=["kind", "words"]).columns["kind"] == ["__label__pos"]
    write("late.txt", "__label__pos A fine film .\nno label\n")
    with refused("late.txt, line 2: found 'no label', expected __label__LABEL and a text"):
        found("late.txt")


LABELS = {"names": ["no", "yes"], "_type": "ClassLabel"}


@pytest.mark.parametrize(
    ("kinds", "labels"),
    [
        ({"label": LABELS}, ["yes", "no"]),
        ({"label": {"feature": LABELS, "_type": "List"}}, ["yes", "no"]),
        ({"label": [LABELS]}, ["yes", "no"]),
        ({"label": LABELS | {"names": ["no", 1]}}, ["1", "0"]),
        ({"label": LABELS | {"names": None}}, ["1", "0"]),
        ({"label": LABELS | {"_type": "Value"}}, ["1", "0"]),
        ({"label": []}, ["1", "0"]),
        ({"text": LABELS}, ["1", "0"]),
        ([], ["1", "0"]),
    ],
)
def test_names_of_classes_in_a_parquet_file(kinds: Any, labels: list[str]) -> None:
    assert found(with_features(json.dumps({"info": {"features": kinds}}), [1, 0])).columns["label"] == labels


def with_features(told: str, labels: list[Any]) -> str:
    """A Parquet file that tells ``told`` of its columns, as a data set does."""
    from pyarrow import parquet, table

    rows = table({"text": ["a", "b"], "label": labels})
    parquet.write_table(rows.replace_schema_metadata({"huggingface": told}), "told.parquet")
    return "told.parquet"


def test_what_a_parquet_file_tells_of_its_columns_may_be_anything() -> None:
    for told in ("{", "[]", "{}", '{"info": null}', "[" * 100_000):
        assert found(with_features(told, [1, 0])).columns["label"] == ["1", "0"]
    told = json.dumps({"info": {"features": {"label": LABELS}}})
    assert found(with_features(told, ["maybe", "no"])).columns["label"] == ["maybe", "no"]
    with refused("told.parquet, row 2: has the class 2 in column 'label'; expected 0 to 1"):
        found(with_features(told, [1, 2]))


def test_a_folder_for_each_class() -> None:
    for name in ("pos/1.txt", "pos/2.txt", "neg/1.txt", "README.txt"):
        write(f"mail/{name}", f"text of {name}")
    rows = found("mail")
    assert rows == Rows(
        {"text": ["text of neg/1.txt", "text of pos/1.txt", "text of pos/2.txt"], "label": ["neg", "pos", "pos"]},
        1,
    )
    assert notes(rows.found) == ["mail: labels are the names of the folders in it"]


def test_lines_that_begin_with_a_label() -> None:
    lines = "DESC:manner How did serfdom develop ?\nENTY:cremat What films featured Popeye ?\nNUM:other 3 : 4 ?\n"
    for name in ("trec.txt", "train_5500.label", "trec"):
        rows = found(write(name, lines), "text", "label", "fine")
        assert rows.columns == {
            "text": ["How did serfdom develop ?", "What films featured Popeye ?", "3 : 4 ?"],
            "label": ["DESC", "ENTY", "NUM"],
            "fine": ["DESC:manner", "ENTY:cremat", "NUM:other"],
        }
    assert notes(rows.found) == ["trec: extension '' is not known, read as text, lines LABEL:fine text"]
    assert found("trec.txt", "text").columns["text"][0] == "DESC:manner How did serfdom develop ?", "plain text"
    with refused("late.txt, line 21: found 'no label', expected LABEL:fine and a text"):
        found(write("late.txt", "A:b c\n" * 20 + "no label\n"))


def test_a_file_of_unknown_extension_is_read_by_its_content() -> None:
    for name, content in {
        "a.dat": "text;label\none;x\n",
        "b": "text\tlabel\none\tx\n",
        "c.json5": '{"text": "one", "label": "x"}\n',
        "d.rct": "###1\nx\tone\n",
        "e.txt": "text,label\none,x\n",
    }.items():
        assert found(write(name, content)).columns == {"text": ["one"], "label": ["x"]}, name
    assert notes(found("a.dat").found) == [
        "a.dat: extension '.dat' is not known, read as text, CSV, delimiter ';'"
    ]
    assert found(write("corpus.md", "one\ntwo\n"), "text").columns == {"text": ["one", "two"]}
    with refused("a.pdf: the extension '.pdf' is not known and the content is no text; expected one of: .csv"):
        found(write("a.pdf", b"%PDF-1.4\n\0\1"), "text")
    with refused("a.arrow: is one file of a data set; expected the data set's folder, as save_to_disk writes it"):
        found(write("a.arrow", b"\xff\xff\xff\xff\0\1"), "text")


def test_many_files_that_are_alike_are_one_note() -> None:
    names = [write(f"{name}.csv", "text;label\na;x\n") for name in "abc"]
    assert notes(found(names).found) == ["a.csv and 2 files like it: delimiter ';'"]


SENTENCES = {
    "w": [WORD_END.join(["The", "kidney"]), WORD_END.join(["An", "eye", "."])],
    "t": [WORD_END.join(["O", "B-organ"]), WORD_END.join(["O", "B-organ", "O"])],
}


@pytest.mark.parametrize("name", ["a.csv", "semicolon.csv", "a.tsv", "a.xlsx", "a.dat"])
@pytest.mark.parametrize("column", ["sentence_id", "Sentence #", "sent"])
def test_words_line_by_line_with_the_number_of_their_sentence(name: str, column: str) -> None:
    """Numbers as Kaggle's file has them: with the first word of a sentence alone."""
    table = [[column, "w", "pos", "t"], ["1", "The", "DT", "O"], ["", "kidney", "NN", "B-organ"]]
    table += [["2", "An", "DT", "O"], ["2", "eye", "NN", "B-organ"], ["", ".", ".", "O"]]
    if name == "a.xlsx":
        excel(name, [[cell or None for cell in row] for row in table])
    else:
        between = {"semicolon.csv": ";", "a.tsv": "\t", "a.dat": ","}.get(name, ",")
        write(name, "".join(between.join(row) + "\r\n" for row in table))
    assert found(name, "w", "t", words=True).columns == SENTENCES


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            "w,t\nThe,O\n",
            ["a.csv: has no column that numbers the sentences", "sentence_id beside w, t, found w, t"],
        ),
        ("sent,w,t\n,The,O\n", ["a.csv, line 2: column 'sent' is blank"]),
        (
            "sent,w,t\n1,a,O\n2,b,O\n1,c,O\n",
            ["a.csv, line 4: sentence '1' of column 'sent' goes on after another"],
        ),
        ("sent,w,t\n1,a,\n", ["a.csv, line 2: column 't' holds an empty word"]),
        ("sent,word,t\n1,a,O\n", ["a.csv: has no column 'w'", "expected one of: sent, word, t"]),
    ],
)
def test_words_without_sentences_are_refused(content: str, parts: list[str]) -> None:
    write("a.csv", content)
    with refused(*parts):
        found("a.csv", "w", "t", words=True)


@pytest.mark.parametrize("header", ["w\tt", "Token\tNER-Tag", "word\tpos\ttag", "w pos t"])
def test_a_header_over_words_and_tags_is_recognized(header: str) -> None:
    between, columns = ("\t" if "\t" in header else " "), len(header.split())
    middle = [["X"] * (columns - 2)] * 2
    words = [["The", *middle[0], "O"], ["kidney", *middle[1], "B-organ"], [], *[["An", *middle[0], "O"]]]
    write("a.tsv", header + "\n\n" + "\n".join(between.join(row) for row in words))
    rows = found("a.tsv", "w", "t", words=True)
    assert rows.columns == {"w": [SENTENCES["w"][0], "An"], "t": [SENTENCES["t"][0], "O"]}
    assert notes(rows.found) == [f"a.tsv: header line {header.replace(chr(9), ' ')!r}"]


@pytest.mark.parametrize("header", ["", "w t\n"])
def test_comments_before_sentences_are_left_out(header: str) -> None:
    sentences = "# newdoc id = a\n# sent_id = 0\nThe O\nkidney B-organ\n\n# sent_id = 1\n# O\nAn O\n"
    for name in ("a.conll", "a.txt"):
        write(name, header + sentences if name == "a.txt" else f"# global = x\n{header}{sentences}")
        rows = found(name, "w", "t", words=True)
        assert rows.columns["w"] == ["The\nkidney", "#\nAn"], "a word may be such a sign"
        assert "comments before sentences" in notes(rows.found)[0]


def test_a_first_column_that_numbers_the_words_is_none_of_words() -> None:
    sentences = "1\tThe\tDT\tO\n2\tkidney\tNN\tB-organ\n\n# sent_id = 1\n1\tAn\tDT\tO\n"
    for name in ("a.conll", "a.txt"):
        rows = found(write(name, sentences), "w", "t", words=True)
        assert rows.columns == {"w": ["The\nkidney", "An"], "t": ["O\nB-organ", "O"]}
        assert "the first column numbers the words, which stand in the second" in notes(rows.found)[0]
    counted = found(write("b.conll", sentences.replace("2\tk", "3\tk")), "w", "t", words=True)
    assert counted.columns["w"] == ["1\n3", "1"], "words that happen to be numbers"
    two = found(write("c.conll", "1\tO\n2\tO\n"), "w", "t", words=True)
    assert two.columns["w"] == ["1\n2"]


@pytest.mark.parametrize("names", [None, ["id", "text", "label"]])
def test_lines_without_a_word_of_their_own_are_left_out(names: list[str] | None) -> None:
    """Of two words that are written as one, and of one that is left unsaid: the numbers were read as words."""
    write("a.conllu", "1-2\tdel\t_\n1\tde\tO\n2\tel\tO\n2.1\tgran\t_\n3\tmar\tB-x\n\n1\tsol\tO\n\n")
    rows = found("a.conllu", words=True, names=names)
    assert rows.columns == {
        "text": [f"de{WORD_END}el{WORD_END}mar", "sol"],
        "label": [f"O{WORD_END}O{WORD_END}B-x", "O"],
    }
    assert any(
        "such as 1-2 or 8.1, which have no word of their own, are left out" in one for one in notes(rows.found)
    )
    write("a.tsv", "1-2\tO\nto\tO\n\n2.5\tO\n")
    assert found("a.tsv", words=True).columns["text"] == [f"1-2{WORD_END}to", "2.5"], "words themselves"


def test_a_list_is_not_a_label() -> None:
    write("a.jsonl", '{"text": "one", "label": ["x", "y"]}\n')
    with refused("a.jsonl, line 1: column 'label' holds a list", "a row with several labels or texts is not read"):
        found("a.jsonl")
