"""The shell of all pages: templates, navigation, notices and errors around what one program shows.

A program gives `Program` with its routes and makes an application with `application`. Its handlers are plain functions
of a request (Starlette runs them on threads, so they may block) and answer with `Shell.page` or `Shell.done`. The first
part is the templates' filters: how pages show times, spans, sizes and numbers.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import jinja2
import uvicorn
from rich.filesize import decimal
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from protofed.common.address import host_and_port, is_loopback
from protofed.common.errors import ConfigError, DeniedError, ProtofedError, StateError, UnavailableError, count
from protofed.deploy.pages import guard
from protofed.deploy.pages.guard import COOKIE, Guard, PageAccess
from protofed.deploy.tables import STYLES, printable, span

T = TypeVar("T")
# Rich's styles as classes of the style sheet.
_TONES: Final[Mapping[str, str]] = {
    "green": "good",
    "cyan": "live",
    "yellow": "warn",
    "red": "bad",
    "bold red": "bad",
    "dim": "soft",
}
NOTHING: Final = "–"
_STAMP: Final = re.compile(r"\b(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00)")  # RFC 3339, UTC


@dataclass(frozen=True)
class Page:
    """One page of a table that is too long for one.

    Attributes:
        number: from 1, the newest.
        total: rows of all pages.
    """

    number: int
    total: int
    rows: int

    @classmethod
    def of(cls, query: str, total: int, rows: int) -> Page:
        """The page that a query asks for; the first for anything that is no page of this table."""
        number = int(query) if query.isascii() and query.isdigit() and len(query) < 10 else 1
        return cls(min(max(1, number), max(1, math.ceil(total / rows))), total, rows)

    @property
    def pages(self) -> int:
        """How many there are; at least one."""
        return max(1, math.ceil(self.total / self.rows))

    @property
    def before(self) -> int:
        """Rows of the pages before this one."""
        return (self.number - 1) * self.rows

    def cut(self, rows: Sequence[T]) -> Sequence[T]:
        """The rows of this page."""
        return rows[self.before : self.before + self.rows]


def day(seconds: float) -> str:
    """A Unix time as a day in UTC; a dash for 0."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds)) if seconds else NOTHING


def moment(seconds: float) -> str:
    """A Unix time to the second, in UTC; a dash for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) if seconds else NOTHING


def stamp(at: str) -> str:
    """A time in RFC 3339 for a cell whose header says UTC; a dash for none, any other text as it is."""
    return _STAMP.sub(r"\1 \2", at) or NOTHING


def utc(text: str) -> str:
    """A text whose times are in RFC 3339, for people."""
    return _STAMP.sub(r"\1 \2 UTC", text)


def ago(seconds: float) -> str:
    """The span since a Unix time; a dash for 0."""
    return f"{span(time.time() - seconds)} ago" if seconds else NOTHING


def number(value: float | None, digits: int = 4) -> str:
    """A score; a dash where there is none."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A share, 0 to 1."""
    return NOTHING if share is None or share < 0 else f"{100 * share:.0f} %"


def size(count_of_bytes: int) -> str:
    """Bytes in a unit for people."""
    return decimal(count_of_bytes)


def tone(word: str) -> str:
    """The class of the style sheet for a status; the word itself says it, too."""
    return _TONES.get(STYLES.get(word, ""), "plain")


FILTERS: Final[Mapping[str, Callable[..., str]]] = {
    "ago": ago,
    "counted": count,
    "day": day,
    "moment": moment,
    "number": number,
    "percent": percent,
    "plain": printable,
    "size": size,
    "span": span,
    "stamp": stamp,
    "tone": tone,
    "utc": utc,
}


HERE: Final = Path(__file__).parent
TEMPLATES, STATIC = HERE / "templates", HERE / "static"
FRAGMENT: Final = "fragment"  # of a query: answer only what changes by itself
_STATUS: Final[Sequence[tuple[type[ProtofedError], int]]] = (
    (UnavailableError, 503),
    (DeniedError, 403),
    (ConfigError, 400),
    (StateError, 507),
)
_TITLES: Final[Mapping[int, str]] = {
    400: "That cannot be done",
    401: "No session",
    403: "Refused",
    404: "There is no such page",
    405: "Refused",
    413: "Too large",
    415: "Refused",
    503: "No answer",
    507: "No room",
}


@dataclass(frozen=True)
class Program:
    """What fills the shell.

    Attributes:
        title: of all its pages.
        whom: on whose behalf it acts, and where, in a line below the title.
        navigation: (path, name) of its pages, in order.
        templates: folder of its templates; they extend `layout`.
        context: what all its templates know, by name; called for each page.
    """

    title: str
    whom: str
    navigation: Sequence[tuple[str, str]]
    routes: Sequence[BaseRoute]
    templates: Path
    context: Callable[[], Mapping[str, object]] = field(default=dict)


