"""The coordinator's pages in a real browser: by mouse and by keyboard, checked by axe; `make browser`."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from tests.support.disturbed_run import RUN, close_channels, disturbed_run
from tests.support.hand import Hand
from tests.support.tls_server import TlsServer, tls_server

from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party
from protofed.deploy.certs.lifecycle import make_authority
from protofed.deploy.certs.lifecycle import request as make_request
from protofed.deploy.certs.request import read_request
from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.coordinator.console import console
from protofed.deploy.pages.shell import Program
from protofed.protos.v1 import operator_pb2 as pb

pytestmark = pytest.mark.browser
RecipeOf = Callable[..., Recipe]
CHROMIUM = shutil.which("chromium")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}


@pytest.fixture
def program(live_server: Callable[..., Any], recipe_of: RecipeOf) -> Iterator[Program]:
    """Of a server whose run had several things go wrong."""
    server, daemons = disturbed_run(live_server, recipe_of)
    with Operator(server.address, NO_TLS) as operator:
        yield console(operator, server.address, None)
    close_channels(daemons)


@pytest.fixture
def secured(tmp_path: Path, live_server: Callable[..., Any], recipe_of: RecipeOf) -> Iterator[TlsServer]:
    with tls_server(tmp_path, live_server, recipe_of("fedavg")) as made:
        yield made


def violations(page: Page) -> list[str]:
    """What axe finds, by rule and element."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['target']}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(
    program: Program, open_page: Callable[..., Page], scheme: str, viewport: dict[str, int]
) -> None:
    page = open_page(program, color_scheme=scheme, viewport=viewport)
    base = page.url.rstrip("/")
    paths = [
        "/",
        f"/runs/{RUN}",
        f"/runs/{RUN}/rounds/1/1",
        f"/runs/{RUN}/abort",
        f"/runs/{RUN}/rollback",
        f"/runs/{RUN}/figures",
    ]
    for path in [*paths, "/sites", "/sites/site-1", "/start", "/certificates", "/nothing"]:
        page.goto(base + path)
        expect(page.locator("#drawing")).to_have_count(0, timeout=60_000)  # what is checked must stand still
        assert violations(page) == [], path
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        page.evaluate("document.querySelectorAll('details').forEach(one => (one.open = true))")
        assert violations(page) == [], f"{path}, unfolded"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path}, unfolded"


def test_on_a_phone_no_score_is_cut(
    program: Program, open_page: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    show = Operator.show

    def scored(self: Operator, *asked: Any, **more: Any) -> pb.RunDetail:
        detail, about = show(self, *asked, **more), {"std": 0.0123, "worst": 0.4321, "sites": 5}
        for name in ("global.balanced_accuracy", "personal.local.balanced_accuracy"):
            detail.scores.add(name=name, mean=0.5, **about)
        return detail

    monkeypatch.setattr(Operator, "show", scored)
    page = open_page(program, viewport=PHONE)
    page.goto(f"{page.url.rstrip('/')}/runs/{RUN}")
    table = page.locator(".scroll:has(td[data-name='Standard deviation'])")
    assert table.evaluate("one => one.scrollWidth <= one.clientWidth")
    expect(table.locator("td[data-name='Worst']").first).to_be_visible()
    assert violations(page) == []


def test_a_run_is_paused_resumed_and_ended(program: Program, open_page: Callable[..., Page], hand: Hand) -> None:
    page = open_page(program)
    hand.press(page.get_by_role("link", name=RUN))
    hand.press(page.get_by_role("button", name="Pause", exact=True))
    hand.press(page.get_by_role("button", name="Resume"))
    hand.press(page.get_by_role("link", name="End the run …"))
    hand.fill(page.get_by_label("Reason"), "the classes are wrong")
    hand.press(page.get_by_role("button", name="End the run"))
    expect(page.get_by_text("the classes are wrong").first).to_be_visible()
    expect(page.get_by_role("button", name="Resume")).to_have_count(0)


def test_a_site_is_excluded_and_admitted(program: Program, open_page: Callable[..., Page], hand: Hand) -> None:
    page = open_page(program)
    hand.press(page.get_by_role("link", name="Sites", exact=True))
    hand.press(page.get_by_role("link", name="site-2"))
    hand.fill(page.get_by_label("Reason for excluding it"), "checked")
    hand.press(page.get_by_role("button", name="Exclude the site"))
    hand.press(page.get_by_role("button", name="Admit it again"))
    expect(page.get_by_role("button", name="Exclude the site")).to_be_visible()


def test_a_run_is_watched_in_rounds_and_figures(program: Program, open_page: Callable[..., Page], hand: Hand) -> None:
    page = open_page(program)
    hand.press(page.get_by_role("link", name=RUN))
    hand.press(page.locator("#troubles summary"))
    expect(page.get_by_role("region", name="What did not count").get_by_text("out-of-memory")).to_be_visible()
    hand.press(page.get_by_role("link", name="round 1, attempt 1"))
    hand.press(page.get_by_role("button", name="Compute this state again"))
    expect(page.get_by_text("the state is the same")).to_be_visible()
    hand.press(page.get_by_role("link", name=RUN))
    hand.press(page.get_by_role("link", name="Figures"))
    picture = page.get_by_role("img").first
    expect(picture).to_be_visible(timeout=60_000)
    expect(page.locator("#drawing")).to_have_count(0)
    hand.press(page.locator("summary").first)
    expect(page.locator("details table").first).to_be_visible()


def test_the_keyboard_skips_to_the_content(program: Program, open_page: Callable[..., Page]) -> None:
    page = open_page(program)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_a_page_follows_the_run_and_keeps_the_focus_and_what_was_opened(
    program: Program, open_page: Callable[..., Page]
) -> None:
    page = open_page(program)
    page.goto(page.url + f"runs/{RUN}")
    page.locator("#troubles summary").click()
    page.locator("#order-abort").focus()
    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_role("button", name="Pause", exact=True).click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible(timeout=20_000)
    expect(page.locator("#order-abort")).to_be_focused()
    assert page.locator("#troubles").evaluate("one => one.open")
    expect(page.locator("#announcer")).to_contain_text("paused")


def test_everything_works_without_scripts(program: Program, open_page: Callable[..., Page]) -> None:
    page = open_page(program, java_script_enabled=False)
    page.get_by_role("link", name=RUN).click()
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.get_by_role("button", name="Pause refreshing")).to_have_count(0)


