"""The command line: ``fedstrata run | forecast | partition | report | federation | serve | join``."""

from fedstrata.cli import forecast, jobs, sites  # noqa: F401  they add their commands
from fedstrata.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``fedstrata`` command."""
    app()
