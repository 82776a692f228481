"""TLS of the server: its own identity and the CAs whose client certificates it accepts; every client needs one."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import structlog

from protofed.common.pki.identity import Identity, LiveIdentity
from protofed.common.process import check_in_time

log = structlog.get_logger()


class HandshakeCounter:
    """Estimates failed handshakes: those that started, less the connections from which a call came.

    gRPC's C core reports no failed handshake to Python, so a site with a wrong certificate would leave no trace here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = 0
        self._calling: set[str] = set()  # connections with a call since `log_failed`
        self._calling_before: set[str] = set()  # those of the interval before: their handshakes are counted already

    def handshake_started(self) -> None:
        """Count a handshake; called from any thread."""
        with self._lock:
            self._started += 1

    def call_arrived(self, connection: str) -> None:
        """Note the connection (`ipv4:address:port`) of a call; called at every call, by the event loop only."""
        self._calling.add(connection)

    def log_failed(self) -> int:
        """Log and return how many handshakes since the last time led to no call."""
        with self._lock:
            started, self._started = self._started, 0
        new = self._calling - self._calling_before
        self._calling_before, self._calling = self._calling, set()
        failed = max(0, started - len(new))
        if failed:
            log.warning(
                "connections without a call: the handshake failed or no call followed", count=failed, of=started
            )
        return failed


def server_credentials(live: LiveIdentity, handshakes: HandshakeCounter) -> grpc.ServerCredentials:
    """TLS with client certificates. Each handshake uses the identity and CAs on disk, so a renewal needs no restart.

    Raises:
        ConfigError: gRPC was imported before TLS 1.3 was required, and would offer TLS 1.2 too.
    """
    check_in_time()
    current = live.current()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        # gRPC calls this at the start of every handshake: the only sign of one that fails.
        nonlocal current
        handshakes.handshake_started()
        if (identity := live.current()) is current:
            return None
        current = identity
        return _configuration(identity)

    fetch: Any = newest  # None means "as before", though grpc's types do not allow it
    return grpc.dynamic_ssl_server_credentials(_configuration(current), fetch, require_client_authentication=True)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    pair = (identity.key_pem, identity.certificate_pem)
    return grpc.ssl_server_certificate_configuration([pair], identity.authorities_pem)
