"""`runs watch`: polls the server and shows the run until it ends, also across restarts of the server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live

from protofed.common.clock import stamp
from protofed.common.errors import RunFailedError, UnavailableError
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.log_lines import changes, remarks
from protofed.deploy.operator.screen import WatchScreen
from protofed.deploy.operator.snapshot import ENDED, RunSnapshot
from protofed.deploy.operator.snapshot_builder import ServerReply, WatchHistory, snapshot

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
