"""Settings of the daemons: a TOML file, overridden by PROTOFED_SERVER_… and PROTOFED_CLIENT_… in the environment,
overridden by the command line. A path in the file is taken from the file's folder, any other from the working folder.
`~` is a home folder.

`[notify]` of a server's settings says whom the server tells when something happens, of what, and how.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from protofed.common.address import IdentityChoice, is_loopback
from protofed.common.config.data import Data, data_folder
from protofed.common.config.tables import Secret, StrictModel
from protofed.common.config.toml_files import explain, read_table
from protofed.common.deprecated import rename_keys
from protofed.common.errors import ConfigError, short, unknown
from protofed.common.ids import Id
from protofed.common.protocol.consortium import check_name
from protofed.common.protocol.messages import Role

SQLITE = "sqlite:///"


class PathIn(Enum):
    """Marks a text that is, or holds, a path."""

    NAME_OR_FILE = "a name, or a file"
    URL = "a URL: SQLite's has the path of a file"


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, Path) else value


# A word is the name of a file that comes with protofed. A text with a "/", or that ends in .toml, is a path.
NameOrFile = Annotated[str, BeforeValidator(_as_text), Field(min_length=1), PathIn.NAME_OR_FILE]
DatabaseUrl = Annotated[str, PathIn.URL]


def anchored(table: Mapping[str, Any], model: type[BaseModel], folder: Path) -> dict[str, Any]:
    """The table of a model with every path in it below `folder`; absolute paths stay. `~` becomes a home folder.

    Raises:
        ConfigError: `~` is nobody's home folder; or a name is that of a file in `folder`, too.
    """
    result = dict(table)
    for key, value in table.items():
        if (field := model.model_fields.get(key)) is not None:
            # A relative root is below the folder that PROTOFED_DATA names, if it is set: `Data.place` sees to it.
            elsewhere = issubclass(model, Data) and key == "root" and data_folder() is not None
            kinds = [*_walk(field.annotation), *field.metadata]
            result[key] = _anchored_value(value, kinds, Path() if elsewhere else folder, key)
    return result


def _anchored_value(value: Any, kinds: Sequence[Any], folder: Path, key: str) -> Any:
    """As `anchored`, of one value; `kinds` has the types and marks of its annotation."""
    if isinstance(value, list | tuple):
        return [_anchored_value(item, kinds, folder, key) for item in value]
    if isinstance(value, Mapping):
        for model in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)):
            value = anchored(value, model, folder)
        return value
    if not isinstance(value, str | Path) or value in kinds:  # or a word that stands for no path
        return value
    if Path in kinds:
        return _below(folder, value, key)
    if PathIn.NAME_OR_FILE in kinds:
        return _name_or_file(os.fspath(value), folder, key)
    if PathIn.URL in kinds:
        return _url(str(value), folder, key)
    return value


def _walk(annotation: Any) -> Iterator[Any]:
    """All types and marks within an annotation."""
    yield annotation
    for argument in get_args(annotation):
        yield from _walk(argument)


def _below(folder: Path, path: str | Path, key: str) -> Path:
    if any(sign in str(path) for sign in "\t\n\r\f\b"):  # what TOML reads in "C:\temp": a tab
        raise ConfigError(
            f"{key} = {short(repr(str(path)))}: in double quotes a \\ begins a control character; write a path as "
            "\"C:/temp\", or as 'C:\\temp' in single ones"
        )
    try:
        return folder / Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{key} = '{short(str(path))}': no user has this home folder; write the whole path"
        ) from error


def _name_or_file(text: str, folder: Path, key: str) -> str:
    if is_path(text):
        path = os.fspath(_below(folder, text, key))
        return path if is_path(path) else f"./{path}"  # pathlib drops "./", and the rest would be a name
    if folder != Path() and (folder / text).is_file():
        raise ConfigError(
            f"{key} = '{short(text)}': a word is the name of what comes with protofed, and {folder} has a file of "
            f"that name, too. For the file write './{short(text)}'. For what comes with protofed, rename the file"
        )
    return text


def is_path(text: str) -> bool:
    """Whether a text is the path of a file; else it is the name of one that comes with protofed."""
    return "/" in text or text.endswith(".toml")


def _url(url: str, folder: Path, key: str) -> str:
    file = url.removeprefix(SQLITE)
    return url if file == url or file.startswith(("/", ":")) or not file else f"{SQLITE}{_below(folder, file, key)}"


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
    url_file: Path | None = None  # file (0600) with the URL, in place of `url`; for services whose URL is a secret
    hmac_secret: Path | None = None  # file (0600) with the secret that signs the body
    bearer_token: Path | None = None  # file (0600) with the token of the header Authorization
    ca: Path | None = None  # PEM file of the CAs that may issue its certificate; None: the system's

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

    host: Host  # host name, as in its certificate
    port: Annotated[int, Field(ge=1, le=65_535)] = 587  # 465 is usual for tls, 25 for none
    security: Literal["starttls", "tls", "none"] = "starttls"  # none: unencrypted, and without a password
    username: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # None: no login
    password: Path | None = None  # file (0600) with the password of `username`
    ca: Path | None = None  # PEM file of the CAs that may issue its certificate; None: the system's
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

    events: Annotated[frozenset[NotifyEvent], Field(min_length=1)] = frozenset(
        NotifyEvent
    )  # events to send messages about
    webhooks: tuple[Webhook, ...] = ()  # tables `[[notify.webhooks]]`
    smtp: Smtp | None = None  # table `[notify.smtp]`, the channel `email`
    proxy: Secret | None = None  # http://[user:password@]host:port, on the way to webhooks on other machines
    stalled_after_s: Seconds = 900.0  # message about a run that has not advanced for so long, and is not paused
    silent_after_s: Seconds = 3600.0  # message about a site without progress for so long, while a run goes on
    certificate_days: Annotated[tuple[Days, ...], Field(min_length=1, max_length=10)] = (
        30,
        7,
        1,
    )  # days before a certificate ends

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


def _can_be_shown(institution: str) -> str:
    try:
        return check_name(institution) if institution else ""
    except ConfigError as error:
        raise ValueError(str(error)) from None


class Monitoring(StrictModel):
    """The HTTP endpoint of a daemon with /metrics, /healthz and /readyz."""

    listen: str  # host:port to listen on; port 0 takes a free one
    identity: Path | None = None  # folder with cert.pem and key.pem: HTTPS in place of HTTP
    token: Path | None = None  # file with the bearer token that /metrics asks for


class ServerSettings(BaseSettings):
    """Settings of `protofed server start`."""

    model_config = SettingsConfigDict(env_prefix="PROTOFED_SERVER_", env_nested_delimiter="__", extra="forbid")

    plugins: frozenset[str] = frozenset()  # plug-in methods that a run may name: code that you trust
    recipes: list[NameOrFile] = []  # files or shipped names, queued at the start unless the ledger has them
    listen: str = "127.0.0.1:7443"  # host:port to listen on; port 0 takes a free one
    identity: IdentityChoice = None  # folder with its certificate and `operators/`; "none": no TLS, loopback only
    max_connections: Annotated[int, Field(ge=1)] = (
        4096  # the server closes silent ones after 10 s; the process's own limit may be lower
    )
    state: Path = Path("protofed-server")  # folder of ledger, blobs, journal and audit log
    ledger: DatabaseUrl | None = None  # URL of a database, as postgresql+psycopg://…; None: SQLite in the state folder
    blobs: Path | None = None  # existing folder, such as on a shared disk; None: in the state folder
    keep_rounds: Annotated[int, Field(ge=0)] = 2  # rounds kept behind the newest, to verify or roll back to; 0: all
    metrics: Monitoring | None = None  # where /metrics and /readyz are answered; None: nowhere
    notify: Notify | None = None  # who is told when something happens; None: nobody
    tensorboard: Path | None = None  # folder for event files of every run, for TensorBoard
    mlflow: DatabaseUrl | None = None  # tracking URI of MLflow
    memory_limit_mb: Annotated[int, Field(ge=1)] | None = None  # above it no upload starts; None: 90 % of its cgroup


class Cache(StrictModel):
    """`[cache]`: images that are decoded once, onto a disk of the site, where memory should not hold them."""

    folder: Path | None = None  # None: `cache` in the state folder; it needs a local disk
    memory_mb: Annotated[int, Field(ge=0)] = 2048  # up to this size all images of a run are held in memory instead
    disk_gb: Annotated[float, Field(gt=0)] | None = None  # limit of the folder; the longest unused images go first
    processes: Annotated[int, Field(ge=1)] | None = None  # that decode; None: one a core


class ClientSettings(BaseSettings):
    """Settings of `protofed client start`, one site's daemon."""

    model_config = SettingsConfigDict(env_prefix="PROTOFED_CLIENT_", env_nested_delimiter="__", extra="forbid")

    site: Id  # the site's id, as in its certificate
    server: str = "127.0.0.1:7443"  # host:port of the server, the host as in its certificate
    roles: Annotated[frozenset[Role], Field(min_length=1)] = frozenset(
        {Role.TRAINER}
    )  # evaluator: scores the global model
    policy: NameOrFile  # the site's policy: a file, or a shipped one such as `standard`
    state: Path  # folder of the site's memory and receipts
    data: Data  # where the images are
    cache: Cache = Cache()  # where decoded images are kept
    partition_index: Annotated[int, Field(ge=0)] = 0  # index of this site among data.partition's sites, from 0
    institution: Annotated[str, AfterValidator(_can_be_shown)] = (
        ""  # its name in the list of partners; empty: the site's
    )
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    threads: Annotated[int, Field(ge=1)] | None = None  # PyTorch's threads on the CPU
    identity: IdentityChoice = None  # folder with cert.pem, key.pem and ca.pem; "none": no TLS, on this machine only
    metrics: Monitoring | None = None  # where /metrics and /readyz are answered; None: nowhere
    when_revoked: Literal["end", "wait"] = "end"  # exit (76), or wait for a new certificate, as the images do
    proxy: Secret | None = None  # http://[user:password@]host:port, on the way to the server

    @model_validator(mode="after")
    def _takes_part(self) -> ClientSettings:
        if self.data.held_out_sites:
            raise ValueError("data.held_out_sites is for simulations; remove it: a daemon takes part")
        return self


