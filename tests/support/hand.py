"""Uses a page as a person does: by mouse, or by keyboard alone."""

from __future__ import annotations

from typing import Protocol

from playwright.sync_api import Locator

MAX_TABS = 150  # to one element; a page with more before it is a trap for who has no mouse


class Hand(Protocol):
    """How a person without the other device uses a page: the same journey by mouse, and by keyboard alone."""

    def press(self, locator: Locator) -> None:
        """A link, a button, or what folds something open."""

    def fill(self, locator: Locator, text: str) -> None:
        """A field, whose text is replaced."""

    def tick(self, locator: Locator) -> None:
        """A box that is not ticked yet."""

    def choose(self, locator: Locator, value: str) -> None:
        """One of a <select>'s options, by its value."""


class Mouse:
    """Clicks; types only what is to be written."""

    def press(self, locator: Locator) -> None:
        locator.click()

    def fill(self, locator: Locator, text: str) -> None:
        locator.click(click_count=3)
        locator.fill(text)

    def tick(self, locator: Locator) -> None:
        locator.check()

    def choose(self, locator: Locator, value: str) -> None:
        locator.select_option(value)


class Keyboard:
    """Tab to an element from wherever the focus is, then its keys. Sets no focus by itself."""

    def press(self, locator: Locator) -> None:
        reach(locator)
        locator.page.keyboard.press("Enter")

    def fill(self, locator: Locator, text: str) -> None:
        reach(locator)
        locator.page.keyboard.press("ControlOrMeta+A")
        locator.page.keyboard.press("Delete")
        locator.page.keyboard.insert_text(text)

    def tick(self, locator: Locator) -> None:
        reach(locator)
        assert not locator.is_checked()
        locator.page.keyboard.press("Space")
        assert locator.is_checked()

    def choose(self, locator: Locator, value: str) -> None:
        reach(locator)
        values: list[str] = locator.evaluate("one => [...one.options].map(option => option.value)")
        locator.page.keyboard.press("Home")
        for _ in range(values.index(value)):
            locator.page.keyboard.press("ArrowDown")
        assert locator.input_value() == value


def reach(locator: Locator) -> None:
    """Press Tab until an element has the focus, past the page's end to its beginning if need be."""
    locator.wait_for()
    for _ in range(MAX_TABS):
        if locator.evaluate("one => one === document.activeElement"):
            return
        locator.page.keyboard.press("Tab")
    raise AssertionError(f"{locator} cannot be reached by Tab")
