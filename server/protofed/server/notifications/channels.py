"""Webhook and e-mail: each sends one message and says whether it arrived, within `TIMEOUT_S` of silence.

Certificates are verified. A proxy comes from the settings only, never from the environment. An error's text has
neither a secret nor a URL, which may be one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import smtplib
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Final, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

import structlog
from pydantic import SecretStr

from protofed.common.address import is_loopback
from protofed.common.config.settings import EMAIL, Notify, Smtp, Webhook
from protofed.common.errors import ConfigError, short
from protofed.common.pki.identity import read_secret
from protofed.common.version import VERSION
from protofed.server.notifications.notice import Notice

log = structlog.get_logger()
TIMEOUT_S: Final = 20.0  # of silence, in each step: a connection, a handshake, an answer
_SAID: Final = 200  # characters of a mail server's answer that are shown
_PREFIX: Final = "whsec_"  # of a secret in base64, as Standard Webhooks writes it


class NotSentError(Exception):
    """A message was not taken; the text says why, and has no secret."""


class Channel(Protocol):
    """A way to tell people."""

    @property
    def name(self) -> str:
        """Of the channel: a webhook's, or `EMAIL`."""

    def send(self, notice: Notice) -> str:
        """Hand a message over; returns what the receiver answered, in a few words.

        Raises:
            NotSentError: it was not taken, or that is not known.
        """


def open_channels(notify: Notify) -> list[Channel]:
    """All channels of the settings, with their secrets read.

    Raises:
        ConfigError: a file with a secret, or with CAs, cannot be used.
    """
    proxy = None if notify.proxy is None else _Proxy(notify.proxy)
    webhooks = [WebhookChannel(webhook, proxy) for webhook in notify.webhooks]
    emails = [] if notify.smtp is None else [EmailChannel(notify.smtp)]
    channels: list[WebhookChannel | EmailChannel] = [*webhooks, *emails]
    for channel in channels:
        if not channel.private:
            log.warning(
                "messages are sent unencrypted: others can read the names of runs and sites", channel=channel.name
            )
    return list(channels)


class WebhookChannel:
    """POSTs JSON; with a secret it is signed as Standard Webhooks (version 1) says, which libraries verify.

    Args:
        clock: Unix time, of the signature.

    Attributes:
        private: nobody on the way can read the messages.

    Raises:
        ConfigError: as `open_channels`.
    """

    def __init__(self, settings: Webhook, proxy: _Proxy | None, clock: Callable[[], float] = time.time) -> None:
        self.name, self._clock = settings.name, clock
        self._url = _url(settings)
        host = urlsplit(self._url).hostname or ""
        self._proxy = None if is_loopback(host) else proxy
        self.private = self._url.startswith("https:") or is_loopback(host)
        self._bearer = _secret(settings.bearer_token, "token")
        self._key = None if (text := _secret(settings.hmac_secret, "secret")) is None else _key(text, settings)
        self._opener = _opener(_tls(settings.ca))

    def send(self, notice: Notice) -> str:
        """As `Channel.send`; anything but a 2xx is a refusal, redirects too: a secret goes to nobody else."""
        body = notice.body()
        request = Request(self._url, data=body, headers=self._headers(notice.id, body), method="POST")  # noqa: S310
        if self._proxy is not None:
            self._proxy.lead(request)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return f"answered {answer.status}"
        except HTTPError as error:
            with error:
                raise NotSentError(f"answered {error.code}{_hint(error.code)}") from None
        except URLError as error:
            raise NotSentError(_why(error.reason)) from None
        except (OSError, HTTPException) as error:
            raise NotSentError(_why(error)) from None

    def _headers(self, number: str, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": f"protofed/{VERSION}", "Webhook-Id": number}
        if self._bearer is not None:
            headers["Authorization"] = f"Bearer {self._bearer}"
        if self._key is not None:
            at = str(int(self._clock()))
            signed = hmac.new(self._key, f"{number}.{at}.".encode() + body, hashlib.sha256).digest()
            headers |= {"Webhook-Timestamp": at, "Webhook-Signature": f"v1,{base64.b64encode(signed).decode()}"}
        return headers


class EmailChannel:
    """Hands messages to one mail server; with `starttls`, one that does not offer it is not spoken to further.

    Attributes:
        private: nobody on the way to that server can read the messages.

    Raises:
        ConfigError: as `open_channels`.
    """

    name = EMAIL

    def __init__(self, settings: Smtp) -> None:
        self._settings, self._password = settings, _secret(settings.password, "password")
        self._context = _tls(settings.ca)
        self.private = settings.security != "none" or is_loopback(settings.host)

    def send(self, notice: Notice) -> str:
        """As `Channel.send`; taken is a message that goes to at least one of its recipients."""
        sender, to = self._settings.sender, self._settings.to
        try:
            smtp = self._connect()
            try:
                if self._settings.security == "starttls":
                    smtp.starttls(context=self._context)
                if self._settings.username is not None and self._password is not None:
                    smtp.login(self._settings.username, self._password)
                refused = smtp.send_message(notice.email(sender, to), sender, to)
            finally:
                with suppress(smtplib.SMTPException, OSError):  # what was taken is taken, however the server parts
                    smtp.quit()
                smtp.close()
        except smtplib.SMTPResponseException as error:
            raise NotSentError(f"the mail server answered {error.smtp_code}: {self._said(error.smtp_error)}") from None
        except smtplib.SMTPRecipientsRefused as error:
            code, answer = next(iter(error.recipients.values()))
            raise NotSentError(f"all recipients were refused; of the first: {code} {self._said(answer)}") from None
        except smtplib.SMTPNotSupportedError as error:  # these texts are smtplib's own
            raise NotSentError(f"the mail server lacks what the settings ask for: {error}") from None
        except (smtplib.SMTPException, OSError) as error:
            raise NotSentError(_why(error)) from None
        return f"taken for {len(to) - len(refused)} of {len(to)} recipients"

    def _connect(self) -> smtplib.SMTP:
        host, port = self._settings.host, self._settings.port
        if self._settings.security == "tls":
            return smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=self._context)
        return smtplib.SMTP(host, port, timeout=TIMEOUT_S)

    def _said(self, answer: bytes | str) -> str:
        """What a mail server said, in a line; without the password, should it repeat that."""
        text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer
        text = "".join(letter if letter.isprintable() else " " for letter in text)
        for secret in self._secrets():
            text = text.replace(secret, "…")
        return short(text, _SAID)

    def _secrets(self) -> list[str]:
        user, password = self._settings.username or "", self._password
        if password is None:
            return []
        encoded = [base64.b64encode(each.encode()).decode() for each in (password, f"\0{user}\0{password}")]
        return [*encoded, password]


