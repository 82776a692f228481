"""What the pages of one site know: its state folder, its policy, its audit log, and the privacy that its fits spent."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from protofed.client.policy.approval import Approvals, Offer
from protofed.client.policy.dp_accountant import NoisySums, epsilon
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PrivacyBudget
from protofed.client.state.dp_ledger import FILE as LEDGER
from protofed.client.state.dp_ledger import Spend, Spent, read
from protofed.common import plugins
from protofed.common.codec import Digest
from protofed.common.errors import PolicyViolationError, ProtofedError
from protofed.deploy import shipped
from protofed.deploy.pages.hospital.examination import Examiner, SiteSettings
from protofed.deploy.pages.hospital.site_log import SiteLog
from protofed.deploy.pages.pictures import Pictures
from protofed.deploy.site import orders
from protofed.deploy.site.offered_runs import parse_offer
from protofed.deploy.site.partners import PartnersView
from protofed.deploy.site.privacy import PrivacySpent, privacy_spent

MAX_POINTS = 60  # points


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
    """At most `MAX_POINTS` numbers of fits, evenly spaced, with the last one; the others stay while it grows."""
    if not fits:
        return []
    step = 1
    while fits // step >= MAX_POINTS:
        step *= 2
    return [*range(step, fits, step), fits]


def _point(spend: Spend, fit: int, value: float) -> PrivacyPoint:
    return PrivacyPoint(fit, spend.at, spend.run, spend.round, value if math.isfinite(value) else None)


DELTA = 1e-5  # as `protofed client budget` gives epsilon unless the policy names one
MAX_PREVIEWS = 20  # kept: each takes seconds to make


@dataclass
class HospitalSite:
    """One site. Threads share it.

    Attributes:
        state: its state folder.
        policy_name: as its settings name it; None: none was given.
        settings: of its daemon; None: the page was started without them, and can examine nothing.
    """

    state: Path
    policy_name: str | None = None
    settings: SiteSettings | None = None
    log: SiteLog = field(init=False)
    examiner: Examiner | None = field(init=False)
    pictures: Pictures = field(default_factory=Pictures)
    privacy: PrivacyCurve = field(default_factory=PrivacyCurve)
    _previews: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    # The accountant takes tens of milliseconds and more, and the overview asks every two seconds.
    _spent: tuple[Spent, PrivacyBudget | None, PrivacySpent] | None = None
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.log = SiteLog(self.state)
        self.examiner = None if self.settings is None else Examiner(self.settings)

    @property
    def approvals(self) -> Approvals:
        """The site's decisions on runs; ConfigError if the state folder is gone."""
        return orders.open_approvals(self.state)

    def policy(self) -> Policy | None:
        """The policy as it is now; None: none was given.

        Raises:
            PolicyViolationError: there is no such file.
            ConfigError: it cannot be read, or is invalid.
        """
        return None if self.policy_name is None else Policy.read(shipped.policy(self.policy_name))

    def policy_problem(self) -> str:
        """Why no policy counts; empty: one does, or none was given."""
        try:
            self.policy()
        except ProtofedError as error:
            return str(error)
        return ""

    def approves_by_itself(self) -> bool:
        """Whether its policy takes part in runs without a person's approval; False also where no policy counts."""
        try:
            policy = self.policy()
        except ProtofedError:
            return False
        return policy is not None and policy.rules.approval == "automatic"

    def ledger(self) -> Spent:
        """Its fits with noise; StateError if their ledger is damaged."""
        return read(self.state / LEDGER)

    def spent(self) -> PrivacySpent:
        """The privacy that the site has spent.

        Raises:
            StateError: the ledger is damaged.
            PolicyViolationError, ConfigError: as `policy`.
        """
        policy, spent = self.policy(), self.ledger()
        budget = None if policy is None else policy.rules.dp
        with self._lock:
            if self._spent is None or self._spent[:2] != (spent, budget):
                self._spent = spent, budget, privacy_spent(spent, budget, DELTA)
            return self._spent[2]

    def preview(self, offer: Offer) -> Mapping[str, Any]:
        """What `protofed client preview --json` prints of an offered run, by the site's policy; kept until one changes.

        Raises:
            ConfigError: the recipe or the policy cannot be used.
            PolicyViolationError: there is no policy where one was named, or it does not allow the model's code.
            StateError: the ledger is damaged.
        """
        from protofed.deploy.site.plan import plain, site_plan  # with PyTorch, which takes seconds

        policy, spent = self.policy(), self.ledger()
        partners = PartnersView.of(self.state)
        key = (
            offer.digest,
            "" if policy is None else policy.origin.digest,
            f"{len(spent.spends)}+{spent.torn}+{partners}",
        )
        with self._lock:
            if key not in self._previews:
                if policy is not None:
                    plugins.allow(policy.rules.plugins)
                digest, cohort = Digest(offer.digest), offer.min_cohort
                plan = site_plan(
                    parse_offer(offer), policy, digest=digest, cohort=cohort, spent=spent, partners=partners
                )
                self._previews[key] = plain(plan)
                if len(self._previews) > MAX_PREVIEWS:
                    del self._previews[next(iter(self._previews))]
            return self._previews[key]

    def check_allowed(self, offer: Offer) -> None:
        """Check that the policy lets the site take part, as `protofed client approve` does.

        Raises:
            PolicyViolationError: it refuses.
            Others as `preview`.
        """
        if refusals := self.preview(offer)["refusals"]:
            raise PolicyViolationError("; ".join(refusals))
