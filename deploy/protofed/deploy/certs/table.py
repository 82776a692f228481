"""Tables of certificates: party, name, key, dates and days left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from rich.console import RenderableType
from rich.text import Text

from protofed.common.clock import stamp
from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import code, load
from protofed.common.pki.identity import AUTHORITIES, CERTIFICATE, read_certificate
from protofed.deploy.certs import files
from protofed.deploy.certs.lifecycle import ISSUED
from protofed.deploy.tables import Column, TableStyle, terminal

RED_DAYS, YELLOW_DAYS = 7, 30
KEYS = TableStyle(heads="bold")


@dataclass(frozen=True)
class CertRow:
    """A certificate in a list.

    Attributes:
        party: site, operator, server or "ca".
        fingerprint: SHA-256 of the certificate, in hex.
        key_fingerprint: SHA-256 of its public key, in hex; empty: a server knows certificates, not their keys.
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
    key_fingerprint: str = ""

    @property
    def key_code(self) -> str:
        """The key's short code, for people to compare; empty if the key is unknown."""
        return code(self.key_fingerprint) if self.key_fingerprint else ""

    def days_left(self, now: datetime) -> int:
        """Whole days until it ends; negative once it has expired."""
        return (self.not_after - now).days

    def plain(self, now: datetime) -> dict[str, Any]:
        """The row as plain data, for JSON."""
        dates = {"not_before": stamp(self.not_before), "not_after": stamp(self.not_after)}
        return {**asdict(self), **dates, "key_code": self.key_code, "days_left": self.days_left(now)}


def of_identity(folder: Path) -> list[CertRow]:
    """The certificate of an identity folder and the CAs that it trusts.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    own = of_certificate(files.read(folder / CERTIFICATE), str(folder / CERTIFICATE))
    return [own, *_authorities(folder / AUTHORITIES)]


def of_authority(folder: Path) -> list[CertRow]:
    """A CA and all certificates that it signed, sorted by party and name, the newest last.

    Raises:
        ConfigError: there is no CA, or a file is damaged.
    """
    issued = [of_certificate(files.read(path), str(path)) for path in (folder / ISSUED).glob("*.pem")]
    issued.sort(key=lambda row: (row.party, row.name, row.not_before))
    return [*_authorities(folder / AUTHORITIES), *issued]


def of_certificate(pem: bytes, where: str) -> CertRow:
    """A party's certificate.

    Raises:
        ConfigError: it is none; `where` names it.
    """
    one, key = read_certificate(pem, where), load(pem, where)[0].public_key()
    return CertRow(
        one.party, one.name, one.fingerprint, one.not_before, one.not_after, key_fingerprint=files.key_fingerprint(key)
    )


def of_server(certificates: Iterable[Any]) -> list[CertRow]:
    """A server's certificates, as `CertificateInfo` messages."""
    return [_registered(info) for info in certificates]


def table(rows: Sequence[CertRow], now: datetime) -> RenderableType:
    """A row for each certificate; one that ends soon is yellow (30 days) or red (7).

    People compare keys; where these are unknown, at a server, the fingerprint is what `certs revoke` takes.
    """
    if not rows:
        return Text("No certificates yet. Ask for one with: protofed certs request")
    columns = _columns(now)
    visible = [column for column in columns if any(str(column.cell(row)) for row in rows)]
    return terminal(visible, rows, KEYS)


def _columns(now: datetime) -> Sequence[Column[CertRow]]:
    """A column without anything is left out.

    Narrow terminals wrap names and reasons; a date or a code that is cut says something else.
    """
    return (
        Column("party", lambda row: row.party, width=8),
        Column("name", lambda row: row.name, width=8, wraps=True),
        Column("roles", lambda row: ", ".join(row.roles), width=9, wraps=True),
        Column("key", lambda row: row.key_code, width=19),
        Column("fingerprint", lambda row: "" if row.key_fingerprint else row.fingerprint[:16], width=16),
        Column("from", lambda row: f"{row.not_before:%Y-%m-%d}" if row.not_before > now else "", width=10),
        Column("until", lambda row: f"{row.not_after:%Y-%m-%d}", width=10),
        Column("days left", lambda row: _days(row.days_left(now)), width=9, right=True),
        Column("revoked", lambda row: Text(row.revoked or "", style="red"), width=20, wraps=True),
    )


def _days(days: int) -> Text:
    return Text("expired" if days < 0 else str(days), style=style(days))


def style(days: int) -> str:
    """The rich style of a number of days left."""
    return "bold red" if days < RED_DAYS else "yellow" if days < YELLOW_DAYS else ""


def _authorities(path: Path) -> list[CertRow]:
    if not path.exists():
        raise ConfigError(f"cannot read {path}: No such file; expected the CA's certificate beside the others")
    return [of_ca(certificate) for certificate in load(files.read(path), str(path))]


def of_ca(certificate: x509.Certificate) -> CertRow:
    """A CA's certificate."""
    names = certificate.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)
    dates = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    fingerprints = (certificate.fingerprint(SHA256()).hex(), files.key_fingerprint(certificate.public_key()))
    return CertRow("ca", str(names[0].value) if names else "", fingerprints[0], *dates, key_fingerprint=fingerprints[1])


def _registered(info: Any) -> CertRow:
    dates = (_at(info.not_before), _at(info.not_after))
    return CertRow(info.party, info.name, info.fingerprint, *dates, _revocation(info), tuple(info.roles))


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _revocation(info: Any) -> str | None:
    return f"{stamp(_at(info.revoked_at))}: {info.reason}" if info.revoked_at else None
