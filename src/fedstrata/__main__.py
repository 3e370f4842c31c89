"""The command ``fedstrata``, also as ``python -m fedstrata``."""

import sys


def main() -> None:
    """Run the command; Ctrl-C while its libraries are still being loaded is answered by a sentence, too."""
    try:
        from fedstrata.cli import main as command

        command()
    except KeyboardInterrupt:
        print("fedstrata: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
