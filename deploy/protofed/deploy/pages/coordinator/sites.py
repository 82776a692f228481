"""The sites of a server: what each does, and the orders about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import ConfigError, short
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.screen import machine_line
from protofed.deploy.operator.snapshot_builder import sites
from protofed.deploy.pages.formats import Page
from protofed.deploy.pages.shell import form_of, shell_of
from protofed.deploy.tables import printable
from protofed.protos.v1 import operator_pb2 as pb

SITES_SHOWN: Final = 50


@dataclass(frozen=True)
class SitePages:
    """The pages below `/sites`."""

    operator: Operator

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [
            Route("/sites", self.list),
            Route("/sites/{site}", self.show),
            *(
                Route(f"/sites/{{site}}/{order.__name__}", order, methods=["POST"])
                for order in (self.exclude, self.admit, self.forget, self.regroup)
            ),
        ]

    def list(self, request: Request) -> Response:
        """All sites, those with problems first."""
        infos = {info.site: info for info in self.operator.sites()}
        rows = sites(infos.values(), None, ended=False)
        page = Page.of(request.query_params.get("page", ""), len(rows), SITES_SHOWN)
        shown = [(infos[row.site], row) for row in page.cut(rows)]
        working = any(info.status == "working" for info in infos.values())
        return shell_of(request).page(request, "sites.html.j2", {"sites": shown, "page": page, "going": working})

    def show(self, request: Request) -> Response:
        """One site, and what can be ordered."""
        info = self._info(request)
        (row,) = sites([info], None, ended=False)
        context = {"info": info, "row": row, "machine": machine_line(row.telemetry)}
        return shell_of(request).page(request, "site.html.j2", context)

    def exclude(self, request: Request) -> Response:
        """Have rounds no longer wait for it."""
        reason = form_of(request).get("reason") or "by the operator"
        info = self.operator.exclude(_name(request), reason)
        return self._done(request, f"{info.site}: excluded ({info.excluded})")

    def admit(self, request: Request) -> Response:
        """Admit it again."""
        info = self.operator.admit(_name(request))
        return self._done(request, f"{info.site}: admitted")

    def forget(self, request: Request) -> Response:
        """Remove it from the list."""
        _confirmed(request, "forget the site")
        info = self.operator.forget(_name(request))
        return shell_of(request).done("/sites", f"{info.site}: forgotten")

    def regroup(self, request: Request) -> Response:
        """Dissolve its group of secure sums."""
        _confirmed(request, "dissolve the group")
        info = self.operator.regroup(_name(request))
        others = ", ".join(other for other in info.group if other != info.site)
        return self._done(
            request,
            f"{info.site}, {others}: dissolved; now `protofed client consortium forget-group` at each of {others}",
        )

    def _done(self, request: Request, text: str) -> Response:
        return shell_of(request).done(f"/sites/{_name(request)}", printable(text))

    def _info(self, request: Request) -> pb.SiteInfo:
        name = _name(request)
        for info in self.operator.sites():
            if info.site == name:
                return info
        raise ConfigError(f"the server knows no site '{short(name)}'")


def _name(request: Request) -> str:
    site: str = request.path_params["site"]
    return site


def _confirmed(request: Request, what: str) -> None:
    """Refuse an order that cannot be taken back unless its box was ticked.

    Raises:
        ConfigError: it was not.
    """
    if form_of(request).get("sure") != "yes":
        raise ConfigError(f"tick the box to {what}: that cannot be taken back; nothing was done")
