"""What every screen, page and report says of a run, in words: its best round, warnings, scores that sites keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protofed.common.errors import ConfigError, count, short

NOISE_KEEPS = "no PM(V), and no other score or loss of sites' own: they have no noise, and stay there (plan.dp)"
NOT_IN_A_SUM = "–"  # a secure sum tells neither a deviation nor the worst
MOST_SITES = 3  # sites' own models that are named: a run may have hundreds


@dataclass(frozen=True)
class BestSnapshot:
    """The best round by the score that judges a run's rounds.

    Attributes:
        kept: the best of the rounds whose states are kept; None: none is.
    """

    round: int
    score: str
    value: float
    kept: int | None


def best_sentence(best: BestSnapshot) -> str:
    """The best round in a line."""
    text = f"best: round {best.round}, {best.score} {best.value:.4f} (chosen by this score: optimistic)"
    if best.kept == best.round:
        return text
    left = "none is kept" if best.kept is None else f"the best that is kept is round {best.kept}"
    return f"{text}; its state is no longer kept, {left}"


def kept_best(run: str, best: BestSnapshot | None) -> int:
    """The number of the best round, whose state is to be taken.

    Raises:
        ConfigError: there is none, or its state is no longer kept.
    """
    if best is None:
        raise ConfigError(
            f"run '{short(run)}' has no best round: no round has a score that judges it (see federation.best_by); give "
            "a round's number"
        )
    if best.kept != best.round:
        instead = (
            "" if best.kept is None else f"; the best of those that are kept is round {best.kept}: give its number"
        )
        raise ConfigError(
            f"the best round of run '{short(run)}' is {best.round} ({best.score} {best.value:.4f}), and its state is "
            f"no longer kept{instead}"
        )
    return best.round


def from_sum(sites: int) -> str:
    """Where scores come from of which no site's own is known; without a full stop."""
    return f"mean over {count(sites, 'site')}, from a secure sum; no site's own score left it"


def summed_sentence(sites: int) -> str:
    """What scores are that a table shows with `NOT_IN_A_SUM`."""
    return f"scores without std and worst: {from_sum(sites)}"


def kept_sentence(sites: int, of: int | None = None) -> str:
    """For people who would look for these scores, without a full stop. The reason is known at the sites alone.

    Args:
        of: the number of sites that might have sent some; None: it is not told.
    """
    some = count(sites, "site") if of is None else "The sites" if sites == of else f"{sites} of {of} sites"
    whose = "its own model" if some == "1 site" else "their own models"
    return f"{some} sent no scores of {whose} (a policy may keep them)"


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


def warning_lines(warnings: Sequence[Warned], option: str = "--json") -> list[str]:
    """A line for each thing that speaks against the global model, and for the first few sites' own models.

    Args:
        option: of the command that shows them, by which it shows all.
    """
    of_global = [warning for warning in warnings if not warning.site]
    own = [warning for warning in warnings if warning.site]
    lines = [f"{warning.code}: {warning.text}" for warning in (*of_global, *own[:MOST_SITES])]
    return lines + ([f"and {count(len(own) - MOST_SITES, 'own model')} more: {option}"] if own[MOST_SITES:] else [])
