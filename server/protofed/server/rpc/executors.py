"""Where a server's work runs, and how waiting calls are woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from protofed.common.payload import SiteId

log = structlog.get_logger()


class Executors:
    """Where blocking work runs; `control` is the coordinator's only thread."""

    def __init__(self) -> None:
        self.control = ThreadPoolExecutor(1, "control")
        self.transfer = ThreadPoolExecutor(4, "transfer")
        self.work = ThreadPoolExecutor(1, "work")

    def aggregate(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """`Work` of a server: the job on its own thread, its end on the coordinator's."""
        self.work.submit(job).add_done_callback(lambda future: self.control.submit(_logged, done, future.result()))

    def close(self) -> None:
        """Finish what was begun."""
        for pool in (self.work, self.control, self.transfer):
            pool.shutdown()


class TaskNotifier:
    """Wakes the waiting NextTask calls of sites that have something to do."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notifier: dict[SiteId, asyncio.Event] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ring on this loop from now on."""
        self._loop = loop

    def ring(self, sites: Iterable[SiteId] | None) -> None:
        """From any thread: these sites (None: all) should ask again."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ring, None if sites is None else list(sites))

    def of(self, site: SiteId) -> asyncio.Event:
        """The site's bell, silent."""
        bell = self._notifier.setdefault(site, asyncio.Event())
        bell.clear()
        return bell

    def _ring(self, sites: list[SiteId] | None) -> None:
        for site in self._notifier if sites is None else sites:
            if site in self._notifier:
                self._notifier[site].set()


def _logged(function: Callable[[Any], None], argument: Any) -> None:
    """Errors on the coordinator's thread are never lost."""
    try:
        function(argument)
    except Exception:
        log.exception("the coordinator failed")
        raise
