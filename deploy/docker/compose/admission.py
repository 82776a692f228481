"""The job `admission` of compose.yaml: the operator lets in the certificates that the job `certificates` has made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from protofed.common.errors import ConfigError, DeniedError, ProtofedError
from protofed.deploy.operator.connection import Operator

IDENTITY = Path("/etc/protofed/identity")
ADMIT, PREVIOUS = "admit", "previous"  # as in certificates.py


def admit(server: str, identity: Path) -> None:
    """Register everybody; an operator whose own certificate is new is let in by the previous one first.

    Raises:
        ProtofedError: the server does not answer, or takes neither of the operator's certificates.
    """
    waiting = sorted((identity / ADMIT).glob("*.pem"), key=lambda path: path.stem != "operator")
    try:
        _register(server, identity, waiting)
    except DeniedError:
        if not (identity / PREVIOUS).is_dir():
            raise
        _register(server, identity / PREVIOUS, waiting[:1])
        _register(server, identity, waiting)


def _register(server: str, identity: Path, waiting: list[Path]) -> None:
    with Operator(server, identity) as operator:
        for path in waiting:
            try:
                operator.register(path.read_text(encoding="ascii"))
                sys.stdout.write(f"{path.stem}: let in\n")
            except ConfigError as error:  # it was revoked: that is meant, and the others are let in
                sys.stdout.write(f"{path.stem}: not let in: {error}\n")


if __name__ == "__main__":
    try:
        admit(os.environ["PROTOFED_OPERATOR_SERVER"], IDENTITY)
    except ProtofedError as error:
        sys.exit(f"admission: {error}")
