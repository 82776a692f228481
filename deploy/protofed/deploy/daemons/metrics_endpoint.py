"""Where a process is asked for its metrics and whether it is ready, for as long as it lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from protofed.common.monitoring.http import Monitor
from protofed.common.storage import files

log = structlog.get_logger()
METRICS_FILE = "metrics-address"  # of the state folder: a URL, for those who let it choose a port


@contextmanager
def answering(monitor: Monitor | None, state: Path) -> Iterator[str]:
    """A process answers /metrics, /healthz and /readyz meanwhile, if it has a monitor; yields the URL before them.

    Raises:
        Unavailable: the port is taken.
        StateError: the state folder cannot be written.
    """
    (state / METRICS_FILE).unlink(missing_ok=True)  # of a process that was killed
    if monitor is None:
        yield ""
        return
    url = monitor.start()
    try:
        files.write(state / METRICS_FILE, url.encode())
        log.info("answering /metrics, /healthz and /readyz", url=url)
        yield url
    finally:
        monitor.stop()
        (state / METRICS_FILE).unlink(missing_ok=True)
