"""The round that a test's server half makes a state in."""

from __future__ import annotations

from protofed.server.method import RoundContext


def round_context(classes: int = 2, **fields: int) -> RoundContext:
    """Round 1 of 1, of two sites; on demand another."""
    return RoundContext(**{"round": 1, "rounds": 1, "sites": 2, "classes": classes, "seed": 0, **fields})
