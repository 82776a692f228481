"""Roles that the registration of a certificate grants. What a caller claims grants none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from protofed.common.errors import ConfigError, short
from protofed.common.pki.certificate import Party
from protofed.common.protocol.messages import Role

OPERATOR: Final = "operator"
GRANTABLE: Final = {
    Party.SITE: (Role.TRAINER.value, Role.EVALUATOR.value),
    Party.OPERATOR: (OPERATOR,),
    Party.SERVER: (),
}


def check_roles(party: Party, roles: Iterable[str]) -> tuple[str, ...]:
    """The roles in the order of `GRANTABLE`, each once.

    Raises:
        ConfigError: a certificate of this party cannot have one of them.
    """
    requested, grantable = set(roles), GRANTABLE[party]
    if foreign := sorted(requested - set(grantable)):
        expected = " or ".join(grantable) or "none"
        raise ConfigError(f"role '{short(foreign[0])}' is none of a {party}; expected {expected}")
    return tuple(role for role in grantable if role in requested)
