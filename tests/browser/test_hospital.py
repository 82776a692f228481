"""The hospital's pages in a real browser: by mouse and by keyboard, checked by axe; `make browser`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from tests.support.hand import Hand

from protofed.client.privacy.approval import FOLDER, Approvals, ApprovalStatus
from protofed.client.privacy.pause import FILE as PAUSE
from protofed.client.privacy.pause import SitePause
from protofed.client.state.own_scores import FOLDER as SCORES
from protofed.client.state.own_scores import OwnScores
from protofed.client.transport.audit import FILE as AUDIT
from protofed.common.storage.journal import records
from protofed.deploy import shipped
from protofed.deploy.pages.hospital.page import client_page
from protofed.deploy.site.offer import as_offered

pytestmark = pytest.mark.browser
GOLDEN = Path("tests/golden/v0_2_0/site-1").absolute()
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
RUN = "digits-fednh-secure"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of a site that took part in a run, and was offered another."""
    made = shutil.copytree(GOLDEN, tmp_path / "site-1")
    Approvals(made / FOLDER).record_offer(as_offered(shipped.recipe(RUN)))
    OwnScores(made / SCORES).record("kept", 1, {"personal.pm_l": 0.5, "loss": 1.0})
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(
    state: Path, open_page: Callable[..., Page], scheme: str, viewport: dict[str, int]
) -> None:
    page = open_page(client_page(state, "standard"), color_scheme=scheme, viewport=viewport)
    base = page.url.rstrip("/")
    run = f"/runs/{RUN}"
    for path in ("/", "/left", "/runs", "/runs/kept", run, f"{run}/approve", f"{run}/leave", "/pause", "/nothing"):
        page.goto(base + path)
        found = Axe().run(page).response["violations"]
        assert [f"{path}: {one['id']}" for one in found] == []
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), path


def test_a_run_is_approved_and_denied(state: Path, open_page: Callable[..., Page], hand: Hand) -> None:
    page, approvals = open_page(client_page(state, "standard")), Approvals(state / FOLDER)
    offer = approvals.offer(RUN)
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Runs"))
    hand.press(page.get_by_role("link", name=RUN))
    hand.press(page.locator("#order-approve"))
    assert approvals.status(RUN, offer.recipe) is ApprovalStatus.WAITING
    hand.press(page.locator("#approve"))
    expect(page.locator("#order-approve")).to_have_count(0)
    assert approvals.status(RUN, offer.recipe) is ApprovalStatus.APPROVED
    hand.press(page.locator("#order-leave"))
    assert approvals.status(RUN, offer.recipe) is ApprovalStatus.APPROVED
    hand.press(page.locator("#leave"))
    expect(page.locator("#order-approve")).to_be_visible()
    assert approvals.status(RUN, offer.recipe) is ApprovalStatus.DENIED
    assert [record.event for record in records(state / AUDIT)][-2:] == ["approved", "denied"]


def test_the_site_is_paused_and_resumed(state: Path, open_page: Callable[..., Page], hand: Hand) -> None:
    page = open_page(client_page(state, "standard"))
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Pause"))
    hand.fill(page.locator("#until"), "90m")
    hand.fill(page.locator("#reason"), "the scanner is moved")
    assert SitePause(state / PAUSE).current() is None
    hand.press(page.locator("#pause"))
    expect(page.locator("#paused")).to_be_visible()
    assert SitePause(state / PAUSE).current() is not None
    assert list(records(state / AUDIT))[-1].facts["reason"] == "the scanner is moved"
    hand.press(page.locator("#resume"))
    expect(page.locator("#pause")).to_be_visible()
    assert SitePause(state / PAUSE).current() is None
