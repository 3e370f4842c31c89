"""Tables of the documents, between marks that name the command which makes them."""

from __future__ import annotations

END = "<!-- end of table -->"


def fill(page: str, name: str, text: str) -> str:
    """The page with another table between the mark with this name and the next end.

    Raises:
        ValueError: it has no such mark, or no end after it.
    """
    begin = f"<!-- table: {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"expected {begin} and then {END}")
    return f"{before}{begin}\n{text}\n{END}{after}"
