"""Commands for runs between sites: ``federation init``, ``federation add``, ``serve``, ``join``, ``site log``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.common import Insecure, sentences
from fedstrata.errors import UserError


def init(  # noqa: PLR0913  options of a command
    folder: Annotated[Path, typer.Argument(help="Folder to write to.", show_default=False)],
    sites: Annotated[str, typer.Option(help="Names of the sites, a,b,c.", show_default=False)],
    host: Annotated[str, typer.Option(help="Name or address by which sites reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for Flower: who is there.")] = 9440,
    stream_port: Annotated[int, typer.Option(help="Port for activations.")] = 9441,
    ca: Annotated[
        Path | None, typer.Option(help="CA certificate (PEM) that signed --certificate.", show_default=False)
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="The server's certificate (PEM), instead of a generated one.", show_default=False),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Private key (PEM) of --certificate.", show_default=False)
    ] = None,
    client_certificates: Annotated[
        bool,
        typer.Option("--client-certificates", help="A certificate for each site too, which the server demands."),
    ] = False,
) -> None:
    """Create a federation: certificates, a key for each site, server.toml, and a folder to hand to each site."""
    with sentences() as console:
        own = [path for path in (ca, certificate, key) if path is not None]
        if len(own) not in (0, 3):
            raise UserError("federation init: --ca, --certificate and --key go together")
        tls = (own[0], own[1], own[2]) if own else None
        names = [name.strip() for name in sites.split(",") if name.strip()]
        from fedstrata.sites.provision import init as create

        ports = {"port": port, "stream_port": stream_port}
        create(folder, names, host=host, **ports, tls=tls, client_certificates=client_certificates)
        console.print(f"server  {folder / 'server.toml'}", soft_wrap=True)
        for name in names:
            console.print(f"site    {folder / 'sites' / name / 'site.toml'}", soft_wrap=True)


def add(
    folder: Annotated[Path, typer.Argument(help="Folder of the federation.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Name of the new site.", show_default=False)],
) -> None:
    """Add a site to a federation; the server accepts it after a restart."""
    with sentences() as console:
        from fedstrata.sites.provision import add_site

        add_site(folder, name)
        console.print(f"site    {folder / 'sites' / name / 'site.toml'}", soft_wrap=True)


def serve(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the federation, or its server.toml.", show_default=False)
    ],
    insecure: Insecure = False,
) -> None:
    """Run the server of a federation: sites connect to it, and runs go through it."""
    with sentences() as console:
        from fedstrata.sites.serve import serve as run_server
        from fedstrata.sites.settings import read_server

        run_server(read_server(folder), lambda line: console.print(line, soft_wrap=True, markup=False), insecure)


def join(
    settings: Annotated[Path, typer.Argument(help="The site's site.toml.", show_default=False)],
    insecure: Insecure = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the next run would have this site send, and send nothing.")
    ] = False,
) -> None:
    """Join a federation as a site: take part in its runs, as site.toml allows."""
    with sentences() as console:
        from fedstrata.sites.serve import join as run_site
        from fedstrata.sites.settings import read_site

        run_site(
            read_site(settings), lambda line: console.print(line, soft_wrap=True, markup=False), insecure, dry_run
        )


def log(
    settings: Annotated[Path, typer.Argument(help="The site's site.toml, or its folder.")] = Path("site.toml"),
    verify: Annotated[bool, typer.Option("--verify", help="Only check that nothing was changed or lost.")] = False,
) -> None:
    """Show the release log of a site: a line for every message that left it."""
    with sentences() as console:
        from fedstrata.sites.release_lines import log_lines, verified_lines
        from fedstrata.sites.settings import read_site

        folder = read_site(settings).folder
        for line in verified_lines(folder) if verify else log_lines(folder):
            console.print(line, soft_wrap=True, markup=False)
