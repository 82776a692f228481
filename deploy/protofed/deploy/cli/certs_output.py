"""What `protofed certs` prints, and how it registers a certificate at a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from protofed.common.address import choose_identity
from protofed.common.errors import ConfigError, ProtofedError
from protofed.deploy.cli.options import print_json

if TYPE_CHECKING:
    from protofed.common.pki.identity import Certificate, Party
    from protofed.deploy.certs.lifecycle import Bundle
    from protofed.deploy.certs.request import Request
    from protofed.deploy.certs.table import CertRow
    from protofed.deploy.operator.connection import Operator


@dataclass(frozen=True)
class Output:
    """Lines for people; with `--json` they go to standard error, and one JSON value to standard output."""

    as_json: bool = False

    @cached_property
    def console(self) -> Console:
        """Where the lines go."""
        return Console(stderr=self.as_json, soft_wrap=True, highlight=False)

    def say(self, line: str, style: str | None = None) -> None:
        """A line, as it is: names and paths are no markup."""
        self.console.print(line, markup=False, style=style)

    def result(self, value: Mapping[str, Any]) -> None:
        """What a program reads, if it asked."""
        if self.as_json:
            print_json(value)


@dataclass(frozen=True)
class Registration:
    """What a registration grants.

    Attributes:
        roles: none: the server decides, as operator.proto says.
        renewal: the name may have a certificate that is still valid.
    """

    roles: tuple[str, ...]
    renewal: bool

    @property
    def options(self) -> str:
        """As options of `certs register`, each after a space."""
        return "".join(f" --role {role}" for role in self.roles) + (" --renewal" if self.renewal else "")


@dataclass(frozen=True)
class Connection:
    """How an operator reaches a server."""

    server: str
    identity: str | None

    def open(self) -> Operator:
        """Connect as the operator.

        Raises:
            ConfigError: the identity cannot be used, or there is none.
        """
        from protofed.deploy.operator import connection

        return connection.Operator(self.server, choose_identity(self.identity))


def register_or_tell(
    signed: Bundle, path: Path, registration: Registration, to: Connection | None, output: Output
) -> list[str] | None:
    """Register a certificate that was just signed, and return its roles; without a server, say what comes next.

    Raises:
        ProtofedError: as `register`.
    """
    party = signed.certificate.party
    if to is None or party == "server":
        output.say(_next_step(signed.certificate, path))
        return None
    if party == "operator" and not registration.roles:  # whoever names an operator has said the role
        registration = replace(registration, roles=("operator",))
    return register(signed, path, registration, to, output)


def register(signed: Bundle, path: Path, registration: Registration, to: Connection, output: Output) -> list[str]:
    """Register a signed certificate; the roles that it has now.

    Args:
        path: a file with the certificate, for another try.

    Raises:
        ProtofedError: the server cannot be reached, or refuses.
    """
    try:
        with to.open() as operator:
            info = operator.register(signed.certificate_pem.decode(), registration.roles, renewal=registration.renewal)
    except ProtofedError as error:
        # The same class, so that the exit code stays; the certificate is signed already, and signing again would
        # issue a second one.
        again = f"protofed certs register {path}{registration.options}"
        raise type(error)(f"not registered: {error}; try again with `{again}`") from error
    output.say(f"registered at {to.server} as {' and '.join(info.roles)}: {signed.certificate}")
    output.say(f"key: {as_row(signed).key_code}")
    return list(info.roles)


def install_certificate(
    bundle: Path, identity: Path, output: Output, *, new_ca: bool = False, ca_codes: Sequence[str] = ()
) -> Bundle:
    """Install a bundle in an identity folder, and show which CAs are trusted then.

    Raises:
        ConfigError: as `lifecycle.install`.
    """
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import authority_name, install

    installed = install(identity, files.read(bundle), new_ca=new_ca, ca_codes=ca_codes)
    output.say(f"installed in {identity}: {dates(installed)}")
    for authority in installed.authorities:
        output.say(f"trusted: {authority_name(authority)}, valid until {day(authority.not_valid_after_utc)}")
    return installed


def choose_party(options: Mapping[Party, str | None]) -> tuple[Party, str]:
    """The one party that the options name.

    Raises:
        ConfigError: they name none, or several.
    """
    parties = [(party, name) for party, name in options.items() if name is not None]
    if len(parties) != 1:
        raise ConfigError("expected exactly one of --site ID, --operator NAME and --server-name NAME")
    return parties[0]


def as_row(bundle: Bundle) -> CertRow:
    """The bundle's certificate as a row of a list."""
    from protofed.deploy.certs import table

    return table.of_certificate(bundle.certificate_pem, "the bundle")


def plain(bundle: Bundle) -> dict[str, Any]:
    """The bundle's certificate and its CAs, for JSON."""
    from protofed.deploy.certs import table

    now = datetime.now(UTC)
    authorities = [table.of_ca(authority).plain(now) for authority in bundle.authorities]
    return {**as_row(bundle).plain(now), "authorities": authorities}


def plain_request(request: Request) -> dict[str, Any]:
    """Whom a request is for, and its key, for JSON."""
    return {
        "party": request.party,
        "name": request.name,
        "hosts": list(request.hosts),
        "key_code": request.code,
        "key_fingerprint": request.fingerprint,
    }


def dates(bundle: Bundle) -> str:
    """Whose certificate it is, until when, and the code of its key."""
    row = as_row(bundle)
    return f"{bundle.certificate}, valid until {day(row.not_after)}, key {row.key_code}"


def day(when: datetime) -> str:
    """A date, and the days from now."""
    from protofed.common.clock import stamp

    return f"{stamp(when)} ({(when - datetime.now(UTC)).days} days)"


def _next_step(signed: Certificate, path: Path) -> str:
    if signed.party == "server":
        return "a server's certificate needs no registration"
    command = f"protofed certs register {path} --server host:port"
    if signed.party == "operator":
        folder = "copy it to the folder `operators` of the server's identity folder before the server starts"
        return f"the server accepts it after `{command} --role operator`, or {folder}"
    return f"the server accepts it after `{command}`; --role evaluator if it scores rather than trains"