class Shell:
    """Makes the answers of one program. Handlers reach it as `find_shell(request)`."""

    def __init__(self, program: Program, access: PageAccess) -> None:
        self.program, self.access = program, access
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader([program.templates, TEMPLATES]),
            autoescape=True,  # of every template, whatever its name
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(FILTERS)
        self._templates.globals["root"] = access.root  # of what only the session sees

    def page(
        self, request: Request, template: str, context: Mapping[str, object], *, status: int = 200, entered: bool = True
    ) -> HTMLResponse:
        """A page, or only its block `live` if the script asks for that.

        Args:
            entered: whether it is for the session: only then it has forms and navigation.
        """
        fragment = FRAGMENT in request.query_params
        text = self._templates.get_template(template).render(
            {
                **(self.program.context() if entered else {}),
                **context,
                "program": self.program,
                "path": request.url.path.removeprefix(self.access.root),
                "entered": entered,
                "notices": [] if fragment or not entered else self.access.taken_notices(),
                "layout": "fragment.html.j2" if fragment else "base.html.j2",
            }
        )
        return HTMLResponse(text, status)

    def done(self, path: str, text: str = "") -> RedirectResponse:
        """After a form: another page, which says `text`. Reloading it sends nothing again."""
        if text:
            self.access.notify(text)
        return RedirectResponse(f"{self.access.root}{path}", 303)

    def error(self, request: Request, status: int, text: str, *, entered: bool = True) -> Response:
        """A page that says what went wrong."""
        title = _TITLES.get(status, "Something went wrong")
        return self.page(request, "error.html.j2", {"heading": title, "text": text}, status=status, entered=entered)


def application(program: Program, access: PageAccess) -> Guard:
    """The program in its shell, behind the guard."""
    shell = Shell(program, access)

    def refused(request: Request, status: int, text: str) -> Response:
        return shell.error(request, status, text, entered=False)

    def entered(request: Request) -> bool:
        return bool(request.scope["root_path"] == access.root)  # the guard has set it; below a mount it is longer

    def failed(request: Request, error: Exception) -> Response:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 502)
        return shell.error(request, status, str(error), entered=entered(request))

    def not_found(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        text = error.detail if isinstance(error, HTTPException) and error.detail else ""
        return shell.error(request, status, text or _TITLES.get(status, ""), entered=entered(request))

    def crashed(request: Request, error: Exception) -> Response:
        name = type(error).__name__
        text = f"{name}. The terminal in which the page was started has the details."
        return shell.error(request, 500, text, entered=entered(request))

    app = Starlette(
        routes=[
            Route(guard.ENTER_PATH, _enter),
            Mount(guard.STATIC_PATH.rstrip("/"), StaticFiles(directory=STATIC)),
            *program.routes,
        ],
        exception_handlers={ProtofedError: failed, HTTPException: not_found, Exception: crashed},
    )
    app.state.shell = shell
    return Guard(app, access, refused)  # around all, so that no answer lacks its headers, not even of a crash


def find_shell(request: Request) -> Shell:
    """The shell that a request came through."""
    shell = request.app.state.shell
    assert isinstance(shell, Shell)  # noqa: S101  (narrows what Starlette keeps as Any)
    return shell


def read_form(request: Request) -> Mapping[str, str]:
    """The form that a POST sent, as the guard has checked it; fields that were left empty are empty."""
    form: dict[str, str] = request.state.form
    return {name: value.strip() for name, value in form.items()}


def read_secret_field(request: Request, name: str) -> str:
    """A field of the form as it was typed, blanks and all; empty: there is none."""
    form: dict[str, str] = request.state.form
    return form.get(name, "")


def _enter(request: Request) -> Response:
    """Exchange the token of the printed address for the session: its cookie, and the path that leads to its pages."""
    shell = find_shell(request)
    session = shell.access.redeem(request.query_params.get("token", ""))
    if session is None:
        return shell.error(
            request,
            401,
            "This address does not work, or no longer: it works once. The browser that used it has the page's address "
            "in its history; else end the command with Ctrl-C and start it again: nothing else stops.",
            entered=False,
        )
    answer = shell.done("/")
    # Lax: where a link in a mail led here, browsers would not send a Strict cookie with what the redirect asks for.
    answer.set_cookie(COOKIE, session, path=shell.access.root, httponly=True, samesite="lax")
    return answer


HEADER_BYTES: Final = 32 << 10
AT_ONCE: Final = 32  # requests; more are refused


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """A socket that only this machine reaches.

    Raises:
        ConfigError: the address is not one of loopback: whoever can read the pages' traffic could act in them.
        UnavailableError: the port is taken.
    """
    host, port = host_and_port(address)
    if not is_loopback(host):
        raise ConfigError(
            f"--listen {address}: the pages are for this machine only; expected a loopback address, such as "
            "127.0.0.1:0; from another machine, forward the port: ssh -L 8080:127.0.0.1:PORT"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.closing(opened):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError as error:
            raise UnavailableError(f"--listen {address}: {error.strerror}; give another port, or 0 for any") from error
        # A name may stand for any address (hosts files): what was bound is what counts.
        if not is_loopback(opened.getsockname()[0]):
            raise ConfigError(f"--listen {address}: the name leads to {opened.getsockname()[0]}, which is not loopback")
        yield opened


def serve(program: Program, address: str, announce: Callable[[str], None]) -> None:
    """Serve a program's pages until the process is told to end.

    Args:
        address: host:port of loopback; port 0 picks a free one.
        announce: called with the URL to open, which works once.

    Raises:
        ConfigError, UnavailableError: as `listening`.
    """
    with listening(address) as opened:
        host, port = opened.getsockname()[:2]
        display_host = f"[{host}]" if ":" in host else host
        access = PageAccess()
        app = application(program, access)
        config = uvicorn.Config(
            app,
            log_config=None,  # ours stays
            access_log=False,  # it would have the token
            server_header=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            http="h11",
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            limit_concurrency=AT_ONCE,
            timeout_graceful_shutdown=2,
        )
        opened.listen(AT_ONCE)
        announce(f"http://{display_host}:{port}/enter?token={access.token}")
        uvicorn.Server(config).run(sockets=[opened])
