"""The first page: daemon, pause, what goes on, what waits for a person, privacy and disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.client.policy.approval import ApprovalStatus
from protofed.client.secure_aggregation.partners import Partners
from protofed.common.clock import utc_now
from protofed.common.errors import ProtofedError, count
from protofed.common.pki.certificate import read_certificate
from protofed.common.pki.identity import CERTIFICATE
from protofed.deploy.daemons import readyz
from protofed.deploy.doctor import machine
from protofed.deploy.pages.hospital import privacy_curve
from protofed.deploy.pages.hospital.site import Site
from protofed.deploy.pages.shell import shell_of
from protofed.deploy.site import orders
from protofed.deploy.site.offered_runs import all_runs

UNDECIDED: Final = (ApprovalStatus.WAITING, ApprovalStatus.CHANGED)
RECENT_S: Final = 120.0  # the longest that a working daemon is silent: a heartbeat that waits, and a slow disk


@dataclass(frozen=True)
class OverviewPages:
    """The page `/`."""

    site: Site

    def routes(self) -> Sequence[BaseRoute]:
        """Its route."""
        return [Route("/", self.show)]

    def show(self, request: Request) -> Response:
        """All of it as of now."""
        site = self.site
        log, rows = site.log.look(), list(reversed(all_runs(site.approvals)))
        runs, pause, activity = (
            machine.has_running_daemon(site.state),
            orders.pause_of(site.state).current(),
            site.log.activity(),
        )
        # Under a policy that approves by itself, the daemon records that once it meets the run.
        waiting = [] if site.approves_by_itself() else [row for row in rows if row["approval"] in UNDECIDED]
        heard = unix(activity.at)
        working = bool(runs and activity.doing not in ("", "idle") and time.time() - heard < RECENT_S)
        disk = shutil.disk_usage(site.state)
        return shell_of(request).page(
            request,
            "overview.html.j2",
            {
                "log": log,
                "daemon": {True: "running", False: "not running", None: "unknown"}[runs],
                "missing": _missing(site) if runs else [],
                "pause": pause,
                "partners_problem": _partners(site),
                "activity": activity,
                "heard": heard,
                "working": working,
                "waiting": waiting,
                "rows": rows,
                "policy": site.policy_name,
                "policy_problem": site.policy_problem(),
                "free": disk.free,
                "total": disk.total,
                "said": f"daemon {'running' if runs else 'not running'}, {'paused, ' if pause else ''}"
                f"{count(len(waiting), 'run')} to decide on",
                **_certificate(site),
                **_spent(site),
                **_privacy_picture(site),
            },
        )


def _missing(site: Site) -> list[str]:
    """What a running daemon lacks, by its own /readyz; none if it has no such address."""
    return readyz.missing(site.state) if (site.state / readyz.ADDRESS_FILE).exists() else []


def _certificate(site: Site) -> Mapping[str, Any]:
    """When the site's certificate ends, in Unix time (0: it has none, or the settings are not known), and if soon."""
    try:
        identity = None if site.settings is None else site.settings.read().identity
        if identity is None:
            return {"certificate_end": 0.0, "certificate_soon": False, "certificate_problem": ""}
        file = identity / CERTIFICATE
        end = read_certificate(file.read_bytes(), str(file)).not_after
    except (ProtofedError, OSError) as error:
        return {"certificate_end": 0.0, "certificate_soon": False, "certificate_problem": str(error)}
    soon = end - utc_now() < machine.SOON
    return {"certificate_end": end.timestamp(), "certificate_soon": soon, "certificate_problem": ""}


def _partners(site: Site) -> str:
    """Why the site takes part in no secure sum; empty: it does, or no policy asks for partners."""
    try:
        policy = site.policy()
        required = policy is not None and policy.rules.partners == "confirmed"
        return Partners(site.state).problem(required=required)
    except ProtofedError as error:
        return str(error)


def _spent(site: Site) -> Mapping[str, Any]:
    """The budget, or why it is not known."""
    try:
        return {"spent": site.spent(), "spent_problem": ""}
    except ProtofedError as error:
        return {"spent": None, "spent_problem": str(error)}


def _privacy_picture(site: Site) -> Mapping[str, Any]:
    """Epsilon over the fits; `privacy_going`: how many points are known of how many."""
    try:
        spent, ledger = site.spent(), site.ledger()
    except ProtofedError:  # `_spent` says why
        return {"privacy_picture": None, "privacy_going": ""}
    points, complete = site.privacy.points(ledger, spent.delta)
    going = "" if complete else f"{len(points)} of {len(privacy_curve.chosen(len(ledger.spends)))}"
    if not points:
        return {"privacy_picture": None, "privacy_going": going}
    from protofed.deploy.pages.hospital import figures  # with matplotlib, which takes a second

    key = "privacy", tuple(points), spent.budget, spent.delta
    picture = site.pictures.of(key, figures.privacy_sketch(points, spent))
    return {"privacy_picture": picture, "privacy_going": going}


def unix(at: str) -> float:
    """The Unix time of one in RFC 3339; 0: it is none."""
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return 0.0
