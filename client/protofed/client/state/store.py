"""What a site keeps from round to round, and the store that keeps it: the protocol, and one in memory.

A site's secret: random bytes in its state folder, readable by the daemon's user only, which never leave it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from protofed.client.policy.approval import Approvals
from protofed.client.policy.pause import SitePause
from protofed.client.state.daily_counts import DailyCounts
from protofed.client.state.dp_ledger import DpLedger
from protofed.client.state.own_scores import OwnScores
from protofed.common.errors import StateError
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Receipt, Task, Verdict
from protofed.common.storage import files

SECRET_FILE, SECRET_BYTES = ".secret", 32  # run names cannot begin with a dot


def load_or_create_secret(folder: Path) -> bytes:
    """The secret of a state folder, `SECRET_BYTES` long; created if there is none.

    Raises:
        StateError: it cannot be read or written, or is damaged. It is never replaced silently: a fit that is resumed
            with another secret would not be the fit that was started.
    """
    path = folder / SECRET_FILE
    if not path.exists():
        _create(path)
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; make this daemon's user its owner") from error
    if len(secret) != SECRET_BYTES:
        raise StateError(
            f"{path} holds {len(secret)} bytes, not {SECRET_BYTES}. Restore it, or remove it: the daemon then makes "
            "a new one"
        )
    return secret


def run_seed(secret: bytes, run: str) -> int:
    """A run's seed that only this site can make, 32 bytes: the same after a restart, unlinkable between runs."""
    return int.from_bytes(hashlib.blake2b(run.encode(), key=secret, digest_size=32).digest(), "big")


