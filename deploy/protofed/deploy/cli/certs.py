"""`protofed certs …`: issue, install and revoke certificates; the CA can stay offline."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement

from protofed.common.errors import ConfigError
from protofed.deploy.cli.options import SELDOM, AsJson, print_json

if TYPE_CHECKING:
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs.lifecycle import Authority, Bundle
    from protofed.deploy.certs.request import Request
    from protofed.deploy.cli.certs_output import Output

OPERATOR_IDENTITY = "The operator's identity folder; none: no TLS to --server, loopback only."
FIRST_OPERATORS = "operators"  # in the server's identity folder, as the server reads it


@dataclass(frozen=True)
class Local:
    """A party of the CA's own machine, and the folder of its identity."""

    party: Party
    name: str
    folder: Path
    hosts: tuple[str, ...] = ()


def init(
    ca: Ca,
    name: Annotated[str, typer.Option(help="The CA's display name.")] = "protofed CA",
    days: Annotated[int, typer.Option(min=1, max=36500, help="Days the CA is valid.", rich_help_panel=SELDOM)] = 3650,
    passphrase_file: Passphrase = None,
    server_name: ServerName = None,
    host: Host = None,
    identity: Annotated[Path, typer.Option(help="Identity folder of --server-name.")] = Path("identity"),
    operator: OperatorName = None,
    operator_identity: Annotated[Path, typer.Option(help="Identity folder of --operator.")] = Path("operator"),
    as_json: AsJson = False,
) -> None:
    """Create a CA; keep its folder on an offline machine.

    If the coordinator's machine is the CA, --server-name and --operator also make these identities, ready to use. The
    server then accepts the operator. Their keys are made on this machine, where they are used.

    Example: `protofed certs init --ca ca --server-name hub --host hub.example --operator ada`
    """
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs import table
    from protofed.deploy.certs.lifecycle import authority_name, check_issue, make_authority
    from protofed.deploy.cli import certs_output

    output = certs_output.Output(as_json)
    parties = [] if server_name is None else [Local(Party.SERVER, server_name, identity, tuple(host or ()))]
    parties += [] if operator is None else [Local(Party.OPERATOR, operator, operator_identity)]
    if host and server_name is None:
        raise ConfigError("--host names a server's address; give --server-name NAME with it")
    if len({party.folder.resolve() for party in parties}) < len(parties):
        raise ConfigError("--identity and --operator-identity name one folder; each party has a folder of its own")
    for party in parties:  # before anything is made
        check_issue(party.folder, party.party, party.name, party.hosts)
    created = make_authority(ca, name, days, _passphrase(passphrase_file))
    output.say(f"CA: {authority_name(created.certificate)}")
    output.say(f"valid until {certs_output.day(created.certificate.not_valid_after_utc)}, in {ca}")
    if passphrase_file is None:
        output.say("its key is not encrypted: keep the folder where nobody else can read it", style="yellow")
    issued = [_issue(created, party, 365, output) for party in parties]
    if server_name is not None and operator is not None:
        _accept(identity, operator, issued[-1])
        output.say(f"the server accepts operator '{operator}' from its first start on")
    row = table.of_ca(created.certificate).plain(datetime.now(UTC))
    output.result({"ca": str(ca), **row, "issued": [certs_output.plain(bundle) for bundle in issued]})


