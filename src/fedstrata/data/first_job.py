"""A job file for rows of which nothing is known yet, with a comment on everything that was guessed."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.data.first_files import Sources, files_of, files_to_try, folder_lines, incomplete
from fedstrata.data.first_tests import check_columns, shown, test_lines, test_rows, together, unused_lines
from fedstrata.data.guess import Guess, guess
from fedstrata.data.sample import Sample, sample
from fedstrata.data.values import is_filled
from fedstrata.errors import UserError, listed, plural

MODELS = {
    ("latin", "gpu"): "bert-base-uncased",
    ("latin", "cpu"): "distilbert-base-uncased",
    ("other", "gpu"): "bert-base-multilingual-cased",
    ("other", "cpu"): "distilbert-base-multilingual-cased",
}
"""(letters, machine) -> a model to start from."""
BATCH = 16
CHUNK = 128
"""Most tokens of an example of further pre-training."""
TRY = 20_480
"""Tokens of a client in a round where there is no GPU: a first run takes minutes, however many rows there are."""
CLIENTS = 6
"""Clients that rows are dealt to where nobody says how many there are."""
MOST_CLIENTS = 100_000
"""As many as a job may have."""
HOLDOUT = 0.1
"""Share of the rows that is held out where there are no test rows."""


def first_job(
    data: Sequence[Path],
    out: Path,
    *,
    task: str | None = None,
    text: Sequence[str] = (),
    label: str | None = None,
    test: Path | None = None,
    model: str | None = None,
    clients: int | None = None,
) -> tuple[str, list[str]]:
    """A job file for rows, and what was found in them, a line each.

    Args:
        data: a file or folder of rows, or several: one for each client.
        out: where the job file will stand; paths in it are found from there.
        task: kind of the task, if it is known.
        text: columns of the text, if they are known.
        label: column of the label, if it is known.
        test: file of test rows.
        model: folder or hub id of the model to start from.
        clients: number of clients, where the rows do not say.

    Raises:
        UserError: the rows cannot be read, no column looks like text or like a label, or the rows are too few for
            the clients, or say themselves how many there are.
    """
    if clients is not None and not 1 <= clients <= MOST_CLIENTS:
        raise UserError(f"--clients: expected a number from 1 to {MOST_CLIENTS:,}, found {clients}")
    _check_there(*data, *([test] if test else []))
    train, beside = files_to_try(data)
    if clients is not None and isinstance(train, Mapping):
        raise UserError("--clients: each file is a client's, so their number is known; expected it left out")
    wanted = [*text, *([label] if label else [])]
    samples = {file: sample(file, wanted, tagged=task == "tag") for file in files_of(train)}
    found = guess(rows := together([*samples.values()]), task, text, label)
    check_columns(samples, found)
    tested, unfit = test_rows(test, beside, found, rows)
    where = {"job": out.name, "train": _from(train, out), "test": tested and _from(tested, out), "named": wanted}
    start = model or MODELS["latin" if found.latin else "other", "gpu" if _gpu() else "cpu"]
    lines = [
        f"rows    {shown(train)}: {'' if rows.whole else 'more than '}{plural(len(rows), 'row')}, "
        f"columns {listed(rows.columns)}{'; the first line is taken as a row' if rows.names else ''}",
        f"task    {found.kind}: {found.reasons['task.kind']}",
        f"text    {found.text if isinstance(found.text, str) else ' and '.join(found.text)}",
    ]
    if found.client and not isinstance(train, Mapping):
        lines.append(f"clients column {found.client!r}: {found.reasons['clients.column']}")
    lines += [] if found.client else folder_lines(train, {"file", "folder"} <= rows.columns.keys(), found.label)
    lines += [*test_lines(tested, unfit), *unused_lines(rows, found)]
    lines += [f"parts   {said}" for one in (train, tested) if one for said in incomplete(one)]
    if found.numbers:
        lines.append(
            f"labels  {found.label!r} holds numbers: write the names of these tags into {out} before a run"
        )
    return _written(found, rows, where, start, _count(found, rows, clients, held_out=not tested)), lines


def _count(found: Guess, rows: Sample, clients: int | None, held_out: bool) -> int | None:
    """How many clients the rows are dealt to: as many as the user says, else a few; None where a column says it.

    Raises:
        UserError: there are fewer rows to train on than the user names clients.
    """
    if clients is None and found.client:
        return None
    names = [found.text] if isinstance(found.text, str) else list(found.text)
    names += [found.label] if found.label else []
    full = sum(all(map(is_filled, values)) for values in zip(*(rows.columns[name] for name in names), strict=True))
    most = max(1, full - max(1, round(HOLDOUT * full)) if held_out else full)
    if clients is None:
        return min(CLIENTS, most) if rows.whole else CLIENTS
    if rows.whole and clients > most:
        raise UserError(
            f"--clients: expected at most {most}, as there are so many rows to train on, found {clients}"
        )
    return clients


def _gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def _check_there(*paths: Path) -> None:
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder")


def _from(path: Sources, out: Path) -> Any:
    """A path as the job file names it: as it was given where the file stands in the working directory."""
    if isinstance(path, Mapping):
        return {name: _from(one, out) for name, one in path.items()}
    if isinstance(path, list):
        return [_from(one, out) for one in path]
    return str(path) if out.parent.resolve() == Path.cwd() else str(path.resolve())


def _written(found: Guess, rows: Sample, where: Mapping[str, Any], model: str, clients: int | None) -> str:
    """The job file's text."""
    pretrains = found.kind in ("mlm", "clm")
    job = shlex.quote(where["job"]) if where["job"].isprintable() else "JOB"
    lines = [
        "# Written by fedstrata init from a look at the rows; guesses have a comment. Every key: docs/job.md",
        "#",
        f"#     fedstrata validate {job}      rows, classes, model and costs, without training",
        f"#     fedstrata run {job}           train; any key can be set here, such as method.rounds=20",
        "",
        "[model]",
        f"name = {_toml(model)}    # folder or hub id{'; English' if 'bert-base-uncased' in model else ''}",
        "",
        "[task]",
        f"kind = {_toml(found.kind)}    # {found.reasons['task.kind']}",
        *_label_lines(found),
        "",
        *_data_lines(found, rows, where),
        "",
        *_client_lines(found, where["train"], clients),
        "",
        "[method]",
        'name = "fedbfpt"    # one layer at a time; fedstrata methods lists the others'
        if pretrains
        else 'name = "fedbt"    # from the top layers down; fedstrata methods lists the others',
        "rounds = 5    # enough to see whether it learns; more of them give a better model",
        "",
        *_train_lines(found, pretrains),
        "",
        "[output]",
        'dir = "runs/first"',
    ]
    return "\n".join(lines) + "\n"


