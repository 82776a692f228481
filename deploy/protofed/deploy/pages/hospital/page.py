"""The hospital's program: its pages, and whom it acts for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from protofed.deploy.pages.hospital.examination import SiteSettings
from protofed.deploy.pages.hospital.health import HealthPages
from protofed.deploy.pages.hospital.left import LeftPages
from protofed.deploy.pages.hospital.overview import OverviewPages
from protofed.deploy.pages.hospital.partners import PartnersPages
from protofed.deploy.pages.hospital.pause import PausePages
from protofed.deploy.pages.hospital.runs import RunPages
from protofed.deploy.pages.hospital.site import Site
from protofed.deploy.pages.shell import Program
from protofed.deploy.site import decide

TEMPLATES: Final = Path(__file__).parent / "templates"
NAVIGATION: Final = (
    ("/", "Overview"),
    ("/left", "What has left"),
    ("/runs", "Runs"),
    ("/partners", "Partners"),
    ("/health", "Health"),
    ("/pause", "Pause"),
)


def client_page(
    state: Path, policy: str | None = None, site: str = "", settings: SiteSettings | None = None
) -> Program:
    """The pages of one site.

    Args:
        state: its state folder.
        policy: its policy, by name or file; None: none was given, and previews say nothing of what it allows.
        site: its id, if that is known.
        settings: of its daemon; None: the page cannot examine machine and data.

    Raises:
        ConfigError: there is no such folder.
    """
    decide.act_as_owner(state)
    shown = Site(state, policy, settings)
    shown.log.look()  # seconds, of a long log: before a page waits for it
    return pages_of(shown, site)


def pages_of(shown: Site, site: str = "") -> Program:
    """The pages of a site; `site` is its id, if that is known."""
    pages = (
        OverviewPages(shown),
        LeftPages(shown),
        RunPages(shown),
        PartnersPages(shown),
        HealthPages(shown),
        PausePages(shown),
    )
    name = f"site {site}, " if site else ""
    return Program(
        title="protofed client page",
        whom=f"{name}{shown.state}, by {decide.user_name() or 'a user without a name'}",
        navigation=NAVIGATION,
        routes=[*shown.pictures.routes(), *(route for page in pages for route in page.routes())],
        templates=TEMPLATES,
    )
