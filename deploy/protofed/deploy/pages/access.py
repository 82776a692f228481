"""Who may use the pages of one process: whoever opens the printed address first, and that browser alone."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from threading import Lock

SECRET_BYTES = 32


@dataclass
class Access:
    """The secrets of one process; they are never written anywhere but into the printed address and the browser.

    Attributes:
        cookie: its name. Browsers keep one jar of cookies for all ports of a host, so that each process has its own.
        notices: what the next page says on its top, such as the result of an order: (text, whether it is an error).
    """

    cookie: str
    notices: list[tuple[str, bool]] = field(default_factory=list)
    _token: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    _session: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    _csrf: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def token(self) -> str:
        """Of the printed address; empty once somebody has used it."""
        return self._token

    @property
    def csrf(self) -> str:
        """In every form, so that no other page can send one."""
        return self._csrf

    def redeem(self, token: str) -> str | None:
        """The session's secret in exchange for the token; None: it is another one, or was used before."""
        with self._lock:
            if not self._token or not same(token, self._token):
                return None
            self._token = ""
        return self._session

    def admits(self, session: str) -> bool:
        """Whether a cookie's value is the session's secret, and the token has been redeemed for it."""
        return not self._token and same(session, self._session)

    def sent_by_us(self, csrf: str) -> bool:
        """Whether a form is one of our own pages."""
        return same(csrf, self._csrf)

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
