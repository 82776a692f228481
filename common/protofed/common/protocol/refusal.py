"""Why a call is denied for longer than a moment: metadata of the answer, as gRPC's code is one for several causes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

KEY = "protofed-denied"


class DeniedBecause(StrEnum):
    """Why a site's calls are denied until somebody acts."""

    REVOKED = "revoked"  # its certificate, for ever
    EXCLUDED = "excluded"  # the site, by the operator


def denied_metadata(because: DeniedBecause | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an answer; none for other refusals."""
    return () if because is None else ((KEY, because.value),)


def is_revoked(metadata: Iterable[Any] | None) -> bool:
    """Whether the answer to a denied call says that the caller's certificate was revoked."""
    return dict(metadata or ()).get(KEY) == DeniedBecause.REVOKED
