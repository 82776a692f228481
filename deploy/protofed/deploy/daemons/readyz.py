"""Asks the daemon of a state folder whether it is ready.

`python -I -m protofed.deploy.daemons.readyz FOLDER` is the health check of the images, every few seconds beside a
daemon at work: it does without all that the command line imports.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

ADDRESS_FILE = "metrics-address"  # monitoring.METRICS_FILE, without all that its module imports
WAIT_S = 5.0  # for the connection, and for each piece of the answer
LONGEST_ANSWER = 1 << 16  # bytes
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (where a daemon that listens there is asked)


def missing(state: Path) -> list[str]:
    """What keeps the daemon of a state folder from its work, by its own /readyz; empty: nothing does."""
    try:
        url = (state / ADDRESS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [f"no daemon with --metrics runs in {state}: it starts, has ended, or has another --state"]
    except (OSError, ValueError) as error:
        return [f"cannot read {state / ADDRESS_FILE}: {error}"]
    try:
        status, lines = _ask(url)
    except (OSError, ValueError) as error:
        return [f"no answer from {url}/readyz: {error}"]
    return [] if status == 200 else lines or [f"{url}/readyz answers {status}"]


def _ask(url: str) -> tuple[int, list[str]]:
    """Status and lines of /readyz.

    Raises:
        OSError, ValueError: nobody answers, or what answers speaks no HTTP.
    """
    where = urlsplit(url)
    host, port = EVERYWHERE.get(where.hostname or "", where.hostname or ""), where.port
    if where.scheme == "https":
        connection: http.client.HTTPConnection = _encrypted(host, port)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return answer.status, answer.read(LONGEST_ANSWER).decode("utf-8", "replace").splitlines()
    except http.client.HTTPException as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _encrypted(host: str, port: int | None) -> http.client.HTTPSConnection:
    """Its certificate is not looked at: nothing secret is sent, and the address stands in the daemon's own folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=WAIT_S, context=context)


def tell(state: Path) -> int:
    """Print in one line what is missing; 0 where nothing is, else 1."""
    lacks = missing(state)
    line = "; ".join(lacks) or "ready"
    print("".join(letter if letter.isprintable() else " " for letter in line))  # noqa: T201  (a stranger may answer)
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(tell(Path(sys.argv[1])))
