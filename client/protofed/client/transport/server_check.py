"""Who answers at the server's address: looked at before anything is sent, and again when calls fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from protofed.client.transport.audit import ClientAudit
from protofed.client.transport.diagnosis import LASTING, UNTRUSTED, ConnectionDiagnosis, DiagnosisCode, diagnose
from protofed.client.transport.proxy import Proxy
from protofed.common.clock import stamp, utc_now
from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import Certificate
from protofed.common.pki.identity import LiveIdentity

log = structlog.get_logger()
LOOK_EVERY_S = 30.0
REMIND_FROM_DAYS = 30
REMIND_EVERY_S = 86_400.0


class ServerProbe:
    """One daemon's; threads share it.

    Args:
        record: makes sure that a line of the audit log is written.
    """

    def __init__(
        self,
        address: str,
        identity: LiveIdentity,
        proxy: Proxy | None,
        audit: ClientAudit,
        record: Callable[[Callable[[], None]], None],
    ) -> None:
        self._address, self._identity, self._proxy = address, identity, proxy
        self._audit, self._record = audit, record
        self._looking = threading.Lock()
        self._seen: tuple[DiagnosisCode, str | None] | None = None  # the last line of the audit log
        self._met = False
        self._looked_at = self._reminded_at = -REMIND_EVERY_S

    def before_call(self) -> ConnectionDiagnosis | None:
        """Until the server was seen once, what keeps it from that; None: call it.

        Raises:
            ConfigError: what was found will not pass by waiting; nothing was sent.
        """
        self._remind(self._identity.now().certificate)
        if self._met:
            return None
        with self._looking:
            if self._met:
                return None
            found = self._look()
        if found.kind in LASTING and not self._met:
            raise ConfigError(found.text)
        return None if found.kind is DiagnosisCode.FINE else found

    def after_failure(self) -> ConnectionDiagnosis | None:
        """Why calls fail; None: it was looked at a moment ago, or is being so."""
        if time.monotonic() < self._looked_at + LOOK_EVERY_S or not self._looking.acquire(blocking=False):
            return None
        try:
            return self._look()
        finally:
            self._looking.release()

    def _look(self) -> ConnectionDiagnosis:
        found = diagnose(self._address, self._identity.now(), self._proxy)
        self._looked_at = time.monotonic()
        self._met |= found.kind is DiagnosisCode.FINE
        seen = (found.kind, found.server_fingerprint)
        if seen != self._seen and found.kind in UNTRUSTED | {DiagnosisCode.FINE, DiagnosisCode.REFUSED}:
            self._record(lambda: self._audit.server(self._address, *seen, found.text))
            self._seen = seen
        return found

    def _remind(self, certificate: Certificate) -> None:
        """Say daily that the certificate ends soon, or has ended."""
        left = days_left(certificate)
        if left < REMIND_FROM_DAYS and time.monotonic() >= self._reminded_at + REMIND_EVERY_S:
            self._reminded_at = time.monotonic()
            told = {"site": certificate.name, "until": stamp(certificate.not_after), "days_left": left}
            if left >= 0:
                log.warning("this site's certificate ends soon; ask for a new one", **told)
            else:
                log.error("this site's certificate has ended; ask for a new one", **told)


def days_left(certificate: Certificate) -> int:
    """Whole days, below 0 once it has ended."""
    return (certificate.not_after - utc_now()).days
