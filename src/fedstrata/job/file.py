"""The job file: one TOML file, checked before anything else happens.

:func:`load` turns a file and ``key=value`` overrides into one :class:`fedstrata.job.tables.Job` per stage. A file
without ``[[stages]]`` is one stage. A stage's tables lie over the file's common ones, overrides lie over both;
``[model]`` is the first stage's, each later stage starts from the model of the one before or of its ``start``::

    method.rounds=10              every stage
    pretrain.method.rounds=10     the stage named "pretrain" alone
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.in_memory import held_value, hold
from fedstrata.job.renamed import renamed
from fedstrata.job.sentences import sentence, shown
from fedstrata.job.tables import Job, JobError
from fedstrata.job.toml import read_toml
from fedstrata.job.train_table import Train
from fedstrata.methods import METHODS
from fedstrata.plan.kinds import FORMAT
from fedstrata.plan.plan import Method, wrong_word

JobSource = str | Path | Mapping[str, Any] | Job
"""Path of a job file, its content as a mapping, or one stage as an object."""
Overrides = Sequence[str | tuple[str, Any]] | Mapping[str, Any]
"""``key=value`` words, (key, value) pairs, or a mapping; later ones win."""


def load(source: JobSource, overrides: Overrides = (), method: Method | None = None) -> list[Job]:
    """Read and check a job: one :class:`Job` per stage, in order.

    Args:
        source: path of a TOML file, its content as a mapping, or one stage as an object.
        overrides: keys laid over the file; in a word ``key=value`` the value is in TOML form, or a bare string.
        method: an object of the caller's own, in place of every stage's ``[method]``.

    Raises:
        UserError: the file cannot be read, or a key or value in it is invalid.
    """
    where, data = _read(source)
    if data.pop("sweep", None):  # words of its keys go with it
        overrides = [pair for pair in pairs_of(overrides) if not pair[0].startswith("sweep.")]
    stages = data.pop("stages", [{}])
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise UserError(f"{where}: stages must be an array of tables ([[stages]])")
    names = _stage_names(where, stages)
    later = {key: value for key, value in data.items() if key != "model"}  # these start from the stage before
    merged = [_merge(later if i else data, stage) for i, stage in enumerate(stages)]
    over = _by_stage(overrides, names)
    if method is not None and any("method" in tree for tree in over):
        raise UserError(
            f"method: an object of {type(method).__name__} stands in place of [method], with settings of its own; "
            "expected no keys method.… and no names of methods beside it"
        )
    merged = [_merge(stage, tree) for stage, tree in zip(merged, over, strict=True)]
    _link_stages(where, names, merged)
    return [_job(where, name, stage, method) for name, stage in zip(names, merged, strict=True)]


def _stage_names(where: str, stages: list[dict[str, Any]]) -> list[str]:
    """The names of the stages, taken out of their tables; "" for that of a file without ``[[stages]]``."""
    if stages == [{}]:
        return [""]
    names = [stage.pop("name", f"stage-{i + 1}") for i, stage in enumerate(stages)]
    taken = {*Job.model_fields, "stages", "sweep"}
    words = [name for name in names if isinstance(name, str)]  # from Python anything may stand there
    for name in names:
        word = isinstance(name, str) and re.fullmatch(r"[\w-]+", name)
        if not word or words.count(name) > 1 or name in taken:
            raise UserError(
                f"{where}: stage name {shown(name)}: must be unique, no table's name, of letters, digits, - and _"
            )
    return names


def _by_stage(overrides: Overrides, names: Sequence[str]) -> list[dict[str, Any]]:
    """Each stage's overrides, as nested tables."""
    over: list[dict[str, Any]] = [{} for _ in names]
    for key, value in pairs_of(overrides):
        first, _, tail = key.partition(".")
        if first in names and tail:
            stages, key = [names.index(first)], tail
        else:
            stages = [0] if first == "model" else list(range(len(names)))
        for i in stages:
            over[i] = _merge(over[i], _tree(key, value))
    return over


