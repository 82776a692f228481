"""`protofed console` as a process, and what it refuses before it serves."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.command_line import called

from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.deploy.cli.pages import console
from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.guard import HEADERS


def test_the_printed_address_opens_the_pages_and_ctrl_c_ends_them_and_nothing_else(
    live_server: Callable[..., Any], recipe_of: Callable[..., Recipe]
) -> None:
    server = live_server(recipe_of("fedavg"))
    words = [sys.executable, "-m", "protofed.deploy.cli", "console", "--server", server.address, "--identity=none"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().removeprefix("open ").strip())
            assert address.hostname == "127.0.0.1"
            with closing(HTTPConnection(address.netloc, timeout=30)) as browser:
                check_entrance(browser, f"{address.path}?{address.query}")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert address.query not in errors  # the token is in no log
    with Operator(server.address, NO_TLS) as operator:
        assert [info.run for info in operator.runs()] == ["small-fedavg"]


def check_entrance(browser: HTTPConnection, address: str) -> None:
    """It works once, and what it opens shows the run."""
    browser.request("GET", address)
    entered = browser.getresponse()
    entered.read()
    assert entered.status == 303
    assert "server" not in entered.headers
    for name, value in HEADERS.items():
        assert entered.headers[name] == value
    cookie = entered.headers["Set-Cookie"].partition(";")[0]
    browser.request("GET", entered.headers["Location"], headers={"Cookie": cookie})
    page = browser.getresponse()
    assert page.status == 200
    assert b"small-fedavg" in page.read()
    browser.request("GET", address)  # once more, by somebody who has read the terminal
    assert browser.getresponse().status == 401


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.168.0.1:8080"])
def test_another_address_than_loopback_is_refused(capfd: pytest.CaptureFixture[str], listen: str) -> None:
    code, out, error = called(capfd, "console", "--identity=none", "--listen", listen)
    assert code == 78
    assert out == ""
    assert "loopback" in error


def test_without_the_extra_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("protofed.deploy.pages", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"uvicorn.*\[pages\]"):
        console(identity="none")
