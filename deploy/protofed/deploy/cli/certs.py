"""`protofed certs …`: who may take part, from a CA that need not be on any network."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError, ProtofedError

if TYPE_CHECKING:
    from protofed.common.pki.identity import Certificate
    from protofed.deploy.certs.lifecycle import Bundle
    from protofed.deploy.operator.connection import Operator

certs = typer.Typer(no_args_is_help=True, help="Certificates: an offline CA, and keys that stay where they are made.")
console = Console(soft_wrap=True, highlight=False)
Ca = Annotated[Path, typer.Option(help="The CA's folder.")]
Identity = Annotated[Path, typer.Option(help="The identity folder: cert.pem, key.pem, ca.pem.")]
Passphrase = Annotated[Path | None, typer.Option(help="File whose first line encrypts the CA's key.")]
Out = Annotated[Path | None, typer.Option(help="File to write; else one beside the others.")]
Server = Annotated[str | None, typer.Option(envvar="PROTOFED_OPERATOR_SERVER", help="host:port of the server.")]
Online = Annotated[str | None, typer.Option("--server", help="host:port of a server to ask; else nothing is dialled.")]
Me = Annotated[
    Path | None, typer.Option("--identity", envvar="PROTOFED_OPERATOR_IDENTITY", help="The operator's identity folder.")
]
Plaintext = Annotated[bool, typer.Option("--plaintext", help="Talk to --server unencrypted: loopback only.")]


@certs.command("init")
def init(
    ca: Ca,
    name: Annotated[str, typer.Option(help="The CA's name, for eyes only.")] = "protofed CA",
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long it is valid.")] = 3650,
    passphrase_file: Passphrase = None,
) -> None:
    """Make a CA; keep its folder off the network."""
    from protofed.deploy.certs.lifecycle import authority_name, make_authority
    from protofed.deploy.cli.certs_prompts import passphrase

    made = make_authority(ca, name, days, passphrase(passphrase_file))
    console.print(f"CA: {authority_name(made.certificate)}", markup=False)
    console.print(f"valid until {_day(made.certificate.not_valid_after_utc)}, in {ca}", markup=False)
    if passphrase_file is None:
        console.print("its key is not encrypted: keep the folder where nobody else can read it", style="yellow")


@certs.command("request")
def request(
    identity: Identity,
    site: Annotated[str | None, typer.Option(help="Ask as a site, by its id.")] = None,
    operator: Annotated[str | None, typer.Option(help="Ask as an operator, by name.")] = None,
    server: Annotated[str | None, typer.Option(help="Ask as a server, by name.")] = None,
    host: Annotated[list[str] | None, typer.Option(help="DNS name or address of the server; several times.")] = None,
    out: Out = None,
) -> None:
    """Make a key, which stays here, and a request to send to the operator of the CA."""
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs.lifecycle import request

    given = {Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server}
    named = [(party, name) for party, name in given.items() if name is not None]
    if len(named) != 1:
        raise ConfigError("expected exactly one of --site ID, --operator NAME and --server NAME")
    _hand_out(request(identity, *named[0], host or ()), identity, out)


@certs.command("renew")
def renew(identity: Identity, out: Out = None) -> None:
    """Make the next key and a request for the same name; the present certificate stays in use until `install`."""
    from protofed.deploy.certs.lifecycle import renew

    _hand_out(renew(identity), identity, out)


@certs.command("sign")
def sign(
    request: Annotated[Path, typer.Argument(help="The request, as the site sent it.")],
    ca: Ca,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificate is valid.")] = 365,
    also: Annotated[Path | None, typer.Option(help="Another CA's ca.pem, for everybody to trust as well.")] = None,
    out: Out = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: the key's fingerprint was compared.")] = False,
    passphrase_file: Passphrase = None,
    server: Online = None,
    identity: Me = None,
    plaintext: Plaintext = False,
) -> None:
    """Sign a request, after its key's fingerprint was compared over the telephone; with --server, let it in at once."""
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import read_bundle, read_request, sign_request
    from protofed.deploy.cli.certs_prompts import authority, confirm

    asked = read_request(files.read(request), str(request))
    signing = authority(ca, passphrase_file)
    confirm(asked, days, console, yes=yes)
    bundle = sign_request(asked, signing, days, files.read(also) if also else None)
    path = _write(bundle, out or request.with_name(f"{asked.party}-{asked.name}.bundle.pem"))
    signed = read_bundle(bundle, str(path))
    console.print(f"signed: {_dates(signed.certificate)}", markup=False)
    console.print(f"send {path} back: `protofed certs install` takes it", markup=False)
    if server is not None and asked.party != "server":
        _register(signed, path, server, identity, plaintext)
    else:
        console.print(_next_step(signed.certificate, path), markup=False)


