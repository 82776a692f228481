"""One of the replicas of compose.yaml's service `client`: `replica.py client start …`, or `replica.py health`.

Each is a site of its own, `client-1` to `client-N`, with that site's key, state and share of the data. A container
locks its site while its daemon lives, and takes up the same one when it is restarted. A new container takes the first
that is free.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path

IDENTITIES, STATES = Path("/etc/protofed/identity"), Path("/var/lib/protofed")
CLAIM = "client-{}.claim"  # locked by the container that it names


def take(states: Path, clients: int, container: str) -> int:
    """The number of the site that this container is from now on.

    Raises:
        SystemExit: others have all of them.
    """
    numbers = range(1, clients + 1)
    for number in sorted(numbers, key=lambda number: _holder(states, number) != container):
        claim = os.open(states / CLAIM.format(number), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(claim)
            continue
        os.ftruncate(claim, 0)
        os.write(claim, container.encode())
        os.set_inheritable(claim, True)  # the daemon keeps the lock: it takes this process's place
        return number
    return sys.exit(
        f"client: other replicas have all {clients} identities: set a larger CLIENTS in .env, then start again"
    )


def _holder(states: Path, number: int) -> str:
    """The container that had a site last."""
    path = states / CLAIM.format(number)
    return path.read_text(encoding="ascii") if path.exists() else ""


def health(states: Path, clients: int, container: str) -> list[str]:
    """The command that asks this container's daemon whether it is ready."""
    own = (number for number in range(1, clients + 1) if _holder(states, number) == container)
    folder = states / f"client-{next(own, 0)}"
    return ["python", "-I", "-m", "protofed.deploy.daemons.readyz", str(folder)]


def daemon(arguments: list[str], number: int) -> list[str]:
    """The command of this container's daemon."""
    site = f"client-{number}"
    site_options = ["--site", site, "--partition-index", str(number - 1)]
    return ["protofed", *arguments, *site_options, "--identity", str(IDENTITIES / site), "--state", str(STATES / site)]


if __name__ == "__main__":
    where = STATES, int(os.environ.get("CLIENTS", "0")), socket.gethostname()
    command = health(*where) if sys.argv[1:] == ["health"] else daemon(sys.argv[1:], take(*where))
    os.execvp(command[0], command)  # noqa: S606
