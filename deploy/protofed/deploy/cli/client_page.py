"""`protofed client page`: the hospital's pages in a browser."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.common.version import install_hint
from protofed.deploy.cli.console import ANY_PORT, Listen, OpenBrowser
from protofed.deploy.cli.options import Policy, Settings
from protofed.deploy.cli.options import State as StateOption

output = Console(soft_wrap=True, highlight=False)


def page(
    settings: Settings = None,
    state: StateOption = None,
    policy: Policy = None,
    listen: Listen = ANY_PORT,
    browser: OpenBrowser = False,
) -> None:
    """Show what the site does and what has left it as pages in a browser; approve, deny and pause there.

    Reads the state folder and the policy, as the other commands do, whether the daemon runs or not. Prints an address
    that works once, on this machine alone. End it with Ctrl-C: nothing else stops.

    Example: `protofed client page --settings site.toml`
    """
    try:
        from protofed.deploy.pages import serving
        from protofed.deploy.pages.hospital.page import client_page
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed, which the pages need: {install_hint('pages')}") from error

    def started(address: str) -> None:
        output.print(f"open {address}", markup=False)
        output.print("it works once, in one browser; Ctrl-C ends the page, and nothing else", markup=False)
        if browser:
            typer.launch(address)

    serving.serve(client_page(*_place(settings, state, policy)), listen, started)


def _place(settings: Path | None, state: Path | None, policy: str | None) -> tuple[Path, str | None, str]:
    """State folder, policy and site: of the daemon's settings, or as given.

    Raises:
        ConfigError: neither names the state folder; or the settings cannot be used.
    """
    from protofed.common.config.settings import ClientSettings, read_settings

    if settings is None:
        if state is None:
            raise ConfigError("expected --settings or --state: those of the site's daemon")
        return state, policy, ""
    read = read_settings(ClientSettings, settings, {"state": state, "policy": policy})
    return read.state, read.policy, read.site