S = TypeVar("S", bound=BaseSettings)


def read_settings(model: type[S], file: Path | None, arguments: Mapping[str, Any]) -> S:
    """Settings from a file, the environment and the command line; a later one of these overrides the earlier.

    Args:
        arguments: options of the command line by setting; None and empty ones are not given.

    Raises:
        ConfigError: no such file, an unknown key or variable, or a value out of range.
    """
    table = {} if file is None else rename_keys(read_table(file), model.__name__, str(file))
    _check_environment(model)
    values = {name: value for name, value in arguments.items() if value not in (None, [], ())}
    if isinstance(values.get("metrics"), str):  # the command line has only an address; its other keys are in the file
        values["metrics"] = {"listen": values["metrics"]}
    try:
        return _layered(model, {} if file is None else _of_file(model, table, file))(**anchored(values, model, Path()))
    except SettingsError as error:  # of a list or a table in the environment, which pydantic-settings reads as JSON
        raise ConfigError(f"environment: {error}; expected JSON there") from error
    except ValidationError as error:
        raise ConfigError(f"{_source(file, values, error)}: {explain(error, model, table)}") from error


def _of_file(model: type[BaseSettings], table: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """What a file says, its paths from its own folder; so are paths by default, as a server's state folder."""
    defaults = {name: field.default for name, field in model.model_fields.items() if isinstance(field.default, Path)}
    try:
        return anchored({**defaults, **table}, model, file.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _source(file: Path | None, options: Mapping[str, Any], error: ValidationError) -> str:
    """Where what is wrong was written: the file, unless an option overrides it there."""
    if file is None:
        return "settings (options, environment, --settings file)"
    wrong = {problem["loc"][0] for problem in error.errors() if problem["loc"]}
    return f"settings ({file} and options)" if wrong & options.keys() else str(file)


def _check_environment(model: type[BaseSettings]) -> None:
    """Refuse an unknown variable with our prefix: pydantic-settings would ignore a misspelt one silently."""
    prefix = model.model_config.get("env_prefix", "")
    for name in os.environ:
        if name.upper().startswith(prefix):
            field = name[len(prefix) :].split("__")[0].lower()
            if field not in model.model_fields:
                raise unknown(
                    "environment variable", name, [f"{prefix}{known}".upper() for known in model.model_fields]
                )


def _layered(model: type[S], table: dict[str, Any]) -> type[S]:
    """The model with the file's table as its lowest source, below the environment."""

    # pydantic-settings takes its sources from a classmethod, so the table of this call needs a class of its own.
    class Layered(model):  # type: ignore[valid-type, misc]
        @classmethod
        def settings_customise_sources(cls, settings_cls: Any, **sources: Any) -> Any:  # noqa: ARG003
            return (
                sources["init_settings"],
                lambda: anchored(sources["env_settings"](), model, Path()),  # `~` alone: nobody expands it there
                lambda: table,
            )

    Layered.__name__ = model.__name__
    return Layered
