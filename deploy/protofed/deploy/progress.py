"""Progress bars for work that takes a while: on a terminal's standard error and in a notebook, nowhere else."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

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

T = TypeVar("T")
AFTER_S = 0.7  # work that ends sooner shows no bar
BYTES = "bytes"


class Bar:
    """One progress bar; any thread may update it."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def to(self, completed: float, activity: str | None = None) -> None:
        """Set how much is done in all and, if given, the current activity."""
        self._bars.update(self._task, completed=completed)
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
    visible: bool = True,
    stays: bool = False,
    after_s: float = AFTER_S,
    console: Console | None = None,
) -> Iterator[Bar]:
    """A bar for the work done inside.

    Args:
        what: the work, in a few words, such as "reading the log".
        total: amount of work; None: unknown, the bar only moves.
        unit: of `total`, such as "rounds"; BYTES are shown as kB, MB, GB.
        visible: False hides the bar, as with `--json`.
        stays: leave the bar's last state on the screen instead of removing it.
        after_s: seconds after which the bar appears.
        console: where to show it, such as a notebook's; None: standard error.
    """
    screen = console or Console(stderr=True)
    bars = bars_for(screen, *_columns(unit), transient=not stays)
    bar = Bar(bars, bars.add_task(what, total=total, activity=""))
    if not visible or not (screen.is_terminal or screen.is_jupyter):
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


def each(items: Iterable[T], what: str, unit: str = "", *, visible: bool = True) -> Iterator[T]:
    """Yield the items behind a progress bar, which shows a total if `items` has a length."""
    with progress(what, len(items) if isinstance(items, Sized) else None, unit, visible=visible) as bar:
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


def amount(completed: float, total: float | None, unit: str) -> str:
    """`3/20 rounds`, `12.3 MB/50.0 MB`, or in percent where there is no unit."""
    if unit == BYTES:
        return decimal(int(completed)) + ("" if total is None else f"/{decimal(int(total))}")
    if not unit:
        return "" if not total else f"{100 * completed / total:.0f} %"
    return f"{completed:.0f}" + ("" if total is None else f"/{total:.0f}") + f" {unit}"


WIDTH = 100  # columns
_REDRAW_S = 0.2  # every update is a message to the browser


def bars_for(console: Console, *columns: ProgressColumn, **options: Any) -> Progress:
    """Rich's bars on a terminal, `NotebookBars` in a notebook; `options` as of rich's `Progress`."""
    kind = NotebookBars if console.is_jupyter else Progress
    return kind(*columns, console=console, **options)


class NotebookBars(Progress):
    """Bars drawn at their updates, on the updating thread. This must be the thread that runs the cell."""

    _output: Any = None
    _begin = math.inf  # time.monotonic() from which on they are shown
    _drawn = -math.inf

    def start(self) -> None:
        """Show the bars from now on."""
        self._begin = time.monotonic()
        self.refresh()

    def stop(self) -> None:
        """Draw the last state; transient bars leave an empty output."""
        if self.live.transient and self._output is not None:
            self._draw("")
        elif not self.live.transient and time.monotonic() >= self._begin:
            self._draw(self.text())
        self._begin = math.inf

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """Show the bars inside, once the work has taken `seconds`."""
        self._begin = time.monotonic() + seconds
        try:
            yield
        finally:
            self.stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As `Progress.update`, then draw."""
        super().update(task_id, **changes)
        self.refresh()

    def refresh(self) -> None:
        """Draw, unless the last drawing was less than `_REDRAW_S` ago."""
        if time.monotonic() >= max(self._begin, self._drawn + _REDRAW_S):
            self._draw(self.text())

    def text(self) -> str:
        """The bars as plain text, one line for each."""
        page = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False, force_terminal=False, color_system=None)
        with page.capture() as drawn:
            page.print(self.get_renderable())
        return "\n".join(line.rstrip() for line in drawn.get().splitlines())

    def _draw(self, text: str) -> None:
        from IPython.display import display

        if self.disable or self.console.quiet:
            return
        self._drawn = time.monotonic()
        if self._output is None:
            self._output = display({"text/plain": text}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update({"text/plain": text}, raw=True)


TERMINATE_S = 10.0  # between SIGTERM and SIGKILL, for all processes together


@contextmanager
def interruption() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C and SIGTERM raise KeyboardInterrupt only where the yielded function is called.

    An interrupt between a process's start and its assignment to a variable would leave nobody to end it.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_module(module: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start a module as a process of one thread, for processes share the cores, in a session of its own.

    Ctrl-C reaches only us, and we end it in order.

    Args:
        options: as of `Popen`; variables of `env` are added to ours.
    """
    environment = {**os.environ, **options.pop("env", {}), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, start_new_session=True, **options)  # noqa: S603


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, to the last one first (clients before their server), and SIGKILL after `TERMINATE_S` seconds."""
    for process in reversed(processes):
        process.terminate()
    until = time.monotonic() + TERMINATE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
            continue
        process.kill()
        process.wait()


def usable_cores() -> int:
    """Cores that this process may use: a container or taskset may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
