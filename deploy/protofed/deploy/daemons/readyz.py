"""Asks the daemon of a state folder whether it is ready.

`python -I -m protofed.deploy.daemons.readyz FOLDER` is the images' health check. It runs every few seconds beside a
working daemon, so it imports nothing but the standard library.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

PAUSE_FILE = ".pause.json"  # as client.policy.pause.FILE
ADDRESS_FILE = "metrics-address"  # as metrics_endpoint.METRICS_FILE, whose module imports too much
NO_ANSWER = "no answer"  # how the line begins
WAIT_S = 5.0  # for the connection, and for each read of the answer
LONGEST_ANSWER = 1 << 16  # bytes
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (a daemon that listens on all addresses)


def missing(state: Path) -> list[str]:
    """What the daemon of a state folder lacks, by its own /readyz; empty: it is ready."""
    if not state.is_dir():
        return [f"there is no folder {state}"]
    try:
        url = (state / ADDRESS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [f"no daemon with --metrics runs in {state}: it starts, has ended, or has another --state"]
    except (OSError, ValueError) as error:
        return [f"cannot read {state / ADDRESS_FILE}: {error}"]
    try:
        status, lines = _ask(url)
    except (OSError, ValueError) as error:
        return [f"{NO_ANSWER} from {url}/readyz: {error}"]
    return [] if status == 200 else lines or [f"{url}/readyz answers {status}"]


def _ask(url: str) -> tuple[int, list[str]]:
    """Status and lines of /readyz.

    Raises:
        OSError, ValueError: nobody answers, or what answers speaks no HTTP.
    """
    address = urlsplit(url)
    host, port = LOOPBACK_OF.get(address.hostname or "", address.hostname or ""), address.port
    if address.scheme == "https":
        connection: http.client.HTTPConnection = _encrypted(host, port)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status, response.read(LONGEST_ANSWER).decode("utf-8", "replace").splitlines()
    except http.client.HTTPException as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _encrypted(host: str, port: int | None) -> http.client.HTTPSConnection:
    """A connection that does not check the certificate: nothing secret is sent, and the address is the daemon's own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=WAIT_S, context=context)


def report(state: Path, *, as_json: bool = False) -> int:
    """Print what is missing, or "ready", in one line; the exit code: 0 if nothing is missing, else 1.

    A site that a person has paused is ready, and the line says that it is paused.
    """
    reasons, paused = missing(state), pause_text(state)
    line = "; ".join(reasons) or (f"ready, but {paused}" if paused else "ready")
    if as_json:
        line = json.dumps({"ready": not reasons, "missing": reasons, "paused": paused or None})
    # Another program may have taken the port: what it answers must not control a terminal.
    print("".join(letter if letter.isprintable() else " " for letter in line))  # noqa: T201
    return 1 if reasons else 0


def pause_text(state: Path) -> str:
    """`paused since …` of a site that a person has paused; else empty."""
    try:
        pause = json.loads((state / PAUSE_FILE).read_bytes())
        until = pause["until"]
        if until is not None and datetime.fromisoformat(until) <= datetime.now(UTC):
            return ""
        return f"paused since {pause['at']}, until {until or '`protofed client resume`'}"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError):
        return f"paused: {state / PAUSE_FILE} cannot be read; `protofed client resume` removes it"


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1])))
