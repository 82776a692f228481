"""The hospital's pages in a real browser: by mouse and by keyboard, checked by axe; `make browser`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from tests.support.hand import Hand

from protofed.client.policy.approval import FOLDER, Approvals, ApprovalStatus
from protofed.client.policy.dp_accountant import NoisySums
from protofed.client.policy.pause import FILE as PAUSE
from protofed.client.policy.pause import SitePause
from protofed.client.state.dp_ledger import FILE as LEDGER
from protofed.client.state.dp_ledger import DpLedger
from protofed.client.state.own_scores import FOLDER as SCORES
from protofed.client.state.own_scores import OwnScores
from protofed.client.transport.audit import FILE as AUDIT
from protofed.common.codec import Digest
from protofed.common.protocol.messages import Task, TaskKind
from protofed.common.storage.journal import records
from protofed.deploy import shipped
from protofed.deploy.pages.hospital.examination import SiteSettings
from protofed.deploy.pages.hospital.page import client_page
from protofed.deploy.pages.shell import Program
from protofed.deploy.site.check import as_offered

pytestmark = pytest.mark.browser
GOLDEN = Path("tests/golden/v0_3_0/site-1").absolute()
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}
RUN = "digits-fednh-secure"
SETTINGS = """site = "site-1"
server = "127.0.0.1:1"
identity = "none"
policy = "standard"
state = "{state}"
data = {{ source = "digits", test_fraction = 0.3, partition = {{ kind = "dirichlet", sites = 5, beta = 0.3 }} }}
"""
EXAMINED_MS = 120_000  # with PyTorch's import, on a busy machine


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of a site that took part in a run, and was offered another."""
    made = shutil.copytree(GOLDEN, tmp_path / "site-1")
    Approvals(made / FOLDER).record_offer(as_offered(shipped.recipe(RUN)))
    for number in (1, 2):
        OwnScores(made / SCORES).record("kept", number, {"personal.pm_l": 0.5, "loss": 1.0})
    task = Task(TaskKind.FIT, "kept", 1, "a", Digest("a" * 64), 1, 60.0)
    DpLedger(made / LEDGER).spend(task, "noise", [NoisySums(0.1, 1.5, 10)])
    return made


@pytest.fixture
def program(state: Path, tmp_path: Path) -> Program:
    """The pages, opened with the settings of its daemon, whose server is not there."""
    (file := tmp_path / "site.toml").write_text(SETTINGS.format(state=state), encoding="utf-8")
    return client_page(state, "standard", "site-1", SiteSettings(file, {}))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(
    program: Program, open_page: Callable[..., Page], scheme: str, viewport: dict[str, int]
) -> None:
    page = open_page(program, color_scheme=scheme, viewport=viewport)
    base = page.url.rstrip("/")
    run = f"/runs/{RUN}"
    page.goto(f"{base}/runs/kept/check")
    page.locator("#begin").click()
    expect(page.locator("#ended")).to_be_visible(timeout=EXAMINED_MS)
    pages = ["/", "/left", "/runs", "/runs/kept", "/runs/kept/check", run, f"{run}/check", f"{run}/approve"]
    for path in (*pages, f"{run}/leave", "/health", "/pause", "/nothing"):
        page.goto(base + path)
        assert violations(page) == [], path
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), path
        page.evaluate("document.querySelectorAll('details').forEach(one => (one.open = true))")
        assert violations(page) == [], f"{path}, unfolded"
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), f"{path}, unfolded"


