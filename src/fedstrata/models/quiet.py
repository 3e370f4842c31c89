"""transformers without its messages, which are about what a run already checks; a caller's own calls keep them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import logging


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and progress bars of transformers inside; also a decorator."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
