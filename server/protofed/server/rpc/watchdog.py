"""Notices a blocked event loop. gRPC's keepalive cannot: it answers pings from threads of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

import structlog

log = structlog.get_logger()
BEAT_S = 0.5
TOLERATED_S = 3.0  # a beat that is later than this is logged, and the server is not ready


class Watchdog(threading.Thread):
    """Sends a beat through the loop every `BEAT_S` seconds; a late one is logged with the stack that blocks the loop.

    Create it on the loop's thread.

    Attributes:
        lag_s: seconds by which the newest beat was late, or is late so far.
        blocked: the newest beat was later than `TOLERATED_S`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._loop, self._loop_thread = loop, threading.get_ident()
        self._end = threading.Event()
        self.lag_s, self.blocked = 0.0, False

    def run(self) -> None:
        """The thread's work: beat until stopped or until the loop is closed."""
        while not self._end.wait(BEAT_S):
            try:
                self._beat()
            except RuntimeError:  # the loop is closed
                return

    def stop(self) -> None:
        """End the thread after the beat under way."""
        self._end.set()

    def _beat(self) -> None:
        arrived, sent_at = threading.Event(), time.monotonic()
        self._loop.call_soon_threadsafe(arrived.set)
        if not arrived.wait(TOLERATED_S):
            self.blocked = True
            frame = sys._current_frames().get(self._loop_thread)
            where = "".join(traceback.format_stack(frame)) if frame else "unknown"
            log.error("the event loop is blocked", for_s=TOLERATED_S, where=where)
            while not arrived.wait(BEAT_S) and not self._end.is_set():
                self.lag_s = time.monotonic() - sent_at
        self.lag_s = time.monotonic() - sent_at
        if self.blocked and self.lag_s < TOLERATED_S:
            self.blocked = False
            log.info("the event loop runs again")
