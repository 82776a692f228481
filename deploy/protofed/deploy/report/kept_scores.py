"""That sites sent no scores of their own models, in words, wherever a report would have them."""

from __future__ import annotations

from protofed.deploy.console.kept_scores import kept_sentence
from protofed.deploy.report.record import RunRecord


def kept_scores(record: RunRecord) -> str | None:
    """That sites were asked for scores and sent none of their own models; None: no site did that."""
    if not record.keeping:
        return None
    told = kept_sentence(len(record.keeping), len(record.sites))
    return f"{told}: each site reads its own by `protofed client scores`."
