"""`runs watch`: polls the server and shows the run until it ends, also across restarts of the server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live

from protofed.common.clock import stamp
from protofed.common.errors import RunFailedError, UnavailableError
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.screen import WatchScreen, no_answer, time_left
from protofed.deploy.operator.snapshot import ENDED, PUBLISHED, Attempt, RunSnapshot, SiteSnapshot
from protofed.deploy.operator.snapshot_builder import ServerReply, WatchHistory, snapshot
from protofed.deploy.run_view import NOISE_KEEPS, best_sentence, kept_sentence, score_text, warning_lines
from protofed.deploy.tables import span

EVERY_S = 1.0  # between two polls
ATTEMPTS = 12  # newest ones, which are shown and from which the time left is estimated
SILENT_S = 5.0  # after which a call that has neither returned nor failed is shown as trouble


@dataclass(frozen=True)
class _LastReply:
    reply: ServerReply
    history: WatchHistory
    received_at: float
    trouble: str = ""


class Watcher:
    """Polls one run.

    Args:
        clock: returns the Unix time.

    Raises:
        ConfigError: there is no such run.
        UnavailableError: there is no server; only from the constructor.
    """

    def __init__(self, operator: Operator, run: str, clock: Callable[[], float] = time.time) -> None:
        self._operator, self._run, self._clock = operator, run, clock
        reply = self._ask()
        history = WatchHistory().after(reply)
        self._last = _LastReply(reply, self._dated(history, reply), clock())

    def poll(self) -> None:
        """Poll the server once; if it does not answer, the next snapshot says so."""
        try:
            reply = self._ask()
            history = self._dated(self._last.history.after(reply), reply)
        except UnavailableError as error:
            self._last = replace(self._last, trouble=str(error).partition("; ")[2] or str(error))
        else:
            self._last = _LastReply(reply, history, self._clock())

    def snapshot(self) -> RunSnapshot:
        """The run by the last reply and the clock; callable from any thread, also while `poll` waits for the server."""
        # One reference, replaced as a whole: the screen's thread never sees half of a reply.
        last, now = self._last, self._clock()
        current, silent_s = snapshot(last.reply, last.history, now), now - last.received_at
        trouble = last.trouble or ("it is busy, or the network is down" if silent_s > SILENT_S else "")
        return replace(current, trouble=trouble, silent_s=silent_s) if trouble else current

    def _ask(self) -> ServerReply:
        detail = self._operator.show(self._run, newest=ATTEMPTS)
        waits = detail.info.status not in (*ENDED, "running")
        return ServerReply(detail, self._operator.sites(), self._operator.runs() if waits else ())

    def _dated(self, history: WatchHistory, reply: ServerReply) -> WatchHistory:
        """The history with the run's start: one extra call if the replies began after it."""
        if history.opened_at or not reply.detail.attempts:
            return history
        return replace(history, opened_at=self._operator.opened_at(self._run))


def watch(watcher: Watcher, console: Console, *, as_json: bool = False) -> None:
    """Show a run until it ends: a live screen on a terminal, else a line for each round and problem, or JSON objects.

    Raises:
        RunFailedError: it failed.
    """
    if as_json:
        _follow(watcher, _JsonLines())
    elif console.is_terminal and not console.is_dumb_terminal:
        _live(watcher, console)
    else:
        _follow(watcher, _Lines(console))
    end = watcher.snapshot()
    if end.status == "failed":
        raise RunFailedError(f"run failed: {end.run}: {end.reason}")


def _live(watcher: Watcher, console: Console) -> None:
    """Show the run on the terminal's alternate screen; the last view is printed when it ends or is interrupted."""

    def view() -> WatchScreen:
        return WatchScreen(watcher.snapshot(), console.size.height)

    try:
        with Live(get_renderable=view, console=console, screen=True, refresh_per_second=2):
            while not watcher.snapshot().ended:
                time.sleep(EVERY_S)
                watcher.poll()
    finally:
        console.print(WatchScreen(watcher.snapshot()))


def _follow(watcher: Watcher, show: Callable[[RunSnapshot], None]) -> None:
    show(watcher.snapshot())
    while not watcher.snapshot().ended:
        time.sleep(EVERY_S)
        watcher.poll()
        show(watcher.snapshot())


class _Lines:
    """Prints each round and each problem on a line with its time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: RunSnapshot | None = None
        self._remarks: set[str] = set()  # that were printed: sites answer one by one, and would change them each round

    def __call__(self, now: RunSnapshot) -> None:
        new = [line for line in remarks(now) if line not in self._remarks]
        self._remarks.update(new)
        for line in (*changes(self._last, now), *new):
            at = stamp(datetime.fromtimestamp(now.at, UTC))
            self._console.print(f"{at} {line}", markup=False, highlight=False, soft_wrap=True)
        self._last = now


class _JsonLines:
    """Prints a JSON object for each change, one a line."""

    def __init__(self) -> None:
        self._last: RunSnapshot | None = None

    def __call__(self, now: RunSnapshot) -> None:
        if now != self._last:
            event = "end" if now.ended else "start" if self._last is None else "change"
            print(json.dumps({"event": event, **plain(now)}), flush=True)  # noqa: T201
            self._last = now


def plain(snapshot: RunSnapshot) -> dict[str, object]:
    """A snapshot for `--json`: its fields, with `care` as a word."""
    fields = asdict(snapshot)
    for site, row in zip(snapshot.sites, fields["sites"], strict=True):
        row["care"] = site.care.name.lower()
    return fields


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
    remaining = time_left(snapshot.rest) if snapshot.rest else ""
    return " · ".join(filter(None, (_attempt(row, snapshot), scores, "best so far" if best else "", remaining)))


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
        f"{score.name} {score_text(score.mean)}" + ("" if score.mean_change is None else f" ({score.mean_change:+.4f})")
        for score in snapshot.scores[:SHOWN_SCORES]
    )
