"""The certificates that were registered with this server, valid, expired or revoked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from protofed.common.errors import ConfigError, ConflictError, short
from protofed.common.pki.certificate import Party, read_certificate
from protofed.common.pki.identity import Identity
from protofed.common.protocol.messages import Role
from protofed.common.protocol.roles import OPERATOR, check_roles
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import CertificateRow

log = structlog.get_logger()
FIRST_OPERATORS = "operators"  # folder beside the server's certificate: the operators who register everybody else
SHORTEST = 8  # hex digits of a fingerprint that are enough to name its certificate
SOON_S = 30 * 86_400.0  # before the end of a certificate: the time in which the log warns


class Certificates:
    """The ledger's certificates, with a copy in memory.

    Every call looks its certificate up, so reading must not wait for the database. Any thread may read the copy. Only
    the ledger's thread registers and revokes.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._ledger, self._clock = ledger, clock
        self._rows = {row.fingerprint: row for row in ledger.certificates()}

    def find(self, fingerprint: str) -> CertificateRow | None:
        """A registered certificate, whether it is still valid or not."""
        return self._rows.get(fingerprint)

    def all(self) -> list[CertificateRow]:
        """Sorted by party, name and the time of registration."""
        return sorted(self._rows.values(), key=lambda row: (row.party, row.name, row.added_at))

    def status(self, row: CertificateRow) -> str:
        """As `CertificateRow.status`, by this object's clock."""
        return row.status(self._clock())

    def until(self, party: Party, name: str) -> float:
        """When the last valid certificate of a name ends, in Unix time; 0: it has none."""
        return max((row.not_after for row in self._valid() if (row.party, row.name) == (party, name)), default=0.0)

    def roles(self, party: Party, name: str) -> frozenset[str]:
        """The roles that the valid certificates of a name have."""
        rows = [row for row in self._valid() if (row.party, row.name) == (party, name)]
        return frozenset(role for row in rows for role in row.roles)

    def ending(self, within_s: float = SOON_S) -> list[CertificateRow]:
        """Valid certificates that end within `within_s` seconds and whose holder has none that lasts longer."""
        until = self._clock() + within_s
        return [row for row in self._valid() if row.not_after < until and row.not_after == self._last(row)]

    def register(
        self, pem: str | bytes, where: str = "the certificate", roles: Iterable[str] = (), *, renewal: bool = False
    ) -> CertificateRow:
        """Let a certificate call from now on; registering it again changes only its roles, if some are given.

        Args:
            where: names the certificate in errors, such as a path.
            roles: what its holder may be. None: a renewal has the roles of the name's newest certificate, and a site's
                first certificate is a trainer's. An operator's roles must be named.
            renewal: allow that the name has a valid certificate.

        Raises:
            ConfigError: it belongs to neither a site nor an operator, has expired, was revoked, or cannot have a role.
            ConflictError: the name has a valid certificate, and this is no renewal.
        """
        certificate = read_certificate(pem.encode() if isinstance(pem, str) else pem, where)
        if certificate.party is Party.SERVER:
            raise ConfigError(f"{where} is a server's; expected a site's or an operator's")
        granted = check_roles(certificate.party, roles)
        if (registered := self.find(certificate.fingerprint)) is not None:
            if registered.revoked_at is not None:
                raise ConfigError(
                    f"{where} was revoked on {date(registered.revoked_at)}: {registered.reason}; "
                    "that is for ever: make a new key and certificate"
                )
            return self._grant(registered, granted)
        begins, ends = certificate.not_before.timestamp(), certificate.not_after.timestamp()
        row = CertificateRow(certificate.fingerprint, certificate.party, certificate.name, begins, ends, self._clock())
        if self.status(row) == "expired":
            raise ConfigError(f"{where} expired on {date(ends)}; expected one that is valid")
        if not renewal:
            self._check_first(row)
        row = replace(row, roles=granted or self._default_roles(row, renewal=renewal))
        # Ledger first, memory second: what calls may rely on is on disk.
        self._ledger.register(row)
        self._rows[row.fingerprint] = row
        log.info("certificate registered", **_holder(row), fingerprint=row.fingerprint, roles=list(row.roles))
        return row

    def revoke(self, which: str, reason: str) -> list[CertificateRow]:
        """Refuse every call of a certificate from now on; this cannot be undone.

        Args:
            which: a fingerprint or its first digits (at least `SHORTEST`), or a name: all certificates of that name.

        Returns:
            All certificates that `which` names; those that were revoked before keep their date and reason.

        Raises:
            ConfigError: no certificate is registered under `which`, or certificates of several parties or names are.
        """
        revoked = []
        for row in self._matching(which):
            if row.revoked_at is None:
                row = replace(row, revoked_at=self._clock(), reason=reason)
                self._ledger.revoke(row)
                self._rows[row.fingerprint] = row
                log.warning("certificate revoked", **_holder(row), fingerprint=row.fingerprint, reason=reason)
            revoked.append(row)
        return revoked

    def register_first_operators(self, folder: Path) -> None:
        """Register the certificates in `operators/` of the server's identity folder; called at every start.

        Without it nobody could register the first operator. Revoked certificates stay revoked though their files are
        still there.

        Raises:
            ConfigError: a file is not an operator's certificate, or cannot be read.
        """
        for path in sorted((folder / FIRST_OPERATORS).glob("*.pem")):
            certificate = read_certificate(path.read_bytes(), str(path))
            if certificate.party is not Party.OPERATOR:
                raise ConfigError(
                    f"{path} is the {certificate}; expected operators' certificates only: they register all others"
                )
            if self.find(certificate.fingerprint) is None and certificate.not_after.timestamp() > self._clock():
                # Whoever can write into this folder runs the server, and may renew an operator's certificate there.
                self.register(path.read_bytes(), str(path), (OPERATOR,), renewal=True)

    def _check_first(self, row: CertificateRow) -> None:
        """Refuse a second certificate of a name: another key that speaks for it and can fence its daemon."""
        for other in self._of(row):
            if self.status(other) in ("valid", "not-yet-valid"):
                raise ConflictError(
                    f"{row.party} '{row.name}' has a certificate that is valid until {date(other.not_after)} "
                    f"(fingerprint {other.fingerprint[:16]}). If {row.party} '{row.name}' itself asked for another, "
                    "register it with --renewal. Otherwise do not register it, and ask who sent it"
                )

    def _default_roles(self, row: CertificateRow, *, renewal: bool) -> tuple[str, ...]:
        if renewal and (others := self._of(row)):
            return others[-1].roles
        if row.party == Party.OPERATOR:
            raise ConfigError(
                f"operator '{row.name}' would command this server's runs and certificates; if that is meant, register "
                "the certificate with --role operator"
            )
        return (Role.TRAINER.value,)

    def _grant(self, row: CertificateRow, roles: tuple[str, ...]) -> CertificateRow:
        """Give a registered certificate other roles; none: it keeps its roles."""
        if not roles or roles == row.roles:
            return row
        row = replace(row, roles=roles)
        self._ledger.grant(row)
        self._rows[row.fingerprint] = row
        log.warning("roles of a certificate changed", **_holder(row), fingerprint=row.fingerprint, roles=list(roles))
        return row

    def _of(self, row: CertificateRow) -> list[CertificateRow]:
        """All registered certificates of a certificate's name, the newest last."""
        return [other for other in self.all() if (other.party, other.name) == (row.party, row.name)]

    def _matching(self, which: str) -> Iterable[CertificateRow]:
        by_name = [row for row in self.all() if row.name == which]
        by_digits = [row for row in self.all() if len(which) >= SHORTEST and row.fingerprint.startswith(which.lower())]
        if not (rows := by_name or by_digits):
            raise ConfigError(
                f"no certificate is registered under '{short(which)}'; "
                "`protofed certs list --server HOST:PORT` has them"
            )
        if len({(row.party, row.name) for row in rows}) > 1:
            contributors = ", ".join(f"{row.party} {row.name}" for row in rows)
            raise ConfigError(f"'{short(which)}' is more than one ({contributors}); give a fingerprint")
        return rows

    def _valid(self) -> list[CertificateRow]:
        # A copy of the values: the ledger's thread may register one while another thread iterates.
        return [row for row in list(self._rows.values()) if self.status(row) == "valid"]

    def _last(self, row: CertificateRow) -> float:
        return self.until(Party(row.party), row.name)


def _holder(row: CertificateRow) -> dict[str, str]:
    """Log field `site` or `operator`, with the name."""
    return {row.party: row.name}


def date(seconds: float) -> str:
    """Unix time as UTC in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def warn_of_expiry(identity: Identity, certificates: Certificates) -> None:
    """Log a warning for each certificate that ends within `SOON_S`, the server's own first; called once a day."""
    ends = identity.certificate.not_after.timestamp()
    seconds_left = ends - time.time()
    if seconds_left < SOON_S:
        log.warning(
            "this server's certificate ends soon; renew it: protofed certs request --renew",
            until=date(ends),
            days_left=int(seconds_left // 86_400),
        )
    for row in certificates.ending():
        log.warning("a certificate ends soon", **_holder(row), until=date(row.not_after))
