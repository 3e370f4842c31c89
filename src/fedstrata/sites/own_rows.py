"""A look at a site's rows before it joins."""

from __future__ import annotations

from dataclasses import replace

from fedstrata.data.forms.how import How
from fedstrata.data.read import read
from fedstrata.errors import UserError
from fedstrata.sites.settings import SiteSettings


def check_own_rows(settings: SiteSettings) -> None:
    """Read one of the site's own rows, so that a mistake in its settings is reported now and not in a run.

    Raises:
        UserError: the rows cannot be read, or lack the columns of the text.
    """
    data = settings.data
    how = How(
        wanted=(data.text,) if isinstance(data.text, str) else tuple(dict.fromkeys(data.text)),
        names=data.columns,
        documents=data.documents,
        delimiter=data.delimiter,
        encoding=data.encoding,
    )
    for sources in (data.train, data.test):
        for source in sources.values() if isinstance(sources, dict) else [sources] if sources else []:
            if isinstance(source, str) and source.startswith("demo:"):
                continue
            try:
                read(source, how, 1, settings.home)
            except UserError as error:
                try:  # files with a word per line, of a task that labels words
                    read(source, replace(how, words=True, documents="lines"), 1, settings.home)
                except UserError:
                    raise error from None
