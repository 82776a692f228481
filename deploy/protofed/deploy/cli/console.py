"""`protofed console`: the coordinator's pages in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.common.version import install_hint
from protofed.deploy.cli.connection import LOCAL, Identity, Plaintext, Server

output = Console(soft_wrap=True, highlight=False)
Listen = Annotated[str, typer.Option(help="host:port of this machine's loopback; port 0 picks a free one.")]
OpenBrowser = Annotated[bool, typer.Option("--browser", help="Open the address in this machine's browser.")]
ANY_PORT = "127.0.0.1:0"


def console(
    listen: Listen = ANY_PORT,
    ca: Annotated[
        Path | None,
        typer.Option(help="The CA's folder, to sign requests there; its passphrase is asked for in the form."),
    ] = None,
    browser: OpenBrowser = False,
    server: Server = LOCAL,
    identity: Identity = None,
    plaintext: Plaintext = False,
) -> None:
    """Show runs, sites and certificates of a server as pages in a browser, and give its orders there.

    Prints an address that works once, on this machine alone. It calls the server as `protofed runs`, `sites` and
    `certs` do, with your certificate. End it with Ctrl-C: nothing else stops.

    Example: `protofed console --server hub.example:7443 --identity operator`
    """
    try:
        from protofed.deploy.pages import serving
        from protofed.deploy.pages.coordinator.console import console as pages
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed, which the pages need: {install_hint('pages')}") from error
    from protofed.deploy.operator.connection import Operator

    def started(address: str) -> None:
        output.print(f"open {address}", markup=False)
        output.print("it works once, in one browser; Ctrl-C ends the page, and nothing else", markup=False)
        if browser:
            typer.launch(address)

    with Operator(server, identity, plaintext) as operator:
        serving.serve(pages(operator, server, identity, ca), listen, started)
