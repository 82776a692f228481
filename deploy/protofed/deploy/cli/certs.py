"""`protofed certs …`: issue, install and revoke certificates; the CA can stay offline."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError, ProtofedError

if TYPE_CHECKING:
    from protofed.common.pki.identity import Certificate, Party
    from protofed.deploy.certs.lifecycle import Bundle
    from protofed.deploy.operator.connection import Operator

certs = typer.Typer(
    no_args_is_help=True,
    help="Certificates of sites, servers and operators. An offline CA signs; private keys stay where they are made.",
)
console = Console(soft_wrap=True, highlight=False)
Ca = Annotated[Path, typer.Option(help="The CA's folder.")]
Identity = Annotated[Path, typer.Option(help="The identity folder: cert.pem, key.pem, ca.pem.")]
Passphrase = Annotated[Path | None, typer.Option(help="File whose first line is the passphrase of the CA's key.")]
Out = Annotated[Path | None, typer.Option(help="File to write; default: beside its input.")]
Server = Annotated[str | None, typer.Option(envvar="PROTOFED_OPERATOR_SERVER", help="host:port of the server.")]
Online = Annotated[
    str | None, typer.Option("--server", help="host:port of a server; without it, no connection is made.")
]
OperatorIdentity = Annotated[
    Path | None, typer.Option("--identity", envvar="PROTOFED_OPERATOR_IDENTITY", help="The operator's identity folder.")
]
Renewal = Annotated[bool, typer.Option("--renewal", help="Allow that the name has a certificate that is still valid.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role", help="trainer or evaluator; of an operator: operator. May be repeated; a site's default: trainer."
    ),
]
Plaintext = Annotated[bool, typer.Option("--plaintext", help="No TLS to --server; loopback only.")]


@certs.command("init")
def init(
    ca: Ca,
    name: Annotated[str, typer.Option(help="The CA's display name.")] = "protofed CA",
    days: Annotated[int, typer.Option(min=1, max=36500, help="Days it is valid.")] = 3650,
    passphrase_file: Passphrase = None,
) -> None:
    """Create a CA. Keep its folder on an offline machine.

    Example: `protofed certs init --ca ca --name "Lesions pilot"`
    """
    from protofed.deploy.certs.lifecycle import authority_name, make_authority
    from protofed.deploy.cli.certs_prompts import passphrase

    created = make_authority(ca, name, days, passphrase(passphrase_file))
    console.print(f"CA: {authority_name(created.certificate)}", markup=False)
    console.print(f"valid until {_day(created.certificate.not_valid_after_utc)}, in {ca}", markup=False)
    if passphrase_file is None:
        console.print("its key is not encrypted: keep the folder where nobody else can read it", style="yellow")


@certs.command("request")
def request(
    identity: Identity,
    site: Annotated[str | None, typer.Option(help="Request for the site with this id.")] = None,
    operator: Annotated[str | None, typer.Option(help="Request for the operator with this name.")] = None,
    server: Annotated[str | None, typer.Option(help="Request for the server with this name.")] = None,
    host: Annotated[list[str] | None, typer.Option(help="DNS name or address of the server. May be repeated.")] = None,
    out: Out = None,
) -> None:
    """Create a private key, which stays here, and a request to send to the CA's operator.

    Example: `protofed certs request --site hospital-a --identity identity`
    """
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs.lifecycle import request

    party, name = _party({Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server}, "--server")
    _write_request(request(identity, party, name, host or ()), identity, out)


@certs.command("renew")
def renew(identity: Identity, out: Out = None) -> None:
    """Create a new key and a request for the same name. The current certificate stays in use until `install`.

    Example: `protofed certs renew --identity identity --out north.request`
    """
    from protofed.deploy.certs.lifecycle import renew

    _write_request(renew(identity), identity, out)
    console.print("say that it is a renewal: they sign it with --renewal", markup=False)


@certs.command("sign")
def sign(
    request: Annotated[Path, typer.Argument(help="The request, as the site sent it.")],
    ca: Ca,
    site: Annotated[str | None, typer.Option(help="The site that you mean it for.")] = None,
    operator: Annotated[str | None, typer.Option(help="The operator that you mean it for.")] = None,
    server_name: Annotated[str | None, typer.Option(help="The server that you mean it for.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="The key's fingerprint, as the party read it to you; without it, you are asked.")
    ] = None,
    renewal: Renewal = False,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days the certificate is valid.")] = 365,
    also: Annotated[Path | None, typer.Option(help="Another CA's ca.pem that the party should also trust.")] = None,
    out: Out = None,
    passphrase_file: Passphrase = None,
    role: Roles = None,
    server: Online = None,
    identity: OperatorIdentity = None,
    plaintext: Plaintext = False,
) -> None:
    """Sign a request after comparing its key's fingerprint by telephone. With --server, also register it there.

    Example: `protofed certs sign north.request --ca ca --site north`
    """
    from protofed.common.pki.identity import Party
    from protofed.common.protocol.roles import check_roles
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import read_bundle, read_request, sign_request
    from protofed.deploy.certs.request import check_addressee
    from protofed.deploy.cli.certs_prompts import authority, confirm

    party, name = _party({Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server_name}, "--server-name")
    roles = check_roles(party, role or ())  # before anything is signed
    to_sign = read_request(files.read(request), str(request))
    check_addressee(to_sign, party, name, str(request))
    signing = authority(ca, passphrase_file)
    confirm(to_sign, days, console, fingerprint, str(request))
    bundle = sign_request(to_sign, signing, days, files.read(also) if also else None, renewal=renewal)
    path = _write(bundle, out or request.with_name(f"{to_sign.party}-{to_sign.name}.bundle.pem"))
    signed = read_bundle(bundle, str(path))
    console.print(f"signed: {_dates(signed.certificate)}", markup=False)
    console.print(f"send {path} back: `protofed certs install` takes it", markup=False)
    if server is not None and party is not Party.SERVER:
        # Whoever names an operator here has said so: that is the role.
        registration = Registration(roles or (("operator",) if party is Party.OPERATOR else ()), renewal)
        _register(signed, path, registration, server, identity, plaintext)
    else:
        console.print(_next_step(signed.certificate, path), markup=False)


@certs.command("register")
def register(
    bundle: Annotated[Path, typer.Argument(help="The bundle that `sign` wrote.")],
    role: Roles = None,
    renewal: Renewal = False,
    server: Server = None,
    identity: OperatorIdentity = None,
    plaintext: Plaintext = False,
) -> None:
    """Register a certificate at the server in its roles; once more, with --role, changes them.

    Example: `protofed certs register north.bundle --role trainer --role evaluator --server hub.example:7443`
    """
    from protofed.common.protocol.roles import check_roles
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import read_bundle

    signed = read_bundle(files.read(bundle), str(bundle))
    registration = Registration(check_roles(signed.certificate.party, role or ()), renewal)
    _register(signed, bundle, registration, _required(server), identity, plaintext)


@certs.command("install")
def install(
    bundle: Annotated[Path, typer.Argument(help="The bundle, as the operator sent it.")],
    identity: Identity,
    new_ca: Annotated[
        bool, typer.Option("--new-ca", help="Accept that the bundle's CAs differ from the installed ones.")
    ] = False,
) -> None:
    """Install a signed certificate. A running daemon picks it up without a restart.

    Example: `protofed certs install north.bundle --identity identity`
    """
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import authority_name, install

    installed = install(identity, files.read(bundle), new_ca=new_ca)
    console.print(f"installed in {identity}: {_dates(installed.certificate)}", markup=False)
    for authority in installed.authorities:
        until = _day(authority.not_valid_after_utc)
        console.print(f"trusted: {authority_name(authority)}, valid until {until}", markup=False)


@certs.command("revoke")
def revoke(
    certificate: Annotated[str, typer.Argument(help="A fingerprint, or a name for all of its certificates.")],
    reason: Annotated[str, typer.Option(help="Why; shown to whoever still uses it.")],
    server: Server = None,
    identity: OperatorIdentity = None,
    plaintext: Plaintext = False,
) -> None:
    """Revoke a certificate; the server refuses its next call.

    Example: `protofed certs revoke north --reason "has left the study"`
    """
    with _connect(_required(server), identity, plaintext) as operator:
        revoked = operator.revoke(certificate, reason)
    for entry in revoked:
        line = (
            f"revoked: {entry.party} '{entry.name}', fingerprint {entry.fingerprint}, from its next call on: {reason}"
        )
        console.print(line, markup=False)


@certs.command("list")
def list_certificates(
    identity: OperatorIdentity = None,
    ca: Annotated[Path | None, typer.Option(help="The CA's folder: list what it has signed.")] = None,
    server: Online = None,
    plaintext: Plaintext = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """List certificates and their dates: of an identity folder, of a CA (--ca), or of a server (--server).

    Example: `protofed certs list --identity identity`
    """
    from protofed.deploy.certs import table

    if ca is not None:
        rows = table.of_authority(ca)
    elif server is not None:
        with _connect(server, identity, plaintext) as operator:
            rows = table.of_server(operator.certificates())
    elif identity is not None:
        rows = table.of_identity(identity)
    else:
        raise ConfigError("expected --identity FOLDER, --ca FOLDER, or --server host:port with --identity FOLDER")
    now = datetime.now(UTC)
    if as_json:
        print(json.dumps([row.plain(now) for row in rows], indent=2))  # noqa: T201
    else:
        Console().print(table.table(rows, now))


def _write_request(pem: bytes, identity: Path, out: Path | None) -> None:
    from protofed.deploy.certs.lifecycle import read_request

    request = read_request(pem, "the request")
    path = _write(pem, out or identity / f"{request.party}-{request.name}.request.pem")
    console.print(f"request: {path}", markup=False)
    console.print(f"key:     {request.fingerprint}", markup=False)
    console.print(
        "send the request to the operator of the CA and compare the key's fingerprint with them over the telephone; "
        f"then `protofed certs install BUNDLE --identity {shlex.quote(str(identity))}`; the private key stays here",
        markup=False,
    )


def _party(named: Mapping[Party, str | None], server_option: str) -> tuple[Party, str]:
    given = [(party, name) for party, name in named.items() if name is not None]
    if len(given) != 1:
        raise ConfigError(f"expected exactly one of --site ID, --operator NAME and {server_option} NAME")
    return given[0]


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


def _register(
    signed: Bundle, path: Path, registration: Registration, server: str, identity: Path | None, plaintext: bool
) -> None:
    pem, options = signed.certificate_pem.decode(), registration.options
    try:
        with _connect(server, identity, plaintext) as operator:
            info = operator.register(pem, registration.roles, renewal=registration.renewal)
    except ProtofedError as error:
        # The same class, so that the exit code stays; the certificate is signed already, and signing again would
        # issue a second one.
        raise type(error)(
            f"not registered: {error}; try again with `protofed certs register {path}{options}`"
        ) from error
    console.print(f"registered at {server} as {' and '.join(info.roles)}: {signed.certificate}", markup=False)


def _next_step(signed: Certificate, path: Path) -> str:
    if signed.party == "server":
        return "a server's certificate needs no registration"
    command = f"protofed certs register {path} --server host:port"
    if signed.party == "operator":
        folder = "copy it to the folder `operators` of the server's identity folder before the server starts"
        return f"the server accepts it after `{command} --role operator`, or {folder}"
    return f"the server accepts it after `{command}`; --role evaluator if it scores rather than trains"


def _connect(server: str, identity: Path | None, plaintext: bool) -> Operator:
    from protofed.deploy.operator import connection

    return connection.Operator(server, identity=identity, plaintext=plaintext)


def _required(server: str | None) -> str:
    if server is None:
        raise ConfigError("expected --server host:port: certificates are registered and revoked at a server")
    return server


def _write(data: bytes, path: Path) -> Path:
    from protofed.common.storage import files

    files.write(path, data)
    return path


def _dates(certificate: Certificate) -> str:
    until = _day(certificate.not_after)
    return f"{certificate}, valid until {until}, fingerprint {certificate.fingerprint}"


def _day(when: datetime) -> str:
    from protofed.common.clock import stamp

    return f"{stamp(when)} ({(when - datetime.now(UTC)).days} days)"
