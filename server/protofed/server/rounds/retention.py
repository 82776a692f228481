"""Which blobs of a run go: those that only rounds behind `keep_rounds` name, but for the best; and which are there."""

from __future__ import annotations

from protofed.common.codec import Digest
from protofed.common.errors import ConfigError
from protofed.server.rounds.best_round import Rankings, best_and_former, best_kept
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.reader import LedgerReader


def prune(records: LedgerReader, blobs: Blobs, run: str, before: int, rankings: Rankings) -> None:
    """Discard blobs that no round from `before` on names.

    The best round keeps its state, for exports and roll-backs, and what it was made of, so that it can be verified.
    """
    best, former = best_and_former(records, blobs, run, rankings)
    old, needed = records.referenced(run, before, former)
    if best is not None:
        needed |= records.made_of(run, best.round)
    gone = old - needed - _best_of_others(records, blobs, run, old - needed)
    states = records.states(run, gone)
    for address in sorted(gone, key=states.__contains__):  # states last: by its state a former best round is found
        blobs.discard(address)


def kept_state(records: LedgerReader, blobs: Blobs, run: str, round: int) -> Digest:
    """The state that a round published.

    Raises:
        ConfigError: it published none, or its state is no longer kept.
    """
    states = {row.round: row.state for row in records.rounds(run) if row.state is not None}
    kept = [number for number, state in states.items() if blobs.has(state)]
    if round not in kept:
        reason = "is no longer kept (see keep_rounds)" if round in states else "does not exist"
        rounds = ", ".join(map(str, sorted(kept))) or "none yet"
        raise ConfigError(f"the state of round {round} {reason}; expected one of {rounds}")
    return states[round]


def _best_of_others(records: LedgerReader, blobs: Blobs, run: str, old: set[Digest]) -> set[Digest]:
    """What the best rounds of other runs need: runs of one seed begin with the same bytes."""
    found = {other: best_kept(records, blobs, other) for other in records.sharing(run, old)}
    return set().union(*(records.made_of(other, best.round) for other, best in found.items() if best is not None))
