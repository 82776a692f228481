"""The coordinator's program: its pages, and whom it acts for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from protofed.common.pki.identity import Party, read_identity
from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.coordinator.certificates import CertificatePages
from protofed.deploy.pages.coordinator.figures import FigurePages
from protofed.deploy.pages.coordinator.overview import CoordinatorOverview
from protofed.deploy.pages.coordinator.runs import CoordinatorRuns
from protofed.deploy.pages.coordinator.sites import SitePages
from protofed.deploy.pages.coordinator.start import StartPages
from protofed.deploy.pages.pictures import Pictures
from protofed.deploy.pages.shell import Program

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
    """The name by which the server's audit has the orders of this page."""
    if identity is None:
        return "without a certificate, in plain text,"
    return f"operator {read_identity(identity, Party.OPERATOR, datetime.now(UTC)).certificate.name}"
