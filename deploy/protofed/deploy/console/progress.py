"""Progress bars for work that takes a while: on a terminal's standard error and in a notebook, nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from protofed.deploy.console.notebook import NotebookBars, bars_for

T = TypeVar("T")
AFTER_S = 0.7  # work that ends sooner shows no bar
BYTES = "bytes"


class Bar:
    """One progress bar; any thread may update it."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def to(self, done: float, activity: str | None = None) -> None:
        """Set how much is done in all and, if given, the current activity."""
        self._bars.update(self._task, completed=done)
        if activity is not None:
            self.say(activity)

    def advance(self, more: float = 1.0) -> None:
        """Add to how much is done."""
        self._bars.advance(self._task, more)

    def expect(self, total: float | None) -> None:
        """Set the total once it is known."""
        self._bars.update(self._task, total=total or None)  # rich: None pulses, but 0 shows a finished bar

    def say(self, activity: str) -> None:
        """Set the current activity, in a few words."""
        self._bars.update(self._task, activity=activity)


@contextmanager
def progress(
    what: str,
    total: float | None = None,
    unit: str = "",
    *,
    shown: bool = True,
    stays: bool = False,
    after_s: float = AFTER_S,
    console: Console | None = None,
) -> Iterator[Bar]:
    """A bar for the work done inside.

    Args:
        what: the work, in a few words, such as "reading the log".
        total: amount of work; None: unknown, the bar only moves.
        unit: of `total`, such as "rounds"; BYTES are shown as kB, MB, GB.
        shown: False hides the bar, as with `--json`.
        stays: leave the bar's last state on the screen instead of removing it.
        after_s: seconds after which the bar appears.
        console: where to show it, such as a notebook's; None: standard error.
    """
    screen = console or Console(stderr=True)
    bars = bars_for(screen, *_columns(unit), transient=not stays)
    bar = Bar(bars, bars.add_task(what, total=total, activity=""))
    if not shown or not (screen.is_terminal or screen.is_jupyter):
        yield bar
        return
    if isinstance(bars, NotebookBars):
        with bars.after(after_s):
            yield bar
        return
    timer = threading.Timer(after_s, bars.start)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        # Joined before `stop`: a timer that has just fired would start the bar after it, for ever.
        timer.cancel()
        timer.join()
        bars.stop()


def each(items: Iterable[T], what: str, unit: str = "", *, shown: bool = True) -> Iterator[T]:
    """Yield the items behind a progress bar, which shows a total if `items` has a length."""
    with progress(what, len(items) if isinstance(items, Sized) else None, unit, shown=shown) as bar:
        for item in items:
            yield item
            bar.advance()


def _columns(unit: str) -> list[ProgressColumn]:
    activity = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return [
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=24),
        _Amount(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[activity]}", markup=False, table_column=activity),
    ]


class _Amount(ProgressColumn):
    """Column with the amount done and the total."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(amount(task.completed, task.total, self._unit))


def amount(done: float, total: float | None, unit: str) -> str:
    """`3/20 rounds`, `12.3 MB/50.0 MB`, or in percent where there is no unit."""
    if unit == BYTES:
        return decimal(int(done)) + ("" if total is None else f"/{decimal(int(total))}")
    if not unit:
        return "" if not total else f"{100 * done / total:.0f} %"
    return f"{done:.0f}" + ("" if total is None else f"/{total:.0f}") + f" {unit}"
