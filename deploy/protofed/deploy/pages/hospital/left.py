"""What has left the site: a sentence, a line a round, and on demand each item and the log's own state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.deploy.pages.formats import Page
from protofed.deploy.pages.hospital.left_rounds import round_lines, summary
from protofed.deploy.pages.hospital.site import Site
from protofed.deploy.pages.hospital.site_log import LeftTotals
from protofed.deploy.pages.pictures import Picture
from protofed.deploy.pages.shell import shell_of

SHOWN: Final = 25
NOTES_SHOWN: Final = 50


@dataclass(frozen=True)
class LeftPages:
    """The pages below `/left`."""

    site: Site

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [Route("/left", self.show), Route("/left/check", self.check, methods=["POST"])]

    def show(self, request: Request) -> Response:
        """The sentence, a page of the rounds, the newest first, and totals."""
        log = self.site.log.look()
        lines = round_lines(self.site.log.leavings())
        page = Page.of(request.query_params.get("page", ""), len(lines), SHOWN)
        totals = self.site.log.totals()
        context = {
            "log": log,
            "summary": summary(lines),
            "gaps": self.site.log.gaps(),
            "lines": page.cut(lines),
            "page": page,
            "totals": totals,
            "picture": self._picture(totals),
            "notes": self.site.log.notes()[:NOTES_SHOWN],
        }
        return shell_of(request).page(request, "left.html.j2", context)

    def _picture(self, totals: LeftTotals) -> Picture | None:
        from protofed.deploy.pages.hospital import figures  # with matplotlib, which takes a second

        parts = {key: size for key, (_, size) in totals.parts.items()}
        sketch = figures.by_run_sketch(parts)
        return None if sketch is None else self.site.pictures.of(("left", tuple(parts.items())), sketch)

    def check(self, request: Request) -> Response:
        """Read the log whole, and say whether it is what was written."""
        log = self.site.log.look(whole=True)
        if log.problem:
            shell_of(request).access.notify(f"the audit log is damaged: {log.problem}", error=True)
            return shell_of(request).done("/left")
        said = f"the log is good: records up to {log.last_number}, newest hash {log.newest}" if log.there else "no log"
        return shell_of(request).done("/left", said)
