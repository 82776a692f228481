"""The coordinator's pages over a real server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.support.browser_client import Browser
from tests.support.disturbed_run import RUN, close_channels, disturbed_run
from tests.support.long_run import fill
from tests.support.tls_server import TlsServer, tls_server

from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.pki.identity import Party
from protofed.deploy.certs.lifecycle import make_authority, read_bundle
from protofed.deploy.certs.lifecycle import request as make_request
from protofed.deploy.certs.request import read_request
from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.coordinator import runs
from protofed.deploy.pages.coordinator.console import console, ending
from protofed.deploy.pages.coordinator.runs import RunFigures
from protofed.deploy.pages.pictures import Pictures
from protofed.deploy.report.rounds import TASK_STATUSES
from protofed.protos.v1 import operator_pb2 as pb

RecipeOf = Callable[..., Recipe]
Start = Callable[..., Any]
SECRET = {"passphrase": "open sesame "}


@pytest.fixture
def troubled(live_server: Start, recipe_of: RecipeOf) -> Iterator[Browser]:
    """The pages of a server whose run had several things go wrong."""
    server, daemons = disturbed_run(live_server, recipe_of)
    with Operator(server.address, NO_TLS) as operator:
        yield Browser(console(operator, server.address, None))
    close_channels(daemons)


@pytest.fixture
def secured(tmp_path: Path, live_server: Start, recipe_of: RecipeOf) -> Iterator[TlsServer]:
    with tls_server(tmp_path, live_server, recipe_of("fedavg")) as made:
        yield made


def pages_of(secured: TlsServer, operator: Operator, ca: Path | None = None) -> Browser:
    identity = secured.identity("boss", Party.OPERATOR)
    return Browser(console(operator, secured.server.address, identity, ca))


def test_the_overview_has_runs_and_sites_with_problems_first_and_healthy_ones(
    troubled: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = troubled.get("/")
    assert f'href="/runs/{RUN}"' in text
    for waited_for in ("site-1", "site-5"):
        assert f'href="/sites/{waited_for}"' in text
    assert ">invited<" in text
    assert "data-going" in text  # the script asks again soon
    troubled.order("/sites/site-5/exclude", reason="out of memory")
    text = troubled.get("/")
    assert "out of memory" in text
    assert text.index('href="/sites/site-5"') < text.index('href="/sites/site-1"')
    told = [
        pb.SiteInfo(site="east", status="idle", activity_text="waiting for a task", progress=-1.0, progress_age_s=7.0),
        pb.SiteInfo(site="west", status="silent", activity_text="training", progress=-1.0, progress_age_s=900.0),
    ]
    monkeypatch.setattr(Operator, "sites", lambda _: told)
    sites = troubled.get("/").partition('id="sites"')[2]
    assert sites.index("/sites/west") < sites.index("/sites/east"), "trouble first"
    row = sites[sites.index("/sites/east") :].partition("</tr>")[0]
    assert ">idle<" in row
    assert "waiting for a task" in row
    assert "7 s ago" in row


def test_a_run_shows_each_verdict_with_its_reason_and_sign(troubled: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    text = troubled.get(f"/runs/{RUN}")
    for status in ("rejected", "failed", "refused", "degraded"):
        assert f">{status}<" in text
    tasks = troubled.get(f"/runs/{RUN}/rounds/1/1")
    for site in ("site-1", "site-4", "site-5"):
        assert f'href="/sites/{site}"' in tasks
    assert "out-of-memory" in tasks
    for status in ("reported", "invited", "rejected", "failed", "late"):
        letter, _, _ = TASK_STATUSES[status]
        assert f"<b>{letter}</b>" in text or f">{letter}<" in text, status
    page, fragment = troubled.get(f"/runs/{RUN}"), troubled.get(f"/runs/{RUN}?fragment=1")
    assert "<html" not in fragment
    assert 'id="order-pause"' in fragment
    assert len(fragment) < len(page)
    troubled.get("/runs/none", 400)
    troubled.get(f"/runs/{RUN}/rounds/77/1", 400)
    troubled.get("/sites/none", 400)
    troubled.get("/certificates/00/revoke", 400)
    troubled.get("/nothing", 404)
    assert "plan.dp" not in troubled.get(f"/runs/{RUN}")
    monkeypatch.setattr("protofed.deploy.operator.snapshot_builder.kept_by_noise", lambda _: True)
    assert "they have no noise, and stay there (plan.dp)" in troubled.get(f"/runs/{RUN}")


def test_figures_are_pictures_with_the_numbers_behind_them(troubled: Browser) -> None:
    text = drawn_figures(troubled)
    images = re.findall(r'<img class="drawn" src="([^"]+)"[^>]* alt="[^"]+"', text)
    assert images
    assert text.count('<details id="numbers-') == len(images)
    answer = troubled.client.get(images[0])
    assert answer.headers["content-type"].startswith("image/svg+xml")
    assert "script-src" not in answer.headers["content-security-policy"]  # by default-src, none
    assert "<svg" in answer.text
    troubled.get("/pictures/none.svg", 400)


def test_figures_are_made_again_once_the_run_has_gone_on(troubled: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[runs.Moment] = []

    def draw(_: object, moment: runs.Moment, round: int, pictures: Pictures) -> RunFigures:
        made.append(moment)
        return RunFigures(moment, round, [], [])

    monkeypatch.setattr(runs, "drawn", draw)
    for _ in range(2):
        drawn_figures(troubled)
    assert len(made) == 1
    troubled.order(f"/runs/{RUN}/pause")
    troubled.get(f"/runs/{RUN}/figures?fragment=1")  # a page that refreshes itself has nothing drawn
    assert len(made) == 1
    drawn_figures(troubled)
    assert len(made) == 2


def test_a_page_does_not_wait_for_figures_and_shows_the_former_ones_meanwhile(
    troubled: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, go_on, held = drawn_figures(troubled), Event(), []

    def hold(*told: Any) -> RunFigures:
        held.append(told)
        go_on.wait()
        return RunFigures(told[1], told[2], [], ["a budget"])

    monkeypatch.setattr(runs, "drawn", hold)
    monkeypatch.setattr(runs, "PATIENCE_S", 0.0)
    troubled.order(f"/runs/{RUN}/pause")
    try:
        for _ in range(2):
            text = troubled.get(f"/runs/{RUN}/figures")
            assert 'id="drawing"' in text
            assert "data-going" in text  # the script looks again soon
            assert text.count("<img") == former.count("<img")
    finally:
        go_on.set()
    assert "a budget" in drawn_figures(troubled)
    assert len(held) == 1


def test_figures_that_fail_say_why_and_are_tried_again(troubled: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operator, "run_record", lambda *_: (_ for _ in ()).throw(UnavailableError("it hung up")))
    monkeypatch.setattr(runs, "PATIENCE_S", 20.0)
    assert "it hung up" in troubled.get(f"/runs/{RUN}/figures", 503)
    monkeypatch.undo()
    assert "<img" in drawn_figures(troubled)


def drawn_figures(browser: Browser) -> str:
    """The page with its figures, once they are there."""
    text = browser.get(f"/runs/{RUN}/figures")
    while 'id="drawing"' in text:
        text = browser.get(f"/runs/{RUN}/figures?fragment=1")
    return text


def test_a_long_run_is_shown_page_by_page(live_server: Start, recipe_of: RecipeOf) -> None:
    server = live_server(recipe_of("fedavg", rounds=120, federation={"min_sites": 50}))
    fill(server.ledger._engine, RUN, rounds=95, sites=40)
    with Operator(server.address, NO_TLS) as operator:
        browser = Browser(console(operator, server.address, None))
        newest, oldest = browser.get(f"/runs/{RUN}"), browser.get(f"/runs/{RUN}/rounds?page=5")
        for text, first, last in (
            (newest, 95, 76),
            (oldest, 15, 1),
            (browser.get(f"/runs/{RUN}/rounds?page=99"), 15, 1),
        ):
            shown = re.findall(rf'<th scope="row"><a href="/runs/{RUN}/rounds/(\d+)/1"', text)
            assert [int(number) for number in shown] == list(range(first, last - 1, -1))
            assert text.count('<th scope="row">site-') >= 40
        assert 'rel="next"' in newest
        assert 'rel="next"' not in oldest
        assert "global.accuracy" in newest
        assert browser.get(f"/runs/{RUN}/rounds/50/1").count('href="/sites/site-') == 40


def test_a_state_is_computed_again_and_a_run_rolled_back(troubled: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/runs/{RUN}/rounds/1/1/verify"
    assert "the state is the same" in troubled.order(path)
    assert "verify" not in troubled.get(f"/runs/{RUN}/rounds/2/1")  # it is open, and has none
    replies = iter(pb.VerifyRoundResponse(finding=finding, reason="a <bit>") for finding in ("not-kept", "different"))
    monkeypatch.setattr(Operator, "verify", lambda *_: next(replies))
    assert "not kept any more" in troubled.order(path)
    troubled.post(path, {})
    text = troubled.client.get(f"/runs/{RUN}/rounds/1/1").text
    assert 'role="alert">round 1: different: a &lt;bit&gt;' in text
    troubled.post(f"/runs/{RUN}/rollback", {"round": "x"}, 400)
    troubled.post(f"/runs/{RUN}/rollback", {"round": "best"}, 400)  # nothing was scored
    assert "continues after round 0" in troubled.order(f"/runs/{RUN}/rollback", round="0")


def test_more_rounds_back_than_sites_go_need_a_tick(live_server: Start, recipe_of: RecipeOf) -> None:
    server = live_server(recipe_of("fedavg", rounds=120, federation={"min_sites": 50}))
    fill(server.ledger._engine, RUN, rounds=95, sites=1)
    with Operator(server.address, NO_TLS) as operator:
        browser = Browser(console(operator, server.address, None))
        assert "go 5 rounds back, under strict 2" in browser.get(f"/runs/{RUN}/rollback")
        path = f"/runs/{RUN}/rollback"
        assert "is 6 rounds back" in browser.post(path, {"round": "89"}, 400).text
        assert "no longer kept" in browser.post(path, {"round": "89", "force": "yes"}, 400).text  # the server was asked


def test_a_site_is_excluded_admitted_and_forgotten_after_a_tick(
    troubled: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "its scanner <was> replaced" in troubled.order("/sites/site-2/exclude", reason="its scanner <was> replaced")
    assert "&lt;was&gt;" in troubled.client.get("/sites/site-2").text
    assert "excluded" in troubled.get("/sites")
    assert "admitted" in troubled.order("/sites/site-2/admit")
    for order in ("forget", "regroup"):
        assert "tick the box" in troubled.post(f"/sites/site-2/{order}", {}, 400).text
    told = [pb.SiteInfo(site="site-2", status="idle", telemetry={"disk_free_bytes": 59.7e9, "step_seconds": 0.25})]
    monkeypatch.setattr(Operator, "sites", lambda *_: told)
    text = troubled.get("/sites/site-2")
    assert "0.25 s a step · disk 59.7 GB free" in text
    assert "disk_free_bytes" not in text


def test_a_run_is_paused_resumed_and_ended_by_no_link(troubled: Browser) -> None:
    for path in (f"/runs/{RUN}/pause", f"/runs/{RUN}/resume", "/sites/site-2/exclude"):
        assert troubled.client.get(path).status_code == 405
    assert "running" in troubled.get(f"/runs/{RUN}?fragment=1")
    assert "paused" in troubled.order(f"/runs/{RUN}/pause")
    assert 'id="order-resume"' in troubled.get(f"/runs/{RUN}")
    assert "running" in troubled.order(f"/runs/{RUN}/resume")
    assert "<form" in troubled.get(f"/runs/{RUN}/abort")  # asks first; reading the page ends nothing
    assert "running" in troubled.get(f"/runs/{RUN}?fragment=1")
    assert "the classes are wrong" in troubled.order(f"/runs/{RUN}/abort", reason="the classes are wrong")
    assert 'id="order-abort"' not in troubled.get(f"/runs/{RUN}")


def test_a_run_is_checked_and_then_started(troubled: Browser) -> None:
    form = {"recipe": "digits-fednh", "name": "second", "changes": "rounds = 7\nplan.lr = 0.5", "force": "yes"}
    checked = troubled.post("/start", {"do": "check", **form}, 200).text
    assert "<dd>7</dd>" in checked
    assert "second" not in troubled.get("/")  # a check queues nothing
    troubled.order("/start", do="start", **form)
    assert "7" in troubled.get("/runs/second")
    assert troubled.get("/").count('href="/runs/') == 2
    checked = troubled.post("/start", {"do": "check", "recipe": "digits-fedavg-dp"}, 200).text
    assert "epsilon" in checked


def test_a_recipe_that_cannot_be_used_is_explained_and_what_was_typed_stays(troubled: Browser) -> None:
    forms: list[tuple[dict[str, str], str]] = [
        ({}, "expected a recipe"),
        ({"recipe": "digits-fednh", "toml": "x = 1"}, "not both"),
        ({"recipe": "/etc/passwd"}, "unknown recipe"),
        ({"toml": "rounds = "}, "not TOML"),
        ({"toml": 'extends = "other.toml"'}, "extends"),
        ({"recipe": "digits-fednh", "changes": "plan.learning_rate = 1"}, "plan.learning_rate"),
        ({"recipe": "digits-fednh", "changes": "rounds = -1"}, "rounds"),
        ({"recipe": "digits-fednh", "name": "../x"}, "run"),
    ]
    for form, said in forms:
        answer = troubled.post("/start", {"do": "start", **form}, 400).text
        assert said in answer
        assert form.get("changes", "") in answer
    assert troubled.get("/").count('href="/runs/') == 1


def test_orders_are_audited_and_an_absent_server_is_said(secured: TlsServer) -> None:
    site = secured.site()
    with secured.operator() as operator:
        browser = pages_of(secured, operator)
        browser.order(f"/runs/{site.run}/pause")
        browser.order("/sites/site-1/exclude", reason="checked")
    orders = {str(record.facts["call"]): record.facts["peer"] for record in secured.calls("OK")}
    for call in ("PauseRun", "ExcludeSite"):
        assert "boss" in str(orders[call])
    with secured.operator() as operator:
        browser = pages_of(secured, operator)
        assert "/certificates/sign" not in browser.get("/certificates")
        browser.get("/certificates/sign", 404)
        with pytest.raises(ConfigError):
            pages_of(secured, operator, secured.folder / "none")
    with secured.operator() as operator:
        browser = pages_of(secured, operator)
        secured.server.stop()
        assert "no answer" in browser.get("/", 503)


@pytest.fixture
def signing(secured: TlsServer, tmp_path: Path) -> Iterator[tuple[Browser, bytes]]:
    """The pages with an encrypted CA that the server trusts, and a site's request."""
    make_authority(tmp_path / "ca", "study", 100, SECRET["passphrase"].encode())
    identity = secured.identity()
    trusted = identity / "ca.pem"
    trusted.write_bytes(trusted.read_bytes() + (tmp_path / "ca" / "ca.pem").read_bytes())
    request = make_request(tmp_path / "north", Party.SITE, "north")
    with secured.operator() as operator:
        yield pages_of(secured, operator, tmp_path / "ca"), request


