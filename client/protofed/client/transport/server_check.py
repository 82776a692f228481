"""Check who answers at the server's address: before the first call is sent, and again when calls fail."""

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
DIAGNOSE_EVERY_S = 30.0
REMIND_FROM_DAYS = 30
REMIND_EVERY_S = 86_400.0


class ServerProbe:
    """Diagnoses the connection of one daemon; threads share it.

    Args:
        record: runs a write to the audit log, and repeats it while the disk is full.
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
        self._lock = threading.Lock()  # one diagnosis at a time: each may take seconds
        self._last_audited: tuple[DiagnosisCode, str | None] | None = None
        self._reached = False
        # Never yet. Monotonic time may begin at 0 with the machine.
        self._diagnosed_at = self._reminded_at = -REMIND_EVERY_S

    def before_call(self) -> ConnectionDiagnosis | None:
        """What keeps this daemon from the server, until it was reached once; None: send the call.

        Raises:
            ConfigError: the problem will not pass by waiting; nothing was sent.
        """
        self._remind(self._identity.current().certificate)
        if self._reached:
            return None
        with self._lock:
            if self._reached:  # by the thread that had the lock
                return None
            diagnosis = self._diagnose()
        if diagnosis.kind in LASTING and not self._reached:
            raise ConfigError(diagnosis.text)
        return None if diagnosis.kind is DiagnosisCode.FINE else diagnosis

    def after_failure(self) -> ConnectionDiagnosis | None:
        """Why calls fail; None: diagnosed within `DIAGNOSE_EVERY_S`, or by another thread right now."""
        if time.monotonic() < self._diagnosed_at + DIAGNOSE_EVERY_S or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._diagnose()
        finally:
            self._lock.release()

    def _diagnose(self) -> ConnectionDiagnosis:
        diagnosis = diagnose(self._address, self._identity.current(), self._proxy)
        self._diagnosed_at = time.monotonic()
        self._reached |= diagnosis.kind is DiagnosisCode.FINE
        server = (diagnosis.kind, diagnosis.server_fingerprint)
        if server != self._last_audited and diagnosis.kind in UNTRUSTED | {DiagnosisCode.FINE, DiagnosisCode.REFUSED}:
            self._record(lambda: self._audit.server(self._address, *server, diagnosis.text))
            self._last_audited = server
        return diagnosis

    def _remind(self, certificate: Certificate) -> None:
        """Log once a day that the certificate ends soon, or has ended."""
        days = days_left(certificate)
        if days < REMIND_FROM_DAYS and time.monotonic() >= self._reminded_at + REMIND_EVERY_S:
            self._reminded_at = time.monotonic()
            fields = {"site": certificate.name, "until": stamp(certificate.not_after), "days_left": days}
            if days >= 0:
                log.warning("this site's certificate ends soon; ask for a new one", **fields)
            else:
                log.error("this site's certificate has ended; ask for a new one", **fields)


def days_left(certificate: Certificate) -> int:
    """Whole days until the certificate ends; negative once it has ended."""
    return (certificate.not_after - utc_now()).days