def _label_lines(found: Guess) -> list[str]:
    names = '    # write here the names of the tags in this order, such as "O", "B-disease": a run needs them'
    return [f"labels = {_toml(found.numbers)}{names}"] if found.numbers else []


def _data_lines(found: Guess, rows: Sample, where: Mapping[str, Any]) -> list[str]:
    train, test = where["train"], where["test"]
    lines = ["[data]"]
    if not isinstance(train, Mapping):
        lines.append(f"train = {_toml(train)}")
    held_out = f"holdout = {HOLDOUT}    # share of the rows that is held out to test on"
    if not isinstance(test, Mapping):
        lines.append(f"test = {_toml(test)}" if test else held_out)
    if rows.names:
        lines.append(f"columns = {_toml(rows.names)}    # the file has no header line")
    if not rows.words or (found.text, found.label) != ("text", "label"):
        for key, columns in (("text", found.text), ("label", found.label)):
            named = columns in where["named"] or columns == where["named"][:2]  # of a pair both
            why = "" if named else f"    # guessed; --{key} names another"
            lines += [f"{key} = {_toml(columns)}{why}"] if columns else []
    for key, source in (("train", train), ("test", test)):
        if isinstance(source, Mapping):
            each = (f"{_key(name)} = {_toml(path)}" for name, path in source.items())
            lines += ["", f"[data.{key}]    # each client's", *each]
    return lines


def _client_lines(found: Guess, train: Any, clients: int | None) -> list[str]:
    if isinstance(train, Mapping):
        return ["[clients]", 'partition = "files"']
    if clients is None:
        whose = "    # the rows of each of its values are a client's"
        return ["[clients]", 'partition = "column"', f"column = {_toml(found.client)}{whose}"]
    dealt = "    # the rows do not say whose they are: they are dealt at random"
    return ["[clients]", f"count = {clients}{dealt}", 'partition = "iid"']


def _train_lines(found: Guess, pretrains: bool) -> list[str]:
    tokens = min(found.tokens, CHUNK) if pretrains else found.tokens
    cut = tokens < found.tokens
    longer = "longer texts become several examples" if cut else "nine in ten texts are likely to be shorter"
    steps = max(5, TRY // (BATCH * tokens))
    bound = f"steps = {steps}    # batches of a client in a round; a first try: without this line, all"
    return [
        "[train]",
        f"max_tokens = {tokens}    # {longer}",
        f"batch_size = {BATCH}",
        *([] if _gpu() else [bound]),
        f"learning_rate = {'1e-4' if pretrains else '2e-4'}    # to be tuned on rows that are not the test rows",
    ]


def _key(name: str) -> str:
    """A key as TOML writes it: letters beyond ASCII stand in quotes."""
    return name if name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    """A string or a list of strings as TOML writes it."""
    return json.dumps(value, ensure_ascii=False)
