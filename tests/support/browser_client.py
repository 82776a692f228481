"""A browser without a screen: a client of pages that has their session and sends their forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape

from httpx2 import Response
from starlette.testclient import TestClient

from protofed.deploy.pages.access import Access
from protofed.deploy.pages.shell import Program, application

BASE = "http://127.0.0.1:8080"


class Browser:
    """The browser that has opened the printed address."""

    def __init__(self, program: Program) -> None:
        self.access = Access("protofed-8080")
        self.client = TestClient(application(program, self.access), BASE)
        assert self.client.get("/enter", params={"token": self.access.token}).status_code == 200

    def get(self, path: str, status: int = 200) -> str:
        """A page's text, as a person reads it: without what escapes characters."""
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return unescape(answer.text)

    def post(self, path: str, fields: Mapping[str, str], status: int = 303) -> Response:
        """The answer to a form of our own page; a redirect is not followed."""
        form = {"csrf": self.access.csrf, **fields}
        answer = self.client.post(path, data=form, headers={"Origin": BASE}, follow_redirects=False)
        assert answer.status_code == status, answer.text
        return answer

    def order(self, path: str, **fields: str) -> str:
        """What the page says to which a form leads."""
        answer = self.client.get(self.post(path, fields).headers["location"])
        assert answer.status_code == 200, answer.text
        return unescape("\n".join(re.findall(r'<p class="notice(?: bad)?" role=[^>]*>(.*?)</p>', answer.text, re.S)))
