"""How the server proves who it is, and whose certificates it takes: nobody comes in without one."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import structlog

from protofed.common.grpc_environment import check_in_time
from protofed.common.pki.identity import Identity, LiveIdentity

log = structlog.get_logger()


class HandshakeCounter:
    """Counts those who knock at the door, and those who come in. gRPC tells of no handshake how it ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._inside: set[str] = set()
        self._before: set[str] = set()

    def begun(self) -> None:
        """A handshake; from any thread."""
        with self._lock:
            self._begun += 1

    def inside(self, connection: str) -> None:
        """A call came from this address and port; again and again, but from the event loop only."""
        self._inside.add(connection)

    def tell(self) -> int:
        """Log how many handshakes led to no call since this was asked last, and give it back."""
        with self._lock:
            begun, self._begun = self._begun, 0
        new = self._inside - self._before
        self._before, self._inside = self._inside, set()
        failed = max(0, begun - len(new))
        if failed:
            log.warning("connections without a call: handshakes failed, or nothing was said", count=failed, of=begun)
        return failed


def server_credentials(live: LiveIdentity, handshakes: HandshakeCounter) -> grpc.ServerCredentials:
    """TLS with client certificates; every handshake has the newest identity and authorities, a renewal no restart.

    Raises:
        ConfigError: TLS 1.2 would be offered, too.
    """
    check_in_time()
    shown = live.now()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        handshakes.begun()
        if (identity := live.now()) is shown:
            return None
        shown = identity
        return _configuration(identity)

    fetch: Any = newest  # None is "as before", though grpc's types do not say so
    return grpc.dynamic_ssl_server_credentials(_configuration(shown), fetch, require_client_authentication=True)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    pair = (identity.key_pem, identity.certificate_pem)
    return grpc.ssl_server_certificate_configuration([pair], identity.authorities_pem)
