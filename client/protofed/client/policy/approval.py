"""What the site has decided on runs: files in the state folder, by run.

The daemon records the runs that the server offers, and the runs that the site's policy approves by itself. `protofed
client approve` approves one recipe, by its digest. `client deny` and `withdraw` take the site out of a run at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from protofed.common.clock import stamp, utc_now
from protofed.common.codec import digest
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import ConfigError, StateError, WithdrawnError, unknown
from protofed.common.ids import check_id
from protofed.common.protocol.messages import MAX_RECIPE_BYTES, Assignment
from protofed.common.storage import files

FOLDER = ".approvals"  # in the state folder; run names cannot begin with a dot
OFFERED, APPROVED, DENIED, BY_POLICY = ".seen.json", ".json", ".denied.json", ".policy.json"
FIRST_TASK = ".first.json"
CLASSES = ".classes.json"  # digests of the lists of classes whose runs need no approval of a person for them
MAX_OFFERED = 100  # offers stored: a server that invents runs must not fill the disk


class ApprovalStatus(StrEnum):
    """The status of a run at this site."""

    WAITING = "waiting"
    CHANGED = "changed since it was approved"
    APPROVED = "approved"  # by a person
    BY_POLICY = "approved by policy"
    DENIED = "denied"  # the site had never taken part
    WITHDRAWN = "withdrawn"  # it had


OUT = (ApprovalStatus.DENIED, ApprovalStatus.WITHDRAWN)


@dataclass(frozen=True)
class Offer:
    """A run as the server offered it.

    Attributes:
        recipe: its JSON, byte for byte as received.
        digest: BLAKE3-256 of that JSON.
        at: when it was first offered with this recipe, UTC, RFC 3339.
        min_cohort: no round is aggregated from fewer sites, as the server said.
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
        by: the person's user name on the site's machine; it stays there. Empty: not known, or the policy.
        policy: name of the file of a policy that approves by itself; empty: a person decided.
        policy_digest: BLAKE3-256 of that file.
        took_part: of a denial: whether the site had accepted tasks of the run before.
    """

    run: str
    digest: str
    at: str
    by: str = ""
    policy: str = ""
    policy_digest: str = ""
    took_part: bool = False


_OFFER, _APPROVAL, _DIGESTS = TypeAdapter(Offer), TypeAdapter(Approval), TypeAdapter(list[str])


@lru_cache(maxsize=8)
def classes_digest(recipe: str) -> str | None:
    """Of a recipe's JSON, a digest of its classes: how many, and their names. None: it is no recipe."""
    try:
        read = parse_json(recipe, Recipe, "an offered recipe")
    except ConfigError:
        return None
    return digest(json.dumps([read.classes, read.class_names]).encode())


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
        if not same and len(assignment.recipe.encode()) <= MAX_RECIPE_BYTES:
            offer = Offer(assignment.run, assignment.recipe, offered, stamp(self._now()), assignment.min_cohort)
            self._write(assignment.run + OFFERED, asdict(offer))
            for oldest in self.offers()[:-MAX_OFFERED]:
                for suffix in (BY_POLICY, FIRST_TASK, OFFERED):  # what a person decided stays
                    (self._folder / (oldest.run + suffix)).unlink(missing_ok=True)

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
            problem = "was offered no run yet. Start its daemon, or correct --state"
            raise ConfigError(f"the site of {self._folder.parent} {problem}")
        if offer is None:
            raise unknown("run", run, runs)
        return offer

    def approve(self, offer: Offer, by: str = "") -> None:
        """Approve the run with this recipe and no other; this replaces an earlier denial."""
        self._write(offer.run + APPROVED, asdict(Approval(offer.run, offer.digest, stamp(self._now()), by)))
        (self._folder / (offer.run + DENIED)).unlink(missing_ok=True)

    def deny(self, offer: Offer, by: str = "", *, took_part: bool = False) -> None:
        """Take the site out of the run at once, whatever its recipe and its policy; `approve` lifts it."""
        denial = Approval(offer.run, offer.digest, stamp(self._now()), by, took_part=took_part)
        self._write(offer.run + DENIED, asdict(denial))

    def approve_by_policy(self, assignment: Assignment, policy: str, policy_digest: str) -> None:
        """Record that the site's policy approves the run by itself, unless that is recorded; called at each enrolling.

        Not of a run whose offer is not recorded, as of a recipe that is too long.

        Raises:
            StateError: it cannot be written.
        """
        offered, before = digest(assignment.recipe.encode()), self._read(assignment.run, BY_POLICY)
        same = before is not None and (before.digest, before.policy_digest) == (offered, policy_digest)
        if not same and self._read_offer(assignment.run) is not None:
            now = Approval(assignment.run, offered, stamp(self._now()), "", policy, policy_digest)
            self._write(assignment.run + BY_POLICY, asdict(now))

    def end_approval_by_policy(self, run: str) -> None:
        """Called where the site's policy leaves the approval to a person."""
        with contextlib.suppress(OSError):
            (self._folder / (check_id("run", run) + BY_POLICY)).unlink(missing_ok=True)

    def record_task(self, assignment: Assignment) -> None:
        """Record when the site accepted its first task of a run, unless that is recorded; StateError if it cannot."""
        if not (self._folder / (check_id("run", assignment.run) + FIRST_TASK)).exists():
            offered = digest(assignment.recipe.encode())
            self._write(assignment.run + FIRST_TASK, asdict(Approval(assignment.run, offered, stamp(self._now()))))

    def knows_classes(self, assignment: Assignment) -> bool:
        """Whether the run has a list of classes that `learn_classes` recorded; a recipe that is none has no classes.

        A site that takes no image of a class that a run does not name tells the server so by declining. Asked with one
        class less after the other, it would tell which classes it has.
        """
        classes = classes_digest(assignment.recipe)
        return classes is None or classes in (self._known_classes() or ())

    def learn_classes(self, assignment: Assignment) -> None:
        """Record a run's list of classes if it is the first that the site is offered, or a person approved the run.

        Raises:
            StateError: it cannot be written.
        """
        known, classes = self._known_classes(), classes_digest(assignment.recipe)
        if classes is None or (known is not None and classes in known):
            return
        if known is None or self.status(assignment.run, assignment.recipe) is ApprovalStatus.APPROVED:
            files.write(self._folder / CLASSES, json.dumps([*(known or ()), classes]).encode())

    def _known_classes(self) -> list[str] | None:
        """None: none was ever recorded. A file that cannot be read knows none, and so a person decides."""
        try:
            return _DIGESTS.validate_json((self._folder / CLASSES).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            return []

    def first_task_at(self, run: str) -> str:
        """When the site accepted its first task of a run, UTC, RFC 3339; empty: none that is known."""
        record = self._read(run, FIRST_TASK)
        return "" if record is None else record.at

    def check_not_out(self, run: str) -> None:
        """Check that the site was not taken out of the run; called before anything of the run is sent.

        Raises:
            WithdrawnError: it was.
            StateError: the folder cannot be read, so it may have been.
        """
        if self._is_denied(run):
            raise WithdrawnError(
                f"this site has left run {run} and sends nothing for it. `protofed client approve` lets the site "
                "take part again"
            )

    def decision(self, offer: Offer) -> tuple[ApprovalStatus, Approval | None]:
        """The status of an offered run for the site's people, and the record that gives it; errors as of `status`."""
        status = self.status(offer.run, offer.recipe)
        suffix = DENIED if status in OUT else BY_POLICY if status is ApprovalStatus.BY_POLICY else APPROVED
        return status, self._read(offer.run, suffix)

    def took_part(self, run: str) -> bool:
        """Whether the site has accepted a task of the run."""
        return bool(self.first_task_at(run))

    def status(self, run: str, recipe: str) -> ApprovalStatus:
        """The status of a run with this recipe (its JSON). An approval that cannot be read counts as none.

        Raises:
            StateError: the folder cannot be read, so the run may have been denied.
        """
        offered = (run, digest(recipe.encode()))
        if self._is_denied(run):
            denial = self._read(run, DENIED)
            return ApprovalStatus.WITHDRAWN if denial is not None and denial.took_part else ApprovalStatus.DENIED
        approval, by_policy = self._read(run, APPROVED), self._read(run, BY_POLICY)
        if approval is not None and (approval.run, approval.digest) == offered:
            return ApprovalStatus.APPROVED
        if by_policy is not None and (by_policy.run, by_policy.digest) == offered:
            return ApprovalStatus.BY_POLICY
        return ApprovalStatus.WAITING if approval is None else ApprovalStatus.CHANGED

    def _is_denied(self, run: str) -> bool:
        try:
            (self._folder / (check_id("run", run) + DENIED)).stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StateError(
                f"cannot read {self._folder}: {error.strerror}; make it readable for the daemon"
            ) from error
        return True

    def _read(self, run: str, suffix: str) -> Approval | None:
        with contextlib.suppress(OSError, ValidationError):
            return _APPROVAL.validate_json((self._folder / (check_id("run", run) + suffix)).read_bytes())
        return None

    def _read_offer(self, run: str) -> Offer | None:
        with contextlib.suppress(OSError, ValidationError):
            return _OFFER.validate_json((self._folder / (run + OFFERED)).read_bytes())
        return None

    def _write(self, name: str, record: dict[str, str | int | bool]) -> None:
        files.write(self._folder / name, json.dumps(record).encode())
