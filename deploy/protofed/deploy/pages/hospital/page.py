"""The hospital's program: its pages, and whom it acts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.clock import utc_now
from protofed.common.errors import ConfigError
from protofed.deploy.pages.hospital.examination import SiteSettings
from protofed.deploy.pages.hospital.left import LeftPages
from protofed.deploy.pages.hospital.overview import HealthPages, HospitalOverview
from protofed.deploy.pages.hospital.runs import HospitalRuns
from protofed.deploy.pages.hospital.site import HospitalSite
from protofed.deploy.pages.shell import Program, find_shell, read_form
from protofed.deploy.site import orders
from protofed.deploy.site.orders import pause_end
from protofed.deploy.site.partners import PartnersView

TEMPLATES: Final = Path(__file__).parent / "templates"
NAVIGATION: Final = (
    ("/", "Overview"),
    ("/left", "What was sent"),
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
    orders.act_as_owner(state)
    hospital = HospitalSite(state, policy, settings)
    hospital.log.look()  # seconds, of a long log: before a page waits for it
    return build_pages(hospital, site)


def build_pages(hospital: HospitalSite, site: str = "") -> Program:
    """The pages of a site; `site` is its id, if that is known."""
    pages = (
        HospitalOverview(hospital),
        LeftPages(hospital),
        HospitalRuns(hospital),
        PartnersPages(hospital),
        HealthPages(hospital),
        PausePages(hospital),
    )
    name = f"site {site}, " if site else ""
    return Program(
        title="protofed client page",
        whom=f"{name}{hospital.state}, by {orders.user_name() or 'a user without a name'}",
        navigation=NAVIGATION,
        routes=[*hospital.pictures.routes(), *(route for page in pages for route in page.routes())],
        templates=TEMPLATES,
    )


@dataclass(frozen=True)
class PartnersPages:
    """The page `/partners`."""

    site: HospitalSite

    def routes(self) -> Sequence[BaseRoute]:
        """Its routes."""
        return [Route("/partners", self.show), Route("/partners", self.confirm, methods=["POST"])]

    def show(self, request: Request) -> Response:
        """Both lists, and who reads this site's update alone."""
        policy, view = self.site.policy(), PartnersView.of(self.site.state)
        least, required = (
            (1, None) if policy is None else (policy.rules.sum_group, policy.rules.partners == "confirmed")
        )
        waits = view.offered is not None and view.offered != view.listed
        context = {
            "view": view,
            "waits": waits,
            "asked": view.asked(),
            "reads": view.who_reads(least, required=required),
        }
        return find_shell(request).page(request, "partners.html.j2", context)

    def confirm(self, request: Request) -> Response:
        """Confirm the offered list."""
        if read_form(request).get("sure") != "yes":
            raise ConfigError("nothing was confirmed: tick the box once you know each hospital of the list")
        noticed = orders.confirm_partners(self.site.state, read_form(request).get("code", ""))
        return find_shell(request).done("/partners", f"confirmed; {orders.noticed_text(noticed)}")


@dataclass(frozen=True)
class PausePages:
    """The page `/pause`."""

    site: HospitalSite

    def routes(self) -> Sequence[BaseRoute]:
        """Its routes."""
        return [
            Route("/pause", self.show),
            Route("/pause", self.begin, methods=["POST"]),
            Route("/resume", self.end, methods=["POST"]),
        ]

    def show(self, request: Request) -> Response:
        """The pause that is in force, or the form for one."""
        context = {"pause": orders.open_pause(self.site.state).current(), "now": utc_now(), "user": orders.user_name()}
        return find_shell(request).page(request, "pause.html.j2", context)

    def begin(self, request: Request) -> Response:
        """Pause the site."""
        until = read_form(request).get("until", "")
        end = pause_end(until, utc_now()) if until else None
        noticed = orders.pause(self.site.state, end, read_form(request).get("reason", ""))
        text = "paused: this site takes no new task; a fit in progress is finished and sent"
        return find_shell(request).done("/pause", f"{text}; {orders.noticed_text(noticed)}")

    def end(self, request: Request) -> Response:
        """End the pause."""
        noticed = orders.resume(self.site.state)
        text = "this site is not paused" if noticed is None else f"resumed; {orders.noticed_text(noticed)}"
        return find_shell(request).done("/pause", text)
