"""Builds a `RunSnapshot` from the server's replies: pure functions, without a clock or a terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from protofed.client.policy.rules import is_own
from protofed.common.protocol.messages import TaskKind, score_family
from protofed.common.protocol.scores import lower_is_better
from protofed.deploy.operator.snapshot import (
    ENDED,
    FAILED,
    PUBLISHED,
    Attempt,
    Attention,
    Problem,
    RunSnapshot,
    ScoreSnapshot,
    SiteSnapshot,
    TimeRemaining,
    WaitingSnapshot,
    WarningSnapshot,
)
from protofed.deploy.run_view import BestSnapshot
from protofed.deploy.tables import printable
from protofed.protos.v1 import operator_pb2 as pb
from protofed.server.rounds.machine.waiting import MissingSite

# Scores that are shown first; accuracy alone may be that of a model that answers with the most common class.
HEADLINES = (
    *("global.accuracy", "global.balanced_accuracy", "global.majority", "personal.pm_v", "personal.pm_l"),
    *("global.auroc", "global.mae"),
)
MAX_PROBLEMS = 20
MIN_PERIODS = 2  # rounds without which the time left is not estimated
_ORDINALS = ("next", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
OPEN = ("invited", "started")
DONE = ("reported", "rejected")
_BAD_STATUSES = ("excluded", "silent", "revoked", "expired", "not-yet-valid")
# Of an invited site that the server does not list; -1 is unknown, where protobuf's default of 0 would be a number.
_NEVER = pb.SiteInfo(status="away", progress_age_s=-1.0, progress=-1.0)


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
    rounds_done = max((row.round for row in rounds if row.outcome in PUBLISHED), default=0)
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
        done=rounds_done,
        invited=info.invited,
        reported=info.reported,
        degraded=info.degraded,
        abandoned=info.abandoned,
        rolled_back=info.rolled_back,
        received_bytes=info.received_bytes,
        sent_bytes=info.sent_bytes,
        seconds=max(0.0, (info.ended_at or now) - history.opened_at) if history.opened_at else None,
        rest=time_remaining(info, rounds, rounds_done, now),
        sites=sites(reply.sites, newest, ended=ended),
        history=tuple(_attempt(row, ended=ended) for row in rounds),
        scored_round=reply.detail.scored_round,
        scores=scores(history),
        problems=tuple(problems(rounds))[:MAX_PROBLEMS],
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


def time_remaining(
    info: pb.RunInfo, rounds: Sequence[pb.RoundInfo], rounds_done: int, now: float
) -> TimeRemaining | None:
    """An estimate from the times between the last publications; None: too few, or the run does not run.

    Those times include scoring, waiting and abandoned attempts, which the durations of the attempts leave out.
    """
    ends = [row for row in rounds if row.outcome in PUBLISHED and row.round > 0]
    if info.status != "running" or not ends:
        return None
    times = [ends[0].opened_at, *(row.closed_at for row in ends)]
    periods = [later - earlier for earlier, later in pairwise(times)]
    if len(periods) < MIN_PERIODS:
        return None
    rounds_left, elapsed = info.rounds - rounds_done, max(0.0, now - times[-1])

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
    """The newest scores, headlines first; without those of single classes and subgroups."""
    names = [name for name in history.scores if score_family(name) == name]
    return tuple(_score(history, name) for name in sorted(names, key=_rank))


def problems(rounds: Sequence[pb.RoundInfo]) -> Iterable[Problem]:
    """Abandoned attempts, failed tasks and refused updates, newest first."""
    for row in reversed(rounds):
        if row.outcome == "abandoned":
            yield Problem(row.round, row.attempt, "", "abandoned", printable(row.reason))
        for task in row.sites:
            for what, reason in failures(task):
                yield Problem(row.round, row.attempt, task.site, what, reason)


def failures(task: pb.SiteTask) -> Iterator[tuple[str, str]]:
    """What failed of a task, and why: its status, if it failed, and each update that was refused."""
    if task.task_status in FAILED:
        yield task.task_status, printable(task.reason)
    for refusal in task.refusals:
        yield "refused", printable(refusal)


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
        reported=sum(task.task_status in ("reported", "rejected") for task in fits),
        failed=dict(sorted(Counter(task.task_status for task in row.sites if task.task_status in FAILED).items())),
        missing=_missing(row),
    )


def _missing(row: pb.RoundInfo) -> tuple[str, ...]:
    """In a secure aggregation the masked update counts, and not the keys before it."""
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
        std=None if new.aggregated else new.std,
        worst=None if new.aggregated else new.worst,
        sites=new.sites,
        mean_change=None if old is None else new.mean - old.mean,
        worst_change=None if old is None or new.aggregated or old.aggregated else new.worst - old.worst,
        lower_is_better=lower_is_better(name),
    )


def _rank(name: str) -> tuple[int, str]:
    return HEADLINES.index(name) if name in HEADLINES else len(HEADLINES), name


def waiting(info: pb.RunInfo) -> WaitingSnapshot | None:
    """What the server says that a run waits for; None: nothing."""
    if not info.HasField("waiting"):
        return None
    sent = info.waiting
    return WaitingSnapshot(
        reason=sent.reason,
        text=printable(sent.text),
        round=sent.round,
        needed=sent.needed,
        has=sent.has,
        missing=tuple(
            MissingSite(site.site, printable(site.why), printable(site.similar), site.required) for site in sent.missing
        ),
        behind=printable(sent.behind),
        seconds_left=sent.seconds_left if sent.HasField("seconds_left") else None,
    )


def unmet(info: pb.RunInfo) -> tuple[str, ...]:
    """What the run needs and the sites that may take part cannot give."""
    return tuple(printable(warning) for warning in info.unmet)


def model_warnings(detail: pb.RunDetail) -> tuple[WarningSnapshot, ...]:
    """What the server says, the worst first."""
    return tuple(
        WarningSnapshot(printable(one.code), one.round, printable(one.site), printable(one.text))
        for one in detail.model_warnings
    )


def keeping(detail: pb.RunDetail) -> int:
    """Sites that answered the newest request for scores of their own models and sent none.

    Sites are asked after the rounds that `score_personal_every` names; of another round's scores nothing follows.
    """
    if any(task.kind == "score-sum" for row in detail.rounds for task in row.sites):
        return 0  # trainers are asked for a sum of theirs
    rows = [row for row in detail.rounds if row.round >= detail.scored_round and row.outcome != "rolled-back"]
    answered = next((sites for row in reversed(rows) if (sites := _answered(row.sites))), frozenset[str]())
    telling = max((score.sites for score in detail.scores if is_own(score.name)), default=0)
    return max(0, len(answered) - telling)


def kept_by_noise(detail: pb.RunDetail) -> bool:
    """Whether rounds have been published and no site's own score is there because the run has noise."""
    published = any(row.round and row.outcome in PUBLISHED for row in detail.rounds)
    return detail.info.noisy and published and not any(is_own(score.name) for score in detail.scores)


