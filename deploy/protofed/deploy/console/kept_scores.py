"""That sites sent no scores of their own models, in words: for `runs show`, `runs watch` and reports."""

from __future__ import annotations

from protofed.deploy.console.tables import count


def kept_sentence(sites: int, of: int | None = None) -> str:
    """For people who would look for these scores, without a full stop. The reason is known at the sites alone.

    Args:
        of: the number of sites that might have sent some; None: it is not told.
    """
    some = count(sites, "site") if of is None else "The sites" if sites == of else f"{sites} of {of} sites"
    whose = "its own model" if some == "1 site" else "their own models"
    return f"{some} sent no scores of {whose} (a policy may keep them)"
