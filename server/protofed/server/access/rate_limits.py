"""Limits on each certificate's calls in flight and calls a second, so that no caller can use up the server.

A budget limits how much work of one kind a site may ask for in an hour or a day. It adds to the limit on calls. Each
number is a multiple of what an honest daemon needs at worst, so no honest daemon meets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from protofed.common.errors import OverQuotaError
from protofed.common.payload import SiteId
from protofed.server.access.authorization import PLAINTEXT, Peer

log = structlog.get_logger()
# Calls. A daemon has 8 in flight at most; those of its connection before, if that broke, end within a minute.
IN_FLIGHT = 16
RATE_PER_S, BURST = 32.0, 128.0  # token bucket for control calls: a daemon makes a few a minute
BULK = frozenset({"GetChunk", "PutChunk", "GetState"})  # many and large: limited by the calls in flight alone
IN_FLIGHT_RETRY_S = 0.1
LOG_EVERY_S = 60.0
# Lines of refused calls of one certificate; each names how many before it were left out.
LOG_BURST, LOG_LINES_PER_S = 60.0, 0.1
_MAX_CERTIFICATES = 16_384  # in memory; above it, idle ones are dropped


@dataclass(slots=True)
class _Usage:
    """One certificate's token bucket and its calls in flight."""

    tokens: float
    updated_at: float  # seconds of the monotonic clock, as `logged_at`
    calls: int = 0
    refused: int = 0  # since the last log line
    lines: float = LOG_BURST  # that may be written now
    unlogged: int = 0  # refused calls since the last line
    logged_at: float = -LOG_EVERY_S


class RateLimitError(OverQuotaError):
    """A call over a limit.

    Attributes:
        is_logged: it was logged, as one a minute and certificate is; the interceptor audits only these.
    """

    def __init__(self, message: str, *, is_logged: bool, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_logged = is_logged


class RateLimits:
    """Counts the calls of each certificate; in plain text callers cannot be distinguished and nothing is limited.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usages: dict[str, _Usage] = {}  # by fingerprint
        self._room = 0  # more, if they all have calls in flight

    @contextmanager
    def admit(self, peer: Peer, call: str) -> Iterator[None]:
        """Count a call as in flight for as long as the context lasts; used on the event loop only.

        Raises:
            RateLimitError: too many calls are in flight, or came within the last seconds.
        """
        if peer is PLAINTEXT:
            yield
            return
        usage = self._usage(peer)
        if usage.calls >= IN_FLIGHT:
            raise self._refusal(usage, peer, f"{IN_FLIGHT} calls of this certificate are in flight")
        # Bulk calls cost no token but need one: after many refusals (`charge`) they have to wait, too.
        if usage.tokens < 1.0:
            raise self._refusal(usage, peer, f"more than {RATE_PER_S:.0f} calls a second")
        if call not in BULK:
            usage.tokens -= 1.0
        usage.calls += 1
        try:
            yield
        finally:
            usage.calls -= 1

    def charge(self, peer: Peer) -> None:
        """Take one more token for a call that was refused, so that even useless chunks cannot come at any rate."""
        if peer is not PLAINTEXT:
            self._usage(peer).tokens -= 1.0

    def unlogged(self, peer: Peer) -> int | None:
        """How many refused calls were not logged before this one, which may be; None: this one may not, either."""
        if peer is PLAINTEXT:
            return 0
        usage = self._usage(peer)
        if usage.lines < 1.0:
            usage.unlogged += 1
            return None
        usage.lines -= 1.0
        count, usage.unlogged = usage.unlogged, 0
        return count

    def _usage(self, peer: Peer) -> _Usage:
        """The certificate's usage, its bucket filled up to now."""
        now = self._clock()
        if peer.fingerprint not in self._usages and len(self._usages) >= max(_MAX_CERTIFICATES, self._room):
            self._usages = {
                fingerprint: usage
                for fingerprint, usage in self._usages.items()
                if usage.calls or now - usage.updated_at < BURST / RATE_PER_S
            }
            self._room = 2 * len(self._usages)  # else each further one would look through all
        usage = self._usages.setdefault(peer.fingerprint, _Usage(BURST, now))
        passed_s, usage.updated_at = now - usage.updated_at, now
        usage.tokens = min(BURST, usage.tokens + passed_s * RATE_PER_S)
        usage.lines = min(LOG_BURST, usage.lines + passed_s * LOG_LINES_PER_S)
        return usage

    def _refusal(self, usage: _Usage, peer: Peer, reason: str) -> RateLimitError:
        usage.refused += 1
        if is_due := self._clock() - usage.logged_at >= LOG_EVERY_S:
            caller = {"peer": str(peer), "fingerprint": peer.fingerprint, **peer.site()}
            log.warning("too many calls", **caller, why=reason, refused=usage.refused)
            usage.logged_at, usage.refused = self._clock(), 0
        # With tokens left, the calls in flight were too many: the shortest of those ends at once.
        wait_s = max(IN_FLIGHT_RETRY_S, (1.0 - usage.tokens) / RATE_PER_S)
        return RateLimitError(f"{reason}; try again later", is_logged=is_due, retry_after_s=wait_s)


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
    tokens: float
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
        bucket.tokens = min(bucket.capacity, bucket.tokens + (now - bucket.updated_at) * rate)
        bucket.updated_at = now
        if bucket.tokens < amount:
            period = "hour" if budget.period_s == HOUR_S else "day"
            raise OverBudgetError(
                f"this site is above its {budget.what} of {bucket.capacity:.0f} in one {period}; try again later",
                is_logged=self._log(site, budget, now),
                retry_after_s=(amount - bucket.tokens) / rate,
            )
        bucket.tokens -= amount

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
