"""What certificates look like to people: whose, which, and how long still."""

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
        party: also "ca".
        revoked: when and why; None: it is not, or nobody here knows.
    """

    party: str
    name: str
    fingerprint: str
    not_before: datetime
    not_after: datetime
    revoked: str | None = None

    def days_left(self, now: datetime) -> int:
        """Whole days; negative from the moment on at which it has expired."""
        return (self.not_after - now).days

    def plain(self, now: datetime) -> dict[str, Any]:
        """As JSON has it."""
        dates = {"not_before": stamp(self.not_before), "not_after": stamp(self.not_after)}
        return {**asdict(self), **dates, "days_left": self.days_left(now)}


def of_identity(folder: Path) -> list[CertRow]:
    """The certificate of an identity folder, and the CAs that it trusts.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    own = read_certificate(files.read(folder / CERTIFICATE), str(folder / CERTIFICATE))
    return [_row(own), *_authorities(folder / AUTHORITIES)]


def of_authority(folder: Path) -> list[CertRow]:
    """A CA and all that it has signed, by party and name, the newest last.

    Raises:
        ConfigError: there is no CA, or a file is damaged.
    """
    issued = [read_certificate(files.read(path), str(path)) for path in (folder / ISSUED).glob("*.pem")]
    issued.sort(key=lambda one: (one.party, one.name, one.not_before))
    return [*_authorities(folder / AUTHORITIES), *map(_row, issued)]


def of_server(certificates: Iterable[Any]) -> list[CertRow]:
    """What a server knows: messages whose times are seconds since 1970."""
    return [
        CertRow(one.party, one.name, one.fingerprint, _at(one.not_before), _at(one.not_after), _revocation(one))
        for one in certificates
    ]


def table(rows: Sequence[CertRow], now: datetime) -> RenderableType:
    """A row a certificate; what ends soon is yellow (30 days) or red (7)."""
    if not rows:
        return Text("No certificates yet. Ask for one with: protofed certs request")
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("party", "name", "fingerprint", "from", "until", "days left", "revoked"):
        shown.add_column(
            column, no_wrap=column not in ("name", "revoked"), justify="right" if "left" in column else "left"
        )
    for row in rows:
        days = row.days_left(now)
        left = Text("expired" if days < 0 else str(days), style=style(days))
        dates = (f"{when:%Y-%m-%d}" for when in (row.not_before, row.not_after))
        shown.add_row(row.party, row.name, row.fingerprint[:16], *dates, left, Text(row.revoked or "", style="red"))
    return shown


def style(days: int) -> str:
    """How a number of days left is shown."""
    return "bold red" if days < RED_DAYS else "yellow" if days < YELLOW_DAYS else ""


def _authorities(path: Path) -> list[CertRow]:
    if not path.exists():
        raise ConfigError(f"cannot read {path}: No such file; expected the CA's certificate beside the others")
    return [_authority(one) for one in load(files.read(path), str(path))]


def _authority(one: x509.Certificate) -> CertRow:
    name = one.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)
    dates = (one.not_valid_before_utc, one.not_valid_after_utc)
    return CertRow("ca", str(name[0].value) if name else "", one.fingerprint(SHA256()).hex(), *dates)


def _row(one: Certificate) -> CertRow:
    return CertRow(one.party, one.name, one.fingerprint, one.not_before, one.not_after)


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _revocation(one: Any) -> str | None:
    return f"{stamp(_at(one.revoked_at))}: {one.reason}" if one.revoked_at else None
