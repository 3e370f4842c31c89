"""What the documents say is true: their commands run, their jobs load, their links lead somewhere."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli_w
import torch
import transformers
from pydantic import BaseModel
from typer.testing import CliRunner

from deployment import TRIED
from fedstrata.cli import app
from fedstrata.client.setup import check_plans
from fedstrata.data.partition import PARTITIONS
from fedstrata.job.file import load
from fedstrata.job.privacy_table import NOISE
from fedstrata.job.renamed import KEYS, VALUES
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.job.wire_table import DELTA
from fedstrata.methods import METHODS
from fedstrata.models.checkpoints import auto_class
from fedstrata.models.parts import find_parts
from fedstrata.plan.parts import Parts
from fedstrata.server.aggregate import AGGREGATES
from fedstrata.sweeps.cells import cells
from fedstrata.wire.codec import CODECS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
Jobs = Callable[..., dict[str, Any]]


def blocks(page: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [text for written, text in found if written == language]


def commands(page: Path) -> list[str]:
    return [line.split("  #")[0].strip() for block in blocks(page) for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        made = target.startswith("reference/")  # from the code, when the site is built
        assert target.startswith("https://") or made or (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page; the site's own names are checked when it is built."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_lead_to_headings_on_github(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text("utf-8")):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"make ([\w-]+)(?=`| *#|\n)", page.read_text("utf-8")):
        assert target in targets


def section(page: Path, title: str) -> str:
    """What stands below a heading of the second level."""
    return re.split(rf"^## {title}\n", page.read_text("utf-8"), flags=re.MULTILINE)[1].partition("\n## ")[0]


def test_readme_commands_run(job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, in a folder with a small job.toml; the report compares two runs of the same kind."""
    monkeypatch.chdir(tmp_path)
    made = job("fedavg", "classify", output={"dir": "runs/try"})
    (tmp_path / "job.toml").write_text(tomli_w.dumps(made), "utf-8")
    runner = CliRunner()
    for name in ("a", "b"):
        done = runner.invoke(app, ["run", "job.toml", "method.rounds=1", f"output.dir=runs/{name}"])
        assert done.exit_code == 0, done.output
    lines = re.findall(r"^fedstrata .*?(?=  #)", section(ROOT / "README.md", "The other commands"), re.MULTILINE)
    assert lines.pop(0).strip() == "fedstrata demo", "tests/cli/test_demo_command.py runs it"
    assert len(lines) == 7
    for line in lines:
        done = runner.invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert (tmp_path / "report.html").exists()


