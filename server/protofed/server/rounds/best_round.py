"""The best round of a run by one score, as a function of the ledger's scores alone: the same after every restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import SiteId
from protofed.common.protocol.score_names import JUDGED_BY
from protofed.common.statistics import spreads
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RunRow

ROUNDING = 1e-9  # of the difference of two scores: 0.3 - 0.2 is less than 0.1
MISSED = 3  # newest scored rounds whose predecessors may still be kept as the best: a crash leaves one out at most
Scores = Mapping[SiteId, Mapping[str, float]]
Means: TypeAlias = Callable[[str], Mapping[int, float]]  # of a score's name: its means over sites by round


class Kept(Protocol):
    """Which blobs there are."""

    def has(self, address: Digest) -> bool:
        """Whether the blob exists; its bytes are not checked."""


@dataclass(frozen=True)
class BestRound:
    """A round, and the score that it is judged by, as the mean over sites."""

    round: int
    score: str
    value: float


@dataclass(frozen=True)
class Standstill:
    """So many scored rounds have not improved `score` on round `since`; 0: the newest one did."""

    score: str
    since: int
    rounds: int


@dataclass(frozen=True)
class JudgedRounds:
    """The scored rounds of a run, with the score that they are judged by; at least one.

    Attributes:
        means: over sites, by round; rounds without this score are left out.
    """

    score: str
    means: Mapping[int, float]

    @property
    def ranked(self) -> list[BestRound]:
        """The best first; of equals, the earlier one."""
        order = sorted(self.means, key=lambda number: (-self.means[number], number))
        return [BestRound(number, self.score, self.means[number]) for number in order]

    def standstill(self, min_improvement: float) -> Standstill:
        """How long no round was better than the last one that improved by `min_improvement`, and by more than 0.

        Small steps add up: each is measured from that round, not from the one before it.
        """
        since, rounds = min(self.means), 0
        for number in sorted(self.means):
            gain = self.means[number] - self.means[since]
            improved = gain > 0 and gain >= min_improvement - ROUNDING
            since, rounds = (number, 0) if improved else (since, rounds + (number != since))
        return Standstill(self.score, since, rounds)


def check_best_by(recipe: Recipe, *, global_model: bool) -> None:
    """Refuse a score that no round can have.

    Raises:
        ConfigError: it is one of the global model, and the recipe's method has none.
    """
    chosen = recipe.federation.best_by or ""
    if chosen.startswith("global.") and not global_model:
        raise ConfigError(
            f"federation.best_by = '{chosen}': method {recipe.method.name} has no global model; take a score of the "
            "sites' own models, such as 'personal.balanced_accuracy'"
        )


def means_of(scores: Mapping[int, Scores], name: str) -> dict[int, float]:
    """One score's mean over sites, by round; rounds without it are left out."""
    having = {
        number: {site: {name: values[name]} for site, values in sites.items() if name in values}
        for number, sites in scores.items()
    }
    return {number: spreads(sites)[name].mean for number, sites in having.items() if sites}


def judged(means: Means, best_by: str | None, until: int | None = None) -> JudgedRounds | None:
    """Rounds by the score of that name, or by the first of `JUDGED_BY` that there is; None: no round has one.

    Args:
        until: rounds after it are left out.
    """
    for name in _names(best_by):
        if chosen := {number: mean for number, mean in means(name).items() if until is None or number <= until}:
            return JudgedRounds(name, chosen)
    return None


def judged_rounds(records: LedgerReader, run: str, until: int | None = None) -> JudgedRounds | None:
    """The rounds of a run by the score that its recipe chooses; None: there are none, or no such run.

    Args:
        until: rounds after it are left out.
    """
    row = records.run(run)
    return None if row is None else judged(_reader(records, run), _best_by(row), until)


def best_kept(records: LedgerReader, blobs: Kept, run: str) -> BestRound | None:
    """The best round whose state is still kept.

    That is the best of all, unless the run was rolled back after a better one had made it superfluous, or was begun by
    a version that kept no best round.
    """
    return first_kept(records, blobs, run, judged_rounds(records, run))


def first_kept(records: LedgerReader, blobs: Kept, run: str, rounds: JudgedRounds | None) -> BestRound | None:
    """The best of these rounds whose state is still kept."""
    return None if rounds is None else _kept(_states(records, run), blobs, rounds)


def best_and_former(records: LedgerReader, blobs: Kept, run: str) -> tuple[BestRound | None, set[int]]:
    """What `best_kept` gives, and the rounds that it gave lately, before the newest scores came."""
    row = records.run(run)
    means, best_by = _reader(records, run), None if row is None else _best_by(row)
    if row is None or (rounds := judged(means, best_by)) is None:
        return None, set()
    states = _states(records, run)
    best, former = _kept(states, blobs, rounds), set()
    for newest in sorted(rounds.means)[-MISSED:]:
        earlier = judged(means, best_by, newest - 1)
        if earlier is not None and (was := _kept(states, blobs, earlier)) is not None:
            former.add(was.round)
    return best, former - ({best.round} if best else set())


def _states(records: LedgerReader, run: str) -> dict[int, Digest]:
    return {row.round: row.state for row in records.rounds(run) if row.state is not None}


def _kept(states: Mapping[int, Digest], blobs: Kept, rounds: JudgedRounds) -> BestRound | None:
    return next((best for best in rounds.ranked if best.round in states and blobs.has(states[best.round])), None)


def _reader(records: LedgerReader, run: str) -> Means:
    """Reads each name once, and those that are asked for alone: a long run of many sites has millions of scores."""
    return cache(lambda name: means_of(records.scores(run, names=(name,)), name))


def _names(best_by: str | None) -> tuple[str, ...]:
    return JUDGED_BY if best_by is None else (best_by,)


def _best_by(row: RunRow) -> str | None:
    """The recipe's choice; read as plain JSON, since a run of another version also has a best round."""
    table: dict[str, Any] = json.loads(row.recipe)
    chosen = table.get("federation", {}).get("best_by")
    return chosen if isinstance(chosen, str) else None
