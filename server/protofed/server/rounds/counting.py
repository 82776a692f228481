"""Which accepted updates of a round count, and with how many examples: pure functions of its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median_high, median_low

from protofed.common.codec import Digest
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TaskKind
from protofed.server.storage.rows import UpdateRow

PAIR = 2


def refinement(accepted: Iterable[UpdateRow]) -> tuple[list[UpdateRow], dict[SiteId, str]]:
    """The evaluator's update that counts or, while none does, why those of before do not; it may be asked twice."""
    rows = [row for row in accepted if row.task.kind is TaskKind.REFINE]
    used = [row for row in rows if row.set_aside is None]
    return used, {} if used else {row.task.site: row.set_aside or "" for row in rows}


def outliers(norms: Mapping[SiteId, float], factor: float | None) -> dict[SiteId, str]:
    """The accepted updates of a cohort that are set aside, each with the reason.

    An update is set aside if its norm exceeds `factor` times the median of its cohort's, the upper one of an even
    number: for a factor of at least 1 that is always fewer than half. Of two updates it is the larger one, by the
    smaller: which of them is the broken one cannot be told, and an update that is too small does less harm. Nobody is
    set aside where the median is zero: most updates then do not say how large a change should be, and whoever did
    train would be the one to go (`max_relative_norm` still holds).

    Args:
        norms: of all accepted updates of one round, as `examined` gives them.
        factor: None or 0 turns the rule off.
    """
    if not factor or not norms:
        return {}
    median = median_low(norms.values()) if len(norms) == PAIR else median_high(norms.values())
    return {
        site: f"its norm of {norm:.6g} is more than {factor:g} times the cohort's median of {median:.6g}"
        for site, norm in sorted(norms.items())
        if 0 < factor * median < norm
    }


def weight_cap(rows: Iterable[UpdateRow], ratio: float) -> float:
    """The largest example count that an update of these counts with: `ratio` times the median of their claims.

    The median is the lower one of an even number: of two sites, neither counts more than `ratio` times the other.
    Infinite where no site discloses its count.
    """
    claims = [row.weight for row in rows if row.weight is not None]
    return ratio * median_low(claims) if claims else math.inf


def capped(row: UpdateRow, most: float) -> UpdateRow:
    """The update as the aggregation counts it; the ledger keeps what its site claims."""
    return row if row.weight is None or row.weight <= most else replace(row, weight=most)


def disagreeing(models: Mapping[SiteId, Digest], quorum: int) -> dict[SiteId, str]:
    """The first models that do not count, each with the reason; all, unless one alone has the most sites, and a quorum.

    Args:
        models: digest by site. A payload has one encoding, so equal models have equal digests.
    """
    makers = Counter(models.values())
    most = max(makers.values(), default=0)
    best = [model for model, count in makers.items() if count == most >= quorum]
    cause = "different versions of PyTorch or protofed, or a model of its own"
    return {
        site: f"its first model {model[:16]}… is that of {makers[model]} of {len(models)} sites: {cause}"
        for site, model in sorted(models.items())
        if best != [model]
    }
