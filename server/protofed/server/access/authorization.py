"""Who may call what.

The server looks the caller's certificate up at every call. So a revocation also stops calls on open connections.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from protofed.common.errors import ConfigError, DeniedError, RevokedError, short
from protofed.common.pki.certificate import Party, read_certificate
from protofed.common.protocol import wire
from protofed.common.protocol.call_metadata import REGISTERED, UNKNOWN
from protofed.common.storage.journal import Fact
from protofed.server.access.certificates import Certificates, date
from protofed.server.storage.rows import CertificateRow

PARTIES = {"Federation": Party.SITE, "Operator": Party.OPERATOR}  # which party may call a service
HEALTH = "Health"  # open to any certificate that the CA signed: its messages carry nothing
_WITH_ARTICLE = {Party.SITE: "a site", Party.OPERATOR: "an operator"}
# Of gRPC's auth context. Not `peer_identities()`, which changes its meaning as soon as a certificate has a SAN.
_CERTIFICATE = "x509_pem_cert"


@dataclass(frozen=True)
class Peer:
    """The caller, by the certificate that the CA signed for it; `AccessRules.check` says whether it is registered here.

    Attributes:
        fingerprint: SHA-256 of the certificate (DER), in hex; empty in plain text, where the caller is not known.
        party: site, operator or server; "unknown" if the certificate does not say, "plaintext" without TLS.
        name: within the party.
    """

    fingerprint: str
    party: str
    name: str

    def __str__(self) -> str:
        return f"{self.party} '{self.name}'"

    def facts(self) -> dict[str, Fact]:
        """The field `peer` of its audit records."""
        return {"fingerprint": self.fingerprint, "party": self.party, "name": self.name}

    def site(self) -> dict[str, str]:
        """Log field `site` if the caller is a site, else no field."""
        return {"site": self.name} if self.party == Party.SITE else {}


PLAINTEXT, NOBODY = Peer("", "plaintext", ""), Peer("", "unknown", "")


class AccessRules:
    """The rules of access.

    Federation calls need a site's certificate, name that very site and claim only the roles of its registration.
    Operator calls need an operator's certificate.

    Args:
        certificates: the registered certificates; None: the server speaks plain text and believes what callers say.
        clock: Unix time in seconds.
    """

    def __init__(self, certificates: Certificates | None, clock: Callable[[], float] = time.time) -> None:
        self._certificates, self._clock = certificates, clock

    def peer(self, auth_context: Mapping[str, Iterable[bytes]]) -> Peer:
        """The caller behind a connection; `auth_context` as gRPC gives it."""
        if self._certificates is None:
            return PLAINTEXT
        pem = next(iter(auth_context.get(_CERTIFICATE, ())), None)
        return NOBODY if pem is None else _peer(pem)

    def status(self, peer: Peer) -> str:
        """Status of a certificate for its holder's `doctor`: registered, unknown, revoked, expired or not-yet-valid.

        Empty in plain text.
        """
        if self._certificates is None:
            return ""
        row = self._certificates.find(peer.fingerprint)
        if row is None:
            return UNKNOWN
        return REGISTERED if (status := row.status(self._clock())) == "valid" else status

    def roles(self, peer: Peer) -> tuple[str, ...]:
        """Roles that the registration of a certificate grants, for its holder's `doctor`; empty in plain text."""
        row = self._certificates.find(peer.fingerprint) if self._certificates is not None else None
        return () if row is None else row.roles

    def check(self, peer: Peer, service: str, request: Any) -> None:
        """Check that the peer may make this call now; `request` is the parsed message.

        Raises:
            DeniedError: it may not; the text says why and is sent to the peer.
            KeyError: no party was given this service: a new service stays closed until `PARTIES` names it.
        """
        if self._certificates is None or service == HEALTH:
            return
        party = PARTIES[service]
        row = self._certificates.find(peer.fingerprint)
        if row is None:
            raise DeniedError(
                f"{_describe(peer)} is not registered here; the operator can do that: protofed certs register"
            )
        self._check_valid(row)
        if row.party != party:
            raise DeniedError(f"{_describe(row)} cannot make this call: this call is for {_WITH_ARTICLE[party]}")
        if party is Party.SITE:
            _check_site_call(row, request)

    def _check_valid(self, row: CertificateRow) -> None:
        match row.status(self._clock()):
            case "revoked":
                raise RevokedError(f"{_describe(row)} was revoked on {date(row.revoked_at or 0.0)}: {row.reason}")
            case "expired":
                raise DeniedError(
                    f"{_describe(row)} expired on {date(row.not_after)}; renew it: protofed certs request --renew"
                )
            case "not-yet-valid":
                raise DeniedError(f"{_describe(row)} is not valid before {date(row.not_before)}")


def _check_site_call(row: CertificateRow, request: Any) -> None:
    """Check that a site speaks for itself, and enrolls in no role but those that it is registered with."""
    # The name in the message only repeats the certificate's: a site cannot act as another one by naming it.
    caller = getattr(request, "caller", None)
    if caller is None or caller.site != row.name:
        claimed = "" if caller is None else short(caller.site)
        raise DeniedError(f"{_describe(row)} cannot speak for site '{claimed}'")
    roles = {wire.role.unpack(number).value for number in getattr(request, "roles", ())}  # only Enroll has them
    if foreign := roles - set(row.roles):
        wanted = " ".join(f"--role {role}" for role in sorted({*row.roles, *foreign}))
        raise DeniedError(
            f"{_describe(row)} is registered as {' and '.join(row.roles)}, not as {' and '.join(sorted(foreign))}; "
            f"change the setting `roles`, or ask the operator to grant more roles: "
            f"protofed certs register BUNDLE {wanted}"
        )


@lru_cache(maxsize=1 << 14)  # all sites: to read one takes longer than the rest of a call
def _peer(pem: bytes) -> Peer:
    """Cached, because a certificate's content never changes; its validity and registration are checked at each call."""
    try:
        certificate = read_certificate(pem, "the peer's certificate")
    except ConfigError:
        # Signed by our CA but not in protofed's form: the fingerprint still identifies the caller in the audit log.
        der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
        return Peer(hashlib.sha256(der).hexdigest(), "unknown", "")
    return Peer(certificate.fingerprint, certificate.party, certificate.name)


def _describe(holder: Peer | CertificateRow) -> str:
    return f"certificate {holder.fingerprint[:16]} of {holder.party} '{holder.name}'"
