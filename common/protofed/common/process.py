"""What a process sets before it does anything else: memory, garbage collection, gRPC's environment.

glibc's malloc by default returns large blocks to the kernel at once and faults them in again. A garbage collection
while modules are imported would walk all modules imported so far, again and again.

gRPC reads environment variables when it is first imported. They leave only TLS 1.3. gRPC for Python has no setting for
the version, but the only suite allowed for TLS 1.2 needs an RSA certificate. protofed's certificates have
elliptic-curve keys. They also keep gRPC from writing to standard error: a flood of broken handshakes would fill the
server's disk with its lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from protofed.common.errors import ConfigError

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # of mallopt(3)


def keep_memory() -> None:
    """Keep freed memory in the process; commands that run models or serve chunks call it first.

    Chunks travel about four times as fast (PERFORMANCE §1), and a CNN scores 1.5 times as many images a second. Does
    nothing without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_TOP_PAD, 64 << 20)
        mallopt(_ARENA_MAX, 2)  # threads share what others have freed: a server of 45 MB models needs half the memory


def quiet_mlflow() -> None:
    """Keep MLflow from reporting its use to its makers, and from changing how this process logs.

    To be called before whatever imports it, as MONAI does. Variables that are set already stay.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")


def give_back() -> None:
    """Return freed memory to the kernel; the server's memory guard calls it under pressure."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage while many modules are imported: PyTorch takes a third less of the processor."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # the two together make what was imported old, without a walk: only full collections visit it
        gc.unfreeze()
        if enabled:
            gc.enable()


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
            "gRPC would offer TLS 1.2; call protofed.common.process.require_tls_1_3() before it is imported"
        )
