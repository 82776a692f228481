"""What changed between two snapshots, in lines of text: the output of `runs watch` without a terminal.

A round is one line, told once nothing can be added to it: who took part, how it ended, its scores. Only errors, holds
and the run's own status have further lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from protofed.deploy.console.run_words import NOISE_KEEPS, best_sentence, kept_sentence, warning_lines
from protofed.deploy.operator.screen_header import no_answer, time_left
from protofed.deploy.operator.snapshot import PUBLISHED, Attempt, RunSnapshot, SiteSnapshot
from protofed.deploy.tables import span

SHOWN_SCORES = 4
NAMED_SITES = 6  # of those whose update is not in a round


def changes(before: RunSnapshot | None, after: RunSnapshot) -> list[str]:
    """A line for each round that is settled and each new problem; without a snapshot before, the state of the run."""
    if before is None:
        first = (_status(after), *_round_lines(None, after), *_waiting_lines(None, after))
        return [*first, *warning_lines(after.model_warnings)]
    if after.trouble:
        return [] if before.trouble else [no_answer(after)]  # once, not at every attempt to reach the server
    recovered = [f"it answers again, after {span(before.silent_s)}"] if before.trouble else []
    return [*recovered, *_between(before, after)]


def _between(before: RunSnapshot, after: RunSnapshot) -> Iterator[str]:
    yield from _round_lines(before, after)
    yield from _waiting_lines(before, after)
    yield from _problem_lines(before, after)
    yield from _site_lines(before, after)
    yield from _warning_lines(before, after)
    if (after.status, after.queue) != (before.status, before.queue):
        yield _status(after)
        if after.ended and after.best is not None:
            yield best_sentence(after.best)


def remarks(snapshot: RunSnapshot) -> list[str]:
    """What holds for a run as a whole: to be told once, not after every round."""
    if snapshot.noisy:
        return [NOISE_KEEPS]
    return [kept_sentence(snapshot.keeping)] if snapshot.keeping and not _scoring(snapshot) else []


def _status(snapshot: RunSnapshot) -> str:
    text = f"{snapshot.run} · {snapshot.method} · {snapshot.status} · round {snapshot.round} of {snapshot.rounds}"
    return text + "".join(
        f" · {part}"
        for part in (snapshot.queue, snapshot.reason if snapshot.ended and snapshot.reason != snapshot.status else "")
        if part
    )


def _round_lines(before: RunSnapshot | None, after: RunSnapshot) -> Iterator[str]:
    """Attempts to which nothing will be added any more, and those that came to count otherwise."""
    known = {} if before is None else {(row.round, row.attempt): row.outcome for row in _settled(before)}
    rows = _settled(after)
    for row in rows if before is not None else rows[-1:]:
        if known.get((row.round, row.attempt)) != row.outcome:
            yield _line(row, after)


def _settled(snapshot: RunSnapshot) -> list[Attempt]:
    """The closed attempts; of one that has just been published, the scores may be missing yet."""
    *older, newest = snapshot.history or (None,)
    last = [newest] if newest is not None and _is_settled(newest, snapshot) else []
    return [row for row in (*older, *last) if row is not None and row.outcome != "open"]


def _is_settled(newest: Attempt, snapshot: RunSnapshot) -> bool:
    scored = snapshot.scored_round >= newest.round and not _scoring(snapshot)
    stands_still = snapshot.status != "running" or (snapshot.waiting is not None and snapshot.waiting.blocked)
    return newest.outcome not in PUBLISHED or scored or stands_still


def _scoring(snapshot: RunSnapshot) -> bool:
    return snapshot.phase == "evaluating"


def _waiting_lines(before: RunSnapshot | None, after: RunSnapshot) -> Iterator[str]:
    """Why the run stands still, and what it lacks, when that is new; again after it went on."""
    if after.waiting is not None and after.waiting.blocked and (before is None or before.waiting != after.waiting):
        yield after.waiting.sentence
    known = () if before is None else before.unmet
    yield from (f"warning: {warning}" for warning in after.unmet if warning not in known)


def _warning_lines(before: RunSnapshot, after: RunSnapshot) -> Iterator[str]:
    """What speaks against a model and did not before; the same again in a later round is no news."""
    known = {(warning.code, warning.site) for warning in before.model_warnings}
    yield from warning_lines([warning for warning in after.model_warnings if (warning.code, warning.site) not in known])


def _line(row: Attempt, snapshot: RunSnapshot) -> str:
    """All of one attempt."""
    best = snapshot.best is not None and snapshot.best.round == row.round and row.outcome in PUBLISHED
    scores = _scores(snapshot) if snapshot.scored_round == row.round and row.outcome in PUBLISHED else ""
    rest = time_left(snapshot.rest) if snapshot.rest else ""
    return " · ".join(filter(None, (_attempt(row, snapshot), scores, "best so far" if best else "", rest)))


def _attempt(row: Attempt, snapshot: RunSnapshot) -> str:
    attempt = f", try {row.attempt}" if row.attempt > 1 else ""
    duration = "" if row.seconds is None else f" after {row.seconds:.1f} s"
    at = (row.round, row.attempt)
    refused = sum(problem.what == "refused" and at == (problem.round, problem.attempt) for problem in snapshot.problems)
    counts = {**row.failed, **({"refused": refused} if refused else {})}
    failed = "".join(f", {number} {task_status}" for task_status, number in counts.items())
    reason = f": {row.reason}" if row.reason else ""
    return f"round {row.round}{attempt}: {row.outcome}{duration}, {_who(row)}{failed}{reason}"


def _who(row: Attempt) -> str:
    """How many took part of how many, and who did not; of an attempt that does not count, how far it came."""
    if row.outcome not in PUBLISHED:
        return f"{row.reported} of {row.invited} reported"
    took_part = f"{row.invited - len(row.missing)} of {row.invited} took part"
    return f"{took_part} without {', '.join(row.missing)}" if 0 < len(row.missing) <= NAMED_SITES else took_part


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
    return ", ".join(
        f"{score.name} {score.mean:.4f}" + ("" if score.mean_change is None else f" ({score.mean_change:+.4f})")
        for score in snapshot.scores[:SHOWN_SCORES]
    )
