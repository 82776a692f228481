"""The pause of the site: begin one, with an end if it has one, and end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.clock import utc_now
from protofed.deploy.pages.hospital.site import Site
from protofed.deploy.pages.shell import form_of, shell_of
from protofed.deploy.site import decide, orders
from protofed.deploy.site.pause_end import pause_end


@dataclass(frozen=True)
class PausePages:
    """The page `/pause`."""

    site: Site

    def routes(self) -> Sequence[BaseRoute]:
        """Its routes."""
        return [
            Route("/pause", self.show),
            Route("/pause", self.begin, methods=["POST"]),
            Route("/resume", self.end, methods=["POST"]),
        ]

    def show(self, request: Request) -> Response:
        """The pause that is in force, or the form for one."""
        context = {"pause": orders.pause_of(self.site.state).current(), "now": utc_now(), "user": decide.user_name()}
        return shell_of(request).page(request, "pause.html.j2", context)

    def begin(self, request: Request) -> Response:
        """Pause the site."""
        until = form_of(request).get("until", "")
        end = pause_end(until, utc_now()) if until else None
        noticed = orders.pause(self.site.state, end, form_of(request).get("reason", ""))
        text = "paused: this site takes no new task; a fit in progress is finished and sent"
        return shell_of(request).done("/pause", f"{text}; {orders.noticed_text(noticed)}")

    def end(self, request: Request) -> Response:
        """End the pause."""
        noticed = orders.resume(self.site.state)
        text = "this site is not paused" if noticed is None else f"resumed; {orders.noticed_text(noticed)}"
        return shell_of(request).done("/pause", text)
