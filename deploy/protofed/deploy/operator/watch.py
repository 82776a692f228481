"""`runs watch`: asks the server again and again and shows what it says, however often it is restarted meanwhile."""

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
from protofed.deploy.operator.log_lines import changes
from protofed.deploy.operator.screen import WatchScreen
from protofed.deploy.operator.snapshot import ENDED, RunSnapshot
from protofed.deploy.operator.snapshot_builder import Memory, ServerReply, snapshot

EVERY_S = 1.0
ATTEMPTS = 12  # the newest, which are shown and from which the rest is estimated
SILENT_S = 5.0  # without an answer, although none was refused


@dataclass(frozen=True)
class _Known:
    answer: ServerReply
    memory: Memory
    heard_at: float
    trouble: str = ""


class Watcher:
    """One run, as a server tells it.

    Args:
        clock: seconds of the Unix epoch.

    Raises:
        ConfigError: there is no such run.
        Unavailable: there is no server; only at the start.
    """

    def __init__(self, operator: Operator, run: str, clock: Callable[[], float] = time.time) -> None:
        self._operator, self._run, self._clock = operator, run, clock
        answer = self._ask()
        memory = Memory().after(answer)
        self._known = _Known(answer, self._dated(memory, answer), clock())

    def look(self) -> None:
        """Ask once more; a server that does not answer is no error."""
        try:
            answer = self._ask()
            memory = self._dated(self._known.memory.after(answer), answer)
        except UnavailableError as error:
            self._known = replace(self._known, trouble=str(error).partition("; ")[2] or str(error))
        else:
            self._known = _Known(answer, memory, self._clock())

    def snapshot(self) -> RunSnapshot:
        """The run now, as far as is known; from any thread, even while the server is asked."""
        known, now = self._known, self._clock()
        seen, silent = snapshot(known.answer, known.memory, now), now - known.heard_at
        trouble = known.trouble or ("it is busy, or the network is down" if silent > SILENT_S else "")
        return replace(seen, trouble=trouble, silent_s=silent) if trouble else seen

    def _ask(self) -> ServerReply:
        detail = self._operator.show(self._run, newest=ATTEMPTS)
        waits = detail.info.status not in (*ENDED, "running")
        return ServerReply(detail, self._operator.sites(), self._operator.runs() if waits else ())

    def _dated(self, memory: Memory, answer: ServerReply) -> Memory:
        """Who began to watch late asks once when the run began."""
        if memory.opened_at or not answer.detail.attempts:
            return memory
        return replace(memory, opened_at=self._operator.opened_at(self._run))


def watch(watcher: Watcher, console: Console, *, as_json: bool = False) -> None:
    """Show a run until it ends: live on a terminal, a line a change elsewhere, an object a change as JSON.

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
    """On a screen of its own; how it ended (or how it was when nobody would see more) stays on the terminal."""

    def view() -> WatchScreen:
        return WatchScreen(watcher.snapshot(), console.size.height)

    try:
        with Live(get_renderable=view, console=console, screen=True, refresh_per_second=2):
            while not watcher.snapshot().ended:
                time.sleep(EVERY_S)
                watcher.look()
    finally:
        console.print(WatchScreen(watcher.snapshot()))


def _follow(watcher: Watcher, tell: Callable[[RunSnapshot], None]) -> None:
    tell(watcher.snapshot())
    while not watcher.snapshot().ended:
        time.sleep(EVERY_S)
        watcher.look()
        tell(watcher.snapshot())


class _Lines:
    """A line a change, with its time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: RunSnapshot | None = None

    def __call__(self, now: RunSnapshot) -> None:
        for line in changes(self._last, now):
            at = stamp(datetime.fromtimestamp(now.at, UTC))
            self._console.print(f"{at} {line}", markup=False, highlight=False, soft_wrap=True)
        self._last = now


class _JsonLines:
    """An object a change, on one line each."""

    def __init__(self) -> None:
        self._last: RunSnapshot | None = None

    def __call__(self, now: RunSnapshot) -> None:
        if now != self._last:
            event = "end" if now.ended else "start" if self._last is None else "change"
            print(json.dumps({"event": event, **plain(now)}), flush=True)  # noqa: T201
            self._last = now


def plain(seen: RunSnapshot) -> dict[str, object]:
    """A snapshot as JSON takes it: its fields, and `care` in a word."""
    told = asdict(seen)
    for site, row in zip(seen.sites, told["sites"], strict=True):
        row["care"] = site.care.name.lower()
    return told
