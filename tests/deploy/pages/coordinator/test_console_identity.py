"""A console that is open while its operator's certificate is renewed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.support.browser_client import Browser
from tests.support.tls_server import TlsServer, tls_server

from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party, fingerprint
from protofed.common.storage.journal import records
from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.coordinator.console import console

RUN, SITES = "small-fedavg", "/sites"
KEPT = "goes on with the certificate of before"


@pytest.fixture
def tls(tmp_path: Path, live_server: Callable[..., Any], recipe_of: Callable[..., Recipe]) -> Iterator[TlsServer]:
    with tls_server(tmp_path, live_server, recipe_of("fedavg")) as made:
        made.register(made.identity("site-1", Party.SITE))
        yield made


@pytest.fixture
def folder(tls: TlsServer) -> Path:
    return tls.identity("boss", Party.OPERATOR)


@pytest.fixture
def operator(tls: TlsServer, folder: Path) -> Iterator[Operator]:
    with Operator(tls.server.address, folder) as made:
        yield made


@pytest.fixture
def browser(tls: TlsServer, folder: Path, operator: Operator) -> Browser:
    return Browser(console(operator, tls.server.address, folder))


def renewed(tls: TlsServer, name: str = "boss") -> Path:
    """A folder with a certificate that the server knows."""
    made = tls.authority.issue(tls.folder / f"renewed-{name}", Party.OPERATOR, name)
    tls.register(made, "operator", renewal=True)
    return made


def put(made: Path, folder: Path) -> None:
    for name in ("key.pem", "cert.pem"):
        shutil.copy(made / name, folder / name)


def fingerprint_of(folder: Path) -> str:
    return fingerprint((folder / "cert.pem").read_bytes())


def callers(tls: TlsServer, call: str) -> list[tuple[str, str]]:
    """Name and fingerprint of whoever made these calls, as the server's audit has them."""
    found = [record.facts for record in records(tls.server.audit_file) if record.event == "call"]
    peers: list[Any] = [facts["peer"] for facts in found if str(facts["call"]).endswith(call)]
    return [(peer["name"], peer["fingerprint"]) for peer in peers]


def test_the_next_page_is_by_the_renewed_certificate_and_the_old_one_may_be_revoked(
    tls: TlsServer, folder: Path, browser: Browser
) -> None:
    old, new = fingerprint_of(folder), renewed(tls)
    browser.order(f"/runs/{RUN}/pause")
    put(new, folder)
    with Operator(tls.server.address, new) as other:
        other.revoke(old, "renewed")
    text = browser.get("/")
    assert f"operator boss at {tls.server.address}" in text
    assert KEPT not in text
    browser.order(f"/runs/{RUN}/resume")
    assert callers(tls, "PauseRun") == [("boss", old)]
    assert callers(tls, "ResumeRun") == [("boss", fingerprint_of(new))]


def test_files_that_cannot_be_used_are_told_of_and_nothing_stops(
    tls: TlsServer, folder: Path, browser: Browser
) -> None:
    before = (folder / "cert.pem").read_bytes()
    with structlog.testing.capture_logs() as lines:
        (folder / "cert.pem").write_text("half a certi")
        for _ in range(2):
            text = browser.get("/")
            assert KEPT in text
            assert f"{folder / 'cert.pem'}" in text
            assert f"operator boss at {tls.server.address}" in text
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["a renewed identity cannot be used"]
    assert KEPT not in browser.get("/?fragment=1")  # which has no top
    assert KEPT not in browser.get(SITES)  # nor was it kept for another page
    assert "PRIVATE" not in text
    (folder / "cert.pem").write_bytes(before)
    assert KEPT not in browser.get("/")


def test_where_the_old_certificate_is_refused_the_page_says_why_it_is_used(
    tls: TlsServer, folder: Path, browser: Browser
) -> None:
    old, new = fingerprint_of(folder), renewed(tls)
    browser.get("/")
    (folder / "cert.pem").unlink()
    with Operator(tls.server.address, new) as other:
        other.revoke(old, "renewed")
    text = browser.get("/", 403)
    assert "was revoked" in text
    assert "certificate missing" in text
    put(new, folder)
    assert KEPT not in browser.get("/")


def test_the_name_below_the_title_stays_the_one_of_the_orders(tls: TlsServer, folder: Path, browser: Browser) -> None:
    old = fingerprint_of(folder)
    put(renewed(tls, "eve"), folder)
    text = browser.get("/")
    assert f"operator boss at {tls.server.address}" in text
    assert "is the certificate of operator 'eve' now" in text
    browser.order(f"/runs/{RUN}/pause")
    assert callers(tls, "PauseRun") == [("boss", old)]


def test_threads_share_it_while_it_is_renewed(tls: TlsServer, folder: Path, operator: Operator) -> None:
    new, found = renewed(tls), list[str]()
    rounds = threading.Barrier(5, timeout=60)  # four that call, and the test

    def call() -> None:
        for _ in range(3):
            found.extend(info.run for info in operator.runs())
            rounds.wait()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    rounds.wait()
    put(new, folder)  # while all of them call again
    rounds.wait()
    rounds.wait()
    for thread in threads:
        thread.join(60)
    assert found == [RUN] * 12
    assert callers(tls, "ListRuns")[-1] == ("boss", fingerprint_of(new))
