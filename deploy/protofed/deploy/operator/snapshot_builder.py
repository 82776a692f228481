"""Builds a `RunSnapshot` from the server's replies: pure functions, without a clock or a terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from protofed.common.protocol.messages import TaskKind
from protofed.common.statistics import lower_is_better
from protofed.deploy.console.best_round import BestSnapshot
from protofed.deploy.operator.kept_scores import keeping, kept_by_noise
from protofed.deploy.operator.model_warnings import model_warnings
from protofed.deploy.operator.snapshot import (
    ENDED,
    FAILED,
    PUBLISHED,
    Attempt,
    Problem,
    RunSnapshot,
    ScoreSnapshot,
    TimeRemaining,
)
from protofed.deploy.operator.snapshot_sites import printable, sites
from protofed.deploy.operator.waiting import unmet, waiting
from protofed.protos.v1 import operator_pb2 as pb

# Scores that are shown first; accuracy alone may be that of a model that answers with the most common class.
HEADLINES = ("global.accuracy", "global.balanced_accuracy", "global.majority", "personal.pm_v", "personal.pm_l")
MOST_PROBLEMS = 20
FEWEST_PERIODS = 2  # rounds without which the time left is not estimated
_ORDINALS = ("next", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class ServerReply:
    """The server's replies at one moment: a run with its newest attempts, the sites and, if the run waits, all runs."""

    detail: pb.RunDetail
    sites: Sequence[pb.SiteInfo] = ()
    runs: Sequence[pb.RunInfo] = ()


@dataclass(frozen=True)
class WatchHistory:
    """What a watcher remembers from earlier replies.

    Attributes:
        opened_at: Unix time at which the run's first attempt was opened; 0: none was, or it is not known yet.
        scores: of the newest scored round, `scored_round`; `before`: of the scored round before it.
    """

    opened_at: float = 0.0
    scored_round: int = 0
    scores: Mapping[str, pb.Score] = field(default_factory=dict)
    before: Mapping[str, pb.Score] = field(default_factory=dict)

    def after(self, reply: ServerReply) -> WatchHistory:
        """The history with a newer reply."""
        detail = reply.detail
        opened_at = self.opened_at
        # A reply has the newest attempts only: its first one is the run's first one if it has all of them.
        if detail.rounds and len(detail.rounds) == detail.attempts:
            opened_at = detail.rounds[0].opened_at
        newest = {score.name: score for score in detail.scores}
        if detail.scored_round == self.scored_round:
            return replace(self, opened_at=opened_at, scores=newest)
        return replace(
            self, opened_at=opened_at, scored_round=detail.scored_round, scores=newest, before=dict(self.scores)
        )


def snapshot(reply: ServerReply, history: WatchHistory, now: float) -> RunSnapshot:
    """The run at `now`, a Unix time."""
    info, rounds = reply.detail.info, reply.detail.rounds
    ended = info.status in ENDED
    newest = rounds[-1] if rounds else None
    phase = _phase(info, newest)
    done = max((row.round for row in rounds if row.outcome in PUBLISHED), default=0)
    return RunSnapshot(
        at=now,
        run=info.run,
        method=printable(info.method),
        status=info.status,
        reason=printable(info.reason),
        queue="" if ended else place(info.run, reply.runs),
        phase=phase,
        phase_s=None if ended else max(0.0, now - _since(info, newest)),
        deadline_s=info.deadline_s or None if phase == "collecting" else None,
        round=info.round,
        rounds=info.rounds,
        done=done,
        invited=info.invited,
        reported=info.reported,
        degraded=info.degraded,
        abandoned=info.abandoned,
        rolled_back=info.rolled_back,
        received_bytes=info.received_bytes,
        sent_bytes=info.sent_bytes,
        seconds=max(0.0, (info.ended_at or now) - history.opened_at) if history.opened_at else None,
        rest=time_remaining(info, rounds, done, now),
        sites=sites(reply.sites, newest, ended=ended),
        history=tuple(_attempt(row, ended=ended) for row in rounds),
        scored_round=reply.detail.scored_round,
        scores=scores(history),
        problems=tuple(problems(rounds))[:MOST_PROBLEMS],
        best=best_snapshot(reply.detail),
        keeping=keeping(reply.detail),
        noisy=kept_by_noise(reply.detail),
        waiting=waiting(info),
        unmet=unmet(info),
        model_warnings=model_warnings(reply.detail),
    )


def place(run: str, runs: Iterable[pb.RunInfo]) -> str:
    """A waiting run's place in the queue and the runs ahead of it, in words; empty if none is ahead."""
    unfinished = [info for info in runs if info.status not in ENDED]
    names = [info.run for info in unfinished]
    if run not in names or not (ahead := unfinished[: names.index(run)]):
        return ""
    waiting = len(ahead)
    ordinal = _ORDINALS[waiting - 1] if waiting <= len(_ORDINALS) else f"{waiting}th"
    names_ahead = [f"{info.run} ({info.status}, round {info.round} of {info.rounds})" for info in ahead[:1]]
    names_ahead += [f"{waiting - 1} more"] if waiting > 2 else [info.run for info in ahead[1:]]
    return f"{ordinal} in the queue, behind {' and '.join(names_ahead)}"


