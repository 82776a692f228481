"""A run's scores: asked for, closed, kept in memory, and judged.

`Scoring` says who is asked, what becomes of the scores when a round's are all there, or late, and how long none was
better. `ScoreMemory` and `WarningLog` read from the ledger what the run's models are judged by: a round costs the same,
however many there were before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import structlog

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, FailureReason, SecureAggregationError, StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import MAX_SECURE_SITES, TaskKind, score_family
from protofed.common.protocol.scores import LOSS, ScoreNames, Spread, spreads
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.groups import Groups, members, whole
from protofed.server.method import server_methods
from protofed.server.metrics import SumFailure
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.phases import Plateau
from protofed.server.rounds.machine.rules import RoundRules
from protofed.server.rounds.scores.best_round import Ranking, compute_means, judged, read_means
from protofed.server.rounds.scores.model_warnings import (
    ACCURACY,
    BALANCED,
    DROP_ROUNDS,
    SAME_ROUNDS,
    ModelWarning,
    RoundScores,
    RunHistory,
    TrainedRound,
    model_warnings,
)
from protofed.server.rounds.secure_aggregation.steps import SumRounds
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow, one_a_site
from protofed.server.verdicts import RefusalCode

# Of all rounds, these alone are read, and of one model: a run of a thousand rounds and sites has millions of scores.
HEADLINES = BALANCED, ACCURACY
GLOBAL, LOCAL = "global", "global.local"  # by the evaluators, or else by the sites' own test sets
BEST = 2  # of rounds: if the newest is the best, the best before it is asked for
_Scores: TypeAlias = Mapping[SiteId, Mapping[str, float]]
_Sums: TypeAlias = Mapping[str, Spread]
log = structlog.get_logger()
FIRST, LAST = 3, 3  # attempts whose updates are read
UNUSABLE = (RefusalCode.NOT_FINITE, RefusalCode.NORM)


class ScoreMemory:
    """Read from the ledger when first asked; whoever closes a round's scores or rolls the run back, says so here."""

    def __init__(self, records: LedgerReader, run: str) -> None:
        self._records, self._run = records, run
        self.forget()

    def forget(self) -> None:
        """Read the ledger again: rounds were rolled back."""
        self._rankings: dict[str, Ranking] = {}
        self._told: _ToldRounds | None = None

    def closed(self, number: int) -> tuple[_Scores, _Sums]:
        """Take up a round's scores, which are all there now, and give them: those of sites, and what sums say."""
        scores = self._records.scores(self._run, number).get(number, {})
        sums = self._records.score_sums(self._run, number).get(number, {})
        if any(number in ranking.means for ranking in self._rankings.values()) or self._rounds.knows(number):
            self.forget()  # a restarted server has read the first of them
            return scores, sums
        for name, ranking in self._rankings.items():
            for mean in compute_means({number: scores}, {number: sums}, name).values():
                ranking.add(number, mean)
        if scores or sums:
            self._rounds.add(number, scores, sums)
        return scores, sums

    def ranking(self, name: str) -> Ranking:
        """The rounds by a score. Names that nobody asks for are not read."""
        if name not in self._rankings:
            means = read_means(self._records, self._run, name)
            self._rankings[name] = Ranking(name, means)
        return self._rankings[name]

    def told(self) -> list[RoundScores]:
        """The rounds that the warnings about a model are made from, as `model_warnings` wants them."""
        return self._rounds.chosen()

    @property
    def _rounds(self) -> _ToldRounds:
        if self._told is None:
            self._told = _read(self._records, self._run)
        return self._told


