"""The command ``fedstrata``, also as ``python -m fedstrata``."""

import atexit
import contextlib
import gc
import io
import os
import sys

ALLOCATIONS = 10_000
"""Objects after which garbage is collected: with Python's 700 that takes 0.4 s while libraries are loaded."""


def main() -> None:
    """Run the command; Ctrl-C while its libraries are still being loaded is answered by a sentence, too."""
    gc.set_threshold(ALLOCATIONS)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 has no "–"
    ended = [1]
    atexit.register(_leave, ended)
    try:
        from fedstrata.cli import main as command

        command()
    except KeyboardInterrupt:
        ended[0] = 130
        print("fedstrata: stopped", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        ended[0] = end.code if isinstance(end.code, int) else int(end.code is not None)  # as Python takes it
        raise


def _leave(ended: list[int]) -> None:
    """End at once, after all else that is to be done at the end, as it was registered later.

    To take torch and transformers apart would last more than a second; the system frees memory anyway.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, a reader who has gone, or none
            stream.flush()
    os._exit(ended[0])


if __name__ == "__main__":
    main()