def time_remaining(info: pb.RunInfo, rounds: Sequence[pb.RoundInfo], done: int, now: float) -> TimeRemaining | None:
    """An estimate from the times between the last publications; None: too few, or the run does not run.

    Those times include scoring, waiting and abandoned attempts, which the durations of the attempts leave out.
    """
    ends = [row for row in rounds if row.outcome in PUBLISHED and row.round > 0]
    if info.status != "running" or not ends:
        return None
    times = [ends[0].opened_at, *(row.closed_at for row in ends)]
    periods = [later - earlier for earlier, later in pairwise(times)]
    if len(periods) < FEWEST_PERIODS:
        return None
    rounds_left, elapsed = info.rounds - done, max(0.0, now - times[-1])

    def left(period: float) -> float:
        # The time since the last publication belongs to the current round, which takes a period at least.
        return max(0.0, period * rounds_left - min(elapsed, period))

    return TimeRemaining(left(statistics.median(periods)), left(min(periods)), left(max(periods)), len(periods))


def best_snapshot(detail: pb.RunDetail) -> BestSnapshot | None:
    """The best round; None: no round has a score that judges it."""
    if not detail.HasField("best"):
        return None
    best = detail.best
    return BestSnapshot(best.round, best.score, best.value, None if best.kept < 0 else best.kept)


def scores(history: WatchHistory) -> tuple[ScoreSnapshot, ...]:
    """The newest scores, headlines first; without those of single classes, whose names end in a number."""
    names = [name for name in history.scores if not name.rpartition(".")[2].isdigit()]
    return tuple(_score(history, name) for name in sorted(names, key=_rank))


def problems(rounds: Sequence[pb.RoundInfo]) -> Iterable[Problem]:
    """Abandoned attempts, failed tasks and refused updates, newest first."""
    for row in reversed(rounds):
        if row.outcome == "abandoned":
            yield Problem(row.round, row.attempt, "", "abandoned", printable(row.reason))
        for task in row.sites:
            if task.task_status in FAILED:
                yield Problem(row.round, row.attempt, task.site, task.task_status, printable(task.reason))
            for refusal in task.refusals:
                yield Problem(row.round, row.attempt, task.site, "refused", printable(refusal))


def _phase(info: pb.RunInfo, newest: pb.RoundInfo | None) -> str:
    """The phase in words. The server says collecting until it publishes; once no task is open, it aggregates."""
    if info.phase == "collecting" and newest is not None and newest.sites:
        open_yet = any(task.task_status in ("invited", "started") for task in newest.sites)
        return "collecting" if open_yet else "aggregating"
    return printable(info.phase)


def _since(info: pb.RunInfo, newest: pb.RoundInfo | None) -> float:
    return info.began_at if newest is None else newest.closed_at or newest.opened_at


def _attempt(row: pb.RoundInfo, *, ended: bool) -> Attempt:
    fits = [task for task in row.sites if task.kind in ("initialise", "fit")]
    return Attempt(
        round=row.round,
        attempt=row.attempt,
        outcome="unfinished" if ended and row.outcome == "open" else row.outcome,
        reason=printable(row.reason),
        seconds=row.closed_at - row.opened_at if row.closed_at else None,
        invited=len(fits),
        reported=sum(task.task_status in ("reported", "set-aside") for task in fits),
        failed=dict(sorted(Counter(task.task_status for task in row.sites if task.task_status in FAILED).items())),
        missing=_missing(row),
    )


def _missing(row: pb.RoundInfo) -> tuple[str, ...]:
    """In a secure sum the masked update counts, and not the keys before it."""
    updates = (TaskKind.INITIALISE, TaskKind.FIT)
    invited = {task.site for task in row.sites if task.kind in updates}
    counts = (TaskKind.MASK,) if any(task.kind == TaskKind.MASK for task in row.sites) else updates
    took_part = {task.site for task in row.sites if task.kind in counts and task.task_status == "reported"}
    return tuple(sorted(invited - took_part))


def _score(history: WatchHistory, name: str) -> ScoreSnapshot:
    new, old = history.scores[name], history.before.get(name)
    return ScoreSnapshot(
        name=printable(name),
        mean=new.mean,
        std=None if new.summed else new.std,
        worst=None if new.summed else new.worst,
        sites=new.sites,
        mean_change=None if old is None else new.mean - old.mean,
        worst_change=None if old is None or new.summed or old.summed else new.worst - old.worst,
        lower_is_better=lower_is_better(name),
    )


def _rank(name: str) -> tuple[int, str]:
    return HEADLINES.index(name) if name in HEADLINES else len(HEADLINES), name
