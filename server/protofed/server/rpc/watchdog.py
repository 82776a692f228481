"""Notices an event loop that is blocked: gRPC's keepalive cannot, because it answers from threads of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

import structlog

log = structlog.get_logger()
BEAT_S = 0.5
TOLERATED_S = 3.0  # a blocked loop is reported after this


class Watchdog(threading.Thread):
    """Lets a beat through the loop twice a second; one that is late is reported with what blocks the loop.

    Attributes:
        lag_s: how late the newest beat was, or has been until now.
        blocked: whether a beat was too late and none in time came since.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._loop, self._looped = loop, threading.get_ident()
        self._end = threading.Event()
        self.lag_s, self.blocked = 0.0, False

    def run(self) -> None:
        """Beat until stopped."""
        while not self._end.wait(BEAT_S):
            try:
                self._beat()
            except RuntimeError:  # the loop is closed
                return

    def stop(self) -> None:
        """End it."""
        self._end.set()

    def _beat(self) -> None:
        came, sent = threading.Event(), time.monotonic()
        self._loop.call_soon_threadsafe(came.set)
        if not came.wait(TOLERATED_S):
            self.blocked = True
            frame = sys._current_frames().get(self._looped)
            where = "".join(traceback.format_stack(frame)) if frame else "unknown"
            log.error("the event loop is blocked", for_s=TOLERATED_S, where=where)
            while not came.wait(BEAT_S) and not self._end.is_set():
                self.lag_s = time.monotonic() - sent
        self.lag_s = time.monotonic() - sent
        if self.blocked and self.lag_s < TOLERATED_S:
            self.blocked = False
            log.info("the event loop runs again")
