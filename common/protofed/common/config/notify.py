"""`[notify]` of a server's settings: whom the server tells when something happens, of what, and how."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from protofed.common.address import is_loopback
from protofed.common.config.tables import Secret, StrictModel
from protofed.common.ids import Id

EMAIL: Final = "email"  # the channel's name of `[notify.smtp]`
_ADDRESS = r"^[!-~]+@[A-Za-z0-9.-]+$"  # printable ASCII without a space: no second header can begin in it
Address = Annotated[str, Field(max_length=254, pattern=_ADDRESS)]
Host = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:-]+$")]
Seconds = Annotated[float, Field(ge=1, le=365 * 86_400)]
Days = Annotated[int, Field(ge=1, le=365)]


class NotifyEvent(StrEnum):
    """What a server tells of; a value of `events`, and the key `event` of a webhook's JSON."""

    RUN_ENDED = "run-ended"
    RUN_STALLED = "run-stalled"
    RUN_GOES_ON = "run-goes-on"  # after RUN_STALLED
    SITE_SILENT = "site-silent"
    SITE_BACK = "site-back"  # after SITE_SILENT
    CERTIFICATE_ENDS = "certificate-ends"


# An event that says that another one is over, and that one: without it, it is never sent.
ENDS: Final = {NotifyEvent.RUN_GOES_ON: NotifyEvent.RUN_STALLED, NotifyEvent.SITE_BACK: NotifyEvent.SITE_SILENT}


class Webhook(StrictModel):
    """An HTTP endpoint that gets each message as a POST with JSON."""

    name: Id  # of the channel, in logs and metrics
    url: Secret | None = None  # https://…; http:// without a bearer token, which others could read on the way
    url_file: Path | None = None  # a file (0600) with the URL, in its place: of services whose URL is the secret
    hmac_secret: Path | None = None  # file (0600) with the secret that signs the body
    bearer_token: Path | None = None  # file (0600) with the token of the header Authorization
    ca: Path | None = None  # PEM file of the CAs that its certificate may be of; None: the system's

    @model_validator(mode="after")
    def _one_address_and_one_secret(self) -> Self:
        if (self.url is None) == (self.url_file is None):
            raise ValueError(f"webhook '{self.name}': expected either url or url_file")
        if self.hmac_secret is not None and self.bearer_token is not None:
            raise ValueError(f"webhook '{self.name}': expected hmac_secret or bearer_token, not both")
        if self.url is not None:
            self.check_url(self.url.get_secret_value())
        return self

    def check_url(self, url: str) -> SplitResult:
        """The parts of this webhook's URL.

        Raises:
            ValueError: it cannot be used; the text does not repeat it, because it may be a secret.
        """
        expected = f"webhook '{self.name}': expected a URL https://host[:port]/path, without a user and a fragment"
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ValueError(expected) from None
        plain = not url.isascii() or not url.isprintable() or " " in url
        if plain or not host or parts.scheme not in ("http", "https") or parts.username is not None or parts.fragment:
            raise ValueError(expected)
        if parts.scheme == "http" and self.bearer_token is not None and not is_loopback(host):
            raise ValueError(f"webhook '{self.name}': a bearer token needs https://, or others read it on the way")
        return parts


class Smtp(StrictModel):
    """A mail server that takes each message as text/plain."""

    host: Host  # by a name of its certificate
    port: Annotated[int, Field(ge=1, le=65_535)] = 587  # 465 is usual for tls, 25 for none
    security: Literal["starttls", "tls", "none"] = "starttls"  # none: unencrypted, and without a password
    username: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # None: no login
    password: Path | None = None  # file (0600) with the password of `username`
    ca: Path | None = None  # PEM file of the CAs that its certificate may be of; None: the system's
    sender: Address  # the address that messages come from
    to: Annotated[tuple[Address, ...], Field(min_length=1, max_length=100)]  # the addresses that get them

    @model_validator(mode="after")
    def _login(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise ValueError("expected username and password together, or neither")
        if self.security == "none" and self.password is not None and not is_loopback(self.host):
            raise ValueError('security = "none" with a password: others read it on the way; expected starttls or tls')
        return self


class Notify(StrictModel):
    """Messages to people who do not watch: by webhooks, by e-mail, or both."""

    events: Annotated[frozenset[NotifyEvent], Field(min_length=1)] = frozenset(NotifyEvent)  # what is told
    webhooks: tuple[Webhook, ...] = ()  # tables `[[notify.webhooks]]`
    smtp: Smtp | None = None  # table `[notify.smtp]`, the channel `email`
    proxy: Secret | None = None  # http://[user:password@]host:port, on the way to webhooks on other machines
    stalled_after_s: Seconds = 900.0  # for which a run that is not paused has not advanced
    silent_after_s: Seconds = 3600.0  # without progress of a site, while a run goes on
    certificate_days: Annotated[tuple[Days, ...], Field(min_length=1, max_length=10)] = (30, 7, 1)  # before it ends

    @model_validator(mode="after")
    def _what_can_be_over(self) -> Self:
        for end, begin in ENDS.items():
            if end in self.events and begin not in self.events:
                raise ValueError(f"events: '{end}' says that '{begin}' is over; expected both, or '{begin}' alone")
        return self

    @model_validator(mode="after")
    def _channels(self) -> Self:
        names = [webhook.name for webhook in self.webhooks]
        if not names and self.smtp is None:
            raise ValueError("expected a table [[notify.webhooks]] or [notify.smtp]: there is nobody to tell")
        if EMAIL in names:
            raise ValueError(f"webhook '{EMAIL}': that is the name of [notify.smtp]; give it another")
        if len(set(names)) != len(names):
            raise ValueError("two webhooks have the same name; their messages are kept apart by it")
        return self

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of all channels."""
        return (*(webhook.name for webhook in self.webhooks), *((EMAIL,) if self.smtp is not None else ()))
