"""What every request passes before a page sees it, and the headers that every answer has."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Final
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES: Final = 256 << 10  # of a form: a recipe or a request for a certificate has a few thousand
MAX_FIELDS: Final = 200
LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
FORM: Final = "application/x-www-form-urlencoded"
# Paths without a session: style sheet and script; where it begins.
STATIC_PATH: Final = "/static/"
ENTER_PATH: Final = "/enter"
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # Nobody else learns the path, a secret of the session. With "no-referrer" browsers send `Origin: null` with our own
    # forms, too, which the guard refuses.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
SVG_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"  # of pictures: no scripts
Refuse = Callable[[Request, int, str], Response]


class Guard:
    """Lets a request through if it is addressed to this machine by name and comes from the session's own pages.

    * `Host`: a loopback name. A page elsewhere whose name its owner points here (DNS rebinding) has another one. Any
      port is right: a person may forward another one by SSH.
    * path and cookie are the session's, but for `ENTER_PATH` and what is below `STATIC_PATH`. Routes match what comes
      after the path's first part, which is the request's `root_path`.
    * of a POST: `Origin` is the host itself, and the body is a form of at most `BODY_BYTES`. A checked form is in the
      request's state, as `form`.
    """

    def __init__(self, app: ASGIApp, access: PageAccess, refuse: Refuse) -> None:
        self._app, self._access, self._refuse = app, access, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return  # no web sockets, and nothing to do at start or end

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    if headers.get(name) != SVG_POLICY:  # the one exception, of a picture
                        headers[name] = value
            await send(message)

        inside = self._access.admits(scope["path"], Headers(scope=scope).get("cookie", ""))
        request = Request({**scope, "root_path": self._access.root if inside else ""}, receive)
        problem = self._problem(request, inside)
        if problem is None and request.method == "POST":
            problem = await self._form_problem(request)
        if problem is None:
            await self._app(request.scope, receive, with_headers)
        else:
            await self._refuse(request, *problem)(request.scope, receive, with_headers)

    def _problem(self, request: Request, inside: bool) -> tuple[int, str] | None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not is_loopback_host(hosts[0]):
            return 400, "This page answers to 127.0.0.1, localhost and [::1] only. Open the address that was printed."
        if request.method not in ("GET", "HEAD", "POST"):
            return 405, "Only GET and POST are answered here."
        path = request.url.path
        if not inside and (request.method == "POST" or not (path == ENTER_PATH or path.startswith(STATIC_PATH))):
            return 401, (
                "This browser has no session here. Open the address that was printed when the page was started; it "
                "works once. If it has been used, end the command with Ctrl-C and start it again: nothing else stops."
            )
        return None

    async def _form_problem(self, request: Request) -> tuple[int, str] | None:
        if request.headers.get("origin") != f"http://{request.headers['host']}":
            return 403, "The form was not sent by this page: its origin is another one. Nothing was done."
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
            return 415, f"Expected a form, as {FORM}. Nothing was done."
        body = await read_body(request)
        if body is None:
            return 413, f"The form has more than {BODY_BYTES >> 10} KiB. Nothing was done."
        try:
            form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"))
        except ValueError:  # UnicodeDecodeError, too
            return 400, "The form cannot be read. Nothing was done."
        request.state.form = form
        return None


def is_loopback_host(host: str) -> bool:
    """Whether a `Host` header names this machine for itself."""
    name, colon, port = host.rpartition(":")
    if not colon or port.endswith("]"):  # of "[::1]" the last colon parts nothing
        name, port = host, "80"
    return name.lower() in LOOPBACK and port.isascii() and port.isdigit()


async def read_body(request: Request) -> bytes | None:
    """The body; None: it is larger than a form may be."""
    if (length := request.headers.get("content-length", "0")).isdigit() and int(length[:12]) > BODY_BYTES:
        return None
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES:
                return None
    except ClientDisconnect:
        return None
    return bytes(body)


SECRET_BYTES = 32
COOKIE = "protofed"


@dataclass
class PageAccess:
    """The secrets of one process; they are never written anywhere but into the printed address and the browser.

    A session has two. One is the first part of every page's path. The other is a cookie of that path. Browsers send
    cookies to every port of a host, and so to other people's servers on this machine, but to no other path. Neither is
    of use alone: not what another port is sent, and not an address that somebody has read. No page from elsewhere knows
    the path, so none can send a form.

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
            notices, self.notices = self.notices, []
        return notices


def same(one: str, other: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())
