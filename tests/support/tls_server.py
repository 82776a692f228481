"""A CA, a server that speaks TLS, its operator, and sites."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.pki import Authority
from tests.support.raw_client import RawClient

from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party, read_certificate
from protofed.common.storage.journal import Record, records
from protofed.deploy.operator.connection import Operator
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.storage.rows import CertificateRow


class TlsServer:
    """Identities under `folder`, all of one CA; whoever is a `site` here is registered.

    Attributes:
        server: running.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority.make()
        self.server: Any = None
        self._clients: list[RawClient] = []

    def identity(self, name: str = "hub", party: Party = Party.SERVER, **options: Any) -> Path:
        """Made when it is first asked for; a server's knows the operator."""
        folder = self.folder / f"{party}-{name}"
        if not folder.exists():
            self.authority.issue(folder, party, name, **options)
            if party is Party.SERVER:
                (folder / "operators").mkdir()
                shutil.copy(self.identity("boss", Party.OPERATOR) / "cert.pem", folder / "operators" / "boss.pem")
        return folder

    def register(self, folder: Path, *roles: str, renewal: bool = False) -> str:
        """Let a certificate in; its fingerprint."""
        with self.operator() as operator:
            return operator.register((folder / "cert.pem").read_text("ascii"), roles, renewal=renewal).fingerprint

    def know(self, folder: Path) -> None:
        """Let a certificate in that the server would not register, valid for ever for all that it knows."""
        said = read_certificate((folder / "cert.pem").read_bytes(), str(folder))
        row = CertificateRow(said.fingerprint, said.party, said.name, 0.0, 1e10, 0.0, roles=("trainer",))
        self.server.operation.certificates._rows[row.fingerprint] = row

    def operator(self) -> Operator:
        return Operator(self.server.address, self.identity("boss", Party.OPERATOR))

    def site(self, name: str = "site-1", run: str = "small-fedavg") -> RawClient:
        """Registered, enrolled, and known to be served."""
        self.register(folder := self.identity(name, Party.SITE))
        return self.client(folder, name, run).enroll()

    def client(self, folder: Path, name: str = "site-1", run: str = "small-fedavg") -> RawClient:
        """A channel with an identity, whoever that lets in."""
        self._clients.append(RawClient(self.server.address, run, name, identity=folder))
        return self._clients[-1]

    def calls(self, code: str) -> list[Record]:
        """What the audit holds of calls that ended so."""
        found = records(self.server.audit_file)
        return [record for record in found if record.event == "call" and record.facts["code"] == code]

    def close(self) -> None:
        for client in self._clients:
            client.channel.close()


@contextmanager
def tls_server(folder: Path, live_server: Callable[..., Any], recipe: Recipe, **options: Any) -> Iterator[TlsServer]:
    made = TlsServer(folder)
    made.server = live_server(recipe, identity=made.identity(), **options)
    yield made
    made.close()


def still_served(site: RawClient) -> bool:
    """Whether the server talks to a legitimate site."""
    return isinstance(site.say("NextTask", pb.NextTaskRequest(caller=site.caller, run=site.run)), pb.NextTaskResponse)