def _link_stages(where: str, names: Sequence[str], stages: list[dict[str, Any]]) -> None:
    """Set ``start`` where a stage does not say with which stage's model it starts: that of the stage before."""
    first = stages[0].get("start")
    if first is not None and not (isinstance(first, str) and not first):
        raise UserError(
            f"{where}: start: the first stage starts from [model], not from a stage; found {shown(first)}"
        )
    if "model" not in stages[0]:
        raise UserError(f"{where}: the table [model] is missing")
    for i, stage in enumerate(stages[1:], 1):
        if "model" not in stage:
            stage.setdefault("start", names[i - 1])
        place = f"{where}: stage {names[i]!r}: start"
        if {"model", "start"} <= stage.keys():
            raise UserError(f"{place}: the stage starts from its own [model]; expected one of start and [model]")
        start = stage.get("start")
        if "start" in stage and not (isinstance(start, str) and start in names[:i]):
            found = "itself" if isinstance(start, str) and start == names[i] else shown(start)
            raise UserError(f"{place}: must name an earlier stage ({', '.join(names[:i])}), found {found}")


def _read(source: JobSource) -> tuple[str, dict[str, Any]]:
    if isinstance(source, Job):
        return "job", source.given()
    if isinstance(source, Mapping):
        try:
            return "job", copy.deepcopy(hold(source))
        except ValueError as error:
            raise UserError(f"job: {error}") from None
    if not isinstance(source, str | Path):
        raise UserError(f"job: found {shown(source)}; expected the path of a job file, its content, or a Job")
    return str(source), _as_given(str(source), read_toml(source))


def _as_given(where: str, data: dict[str, Any]) -> dict[str, Any]:
    """The content of a job file; of a run's own ``job.toml`` without what it records beside the job."""
    if "format" not in data:
        return data
    stage, start, found = data.pop("stage", ""), data.pop("start", ""), data.pop("format")
    changed, own = data.pop("changes", []), data.pop("components", {})
    if isinstance(train := data.get("train"), dict) and train.get("max_tokens") == Train().max_tokens:
        del train["max_tokens"]  # recorded for a model that reads fewer, too, which it is made to fit again
    if found != FORMAT:
        raise UserError(f"{where}: format: is {shown(found)}; this version reads jobs of runs of format {FORMAT}")
    if stage or start:
        raise UserError(
            f"{where}: is the record of stage {shown(stage)} of a run; expected the job file that it began with"
        )
    if changed or own:
        what = "was changed on the way ([[changes]])" if changed else "had components of its own ([components])"
        raise UserError(f"{where}: its run {what}, so that this file alone does not repeat it")
    return data


def content_of(source: JobSource) -> dict[str, Any]:
    """The content of a job as it is now: what is made of it later does not change with its file."""
    return _read(source)[1]


def sweep_table(source: JobSource) -> tuple[str, dict[str, Any]]:
    """How error messages name a job, and its table ``[sweep]``; empty where it has none.

    Raises:
        UserError: the job cannot be read, or ``sweep`` in it is no table.
    """
    where, data = _read(source)
    table = data.get("sweep", {})
    if not isinstance(table, dict):
        raise UserError(f"{where}: sweep must be a table ([sweep])")
    return where, table