class _Proxy:
    """An HTTP proxy, by CONNECT for https://."""

    def __init__(self, url: SecretStr) -> None:
        try:
            parts = urlsplit(url.get_secret_value())
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme != "http" or parts.path not in ("", "/") or parts.query:
            raise ConfigError(
                "notify.proxy: expected http://host:port or http://user:password@host:port; percent-encode both"
            )
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._credentials: str | None = None
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._credentials = base64.b64encode(login.encode()).decode()

    def lead(self, request: Request) -> None:
        """Send a request by way of the proxy; of https:// it sees host and port alone."""
        request.set_proxy(self._address, "http")
        if self._credentials is not None:
            request.add_unredirected_header("Proxy-Authorization", f"Basic {self._credentials}")


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an error of its code, as any other answer but 2xx."""

    def redirect_request(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:
        """Follow nothing; called by urllib."""


def _opener(context: ssl.SSLContext) -> OpenerDirector:
    # ProxyHandler({}): without it urllib takes a proxy from the environment.
    return build_opener(ProxyHandler({}), HTTPSHandler(context=context), _NoRedirect())


def _url(settings: Webhook) -> str:
    if settings.url is not None:
        return settings.url.get_secret_value()
    text = _secret(settings.url_file, "URL") or ""
    try:
        settings.check_url(text)
    except ValueError as error:
        raise ConfigError(f"{settings.url_file}: {error}") from error
    return text


def _secret(path: Path | None, what: str) -> str | None:
    return None if path is None else read_secret(path, what)


def _key(text: str, settings: Webhook) -> bytes:
    if not text.startswith(_PREFIX):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except ValueError as error:
        raise ConfigError(f"{settings.hmac_secret}: expected base64 after {_PREFIX}") from error


def _tls(authorities: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read {authorities}: expected CA certificates in PEM") from error


def _why(error: object) -> str:
    """In a line what a connection failed of."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:.0f} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    return short(f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error), _SAID)


def _hint(code: int) -> str:
    match code:
        case 401 | 403:
            return ": it does not accept the secret"
        case 404 | 410:
            return ": there is nothing at this URL"
        case _ if 300 <= code < 400:
            return ": redirects are not followed; give the URL that it leads to"
        case _:
            return ""
