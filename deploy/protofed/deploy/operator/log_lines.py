"""What happened between two scenes, in words: for logs and for who watches without a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from protofed.deploy.console.tables import span
from protofed.deploy.operator.screen_header import remaining, silence
from protofed.deploy.operator.snapshot import Attempt, RunSnapshot, SiteSnapshot

SHOWN_SCORES = 3


def changes(before: RunSnapshot | None, now: RunSnapshot) -> list[str]:
    """A line a change; nothing if nothing happened."""
    if before is None:
        return [_status(now), *_round_lines(None, now)]
    if now.trouble:
        return [] if before.trouble else [silence(now)]
    again = [f"it answers again, after {span(before.silent_s)}"] if before.trouble else []
    return [*again, *_between(before, now)]


def _between(before: RunSnapshot, now: RunSnapshot) -> Iterator[str]:
    yield from _round_lines(before, now)
    yield from _problem_lines(before, now)
    yield from _site_lines(before, now)
    if now.scores and now.scored_round != before.scored_round:
        yield _scores(now)
    if (now.status, now.queue) != (before.status, before.queue):
        yield _status(now)


def _status(snapshot: RunSnapshot) -> str:
    said = f"{snapshot.run} · {snapshot.method} · {snapshot.status} · round {snapshot.round} of {snapshot.rounds}"
    return said + "".join(
        f" · {part}"
        for part in (snapshot.queue, snapshot.reason if snapshot.ended and snapshot.reason != snapshot.status else "")
        if part
    )


def _round_lines(before: RunSnapshot | None, now: RunSnapshot) -> Iterator[str]:
    """Of attempts that are new, whose outcome is, or in which more sites have reported."""
    known = {} if before is None else {(row.round, row.attempt): row for row in before.history}
    for row in now.history if before is not None else now.history[-1:]:
        was = known.get((row.round, row.attempt))
        if was is None or (was.outcome, was.reported) != (row.outcome, row.reported):
            yield _attempt(row) + (f" · {remaining(now.rest)}" if row.seconds is not None and now.rest else "")


def _attempt(row: Attempt) -> str:
    tried = f", try {row.attempt}" if row.attempt > 1 else ""
    took = "" if row.seconds is None else f" after {row.seconds:.1f} s"
    failed = "".join(f", {number} {task_status}" for task_status, number in row.failed.items())
    why = f": {row.reason}" if row.reason else ""
    return f"round {row.round}{tried}: {row.outcome}{took}, {row.reported} of {row.invited} reported{failed}{why}"


def _problem_lines(before: RunSnapshot, now: RunSnapshot) -> Iterator[str]:
    for problem in reversed([one for one in now.problems if one not in before.problems and one.site]):
        yield f"round {problem.round}: {problem.site} {problem.what}" + (
            f": {problem.reason}" if problem.reason else ""
        )


def _site_lines(before: RunSnapshot, now: RunSnapshot) -> Iterator[str]:
    """Of sites that are not well any more, or are again; what a round says of them is said there."""
    known = {site.site: site for site in before.sites}
    for site in now.sites:
        was = known.get(site.site)
        moved = was is None or was.status != site.status
        if moved and (_unwell(site) or (was is not None and _unwell(was))):
            yield f"{site.site}: {site.doing}"


def _unwell(site: SiteSnapshot) -> bool:
    """Those that are away come back by themselves when the server was restarted."""
    return site.status not in ("working", "idle", "away")


def _scores(snapshot: RunSnapshot) -> str:
    told = ", ".join(
        f"{score.name} {score.mean:.4f}" + ("" if score.mean_change is None else f" ({score.mean_change:+.4f})")
        for score in snapshot.scores[:SHOWN_SCORES]
    )
    return f"scores after round {snapshot.scored_round}: {told}"
