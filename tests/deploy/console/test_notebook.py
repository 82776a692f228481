"""Bars in a notebook: one output, replaced as the work gets on."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from protofed.deploy.console.progress import NotebookBars, progress


class Page:
    """What IPython would show: every output with its last text."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, data: dict[str, str], **_: Any) -> Page.Output:
        self.outputs.append(data["text/plain"])
        return Page.Output(self, len(self.outputs) - 1)

    class Output:
        def __init__(self, page: Page, place: int) -> None:
            self._page, self._place = page, place

        def update(self, data: dict[str, str], **_: Any) -> None:
            self._page.outputs[self._place] = data["text/plain"]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    shown = Page()
    monkeypatch.setattr("IPython.display.display", shown.display)
    return shown


def work(**options: Any) -> None:
    with progress("digits", 3, "rounds", console=Console(force_jupyter=True), after_s=0.0, **options) as bar:
        for done in (1, 2, 3):
            bar.to(done, "training")


def test_a_bar_that_stays_is_one_output_with_its_last_state(page: Page) -> None:
    work(stays=True)
    (output,) = page.outputs
    assert "3/3 rounds" in output
    assert "\x1b" not in output


def test_a_transient_bar_leaves_an_empty_output(page: Page) -> None:
    work()
    assert page.outputs == [""]


def test_no_bar_is_shown_where_none_is_wanted_or_the_work_is_short(page: Page) -> None:
    work(stays=True, shown=False)
    with progress("short", 1, console=Console(force_jupyter=True), stays=True, after_s=3600.0) as bar:
        bar.to(1)
    quiet = NotebookBars(console=Console(force_jupyter=True, quiet=True))
    quiet.start()
    quiet.stop()
    assert page.outputs == []
