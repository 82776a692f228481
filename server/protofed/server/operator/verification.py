"""Recomputes published states: whether ledger and blobs still give the very bytes that sites were sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, SecureSumError, StateError, short
from protofed.common.protocol.messages import TaskKind
from protofed.server.rounds.aggregation import WEIGHT_CAP
from protofed.server.rounds.counting import capped
from protofed.server.rounds.grouping import Grouping
from protofed.server.rounds.publisher import Publisher
from protofed.server.rounds.resume import method_of, recipe_of, round_context
from protofed.server.rounds.robust_rule import RobustRule
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow


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

    Raises:
        ConfigError: there is no such round, it published nothing, or this version cannot read its recipe.
    """
    run_row = records.run(run)
    rows = records.rounds(run, rolled_back=True)
    attempts = [row for row in rows if (row.round, row.attempt) == (round, attempt)]
    if run_row is None or not attempts or attempts[0].state is None:
        raise ConfigError(f"run '{short(run)}' published nothing in attempt {attempt} of round {round}")
    recipe, row, published = recipe_of(run_row), attempts[0], attempts[0].state
    used = [update for update in records.updates(run, round, attempt) if update.counts]
    before = _state_before(row, rows)
    inputs = [update.digest for update in used] + ([before] if before else [])
    for address in [*inputs, published]:
        if not blobs.has(address):
            return Verified(
                VerificationResult.NOT_KEPT, published, reason=f"discarded: {address[:12]}…, see keep_rounds"
            )
    rules, method = recipe.federation, method_of(recipe)
    rule = RobustRule.of(recipe, method)
    publisher = Publisher(method, blobs, rules.min_contributors, rules.fixed_point, recipe.fingerprint(), rule)
    try:
        blobs.get(published)  # raises if the published blob itself is damaged
        state = publisher.restore(before).state if before else None
        grouping = Grouping.of_run(recipe)
        known = records.groups(row.closed_at)  # of then: one may have been dissolved since
        trained = {update.task.site for update in used if update.task.kind is not TaskKind.REFINE}
        groups = () if grouping is None else grouping.begun(known, trained)
        most = row.statistics.get(WEIGHT_CAP, math.inf)  # rounds of 0.2.0 have none
        counted = [capped(update, most) for update in used]
        context = round_context(recipe, row.round, row.sites)
        recomputed = codec.digest(codec.encode(publisher.recomputed(state, counted, context, groups)))
    except (SecureSumError, StateError) as error:
        return Verified(VerificationResult.DAMAGED, published, reason=str(error))
    return Verified(
        VerificationResult.SAME if recomputed == published else VerificationResult.DIFFERENT, published, recomputed
    )


def _state_before(row: RoundRow, rows: list[RoundRow]) -> Digest | None:
    """The state that a round started from.

    After a roll-back a round number has several published attempts; the round used the newest that existed when it was
    opened.
    """
    earlier = [
        r for r in rows if r.round == row.round - 1 and r.state is not None and (r.closed_at or 0) <= row.opened_at
    ]
    return max(earlier, key=lambda r: r.closed_at or 0).state if earlier else None