def test_a_run_is_started_and_another_browser_is_refused(
    program: Program, open_page: Callable[..., Page], chromium: Browser, hand: Hand
) -> None:
    page = open_page(program)
    hand.press(page.get_by_role("link", name="Start a run"))
    hand.choose(page.get_by_label("A recipe that comes with protofed"), "digits-fednh")
    hand.fill(page.get_by_label("Name of the run"), "second")
    hand.tick(page.get_by_label("Queue the run although"))
    hand.press(page.get_by_role("button", name="Check it"))
    expect(page.get_by_role("button", name="Queue the run")).to_be_visible()
    assert violations(page) == []
    hand.press(page.get_by_role("button", name="Queue the run"))
    expect(page.get_by_role("heading", name="Run second")).to_be_visible()
    stranger = chromium.new_context().new_page()
    answer = stranger.goto(page.url)
    assert answer is not None
    assert answer.status == 401
    stranger.context.close()


def test_a_certificate_is_signed(
    secured: TlsServer, open_page: Callable[..., Page], tmp_path: Path, hand: Hand
) -> None:
    make_authority(tmp_path / "ca", "study", 100, b"sesame")
    trusted = secured.identity() / "ca.pem"
    trusted.write_bytes(trusted.read_bytes() + (tmp_path / "ca" / "ca.pem").read_bytes())
    pem = make_request(tmp_path / "north", Party.SITE, "north")
    with secured.operator() as operator:
        identity = secured.identity("boss", Party.OPERATOR)
        page = open_page(console(operator, secured.server.address, identity, tmp_path / "ca"))
        hand.press(page.get_by_role("link", name="Certificates"))
        hand.press(page.get_by_role("link", name="Sign a request"))
        hand.fill(page.get_by_label("The request"), pem.decode())
        assert violations(page) == []
        hand.fill(page.get_by_label("named"), "north")
        hand.fill(page.get_by_label("Code of the key"), read_request(pem, "it").code)
        hand.fill(page.get_by_label("Passphrase"), "sesame")
        hand.press(page.get_by_role("button", name="Sign and register"))
        expect(page.get_by_role("heading", name="Signed for site north")).to_be_visible()
        assert violations(page) == []
        with page.expect_download() as download:
            hand.press(page.get_by_role("link", name="Download the bundle"))
        assert download.value.suggested_filename == "site-north.bundle.pem"


def test_a_server_on_another_port_is_sent_no_cookie(program: Program, open_page: Callable[..., Page]) -> None:
    page, sent = open_page(program), list[dict[str, str]]()

    class Thief(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(dict(self.headers))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    assert page.context.cookies(page.url)
    secrets = [page.url.split("/")[3], *(str(cookie.get("value")) for cookie in page.context.cookies())]
    with HTTPServer(("127.0.0.1", 0), Thief) as thief:
        threading.Thread(target=thief.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{thief.server_port}/")
        thief.shutdown()
    assert sent
    assert not [secret for secret in secrets if secret in str(sent)]
