"""The job `admission` of compose.yaml: the operator registers the certificates that the job `certificates` made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from protofed.common.errors import ConfigError, DeniedError, ProtofedError
from protofed.common.protocol.messages import Role
from protofed.common.protocol.roles import OPERATOR
from protofed.deploy.operator.connection import Operator

IDENTITY = Path("/etc/protofed/identity")
ADMIT, PREVIOUS = "admit", "previous"  # as in certificates.py
EVALUATOR = "evaluator"  # the service of compose.yaml that scores; all other sites train


def admit(server: str, identity: Path) -> None:
    """Register the certificates of all parties.

    A server refuses an operator's renewed certificate until it is registered; then the previous one registers it first.

    Raises:
        ProtofedError: the server does not answer, or accepts neither of the operator's certificates.
    """
    # The operator's first: `certificates[:1]` below.
    certificates = sorted((identity / ADMIT).glob("*.pem"), key=lambda path: path.stem != "operator")
    try:
        _register(server, identity, certificates)
    except DeniedError:
        if not (identity / PREVIOUS).is_dir():
            raise
        _register(server, identity / PREVIOUS, certificates[:1])
        _register(server, identity, certificates)


def _register(server: str, identity: Path, certificates: list[Path]) -> None:
    with Operator(server, identity) as operator:
        for path in certificates:
            try:
                # `renewal`: the job `certificates` made each of them, and renews them under the same names.
                operator.register(path.read_text(encoding="ascii"), _roles(path.stem), renewal=True)
                sys.stdout.write(f"{path.stem}: registered\n")
            except ConfigError as error:  # a revoked one stays out, and must not keep out the others
                sys.stdout.write(f"{path.stem}: not registered: {error}\n")


def _roles(party: str) -> list[str]:
    """Sites have none here: the first time they become trainers, later they keep what the operator gave them."""
    return {OPERATOR: [OPERATOR], EVALUATOR: [Role.EVALUATOR.value]}.get(party, [])


if __name__ == "__main__":
    try:
        admit(os.environ["PROTOFED_OPERATOR_SERVER"], IDENTITY)
    except ProtofedError as error:
        sys.exit(f"admission: {error}")
