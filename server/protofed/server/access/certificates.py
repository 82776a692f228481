"""The certificates that may call this server, and those that no longer may."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from protofed.common.errors import ConfigError, short
from protofed.common.pki.certificate import Party, read_certificate
from protofed.common.pki.identity import Identity
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import CertificateRow

log = structlog.get_logger()
FIRST_OPERATORS = "operators"  # folder beside the server's own certificate: those who may register others
SHORTEST = 8  # digits of a fingerprint that name it
SOON_S = 30 * 86_400.0


class Certificates:
    """What the ledger says, with a copy in memory that any thread may read; written on the ledger's thread.

    Args:
        clock: seconds of the Unix epoch.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._ledger, self._clock = ledger, clock
        self._known = {row.fingerprint: row for row in ledger.certificates()}

    def find(self, fingerprint: str) -> CertificateRow | None:
        """A certificate that was registered, whatever became of it."""
        return self._known.get(fingerprint)

    def all(self) -> list[CertificateRow]:
        """By party, name and the time they were registered."""
        return sorted(self._known.values(), key=lambda row: (row.party, row.name, row.added_at))

    def status(self, row: CertificateRow) -> str:
        """As `CertificateRow.status`, now."""
        return row.status(self._clock())

    def until(self, party: Party, name: str) -> float:
        """When the last of somebody's valid certificates ends; 0: there is none."""
        return max((row.not_after for row in self._valid() if (row.party, row.name) == (party, name)), default=0.0)

    def ending(self, within_s: float = SOON_S) -> list[CertificateRow]:
        """The valid certificates that end soon and have no successor yet."""
        until = self._clock() + within_s
        return [row for row in self._valid() if row.not_after < until and row.not_after == self._last(row)]

    def register(self, pem: str | bytes, where: str = "the certificate") -> CertificateRow:
        """Let a certificate call; once more is no harm.

        Raises:
            ConfigError: it is no site's or operator's, it has expired, or it was revoked.
        """
        said = read_certificate(pem.encode() if isinstance(pem, str) else pem, where)
        if said.party is Party.SERVER:
            raise ConfigError(f"{where} is a server's; expected a site's or an operator's")
        if (known := self.find(said.fingerprint)) is not None:
            if known.revoked_at is not None:
                told = f"was revoked on {date(known.revoked_at)}: {known.reason}"
                raise ConfigError(f"{where} {told}; that is for ever: make a new key and certificate")
            return known
        begins, ends = said.not_before.timestamp(), said.not_after.timestamp()
        row = CertificateRow(said.fingerprint, said.party, said.name, begins, ends, self._clock())
        if self.status(row) == "expired":
            raise ConfigError(f"{where} expired on {date(ends)}; expected one that is valid")
        self._ledger.register(row)
        self._known[row.fingerprint] = row
        log.info("certificate registered", **_whose(row), fingerprint=row.fingerprint)
        return row

    def revoke(self, which: str, reason: str) -> list[CertificateRow]:
        """Let a certificate call no more, at once and for ever.

        Args:
            which: a fingerprint or its beginning, or a name: all certificates of that name.

        Raises:
            ConfigError: nobody has such a certificate, or it is somebody's whose other ones are not meant.
        """
        gone = []
        for row in self._named(which):
            if row.revoked_at is None:
                row = replace(row, revoked_at=self._clock(), reason=reason)
                self._ledger.revoke(row)
                self._known[row.fingerprint] = row
                log.warning("certificate revoked", **_whose(row), fingerprint=row.fingerprint, reason=reason)
            gone.append(row)
        return gone

    def welcome(self, folder: Path) -> None:
        """Register the first operators: the certificates in `operators/` of the server's identity folder.

        Raises:
            ConfigError: one of them is no operator's, or cannot be read.
        """
        for path in sorted((folder / FIRST_OPERATORS).glob("*.pem")):
            said = read_certificate(path.read_bytes(), str(path))
            if said.party is not Party.OPERATOR:
                raise ConfigError(f"{path} is the {said}; here are operators' only, all others are registered by them")
            if self.find(said.fingerprint) is None and said.not_after.timestamp() > self._clock():
                self.register(path.read_bytes(), str(path))

    def _named(self, which: str) -> Iterable[CertificateRow]:
        exact = [row for row in self.all() if row.name == which]
        begun = [row for row in self.all() if len(which) >= SHORTEST and row.fingerprint.startswith(which.lower())]
        if not (found := exact or begun):
            raise ConfigError(f"no certificate is registered under '{short(which)}'; `protofed certs list` has them")
        if len({(row.party, row.name) for row in found}) > 1:
            told = ", ".join(f"{row.party} {row.name}" for row in found)
            raise ConfigError(f"'{short(which)}' is more than one ({told}); give a fingerprint")
        return found

    def _valid(self) -> list[CertificateRow]:
        return [row for row in list(self._known.values()) if self.status(row) == "valid"]

    def _last(self, row: CertificateRow) -> float:
        return self.until(Party(row.party), row.name)


def _whose(row: CertificateRow) -> dict[str, str]:
    """For the log: `site` or `operator`."""
    return {row.party: row.name}


def date(seconds: float) -> str:
    """Of the Unix epoch, as UTC in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def tell_expiry(own: Identity, certificates: Certificates) -> None:
    """Warn of the certificates that will end soon, the server's own first."""
    left = own.certificate.not_after.timestamp() - time.time()
    if left < SOON_S:
        told = {"until": date(own.certificate.not_after.timestamp()), "days_left": int(left // 86_400)}
        log.warning("this server's certificate ends soon; renew it: protofed certs renew", **told)
    for row in certificates.ending():
        log.warning("a certificate ends soon", **_whose(row), until=date(row.not_after))
