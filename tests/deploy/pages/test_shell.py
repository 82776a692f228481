"""The shell of the pages: who gets in, what is refused, and what every answer says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from protofed.common.errors import ConfigError, DeniedError, UnavailableError
from protofed.deploy.pages.guard import BODY_BYTES, HEADERS, PageAccess, is_loopback_host
from protofed.deploy.pages.shell import Page, Program, application, find_shell, listening, read_form

BASE = "http://127.0.0.1:8080"
FORM = "application/x-www-form-urlencoded"
DONE: list[str] = []


def _first(request: Request) -> Response:
    return find_shell(request).page(request, "first.html.j2", {"name": "<b>north</b>"})


def _order(request: Request) -> Response:
    DONE.append(read_form(request)["site"])
    return find_shell(request).done("/", f"done: {DONE[-1]}")


def _fails(request: Request) -> Response:
    kind = {"config": ConfigError, "denied": DeniedError, "away": UnavailableError}.get(request.path_params["kind"])
    raise (kind or ZeroDivisionError)("the <reason>")


@pytest.fixture
def access() -> PageAccess:
    DONE.clear()
    return PageAccess()


@pytest.fixture
def stranger(access: PageAccess, tmp_path: Path) -> TestClient:
    (tmp_path / "first.html.j2").write_text(
        "{% extends layout %}{% block main %}<h1>first</h1>{% block live %}<p>{{ name }}</p>{% endblock %}"
        '<form method="post" action="{{ root }}/order"></form>{% endblock %}'
    )
    routes = [Route("/", _first), Route("/order", _order, methods=["POST"]), Route("/fails/{kind}", _fails)]
    program = Program("tested", "as boss", [("/", "Overview")], routes, tmp_path)
    return TestClient(application(program, access), BASE, raise_server_exceptions=False)


@pytest.fixture
def browser(stranger: TestClient, access: PageAccess) -> TestClient:
    assert stranger.get("/enter", params={"token": access.token}).status_code == 200
    stranger.base_url = f"{BASE}{access.root}"
    return stranger


def order(browser: TestClient, *, origin: str | None = BASE, site: str = "north") -> int:
    headers = {} if origin is None else {"Origin": origin}
    return browser.post("/order", data={"site": site}, headers=headers, follow_redirects=False).status_code


def test_the_token_opens_a_session_once_and_the_cookie_is_for_this_browser_and_its_path_alone(
    stranger: TestClient, access: PageAccess
) -> None:
    token = access.token
    answer = stranger.get("/enter", params={"token": token}, follow_redirects=False)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert f"Path={access.root};" in cookie
    assert token not in cookie + answer.headers["location"]
    first = answer.headers["location"]
    assert stranger.get(first).status_code == 200
    stranger.cookies.clear()
    assert stranger.get("/enter", params={"token": token}).status_code == 401
    assert stranger.get(first).status_code == 401


def test_a_server_on_another_port_is_sent_nothing_that_opens_the_pages(browser: TestClient, access: PageAccess) -> None:
    """It keeps whatever the browser sends it, and sends that here, to every path that it can think of."""
    seen: list[Request] = []

    def keep(request: Request) -> Response:
        seen.append(request)
        return Response()

    thief = Starlette(routes=[Route("/{path:path}", keep)])
    elsewhere = TestClient(thief, "http://127.0.0.1:9999", cookies=browser.cookies)
    for path in ("/", "/enter", "/order", "/static/pages.css", "/protofed"):
        elsewhere.get(path, headers={"Referer": BASE})
    assert len(seen) == 5
    sent = TestClient(browser.app, BASE)
    for request in seen:
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        for path in (request.url.path, "/", "/order", "//order"):
            assert access.root not in str(headers)
            if not path.startswith("/static/"):
                assert sent.get(path, headers=headers).status_code == 401
            assert sent.post(path, data={"site": "x"}, headers={**headers, "Origin": BASE}).status_code == 401
    assert DONE == []


def test_the_cookie_alone_and_the_path_alone_open_nothing(browser: TestClient, access: PageAccess) -> None:
    (cookie,) = (f"{one.name}={one.value}" for one in browser.cookies.jar)
    browser.cookies.clear()
    stolen = {"Cookie": cookie}
    for path, headers in (("/", {}), ("/order", {}), (f"{BASE}/", stolen), (f"{BASE}/{cookie}/", stolen)):
        assert browser.get(path, headers=headers).status_code == 401
    assert browser.get("/", headers=stolen).status_code == 200  # both
    assert browser.get("/", headers={"Cookie": f"protofed=planted; {cookie}; protofed=planted"}).status_code == 200


@pytest.mark.parametrize("token", ["", "x", "\N{SNOWMAN}"])
def test_a_wrong_token_opens_nothing_and_leaves_the_right_one(
    stranger: TestClient, access: PageAccess, token: str
) -> None:
    answer = stranger.get("/enter", params={"token": token})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert stranger.get("/enter", params={"token": access.token}).status_code == 200


def test_an_empty_token_is_none_after_the_right_one_was_used(browser: TestClient, access: PageAccess) -> None:
    assert access.token == ""
    assert browser.get("/enter", params={"token": ""}).status_code == 401


def test_without_the_session_there_is_no_page_and_no_form(stranger: TestClient, access: PageAccess) -> None:
    for path in ("/", "/nothing", "/fails/config", "/guessed/", access.root, f"{access.root}/"):
        answer = stranger.get(path)
        assert answer.status_code == 401
        assert access.root not in answer.text
    assert order(stranger) == 401
    stranger.cookies.set("protofed", "guessed")
    assert stranger.get(f"{access.root}/").status_code == 401
    assert DONE == []


@pytest.mark.parametrize("path", ["/enterprise", "/enter/", "/enter/x", "/entered", "/static/none.css", "/static"])
def test_a_path_beside_an_open_one_shows_a_stranger_nothing(browser: TestClient, access: PageAccess, path: str) -> None:
    access.notify("aborted: for a reason")
    browser.cookies.clear()
    text = browser.get(f"{BASE}{path}").text
    for secret in (access.root, "as boss", "Overview", "for a reason"):
        assert secret not in text
    assert access.taken_notices() == [("aborted: for a reason", False)]


def test_the_session_is_none_before_its_token_was_redeemed(stranger: TestClient, access: PageAccess) -> None:
    stranger.cookies.set("protofed", access._cookie)
    assert stranger.get(f"{access.root}/").status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "10.0.0.1:8080", ""])
def test_a_host_that_is_not_loopback_is_refused_with_the_session_too(browser: TestClient, host: str) -> None:
    assert browser.get("/", headers={"Host": host}).status_code == 400
    assert browser.get("/static/pages.css", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("127.0.0.1:8080", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("[::1]:8080", True),
        ("[::1]", True),
        ("localhost:x", False),
        ("localhost.:80", False),
        ("[::2]:80", False),
        ("user@localhost", False),
    ],
)
def test_hosts(host: str, right: bool) -> None:
    assert is_loopback_host(host) is right


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "http://127.0.0.1:9999", "https://127.0.0.1:8080"]
)
def test_a_form_of_another_origin_is_refused(browser: TestClient, access: PageAccess, origin: str | None) -> None:
    assert order(browser, origin=origin) == 403
    assert DONE == []


def test_a_form_of_the_page_is_done_once_and_none_to_another_path(browser: TestClient, access: PageAccess) -> None:
    (path,) = re.findall(r'action="([^"]+)"', browser.get("/").text)
    assert path == f"{access.root}/order"
    assert order(browser) == 303
    assert DONE == ["north"]
    assert "done: north" in browser.get("/").text
    assert "done: north" not in browser.get("/").text
    browser.cookies.update({one.name: one.value or "" for one in browser.cookies.jar})  # for all paths
    for root in ("", access.root[:-1], f"{access.root}x"):
        browser.base_url = f"{BASE}{root}"
        assert order(browser) == 401
    assert DONE == ["north"]


def test_other_methods_and_what_is_no_form_or_too_large_are_refused(browser: TestClient, access: PageAccess) -> None:
    assert browser.request("DELETE", "/").status_code == 405
    assert browser.get("/order").status_code == 405
    assert browser.post("/enter", headers={"Origin": BASE}).status_code == 415
    assert browser.post(f"{BASE}/enter", headers={"Origin": BASE}).status_code == 401
    headers = {"Origin": BASE, "Content-Type": "application/json"}
    assert browser.post("/order", content=b"{}", headers=headers).status_code == 415
    assert order(browser, site="x" * (BODY_BYTES + 1)) == 413

    def chunks() -> Iterator[bytes]:  # no length is announced
        yield from (b"x" * 65536 for _ in range(BODY_BYTES // 65536 + 2))

    headers = {"Origin": BASE, "Content-Type": FORM}
    assert browser.post("/order", content=chunks(), headers=headers).status_code == 413
    assert browser.post("/order", content=b"site=%ff", headers=headers).status_code == 400
    assert browser.post("/order", content=b"a&" * 1000, headers=headers).status_code == 400
    assert DONE == []


@pytest.mark.parametrize(
    "path", ["/", "/?fragment=1", "/static/pages.css", "/static/pages.js", "/nothing", "/enter", "/fails/other"]
)
def test_every_answer_forbids_foreign_content_framing_and_caches(browser: TestClient, path: str) -> None:
    answer = browser.get(path)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert browser.get(path, headers={"Host": "evil.example"}).headers["cache-control"] == "no-store"


def test_no_page_has_scripts_and_a_fragment_has_the_live_part_alone(browser: TestClient, access: PageAccess) -> None:
    text = browser.get("/").text
    assert "&lt;b&gt;north&lt;/b&gt;" in text
    assert not re.search(r"<script(?! src=\"/static/)|<style|style=|\son\w+=", text)
    assert browser.get("/?fragment=1").text.strip() == "<p>&lt;b&gt;north&lt;/b&gt;</p>"
    access.notify("done")
    browser.get("/?fragment=1")
    assert "done" in browser.get("/").text


@pytest.mark.parametrize(("kind", "status"), [("config", 400), ("denied", 403), ("away", 503), ("other", 500)])
def test_errors_are_pages_with_their_reason(browser: TestClient, kind: str, status: int) -> None:
    answer = browser.get(f"/fails/{kind}")
    assert answer.status_code == status
    assert ("the &lt;reason&gt;" in answer.text) == (status != 500)  # of ours; any other may say anything
    assert "Traceback" not in answer.text


def test_static_files_are_the_shells_own_and_one_that_is_missing_takes_no_notice(
    browser: TestClient, access: PageAccess
) -> None:
    assert browser.get("/static/../shell.py").status_code == 404
    assert browser.get("/static/%2e%2e/shell.py").status_code == 404
    assert browser.get("/static/").status_code == 404
    access.notify("aborted: for a reason")
    assert browser.get(f"{BASE}/static/none.css").status_code == 404
    answer = browser.get("/enterprise")
    assert answer.status_code == 404
    assert "for a reason" in answer.text


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:0", "[::]:0", "example.org:0", "127.0.0.1"])
def test_only_loopback_is_listened_on(address: str) -> None:
    with pytest.raises(ConfigError), listening(address):
        pass


def test_a_port_that_is_taken_is_said() -> None:
    with listening("127.0.0.1:0") as first:
        first.listen()
        with pytest.raises(UnavailableError), listening(f"127.0.0.1:{first.getsockname()[1]}"):
            pass


@pytest.mark.parametrize(
    ("asked", "number"), [("", 1), ("2", 2), ("0", 1), ("-1", 1), ("99", 3), ("²", 1), ("9" * 30, 1)]
)
def test_pages_of_a_table(asked: str, number: int) -> None:
    page = Page.of(asked, total=21, rows=10)
    assert (page.number, page.pages) == (number, 3)
    assert list(page.cut(range(21))) == list(range(21))[10 * (number - 1) : 10 * number]
