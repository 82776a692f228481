"""That sites sent no scores of their own models, in words, wherever a report would have them."""

from __future__ import annotations

from protofed.deploy.report.record import RunRecord


def kept_scores(record: RunRecord) -> str | None:
    """That sites were asked for scores and sent none of their own models; None: no site did that.

    A record does not have their policies, which are the usual reason.
    """
    if not (sites := record.keeping):
        return None
    some = f"{len(sites)} of {len(record.sites)} sites" if len(sites) < len(record.sites) else "The sites"
    return (
        f"{some} sent no scores of their own models, as policies that keep them have it: each site reads its own by "
        "`protofed client scores`."
    )
