"""The site's approvals of runs: files in the state folder, by run.

The daemon records the runs that the server offers; `protofed client approve` approves one recipe, by its digest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from protofed.common.clock import utc_now
from protofed.common.codec import digest
from protofed.common.errors import ConfigError, StateError, unknown
from protofed.common.ids import check_id
from protofed.common.protocol.messages import MOST_RECIPE_BYTES, Assignment
from protofed.common.storage import files

FOLDER = ".approvals"  # in the state folder; run names cannot begin with a dot
OFFERED, APPROVED, DENIED = ".seen.json", ".json", ".denied.json"
MOST_OFFERED = 100  # offers stored: a server that invents runs must not fill the disk


class ApprovalStatus(StrEnum):
    """The status of a run at this site."""

    WAITING = "waiting"
    CHANGED = "changed since it was approved"
    APPROVED = "approved"
    DENIED = "denied"


@dataclass(frozen=True)
class Offer:
    """A run as the server offered it.

    Attributes:
        recipe: its JSON, byte for byte as received.
        digest: BLAKE3-256 of that JSON.
        at: when it was first offered with this recipe, UTC, RFC 3339.
        min_cohort: no round is aggregated from fewer sites, as the server said; a server of 0.2.0 says nothing of it.
    """

    run: str
    recipe: str
    digest: str
    at: str
    min_cohort: int = 1


@dataclass(frozen=True)
class Approval:
    """An approval, or a denial, of one recipe.

    Attributes:
        digest: of the recipe's JSON: a run with another one needs another approval.
        at: UTC, RFC 3339.
    """

    run: str
    digest: str
    at: str


_OFFER, _APPROVAL = TypeAdapter(Offer), TypeAdapter(Approval)


class Approvals:
    """The approvals of one site. The daemon and the command line may use them at the same time: every write is atomic.

    Args:
        folder: `FOLDER` of the site's state folder; created by the first write.
        now: the current time, UTC.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder, self._now = folder, now

    def record_offer(self, assignment: Assignment) -> None:
        """Record what the server offers, unless the same recipe is recorded; called at each enrolling.

        Raises:
            ProtocolError: the run's name is none.
            StateError: it cannot be written.
        """
        recorded = self._read_offer(check_id("run", assignment.run))  # the name becomes a file's: check it first
        offered = digest(assignment.recipe.encode())
        same = recorded is not None and (recorded.digest, recorded.min_cohort) == (offered, assignment.min_cohort)
        if not same and len(assignment.recipe.encode()) <= MOST_RECIPE_BYTES:
            offer = Offer(assignment.run, assignment.recipe, offered, self._stamp(), assignment.min_cohort)
            self._write(assignment.run + OFFERED, asdict(offer))
            for oldest in self.offers()[:-MOST_OFFERED]:
                (self._folder / (oldest.run + OFFERED)).unlink(missing_ok=True)

    def offers(self) -> list[Offer]:
        """All recorded offers, the newest last; unreadable ones are left out."""
        names = [path.name.removesuffix(OFFERED) for path in self._folder.glob(f"*{OFFERED}")]
        return sorted(
            (offer for name in names if (offer := self._read_offer(name))), key=lambda offer: (offer.at, offer.run)
        )

    def offer(self, run: str) -> Offer:
        """The recorded offer of a run.

        Raises:
            ConfigError: there is none.
        """
        offer, runs = self._read_offer(check_id("run", run)), [offer.run for offer in self.offers()]
        if offer is None and not runs:
            problem = "was offered no run yet; start its daemon, or correct --state"
            raise ConfigError(f"the site of {self._folder.parent} {problem}")
        if offer is None:
            raise unknown("run", run, runs)
        return offer

    def approve(self, offer: Offer) -> None:
        """Approve the run with this recipe and no other; this replaces an earlier denial."""
        self._write(offer.run + APPROVED, asdict(Approval(offer.run, offer.digest, self._stamp())))
        (self._folder / (offer.run + DENIED)).unlink(missing_ok=True)

    def deny(self, offer: Offer) -> None:
        """Deny the run, whatever its recipe and even under a policy that approves automatically; `approve` lifts it."""
        self._write(offer.run + DENIED, asdict(Approval(offer.run, offer.digest, self._stamp())))

    def status(self, run: str, recipe: str) -> ApprovalStatus:
        """The status of a run with this recipe (its JSON). An approval that cannot be read counts as none.

        Raises:
            StateError: the folder cannot be read, so the run may have been denied.
        """
        try:
            (self._folder / (check_id("run", run) + DENIED)).stat()
            return ApprovalStatus.DENIED
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StateError(
                f"cannot read {self._folder}: {error.strerror}; make it readable for the daemon"
            ) from error
        with contextlib.suppress(OSError, ValidationError):
            approval = _APPROVAL.validate_json((self._folder / (check_id("run", run) + APPROVED)).read_bytes())
            same = (approval.run, approval.digest) == (run, digest(recipe.encode()))
            return ApprovalStatus.APPROVED if same else ApprovalStatus.CHANGED
        return ApprovalStatus.WAITING

    def _read_offer(self, run: str) -> Offer | None:
        with contextlib.suppress(OSError, ValidationError):
            return _OFFER.validate_json((self._folder / (run + OFFERED)).read_bytes())
        return None

    def _write(self, name: str, record: dict[str, str | int]) -> None:
        files.write(self._folder / name, json.dumps(record).encode())

    def _stamp(self) -> str:
        return f"{self._now():%Y-%m-%dT%H:%M:%SZ}"
