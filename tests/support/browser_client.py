"""A browser without a screen: a client of pages that has their session and sends their forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape

from httpx2 import Response
from starlette.testclient import TestClient

from protofed.deploy.pages.guard import FORM, PageAccess
from protofed.deploy.pages.shell import Program, application

BASE = "http://127.0.0.1:8080"


class Browser:
    """The browser that has opened the printed address."""

    def __init__(self, program: Program) -> None:
        self.access = PageAccess()
        self.client = TestClient(application(program, self.access), BASE)
        entered = self.client.get("/enter", params={"token": self.access.token}, follow_redirects=False)
        assert entered.headers["location"] == f"{self.access.root}/"
        self.client.base_url = f"{BASE}{self.access.root}"

    def get(self, path: str, status: int = 200) -> str:
        """A page's text, as a person reads it: without what escapes characters; paths are the program's own."""
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return unescape(answer.text).replace(self.access.root, "")

    def post(self, path: str, fields: Mapping[str, str], status: int = 303) -> Response:
        """The answer to a form of our own page; a redirect is not followed."""
        headers = {"Origin": BASE, "Content-Type": FORM}  # browsers say so of an empty form, too
        answer = self.client.post(path, data=fields, headers=headers, follow_redirects=False)
        assert answer.status_code == status, answer.text
        return answer

    def led_to(self, path: str, fields: Mapping[str, str]) -> str:
        """The program's path to which a form leads."""
        return self.post(path, fields).headers["location"].removeprefix(self.access.root)

    def order(self, path: str, **fields: str) -> str:
        """What the page says to which a form leads."""
        text = self.get(self.led_to(path, fields))
        return "\n".join(re.findall(r'<p class="notice(?: bad)?" role=[^>]*>(.*?)</p>', text, re.S))
