"""Bars for work that takes longer than a moment: on a terminal's standard error and in a notebook, nowhere else."""

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
AFTER_S = 0.7  # what is done sooner needs no bar
BYTES = "bytes"


class Bar:
    """One bar, told how far the work is; it may be told from any thread."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def to(self, done: float, doing: str | None = None) -> None:
        """So much is done in all, and what goes on now."""
        self._bars.update(self._task, completed=done)
        if doing is not None:
            self.say(doing)

    def advance(self, more: float = 1.0) -> None:
        """So much more is done."""
        self._bars.advance(self._task, more)

    def expect(self, total: float | None) -> None:
        """So much is to be done, as is known now."""
        self._bars.update(self._task, total=total or None)

    def say(self, doing: str) -> None:
        """What goes on now, in a few words."""
        self._bars.update(self._task, doing=doing)


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
    """A bar for the work that is done inside.

    Args:
        what: in one or two words, such as "reading the log".
        total: of what is to be done; None: nobody knows, the bar only moves.
        unit: of `total`, such as "rounds"; BYTES are shown as kB, MB, GB.
        shown: give `not as_json`: who reads JSON wants no bar.
        stays: its last state is left on the screen; else it is gone when the work is done.
        after_s: work that is done within so many seconds never shows one.
        console: in place of standard error; a notebook is one, too.
    """
    where = console or Console(stderr=True)
    bars = bars_for(where, *_columns(unit), transient=not stays)
    bar = Bar(bars, bars.add_task(what, total=total, doing=""))
    if not shown or not (where.is_terminal or where.is_jupyter):
        yield bar
        return
    if isinstance(bars, NotebookBars):
        with bars.after(after_s):
            yield bar
        return
    patience = threading.Timer(after_s, bars.start)
    patience.daemon = True
    patience.start()
    try:
        yield bar
    finally:
        patience.cancel()
        patience.join()
        bars.stop()


def each(items: Iterable[T], what: str, unit: str = "", *, shown: bool = True) -> Iterator[T]:
    """The items one after the other, behind a bar; its length is known if theirs is."""
    with progress(what, len(items) if isinstance(items, Sized) else None, unit, shown=shown) as bar:
        for item in items:
            yield item
            bar.advance()


def _columns(unit: str) -> list[ProgressColumn]:
    said = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return [
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=24),
        _Amount(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}", markup=False, table_column=said),
    ]


class _Amount(ProgressColumn):
    """How much of how much."""

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