class _ToldRounds:
    """Of the scored rounds, in order, those that say as much as all of them: whole, or with the headlines alone.

    Whole are the first and the newest ones. Of the others it takes the first and the last with each headline, and the
    best.
    """

    def __init__(self) -> None:
        self._newest = -1
        self._whole: dict[int, RoundScores] = {}
        self._headlines: dict[int, RoundScores] = {}
        self._model = LOCAL

    def knows(self, number: int) -> bool:
        """Whether the round is among those that were added."""
        return number <= self._newest

    def add(self, number: int, scores: _Scores, sums: _Sums) -> None:
        """Take up a round behind all others."""
        self._newest = number
        self._whole[number] = RoundScores(number, scores, sums)
        keep = _ends(list(self._whole), SAME_ROUNDS)
        self._whole = {one: scored for one, scored in self._whole.items() if one in keep}
        self._add_headlines(number, scores, sums)

    def chosen(self) -> list[RoundScores]:
        """In order."""
        return [scored for _, scored in sorted((self._headlines | self._whole).items())]

    def _add_headlines(self, number: int, scores: _Scores, sums: _Sums) -> None:
        if self._model == LOCAL and _headlines(scores, GLOBAL):
            self._model, self._headlines = GLOBAL, {}
        names = {f"{self._model}.{name}" for name in HEADLINES}
        headlines, aggregated = _headlines(scores, self._model), {name: sums[name] for name in names & sums.keys()}
        if headlines or aggregated:
            self._headlines[number] = RoundScores(number, headlines, aggregated)
            keep = {number for name in HEADLINES for number in self._asked(f"{self._model}.{name}")}
            keep |= _ends(list(self._headlines), SAME_ROUNDS)
            self._headlines = {one: scored for one, scored in self._headlines.items() if one in keep}

    def _asked(self, name: str) -> set[int]:
        having = {number: scored.means[name] for number, scored in self._headlines.items() if name in scored.means}
        best = sorted(having, key=lambda number: (having[number], number))[-BEST:]
        return {*best, *_ends(list(having), DROP_ROUNDS)}


def _ends(numbers: Sequence[int], last: int) -> set[int]:
    return {*numbers[:1], *numbers[-last:]}


def _headlines(scores: _Scores, model: str) -> dict[SiteId, dict[str, float]]:
    names = {f"{model}.{name}" for name in HEADLINES}
    chosen = {site: {name: values[name] for name in sorted(names & values.keys())} for site, values in scores.items()}
    return {site: values for site, values in chosen.items() if values}


def _read(records: LedgerReader, run: str) -> _ToldRounds:
    """Reads of most rounds the headlines alone, and of one model."""
    rounds, numbers = _ToldRounds(), records.scored_rounds(run)
    headlines = _read_headlines(records, run, GLOBAL) or _read_headlines(records, run, LOCAL)
    sums = records.score_sums(run, names=[f"{LOCAL}.{score}" for score in HEADLINES])
    whole = _ends(numbers, SAME_ROUNDS)
    for number in numbers:
        scores = records.scores(run, number) if number in whole else headlines
        aggregated = records.score_sums(run, number) if number in whole else sums
        rounds.add(number, scores.get(number, {}), aggregated.get(number, {}))
    return rounds


def _read_headlines(records: LedgerReader, run: str, model: str) -> dict[int, dict[SiteId, dict[str, float]]]:
    return records.scores(run, names=[f"{model}.{score}" for score in HEADLINES])


class WarningLog:
    """Logs what speaks against a run's models, each thing once; what an earlier process has logged is known.

    Args:
        scores: told of each round whose scores are closed.

    Attributes:
        now: all warnings, as of the last look; may be read from any thread.
    """

    def __init__(self, records: LedgerReader, run: str, scores: ScoreMemory) -> None:
        self._records, self._run = records, run
        self._history = _History(records, run, scores)
        self.now = self._found()
        self._known = {(warning.code, warning.site) for warning in self.now}

    def look(self) -> None:
        """Log what is new since the last look."""
        self.now = self._found()
        for warning in self.now:
            if (key := (warning.code, warning.site)) not in self._known:
                self._known.add(key)
                at = {"round": warning.round, **({} if warning.site is None else {"site": warning.site})}
                log.warning("model warning", run=self._run, **at, code=warning.code.value, why=warning.text)

    def roll_back(self) -> None:
        """Read the rounds again: some were rolled back."""
        self._history.forget()
        self.now = self._found()

    def _found(self) -> list[ModelWarning]:
        row = self._records.run(self._run)
        return [] if row is None else model_warnings(self._history.of(row))


def find_warnings(records: LedgerReader, run: str) -> list[ModelWarning]:
    """All that speaks against a run's models now; nothing for a run that the ledger does not have."""
    row = records.run(run)
    return [] if row is None else model_warnings(_History(records, run, ScoreMemory(records, run)).of(row))


