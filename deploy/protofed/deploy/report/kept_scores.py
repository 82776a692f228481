"""That sites sent no scores of their own models, in words, wherever a report would have them."""

from __future__ import annotations

from protofed.deploy.console.kept_scores import NOISE_KEEPS, kept_sentence
from protofed.deploy.report.record import RunRecord

READ_THERE = "each site reads its own by `protofed client scores`"


def kept_scores(record: RunRecord) -> str | None:
    """That sites sent no scores of their own models though asked, or as the run has noise; None: neither is so."""
    if record.kept_by_noise:
        return f"{NOISE_KEEPS[0].upper()}{NOISE_KEEPS[1:]}; {READ_THERE}."
    if not record.keeping:
        return None
    told = kept_sentence(len(record.keeping), len(record.sites))
    return f"{told}: {READ_THERE}."
