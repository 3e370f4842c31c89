"""Pictures and tables of a page as files: SVG, CSV and LaTeX inside links, so that the page needs nothing else."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

MOST_ROWS = 5_000
"""Rows of a table in a link; of more the run's own files are the place to look."""
SIGNS = (
    {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta"}
    | {"η": "eta", "θ": "theta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu"}
    | {"ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau"}
    | {"φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Δ": "Delta", "Σ": "Sigma"}
    | {"Ω": "Omega", "≤": "leq", "≥": "geq", "≈": "approx", "∞": "infty"}
)
"""Letters of math, as in "Dirichlet, α = 0.1", at which LaTeX stops -> their commands."""
TEX = str.maketrans(
    {"\\": r"\textbackslash{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "–": "--", "→": r"$\to$"}
    | {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {letter: f"$\\{name}$" for letter, name in SIGNS.items()}
    | {letter: f"{{{letter}}}" for letter in "[*"}  # after a row's end they are options of it
)
"""What LaTeX takes for commands, and the letters that it has no sign for, written out."""


def links(title: str, records: Sequence[Mapping[str, Any]], svg: str = "") -> list[dict[str, str]]:
    """The downloads of a picture or table, each with ``label``, ``name`` of the file and ``href``.

    Args:
        title: of the picture or table; the files are named by it.
        records: its rows.
        svg: the picture.
    """
    name = re.sub(r"\W+", "-", title.lower()).strip("-") or "table"
    made = [("SVG", f"{name}.svg", "image/svg+xml", svg)] if svg else []
    if records and len(records) <= MOST_ROWS:
        made.append(("CSV", f"{name}.csv", "text/csv;charset=utf-8", csv_text(records)))
        made.append(("LaTeX", f"{name}.tex", "text/plain;charset=utf-8", latex_text(records)))
    return [
        {"label": label, "name": file, "href": f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"}
        for label, file, kind, text in made
    ]


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV, their keys as header line; empty where there are none."""
    text = io.StringIO()
    if records:
        heads = list(records[0])
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(_no_formula, heads))
        writer.writerows([_no_formula(row[head]) for head in heads] for row in records)
    return text.getvalue()


def _no_formula(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: labels of rows may begin with = as anything else may."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def latex_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as a tabular in LaTeX (package booktabs); columns of numbers stand at the right."""
    heads = list(records[0])
    right = [all(isinstance(row[head], int | float | None) for row in records) for head in heads]
    body = [" & ".join(tex(_shown(row[head])) for head in heads) + r" \\" for row in records]
    lines = [r"\begin{tabular}{" + "".join("r" if one else "l" for one in right) + "}", r"\toprule"]
    lines += [" & ".join(map(tex, heads)) + r" \\", r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def tex(word: str) -> str:
    """A text with what LaTeX takes for commands written out."""
    return word.translate(TEX)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
