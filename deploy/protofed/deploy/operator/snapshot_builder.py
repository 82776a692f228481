"""What the server says, as a `RunSnapshot`: pure decisions, no clock and no terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from protofed.common.statistics import lower_is_better
from protofed.deploy.operator.snapshot import ENDED, FAILED, Attempt, Problem, RunSnapshot, ScoreSnapshot, TimeRemaining
from protofed.deploy.operator.snapshot_sites import printable, sites
from protofed.protos.v1 import operator_pb2 as pb

PUBLISHED = ("published", "degraded")
HEADLINES = ("global.accuracy", "personal.pm_v", "personal.pm_l")
MOST_PROBLEMS = 20
FEWEST_PERIODS = 2  # rounds from which the rest is estimated
_ORDINALS = ("next", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class ServerReply:
    """What the server said at one moment: the run with its newest attempts, its sites, and, if it waits, all runs."""

    detail: pb.RunDetail
    sites: Sequence[pb.SiteInfo] = ()
    runs: Sequence[pb.RunInfo] = ()


@dataclass(frozen=True)
class Memory:
    """What a watcher knows beside the newest answer.

    Attributes:
        opened_at: when the run's first attempt was opened, in seconds of the Unix epoch; 0: none was.
        scores: of the newest scored round, `scored_round`; `before`: of the one before.
    """

    opened_at: float = 0.0
    scored_round: int = 0
    scores: Mapping[str, pb.Score] = field(default_factory=dict)
    before: Mapping[str, pb.Score] = field(default_factory=dict)

    def after(self, answer: ServerReply) -> Memory:
        """With what an answer adds."""
        detail = answer.detail
        opened_at = self.opened_at
        if detail.rounds and len(detail.rounds) == detail.attempts:
            opened_at = detail.rounds[0].opened_at
        newest = {score.name: score for score in detail.scores}
        if detail.scored_round == self.scored_round:
            return replace(self, opened_at=opened_at, scores=newest)
        return replace(
            self, opened_at=opened_at, scored_round=detail.scored_round, scores=newest, before=dict(self.scores)
        )


def snapshot(answer: ServerReply, memory: Memory, now: float) -> RunSnapshot:
    """A run as it is `now`, in seconds of the Unix epoch."""
    info, rounds = answer.detail.info, answer.detail.rounds
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
        queue="" if ended else place(info.run, answer.runs),
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
        seconds=max(0.0, (info.ended_at or now) - memory.opened_at) if memory.opened_at else None,
        rest=rest(info, rounds, done, now),
        sites=sites(answer.sites, newest, ended=ended),
        history=tuple(_attempt(row, ended=ended) for row in rounds),
        scored_round=answer.detail.scored_round,
        scores=scores(memory),
        problems=tuple(problems(rounds))[:MOST_PROBLEMS],
    )


def place(run: str, runs: Iterable[pb.RunInfo]) -> str:
    """A waiting run's place in the queue, and who is before it."""
    going = [info for info in runs if info.status not in ENDED]
    names = [info.run for info in going]
    if run not in names or not (ahead := going[: names.index(run)]):
        return ""
    waiting = len(ahead)
    ordinal = _ORDINALS[waiting - 1] if waiting <= len(_ORDINALS) else f"{waiting}th"
    told = [f"{info.run} ({info.status}, round {info.round} of {info.rounds})" for info in ahead[:1]]
    told += [f"{waiting - 1} more"] if waiting > 2 else [info.run for info in ahead[1:]]
    return f"{ordinal} in the queue, behind {' and '.join(told)}"


def rest(info: pb.RunInfo, rounds: Sequence[pb.RoundInfo], done: int, now: float) -> TimeRemaining | None:
    """From how far apart the last rounds were published: scoring, waiting and attempts that were abandoned count."""
    ends = [row for row in rounds if row.outcome in PUBLISHED and row.round > 0]
    if info.status != "running" or not ends:
        return None
    times = [ends[0].opened_at, *(row.closed_at for row in ends)]
    periods = [later - earlier for earlier, later in pairwise(times)]
    if len(periods) < FEWEST_PERIODS:
        return None
    left, since = info.rounds - done, max(0.0, now - times[-1])

    def lasts(period: float) -> float:
        return max(0.0, period * left - min(since, period))

    return TimeRemaining(lasts(statistics.median(periods)), lasts(min(periods)), lasts(max(periods)), len(periods))


def scores(memory: Memory) -> tuple[ScoreSnapshot, ...]:
    """The newest, those that are spoken of most first; not those of single classes."""
    names = [name for name in memory.scores if not name.rpartition(".")[2].isdigit()]
    return tuple(_score(memory, name) for name in sorted(names, key=_rank))


def problems(rounds: Sequence[pb.RoundInfo]) -> Iterable[Problem]:
    """What went wrong, the newest first: failed tasks, refused updates, attempts that were abandoned."""
    for row in reversed(rounds):
        if row.outcome == "abandoned":
            yield Problem(row.round, row.attempt, "", "abandoned", printable(row.reason))
        for task in row.sites:
            if task.task_status in FAILED:
                yield Problem(row.round, row.attempt, task.site, task.task_status, printable(task.reason))
            for refusal in task.refusals:
                yield Problem(row.round, row.attempt, task.site, "refused", printable(refusal))


def _phase(info: pb.RunInfo, newest: pb.RoundInfo | None) -> str:
    """In words; when the last update of a round is there, the server is at the aggregation."""
    if info.phase == "collecting" and newest is not None and newest.sites:
        open_yet = any(task.task_status in ("invited", "started") for task in newest.sites)
        return "collecting" if open_yet else "aggregating"
    return printable(info.phase)


def _since(info: pb.RunInfo, newest: pb.RoundInfo | None) -> float:
    return info.began_at if newest is None else newest.closed_at or newest.opened_at


def _attempt(row: pb.RoundInfo, *, ended: bool) -> Attempt:
    fits = [task for task in row.sites if task.kind != "score"]
    return Attempt(
        round=row.round,
        attempt=row.attempt,
        outcome="unfinished" if ended and row.outcome == "open" else row.outcome,
        reason=printable(row.reason),
        seconds=row.closed_at - row.opened_at if row.closed_at else None,
        invited=len(fits),
        reported=sum(task.task_status in ("reported", "set-aside") for task in fits),
        failed=dict(sorted(Counter(task.task_status for task in row.sites if task.task_status in FAILED).items())),
    )


def _score(memory: Memory, name: str) -> ScoreSnapshot:
    new, old = memory.scores[name], memory.before.get(name)
    return ScoreSnapshot(
        name=printable(name),
        mean=new.mean,
        std=new.std,
        worst=new.worst,
        sites=new.sites,
        mean_change=None if old is None else new.mean - old.mean,
        worst_change=None if old is None else new.worst - old.worst,
        lower_is_better=lower_is_better(name),
    )


def _rank(name: str) -> tuple[int, str]:
    return HEADLINES.index(name) if name in HEADLINES else len(HEADLINES), name
