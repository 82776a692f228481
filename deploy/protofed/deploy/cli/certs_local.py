"""`protofed certs init` and `issue`: what is made on the CA's own machine. Keys of other machines are made there."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.common.errors import ConfigError
from protofed.deploy.cli.certs_options import (
    Ca,
    CertificateDays,
    Host,
    Online,
    OperatorName,
    Passphrase,
    Plaintext,
    Renewal,
    Roles,
    ServerName,
    Site,
)
from protofed.deploy.cli.options import AsJson

if TYPE_CHECKING:
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs.lifecycle import Authority, Bundle
    from protofed.deploy.cli.certs_output import Output

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
    days: Annotated[int, typer.Option(min=1, max=36500, help="Days the CA is valid.")] = 3650,
    passphrase_file: Passphrase = None,
    server_name: ServerName = None,
    host: Host = None,
    identity: Annotated[Path, typer.Option(help="Identity folder of --server-name.")] = Path("identity"),
    operator: OperatorName = None,
    operator_identity: Annotated[Path, typer.Option(help="Identity folder of --operator.")] = Path("operator"),
    as_json: AsJson = False,
) -> None:
    """Create a CA; keep its folder on an offline machine.

    If the coordinator's machine is to be the CA, --server-name and --operator make these identities too, ready to use,
    and let the server accept the operator: their keys are made here, where they are used.

    Example: `protofed certs init --ca ca --server-name hub --host hub.example --operator ada`
    """
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs import table
    from protofed.deploy.certs.lifecycle import authority_name, check_issue, make_authority
    from protofed.deploy.cli import certs_output
    from protofed.deploy.cli.certs_prompts import passphrase

    output = certs_output.Output(as_json)
    parties = [] if server_name is None else [Local(Party.SERVER, server_name, identity, tuple(host or ()))]
    parties += [] if operator is None else [Local(Party.OPERATOR, operator, operator_identity)]
    if host and server_name is None:
        raise ConfigError("--host names a server's address; give --server-name NAME with it")
    if len({party.folder.resolve() for party in parties}) < len(parties):
        raise ConfigError("--identity and --operator-identity name one folder; each party has a folder of its own")
    for party in parties:  # before anything is made
        check_issue(party.folder, party.party, party.name, party.hosts)
    created = make_authority(ca, name, days, passphrase(passphrase_file))
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
        Path | None, typer.Option(envvar="PROTOFED_OPERATOR_IDENTITY", help="The operator's identity folder.")
    ] = None,
    plaintext: Plaintext = False,
    as_json: AsJson = False,
) -> None:
    """Make the identity of a party on the CA's own machine: key, certificate and installation in one step.

    Nothing is compared, as nothing travels. For another machine: `request` there, `sign` here. With --server, also
    register it there.

    Example: `protofed certs issue --ca ca --site tester --identity tester --role evaluator --server hub.example:7443`
    """
    from protofed.common.pki.identity import CERTIFICATE, Party
    from protofed.common.protocol.roles import check_roles
    from protofed.deploy.certs.lifecycle import check_issue
    from protofed.deploy.cli import certs_output
    from protofed.deploy.cli.certs_prompts import authority

    named = {Party.SITE: site, Party.OPERATOR: operator, Party.SERVER: server_name}
    party = Local(*certs_output.party_of(named), identity, tuple(host or ()))
    roles = check_roles(party.party, role or ())
    check_issue(party.folder, party.party, party.name, party.hosts)
    output = certs_output.Output(as_json)
    issued = _issue(authority(ca, passphrase_file), party, days, output, renewal=renewal)
    to = None if server is None else certs_output.Connection(server, operator_identity, plaintext)
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
