"""What can be wrong with an identity, by name: a program that reads errors has no need to read their prose."""

from __future__ import annotations

from enum import StrEnum

from protofed.common.errors import ConfigError


class IdentityProblem(StrEnum):
    """Of an identity's folder."""

    MISSING = "identity-missing"
    UNREADABLE = "identity-unreadable"
    ANOTHERS = "identity-of-another"  # party, site or use
    KEY_OPEN = "key-readable-by-others"
    KEY_OTHER = "key-mismatch"
    EARLY = "certificate-not-yet-valid"
    EXPIRED = "certificate-expired"
    AUTHORITY = "certificate-of-another-authority"
    AUTHORITY_DATES = "authority-not-valid"


class IdentityError(ConfigError):
    """An identity that cannot be used."""

    def __init__(self, flaw: IdentityProblem, message: str) -> None:
        super().__init__(message)
        self.flaw = flaw
