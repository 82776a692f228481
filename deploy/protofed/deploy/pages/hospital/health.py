"""Health of machine and data: what is cheap to see at once, and what `client doctor` finds, on request."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import ConfigError, ProtofedError
from protofed.deploy.daemons import readyz
from protofed.deploy.doctor import machine
from protofed.deploy.pages.hospital.examination import Examination, Examiner
from protofed.deploy.pages.hospital.site import Site
from protofed.deploy.pages.shell import form_of, shell_of

# The order of the table: what is to be done comes first, in the doctor's order, in which causes come first.
ORDER: Final = {"finding": 0, "warning": 1, "fine": 2, "skipped": 3}
NO_SETTINGS: Final = "this page was started without the daemon's settings: protofed client page --settings site.toml"


@dataclass(frozen=True)
class HealthPages:
    """The pages below `/health`."""

    site: Site

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [
            Route("/health", self.show),
            Route("/health", self.begin, methods=["POST"]),
            Route("/health/stop", self.stop, methods=["POST"]),
        ]

    def show(self, request: Request) -> Response:
        """What is known of the machine, and the newest examination."""
        examiner = self.site.examiner
        found = None if examiner is None else examiner.newest()
        going = None if examiner is None else examiner.going()
        disk = shutil.disk_usage(self.site.state)
        return shell_of(request).page(
            request,
            "health.html.j2",
            {
                "has_settings": examiner is not None,
                "found": found,
                "going": going,
                "rows": in_order(found),
                "free": disk.free,
                "total": disk.total,
                "low": disk.free < machine.LOW_BYTES,
                "full": disk.free < machine.FULL_BYTES,
                "said": said(found),
                **self._daemon(),
                **self._device(found),
            },
        )

    def begin(self, request: Request) -> Response:
        """Examine the site."""
        whole = form_of(request).get("whole", "") == "yes"
        return begun(request, examiner_of(self.site).begin(whole=whole), "/health")

    def stop(self, request: Request) -> Response:
        """Stop what goes on, of whatever kind."""
        stopped = examiner_of(self.site).stop()
        path = form_of(request).get("back", "")
        back = path if path.startswith("/runs/") else "/health"
        return shell_of(request).done(back, "stopped" if stopped else "no check goes on")

    def _daemon(self) -> Mapping[str, Any]:
        runs = machine.has_running_daemon(self.site.state)
        answers = bool(runs) and (self.site.state / readyz.ADDRESS_FILE).exists()
        return {
            "daemon": {True: "running", False: "not running", None: "unknown"}[runs],
            "answers": answers,
            "missing": readyz.missing(self.site.state) if answers else [],
        }

    def _device(self, found: Examination | None) -> Mapping[str, Any]:
        """The device of the settings, and what the newest examination saw of it."""
        row = next((row for row in (found.rows if found else ()) if row["check"] == "device"), None)
        seen = row["seen"] if row and row["state"] == "fine" else ""
        try:
            device = "" if self.site.settings is None else self.site.settings.read().device
        except ProtofedError as error:
            return {"device": "", "device_seen": "", "settings_problem": str(error)}
        return {"device": device, "device_seen": seen, "settings_problem": ""}


def examiner_of(site: Site) -> Examiner:
    """The site's examiner; ConfigError if the page was started without settings."""
    if site.examiner is None:
        raise ConfigError(NO_SETTINGS)
    return site.examiner


def begun(request: Request, begins: bool, path: str) -> Response:
    """The answer to an order to begin an examination."""
    if not begins:
        shell_of(request).access.notify("another check goes on: wait for its end, or stop it", error=True)
    return shell_of(request).done(path)


def in_order(found: Examination | None) -> list[Mapping[str, Any]]:
    """The rows of an examination, what is to be done first."""
    return sorted(found.rows if found else (), key=lambda row: ORDER[row["state"]])


def said(found: Examination | None) -> str:
    """What a screen reader hears once it changes: the beginning and the end, and no step between."""
    if found is None:
        return ""
    if found.goes_on:
        return f"{found.what} goes on"
    return f"{found.what} has ended: {found.problem or found.verdict}"
