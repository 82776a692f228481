"""Serves /metrics, /healthz and /readyz while a daemon lives, and writes down where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from protofed.common.monitoring import Monitor
from protofed.common.storage import files

log = structlog.get_logger()
METRICS_FILE = "metrics-address"  # in the state folder: the URL, which is not known before if the port is 0


@contextmanager
def serve_metrics(monitor: Monitor | None, state: Path) -> Iterator[str]:
    """Serve /metrics, /healthz and /readyz inside the context; yields the URL before these paths.

    Without a monitor nothing is served, and the URL is empty.

    Raises:
        UnavailableError: the port is taken.
        StateError: the state folder cannot be written.
    """
    (state / METRICS_FILE).unlink(missing_ok=True)  # left by a process that was killed
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
