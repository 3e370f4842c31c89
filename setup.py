"""The description on the package index: README, its links to files of the repository made absolute.

Their address is ``Source`` of ``[project.urls]``. As long as there is none, the words of a link or picture stand
alone. Everything else about the package is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)")


def description(text: str, project: dict) -> str:
    """README's text, as it can be read away from the repository."""
    source = project.get("urls", {}).get("Source", "").rstrip("/")

    def away(link: re.Match) -> str:
        picture, words, path = link.groups()
        if not source:
            return f"*{words}*" if picture else words
        return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/v{project['version']}/{path})"

    return LINK.sub(away, text)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme, project), long_description_content_type="text/markdown")
