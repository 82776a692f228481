"""`protofed certs …`: issue, install and revoke certificates; the CA can stay offline."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement

from protofed.common.errors import ConfigError
from protofed.deploy.cli.certs_local import init, issue
from protofed.deploy.cli.certs_options import (
    BundleOut,
    Ca,
    CertificateDays,
    Host,
    Identity,
    Online,
    OperatorIdentity,
    OperatorName,
    Passphrase,
    Plaintext,
    Renewal,
    RequestOut,
    Roles,
    Server,
    ServerName,
    Site,
)
from protofed.deploy.cli.options import AsJson

if TYPE_CHECKING:
    from protofed.deploy.cli.certs_output import Output

MEASURED = 500  # characters; wider than any table of certificates
certs = typer.Typer(
    no_args_is_help=True,
    help="Certificates of sites, servers and operators. An offline CA signs; private keys stay where they are made.",
)
certs.command("init")(init)
certs.command("issue")(issue)


@certs.command("request")
def request(
    identity: Identity,
    site: Annotated[str | None, typer.Option(help="Request for the site with this id.")] = None,
    operator: Annotated[str | None, typer.Option(help="Request for the operator with this name.")] = None,
    server: Annotated[
        str | None, typer.Option("--server-name", "--server", help="Request for the server with this name.")
    ] = None,
    host: Host = None,
    out: RequestOut = None,
    as_json: AsJson = False,
) -> None:
    """Create a private key, which stays here, and a request to send to the CA's operator.

    Prints the key's code, to be read out when they telephone.

    Example: `protofed certs request --site hospital-a --identity identity`
    """
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs.lifecycle import request
    from protofed.deploy.cli.certs_output import Output, party_of

    party, name = party_of({Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server})
    _write_request(request(identity, party, name, host or ()), identity, out, Output(as_json))


@certs.command("renew")
def renew(identity: Identity, out: RequestOut = None, as_json: AsJson = False) -> None:
    """Create a new key and a request for the same name. The current certificate stays in use until `install`.

    Example: `protofed certs renew --identity identity --out north.request`
    """
    from protofed.deploy.certs.lifecycle import renew
    from protofed.deploy.cli.certs_output import Output

    output = Output(as_json)
    _write_request(renew(identity), identity, out, output)
    output.say("say that it is a renewal: they sign it with --renewal")


@certs.command("sign")
def sign(
    request: Annotated[Path, typer.Argument(help="The request, as the site sent it.")],
    ca: Ca,
    site: Site = None,
    operator: OperatorName = None,
    server_name: ServerName = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="The key's code, as the party read it to you, or its fingerprint; without it, you are asked.",
        ),
    ] = None,
    renewal: Renewal = False,
    days: CertificateDays = 365,
    also: Annotated[Path | None, typer.Option(help="Another CA's ca.pem that the party should also trust.")] = None,
    out: BundleOut = None,
    passphrase_file: Passphrase = None,
    role: Roles = None,
    server: Online = None,
    identity: OperatorIdentity = None,
    plaintext: Plaintext = False,
    as_json: AsJson = False,
) -> None:
    """Sign a request after comparing the code of its key by telephone. With --server, also register it there.

    Example: `protofed certs sign north.request --ca ca --site north --server hub.example:7443`
    """
    from protofed.common.pki.identity import Party
    from protofed.common.protocol.roles import check_roles
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import authority_name, read_bundle, read_request, sign_request
    from protofed.deploy.certs.request import check_addressee
    from protofed.deploy.cli import certs_output
    from protofed.deploy.cli.certs_prompts import authority, confirm

    party, name = certs_output.party_of({Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server_name})
    roles = check_roles(party, role or ())  # before anything is signed
    to_sign = read_request(files.read(request), str(request))
    check_addressee(to_sign, party, name, str(request))
    signing, output = authority(ca, passphrase_file), certs_output.Output(as_json)
    confirm(to_sign, days, output, fingerprint, str(request))
    bundle = sign_request(to_sign, signing, days, files.read(also) if also else None, renewal=renewal)
    path = _write(bundle, out or request.with_name(f"{to_sign.party}-{to_sign.name}.bundle.pem"))
    signed = read_bundle(bundle, str(path))
    output.say(f"signed: {certs_output.dates(signed)}")
    output.say(f"CA: {authority_name(signing.certificate)}; read its code to them: `protofed certs install` shows it")
    output.say(f"send {path} back: `protofed certs install` takes it")
    to = None if server is None else certs_output.Connection(server, identity, plaintext)
    registration = certs_output.Registration(roles, renewal)
    registered = certs_output.register_or_tell(signed, path, registration, to, output)
    output.result({"bundle": str(path), **certs_output.plain(signed), "registered": registered})


@certs.command("register")
def register(
    bundle: Annotated[Path, typer.Argument(help="The bundle that `sign` wrote, or an identity folder's cert.pem.")],
    role: Roles = None,
    renewal: Renewal = False,
    server: Server = None,
    identity: OperatorIdentity = None,
    plaintext: Plaintext = False,
    as_json: AsJson = False,
) -> None:
    """Register a certificate at the server in its roles; once more, with --role, changes them.

    Example: `protofed certs register north.bundle --role trainer --role evaluator --server hub.example:7443`
    """
    from protofed.common.protocol.roles import check_roles
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import read_bundle
    from protofed.deploy.cli import certs_output

    signed = read_bundle(files.read(bundle), str(bundle), with_authorities=False)
    output = certs_output.Output(as_json)
    registration = certs_output.Registration(check_roles(signed.certificate.party, role or ()), renewal)
    to = certs_output.Connection(_required(server), identity, plaintext)
    roles = certs_output.register(signed, bundle, registration, to, output)
    output.result({**certs_output.plain(signed), "registered": roles})


@certs.command("install")
def install(
    bundle: Annotated[Path, typer.Argument(help="The bundle, as the operator sent it.")],
    identity: Identity,
    new_ca: Annotated[
        bool, typer.Option("--new-ca", help="Accept that the bundle's CAs differ from the installed ones.")
    ] = False,
    ca_code: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Code of the CA, as its operator read it to you. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Install a signed certificate. A running daemon picks it up without a restart.

    Shows the code of each CA that this party then trusts; --ca-code refuses any other.

    Example: `protofed certs install north.bundle --identity identity`
    """
    from protofed.deploy.cli import certs_output

    output = certs_output.Output(as_json)
    installed = certs_output.install_certificate(bundle, identity, output, new_ca=new_ca, ca_codes=ca_code or ())
    output.result({"identity": str(identity), **certs_output.plain(installed)})