def _create(path: Path) -> None:
    # Not `files.write`: the mode must be 0600 before the first byte is in the file.
    temporary = path.with_name(f"{files.TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        files.sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise files.write_error(path, error) from error


# DUPLICATE counts too: the server stored this update earlier and only its first answer was lost.
COUNTED = (Verdict.ACCEPTED, Verdict.DUPLICATE)


@dataclass(frozen=True)
class SiteState:
    """A site's state after a counted round, i.e. one whose update the server accepted.

    Attributes:
        round: number of that round; 0: no round counted yet.
        client_state: the method's own tensors on the site, such as control variates.
        personal: the site's personal model, parts body and head; None before the first counted round.
        withheld: nothing of that round's fit left the site (`TrainedBy.withheld`), so no score of its model does.
    """

    round: int = 0
    client_state: Payload = field(default_factory=dict)
    personal: Payload | None = None
    withheld: bool = False


@dataclass(frozen=True)
class TrainedBy:
    """What of the run and the policy decides how a staged update may leave.

    Attributes:
        recipe: fingerprint of the run's; empty: staged by a version that did not say.
        withheld: the site's images decide that nothing of it is sent: random numbers take its place in the aggregation.
    """

    recipe: str = ""
    withheld: bool = False


@dataclass(frozen=True)
class FitOutcome:
    """The result of a fit: an update for the server, and the state that the site keeps once the update counts.

    Attributes:
        trained: by what rules.
    """

    update: Update
    client_state: Payload
    personal: Payload
    trained: TrainedBy = TrainedBy()


def earlier(round: int, scored: Mapping[int, str]) -> dict[int, str]:
    """The entries of `Store.scored` that are left when this round has been trained."""
    return {number: request for number, request in scored.items() if number < round}


class Store(Protocol):
    """A site's own storage, owned by its agent. A fit is first staged, then settled by the server's receipt.

    On disk every method raises StateError if a file is damaged or cannot be written.
    """

    @property
    def approvals(self) -> Approvals | None:
        """The runs that the site's operator approved; None: this store cannot record approvals."""

    @property
    def pause(self) -> SitePause | None:
        """The pause that a person at the site set; None: it cannot be paused, as in a simulation."""

    @property
    def own_scores(self) -> OwnScores | None:
        """The site's own scores of its runs; None: this store keeps none."""

    @property
    def daily_counts(self) -> DailyCounts | None:
        """How many tasks the site began today; None: they are not counted."""

    @property
    def dp_ledger(self) -> DpLedger | None:
        """What the site has spent of its privacy, over all runs; None: nobody counts, as in a simulation."""

    def secret(self) -> bytes:
        """The site's secret, `SECRET_BYTES` random bytes: the same at every call."""

    def last_counted(self, run: str, before: int) -> SiteState:
        """The state after the newest counted round below `before`; an empty state if there is none."""

    def newest_counted(self, run: str) -> int:
        """The newest round that has counted, also one behind a roll-back; 0: none has."""

    def counted(self, run: str) -> list[int]:
        """The rounds that have counted and are stored, but for those behind a roll-back, in order."""

    def scored(self, run: str) -> Mapping[int, str]:
        """By round, what was asked when its scores were given."""

    def mark_scored(self, run: str, round: int, request: str) -> None:
        """Store durably that the scores of a round are given; it may be scored again once it was trained again."""

    def last_base(self, run: str) -> tuple[int, Payload] | None:
        """The last base that `keep_base` stored for a run, with its round; None: there is none."""

    def keep_base(self, run: str, round: int, base: Payload) -> None:
        """Store durably the base that the site accepted last, in place of the one before.

        Args:
            round: that published it; 0: the first model.
        """

    def unsettled(self, run: str) -> list[tuple[Task, Update]]:
        """Staged updates without a receipt, the oldest first: the daemon or its connection died in between."""

    def trained_by(self, task: Task) -> TrainedBy:
        """`FitOutcome.trained` of a staged update."""

    def stage(self, task: Task, outcome: FitOutcome) -> None:
        """Store a fit's outcome durably; the agent calls this before it uploads the update.

        After a roll-back, what was stored of this round and of later rounds does not count any more. The same holds for
        rounds whose memory the fit passed over (`Task.state_before`).
        """

    def settle(self, task: Task, receipt: Receipt) -> None:
        """Store the receipt: the staged outcome counts if the verdict is in `COUNTED`, else it is removed."""

    def abandon(self, run: str) -> None:
        """Remove what was staged and has no receipt: the site has left the run, and will not send it."""

    def settled(self, run: str) -> frozenset[str]:
        """The task_ids of the counted rounds that are still stored."""

    def retain(self, rounds: int) -> None:
        """Set how many counted rounds behind the newest stay, for a run that may be rolled back; 0: all."""


class MemoryStore:
    """The store of a site in a simulation; nothing survives the process."""

    approvals: Approvals | None = None
    pause: SitePause | None = None
    own_scores: OwnScores | None = None
    daily_counts: DailyCounts | None = None  # time stands still in a simulation
    dp_ledger: DpLedger | None = None

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._counted: dict[str, tuple[SiteState, SiteState]] = {}  # by run: after the newest round, and before it
        self._staged: dict[str, tuple[Task, FitOutcome]] = {}  # by task_id
        self._bases: dict[str, tuple[int, Payload]] = {}  # by run
        self._scored: dict[str, dict[int, str]] = {}  # by run and round

    def secret(self) -> bytes:
        """Drawn by the constructor."""
        return self._secret

    def last_counted(self, run: str, before: int) -> SiteState:
        """See `Store.last_counted`; only the newest round and the one before are stored."""
        states = self._counted.get(run, ())
        return next((state for state in states if state.round < before), SiteState())

    def newest_counted(self, run: str) -> int:
        """See `Store.newest_counted`."""
        return max((state.round for state in self._counted.get(run, ())), default=0)

    def counted(self, run: str) -> list[int]:
        """See `Store.counted`."""
        return sorted(state.round for state in self._counted.get(run, ()) if state.round)

    def scored(self, run: str) -> Mapping[int, str]:
        """See `Store.scored`."""
        return self._scored.get(run, {})

    def mark_scored(self, run: str, round: int, request: str) -> None:
        """See `Store.mark_scored`."""
        self._scored.setdefault(run, {})[round] = request

    def last_base(self, run: str) -> tuple[int, Payload] | None:
        """See `Store.last_base`."""
        return self._bases.get(run)

    def keep_base(self, run: str, round: int, base: Payload) -> None:
        """See `Store.keep_base`."""
        self._bases[run] = (round, base)

    def unsettled(self, run: str) -> list[tuple[Task, Update]]:
        """See `Store.unsettled`."""
        return [(task, outcome.update) for task, outcome in self._staged.values() if task.run == run]

    def trained_by(self, task: Task) -> TrainedBy:
        """See `Store.trained_by`."""
        return self._staged[task.task_id][1].trained

    def stage(self, task: Task, outcome: FitOutcome) -> None:
        """See `Store.stage`."""
        self._staged[task.task_id] = (task, outcome)

    def settle(self, task: Task, receipt: Receipt) -> None:
        """See `Store.settle`."""
        _, outcome = self._staged.pop(task.task_id)
        if receipt.verdict in COUNTED:
            # A round may be abandoned after an update of it has counted: its next attempt begins where it did.
            former = self.last_counted(task.run, task.state_before)
            state = SiteState(task.round, outcome.client_state, outcome.personal, outcome.trained.withheld)
            self._counted[task.run] = state, former
            self._scored[task.run] = earlier(task.round, self._scored.get(task.run, {}))

    def abandon(self, run: str) -> None:
        """See `Store.abandon`."""
        self._staged = {key: (task, outcome) for key, (task, outcome) in self._staged.items() if task.run != run}

    def settled(self, run: str) -> frozenset[str]:
        """Always empty: a repeated task could only hurt state on disk, and this state ends with the process."""
        return frozenset()

    def retain(self, rounds: int) -> None:
        """Does nothing: simulations are not rolled back, so no round behind the one before the newest is asked for."""