def issue(
    ca: Ca,
    identity: Annotated[Path, typer.Option(help="The identity folder to make.")],
    site: Site = None,
    operator: OperatorName = None,
    server_name: ServerName = None,
    host: Host = None,
    days: CertificateDays = 365,
    role: Roles = None,
    renewal: Renewal = False,
    passphrase_file: Passphrase = None,
    server: Online = None,
    operator_identity: Annotated[
        str | None,
        typer.Option(envvar="PROTOFED_OPERATOR_IDENTITY", metavar="FOLDER|none", help=OPERATOR_IDENTITY),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the identity of a party on the CA's own machine: key, certificate and installation in one step.

    There is no code to compare, because nothing is sent. For another machine: `request` there, `sign` here. With
    --server, also register it there.

    Example: `protofed certs issue --ca ca --site tester --identity tester --role evaluator --server hub.example:7443`
    """
    from protofed.common.pki.identity import CERTIFICATE, Party
    from protofed.common.protocol.roles import check_roles
    from protofed.deploy.certs.lifecycle import check_issue
    from protofed.deploy.cli import certs_output

    options = {Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server_name}
    party = Local(*certs_output.choose_party(options), identity, tuple(host or ()))
    roles = check_roles(party.party, role or ())
    check_issue(party.folder, party.party, party.name, party.hosts)
    output = certs_output.Output(as_json)
    issued = _issue(_read_authority(ca, passphrase_file), party, days, output, renewal=renewal)
    to = None if server is None else certs_output.Connection(server, operator_identity)
    registration = certs_output.Registration(roles, renewal)
    registered = certs_output.register_or_tell(issued, identity / CERTIFICATE, registration, to, output)
    output.result({"identity": str(identity), **certs_output.plain(issued), "registered": registered})


def _issue(authority: Authority, party: Local, days: int, output: Output, *, renewal: bool = False) -> Bundle:
    from protofed.deploy.certs import lifecycle
    from protofed.deploy.cli import certs_output

    name, hosts = party.name, party.hosts
    issued = lifecycle.issue(authority, party.folder, party.party, name, hosts, days, renewal=renewal)
    output.say(f"installed in {party.folder}: {certs_output.dates(issued)}")
    return issued


def _accept(identity: Path, operator: str, issued: Bundle) -> None:
    """Let the server of an identity folder accept an operator, who then registers all others."""
    from protofed.common.storage import files
    from protofed.deploy.certs.files import make_folder

    folder = identity / FIRST_OPERATORS
    make_folder(folder)
    files.write(folder / f"{operator}.pem", issued.certificate_pem)


Ca = Annotated[Path, typer.Option(help="The CA's folder.")]
Identity = Annotated[Path, typer.Option(help="The identity folder: cert.pem, key.pem, ca.pem.")]
Passphrase = Annotated[Path | None, typer.Option(help="File whose first line is the passphrase of the CA's key.")]
RequestOut = Annotated[Path | None, typer.Option(help="File to write; default: in the identity folder.")]
BundleOut = Annotated[Path | None, typer.Option(help="File to write; default: beside the request.")]
Site = Annotated[str | None, typer.Option(help="Make it for the site with this id.")]
OperatorName = Annotated[str | None, typer.Option("--operator", help="Make it for the operator with this name.")]
ServerName = Annotated[str | None, typer.Option(help="Make it for the server with this name.")]
Host = Annotated[list[str] | None, typer.Option(help="DNS name or address of the server. May be repeated.")]
CertificateDays = Annotated[int, typer.Option(min=1, max=3650, help="Days the certificate is valid.")]
Server = Annotated[str | None, typer.Option(envvar="PROTOFED_OPERATOR_SERVER", help="host:port of the server.")]
Online = Annotated[
    str | None, typer.Option("--server", help="host:port of a server; without it, no connection is made.")
]
OperatorIdentity = Annotated[
    str | None,
    typer.Option("--identity", envvar="PROTOFED_OPERATOR_IDENTITY", metavar="FOLDER|none", help=OPERATOR_IDENTITY),
]
Renewal = Annotated[bool, typer.Option("--renewal", help="Allow that the name has a certificate that is still valid.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role", help="trainer or evaluator; for an operator: operator. May be repeated. Default for a site: trainer."
    ),
]


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
    renew: Annotated[
        bool, typer.Option("--renew", help="A new key for the same name; the certificate stays in use until `install`.")
    ] = False,
    out: RequestOut = None,
    as_json: AsJson = False,
) -> None:
    """Create a private key, which stays here, and a request to send to the CA's operator.

    Prints the key's code, to be read out when they telephone.

    Example: `protofed certs request --site hospital-a --identity identity`
    """
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs import lifecycle
    from protofed.deploy.cli.certs_output import Output, choose_party

    options, output = {Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server}, Output(as_json)
    if not renew:
        pem = lifecycle.request(identity, *choose_party(options), host or ())
        _write_request(pem, identity, out, output)
        return
    if host or any(options.values()):
        raise ConfigError("--renew keeps the name and the hosts of the certificate in --identity; give no others")
    _write_request(lifecycle.renew(identity), identity, out, output)
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
    also: Annotated[
        Path | None, typer.Option(help="Another CA's ca.pem that the party should also trust.", rich_help_panel=SELDOM)
    ] = None,
    out: BundleOut = None,
    passphrase_file: Passphrase = None,
    role: Roles = None,
    server: Online = None,
    identity: OperatorIdentity = None,
    as_json: AsJson = False,
) -> None:
    """Sign a request after comparing the code of its key by telephone. With --server, also register it there.

    Example: `protofed certs sign north.request --ca ca --site north --server hub.example:7443`
    """
    from protofed.common.pki.identity import Party
    from protofed.common.protocol.roles import check_roles
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import authority_name, read_bundle, sign_request
    from protofed.deploy.certs.request import check_addressee, read_request
    from protofed.deploy.cli import certs_output

    party, name = certs_output.choose_party({Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server_name})
    roles = check_roles(party, role or ())  # before anything is signed
    to_sign = read_request(files.read(request), str(request))
    check_addressee(to_sign, party, name, str(request))
    signing, output = _read_authority(ca, passphrase_file), certs_output.Output(as_json)
    _confirm(to_sign, days, output, fingerprint, str(request))
    bundle = sign_request(to_sign, signing, days, files.read(also) if also else None, renewal=renewal)
    path = _write(bundle, out or request.with_name(f"{to_sign.party}-{to_sign.name}.bundle.pem"))
    signed = read_bundle(bundle, str(path))
    output.say(f"signed: {certs_output.dates(signed)}")
    output.say(f"CA: {authority_name(signing.certificate)}; read its code to them: `protofed certs install` shows it")
    output.say(f"send {path} back: `protofed certs install` takes it")
    to = None if server is None else certs_output.Connection(server, identity)
    registration = certs_output.Registration(roles, renewal)
    registered = certs_output.register_or_tell(signed, path, registration, to, output)
    output.result({"bundle": str(path), **certs_output.plain(signed), "registered": registered})


@certs.command("register", rich_help_panel=SELDOM)
def register(
    bundle: Annotated[Path, typer.Argument(help="The bundle that `sign` wrote, or an identity folder's cert.pem.")],
    role: Roles = None,
    renewal: Renewal = False,
    server: Server = None,
    identity: OperatorIdentity = None,
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
    to = certs_output.Connection(_required(server), identity)
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
    reason: Annotated[str, typer.Option(help="Why. Shown to whoever still uses the certificate.")],
    server: Server = None,
    identity: OperatorIdentity = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a certificate; the server refuses its next call.

    Example: `protofed certs revoke west --reason "has left the study"`
    """
    from protofed.deploy.certs import table
    from protofed.deploy.cli.certs_output import Connection, Output

    output = Output(as_json)
    with Connection(_required(server), identity).open() as operator:
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
    ca: Annotated[Path | None, typer.Option(help="The CA's folder: list the certificates that it signed.")] = None,
    server: Online = None,
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
        with Connection(server, identity).open() as operator:
            rows = table.of_server(operator.certificates())
    elif identity is not None:
        rows = table.of_identity(Path(identity))
    else:
        raise ConfigError("expected --identity FOLDER, --ca FOLDER, or --server host:port with --identity FOLDER")
    now = datetime.now(UTC)
    if as_json:
        print_json([row.plain(now) for row in rows])
    else:
        _print_whole(table.table(rows, now))


def _write_request(pem: bytes, identity: Path, out: Path | None, output: Output) -> None:
    from protofed.deploy.certs.request import read_request
    from protofed.deploy.cli.certs_output import plain_request

    request = read_request(pem, "the request")
    path = _write(pem, out or identity / f"{request.party}-{request.name}.request.pem")
    output.say(f"request: {path}")
    output.say(f"key:     {request.code}")
    output.say(
        "send the request to the operator of the CA. When they telephone, read them the key's code. "
        f"Then run `protofed certs install BUNDLE --identity {shlex.quote(str(identity))}`. The private key stays here"
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


_TRIES = 3  # to type a code


def _confirm(request: Request, days: int, output: Output, fingerprint: str | None, where: str) -> None:
    """Show the request and its key's code, and return only if that is what the party reads out.

    Args:
        fingerprint: the code or fingerprint that the party read out; None: the person at the terminal types it, so that
            nobody signs by the return key.
        where: names the request in errors.

    Raises:
        ConfigError: it is another key's, three times at a terminal, or there is neither a code nor a terminal.
        typer.Abort: the person declined.
    """
    from protofed.deploy.certs.request import check_key

    output.say(f"about to sign, for {days} days: {request.party} '{request.name}' {' '.join(request.hosts)}".rstrip())
    output.say(f"key: {request.code}")
    if fingerprint is not None:
        check_key(request, fingerprint, where)
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            "no terminal to ask on; expected --fingerprint CODE. Telephone the party and let them read you their key's "
            "code, which `protofed certs request` printed"
        )
    for tries_left in reversed(range(_TRIES)):
        try:
            check_key(request, typer.prompt("Code that the party reads to you over the telephone", err=True), where)
            break
        except ConfigError as error:  # misheard, mistyped or another key: heard again, it tells which
            if not tries_left:
                raise
            output.say(str(error), style="yellow")


def _read_authority(folder: Path, passphrase_file: Path | None) -> Authority:
    """Read the CA in a folder; the passphrase, if its key needs one, comes from the file or the terminal.

    Raises:
        ConfigError: the folder holds no CA, or the passphrase is missing or wrong.
    """
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import CA_KEY, read_authority

    passphrase = _passphrase(passphrase_file)
    if passphrase is None and files.is_encrypted(folder / CA_KEY):
        if not sys.stdin.isatty():
            raise ConfigError(f"the key of the CA in {folder} is encrypted; give --passphrase-file")
        passphrase = str(typer.prompt("Passphrase of the CA's key", hide_input=True)).encode()
    return read_authority(folder, passphrase)


def _passphrase(path: Path | None) -> bytes | None:
    """The first line of a passphrase file, without its line end; None without a file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file with the passphrase") from error
    if not lines or not lines[0]:
        raise ConfigError(f"{path} is empty; expected the passphrase in its first line")
    return lines[0]
