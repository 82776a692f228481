"""Which runs whoever answers for the site's data has approved: files of the state folder, one a run.

The daemon writes down what it is offered; `protofed client approve` approves one recipe, by its digest.
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

FOLDER = ".approvals"  # of the state folder; no run's name begins with a dot
OFFERED, APPROVED, DENIED = ".seen.json", ".json", ".denied.json"
MOST_OFFERED = 100  # runs that are remembered: a server that invents some must not fill the disk


class ApprovalStatus(StrEnum):
    """Of a run, at this site."""

    WAITING = "waiting"
    CHANGED = "changed since it was approved"
    APPROVED = "approved"
    DENIED = "denied"


@dataclass(frozen=True)
class Offer:
    """A run as the server offered it.

    Attributes:
        recipe: its JSON, as it came.
        digest: of that.
        at: UTC, RFC 3339.
    """

    run: str
    recipe: str
    digest: str
    at: str


@dataclass(frozen=True)
class Approval:
    """What was approved: this very recipe."""

    run: str
    digest: str
    at: str


_OFFER, _APPROVAL = TypeAdapter(Offer), TypeAdapter(Approval)


class Approvals:
    """Of one site. The daemon and the command line may use them at the same time.

    Args:
        folder: `FOLDER` of the site's state folder; made when it is first written to.
        now: in UTC.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder, self._now = folder, now

    def note(self, assignment: Assignment) -> None:
        """Write down what the server offers, once."""
        known = self._offer(check_id("run", assignment.run))
        fresh = digest(assignment.recipe.encode())
        if (known is None or known.digest != fresh) and len(assignment.recipe.encode()) <= MOST_RECIPE_BYTES:
            offer = Offer(assignment.run, assignment.recipe, fresh, self._stamp())
            self._write(assignment.run + OFFERED, asdict(offer))
            for old in self.offers()[:-MOST_OFFERED]:
                (self._folder / (old.run + OFFERED)).unlink(missing_ok=True)

    def offers(self) -> list[Offer]:
        """All runs that the server offered, the newest last."""
        names = [path.name.removesuffix(OFFERED) for path in self._folder.glob(f"*{OFFERED}")]
        return sorted(
            (offer for name in names if (offer := self._offer(name))), key=lambda offer: (offer.at, offer.run)
        )

    def offer(self, run: str) -> Offer:
        """What the server offered as this run.

        Raises:
            ConfigError: nothing yet.
        """
        found, runs = self._offer(check_id("run", run)), [offer.run for offer in self.offers()]
        if found is None and not runs:
            why = "was offered no run yet; start its daemon, or correct --state"
            raise ConfigError(f"the site of {self._folder.parent} {why}")
        if found is None:
            raise unknown("run", run, runs)
        return found

    def approve(self, offer: Offer) -> None:
        """Take part in this run with this recipe, and no other; an earlier denial ends."""
        self._write(offer.run + APPROVED, asdict(Approval(offer.run, offer.digest, self._stamp())))
        (self._folder / (offer.run + DENIED)).unlink(missing_ok=True)

    def deny(self, offer: Offer) -> None:
        """Take no part in this run, whatever its recipe and the policy, until it is approved."""
        self._write(offer.run + DENIED, asdict(Approval(offer.run, offer.digest, self._stamp())))

    def status(self, run: str, recipe: str) -> ApprovalStatus:
        """Of a run with this recipe; an approval that cannot be read is none.

        Raises:
            StateError: whether the run was denied cannot be told, because the folder cannot be read.
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

    def _offer(self, run: str) -> Offer | None:
        with contextlib.suppress(OSError, ValidationError):
            return _OFFER.validate_json((self._folder / (run + OFFERED)).read_bytes())
        return None

    def _write(self, name: str, facts: dict[str, str]) -> None:
        files.write(self._folder / name, json.dumps(facts).encode())

    def _stamp(self) -> str:
        return f"{self._now():%Y-%m-%dT%H:%M:%SZ}"
