"""Environment variables that gRPC reads when it is first imported.

They leave only TLS 1.3: gRPC for Python has no setting for the version, but the only suite allowed for TLS 1.2 needs an
RSA certificate, and protofed's are of elliptic curves. They also keep gRPC from writing to standard error: a flood of
broken handshakes would fill the server's disk with its lines.
"""

from __future__ import annotations

import os
import sys

from protofed.common.errors import ConfigError

_SUITES, _SUITE = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"


def require_tls_1_3() -> None:
    """Set gRPC's environment; the command line and the tests call it before they import anything that uses gRPC.

    A second call changes nothing. Where gRPC was imported before the first, `check_in_time` refuses to go on.
    """
    if "grpc" not in sys.modules:
        os.environ[_SUITES] = _SUITE
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def check_in_time() -> None:
    """Check that the environment is set; called before credentials are made.

    Raises:
        ConfigError: gRPC was imported before `require_tls_1_3` was called.
    """
    if os.environ.get(_SUITES) != _SUITE:
        raise ConfigError(
            "gRPC would offer TLS 1.2; call protofed.common.grpc_environment.require_tls_1_3() before it is imported"
        )