class _History:
    """What is known of a run's models: scores and updates of its first and last rounds, and headlines of some others.

    A later look reads only what is new.
    """

    def __init__(self, records: LedgerReader, run: str, scores: ScoreMemory) -> None:
        self._records, self._run, self._scores = records, run, scores
        self.forget()

    def forget(self) -> None:
        """Read the rounds again."""
        self._closed: list[RoundRow] = []  # the first and the last attempts that are over
        self._trained: dict[tuple[int, int], TrainedRound] = {}

    def of(self, row: RunRow) -> RunHistory:
        """As it is now."""
        recipe = json.loads(row.recipe)
        return RunHistory(
            classes=recipe["classes"],
            rounds=recipe["rounds"],
            ended=row.ended_at is not None,
            global_model=_has_global_model(recipe["method"]["name"]),
            class_names=recipe.get("class_names", ()),
            scored=self._scores.told(),
            trained=self._attempts(),
        )

    def _attempts(self) -> list[TrainedRound]:
        since = self._closed[-1].round if self._closed else 0
        later = [row for row in self._records.rounds(self._run, since=since) if row.round and _is_over(row)]
        closed = [row for row in self._closed if row.round < since] + later
        self._closed = closed if len(closed) <= FIRST + LAST else [*closed[:FIRST], *closed[-LAST:]]
        # The newest is read anew: an update of it may be refused yet, late.
        known = dict(list(self._trained.items())[:-1])
        self._trained = {
            (row.round, row.attempt): known.get((row.round, row.attempt)) or _attempt(row, self._records)
            for row in self._closed
        }
        return list(self._trained.values())


def _is_over(row: RoundRow) -> bool:
    return row.state is not None or row.abandoned is not None


def _has_global_model(method: str) -> bool:
    try:
        return server_methods.get(method).global_model
    except ConfigError:  # a plug-in's that is not installed here: its states are not compared
        return False


def _attempt(row: RoundRow, records: LedgerReader) -> TrainedRound:
    fits = [task for task in records.tasks(row.run, row.round, row.attempt) if task.kind is TaskKind.FIT]
    updates = records.updates(row.run, row.round, row.attempt)
    used = one_a_site(updates)
    refused = {update.task.site for update in updates if update.code in UNUSABLE}
    failed = {task.site for task in fits if task.reason == FailureReason.NUMERIC}
    answered = {update.task.site for update in used}  # a site may send a sound update after a refused one
    return TrainedRound(
        row.round,
        row.state,
        losses=[update.metrics["loss"] for update in used if "loss" in update.metrics],
        norms=[update.norm for update in used if update.norm is not None],
        invited=len(fits),
        unusable=len((refused | failed) - answered),
    )


