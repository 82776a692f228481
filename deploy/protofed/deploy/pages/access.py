"""Who may use the pages of one process: whoever opens the printed address first, and that browser alone."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from threading import Lock

SECRET_BYTES = 32
COOKIE = "protofed"


@dataclass
class Access:
    """The secrets of one process; they are never written anywhere but into the printed address and the browser.

    A session has two. One is the first part of every page's path. The other is a cookie of that path: browsers send
    cookies to every port of a host, and so to servers of other people on this machine, but to no other path. Neither is
    of use alone: not what another port is sent, and not an address that somebody has read. No page from elsewhere knows
    the path, so that none can send a form.

    Attributes:
        notices: what the next page says on its top, such as the result of an order: (text, whether it is an error).
    """

    notices: list[tuple[str, bool]] = field(default_factory=list)
    _token: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    _first: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    _cookie: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def token(self) -> str:
        """Of the printed address; empty once somebody has used it."""
        return self._token

    @property
    def root(self) -> str:
        """What the path of every page of the session begins with, without a slash at its end."""
        return f"/{self._first}"

    def redeem(self, token: str) -> str | None:
        """The session's cookie in exchange for the token; None: the token is another one, or was used before."""
        with self._lock:
            if not self._token or not same(token, self._token):
                return None
            self._token = ""
        return self._cookie

    def admits(self, path: str, cookies: str) -> bool:
        """Whether a path and a `Cookie` header are of the session, and the token has been redeemed for it.

        Servers of other ports can add cookies of the same name: the right one is looked for among all.
        """
        first, slash, _ = path.removeprefix("/").partition("/")
        pairs = (cookie.strip().partition("=") for cookie in cookies.split(";"))
        sent = sum(name == COOKIE and same(value, self._cookie) for name, _, value in pairs) > 0  # compares all of them
        return bool(slash) and not self._token and same(first, self._first) and sent

    def notify(self, text: str, *, error: bool = False) -> None:
        """Have the next page say something on its top."""
        with self._lock:
            self.notices.append((text, error))

    def taken_notices(self) -> list[tuple[str, bool]]:
        """What the page that is being made says; no later page says it again."""
        with self._lock:
            taken, self.notices = self.notices, []
        return taken


def same(one: str, other: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())
