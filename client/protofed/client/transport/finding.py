"""What can stand between a site and its server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DiagnosisCode(StrEnum):
    """What was found."""

    FINE = "fine"
    OWN_CERTIFICATE = "own-certificate"  # missing, expired, not valid yet: this side says so
    NO_NAME = "name-unknown"
    NOTHING_LISTENS = "nothing-listens"
    NO_ANSWER = "no-answer"
    PROXY_AWAY = "proxy-away"
    PROXY_PASSWORD = "proxy-password"  # noqa: S105  (a finding)
    PROXY_REFUSES = "proxy-refuses"
    NOT_TLS = "not-tls"
    OLD_TLS = "old-tls"
    SERVER_AUTHORITY = "server-authority"
    SERVER_NAME = "server-name"
    SERVER_DATES = "server-dates"
    REFUSED = "certificate-refused"  # ours, by the server
    BUSY = "busy"


UNTRUSTED = frozenset(
    {DiagnosisCode.SERVER_AUTHORITY, DiagnosisCode.SERVER_NAME, DiagnosisCode.SERVER_DATES}
)  # somebody else may be there
LASTING = frozenset(
    {
        DiagnosisCode.OWN_CERTIFICATE,
        DiagnosisCode.SERVER_AUTHORITY,
        DiagnosisCode.SERVER_NAME,
        DiagnosisCode.PROXY_PASSWORD,
    }
)


@dataclass(frozen=True)
class ConnectionDiagnosis:
    """What is wrong, and what to do; of a server that showed a certificate, the fingerprint of that."""

    kind: DiagnosisCode
    text: str
    server_fingerprint: str | None = None


class DiagnosisError(Exception):
    """Ends a probe."""

    def __init__(self, kind: DiagnosisCode, text: str, server_fingerprint: str | None = None) -> None:
        super().__init__(text)
        self.finding = ConnectionDiagnosis(kind, text, server_fingerprint)
