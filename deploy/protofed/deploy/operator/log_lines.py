"""What changed between two snapshots, in lines of text: the output of `runs watch` without a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from protofed.deploy.console.best_round import best_sentence
from protofed.deploy.console.kept_scores import NOISE_KEEPS, kept_sentence
from protofed.deploy.console.model_warnings import sentences
from protofed.deploy.console.tables import span
from protofed.deploy.operator.screen_header import no_answer, time_left
from protofed.deploy.operator.snapshot import Attempt, RunSnapshot, SiteSnapshot
from protofed.deploy.operator.waiting import blocked, sentence

SHOWN_SCORES = 4


def changes(before: RunSnapshot | None, after: RunSnapshot) -> list[str]:
    """One line for each change from one snapshot to the next; without one before, the state of the run."""
    if before is None:
        first = (_status(after), *_round_lines(None, after), *_waiting_lines(None, after))
        return [*first, *sentences(after.model_warnings)]
    if after.trouble:
        return [] if before.trouble else [no_answer(after)]  # once, not at every attempt to reach the server
    recovered = [f"it answers again, after {span(before.silent_s)}"] if before.trouble else []
    return [*recovered, *_between(before, after)]


def _between(before: RunSnapshot, after: RunSnapshot) -> Iterator[str]:
    yield from _round_lines(before, after)
    yield from _waiting_lines(before, after)
    yield from _problem_lines(before, after)
    yield from _site_lines(before, after)
    if after.scores and after.scored_round != before.scored_round:
        yield _scores(after)
    if after.best is not None and after.best != before.best:
        yield best_sentence(after.best)
    yield from _warning_lines(before, after)
    if after.noisy and not before.noisy:
        yield NOISE_KEEPS
    if after.keeping and not after.noisy and after.keeping != before.keeping:
        yield kept_sentence(after.keeping)
    if (after.status, after.queue) != (before.status, before.queue):
        yield _status(after)


def _status(snapshot: RunSnapshot) -> str:
    text = f"{snapshot.run} · {snapshot.method} · {snapshot.status} · round {snapshot.round} of {snapshot.rounds}"
    return text + "".join(
        f" · {part}"
        for part in (snapshot.queue, snapshot.reason if snapshot.ended and snapshot.reason != snapshot.status else "")
        if part
    )


def _round_lines(before: RunSnapshot | None, after: RunSnapshot) -> Iterator[str]:
    """Attempts that are new, have another outcome, or have more reports than before."""
    previous = {} if before is None else {(row.round, row.attempt): row for row in before.history}
    for row in after.history if before is not None else after.history[-1:]:
        earlier = previous.get((row.round, row.attempt))
        if earlier is None or (earlier.outcome, earlier.reported) != (row.outcome, row.reported):
            yield _attempt(row) + (f" · {time_left(after.rest)}" if row.seconds is not None and after.rest else "")


def _waiting_lines(before: RunSnapshot | None, after: RunSnapshot) -> Iterator[str]:
    """Why the run stands still, and what it lacks, when that is new; again after it went on."""
    if after.waiting is not None and blocked(after.waiting) and (before is None or before.waiting != after.waiting):
        yield sentence(after.waiting)
    elif (
        after.waiting is not None and after.waiting.reason == "sum" and (before is None or before.phase != after.phase)
    ):
        yield f"{after.phase}; {sentence(after.waiting)}"  # once a step: who is left changes with every report
    known = () if before is None else before.unmet
    yield from (f"warning: {warning}" for warning in after.unmet if warning not in known)


def _warning_lines(before: RunSnapshot, after: RunSnapshot) -> Iterator[str]:
    """What speaks against a model and did not before; the same again in a later round is no news."""
    known = {(warning.code, warning.site) for warning in before.model_warnings}
    yield from sentences([warning for warning in after.model_warnings if (warning.code, warning.site) not in known])


def _attempt(row: Attempt) -> str:
    attempt = f", try {row.attempt}" if row.attempt > 1 else ""
    duration = "" if row.seconds is None else f" after {row.seconds:.1f} s"
    failed = "".join(f", {number} {task_status}" for task_status, number in row.failed.items())
    reason = f": {row.reason}" if row.reason else ""
    return (
        f"round {row.round}{attempt}: {row.outcome}{duration}, {row.reported} of {row.invited} reported{failed}{reason}"
    )


def _problem_lines(before: RunSnapshot, after: RunSnapshot) -> Iterator[str]:
    for problem in reversed([problem for problem in after.problems if problem not in before.problems and problem.site]):
        yield f"round {problem.round}: {problem.site} {problem.what}" + (
            f": {problem.reason}" if problem.reason else ""
        )


def _site_lines(before: RunSnapshot, after: RunSnapshot) -> Iterator[str]:
    """Sites whose status became bad or good again; failed tasks are among the problems."""
    previous = {site.site: site for site in before.sites}
    for site in after.sites:
        earlier = previous.get(site.site)
        moved = earlier is None or earlier.status != site.status
        if moved and (_unwell(site) or (earlier is not None and _unwell(earlier))):
            yield f"{site.site}: {site.doing}"


def _unwell(site: SiteSnapshot) -> bool:
    # After a restart of the server all sites are away until their next heartbeat: no news.
    return site.status not in ("working", "idle", "away")


def _scores(snapshot: RunSnapshot) -> str:
    listed = ", ".join(
        f"{score.name} {score.mean:.4f}" + ("" if score.mean_change is None else f" ({score.mean_change:+.4f})")
        for score in snapshot.scores[:SHOWN_SCORES]
    )
    return f"scores after round {snapshot.scored_round}: {listed}"
