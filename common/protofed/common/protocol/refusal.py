"""Why a call is denied for longer than a moment: metadata of the answer, as gRPC's code is one for several causes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

KEY = "protofed-denied"
_TEXT_OF_0_2_0 = " was revoked on "  # in the answer of a server that sends no such metadata


class DeniedBecause(StrEnum):
    """Why a site's calls are denied until somebody acts."""

    REVOKED = "revoked"  # its certificate, for ever
    EXCLUDED = "excluded"  # the site, by the operator


def denied_metadata(because: DeniedBecause | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an answer; none for other refusals."""
    return () if because is None else ((KEY, because.value),)


def is_revoked(metadata: Iterable[Any] | None, text: str) -> bool:
    """Whether the answer to a denied call says that the caller's certificate was revoked; `text` is gRPC's details."""
    said = dict(metadata or ()).get(KEY)
    return said == DeniedBecause.REVOKED if said is not None else _TEXT_OF_0_2_0 in text
