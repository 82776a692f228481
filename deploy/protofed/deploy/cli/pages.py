"""What the commands that serve pages in a browser have in common: their options, and what they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.address import choose_identity, find_folder
from protofed.common.errors import ConfigError
from protofed.common.version import install_hint
from protofed.deploy.cli.completion import LOCAL, Identity, Server
from protofed.deploy.cli.options import Policy, Settings
from protofed.deploy.cli.options import State as StateOption

if TYPE_CHECKING:
    from protofed.deploy.pages.hospital.examination import SiteSettings

output = Console(soft_wrap=True, highlight=False)
Listen = Annotated[str, typer.Option(help="host:port of this machine's loopback; port 0 picks a free one.")]
OpenBrowser = Annotated[bool, typer.Option("--browser", help="Open the address in this machine's browser.")]
ANY_PORT = "127.0.0.1:0"


@contextmanager
def pages_installed() -> Iterator[None]:
    """Imports of the pages; ConfigError with what to install, where they lack a library."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed, which the pages need: {install_hint('pages')}") from error


def announce(*, browser: bool) -> Callable[[str], None]:
    """Prints the address that opens the pages.

    Args:
        browser: open it, too.
    """

    def started(address: str) -> None:
        output.print(f"open {address}", markup=False)
        output.print("it works once, in one browser; Ctrl-C ends the page, and nothing else", markup=False)
        if browser:
            typer.launch(address)

    return started


def console(
    listen: Listen = ANY_PORT,
    ca: Annotated[
        Path | None,
        typer.Option(help="The CA's folder, to sign requests there; its passphrase is asked for in the form."),
    ] = None,
    browser: OpenBrowser = False,
    server: Server = LOCAL,
    identity: Identity = None,
) -> None:
    """Show runs, sites and certificates of a server as pages in a browser, and give its orders there.

    Prints an address that works once, on this machine alone. It calls the server as `protofed runs`, `sites` and
    `certs` do, with your certificate. End it with Ctrl-C: nothing else stops.

    Example: `protofed console --server hub.example:7443 --identity operator`
    """
    with pages_installed():
        from protofed.deploy.pages import shell
        from protofed.deploy.pages.coordinator.console import console as pages
    from protofed.deploy.operator.connection import Operator

    chosen = choose_identity(identity)
    with Operator(server, chosen) as operator:
        shell.serve(pages(operator, server, find_folder(chosen), ca), listen, announce(browser=browser))


def page(
    settings: Settings = None,
    state: StateOption = None,
    policy: Policy = None,
    listen: Listen = ANY_PORT,
    browser: OpenBrowser = False,
) -> None:
    """Show what the site does and what it has sent as pages in a browser; approve, deny and pause there.

    Reads the state folder and the policy, whether the daemon runs or not. With --settings it also checks machine and
    data, as `client doctor` and `client check` do. Prints an address that works once, on this
    machine alone. End it with Ctrl-C: nothing else stops.

    Example: `protofed client page --settings site.toml`
    """
    with pages_installed():
        from protofed.deploy.pages import shell
        from protofed.deploy.pages.hospital.page import client_page

    shell.serve(client_page(*_place(settings, state, policy)), listen, announce(browser=browser))


def _place(
    settings: Path | None, state: Path | None, policy: str | None
) -> tuple[Path, str | None, str, SiteSettings | None]:
    """State folder, policy, site and settings: of the daemon's settings, or as given.

    Raises:
        ConfigError: neither names the state folder; or the settings cannot be used.
    """
    from protofed.deploy.pages.hospital.examination import SiteSettings

    if settings is None:
        if state is None:
            raise ConfigError("expected --settings or --state: those of the site's daemon")
        return state, policy, "", None
    options = {"state": None if state is None else str(state), "policy": policy}
    site_settings = SiteSettings(settings, {name: value for name, value in options.items() if value is not None})
    read = site_settings.read()
    return read.state, read.policy, read.site, site_settings
