"""The job `certificates` of compose.yaml: makes a CA and an identity for each party, each in a volume of its own.

Run again, it renews only certificates that end soon, and the server's if its names have changed. A running daemon
notices a renewed identity by itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from protofed.common.clock import stamp
from protofed.common.errors import ProtofedError
from protofed.common.pki.certificate import Certificate, read_certificate
from protofed.common.pki.identity import AUTHORITIES, CERTIFICATE, KEY, NEXT_KEY, Party
from protofed.common.storage import files as storage_files
from protofed.deploy.certs import files as certs_files
from protofed.deploy.certs import lifecycle as certs
from protofed.deploy.certs import request as certs_request

MOUNTED = Path("/identities")  # with a volume for each party and the CA
CA, SERVER, OPERATOR = "ca", "server", "operator"
CLIENTS = "clients"  # the folder of client-1, client-2 and so on, which share a volume
ADMIT, PREVIOUS = "admit", "previous"  # the operator's folders: certificates to register; its identity before renewal
COMPOSE_HOSTS = (SERVER,)  # how clients in compose's networks call the server
DAYS, RENEWED_BEFORE = 365, timedelta(days=30)


@dataclass(frozen=True)
class Job:
    """The identities to make.

    Attributes:
        folder: has a folder for each party and the CA.
        sites: their ids.
        hosts: names and addresses at which clients reach the server.
        now: aware, in UTC.
        clients: how many replicas of the service `client` there may be.
    """

    folder: Path
    sites: Sequence[str]
    hosts: Sequence[str]
    now: datetime
    clients: int = 0

    def run(self) -> None:
        """Make or renew identities where needed, and print what was done with each.

        Raises:
            ProtofedError: a file cannot be read or written, or a name cannot be used.
        """
        authority = self._authority()
        parties = {SERVER: Party.SERVER, OPERATOR: Party.OPERATOR} | dict.fromkeys(self._sites, Party.SITE)
        for name, party in parties.items():
            signing_request, action = self._request(name, party)
            if signing_request is not None:
                # Made here a moment ago, so no telephone; `renewal`: an interrupted job signs for a name again.
                request = certs_request.read_request(signing_request, name)
                certs_request.check_addressee(request, party, name, name)
                signed = certs.sign_request(request, authority, DAYS, now=self.now, renewal=True)
                certs.install(self._of(name), signed, now=self.now)
            certificate = _certificate(self._of(name))
            sys.stdout.write(f"{name}: {action}; valid until {stamp(certificate.not_after)}\n")
        self._publish()

    @property
    def _sites(self) -> list[str]:
        return [*self.sites, *(f"client-{number}" for number in range(1, self.clients + 1))]

    def _of(self, name: str) -> Path:
        """A party's folder."""
        return self.folder / name if name in (SERVER, OPERATOR, *self.sites) else self.folder / CLIENTS / name

    def _authority(self) -> certs.Authority:
        folder = self.folder / CA
        if (folder / certs.CA_CERTIFICATE).exists():
            return certs.read_authority(folder)
        # A key without a certificate is of an interrupted job: it has signed nothing, and would be in the way.
        (folder / certs.CA_KEY).unlink(missing_ok=True)
        return certs.make_authority(folder, "protofed compose", now=self.now)

    def _request(self, name: str, party: Party) -> tuple[bytes | None, str]:
        """The signing request for a party's next certificate (None: it needs none), and what is done, in words."""
        folder, hosts = self._of(name), tuple(self.hosts) if party is Party.SERVER else ()
        if not (folder / CERTIFICATE).exists():
            return certs.request(folder, party, name, hosts), "made"
        certificate = _certificate(folder)
        if certificate.not_after - self.now < RENEWED_BEFORE:
            _keep_previous(folder)
            return certs.renew(folder), "renewed"
        if set(certificate.hosts) != set(certs_request.check_hosts(party, hosts)):
            path = folder / NEXT_KEY  # there already if a job was interrupted after making it
            key = certs_files.read_key(path) if path.exists() else certs_files.make_key(path)
            return certs_request.make_request(party, name, hosts, key), f"renewed for {' '.join(hosts)}"
        return None, "kept"

    def _publish(self) -> None:
        """Copy the operator's certificate to the server, and all certificates to the operator, who registers them."""
        operator = self.folder / OPERATOR
        _copy(operator / CERTIFICATE, self.folder / SERVER / "operators" / f"{OPERATOR}.pem")
        for name in (OPERATOR, *self._sites):
            _copy(self._of(name) / CERTIFICATE, operator / ADMIT / f"{name}.pem")


def _certificate(folder: Path) -> Certificate:
    return read_certificate((folder / CERTIFICATE).read_bytes(), str(folder / CERTIFICATE))


def _keep_previous(folder: Path) -> None:
    """Keep the operator's identity, for the server accepts the new one only after a restart or its registration."""
    (folder / PREVIOUS).mkdir(mode=0o700, exist_ok=True)
    for name in (CERTIFICATE, KEY, AUTHORITIES):
        shutil.copy2(folder / name, folder / PREVIOUS / name)


def _copy(source: Path, target: Path) -> None:
    """Copy a file unless the target is equal already."""
    data = source.read_bytes()
    if not target.exists() or target.read_bytes() != data:
        target.parent.mkdir(exist_ok=True)
        storage_files.write(target, data)


if __name__ == "__main__":
    os.umask(0o077)
    names = dict.fromkeys((*COMPOSE_HOSTS, *os.environ.get("SERVER_HOSTS", "").split()))
    try:
        Job(MOUNTED, sys.argv[1:], tuple(names), datetime.now(UTC), int(os.environ.get("CLIENTS", "0"))).run()
    except ProtofedError as error:
        sys.exit(f"certificates: {error}")
