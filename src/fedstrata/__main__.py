"""``python -m fedstrata`` is the command ``fedstrata``."""

from fedstrata.cli import main

main()
