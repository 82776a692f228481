"""That sites sent no scores of their own models, or only in a sum, and why, in words: for `runs …` and reports."""

from __future__ import annotations

from protofed.common.errors import count

NOISE_KEEPS = "no PM(V), and no other score or loss of sites' own: they have no noise, and stay there (plan.dp)"
NOT_IN_A_SUM = "–"  # a secure sum tells neither a deviation nor the worst


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
