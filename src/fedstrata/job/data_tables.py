"""The tables ``[data]`` and ``[clients]``: whose rows, from where, and who holds which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PlainSerializer, model_validator

from fedstrata.errors import did_you_mean
from fedstrata.job.base import Positive, Share, Table
from fedstrata.job.in_memory import InMemory, as_source, recorded
from fedstrata.job.label_tables import TABLES
from fedstrata.job.paths import MaybePlace
from fedstrata.job.renamed import renamed

Rows = Annotated[InstanceOf[InMemory], PlainSerializer(recorded, when_used="json")]
"""Rows handed over from Python. Pydantic calls this serializer for the other kinds of a source, too."""
OneSource = MaybePlace | list[MaybePlace] | Rows
Source = OneSource | dict[Annotated[str, Field(pattern=r"^[\w-]+$")], OneSource]
"""A file, folder or data set id; several; rows in memory; or several of these by name, whose training rows are
each a client's, and whose test rows are scored apart as well."""
Held = Annotated[Source, BeforeValidator(as_source)]
"""A source in which data frames, data sets and lists of dicts are taken as they are."""


def _delimiter(text: str) -> str:
    if len(text) != 1 or text in '"\r\n':
        raise ValueError(f"{text!r} is no delimiter; expected one character, such as ';' or '\\t'")
    return text


def _encoding(name: str) -> str:
    try:
        "".encode(name)
    except (LookupError, UnicodeError):
        raise ValueError(f"{name!r} is no encoding of text; expected one such as 'utf-8' or 'cp1252'") from None
    return name


Delimiter = Annotated[str, AfterValidator(_delimiter)]
"""What stands between the fields of a line: one character."""
Encoding = Annotated[str, AfterValidator(_encoding)]
"""Name of an encoding of text, as Python has it."""


def _test_source(value: Any) -> Any:
    if isinstance(value, Mapping) and not value:
        raise ValueError("is an empty table; expected a source, several by name, or no such key")
    return as_source(value)


class Data(Table):
    """``[data]``: whose rows, from where."""

    train: Held = ""
    """May be absent between sites, which have rows of their own."""
    test: Annotated[Source | None, BeforeValidator(_test_source)] = None
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training rows held out as test rows where ``test`` is absent."""
    text: str | list[str] = "text"
    """Column of the text, for ``tag`` of the words; two columns for ``pair``, one or two for ``regress``."""
    label: str = "label"
    columns: list[str] | None = None
    """Names of the columns of files that have no header line."""
    delimiter: Delimiter | None = None
    """Between the fields of csv files, and of tsv and txt files where it is no tab; absent: found out."""
    encoding: Encoding | None = None
    """Of text files; absent: UTF-8, or what they are found to have."""
    limit: Positive | None = None
    """Read at most so many rows of each of train and test (of each named source of them): a quick try."""
    long_text: Literal["chunk", "truncate", "pack"] | None = None
    """Text beyond ``train.max_tokens``: ``chunk`` makes further examples of it (default of ``mlm``, ``clm`` and
    ``tag``), ``truncate`` drops it; ``pack``, of ``mlm`` and ``clm``, joins a client's texts and cuts them into
    blocks of that many tokens."""
    documents: Literal["lines", "blank", "headings"] = "lines"
    """A row of a plain txt file: a line, lines up to a blank one, or an article under a heading ``= Title =``."""


EXAMPLES = {
    "sizes": "sizes = [100, 200]",
    "table": "table = 'mrpc-3'",
    "column": "column = 'hospital'",
}
"""Key of ``[clients]`` that one partition needs -> how it is written."""


class Clients(Table):
    """``[clients]``: who holds which rows, and who takes part in a round."""

    count: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of clients; by default what ``sizes``, ``table``, ``column`` or the named sources of ``data.train``
    give, else 6."""
    partition: str = "iid"
    """How rows are dealt to clients: a name in :data:`fedstrata.data.partition.PARTITIONS`; where it is absent and
    ``data.train`` names its sources, ``files``."""
    alpha: Annotated[float, Field(gt=0)] = 1.0
    """Concentration of ``dirichlet`` and ``dirichlet_mix``: small is uneven."""
    min_examples: Annotated[int, Field(ge=0, le=1_000_000_000)] = 1
    """No client gets fewer rows; 0 allows empty ones, which are dropped from the run."""
    sizes: list[float] | None = None
    """For ``sizes``: rows per client (integers) or shares of all rows (adding up to at most 1)."""
    table: str | list[dict[str, Annotated[float, Field(ge=0)]]] | None = None
    """For ``label_table``: per client the share of each label, or the name of a built-in table."""
    column: str | None = None
    """For ``column``: the column whose values are the clients."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of its own rows that each client holds out for testing; models are then scored client by client."""
    fraction: Share = 1.0
    """Share of the clients sampled in each round, at least one."""

    @model_validator(mode="after")
    def _partition_has_its_key(self) -> Self:
        if now := renamed("clients", "partition", self.partition):
            raise ValueError(f"partition: {now}")
        companions = {"sizes": "sizes", "table": "label_table", "column": "column"}
        for key, partition in companions.items():
            given = getattr(self, key)
            if self.partition == partition and given is None:
                raise ValueError(f"{key}: is missing; partition = {partition!r} needs it, such as {EXAMPLES[key]}")
            if self.partition != partition and given is not None:
                raise ValueError(f"{key}: goes with partition = {partition!r}, not with {self.partition!r}")
        if isinstance(self.table, str) and self.table not in TABLES:
            raise ValueError(f"table: {self.table!r} is no built-in table; {did_you_mean(self.table, TABLES)}")
        return self

    @model_validator(mode="after")
    def _count_fits(self) -> Self:
        if self.sizes == []:
            raise ValueError("sizes: is empty; expected the rows of each client, such as [100, 200]")
        if self.sizes is not None and self.count not in (None, len(self.sizes)):
            raise ValueError(f"count: is {self.count}, but sizes names {len(self.sizes)} clients")
        if self.table is not None:
            rows = len(TABLES[self.table] if isinstance(self.table, str) else self.table)
            if not rows:
                raise ValueError("table: is empty; expected the label shares of each client")
            if self.count not in (None, rows):
                raise ValueError(f"count: is {self.count}, but table has {rows} clients")
        return self
