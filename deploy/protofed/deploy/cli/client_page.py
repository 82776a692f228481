"""`protofed client page`: the hospital's pages in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protofed.common.errors import ConfigError
from protofed.deploy.cli.options import Policy, Settings
from protofed.deploy.cli.options import State as StateOption
from protofed.deploy.cli.pages import ANY_PORT, Listen, OpenBrowser, announce, pages_installed

if TYPE_CHECKING:
    from protofed.deploy.pages.hospital.examination import SiteSettings


def page(
    settings: Settings = None,
    state: StateOption = None,
    policy: Policy = None,
    listen: Listen = ANY_PORT,
    browser: OpenBrowser = False,
) -> None:
    """Show what the site does and what has left it as pages in a browser; approve, deny and pause there.

    Reads the state folder and the policy, as the other commands do, whether the daemon runs or not; with --settings it
    also checks machine and data, as `client doctor` and `client check`. Prints an address that works once, on this
    machine alone. End it with Ctrl-C: nothing else stops.

    Example: `protofed client page --settings site.toml`
    """
    with pages_installed():
        from protofed.deploy.pages import serving
        from protofed.deploy.pages.hospital.page import client_page

    serving.serve(client_page(*_place(settings, state, policy)), listen, announce(browser=browser))


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
    given = {"state": None if state is None else str(state), "policy": policy}
    named = SiteSettings(settings, {name: value for name, value in given.items() if value is not None})
    read = named.read()
    return read.state, read.policy, read.site, named
