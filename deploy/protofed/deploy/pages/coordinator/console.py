"""The coordinator's program: its pages, whom it acts for, and its first page with what needs a look."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import count
from protofed.common.pki.identity import Party, read_identity
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.snapshot import ENDED, Attention
from protofed.deploy.operator.snapshot_builder import place, sites, waiting
from protofed.deploy.operator.tables import CERTIFICATE_SOON_S
from protofed.deploy.pages.coordinator.runs import CoordinatorRuns, FigurePages, StartPages
from protofed.deploy.pages.coordinator.sites import CertificatePages, SitePages
from protofed.deploy.pages.pictures import Pictures
from protofed.deploy.pages.shell import FRAGMENT, Page, Program, find_shell
from protofed.deploy.tables import printable
from protofed.protos.v1 import operator_pb2 as pb

RUNS_SHOWN: Final = 20
SITES_SHOWN: Final = 60  # those with problems first; more are on the page of sites


@dataclass(frozen=True)
class RunOverview:
    """A run in the list.

    Attributes:
        doing: what it waits for, in a sentence; or its phase, or why it ended.
        blocked: it stands still until somebody does something.
    """

    info: pb.RunInfo
    doing: str
    blocked: bool


@dataclass(frozen=True)
class CoordinatorOverview:
    """The page `/`."""

    operator: Operator

    def routes(self) -> Sequence[BaseRoute]:
        """Its route."""
        return [Route("/", self.show)]

    def show(self, request: Request) -> Response:
        """Runs that go on first, in the queue's order, then the others, the newest first."""
        # First: where the server refuses the old certificate, the page that says so says this, too.
        if FRAGMENT not in request.query_params and (problem := self.operator.identity_problem):
            find_shell(request).access.notify(
                f"This page goes on with the certificate of before: {problem}", error=True
            )
        runs, reported = self.operator.runs(), self.operator.sites()
        page = Page.of(request.query_params.get("runs", ""), len(runs), RUNS_SHOWN)
        going = [info for info in runs if info.status not in ENDED]
        ended = [info for info in reversed(runs) if info.status in ENDED]
        running = next((info.run for info in runs if info.status == "running"), None)
        newest = self.operator.show(running, 1).rounds[-1:] if running else []
        shown_sites = sites(reported, newest[0] if newest else None, ended=False)
        troubled = sum(site.care is Attention.BAD for site in shown_sites)
        return find_shell(request).page(
            request,
            "overview.html.j2",
            {
                "lines": [line(info, runs) for info in page.cut([*going, *ended])],
                "page": page,
                "going": any(info.status == "running" for info in runs),
                "said": f"{count(len(going), 'unfinished run')}, {count(troubled, 'site')} in trouble",
                "of_round": f"round {newest[0].round}" if newest else "",
                "sites": shown_sites[:SITES_SHOWN],
                "sites_left": max(0, len(shown_sites) - SITES_SHOWN),
                "ending": ending(self.operator.certificates(), time.time()),
            },
        )


def line(info: pb.RunInfo, runs: Sequence[pb.RunInfo]) -> RunOverview:
    """A run with what it does, in words."""
    what = waiting(info)
    queue = "" if info.status in ENDED else place(info.run, runs)
    doing = queue or (what.sentence if what is not None else printable(info.reason or info.phase))
    return RunOverview(info, doing, what is not None and what.blocked)


def ending(certificates: Iterable[pb.CertificateInfo], now: float) -> list[pb.CertificateInfo]:
    """The last valid certificates of their names that end within 30 days, the first to end first."""
    last: dict[tuple[str, str], pb.CertificateInfo] = {}
    for one in certificates:
        key = (one.party, one.name)
        if one.status == "valid" and (key not in last or one.not_after > last[key].not_after):
            last[key] = one
    soon = [one for one in last.values() if one.not_after - now < CERTIFICATE_SOON_S]
    return sorted(soon, key=lambda one: (one.not_after, one.party, one.name))


TEMPLATES: Final = Path(__file__).parent / "templates"


def console(operator: Operator, server: str, identity: Path | None, ca: Path | None = None) -> Program:
    """The pages of one server.

    Args:
        server: host:port; `operator` is connected to it.
        identity: folder with the operator's certificate; None: plain text.
        ca: folder of the CA that signs; None: it is elsewhere, and requests are signed there.

    Raises:
        ConfigError: the identity cannot be used, or there is no CA in the folder.
    """
    certificates, pictures = CertificatePages(operator, ca), Pictures()
    pages = (
        CoordinatorOverview(operator),
        CoordinatorRuns(operator),
        FigurePages(operator, pictures),
        SitePages(operator),
        StartPages(operator),
        certificates,
    )

    def context() -> Mapping[str, object]:
        return {"can_sign": certificates.signs}

    return Program(
        title="protofed console",
        whom=f"{_who(identity)} at {server}",
        navigation=(
            ("/", "Overview"),
            ("/start", "Start a run"),
            ("/sites", "Sites"),
            ("/certificates", "Certificates"),
        ),
        routes=[route for page in (*pages, pictures) for route in page.routes()],
        templates=TEMPLATES,
        context=context,
    )


def _who(identity: Path | None) -> str:
    """The name under which the server's audit log records the orders of this page."""
    if identity is None:
        return "without a certificate, in plain text,"
    return f"operator {read_identity(identity, Party.OPERATOR, datetime.now(UTC)).certificate.name}"