class Scoring:
    """Called from the coordinator's thread.

    Args:
        sums: None: sites report their own scores one by one. A simulated secure aggregation sums them here.

    Attributes:
        plateau: how long no round was better; read at every change of the scores, since every tick carries it.
    """

    def __init__(
        self, recipe: Recipe, context: ServerContext, memory: ScoreMemory, sums: SumRounds | None, rules: RoundRules
    ) -> None:
        self._rules = rules
        self._run, self._ledger, self._memory, self._sums = recipe.name, context.ledger, memory, sums
        self._names = recipe.score_names() if recipe.federation.secure else None
        self._metrics = context.metrics
        self._asks_all = context.simulated  # sites that are never drawn score what they have installed
        self.forget()

    def plateau_until(self, until: int | None) -> Plateau | None:
        """How long no round was better; rounds after `until` are left out. None: as of `phases.Tick`."""
        rules = self._rules.federation
        if rules.patience is None:
            return None
        rounds = judged(lambda name: self._memory.ranking(name).means, rules.best_by, until)
        return None if rounds is None else rounds.plateau(rules.min_improvement)

    def forget(self) -> None:
        """Read the ledger again: rounds were rolled back."""
        self._memory.forget()
        self._trained, self._since = phases.NOBODY, 1  # sites with updates of the rounds up to this one
        self.plateau = self.plateau_until(None)

    def askable(self, trainers: phases.Sites, groups: Groups, round: int) -> phases.Sites:
        """The sites that can send own scores: the policy of a site that has trained in no round refuses.

        Under secure aggregation whole groups, as many as a sum takes.
        """
        if (grouping := self._rules.grouping) is not None:
            available = self._have_trained(trainers)
            if grouping.fewest > 1:
                available &= members(groups)
            return grouping.drawn(groups, available, phases.NOBODY, MAX_SECURE_SITES, self._rules.sampler, round)
        return trainers if self._asks_all else self._have_trained(trainers)

    def _have_trained(self, trainers: phases.Sites) -> phases.Sites:
        newest = self._ledger.newest(self._run, published=True)
        rounds = range(self._since, 1 if newest is None else newest.round + 1)
        self._trained |= self._ledger.contributors(self._run, rounds)
        self._since = max(self._since, rounds.stop - 1)
        return trainers & self._trained

    def close(self, phase: phases.Phase) -> None:
        """Nobody is asked for a round's scores any more.

        Args:
            phase: the last in which they were waited for.
        """
        assert isinstance(phase, phases.Evaluating | phases.Summing)  # noqa: S101  (`phases.is_scoring`)
        if self._names is not None:
            self._sum(phase, self._names)
        self._ledger.mark_scored(self._run, phase.round)
        by_site, sums = self._memory.closed(phase.round)
        families = spreads(by_site, sums).items()
        # One number a family: a recall for each of a hundred classes would drown the log.
        means = {name: round(spread.mean, 4) for name, spread in families if score_family(name) == name}
        if means:
            sites = max(len(by_site), *(spread.sites for _, spread in families))
            log.info("round scored", run=self._run, round=phase.round, sites=sites, scores=means)
        else:  # answered, or not in time: no number of sites is claimed
            log.info("no score of this round was sent", run=self._run, round=phase.round)
        self.plateau = self.plateau_until(None)

    def _sum(self, phase: phases.Evaluating | phases.Summing, names: ScoreNames) -> None:
        """Record what the sum of the sites' own scores says; without it the round has none, and goes on."""
        at = phase.round, phase.attempt
        try:
            totals = self._opened(phase) if self._sums is not None else self._simulated(phase, names)
        except (SecureAggregationError, StateError) as error:
            log.warning("no sum of own scores", run=self._run, round=phase.round, why=str(error))
            if not (
                isinstance(error, SecureAggregationError) and error.code == "too-few-shares"
            ):  # counted with the step
                self._metrics.sum_abandoned(TaskKind.REVEAL, SumFailure.UNUSABLE)
            return
        if totals is not None:
            self._ledger.sum_scores(self._run, *at, score_sums.list_scores(names), totals)

    def _opened(self, phase: phases.Evaluating | phases.Summing) -> Mapping[str, Spread] | None:
        if isinstance(phase, phases.Summing) and phase.step is TaskKind.REVEAL:
            assert self._sums is not None  # noqa: S101  (asked for runs with sums)
            return self._sums.opened_scores(phase.round, phase.attempt)
        if isinstance(phase, phases.Summing) or phase.reported:
            log.warning(
                "no sum of own scores", run=self._run, round=phase.round, why="too few sites were there to the end"
            )
        return None

    def _simulated(self, phase: phases.Evaluating | phases.Summing, names: ScoreNames) -> Mapping[str, Spread] | None:
        """The same sum of what simulated sites reported; None: they reported nothing, or it was aggregated before."""
        reported: dict[SiteId, dict[str, float]] = {
            site: dict(scores)
            for site, scores in self._ledger.scores(self._run, phase.round).get(phase.round, {}).items()
        }
        own = {site: scores for site, scores in reported.items() if scores.keys() & set(score_sums.list_scores(names))}
        if not own:
            return None
        assert self._rules.grouping is not None  # noqa: S101  (of secure aggregation)
        there = whole(self._rules.grouping.started(self._ledger.groups(), own), own)
        if len(there) < score_sums.CONTRIBUTORS:
            return {}
        for row in one_a_site(self._ledger.updates(self._run, phase.round, phase.attempt)):
            if row.task.site in own and LOSS in row.metrics:
                own[row.task.site][LOSS] = row.metrics[LOSS]
        return score_sums.opened(names, score_sums.simulate_total(names, [own[site] for site in sorted(there)]))
