"""Commands for a trained model: ``export`` and ``push``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.common import sentences
from fedstrata.errors import UserError

Folder = Annotated[Path, typer.Argument(help="A run's output folder, or a model's.", show_default=False)]


def export(
    folder: Folder,
    onnx: Annotated[bool, typer.Option("--onnx", help="As ONNX, for onnxruntime.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="With --onnx: also with weights of 8 bits.")] = False,
    encoder: Annotated[
        bool, typer.Option("--sentence-transformers", help="The encoder: a vector for a text, by mean pooling.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="the form's name, in the folder")
    ] = None,
) -> None:
    """Write a trained model in another form, and compare it with the original on the test rows."""
    with sentences() as console:
        if onnx == encoder:
            raise UserError(
                f"export: names {'two forms' if onnx else 'no form'}; expected --onnx or --sentence-transformers"
            )
        if int8 and encoder:
            raise UserError("export: --int8 is a form of --onnx alone")
        for line in _sentences(folder, out) if encoder else _onnx(folder, out, int8):
            console.print(line, soft_wrap=True)


def _onnx(folder: Path, out: Path | None, int8: bool) -> Iterator[str]:
    from fedstrata.runs.handover import export as write

    reports, where = write(folder, out, int8)
    for report in reports:
        what = "predicted numbers"
        if report.agreement is not None:
            what = f"{report.agreement:.1%} of the predictions as the model's, logits"
        yield f"{report.path}  {report.bytes / 1e6:,.1f} MB  {what} within {report.difference:.2g}"
    yield f"compared on {where}"


def _sentences(folder: Path, out: Path | None) -> Iterator[str]:
    from fedstrata.runs.handover import export_sentences

    report, where = export_sentences(folder, out)
    yield (
        f"{report.path}  {report.width} numbers for a text, within {report.difference:.2g} of the mean of the "
        "model's hidden states"
    )
    yield f"compared on {where}"


def push(
    folder: Folder,
    repository: Annotated[str, typer.Argument(help="Name on the hub, such as our-lab/findings.")],
    public: Annotated[bool, typer.Option("--public", help="Visible to everybody, instead of private.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Upload a trained model with its card to the Hugging Face hub, a service of another company."""
    with sentences() as console:
        from fedstrata.runs.handover import base_here, model_folder
        from fedstrata.runs.handover import push as upload

        place = model_folder(folder)
        files = [path for path in place.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        seen = "everybody can see it" if public else "private"
        what = f"{len(files)} files of {place}, {size / 1e6:,.1f} MB,"
        where = f"go to Hugging Face's machines as {repository} ({seen})"
        console.print(f"{what} {where}", soft_wrap=True)
        if base := base_here(place):
            note = f"note: adapter_config.json and README.md name {base}, which no other machine has, as the base"
            console.print(note, soft_wrap=True)
        if not yes and not _confirmed():
            raise UserError("push: not confirmed; nothing was uploaded; --yes does not ask")
        console.print(f"pushed  {upload(folder, repository, public)}", soft_wrap=True)


def _confirmed() -> bool:
    """Whether whoever is at the terminal says yes; where nobody is, nobody does."""
    try:
        return typer.confirm("Upload?")
    except typer.Abort:
        return False
