"""Bars: on a terminal when it takes long, nowhere else.

Bars in a notebook: one output, replaced as the work gets on.
"""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from protofed.deploy.progress import BYTES, NotebookBars, amount, each, progress


def terminal(*, is_one: bool = True) -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=is_one, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_long_work_has_a_bar_that_is_gone_when_it_is_done() -> None:
    console = terminal()
    with progress("verifying", 4, "rounds", after_s=0.0, console=console) as bar:
        time.sleep(0.2)
        bar.to(3, "round [red]7")
        time.sleep(0.3)
        bar.advance()
    text = written(console)
    assert "verifying" in text
    assert "3/4 rounds" in text
    assert "round [red]7" in text
    assert text.endswith("\x1b[2K")


def test_a_bar_may_stay_and_short_work_has_none() -> None:
    console = terminal()
    with progress("training", 4, "rounds", after_s=0.0, stays=True, console=console) as bar:
        time.sleep(0.2)
        bar.to(4)
    assert "4/4 rounds" in written(console).rpartition("\x1b[2K")[2]
    console = terminal()
    with progress("quick", after_s=60.0, console=console) as bar:
        bar.say("nothing")
    assert written(console) == ""


@pytest.mark.parametrize(("is_terminal", "shown"), [(False, True), (True, False)])
def test_nobody_sees_one_without_a_terminal_or_who_reads_json(is_terminal: bool, shown: bool) -> None:
    console = terminal(is_one=is_terminal)
    with progress("hidden", 2, after_s=0.0, visible=shown, console=console) as bar:
        time.sleep(0.2)
        bar.to(1)
    assert written(console).strip() == ""


def failing(console: Console) -> None:
    with progress("failing", after_s=0.0, console=console):
        time.sleep(0.2)
        raise ValueError("wrong")


def test_an_error_ends_it_and_items_come_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    with pytest.raises(ValueError, match="wrong"):
        failing(console)
    assert written(console).endswith("\x1b[2K")
    assert list(each([3, 1, 2], "counting")) == [3, 1, 2]
    assert list(each(iter("ab"), "spelling")) == ["a", "b"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("done", "total", "unit", "said"),
    [
        (3, 20, "rounds", "3/20 rounds"),
        (3, None, "rounds", "3 rounds"),
        (12_300_000, 50_000_000, BYTES, "12.3 MB/50.0 MB"),
        (1, 4, "", "25 %"),
        (1, None, "", ""),
    ],
)
def test_amounts_have_units(done: float, total: float | None, unit: str, said: str) -> None:
    assert amount(done, total, unit) == said


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
    work(stays=True, visible=False)
    with progress("short", 1, console=Console(force_jupyter=True), stays=True, after_s=3600.0) as bar:
        bar.to(1)
    quiet = NotebookBars(console=Console(force_jupyter=True, quiet=True))
    quiet.start()
    quiet.stop()
    assert page.outputs == []
