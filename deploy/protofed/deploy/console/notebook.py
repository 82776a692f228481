"""Progress bars in a notebook: one output of the cell, replaced as the work advances, readable in a saved notebook.

Rich's own bars need ipywidgets, whose outputs a saved notebook shows as `Output()`.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

WIDTH = 100  # columns
_REDRAW_S = 0.2  # every update is a message to the browser


def bars_for(console: Console, *columns: ProgressColumn, **options: Any) -> Progress:
    """Rich's bars on a terminal, `NotebookBars` in a notebook; `options` as of rich's `Progress`."""
    kind = NotebookBars if console.is_jupyter else Progress
    return kind(*columns, console=console, **options)


class NotebookBars(Progress):
    """Bars drawn at their updates, on the updating thread, which must be the one that runs the cell."""

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
