"""What carries exchanges between server and clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fedstrata.client.trainer import NoReply, Reply, Request


class Engine(Protocol):
    """Knows the clients and brings them requests."""

    def clients(self) -> Sequence[str]:
        """Their names, stable and in canonical order."""

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
        """One answer per request, in order of arrival; that there is none is one too."""
