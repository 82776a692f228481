"""Who gets a server's messages: a webhook's HTTP server and a mail server, real ones on this machine."""

from __future__ import annotations

import json
import queue
import ssl
import threading
from dataclasses import dataclass
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from tests.support.free_ports import free_port

from protofed.common.config.settings import NotifyEvent, ServerSettings
from protofed.common.config.toml_files import read_table
from protofed.server.notifications.wording import Occurrence

ARRIVES_S = 60.0  # a bound for a broken test, never waited for in one that passes
RUN_FAILED = Occurrence("run-ended:digits:1.0", NotifyEvent.RUN_ENDED, "digits", facts={"outcome": "failed"})


@dataclass(frozen=True)
class Post:
    """A request that a webhook got."""

    path: str
    headers: dict[str, str]  # by names in small letters
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        table: dict[str, Any] = json.loads(self.body)
        return table


class WebhookReceiver:
    """An HTTP or HTTPS server on a free port, or on one that is given.

    Attributes:
        status: of its answers; `location`: where a 3xx leads to.
        posts: requests in order.
        hanging: while this is set, a request gets no answer; `arrived` says that there is one.
    """

    def __init__(self, identity: Path | None = None, port: int = 0) -> None:
        self.status, self.location = 204, ""
        self.posts: queue.Queue[Post] = queue.Queue()
        self.hanging, self.arrived = threading.Event(), threading.Event()
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self._scheme = "http" if identity is None else "https"
        if identity is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}/hooks/s3cret-hook"

    def post(self) -> Post:
        return self.posts.get(timeout=ARRIVES_S)

    def stop(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _handler(receiver) -> type[BaseHTTPRequestHandler]:  # noqa: N805  (`self` is the handler's)
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.arrived.set()
                if receiver.hanging.is_set():
                    receiver._released.wait()
                    return
                self.send_response(receiver.status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.send_header("Content-Length", "0")
                self.end_headers()
                receiver.posts.put(Post(self.path, headers, body))

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        return Handler


@dataclass(frozen=True)
class Mail:
    """A message that the mail server took."""

    sender: str
    to: list[str]
    tls: bool
    user: str | None
    message: EmailMessage


class MailReceiver:
    """A mail server on a free port, or on one that is given.

    Args:
        identity: folder with the certificate for STARTTLS, or for TLS from the start with `tls`; None: it has neither.
        user, password: that it asks for; empty: it lets everybody send.

    Attributes:
        refusal: its answer to every message, in place of taking it.
        refused: recipients that it does not take.
        farewell: its answer to QUIT.
    """

    def __init__(
        self, identity: Path | None = None, *, tls: bool = False, user: str = "", password: str = "", port: int = 0
    ) -> None:
        self.mails: queue.Queue[Mail] = queue.Queue()
        self.refusal, self.refused, self.farewell = "", frozenset[str](), "221 bye"
        self._login = LoginPassword(user.encode(), password.encode())
        context = None
        if identity is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
        options: dict[str, Any] = {"ssl_context": context} if tls else {"tls_context": context}
        if user:
            options |= {"authenticator": self._authenticate, "auth_required": True, "auth_require_tls": not tls}
        self._controller = Controller(self, hostname="127.0.0.1", port=port or free_port(), **options)
        self._controller.start()

    @property
    def port(self) -> int:
        return int(self._controller.port)

    def mail(self) -> Mail:
        return self.mails.get(timeout=ARRIVES_S)

    def stop(self) -> None:
        self._controller.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, rcpt_options: list[str]
    ) -> str:
        """Called by aiosmtpd."""
        if address in self.refused:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        """Called by aiosmtpd."""
        if self.refusal:
            return self.refusal
        content = envelope.content
        message = message_from_bytes(content if isinstance(content, bytes) else b"", policy=policy.default)
        assert isinstance(message, EmailMessage)
        user = session.auth_data.login.decode() if isinstance(session.auth_data, LoginPassword) else None
        tls = server.transport is not None and server.transport.get_extra_info("ssl_object") is not None
        self.mails.put(Mail(envelope.mail_from or "", list(envelope.rcpt_tos), tls, user, message))
        return "250 taken"

    async def handle_QUIT(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        """Called by aiosmtpd."""
        return self.farewell

    def _authenticate(self, server: SMTP, session: Session, envelope: Envelope, kind: str, data: Any) -> AuthResult:
        good = isinstance(data, LoginPassword) and data == self._login
        return AuthResult(success=good, auth_data=data if good else None, handled=good)


def settings_of(folder: Path, toml: str) -> ServerSettings:
    """A server's settings from the text of a file."""
    path = folder / "notify.toml"
    path.write_text(toml, encoding="utf-8")
    return ServerSettings(**read_table(path))


def secret_file(folder: Path, text: str, name: str = "secret") -> Path:
    """A file that only this account reads."""
    path = folder / name
    path.touch(0o600)
    path.write_text(f"{text}\n", encoding="ascii")
    return path
