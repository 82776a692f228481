"""That sites keep the scores of their own models, in words, wherever a report would have them."""

from __future__ import annotations

from protofed.deploy.report.record import RunRecord


def kept_scores(record: RunRecord) -> str | None:
    """That sites keep the scores of their own models, and where these can be read; None: no site does."""
    if not (sites := record.keeping):
        return None
    some = f"{len(sites)} of {len(record.sites)} sites" if len(sites) < len(record.sites) else "The sites"
    return f"{some} keep the scores of their own models (their policies): each reads them by `protofed client scores`."
