"""Epsilon after some of a site's fits, computed beside the pages: one composition may take a second."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protofed.client.policy.dp_accountant import NoisySums, epsilon
from protofed.client.state.dp_ledger import Spend, Spent

MOST = 60  # points


@dataclass(frozen=True)
class PrivacyPoint:
    """What is spent after a fit.

    Attributes:
        fit: from 1.
        at: when it was counted, UTC, RFC 3339.
        epsilon: of it and all fits before; None: beyond all use.
    """

    fit: int
    at: str
    run: str
    round: int
    epsilon: float | None


@dataclass
class PrivacyCurve:
    """The points of one ledger, which grows. Threads share it.

    Args:
        account: epsilon at a delta of mechanisms.
    """

    account: Callable[[Iterable[NoisySums], float], float] = epsilon
    _known: dict[tuple[int, float], float] = field(default_factory=dict)  # by fits and delta
    _spends: tuple[Spend, ...] = ()  # those whose points are known
    _computes: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def points(self, spent: Spent, delta: float) -> tuple[list[PrivacyPoint], bool]:
        """The points that are known by now, in order, and whether these are all.

        The first call begins to compute them. Half-written lines count in the last point alone: nobody knows when they
        were written.
        """
        fits = chosen(len(spent.spends))
        with self._lock:
            if spent.spends[: len(self._spends)] != self._spends:  # another ledger was put in its place
                self._known.clear()
            self._spends = spent.spends
            missing = [n for n in fits if (n, delta) not in self._known]
            if missing and (self._computes is None or not self._computes.is_alive()):
                self._computes = threading.Thread(
                    target=self._compute, args=(spent.spends, missing, delta), name="privacy curve", daemon=True
                )
                self._computes.start()
            known = {n: self._known[n, delta] for n in fits if (n, delta) in self._known}
        if spent.torn and len(spent.spends) in known:
            known[len(spent.spends)] = self.account(spent.events(), delta)
        points = [_point(spent.spends[n - 1], n, value) for n, value in known.items()]
        return points, not missing

    def _compute(self, spends: tuple[Spend, ...], fits: list[int], delta: float) -> None:
        for n in fits:
            value = self.account(Spent(spends[:n]).events(), delta)
            with self._lock:
                if self._spends[:n] != spends[:n]:
                    return
                self._known[n, delta] = value


def chosen(fits: int) -> list[int]:
    """At most `MOST` numbers of fits, evenly spaced, the last among them; the others stay chosen while it grows."""
    if not fits:
        return []
    step = 1
    while fits // step >= MOST:
        step *= 2
    return [*range(step, fits, step), fits]


def _point(spend: Spend, fit: int, value: float) -> PrivacyPoint:
    return PrivacyPoint(fit, spend.at, spend.run, spend.round, value if math.isfinite(value) else None)
