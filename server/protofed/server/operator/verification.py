"""Recomputes published states: whether ledger and blobs still give the very bytes that sites were sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, OutOfSpaceError, SecureAggregationError, StateError, short
from protofed.common.payload import Payload
from protofed.common.protocol.messages import TaskKind
from protofed.common.secure_aggregation.groups import Groups
from protofed.server.rounds.aggregation.aggregation import WEIGHT_CAP
from protofed.server.rounds.aggregation.publisher import Publisher, capped
from protofed.server.rounds.aggregation.robust_rule import RobustRule
from protofed.server.rounds.context import build_method, read_recipe, round_context
from protofed.server.rounds.machine.rules import Grouping
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, UpdateRow


class VerificationResult(StrEnum):
    """Result of recomputing a state."""

    SAME = "same"
    DIFFERENT = "different"  # the recomputed bytes differ from the published ones
    DAMAGED = "damaged"  # an input or the published state no longer matches its digest
    NOT_KEPT = "not-kept"  # an input was discarded as keep_rounds asks


@dataclass(frozen=True)
class Verified:
    """Digests of a state as published and as recomputed; None where it could not be recomputed, for `reason`."""

    finding: VerificationResult
    published: Digest
    recomputed: Digest | None = None
    reason: str = ""


def verify_round(records: LedgerReader, blobs: Blobs, run: str, round: int, attempt: int) -> Verified:
    """Recompute the state of a published round from the state before it and the updates that it used.

    For attempts that were rolled back, and for groups of sites, the ledger has times, but no order. The server's clock
    may have been set back. So the order of the times is tried first, and then other orders. If one gives the same
    bytes, the state was made in this order.

    Raises:
        ConfigError: there is no such round, it published nothing, or this version cannot read its recipe.
        OutOfSpaceError: handles or memory do not suffice to read a blob now; this says nothing about the state.
    """
    run_row = records.run(run)
    rows = records.rounds(run, rolled_back=True)
    attempts = [row for row in rows if (row.round, row.attempt) == (round, attempt)]
    if run_row is None or not attempts or attempts[0].state is None:
        raise ConfigError(f"run '{short(run)}' published nothing in attempt {attempt} of round {round}")
    row, published = attempts[0], attempts[0].state
    used = [update for update in records.updates(run, round, attempt) if update.counts]
    tried = _Recomputation(read_recipe(run_row), blobs, row, published, used)
    results = list[Verified]()
    for before, known in product(_states_before(row, rows), _groups_then(records, row, rows)):
        results.append(tried.verified(before, known))
        if results[-1].finding is VerificationResult.SAME:
            return results[-1]
    return results[0]


@dataclass(frozen=True)
class _Recomputation:
    """Of one published state, of the updates that it used."""

    recipe: Recipe
    blobs: Blobs
    row: RoundRow
    published: Digest
    used: list[UpdateRow]

    def verified(self, before: Digest | None, known: Groups) -> Verified:
        """Whether it comes out from this state; None: it is a first one.

        Args:
            known: groups of secure aggregation.
        """
        for address in [*(update.digest for update in self.used), *([before] if before else []), self.published]:
            if not self.blobs.has(address):
                why = f"discarded: {address[:12]}…, see keep_rounds"
                return Verified(VerificationResult.NOT_KEPT, self.published, reason=why)
        try:
            self.blobs.get(self.published)  # raises if the published blob itself is damaged
            recomputed = codec.digest(codec.encode(self._state(before, known)))
        except OutOfSpaceError:
            raise
        except (SecureAggregationError, StateError) as error:
            return Verified(VerificationResult.DAMAGED, self.published, reason=str(error))
        finding = VerificationResult.SAME if recomputed == self.published else VerificationResult.DIFFERENT
        return Verified(finding, self.published, recomputed)

    def _state(self, before: Digest | None, known: Groups) -> Payload:
        rules, method = self.recipe.federation, build_method(self.recipe)
        rule, fingerprint = RobustRule.of(self.recipe, method), self.recipe.fingerprint()
        publisher = Publisher(method, self.blobs, rules.min_contributors, rules.fixed_point, fingerprint, rule)
        state = publisher.restore(before).state if before else None
        grouping = Grouping.of_run(self.recipe)
        trained = {update.task.site for update in self.used if update.task.kind is not TaskKind.REFINE}
        groups = () if grouping is None else grouping.started(known, trained)
        most = self.row.statistics.get(WEIGHT_CAP, math.inf)  # none is capped without it
        counted = [capped(update, most) for update in self.used]
        context = round_context(self.recipe, self.row.round, self.row.enrolled)
        return publisher.recomputed(state, counted, context, groups)


def _states_before(row: RoundRow, rows: list[RoundRow]) -> list[Digest | None]:
    """The states that a round may have started from, the likeliest first; of a first model None.

    After a roll-back a round number has several published attempts. Those that count follow from each other; one that
    was rolled back used the newest that existed when it was opened.
    """
    earlier = [r for r in rows if r.round == row.round - 1 and r.state is not None]
    if not row.rolled_back:
        earlier = [r for r in earlier if not r.rolled_back]
    by_time = sorted(earlier, key=lambda r: r.closed_at or 0, reverse=True)
    by_time.sort(key=lambda r: (r.closed_at or 0) > row.opened_at)
    return list(dict.fromkeys(r.state for r in by_time)) or [None]


def _groups_then(records: LedgerReader, row: RoundRow, rows: list[RoundRow]) -> list[Groups]:
    """The groups of secure aggregation as they may have been when a round was closed, the likeliest first.

    One may have been dissolved since.
    """
    latest = max(r.closed_at or 0 for r in rows if (r.round, r.attempt) <= (row.round, row.attempt))
    return list(dict.fromkeys(records.groups(at) for at in (row.closed_at, latest, None)))
