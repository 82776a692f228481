"""The server's threads, and how waiting NextTask calls are woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from protofed.common.payload import SiteId

log = structlog.get_logger()


class Executors:
    """Threads for blocking work, all of which stays off the event loop.

    Attributes:
        control: the coordinator's only thread, so that its state needs no locks.
        transfer: sites' chunks, examination of updates.
        operators: their downloads and verifications, each of which may take as long as an aggregation.
        work: aggregation, one at a time.
    """

    def __init__(self) -> None:
        self.control = ThreadPoolExecutor(1, "control")
        self.transfer = ThreadPoolExecutor(4, "transfer")
        self.operators = ThreadPoolExecutor(4, "operators")
        self.work = ThreadPoolExecutor(1, "work")

    def aggregate(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """`Work` of `ServerContext`: run `job` on the work thread, then `done` with its result on the coordinator's."""
        self.work.submit(job).add_done_callback(lambda future: self.control.submit(_logged, done, future.result()))

    def close(self) -> None:
        """Wait for all submitted work; `work` first, since the end of an aggregation is submitted to `control`."""
        for pool in (self.work, self.control, self.transfer, self.operators):
            pool.shutdown()


class TaskNotifier:
    """Wakes waiting NextTask calls when there may be a task for their sites."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[SiteId, asyncio.Event] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake calls on this loop from now on; before, `notify` does nothing, as nobody waits yet."""
        self._loop = loop

    def notify(self, sites: Iterable[SiteId] | None) -> None:
        """Wake the calls of these sites (None: all); called from any thread."""
        if self._loop is not None:
            # asyncio.Event is not thread-safe, so it is set on the loop's thread.
            self._loop.call_soon_threadsafe(self._set, None if sites is None else list(sites))

    def event(self, site: SiteId) -> asyncio.Event:
        """The site's event, cleared; take it before asking for a task, or a notification in between is lost."""
        event = self._events.setdefault(site, asyncio.Event())
        event.clear()
        return event

    def _set(self, sites: list[SiteId] | None) -> None:
        for site in self._events if sites is None else sites:
            if site in self._events:
                self._events[site].set()


def _logged(function: Callable[[Any], None], argument: Any) -> None:
    """Log errors here: nobody looks at the future of a callback."""
    try:
        function(argument)
    except Exception:
        log.exception("the coordinator failed")
        raise
