"""Pages served to a real browser: one whose scripts fail, or break its content security policy, fails the test."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright
from tests.support.hand import Hand, Keyboard, Mouse

from protofed.deploy.pages.access import Access
from protofed.deploy.pages.serving import listening
from protofed.deploy.pages.shell import Program, application

CHROMIUM = shutil.which("chromium")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


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
def served() -> Iterator[Callable[[Program], str]]:
    """Serves programs; the addresses that open them."""
    stops: list[Callable[[], None]] = []

    def serve(program: Program) -> str:
        ready: Future[str] = Future()

        def run() -> None:
            with listening("127.0.0.1:0") as opened:
                port = opened.getsockname()[1]
                access = Access(f"protofed-{port}")
                server = uvicorn.Server(
                    uvicorn.Config(application(program, access), log_config=None, lifespan="off", ws="none")
                )
                stops.append(lambda: setattr(server, "should_exit", True))
                opened.listen()
                ready.set_result(f"http://127.0.0.1:{port}/enter?token={access.token}")
                server.run(sockets=[opened])

        threading.Thread(target=run, name="pages", daemon=True).start()
        return ready.result(timeout=20)

    yield serve
    for stop in stops:
        stop()


@pytest.fixture
def open_page(chromium: Browser, served: Callable[[Program], str]) -> Iterator[Callable[..., Page]]:
    """Opens a program in a browser of its own, whose errors fail the test."""
    pages: list[tuple[Page, list[str]]] = []

    def opened(program: Program, **options: Any) -> Page:
        context = chromium.new_context(**{"viewport": DESKTOP, **options})
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(served(program))
        page.wait_for_url("**/")
        pages.append((page, errors))
        return page

    yield opened
    for page, errors in pages:
        page.context.close()
        assert errors == []
