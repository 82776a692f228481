"""How much work of its own kind one site may ask for in an hour or a day, beside the rate of its calls.

Each number is a multiple of what an honest daemon needs at worst, so that none ever meets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from protofed.common.payload import SiteId
from protofed.server.access.rate_limits import LOG_EVERY_S, RateLimitError

log = structlog.get_logger()
HOUR_S, DAY_S = 3600.0, 86_400.0
_MAX_BUCKETS = 65_536  # in memory; above it, the full ones are dropped, then the oldest


@dataclass(frozen=True)
class Budget:
    """An amount that is there at once and comes back evenly within `period_s`.

    Attributes:
        what: for errors and logs.
        flat: units, or bytes, whatever the size of the model.
        times: of the model's size, on top.
    """

    what: str
    flat: float
    times: float
    period_s: float

    def capacity(self, size: int) -> float:
        """The amount for a blob of `size` bytes."""
        return self.flat + self.times * size


# A paused daemon enrolls every 5 s (720 an hour), once more when its pause changes, and again after each restart. Each
# may write a row, and wakes the coordinator.
ENROLLMENTS = Budget("enrollments", 1200, 0, HOUR_S)
# One a second at most: a daemon refuses a recipe that wants more.
HEARTBEATS = Budget("heartbeats", 7200, 0, HOUR_S)
# Of one task: one; at most three more if chunks arrive damaged; while the server is short of memory, two a minute.
BEGINNINGS = Budget("beginnings of uploads for one task", 240, 0, HOUR_S)
# Chunks of one model, one upload, and the examination of that. Once each; again as often as a connection breaks within
# a chunk, and from the start when a daemon dies before its update is on its disk. 64 MiB: small models take as many
# calls as large ones.
DOWNLOADED = Budget("bytes of one model", 64 << 20, 16, DAY_S)
UPLOADED = Budget("bytes for one task", 64 << 20, 16, DAY_S)
EXAMINED = Budget("bytes of updates to examine for one task", 64 << 20, 16, DAY_S)


class OverBudgetError(RateLimitError):
    """A site asked for more than its budget."""


@dataclass(slots=True)
class _Bucket:
    """What is left of a budget; times in seconds of the monotonic clock."""

    key: str
    left: float
    capacity: float
    period_s: float
    updated_at: float


class Budgets:
    """What is left of each site's budgets; used on the event loop only.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # One for each site and budget: a site has one open task, and a budget's key changes only with that.
        self._buckets: dict[tuple[SiteId, Budget], _Bucket] = {}
        self._logged_at: dict[SiteId, float] = {}

    def spend(self, site: SiteId, budget: Budget, amount: float = 1.0, *, key: str = "", size: int = 0) -> None:
        """Take an amount from a site's budget.

        Args:
            key: the task or blob that the budget is for; another one begins with a full budget.
            size: of the model or upload, in bytes.

        Raises:
            OverBudgetError: not so much is left; nothing was taken.
        """
        now = self._clock()
        bucket = self._bucket(site, budget, key, budget.capacity(size), now)
        rate = bucket.capacity / bucket.period_s
        bucket.left = min(bucket.capacity, bucket.left + (now - bucket.updated_at) * rate)
        bucket.updated_at = now
        if bucket.left < amount:
            period = "hour" if budget.period_s == HOUR_S else "day"
            raise OverBudgetError(
                f"this site is above its {budget.what} of {bucket.capacity:.0f} in one {period}; try again later",
                is_logged=self._log(site, budget, now),
                retry_after_s=(amount - bucket.left) / rate,
            )
        bucket.left -= amount

    def _bucket(self, site: SiteId, budget: Budget, key: str, capacity: float, now: float) -> _Bucket:
        bucket = self._buckets.get((site, budget))
        if bucket is None or bucket.key != key or bucket.capacity != capacity:
            if bucket is None and len(self._buckets) >= _MAX_BUCKETS:
                self._forget(now)
            bucket = self._buckets[site, budget] = _Bucket(key, capacity, capacity, budget.period_s, now)
        return bucket

    def _forget(self, now: float) -> None:
        """Drop the buckets that are full by now; if all are in use, half of them, those used longest ago."""
        used = {where: one for where, one in self._buckets.items() if now - one.updated_at < one.period_s}
        newest = sorted(used, key=lambda where: used[where].updated_at)[-_MAX_BUCKETS // 2 :]
        self._buckets = {where: used[where] for where in newest}
        self._logged_at.clear()

    def _log(self, site: SiteId, budget: Budget, now: float) -> bool:
        """Whether this refusal is logged: one a minute and site is."""
        if is_due := now - self._logged_at.get(site, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[site] = now
            log.warning("over budget", site=site, budget=budget.what)
        return is_due