@certs.command("register")
def register(
    bundle: Annotated[Path, typer.Argument(help="The bundle that `approve` wrote.")],
    server: Server = None,
    identity: Me = None,
    plaintext: Plaintext = False,
) -> None:
    """Let a certificate in that was signed on a machine from which the server cannot be reached."""
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import read_bundle

    signed = read_bundle(files.read(bundle), str(bundle))
    _register(signed, bundle, _needed(server), identity, plaintext)


@certs.command("install")
def install(
    bundle: Annotated[Path, typer.Argument(help="The bundle, as the operator sent it.")],
    identity: Identity,
    new_ca: Annotated[bool, typer.Option("--new-ca", help="Other CAs than before are meant.")] = False,
) -> None:
    """Put a certificate into use; a running daemon takes it up by itself."""
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import authority_name, install

    installed = install(identity, files.read(bundle), new_ca=new_ca)
    console.print(f"installed in {identity}: {_dates(installed.certificate)}", markup=False)
    for authority in installed.authorities:
        until = _day(authority.not_valid_after_utc)
        console.print(f"trusted: {authority_name(authority)}, valid until {until}", markup=False)


@certs.command("revoke")
def revoke(
    certificate: Annotated[str, typer.Argument(help="A name, for all its certificates, or a fingerprint.")],
    reason: Annotated[str, typer.Option(help="Why; whoever still uses it is told.")],
    server: Server = None,
    identity: Me = None,
    plaintext: Plaintext = False,
) -> None:
    """Let a certificate in no longer, from its next call on."""
    with _connect(_needed(server), identity, plaintext) as there:
        revoked = there.revoke(certificate, reason)
    for one in revoked:
        told = f"revoked: {one.party} '{one.name}', fingerprint {one.fingerprint}, from its next call on: {reason}"
        console.print(told, markup=False)


@certs.command("list")
def list_certificates(
    identity: Me = None,
    ca: Annotated[Path | None, typer.Option(help="The CA's folder: what it has signed.")] = None,
    server: Online = None,
    plaintext: Plaintext = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Certificates with their dates: of an identity folder, of a CA (--ca), or all that a server knows (--server)."""
    from protofed.deploy.certs import table

    if ca is not None:
        rows = table.of_authority(ca)
    elif server is not None:
        with _connect(server, identity, plaintext) as there:
            rows = table.of_server(there.certificates())
    elif identity is not None:
        rows = table.of_identity(identity)
    else:
        raise ConfigError("expected --identity FOLDER, --ca FOLDER, or --server host:port with --identity FOLDER")
    now = datetime.now(UTC)
    if as_json:
        print(json.dumps([row.plain(now) for row in rows], indent=2))  # noqa: T201
    else:
        Console().print(table.table(rows, now))


def _hand_out(made: bytes, identity: Path, out: Path | None) -> None:
    from protofed.deploy.certs.lifecycle import read_request

    asked = read_request(made, "the request")
    path = _write(made, out or identity / f"{asked.party}-{asked.name}.request.pem")
    console.print(f"request: {path}", markup=False)
    console.print(f"key:     {asked.fingerprint}", markup=False)
    console.print(
        "send the request to the operator of the CA, and read the key's fingerprint to each other over the telephone; "
        f"then `protofed certs install BUNDLE --identity {shlex.quote(str(identity))}`; the private key stays here",
        markup=False,
    )


def _register(signed: Bundle, path: Path, server: str, identity: Path | None, plaintext: bool) -> None:
    try:
        with _connect(server, identity, plaintext) as there:
            there.register(signed.certificate_pem.decode())
    except ProtofedError as error:
        raise type(error)(f"not registered: {error}; try again by `protofed certs register {path}`") from error
    console.print(f"registered at {server}: {signed.certificate}", markup=False)


def _next_step(signed: Certificate, path: Path) -> str:
    if signed.party == "server":
        return "a server's certificate needs no registration"
    first = ", or copy it to the folder `operators` of the server's identity folder before the server starts"
    return (
        f"the server lets it in after `protofed certs register {path} --server host:port`"
        f"{first if signed.party == 'operator' else ''}"
    )


def _connect(server: str, identity: Path | None, plaintext: bool) -> Operator:
    from protofed.deploy.operator import connection

    return connection.Operator(server, identity=identity, plaintext=plaintext)


def _needed(server: str | None) -> str:
    if server is None:
        raise ConfigError("expected --server host:port, where certificates are let in and kept out")
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
