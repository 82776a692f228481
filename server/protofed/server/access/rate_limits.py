"""What one certificate may ask at a time, and how often: nobody takes the room of all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from protofed.common.errors import OverQuotaError
from protofed.server.access.authorization import PLAINTEXT, Peer

log = structlog.get_logger()
IN_FLIGHT = 16  # calls; a daemon has 8 at most, and those of a connection that broke end within a minute
RATE_PER_S, BURST = 32.0, 128.0  # control calls: a daemon needs a few in a minute
BULK = frozenset({"GetChunk", "PutChunk", "GetState"})  # many and large: for them, the calls in flight are the limit
TELL_EVERY_S = 60.0
_MOST = 4096  # certificates that are remembered


@dataclass
class _Use:
    """What a certificate uses now."""

    tokens: float
    at: float
    calls: int = 0
    refused: int = 0  # since it was told
    told_at: float = -TELL_EVERY_S


class RateLimitError(OverQuotaError):
    """A call over a limit; `told`: it is the first one in a minute."""

    def __init__(self, message: str, *, told: bool) -> None:
        super().__init__(message)
        self.told = told


class RateLimits:
    """Calls in flight and, for all but chunks, calls in a time; in plain text nobody is told apart.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def hold(self, peer: Peer, call: str) -> Iterator[None]:
        """While a call is served.

        Raises:
            TooMany: it is not, for now.
        """
        if peer is PLAINTEXT:
            yield
            return
        use = self._use(peer)
        if use.calls >= IN_FLIGHT:
            raise self._refused(use, peer, f"{IN_FLIGHT} calls of this certificate are in flight")
        if use.tokens < 1.0:
            raise self._refused(use, peer, f"more than {RATE_PER_S:.0f} calls a second")
        if call not in BULK:
            use.tokens -= 1.0
        use.calls += 1
        try:
            yield
        finally:
            use.calls -= 1

    def charge(self, peer: Peer) -> None:
        """A call was refused: it counts once more, so that chunks nobody wants cannot come at any rate."""
        if peer is not PLAINTEXT:
            self._use(peer).tokens -= 1.0

    def _use(self, peer: Peer) -> _Use:
        """Up to date."""
        now = self._clock()
        if peer.fingerprint not in self._uses and len(self._uses) >= _MOST:
            self._uses = {who: use for who, use in self._uses.items() if use.calls or now - use.at < BURST / RATE_PER_S}
        use = self._uses.setdefault(peer.fingerprint, _Use(BURST, now))
        use.tokens, use.at = min(BURST, use.tokens + (now - use.at) * RATE_PER_S), now
        return use

    def _refused(self, use: _Use, peer: Peer, why: str) -> RateLimitError:
        use.refused += 1
        if told := self._clock() - use.told_at >= TELL_EVERY_S:
            told_of = {"peer": str(peer), "fingerprint": peer.fingerprint, **peer.site()}
            log.warning("too many calls", **told_of, why=why, refused=use.refused)
            use.told_at, use.refused = self._clock(), 0
        return RateLimitError(f"{why}; try again later", told=told)
