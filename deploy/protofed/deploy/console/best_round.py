"""The best round of a run, in words: for `runs show`, `runs watch`, `simulate` and exports."""

from __future__ import annotations

from dataclasses import dataclass

from protofed.common.errors import ConfigError, short


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
