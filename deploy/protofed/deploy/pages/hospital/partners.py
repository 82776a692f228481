"""The partners that the site is summed with: the list that is offered, the one that counts, and a form to confirm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import ConfigError
from protofed.deploy.pages.hospital.site import Site
from protofed.deploy.pages.shell import form_of, shell_of
from protofed.deploy.site import orders
from protofed.deploy.site.partners import PartnersView


@dataclass(frozen=True)
class PartnersPages:
    """The page `/partners`."""

    site: Site

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
        return shell_of(request).page(request, "partners.html.j2", context)

    def confirm(self, request: Request) -> Response:
        """Confirm the offered list."""
        if form_of(request).get("sure") != "yes":
            raise ConfigError("nothing was confirmed: tick the box once you know each hospital of the list")
        noticed = orders.confirm_partners(self.site.state, form_of(request).get("code", ""))
        return shell_of(request).done("/partners", f"confirmed; {orders.noticed_text(noticed)}")
