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
from protofed.common.address import find_folder
from protofed.common.clock import utc_now
from protofed.common.errors import ConfigError, ProtofedError, count
from protofed.common.pki.certificate import read_certificate
from protofed.common.pki.identity import CERTIFICATE
from protofed.common.protocol.messages import Role
from protofed.deploy.daemons import readyz
from protofed.deploy.doctor import machine
from protofed.deploy.pages.hospital.examination import Examination, Examiner
from protofed.deploy.pages.hospital.site import HospitalSite, chosen
from protofed.deploy.pages.shell import find_shell, read_form
from protofed.deploy.site import orders
from protofed.deploy.site.offered_runs import all_runs
from protofed.deploy.site.partners import PartnersView

UNDECIDED: Final = (ApprovalStatus.WAITING, ApprovalStatus.CHANGED)
RUNS: Final[Mapping[bool | None, str]] = {True: "running", False: "not running", None: "unknown"}  # of a daemon
RECENT_S: Final = 120.0  # the longest that a working daemon is silent: a heartbeat that waits, and a slow disk


@dataclass(frozen=True)
class HospitalOverview:
    """The page `/`."""

    site: HospitalSite

    def routes(self) -> Sequence[BaseRoute]:
        """Its route."""
        return [Route("/", self.show)]

    def show(self, request: Request) -> Response:
        """The whole page as of now."""
        site = self.site
        log, rows = site.log.look(), list(reversed(all_runs(site.approvals)))
        runs, pause, activity = (
            machine.has_running_daemon(site.state),
            orders.open_pause(site.state).current(),
            site.log.activity(),
        )
        # Under a policy that approves by itself, the daemon records that once it meets the run.
        waiting = [] if site.approves_by_itself() else [row for row in rows if row["approval"] in UNDECIDED]
        heard = unix(activity.at)
        working = bool(runs and activity.doing not in ("", "idle") and time.time() - heard < RECENT_S)
        disk = shutil.disk_usage(site.state)
        return find_shell(request).page(
            request,
            "overview.html.j2",
            {
                "log": log,
                "daemon": RUNS[runs],
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
                **_whom(site),
                **_sent(site),
                **_certificate(site),
                **_spent(site),
                **_privacy_picture(site),
            },
        )


def _missing(site: HospitalSite) -> list[str]:
    """What a running daemon lacks, by its own /readyz; none if it has no such address."""
    return readyz.missing(site.state) if (site.state / readyz.ADDRESS_FILE).exists() else []


def _whom(site: HospitalSite) -> Mapping[str, Any]:
    """The institution that runs the server, by the confirmed list; the server's address; how many other sites."""
    try:
        view = PartnersView.of(site.state)
        server = "" if site.settings is None else site.settings.read().server
    except ProtofedError:  # `_partners`, or the health page, says why
        return {"coordinator": "", "servers": "", "partners": 0, "listed": 0}
    servers = server or " and ".join(sorted({one.server for one in site.log.leavings() if one.server}))
    if (listed := view.listed) is None:
        return {"coordinator": "", "servers": servers, "partners": 0, "listed": 0}
    others = sum(one.identity != view.own for one in listed.partners)
    return {"coordinator": listed.coordinator, "servers": servers, "partners": others, "listed": listed.number}


def _sent(site: HospitalSite) -> Mapping[str, Any]:
    """Updates and scores that were sent, by the audit log, and when last; `sent_more`: older records are not here."""
    items = [one for one in site.log.leavings() if not one.why]
    return {
        "sent_bytes": sum(one.size for one in items),
        "sent_rounds": len({(one.run, max(1, one.round)) for one in items}),
        "sent_runs": len({one.run for one in items}),
        "sent_last": unix(items[0].at) if items else 0.0,
        "sent_more": bool(site.log.gaps()),
    }


def _certificate(site: HospitalSite) -> Mapping[str, Any]:
    """When the site's certificate ends, in Unix time (0: it has none, or the settings are not known), and if soon."""
    try:
        identity = None if site.settings is None else find_folder(site.settings.read().identity)
        if identity is None:
            return {"certificate_end": 0.0, "certificate_soon": False, "certificate_problem": ""}
        file = identity / CERTIFICATE
        end = read_certificate(file.read_bytes(), str(file)).not_after
    except (ProtofedError, OSError) as error:
        return {"certificate_end": 0.0, "certificate_soon": False, "certificate_problem": str(error)}
    soon = end - utc_now() < machine.SOON
    return {"certificate_end": end.timestamp(), "certificate_soon": soon, "certificate_problem": ""}