def pairs_of(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """Overrides in any of their forms as (key, value) pairs.

    Raises:
        UserError: a word is not of the form ``key=value``, or its value is half a list, table or string.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    if not isinstance(overrides, Iterable):
        raise UserError(f"overrides: found {shown(overrides)}; expected a mapping or a list of key=value")
    for item in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if not isinstance(item, str) and not (isinstance(item, tuple | list) and len(item) == 2):
            raise UserError(f"overrides: found {shown(item)}; expected key=value, or a key and its value")
        key, value = _pair(item) if isinstance(item, str) else item
        if not isinstance(key, str):
            raise UserError(f"overrides: found {shown(key)} for a key; expected one such as 'method.rounds'")
        yield key, _held(key, value)


def _held(key: str, value: Any) -> Any:
    try:
        return held_value(key, value)
    except ValueError as error:
        raise UserError(str(error)) from None


def _pair(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", key):
        raise UserError(f"{word!r}: an override has the form table.key=value, such as method.rounds=10")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):
            raise UserError(
                f"{word!r}: the value is not TOML; strings in it need quotes, which the shell takes away unless "
                """the whole word is quoted, too, as in 'task.labels=["no", "yes"]'"""
            ) from None
        return key, text
    except (ValueError, RecursionError):
        raise UserError(f"{key}: the value has thousands of digits, or is nested too deep") from None


class _Entries(dict[str, Any]):
    """Some entries of a value that is a table itself, as by a word ``data.train.a=a.csv``; the others stay."""


def _merge(under: Mapping[str, Any], over: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """``over`` laid over ``under``, table by table.

    A value that is a table itself, such as named sources, replaces and does not mix; so does another method's.
    """
    merged = copy.deepcopy(under if isinstance(under, _Entries) else dict(under))
    for key, value in over.items():
        below, place = merged.get(key), above + key
        mixes = isinstance(value, _Entries) or not is_value(place)
        if mixes and isinstance(value, Mapping) and isinstance(below, Mapping):
            if key == "method" and _another_name(below, value):
                below = {"rounds": below["rounds"]} if "rounds" in below else {}
            value = _merge(below, value, f"{place}.")
        merged[key] = copy.deepcopy(value)
    return merged


def is_value(key: str) -> bool:
    """Whether a dotted key, with or without a stage before it, names a table's key and not a table."""
    words = key.split(".")
    inside = words[1:] if words[0] in Job.model_fields else words[2:]
    return bool(inside) and inside != ["config"]


def _another_name(below: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """Whether a table names another method than the one below, which names one."""
    if not {"name"} <= below.keys() & over.keys():
        return False
    return not isinstance(over["name"], str) or bool(over["name"] != below["name"])


def _tree(key: str, value: Any) -> dict[str, Any]:
    """``a.b = value`` as nested tables; a name within a value, such as a client's, may have dots."""
    table, *words = key.split(".", -1 if key.startswith("model.config.") else 2)
    for word in reversed(words[1:]):
        value = _Entries({word: value})
    return {table: {words[0]: value} if words else value}


def _job(where: str, stage: str, data: dict[str, Any], method: Method | None = None) -> Job:
    place = f"{where}: stage {stage!r}" if stage else where
    data = {"data": {}, **data}  # between sites it may be absent
    for table in ("task", "data", *(("method",) if method is None else ())):
        if table not in data:
            raise UserError(f"{place}: the table [{table}] is missing")
        if not isinstance(data[table], Mapping | Method):
            raise UserError(f"{place}: {table}: must be a table ([{table}]), found {shown(data[table])}")
    if method is None:
        brought = data["method"]
        method = brought if isinstance(brought, Method) else _method(place, brought)
    if isinstance(method, Method) and (why := wrong_word(method)):
        raise UserError(f"{place}: {why}")
    data = _named_sources_are_clients(_merge(method.presets(), {**data, "method": {}}))
    try:
        return Job.model_validate({**data, "stage": stage, "method": method})
    except JobError as error:
        raise UserError(f"{place}: {error.sentence}") from None


def _named_sources_are_clients(tables: dict[str, Any]) -> dict[str, Any]:
    """Tables in which each named source of training rows is a client's, where the job says nothing else."""
    clients, engine = tables.get("clients", {}), tables.get("engine", {})
    if not isinstance(tables["data"].get("train"), dict) or not isinstance(clients, dict):
        return tables
    if "partition" in clients or (isinstance(engine, dict) and engine.get("name") == "flower"):
        return tables  # the sites have rows of their own
    return _merge(tables, {"clients": {"partition": "files"}})


def _method(place: str, table: Mapping[str, Any]) -> Method:
    """The method that a table ``[method]`` names, with its options."""
    options = dict(table)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in METHODS:
        if now := renamed("method", "name", name):
            raise UserError(f"{place}: [method] name: {now}")
        found = "is missing" if name is None else f"{shown(name)} is not a method"
        raise UserError(f"{place}: [method] name: {found}; {did_you_mean(str(name), METHODS)}")
    kind = METHODS[name]
    try:
        return kind(**options)
    except ValidationError as error:
        raise UserError(f"{place}: [method] {sentence(error, kind, 'method', Job)}") from None
