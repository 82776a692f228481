"""The best round of a run by one score, and which blobs are kept: those of the newest rounds, and the best one's.

A function of the ledger's scores alone: the same after every restart.
"""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import SiteId
from protofed.common.protocol.scores import JUDGED_BY, Spread, lower_is_better, spreads
from protofed.server.rounds.machine.phases import Plateau
from protofed.server.storage.blobs import Blobs
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


class Ranking:
    """One score's means over sites by round, in order: a round more costs the same, however many there are.

    Args:
        means: by round; rounds without this score are left out.
    """

    def __init__(self, score: str, means: Mapping[int, float]) -> None:
        self.score, self.means = score, dict(means)
        self._numbers = sorted(self.means)
        self._sign = 1 if lower_is_better(score) else -1
        self._best_first = sorted((self._sign * mean, number) for number, mean in self.means.items())

    def add(self, number: int, mean: float) -> None:
        """Take up a round that is not there yet."""
        self.means[number] = mean
        insort(self._numbers, number)
        insort(self._best_first, (self._sign * mean, number))

    def begins_by(self, until: int | None) -> bool:
        """Whether a round up to this one (None: any) has the score."""
        return bool(self._numbers) and (until is None or self._numbers[0] <= until)

    def newest(self, count: int) -> list[int]:
        """The last rounds."""
        return self._numbers[-count:]

    def ranked(self, until: int | None = None) -> Iterator[BestRound]:
        """The best first; of equals, the earlier one. Rounds after `until` are left out."""
        for signed, number in self._best_first:
            if until is None or number <= until:
                yield BestRound(number, self.score, self._sign * signed)


Rankings: TypeAlias = Callable[[str], Ranking]  # of a score's name


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
        sign = 1 if lower_is_better(self.score) else -1
        order = sorted(self.means, key=lambda number: (sign * self.means[number], number))
        return [BestRound(number, self.score, self.means[number]) for number in order]

    def plateau(self, min_improvement: float) -> Plateau:
        """How long no round was better than the last one that improved by `min_improvement`, and by more than 0.

        Small steps add up: each is measured from that round, not from the one before it.
        """
        since, rounds = min(self.means), 0
        for number in sorted(self.means):
            gain = self.means[number] - self.means[since]
            gain = -gain if lower_is_better(self.score) else gain
            improved = gain > 0 and gain >= min_improvement - ROUNDING
            since, rounds = (number, 0) if improved else (since, rounds + (number != since))
        return Plateau(self.score, since, rounds)


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


def compute_means(
    scores: Mapping[int, Scores], sums: Mapping[int, Mapping[str, Spread]], name: str
) -> dict[int, float]:
    """One score's mean over sites, by round; rounds without it are left out.

    Args:
        sums: what secure aggregation says, by round.
    """
    having = {
        number: {site: {name: values[name]} for site, values in sites.items() if name in values}
        for number, sites in scores.items()
    }
    single = {number: spreads(sites)[name].mean for number, sites in having.items() if sites}
    return single | {number: of_round[name].mean for number, of_round in sums.items() if name in of_round}


def read_means(records: LedgerReader, run: str, name: str) -> dict[int, float]:
    """`compute_means` a run's scores."""
    return compute_means(records.scores(run, names=(name,)), records.score_sums(run, names=(name,)), name)


def judged(means: Means, chosen_score: str | None, until: int | None = None) -> JudgedRounds | None:
    """Rounds by the score of that name, or by the first of `JUDGED_BY` that there is; None: no round has one.

    Args:
        until: rounds after it are left out.
    """
    for name in list_scores(chosen_score):
        if chosen := {number: mean for number, mean in means(name).items() if until is None or number <= until}:
            return JudgedRounds(name, chosen)
    return None


def judged_rounds(records: LedgerReader, run: str, until: int | None = None) -> JudgedRounds | None:
    """The rounds of a run by the score that its recipe chooses; None: there are none, or no such run.

    Args:
        until: rounds after it are left out.
    """
    row = records.run(run)
    return None if row is None else judged(_reader(records, run), best_by(row), until)


