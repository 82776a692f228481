"""Options that the commands of `protofed certs` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Ca = Annotated[Path, typer.Option(help="The CA's folder.")]
Identity = Annotated[Path, typer.Option(help="The identity folder: cert.pem, key.pem, ca.pem.")]
Passphrase = Annotated[Path | None, typer.Option(help="File whose first line is the passphrase of the CA's key.")]
RequestOut = Annotated[Path | None, typer.Option(help="File to write; default: in the identity folder.")]
BundleOut = Annotated[Path | None, typer.Option(help="File to write; default: beside the request.")]
Site = Annotated[str | None, typer.Option(help="The site that it is for.")]
OperatorName = Annotated[str | None, typer.Option("--operator", help="The operator that it is for.")]
ServerName = Annotated[str | None, typer.Option(help="The server that it is for.")]
Host = Annotated[list[str] | None, typer.Option(help="DNS name or address of the server. May be repeated.")]
CertificateDays = Annotated[int, typer.Option(min=1, max=3650, help="Days the certificate is valid.")]
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
