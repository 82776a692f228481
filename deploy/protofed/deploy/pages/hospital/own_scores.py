"""A site's own scores of a run as a table, and which of them left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protofed.client.state.own_scores import FOLDER, OwnScores, ScoredRound
from protofed.deploy.audit.handed_in import UNLISTED, HandedIn, rounds_text
from protofed.deploy.pages.hospital.site import Site
from protofed.deploy.site.score_words import meaning, names_of

SHOWN: Final = 50  # rounds, the newest
ALL_LISTED: Final = "more left than the log lists"
ARCHIVED: Final = "the log's older files are in an archive"


@dataclass(frozen=True)
class OwnScoreTable:
    """The scores of single classes are in `protofed client scores --json` only.

    Attributes:
        names: of the columns; `meanings` of each.
        every: all rounds, the oldest first.
        rounds: the newest of them, the newest first.
        left: by name, in which rounds it left, and in which in a secure sum alone, in words; empty: it stayed.
        sent: what was handed in of the run.
    """

    names: Sequence[str]
    meanings: Sequence[str]
    every: Sequence[ScoredRound]
    rounds: Sequence[ScoredRound]
    left: Sequence[str]
    more: int
    sent: HandedIn


def own_scores(site: Site, run: str) -> OwnScoreTable:
    """The table of a run.

    Raises:
        StateError: the scores or the log cannot be read.
    """
    kept, sent = OwnScores(site.state / FOLDER), site.handed_in(run)
    rounds = kept.rounds(run) if run in kept.runs() else []
    names = names_of(rounds)
    return OwnScoreTable(
        names,
        [meaning(name) for name in names],
        rounds,
        list(reversed(rounds))[:SHOWN],
        [_left(name, rounds, sent) for name in names],
        max(0, len(rounds) - SHOWN),
        sent,
    )


def _left(name: str, rounds: Sequence[ScoredRound], sent: HandedIn) -> str:
    gone = {scored.round for scored in rounds if name in sent.names.get(scored.round, ())}
    summed = {scored.round for scored in rounds if name in sent.summed.get(scored.round, ())}
    unlisted = any(UNLISTED in sent.names.get(scored.round, ()) for scored in rounds)
    words = [f"rounds {rounds_text(gone)}"] if gone else [ALL_LISTED] if unlisted else []
    if summed:
        words.append(f"in a secure sum, as part of a mean over sites: rounds {rounds_text(summed)}")
    return "; ".join(words) or (ARCHIVED if sent.gap else "")
