"""Commands for runs between sites: ``federation init|add|renew|status``, ``serve``, ``join``, ``site log``."""

from __future__ import annotations

from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size

from fedstrata.cli.common import Insecure, names_of, print_json, sentences, stop_on_signals
from fedstrata.errors import UserError


def init(  # noqa: PLR0913  options of a command
    folder: Annotated[Path, typer.Argument(help="Folder to write to.", show_default=False)],
    sites: Annotated[list[str], typer.Option(help="Names of the sites, a,b,c.", show_default=False)],
    host: Annotated[str, typer.Option(help="Name or address by which sites reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for Flower: sites connect to it.")] = 9440,
    stream_port: Annotated[int, typer.Option(help="Port for activations.")] = 9441,
    message_port: Annotated[int, typer.Option(help="Port for messages: sites connect to it.")] = 9442,
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
        typer.Option("--client-certificates", help="Also create a certificate for each site, and require it."),
    ] = False,
) -> None:
    """Create a federation: certificates, a key for each site, server.toml, and a folder to hand to each site."""
    with sentences() as console:
        own = [path for path in (ca, certificate, key) if path is not None]
        if len(own) not in (0, 3):
            raise UserError("federation init: --ca, --certificate and --key go together")
        tls = (own[0], own[1], own[2]) if own else None
        names = names_of(sites)
        from fedstrata.sites.provision import init as create

        ports = {"port": port, "stream_port": stream_port, "message_port": message_port}
        create(folder, names, host=host, **ports, tls=tls, client_certificates=client_certificates)
        console.print(f"server  {folder / 'server.toml'}", soft_wrap=True)
        for name in names:
            console.print(f"site    {folder / 'sites' / name / 'site.toml'}", soft_wrap=True)


def add(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the federation, or its server.toml.", show_default=False)
    ],
    name: Annotated[str, typer.Argument(help="Name of the new site.", show_default=False)],
) -> None:
    """Add a site to a federation; its server accepts it within seconds."""
    with sentences() as console:
        from fedstrata.sites.provision import add_site

        if folder.name == "server.toml" and folder.is_file():
            folder = folder.parent
        add_site(folder, name)
        console.print(f"site    {folder / 'sites' / name / 'site.toml'}", soft_wrap=True)


def renew(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the federation, or its server.toml.", show_default=False)
    ],
    certificate: Annotated[
        Path | None,
        typer.Argument(help="A site's certificate (PEM); by default the server's.", show_default=False),
    ] = None,
) -> None:
    """Renew a certificate for a year, in place; the federation's own CA signs it, and its key stays as it is."""
    with sentences() as console:
        from fedstrata.sites.renewal import renew as renew_certificate

        path, end = renew_certificate(folder, certificate)
        then = "restart fedstrata serve" if certificate is None else "hand it back, for the site to restart join"
        console.print(f"{path}: valid until {end:%Y-%m-%d}; {then}", soft_wrap=True)


def serve(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the federation, or its server.toml.", show_default=False)
    ],
    insecure: Insecure = False,
    page: Annotated[
        bool, typer.Option("--page", help="Show a page with the state of the federation, on this machine alone.")
    ] = False,
) -> None:
    """Run the server of a federation: sites connect to it, and runs go through it."""
    with sentences() as console:
        stop_on_signals()
        from fedstrata.sites.serve import serve as run_server
        from fedstrata.sites.settings import read_server

        say = partial(console.print, soft_wrap=True)
        run_server(read_server(folder), say, insecure, page)


def status(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the federation, or its server.toml.", show_default=False)
    ],
    json: Annotated[
        bool, typer.Option("--json", help="As JSON: rounds from 0, times in seconds since 1970.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """Show who is connected, which round is on, who is waited for and until when; on the server's machine."""
    with sentences() as console:
        from fedstrata.sites.settings import read_server
        from fedstrata.sites.status import federation_status

        found = federation_status(read_server(folder), insecure)
        if json:
            print_json(_finite(found), indent=1, ensure_ascii=False)
            return
        from fedstrata.reports.live import HEADS, facts, rows

        for lines in (list(facts(found).items()), [HEADS, *rows(found)]):
            widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
            for line in lines:
                padded = (set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True))
                console.print("  ".join(padded).rstrip(), soft_wrap=True)


def _finite(found: Any) -> Any:
    """What was found, with None for a number that JSON cannot write."""
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    return None if isinstance(found, float) and not isfinite(found) else found


def join(
    settings: Annotated[Path, typer.Argument(help="The site's site.toml.", show_default=False)],
    insecure: Insecure = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the next run would have this site send, and send nothing.")
    ] = False,
) -> None:
    """Join a federation as a site: take part in its runs, as site.toml allows."""
    with sentences() as console:
        stop_on_signals()
        from fedstrata.cli.site_progress import SiteDisplay
        from fedstrata.sites.serve import join as run_site
        from fedstrata.sites.settings import read_site

        site = read_site(settings)
        say = partial(console.print, soft_wrap=True)
        with SiteDisplay(console, site.name) as display:
            run_site(site, say, insecure, dry_run, display)


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
            console.print(line, soft_wrap=True)