def _answered(tasks: Iterable[pb.SiteTask]) -> frozenset[str]:
    """Sites that trained in the round, so that they have a model of their own, and answered when asked for scores."""
    reported = [task for task in tasks if task.task_status == "reported"]
    trained = {task.site for task in reported if task.kind == "fit"}
    return frozenset(task.site for task in reported if task.kind == "score" and task.site in trained)


def sites(reported: Iterable[pb.SiteInfo], newest: pb.RoundInfo | None, *, ended: bool) -> tuple[SiteSnapshot, ...]:
    """All sites that the server knows or that were invited to the newest attempt, those with problems first.

    Args:
        reported: the server's list of sites.
        newest: the newest attempt; None: there is none.
        ended: the run is over: sites without a daemon and without a task are left out.
    """
    tasks = {} if newest is None else _site_tasks(newest)
    infos = {info.site: info for info in reported}
    rows = [_site(name, infos.get(name, _NEVER), tasks.get(name)) for name in {**infos, **tasks}]
    if ended:
        rows = [site for site in rows if site.task_status or site.status != "away"]
    return tuple(sorted(rows, key=_order))


def _site_tasks(newest: pb.RoundInfo) -> dict[str, pb.SiteTask]:
    """One task for each site of an attempt: the open one, else the first that failed, else the last."""
    tasks: dict[str, pb.SiteTask] = {}
    for task in newest.sites:
        chosen = tasks.get(task.site)
        if chosen is None or task.task_status in OPEN or chosen.task_status not in (*OPEN, *FAILED):
            tasks[task.site] = task
    return tasks


def _site(name: str, info: pb.SiteInfo, task: pb.SiteTask | None) -> SiteSnapshot:
    task_status = "" if task is None else task.task_status
    return SiteSnapshot(
        site=name,
        status=info.status,
        doing=printable(_doing(info)),
        task_status=task_status,
        reason="" if task is None else printable(task.reason),
        care=_care(info.status, task_status),
        progress=_progress(info, task_status),
        bytes_moved=info.bytes_moved,
        still_s=None if info.progress_age_s < 0 else info.progress_age_s,
        telemetry=dict(sorted(info.telemetry.items())),
    )


def _doing(info: pb.SiteInfo) -> str:
    match info.status:
        case "excluded":
            return f"excluded: {info.excluded}"
        case "held" | "silent":
            return f"{info.status}: {info.activity_text}"
        case "away":
            return "no daemon since the server started"
        case "revoked" | "expired" | "not-yet-valid":
            return f"certificate {info.status}" + (f": {info.activity_text}" if info.activity_text else "")
        case _:
            return info.activity_text or info.status


def _care(status: str, task_status: str) -> Attention:
    if task_status in FAILED or status in _BAD_STATUSES or (status == "away" and task_status in OPEN):
        return Attention.BAD
    if status in ("held", "away"):
        return Attention.HELD
    return Attention.AWAITED if task_status in OPEN else Attention.WELL


def _progress(info: pb.SiteInfo, task_status: str) -> float | None:
    """Progress of the task of this attempt; a heartbeat may still be about an earlier task."""
    if task_status in DONE:
        return 1.0
    return info.progress if task_status in OPEN and info.progress >= 0 else None


def _order(site: SiteSnapshot) -> tuple[Attention, float, str]:
    # The slowest first: the round waits for it. Unknown progress counts as less than none.
    return site.care, -1.0 if site.progress is None else site.progress, site.site
