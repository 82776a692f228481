"""What the server sees of a site's update, part by part, with and without secure aggregation: read from its form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import NOT_ON_THE_WIRE, Part
from protofed.common.secure_aggregation.linear_form import SumForm, read_form
from protofed.server.rounds.machine.rules import min_cohort

NOTHING = "Nothing: it is in no sum."


@dataclass(frozen=True)
class PartView:
    """One part of an update.

    Attributes:
        aggregated: what the server sees with secure aggregation; empty: the method has none.
        plain: and without; empty: it is never sent without.
    """

    part: Part
    aggregated: str
    plain: str


@dataclass(frozen=True)
class ServerView:
    """What the server of a run sees.

    Attributes:
        secure: the run has secure aggregation.
        parts: in the order of the update.
        whole: what it sees besides of a run with secure aggregation, in sentences; none where the method has none.
        why_not: why the method has no sums; empty: it has.
    """

    secure: bool
    parts: tuple[PartView, ...]
    whole: tuple[str, ...]
    why_not: str

    def seen(self, part: PartView) -> str:
        """What the server of this run sees of a part."""
        return part.aggregated if self.secure else part.plain


def server_view(recipe: Recipe, half: object, parts: Iterable[Part], reads: str) -> ServerView:
    """What the server sees of updates with such parts.

    Args:
        half: the client or the server algorithm of the run's method.
        reads: what it takes to read this site's update alone, as of `partners.who_reads`.

    Raises:
        ConfigError: the run has secure aggregation, and the method has no linear form.
    """
    secure = recipe.federation.secure
    try:
        form = read_form(half, recipe.method.name)
    except ConfigError as error:
        if secure:
            raise
        rows = (PartView(part, "", _plain(part)) for part in dict.fromkeys(parts))
        return ServerView(secure, tuple(rows), (), str(error))
    fewest = recipe.federation.min_contributors
    views = (PartView(part, _summed(form, part, fewest), _plain(part)) for part in dict.fromkeys(parts))
    return ServerView(secure, tuple(views), tuple(_whole(recipe, form, reads)), "")


def _plain(part: Part) -> str:
    return "" if part in NOT_ON_THE_WIRE else part.discloses


def _summed(form: SumForm, part: Part, fewest: int) -> str:
    """The sums that a part is in; by class those of `fewest` contributors at least."""
    sums = []
    if part in form.means:
        weighted = ", weighted by their numbers of examples" if form.weighting == "examples" else ""
        sums.append(f"the mean over the sites of the sum{weighted}")
    if form.rows is not None and part is form.rows.part:
        sums.append(f"the mean of each class over the sites that hold it, of classes with {fewest} such sites or more")
    if part in form.mixtures:
        by = "that have the class" if form.shares is Part.CLASS_PRESENCE else "weighted by their shares of the class"
        sums.append(f"a mean for each class over the sites {by}, of classes with {fewest} such sites or more")
    if part is form.shares:
        what = "how many sites have each class" if part is Part.CLASS_PRESENCE else "the sum of the sites' shares"
        sums.append(f"{what}, of classes with {fewest} such sites or more")
    return f"{'; '.join(sums).capitalize()}. {_alone(form, part)}" if sums else NOTHING


def _alone(form: SumForm, part: Part) -> str:
    """What the sums with a part tell of one site."""
    if part in form.means and part in form.mixtures and form.shares is Part.CLASS_PRESENCE:
        return "If all sites but one have a class, the difference of two sums is that site's part, without its name."
    if form.rows is not None and part is form.rows.part:
        return "Of this site alone: nothing, unless others of its group, or the other sites with a class, help."
    return "Of this site alone: nothing, unless others of its group help."


def _whole(recipe: Recipe, form: SumForm, reads: str) -> Iterator[str]:
    yield f"A sum is over {min_cohort(recipe.federation)} sites or more. The server sees who took part, and when."
    if form.by_class:
        yield "The server sees how many sites hold each class, not which sites."
    if form.weighting == "examples":
        yield "The server sees how many examples all sites of a sum have together."
    if (group := recipe.federation.sum_group) > 1:
        yield f"This site is in the same sums as {group - 1} others or more, its group, in all runs (sum_group)."
    else:
        yield "Two sums may differ by one site, and so tell what this site sent (sum_group = 1)."
    yield reads
    yield "The sum itself is not hidden. With few sites it tells much about each."
