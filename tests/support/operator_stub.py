"""A stand-in for an operator's connection to a server, as far as certificates go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from protofed.common.errors import UnavailableError
from protofed.common.pki.identity import read_certificate

REVOKED = datetime(2030, 5, 1, 12, tzinfo=UTC)


@dataclass
class CertificateInfo:
    """A server's message about a certificate."""

    party: str
    name: str
    fingerprint: str
    not_before: float
    not_after: float
    revoked_at: float = 0.0
    reason: str = ""
    roles: Sequence[str] = ()


@dataclass
class OperatorStub:
    """What `certs` needs of an operator's connection."""

    address: str
    identity: Path | None
    plaintext: bool
    known: ClassVar[dict[str, CertificateInfo]] = {}
    dialled: ClassVar[list[tuple[str, Path | None, bool]]] = []
    down: ClassVar[bool] = False
    renewals: ClassVar[list[bool]] = []  # what each registration said

    def __enter__(self) -> OperatorStub:
        self.dialled.append((self.address, self.identity, self.plaintext))
        if OperatorStub.down:
            raise UnavailableError(f"no server at {self.address}")
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def register(self, pem: str, roles: Sequence[str] = (), *, renewal: bool = False) -> CertificateInfo:
        one = read_certificate(pem.encode(), "pem")
        dates = one.not_before.timestamp(), one.not_after.timestamp()
        info = CertificateInfo(one.party, one.name, one.fingerprint, *dates, roles=roles or ["trainer"])
        self.known[one.fingerprint] = info
        self.renewals.append(renewal)
        return info

    def revoke(self, name_or_fingerprint: str, reason: str) -> list[CertificateInfo]:
        found = [one for one in self.known.values() if name_or_fingerprint in (one.name, one.fingerprint)]
        for one in found:
            one.revoked_at, one.reason = REVOKED.timestamp(), reason
        return found

    def certificates(self) -> list[CertificateInfo]:
        return list(self.known.values())