def test_readmes_first_commands_print_what_it_shows(
    model_folder: Callable[..., Path], sentences_csv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other rows and a tiny model: figures differ, the words that lines begin with do not."""
    monkeypatch.chdir(tmp_path)
    shown = re.findall(
        r"^\$ fedstrata (.*)\n((?:(?!\$|```).*\n)*)", section(ROOT / "README.md", "Three commands"), re.MULTILINE
    )
    assert [words.split()[0] for words, _ in shown] == ["init", "validate", "run"]
    model = str(model_folder(head="none"))
    for words, output in shown:
        words = words.replace("reviews.tsv", str(sentences_csv)).replace("demo:minilm", model)
        done = CliRunner().invoke(app, shlex.split(words))
        assert done.exit_code == 0, done.output
        assert {"init": "rows", "validate": "valid", "run": "report"}[words.split()[0]] in labels(output)
        assert labels(output) <= labels(done.output), done.output
    [code] = [text for text in blocks(ROOT / "README.md", "python") if "fedstrata.run" in text]
    names: dict[str, Any] = {}
    exec(code, names)  # in the same folder: it named the output folder of the run before, which is refused
    assert names["result"].status == "finished"


def labels(output: str) -> set[str]:
    """The words that lines begin with, as in ``model   runs/first/model`` and ``note: ...``."""
    return set(re.findall(r"^([a-z]+)(?:  |: )", output, re.MULTILINE))


def test_the_python_page_runs(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks one after another, with a tiny model in place of the one it names."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(ROOT / "docs" / "python.md", "python"))
    model = model_folder("distilbert", head="none")
    names: dict[str, Any] = {}
    exec(code.replace("distilbert-base-uncased", str(model)), names)
    result = names["result"]
    assert result.status == "finished"
    for attribute in re.findall(r"`result\.(\w+)", (ROOT / "docs" / "python.md").read_text("utf-8")):
        assert hasattr(result, attribute)


def test_the_commands_between_sites_are_those_that_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Federations are created here; the daemons are run by :class:`deployment.Deployment`, word for word."""
    monkeypatch.chdir(tmp_path)
    for name in ("ca.pem", "server.pem", "server.key"):
        (tmp_path / name).touch()
    runner = CliRunner()
    for page in (ROOT / "docs" / "deploy.md", ROOT / "README.md"):
        shutil.rmtree("federation", ignore_errors=True)
        lines = [line for line in commands(page) if line.startswith("fedstrata ")]
        if page.name == "README.md":
            lines = [line for line in lines if line in section(page, "Between sites")]
        assert len(lines) >= 4
        for line in lines:
            if line.startswith("fedstrata federation "):
                if " init " in line:
                    shutil.rmtree("federation", ignore_errors=True)
                done = runner.invoke(app, shlex.split(line)[1:])
                assert done.exit_code == 0, f"{line}\n{done.output}"
            else:
                assert line in TRIED, f"{page.name}: {line}"


def test_readme_job_is_valid() -> None:
    [text] = blocks(ROOT / "README.md", "toml")
    [job] = load(tomllib.loads(text))
    assert job.output.dir == "runs/try"


def job_page() -> dict[str, Any]:
    """The long example of docs/job.md."""
    return tomllib.loads(blocks(ROOT / "docs" / "job.md", "toml")[0])


def tables() -> dict[str, type[BaseModel]]:
    """The tables of the job file with keys of their own, ``[method]`` apart."""
    found = {}
    for name, field in Job.model_fields.items():
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        kind = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
        if kind is not None and name != "method":
            found[name] = kind
    return found


def test_the_job_page_has_every_table_and_every_key() -> None:
    example = job_page()
    assert set(example) == {*tables(), "method"}
    for name, kind in tables().items():
        assert set(example[name]) == set(kind.model_fields), name


def test_the_job_page_has_every_value_of_every_key() -> None:
    """Each literal of the tables, each partition, aggregate and codec is named in its line or the one after."""
    lines = blocks(ROOT / "docs" / "job.md", "toml")[0].splitlines()
    named = {("clients", "partition"): tuple(PARTITIONS), ("server", "aggregate"): tuple(AGGREGATES)}
    named |= {("wire", "dtype"): tuple(CODECS), ("task", "kind"): tuple(TASK_KINDS)}
    for name, kind in tables().items():
        start = next(i for i, line in enumerate(lines) if re.match(rf"\[{name}\]", line))
        for key, field in kind.model_fields.items():
            values = named.get((name, key), literals(field.annotation))
            found = next((i for i in range(start, len(lines)) if re.match(rf"{key} = ", lines[i])), None)
            text = "" if found is None else "\n".join(lines[found : found + 3])
            for value in values:
                assert re.search(rf"\b{value}\b", text), f"[{name}] {key}: {value}"


def literals(annotation: Any) -> tuple[str, ...]:
    """The words of every ``Literal`` within an annotation."""
    if get_origin(annotation) is Literal:
        return tuple(word for word in get_args(annotation) if isinstance(word, str))
    return tuple(word for inner in get_args(annotation) for word in literals(inner))


def test_the_defaults_on_the_job_page_are_those_of_the_tables() -> None:
    """Of ``[train]``, ``[server]``, ``[wire]``, ``[client]`` and ``[engine]``, where a key has a default."""
    example = job_page()
    shown = {
        ("train", "steps"),
        ("train", "tokens_per_batch"),
        ("train", "max_grad_norm"),
        ("server", "learning_rate"),
        *(("server", key) for key in ("malicious", "clip_radius", "clip_steps", "max_norm")),
        ("engine", "federation"),
        *(("engine", key) for key in ("address", "buffer", "arrivals")),
        *(("wire", f"{way}_{key}") for way in ("up", "down") for key in ("bits", "density")),
        *(("wire", key) for key in ("activations", "activations_changed", "gradients", "gradients_density")),
    }  # None: the comment says so
    for name in ("train", "server", "wire", "client", "engine"):
        defaults = tables()[name]()
        for key, value in example[name].items():
            assert getattr(defaults, key) == (None if (name, key) in shown else value), f"[{name}] {key}"


def test_the_job_page_says_which_methods_have_defaults_of_their_own() -> None:
    """A run of FedBT without ``rounds`` took twice as many as the page shows, FedProx another ``proximal_mu``."""
    text = blocks(ROOT / "docs" / "job.md", "toml")[0]
    for name, method in METHODS.items():
        presets = {key: table for key, table in method().presets().items() if key != "head"}  # an option says it
        if method().rounds not in (METHODS["fedavg"]().rounds, 0):
            presets["method"] = {"rounds": method().rounds}
        for table, keys in presets.items():
            for key, value in keys.items():
                [comment] = re.findall(
                    rf"^{key} = (.*\n(?: .*\n)*)", text.split(f"\n[{table}]\n")[1].partition("\n[")[0], re.M
                )
                assert re.search(rf"default.*\b{name}\b.*\b{value}\b", comment, re.S), f"{name}: [{table}] {key}"


def test_the_job_page_has_only_valid_keys_and_values() -> None:
    """Each value of the long example is valid by itself."""
    example = job_page()
    base = {"model": {"name": "x"}, "task": {"kind": "mlm"}, "data": {"train": "x"}, "method": {"name": "fedavg"}}
    for table, values in example.items():
        for key, value in values.items():
            changed = {**base, table: {**base.get(table, {}), key: value}}
            if table == "model" and key != "name":
                changed[table] = {"config": example["model"]["config"], key: value}
            if (table, key) == ("data", "test"):
                changed.pop("clients", None)
            if partition := {"sizes": "sizes", "table": "label_table", "column": "column"}.get(key):
                changed["clients"]["partition"] = partition
            if key in ("metric", "labels", "positive") or table == "head":
                changed["task"] = {**changed["task"], "kind": "classify"}
            if table in ("head", "adapter"):
                changed[table].setdefault("kind", {"head": "psum", "adapter": "lora"}[table])
            if table == "privacy" and key in NOISE:
                changed[table].setdefault("level", "client")
                if key not in ("epsilon", "noise"):
                    changed[table]["epsilon"] = 8.0
                if key == "honest":
                    changed[table]["sum_only"] = True
            if (table, key) == ("privacy", "public_vocabulary"):
                changed[table]["omit"] = ["unlisted_rows"]
            if table == "wire" and key in DELTA:
                changed["wire"]["codec"] = "delta"
            if (table, key) == ("engine", "arrivals"):
                changed["engine"]["buffer"] = 5
            if table == "engine" and key in ("federation", "address"):
                changed["engine"]["name"] = {"federation": "flower", "address": "pool"}[key]
            load(changed)


RENAMED = ROOT / "src" / "fedstrata" / "job" / "renamed.py"
"""The one file in which the old keys and values may stand, beside the table of docs/job.md."""
OLD_WORDS = re.compile(r"\b(overlong|optimiser|features_gb|keep_features|centralised|fedstrata split)\b")
"""Old words that nothing needs."""


def old_keys(text: str) -> list[str]:
    """The old keys and values that a text sets or quotes, such as ``split = "iid"`` or ``kind = "ordinary"``."""
    found = OLD_WORDS.findall(text) + re.findall(r"\bsplit\.json\b", text)
    for table, key in KEYS:
        found += re.findall(rf"^{key} *=|\b{table}\.{key}\b|\[{table}\]`? `?{key}\b", text, re.MULTILINE)
    for (_, key), values in VALUES.items():
        for value in filter(lambda value: isinstance(value, str), values):
            found += re.findall(rf"\b{key}`? *= *(?:\[[^\]\n]*)?\"{value}\"", text)
    return found


def old_settings(data: Any, path: tuple[str, ...] = ()) -> list[str]:
    """The old keys and values in the content of a TOML file, wherever their table is: in a stage, row or grid."""
    found = []
    for key, value in data.items() if isinstance(data, dict) else ():
        at = (*path, *key.split("."))
        for content in value if isinstance(value, list) else [value]:
            if isinstance(content, dict):
                found += old_settings(content, at)
            elif len(at) > 1:
                renamed_key = at[-2:] in KEYS
                renamed_value = isinstance(content, str) and content in VALUES.get(at[-2:], {})
                found += [f"{'.'.join(at)} = {content!r}"] if renamed_key or renamed_value else []
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_old_key(page: Path) -> None:
    """But for the table "Renamed keys" of docs/job.md and what the changelog says of it."""
    text = page.read_text("utf-8")
    if page == ROOT / "docs" / "job.md":
        before, renamed, after = re.split(
            r"(?=^## Renamed keys$)|(?<=\n)(?=## Methods and)", text, flags=re.MULTILINE
        )
        for key in {key for _, key in KEYS}:
            assert key in renamed, key
        assert {word for values in VALUES.values() for word in values} <= set(re.findall(r"\w+", renamed))
        text = before + after
    assert not old_keys(text)
    for block in blocks(page, "toml"):
        assert not old_settings(tomllib.loads(block))


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.toml")), ids=lambda path: path.name)
def test_configs_have_no_old_key(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not old_keys(text)
    assert not old_settings(tomllib.loads(text))


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks"])
def test_old_words_stand_only_in_the_table_that_refuses_them(folder: str) -> None:
    for path in sorted((ROOT / folder).glob("**/*.py")):
        if path != RENAMED:
            assert not OLD_WORDS.findall(path.read_text("utf-8")), path


def test_the_search_for_old_keys_finds_them() -> None:
    """Otherwise the tests above would prove nothing."""
    for table, key in KEYS:
        assert old_keys(f"[{table}]\n{key} = 1\n"), key
        assert old_settings({"stages": [{table: {key: 1}}]}), key
    for (table, key), values in VALUES.items():
        for value in values:
            assert not isinstance(value, str) or old_keys(f'{table}.{key} = "{value}"'), value
            assert not isinstance(value, str) or old_settings({"sweep": {"grid": {f"{table}.{key}": [value]}}}), (
                value
            )


JOBS = [path for path in sorted(ROOT.glob("configs/**/*.toml")) if path.name != "board.toml"]
"""Every job; ``board.toml`` is the protocol of many (tests/test_board.py)."""


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_configs_resolve_and_open_with_their_command(path: Path) -> None:
    """And every method of theirs has a plan for every round and client of a BERT-base."""
    text = path.read_text("utf-8")
    assert f"fedstrata run {path.relative_to(ROOT)}" in text.split("\n[")[0]
    overrides = [cell.pairs for cell in cells(path)[2]] if "[sweep]" in text else [()]
    alike = {
        json.dumps([p for p in pairs if "seed" not in p[0] and "dir" not in p[0]]): pairs for pairs in overrides
    }
    for pairs in alike.values():
        for job in load(path, pairs):
            check_plans(job, bert_base(job.task.kind), [f"client-{i}" for i in range(6)])


@functools.cache
def bert_base(kind: str) -> Parts:
    with torch.device("meta"):
        return find_parts(auto_class(kind).from_config(transformers.BertConfig()))


def test_the_papers_tables_are_there() -> None:
    """One config each; FedBT's Table 2 was never seen, FedBFPT's Table 1 holds no figures."""
    there = {path.relative_to(ROOT / "configs").as_posix() for path in ROOT.glob("configs/*/table*.toml")}
    tables = {
        "fedbfpt": (2, 3, 4, 5, 6),
        "fedbt": (1, 3, 4, 5, 6, 7),
        "fedsplitbert": (3, 4, 5, 6),
        "fedfreezebert": (3,),
        "fedbert": (6, 7, 8),
    }
    assert there == {f"{name}/table{i}.toml" for name, numbers in tables.items() for i in numbers}


def test_files_named_in_contributing_exist() -> None:
    """Those of the table "Where to change what" and of the text, below the package or the clone."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name in set(re.findall(r"`([\w/]+\.(?:py|md|toml))`", text)):
        assert "NAME" in name or any((base / name).exists() for base in (ROOT / "src" / "fedstrata", ROOT)), name
    assert len([line for line in text.splitlines() if line.startswith("| ")]) > 30


def test_the_layers_in_contributing_are_the_contract() -> None:
    text = blocks(ROOT / "CONTRIBUTING.md", "text")[0]
    drawn = [re.split(r"  +", line.strip())[0] for line in text.splitlines()]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"][0]
    assert drawn[1:] == [layer for layer in contract["layers"] if layer != "__main__"]


def test_the_picture_is_what_the_plans_say(tmp_path: Path) -> None:
    made = tmp_path / "parts.svg"
    script = ROOT / "examples" / "parts_picture.py"
    subprocess.run([sys.executable, script, made], check=True)
    assert made.read_bytes() == (ROOT / "docs" / "parts.svg").read_bytes()
