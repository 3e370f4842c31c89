"""transformers and huggingface_hub without their messages, which are about what a run already checks.

A caller's own calls keep them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import logging as hub
from transformers import logging


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of either and no progress bars of transformers inside; also a decorator."""
    level, bars, of_hub = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.get_verbosity()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(of_hub)
        if bars:
            logging.enable_progress_bar()