def _partners(site: HospitalSite) -> str:
    """Why the site takes part in no secure aggregation; empty: it does, or no policy asks for partners."""
    try:
        if site.settings is not None and Role.TRAINER not in site.settings.read().roles:
            return ""  # an evaluator is in no secure aggregation
        policy = site.policy()
        required = policy is not None and policy.rules.partners == "confirmed"
        return Partners(site.state).problem(required=required)
    except ProtofedError as error:
        return str(error)


def _spent(site: HospitalSite) -> Mapping[str, Any]:
    """The budget, or why it is not known."""
    try:
        return {"spent": site.spent(), "spent_problem": ""}
    except ProtofedError as error:
        return {"spent": None, "spent_problem": str(error)}


def _privacy_picture(site: HospitalSite) -> Mapping[str, Any]:
    """Epsilon over the fits; `privacy_going`: how many points are known of how many."""
    try:
        spent, ledger = site.spent(), site.ledger()
    except ProtofedError:  # `_spent` says why
        return {"privacy_picture": None, "privacy_going": ""}
    points, complete = site.privacy.points(ledger, spent.delta)
    going = "" if complete else f"{len(points)} of {len(chosen(len(ledger.spends)))}"
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


# The order of the table: what is to be done comes first, in the doctor's order, in which causes come first.
ORDER: Final = {"finding": 0, "warning": 1, "fine": 2, "skipped": 3}
NO_SETTINGS: Final = "this page was started without the daemon's settings: protofed client page --settings site.toml"


@dataclass(frozen=True)
class HealthPages:
    """The pages below `/health`."""

    site: HospitalSite

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
        examination = None if examiner is None else examiner.newest()
        going = None if examiner is None else examiner.going()
        disk = shutil.disk_usage(self.site.state)
        return find_shell(request).page(
            request,
            "health.html.j2",
            {
                "has_settings": examiner is not None,
                "found": examination,
                "going": going,
                "rows": in_order(examination),
                "free": disk.free,
                "total": disk.total,
                "low": disk.free < machine.LOW_BYTES,
                "full": disk.free < machine.FULL_BYTES,
                "said": said(examination),
                **self._daemon(),
                **self._device(examination),
            },
        )

    def begin(self, request: Request) -> Response:
        """Examine the site."""
        whole = read_form(request).get("whole", "") == "yes"
        return started(request, require_examiner(self.site).begin(whole=whole), "/health")

    def stop(self, request: Request) -> Response:
        """Stop what goes on, of whatever kind."""
        stopped = require_examiner(self.site).stop()
        path = read_form(request).get("back", "")
        back = path if path.startswith("/runs/") else "/health"
        return find_shell(request).done(back, "stopped" if stopped else "no check goes on")

    def _daemon(self) -> Mapping[str, Any]:
        runs = machine.has_running_daemon(self.site.state)
        answers = bool(runs) and (self.site.state / readyz.ADDRESS_FILE).exists()
        return {"daemon": RUNS[runs], "answers": answers, "missing": _missing(self.site) if answers else []}

    def _device(self, examination: Examination | None) -> Mapping[str, Any]:
        """The device of the settings, and what the newest examination said about it."""
        row = next((row for row in (examination.rows if examination else ()) if row["check"] == "device"), None)
        finding = row["seen"] if row and row["state"] == "fine" else ""
        try:
            device = "" if self.site.settings is None else self.site.settings.read().device
        except ProtofedError as error:
            return {"device": "", "device_seen": "", "settings_problem": str(error)}
        return {"device": device, "device_seen": finding, "settings_problem": ""}


def require_examiner(site: HospitalSite) -> Examiner:
    """The site's examiner; ConfigError if the page was started without settings."""
    if site.examiner is None:
        raise ConfigError(NO_SETTINGS)
    return site.examiner


def started(request: Request, begins: bool, path: str) -> Response:
    """The answer to an order to begin an examination."""
    if not begins:
        find_shell(request).access.notify("another check goes on: wait for its end, or stop it", error=True)
    return find_shell(request).done(path)


def in_order(examination: Examination | None) -> list[Mapping[str, Any]]:
    """The rows of an examination, what is to be done first."""
    return sorted(examination.rows if examination else (), key=lambda row: ORDER[row["state"]])


def said(examination: Examination | None) -> str:
    """What a screen reader hears once it changes: the beginning and the end, and no step between."""
    if examination is None:
        return ""
    if examination.goes_on:
        return f"{examination.what} goes on"
    return f"{examination.what} has ended: {examination.problem or examination.verdict}"
