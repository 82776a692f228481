"""Tables of certificates: party, name, fingerprint, dates and days left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protofed.common.clock import stamp
from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import load
from protofed.common.pki.identity import AUTHORITIES, CERTIFICATE, Certificate, read_certificate
from protofed.deploy.certs import files
from protofed.deploy.certs.authority import ISSUED

RED_DAYS, YELLOW_DAYS = 7, 30


@dataclass(frozen=True)
class CertRow:
    """A certificate in a list.

    Attributes:
        party: site, operator, server or "ca".
        fingerprint: SHA-256 of the certificate, in hex.
        roles: that its registration grants; empty: only a server knows them.
        revoked: when and why; None: not revoked, or unknown, since only a server knows of revocations.
    """

    party: str
    name: str
    fingerprint: str
    not_before: datetime
    not_after: datetime
    revoked: str | None = None
    roles: tuple[str, ...] = ()

    def days_left(self, now: datetime) -> int:
        """Whole days until it ends; negative once it has expired."""
        return (self.not_after - now).days

    def plain(self, now: datetime) -> dict[str, Any]:
        """The row as plain data, for JSON."""
        dates = {"not_before": stamp(self.not_before), "not_after": stamp(self.not_after)}
        return {**asdict(self), **dates, "days_left": self.days_left(now)}


def of_identity(folder: Path) -> list[CertRow]:
    """The certificate of an identity folder and the CAs that it trusts.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    certificate = read_certificate(files.read(folder / CERTIFICATE), str(folder / CERTIFICATE))
    return [_row(certificate), *_authorities(folder / AUTHORITIES)]


def of_authority(folder: Path) -> list[CertRow]:
    """A CA and all certificates that it signed, sorted by party and name, the newest last.

    Raises:
        ConfigError: there is no CA, or a file is damaged.
    """
    issued = [read_certificate(files.read(path), str(path)) for path in (folder / ISSUED).glob("*.pem")]
    issued.sort(key=lambda certificate: (certificate.party, certificate.name, certificate.not_before))
    return [*_authorities(folder / AUTHORITIES), *map(_row, issued)]


def of_server(certificates: Iterable[Any]) -> list[CertRow]:
    """A server's certificates, as `CertificateInfo` messages."""
    return [_registered(info) for info in certificates]


def table(rows: Sequence[CertRow], now: datetime) -> RenderableType:
    """A row for each certificate; one that ends soon is yellow (30 days) or red (7)."""
    if not rows:
        return Text("No certificates yet. Ask for one with: protofed certs request")
    certificates = Table(box=None, header_style="bold", pad_edge=False)
    columns = ["party", "name", "fingerprint", "from", "until", "days left", "revoked"]
    if has_roles := any(row.roles for row in rows):
        columns.insert(2, "roles")
    for column in columns:
        certificates.add_column(
            column, no_wrap=column not in ("name", "revoked"), justify="right" if "left" in column else "left"
        )
    for row in rows:
        days = row.days_left(now)
        left = Text("expired" if days < 0 else str(days), style=style(days))
        dates = (f"{date:%Y-%m-%d}" for date in (row.not_before, row.not_after))
        revoked = Text(row.revoked or "", style="red")
        roles = [", ".join(row.roles)] if has_roles else []
        certificates.add_row(row.party, row.name, *roles, row.fingerprint[:16], *dates, left, revoked)
    return certificates


def style(days: int) -> str:
    """The rich style of a number of days left."""
    return "bold red" if days < RED_DAYS else "yellow" if days < YELLOW_DAYS else ""


def _authorities(path: Path) -> list[CertRow]:
    if not path.exists():
        raise ConfigError(f"cannot read {path}: No such file; expected the CA's certificate beside the others")
    return [_authority(certificate) for certificate in load(files.read(path), str(path))]


def _authority(certificate: x509.Certificate) -> CertRow:
    names = certificate.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)
    dates = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    return CertRow("ca", str(names[0].value) if names else "", certificate.fingerprint(SHA256()).hex(), *dates)


def _row(certificate: Certificate) -> CertRow:
    return CertRow(
        certificate.party, certificate.name, certificate.fingerprint, certificate.not_before, certificate.not_after
    )


def _registered(info: Any) -> CertRow:
    dates = (_at(info.not_before), _at(info.not_after))
    return CertRow(info.party, info.name, info.fingerprint, *dates, _revocation(info), tuple(info.roles))


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _revocation(info: Any) -> str | None:
    return f"{stamp(_at(info.revoked_at))}: {info.reason}" if info.revoked_at else None
