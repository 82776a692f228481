"""The job `certificates` of compose.yaml: a CA, and an identity for everybody, each in a volume of its own.

Once more it changes nothing, but for what ends soon, and for a server that is to be reached by other names. A running
daemon takes a renewed identity up by itself.
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
from protofed.deploy.certs import authority as certs_authority
from protofed.deploy.certs import files as certs_files
from protofed.deploy.certs import lifecycle as certs
from protofed.deploy.certs import request as certs_request

MOUNTED = Path("/identities")  # a volume for each name
CA, SERVER, OPERATOR = "ca", "server", "operator"
ADMIT, PREVIOUS = "admit", "previous"  # of the operator: whom to let in, and who it was before its renewal
INSIDE = (SERVER,)  # how clients in compose's networks call the server
DAYS, RENEWED_BEFORE = 365, timedelta(days=30)


@dataclass(frozen=True)
class Job:
    """Whose identities there are to be.

    Attributes:
        folder: with a folder for each party and the CA.
        sites: their ids.
        hosts: names and addresses by which the server is reached.
    """

    folder: Path
    sites: Sequence[str]
    hosts: Sequence[str]
    now: datetime

    def run(self) -> None:
        """Make or renew what has to be, and tell of each."""
        authority = self._authority()
        parties = {SERVER: Party.SERVER, OPERATOR: Party.OPERATOR} | dict.fromkeys(self.sites, Party.SITE)
        for name, party in parties.items():
            asked, why = self._request(name, party)
            if asked is not None:
                signed = certs.sign_request(certs.read_request(asked, name), authority, DAYS, now=self.now)
                certs.install(self.folder / name, signed, now=self.now)
            own = _certificate(self.folder / name)
            sys.stdout.write(f"{name}: {why}; valid until {stamp(own.not_after)}\n")
        self._publish()

    def _authority(self) -> certs.Authority:
        folder = self.folder / CA
        if (folder / certs_authority.CERTIFICATE).exists():
            return certs.read_authority(folder)
        (folder / certs_authority.KEY).unlink(missing_ok=True)  # of a job that was interrupted: it has signed nothing
        return certs.make_authority(folder, "protofed compose", now=self.now)

    def _request(self, name: str, party: Party) -> tuple[bytes | None, str]:
        """For the next certificate, if there is to be one, and why."""
        folder, hosts = self.folder / name, tuple(self.hosts) if party is Party.SERVER else ()
        if not (folder / CERTIFICATE).exists():
            return certs.request(folder, party, name, hosts), "made"
        own = _certificate(folder)
        if own.not_after - self.now < RENEWED_BEFORE:
            _keep_previous(folder)
            return certs.renew(folder), "renewed"
        if set(own.hosts) != set(certs_request.check_hosts(party, hosts)):
            path = folder / NEXT_KEY
            key = certs_files.read_key(path) if path.exists() else certs_files.make_key(path)
            return certs_request.make_request(party, name, hosts, key), f"renewed for {' '.join(hosts)}"
        return None, "kept"

    def _publish(self) -> None:
        """The operator's certificate to the server, everybody else's to the operator, who lets them in."""
        operator = self.folder / OPERATOR
        _copy(operator / CERTIFICATE, self.folder / SERVER / "operators" / f"{OPERATOR}.pem")
        for name in (OPERATOR, *self.sites):
            _copy(self.folder / name / CERTIFICATE, operator / ADMIT / f"{name}.pem")


def _certificate(folder: Path) -> Certificate:
    return read_certificate((folder / CERTIFICATE).read_bytes(), str(folder / CERTIFICATE))


def _keep_previous(folder: Path) -> None:
    """The server knows it, and the new one only after its next start or when the old one has let it in."""
    (folder / PREVIOUS).mkdir(mode=0o700, exist_ok=True)
    for name in (CERTIFICATE, KEY, AUTHORITIES):
        shutil.copy2(folder / name, folder / PREVIOUS / name)


def _copy(source: Path, target: Path) -> None:
    """Written only where it differs."""
    data = source.read_bytes()
    if not target.exists() or target.read_bytes() != data:
        target.parent.mkdir(exist_ok=True)
        storage_files.write(target, data)


if __name__ == "__main__":
    names = dict.fromkeys((*INSIDE, *os.environ.get("SERVER_HOSTS", "").split()))
    try:
        Job(MOUNTED, sys.argv[1:], tuple(names), datetime.now(UTC)).run()
    except ProtofedError as error:
        sys.exit(f"certificates: {error}")
