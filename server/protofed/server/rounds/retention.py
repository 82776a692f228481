"""Which blobs of a run go: those that only rounds behind `keep_rounds` name, and the best round does not."""

from __future__ import annotations

from protofed.common.codec import Digest
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


def _best_of_others(records: LedgerReader, blobs: Blobs, run: str, old: set[Digest]) -> set[Digest]:
    """What the best rounds of other runs need: runs of one seed begin with the same bytes."""
    found = {other: best_kept(records, blobs, other) for other in records.sharing(run, old)}
    return set().union(*(records.made_of(other, best.round) for other, best in found.items() if best is not None))