def violations(page: Page) -> list[str]:
    """What axe finds, by rule and element."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['target']}" for one in found for node in one["nodes"]]


def test_a_run_is_approved_and_denied(
    program: Program, state: Path, open_page: Callable[..., Page], hand: Hand
) -> None:
    page, approvals = open_page(program), Approvals(state / FOLDER)
    offer = approvals.offer(RUN)
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Runs"))
    hand.press(page.get_by_role("link", name=RUN, exact=True))
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


def test_the_site_is_paused_and_resumed(
    program: Program, state: Path, open_page: Callable[..., Page], hand: Hand
) -> None:
    page = open_page(program)
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


def test_the_site_is_checked_and_the_page_follows_by_itself(
    program: Program, open_page: Callable[..., Page], hand: Hand
) -> None:
    page = open_page(program)
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Health"))
    expect(page.locator("#findings")).to_have_count(0)
    hand.press(page.locator("#check-quick"))
    expect(page.locator("#going")).to_be_visible()
    expect(page.locator("#ended")).to_be_visible(timeout=EXAMINED_MS)
    expect(page.locator("#going")).to_have_count(0)
    expect(page.get_by_role("row", name="server finding nothing-listens")).to_be_visible()
    expect(page.locator("#announcer")).to_contain_text("has ended")
    hand.press(page.locator("#check-whole"))
    hand.press(page.locator("#stop"))
    expect(page.locator("#unfinished")).to_contain_text("stopped by a person")


def test_the_data_are_checked_for_a_run(program: Program, open_page: Callable[..., Page], hand: Hand) -> None:
    page = open_page(program)
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Runs"))
    hand.press(page.get_by_role("link", name=RUN, exact=True))
    hand.press(page.locator("#check"))
    hand.press(page.locator("#begin"))
    expect(page.locator("#classes")).to_be_visible(timeout=EXAMINED_MS)


def test_the_numbers_behind_a_picture_are_folded_out(
    program: Program, open_page: Callable[..., Page], hand: Hand
) -> None:
    page = open_page(program)
    for path, key in (("left", "parts"), ("runs/kept", "scores"), ("runs/kept", "bytes")):
        page.goto(page.url.partition("/left")[0].partition("/runs")[0].rstrip("/") + f"/{path}")
        if key == "parts":
            hand.press(page.locator("#by-part > summary"))
        numbers = page.locator(f"#numbers-{key}")
        expect(numbers.locator("table")).to_be_hidden()
        hand.press(numbers.locator("summary"))
        expect(numbers.locator("table")).to_be_visible()
    shown = page.locator("img.drawn").first
    assert shown.evaluate("one => one.complete && one.naturalWidth > 0")


def test_a_picture_stays_when_the_page_is_brought_up_to_date(
    program: Program, state: Path, open_page: Callable[..., Page]
) -> None:
    page = open_page(program)
    drawn = page.locator("img.drawn")
    expect(drawn).to_be_visible(timeout=EXAMINED_MS)  # the accountant is imported
    before = drawn.element_handle()
    SitePause(state / PAUSE).begin("ann", None)
    expect(page.locator("#paused")).to_be_visible(timeout=40_000)  # what is around it was replaced
    assert before.evaluate("one => one.isConnected")


def test_a_check_is_followed_without_scripts(program: Program, open_page: Callable[..., Page], hand: Hand) -> None:
    page = open_page(program, java_script_enabled=False)
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Health"))
    hand.press(page.locator("#check-quick"))
    hand.press(page.get_by_role("link", name="Load this page again"))
    expect(page.get_by_role("heading", name="Health")).to_be_visible()
    hand.press(page.locator("#stop"))
    expect(page.locator("#going")).to_have_count(0)


def test_the_rounds_that_left_unfold_without_scripts(program: Program, open_page: Callable[..., Page]) -> None:
    page = open_page(program, java_script_enabled=False)
    page.get_by_role("navigation").get_by_role("link", name="What was sent").click()
    expect(page.locator("#summary")).to_contain_text("this site has sent")
    line = page.locator("ul.lines details").first
    expect(line.locator("table")).to_be_hidden()
    line.locator("summary").first.click()
    expect(line.locator("table")).to_be_visible()


def test_the_site_is_paused_and_taken_out_of_a_run_from_the_overview(
    program: Program, state: Path, open_page: Callable[..., Page], hand: Hand
) -> None:
    page, approvals = open_page(program), Approvals(state / FOLDER)
    recipe = approvals.offer(RUN).recipe
    hand.press(page.locator("#order-pause"))
    expect(page.locator("#paused")).to_be_visible()
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Overview"))
    hand.press(page.locator("#resume"))
    expect(page.locator("#paused")).to_have_count(0)
    assert SitePause(state / PAUSE).current() is None
    hand.press(page.get_by_role("navigation").get_by_role("link", name="Overview"))
    hand.press(page.get_by_role("link", name=f"Deny … {RUN}"))
    assert approvals.status(RUN, recipe) is ApprovalStatus.WAITING
    hand.press(page.locator("#leave"))
    expect(page.locator("#order-approve")).to_be_visible()
    assert approvals.status(RUN, recipe) is ApprovalStatus.DENIED


def test_on_a_phone_no_score_of_the_sites_own_is_cut(program: Program, open_page: Callable[..., Page]) -> None:
    page = open_page(program, viewport=PHONE)
    page.goto(f"{page.url.rstrip('/')}/runs/kept")
    page.evaluate("document.querySelectorAll('details').forEach(one => (one.open = true))")
    tables = page.locator(".scroll:has(table.cards)")
    assert tables.count() >= 3
    for table in tables.all():
        assert table.evaluate("one => one.scrollWidth <= one.clientWidth"), table.inner_text()[:200]
    assert page.locator("td[data-name='personal.pm_l']").count() == 2
