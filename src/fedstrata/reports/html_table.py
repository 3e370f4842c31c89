"""Tables of a page as data: heads, cells, and the records that can be downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstrata.reports.downloads import links


@dataclass(frozen=True)
class Head:
    """The head of a column.

    Attributes:
        text: what it holds.
        unit: what stands below it, smaller.
        words: whether it holds words, which stand at the left.
    """

    text: str
    unit: str = ""
    words: bool = False

    @property
    def label(self) -> str:
        """Head and unit on one line."""
        return f"{self.text} ({self.unit})" if self.unit else self.text


@dataclass(frozen=True)
class HtmlTable:
    """A table.

    Attributes:
        title: what it shows; read out by screen readers, and the name of its files.
        heads: of the columns; the first names the row.
        rows: the cells, as texts.
        links: where the first cell of each row leads; empty for nowhere.
    """

    title: str
    heads: Sequence[Head]
    rows: Sequence[Sequence[str]]
    links: Sequence[str] = field(default=())

    @property
    def downloads(self) -> list[dict[str, str]]:
        """The table as CSV and LaTeX."""
        records: list[Mapping[str, Any]] = [
            {head.label: cell for head, cell in zip(self.heads, row, strict=True)} for row in self.rows
        ]
        return links(self.title, records)
