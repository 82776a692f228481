"""Pages served to a real browser: one whose scripts fail, or break its content security policy, fails the test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.support.hand import Hand, Keyboard, Mouse
from tests.support.page_server import served

from protofed.deploy.pages.shell import Program

CHROMIUM = shutil.which("chromium")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}


@pytest.fixture(params=["mouse", "keyboard"])
def hand(request: pytest.FixtureRequest) -> Hand:
    """The same journey by mouse, and by keyboard alone."""
    return Mouse() if request.param == "mouse" else Keyboard()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a program in a browser of its own, whose errors fail the test."""
    pages: list[tuple[Page, list[str]]] = []
    programs = ExitStack()

    def opened(program: Program, **options: Any) -> Page:
        context = chromium.new_context(**{"viewport": DESKTOP, **options})
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
        base, token = programs.enter_context(served(program))
        page.goto(f"{base}/enter?token={token}")
        page.wait_for_selector("nav")
        pages.append((page, errors))
        return page

    yield opened
    for page, _ in pages:
        page.context.close()
    programs.close()
    assert [errors for _, errors in pages if errors] == []