def best_kept(records: LedgerReader, blobs: Kept, run: str) -> BestRound | None:
    """The best round whose state is still kept.

    This is the best of all rounds, with two exceptions. The run was rolled back after a better round had replaced it.
    Or a version that kept no best round started the run.
    """
    return first_kept(records, blobs, run, judged_rounds(records, run))


def first_kept(records: LedgerReader, blobs: Kept, run: str, rounds: JudgedRounds | None) -> BestRound | None:
    """The best of the rounds whose state is still kept."""
    return None if rounds is None else _kept(lambda number: records.state(run, number), blobs, rounds.ranked)


def best_and_former(
    records: LedgerReader, blobs: Kept, run: str, rankings: Rankings, chosen_score: str | None
) -> tuple[BestRound | None, set[int]]:
    """What `best_kept` gives, and the rounds that it gave lately, before the newest scores came."""
    names = list_scores(chosen_score)
    state = cache(lambda number: records.state(run, number))

    def best(until: int | None = None) -> BestRound | None:
        ranking = _judging(rankings, names, until)
        return None if ranking is None else _kept(state, blobs, ranking.ranked(until))

    if (judging := _judging(rankings, names)) is None:
        return None, set()
    now, former = best(), {was.round for newest in judging.newest(MISSED) if (was := best(newest - 1)) is not None}
    return now, former - ({now.round} if now else set())


def _judging(rankings: Rankings, names: Iterable[str], until: int | None = None) -> Ranking | None:
    return next((ranking for ranking in map(rankings, names) if ranking.begins_by(until)), None)


def _kept(state_of: Callable[[int], Digest | None], blobs: Kept, ranked: Iterable[BestRound]) -> BestRound | None:
    states = ((best, state_of(best.round)) for best in ranked)
    return next((best for best, state in states if state is not None and blobs.has(state)), None)


def _reader(records: LedgerReader, run: str) -> Means:
    """Reads each name once, and only names that are asked for: a long run of many sites has millions of scores."""
    return cache(lambda name: read_means(records, run, name))


def list_scores(chosen: str | None) -> tuple[str, ...]:
    """The scores that may judge a run, the first before the others."""
    return JUDGED_BY if chosen is None else (chosen,)


def best_by(row: RunRow) -> str | None:
    """The recipe's choice; read as plain JSON, since a run of another version also has a best round."""
    table: dict[str, Any] = json.loads(row.recipe)
    chosen = table.get("federation", {}).get("best_by")
    return chosen if isinstance(chosen, str) else None


def prune(
    records: LedgerReader, blobs: Blobs, run: str, before: int, rankings: Rankings, chosen_score: str | None
) -> None:
    """Discard blobs that no round from `before` on names.

    The best round keeps its state, for exports and roll-backs, and what it was made of, so that it can be verified.
    """
    best, former = best_and_former(records, blobs, run, rankings, chosen_score)
    old, needed = records.referenced(run, before, former)
    if best is not None:
        needed |= records.find_made(run, best.round)
    removable = old.keys() - needed
    removable -= _best_of_others(records, blobs, run, removable)
    for address in sorted(removable, key=old.__getitem__):  # states last: by its state a former best round is found
        blobs.discard(address)


def kept_state(records: LedgerReader, blobs: Blobs, run: str, round: int) -> Digest:
    """The state that a round published.

    Raises:
        ConfigError: it published none, or its state is no longer kept.
    """
    states = {row.round: row.state for row in records.rounds(run) if row.state is not None}
    available = [number for number, state in states.items() if blobs.has(state)]
    if round not in available:
        reason = "is no longer kept (see keep_rounds)" if round in states else "does not exist"
        rounds = ", ".join(map(str, sorted(available))) or "none yet"
        raise ConfigError(f"the state of round {round} {reason}; expected one of {rounds}")
    return states[round]


def _best_of_others(records: LedgerReader, blobs: Blobs, run: str, old: set[Digest]) -> set[Digest]:
    """What the best rounds of other runs need: runs of one seed begin with the same bytes."""
    best_rounds = {other: best_kept(records, blobs, other) for other in records.sharing(run, old)}
    return set().union(
        *(records.find_made(other, best.round) for other, best in best_rounds.items() if best is not None)
    )
