"""Settings of the daemons: a TOML file, overridden by PROTOFED_SERVER_… and PROTOFED_CLIENT_… in the environment,
overridden by the command line. A path in the file is taken from the file's folder, any other from the working folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from protofed.common.config.notify import Notify
from protofed.common.config.paths import DatabaseUrl, NameOrFile, anchored
from protofed.common.config.problems import explain
from protofed.common.config.recipe import Data, StrictModel
from protofed.common.config.tables import Secret
from protofed.common.config.toml_files import read_table
from protofed.common.errors import ConfigError, unknown
from protofed.common.ids import Id
from protofed.common.protocol.consortium import check_name
from protofed.common.protocol.messages import Role


def _can_be_shown(institution: str) -> str:
    try:
        return check_name(institution) if institution else ""
    except ConfigError as error:
        raise ValueError(str(error)) from None


class Monitoring(StrictModel):
    """The HTTP endpoint of a daemon with /metrics, /healthz and /readyz."""

    listen: str  # host:port; port 0 takes a free one
    identity: Path | None = None  # folder with cert.pem and key.pem: HTTPS in place of HTTP
    token: Path | None = None  # file with the bearer token that /metrics asks for


class ServerSettings(BaseSettings):
    """Settings of `protofed server start`."""

    model_config = SettingsConfigDict(env_prefix="PROTOFED_SERVER_", env_nested_delimiter="__", extra="forbid")

    plugins: frozenset[str] = frozenset()  # methods beside protofed's that a run may name: code that you trust
    # files, or shipped names; queued at the start, if the ledger does not know them; more by `protofed runs start`
    recipes: list[NameOrFile] = []
    listen: str = "127.0.0.1:7443"  # host:port; port 0 takes a free one
    identity: Path | None = None  # folder with the server's certificate, and `operators/` with the first operators'
    plaintext: bool = False  # in place of an identity, on a loopback address only
    max_connections: Annotated[int, Field(ge=1)] = 4096  # silent ones leave after 10 s; the process's limit may be less
    state: Path = Path("protofed-server")  # ledger, blobs, journal and audit
    ledger: DatabaseUrl | None = None  # URL of a database, as postgresql+psycopg://…; None: SQLite in the state folder
    blobs: Path | None = None  # folder that is there, as on a shared disk; None: in the state folder
    keep_rounds: Annotated[int, Field(ge=0)] = 2  # behind the newest: can be verified, rolled back to; 0: all
    metrics: Monitoring | None = None  # where /metrics and /readyz are answered; None: nowhere
    notify: Notify | None = None  # who is told when something happens; None: nobody
    tensorboard: Path | None = None  # folder for event files of every run, for TensorBoard
    mlflow: DatabaseUrl | None = None  # tracking URI
    memory_limit_mb: Annotated[int, Field(ge=1)] | None = None  # no upload begins above it; None: 90 % of its cgroup


class ClientSettings(BaseSettings):
    """Settings of `protofed client start`, one site's daemon."""

    model_config = SettingsConfigDict(env_prefix="PROTOFED_CLIENT_", env_nested_delimiter="__", extra="forbid")

    site: Id  # as in its certificate
    server: str = "127.0.0.1:7443"  # host:port, the host by a name of its certificate
    roles: Annotated[frozenset[Role], Field(min_length=1)] = frozenset(
        {Role.TRAINER}
    )  # evaluator: scores the global model
    policy: NameOrFile  # what may leave: a file, or `standard`, …
    state: Path  # memory, receipts
    data: Data  # where the images are
    partition_index: Annotated[int, Field(ge=0)] = 0  # which of data.partition's sites this is, counted from 0
    institution: Annotated[str, AfterValidator(_can_be_shown)] = (
        ""  # its name in the list of partners; empty: the site's
    )
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    threads: Annotated[int, Field(ge=1)] | None = None  # of PyTorch on the CPU
    identity: Path | None = None  # folder with cert.pem, key.pem and ca.pem
    plaintext: bool = False  # in place of an identity; only on this machine
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
    table = {} if file is None else read_table(file)
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


def _source(file: Path | None, given: Mapping[str, Any], error: ValidationError) -> str:
    """Where what is wrong was written: the file, unless an option overrides it there."""
    if file is None:
        return "settings (options, environment, --settings file)"
    wrong = {problem["loc"][0] for problem in error.errors() if problem["loc"]}
    return f"settings ({file} and options)" if wrong & given.keys() else str(file)


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
