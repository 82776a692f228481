"""`protofed console`: the coordinator's pages in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protofed.deploy.cli.connection import LOCAL, Identity, Plaintext, Server
from protofed.deploy.cli.pages import ANY_PORT, Listen, OpenBrowser, announce, pages_installed


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
    with pages_installed():
        from protofed.deploy.pages import serving
        from protofed.deploy.pages.coordinator.console import console as pages
    from protofed.deploy.operator.connection import Operator

    with Operator(server, identity, plaintext) as operator:
        serving.serve(pages(operator, server, identity, ca), listen, announce(browser=browser))