@certs.command("revoke")
def revoke(
    certificate: Annotated[str, typer.Argument(help="A fingerprint, or a name for all of its certificates.")],
    reason: Annotated[str, typer.Option(help="Why; shown to whoever still uses it.")],
    server: Server = None,
    identity: OperatorIdentity = None,
    plaintext: Plaintext = False,
    as_json: AsJson = False,
) -> None:
    """Revoke a certificate; the server refuses its next call.

    Example: `protofed certs revoke west --reason "has left the study"`
    """
    from protofed.deploy.certs import table
    from protofed.deploy.cli.certs_output import Connection, Output

    output = Output(as_json)
    with Connection(_required(server), identity, plaintext).open() as operator:
        revoked = operator.revoke(certificate, reason)
    for entry in revoked:
        output.say(
            f"revoked: {entry.party} '{entry.name}', fingerprint {entry.fingerprint}, from its next call on: {reason}"
        )
    now = datetime.now(UTC)
    output.result({"revoked": [row.plain(now) for row in table.of_server(revoked)]})


@certs.command("list")
def list_certificates(
    identity: OperatorIdentity = None,
    ca: Annotated[Path | None, typer.Option(help="The CA's folder: list what it has signed.")] = None,
    server: Online = None,
    plaintext: Plaintext = False,
    as_json: AsJson = False,
) -> None:
    """List certificates and their dates: of an identity folder, of a CA (--ca), or of a server (--server).

    Example: `protofed certs list --identity identity`
    """
    from protofed.deploy.certs import table
    from protofed.deploy.cli.certs_output import Connection

    if ca is not None:
        rows = table.of_authority(ca)
    elif server is not None:
        with Connection(server, identity, plaintext).open() as operator:
            rows = table.of_server(operator.certificates())
    elif identity is not None:
        rows = table.of_identity(identity)
    else:
        raise ConfigError("expected --identity FOLDER, --ca FOLDER, or --server host:port with --identity FOLDER")
    now = datetime.now(UTC)
    if as_json:
        print(json.dumps([row.plain(now) for row in rows], indent=2))  # noqa: T201
    else:
        _print_whole(table.table(rows, now))


def _write_request(pem: bytes, identity: Path, out: Path | None, output: Output) -> None:
    from protofed.deploy.certs.lifecycle import read_request
    from protofed.deploy.cli.certs_output import plain_request

    request = read_request(pem, "the request")
    path = _write(pem, out or identity / f"{request.party}-{request.name}.request.pem")
    output.say(f"request: {path}")
    output.say(f"key:     {request.code}")
    output.say(
        "send the request to the operator of the CA, and read them the key's code when they telephone; "
        f"then `protofed certs install BUNDLE --identity {shlex.quote(str(identity))}`; the private key stays here"
    )
    output.result({"request": str(path), **plain_request(request)})


def _print_whole(table: RenderableType) -> None:
    """Print a table at least as wide as it needs: a narrower terminal breaks its lines, and nothing is cut."""
    console = Console()
    needed = Measurement.get(console, console.options.update_width(MEASURED), table).minimum
    Console(width=max(console.width, needed), soft_wrap=True).print(table)


def _required(server: str | None) -> str:
    if server is None:
        raise ConfigError("expected --server host:port: certificates are registered and revoked at a server")
    return server


def _write(data: bytes, path: Path) -> Path:
    from protofed.common.storage import files

    files.write(path, data)
    return path
