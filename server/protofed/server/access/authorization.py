"""Who may call what: the certificate behind a connection, looked up at every call. A live connection proves nothing."""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from protofed.common.errors import ConfigError, DeniedError, short
from protofed.common.pki.certificate import Party, read_certificate
from protofed.common.protocol.server_info import REGISTERED, UNKNOWN
from protofed.server.access.certificates import Certificates, date
from protofed.server.storage.rows import CertificateRow

PARTIES = {"Federation": Party.SITE, "Operator": Party.OPERATOR}  # whose a service is
HEALTH = "Health"  # everybody's whose certificate the CA signed: it carries nothing
_SOMEBODY = {Party.SITE: "a site", Party.OPERATOR: "an operator"}
_CERTIFICATE = "x509_pem_cert"  # gRPC's name for it


@dataclass(frozen=True)
class Peer:
    """Who calls: of a certificate that the CA signed, whether it is registered here or not.

    Attributes:
        fingerprint: of the certificate; empty in plain text, where nobody can say who calls.
        party: site, operator, server; "unknown" if the certificate does not say, "plaintext" if there is none.
        name: within the party.
    """

    fingerprint: str
    party: str
    name: str

    def __str__(self) -> str:
        return f"{self.party} '{self.name}'"

    def site(self) -> dict[str, str]:
        """For the log: `site`, if it is one's."""
        return {"site": self.name} if self.party == Party.SITE else {}


PLAINTEXT, NOBODY = Peer("", "plaintext", ""), Peer("", "unknown", "")


class Access:
    """The rules: a site's calls need a site's certificate and are the site's own, an operator's need an operator's.

    Args:
        certificates: those that are registered; None: the server speaks plain text, and believes what calls say.
        clock: seconds of the Unix epoch.
    """

    def __init__(self, certificates: Certificates | None, clock: Callable[[], float] = time.time) -> None:
        self._certificates, self._clock = certificates, clock

    def peer(self, facts: Mapping[str, Iterable[bytes]]) -> Peer:
        """Who is behind a connection.

        Args:
            facts: what gRPC knows of it (`auth_context`).
        """
        if self._certificates is None:
            return PLAINTEXT
        pem = next(iter(facts.get(_CERTIFICATE, ())), None)
        return NOBODY if pem is None else _peer(pem)

    def status(self, peer: Peer) -> str:
        """Of a peer's certificate, in a word; empty in plain text."""
        if self._certificates is None:
            return ""
        row = self._certificates.find(peer.fingerprint)
        if row is None:
            return UNKNOWN
        return REGISTERED if (found := row.status(self._clock())) == "valid" else found

    def check(self, peer: Peer, service: str, request: Any) -> None:
        """Whether the peer may make this call now.

        Raises:
            Denied: saying why.
        """
        if self._certificates is None or service == HEALTH:
            return
        wanted = PARTIES[service]
        row = self._certificates.find(peer.fingerprint)
        if row is None:
            raise DeniedError(
                f"{_named(peer)} is not registered here; the operator can do that: protofed certs register"
            )
        self._check_valid(row)
        if row.party != wanted:
            raise DeniedError(f"{_named(row)} is of no use here: this call is for {_SOMEBODY[wanted]}")
        caller = getattr(request, "caller", None)
        if wanted is Party.SITE and (caller is None or caller.site != row.name):
            said = "" if caller is None else short(caller.site)
            raise DeniedError(f"{_named(row)} cannot speak for site '{said}'")

    def _check_valid(self, row: CertificateRow) -> None:
        match row.status(self._clock()):
            case "revoked":
                raise DeniedError(f"{_named(row)} was revoked on {date(row.revoked_at or 0.0)}: {row.reason}")
            case "expired":
                raise DeniedError(f"{_named(row)} expired on {date(row.not_after)}; renew it: protofed certs renew")
            case "not-yet-valid":
                raise DeniedError(f"{_named(row)} is not valid before {date(row.not_before)}")


@lru_cache(maxsize=1024)
def _peer(pem: bytes) -> Peer:
    """What a certificate says never changes; whether that is still good is looked up each time."""
    try:
        said = read_certificate(pem, "the peer's certificate")
    except ConfigError:
        der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
        return Peer(hashlib.sha256(der).hexdigest(), "unknown", "")
    return Peer(said.fingerprint, said.party, said.name)


def _named(of: Peer | CertificateRow) -> str:
    return f"certificate {of.fingerprint[:16]} of {of.party} '{of.name}'"