def test_a_request_is_signed_after_its_code_and_registered(signing: tuple[Browser, bytes]) -> None:
    browser, pem = signing
    request = read_request(pem, "it")
    form = {"request": pem.decode(), "party": "site", "name": "north", "days": "30", "code": request.code}
    browser.get("/certificates/sign")
    for change, said in (
        ({"code": ""}, "key"),
        ({"code": "0000 0000 0000 0000"}, "differ"),
        ({"name": "south"}, "do not sign"),
        ({"party": "nobody"}, "party"),
        ({"days": "0"}, "days"),
        ({"passphrase": ""}, "passphrase"),
        ({"passphrase": "open sesame"}, "passphrase"),  # a blank of a passphrase counts
        ({"request": "-----BEGIN"}, "request"),
    ):
        answer = browser.post("/certificates/sign", {**form, **SECRET, **change}, 400).text
        assert said in answer
        assert "open sesame" not in answer
    where = browser.led_to("/certificates/sign", {**form, **SECRET})
    page = browser.get(where)
    assert "open sesame" not in page
    bundle = read_bundle(browser.client.get(f"{where}/bundle.pem").content, "it")
    assert bundle.certificate.name == "north"
    assert bundle.certificate.fingerprint[:16] in browser.get("/certificates")
    revoke = f"/certificates/{bundle.certificate.fingerprint}/revoke"
    browser.get(revoke)
    browser.post(revoke, {"reason": " "}, 400)
    assert "has left" in browser.order(revoke, reason="has left")
    assert f'href="{revoke}"' not in browser.get("/certificates")


def test_what_was_signed_and_not_registered_is_kept_and_registered_later(
    signing: tuple[Browser, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, pem = signing
    code = read_request(pem, "it").code
    form = {"request": pem.decode(), "party": "site", "name": "north", "days": "30", "code": code}

    def refuse(*_: object, **__: object) -> pb.CertificateInfo:
        raise ConfigError("not today")

    with monkeypatch.context() as patched:
        patched.setattr(Operator, "register", refuse)
        where = browser.led_to("/certificates/sign", {**form, **SECRET})
    assert "not today" in browser.get(where)
    assert "trainer" in browser.order(f"{where}/register")


def test_certificates_about_to_end_are_those_without_a_successor() -> None:
    day = timedelta(days=1).total_seconds()
    now = time.time()

    def one(name: str, days: float, status: str = "valid") -> pb.CertificateInfo:
        return pb.CertificateInfo(party="site", name=name, status=status, not_after=now + days * day)

    found = ending([one("a", 20), one("b", 5), one("b", 300), one("c", 3), one("d", 3, "revoked"), one("e", 31)], now)
    assert [info.name for info in found] == ["c", "a"]
