"""What speaks against a run's models, in lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protofed.common.errors import count

MOST_SITES = 3  # sites' own models that are named: a run may have hundreds


class Warned(Protocol):
    """A warning of a server, or one that a server sent."""

    @property
    def code(self) -> str:
        """By which the runbook explains it."""

    @property
    def site(self) -> str | None:
        """Whose own model it is; None or empty: the global one."""

    @property
    def text(self) -> str:
        """One sentence."""


def sentences(warnings: Sequence[Warned], option: str = "--json") -> list[str]:
    """A line for each thing that speaks against the global model, and for the first few sites' own models.

    Args:
        option: of the command that shows them, by which it shows all.
    """
    of_global = [warning for warning in warnings if not warning.site]
    own = [warning for warning in warnings if warning.site]
    lines = [f"{warning.code}: {warning.text}" for warning in (*of_global, *own[:MOST_SITES])]
    return lines + ([f"and {count(len(own) - MOST_SITES, 'own model')} more: {option}"] if own[MOST_SITES:] else [])
