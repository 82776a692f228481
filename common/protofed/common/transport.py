"""What gRPC must find in the environment when it is first imported: whoever uses it imports this module before.

TLS 1.3 only: gRPC's Python has no setting for the version, but with certificates of elliptic curves the one suite that
is left to TLS 1.2 cannot be used. And no lines of its own on standard error: who floods a server with broken
handshakes would fill its disk with them.
"""

from __future__ import annotations

import os
import sys

from protofed.common.errors import ConfigError

_IN_TIME = "grpc" not in sys.modules
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def check_in_time() -> None:
    """That gRPC found it.

    Raises:
        ConfigError: it had been imported before.
    """
    if not _IN_TIME:
        raise ConfigError(
            "gRPC was imported before protofed.common.transport, and would offer TLS 1.2; import it after"
        )
