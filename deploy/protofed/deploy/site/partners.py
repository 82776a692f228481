"""Who can read a site's update alone, in sentences; and the list of partners as its people see it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protofed.client.secure_aggregation.partners import CONFIRM, Confirmed, Partners
from protofed.client.secure_aggregation.sessions import FOLDER, Pinned, pinned_in
from protofed.common.errors import count
from protofed.common.payload import SiteId
from protofed.common.protocol.consortium import Consortium, changes
from protofed.common.secure_aggregation.keys import helpers_outside, helpers_within

TOLD = (
    "With a new group, the server can subtract the two groups' sums from each other. What is the same in all runs, "
    "such as which classes a site holds, it learns about the sites in which the groups differ. If they differ in one "
    "site, it learns this about a single site."
)
INVENTED = (
    "Whoever runs the server and signs certificates can invent the other sites of the group, and then read this "
    "site's own update."
)


def who_reads(
    own: SiteId, group: Collection[SiteId], listed: Consortium | None, least: int | None, *, required: bool | None
) -> str:
    """What it takes to learn one site's update alone, in a run with secure aggregation.

    Args:
        own: the site.
        group: of the site, for secure aggregation; empty: it has none yet.
        listed: the confirmed list; None: none is.
        least: sites of a group, by policy and recipe; None: these are not known.
        required: the policy asks for a confirmed list; None: the policy is not known.
    """
    if listed is None:
        return _without_list(least, required=required)
    if not group:
        chosen = "The server chooses the group at the first secure aggregation"
        if least is None:
            return f"{chosen}. Together with the others of the group, the server can then read this site's own update."
        together = (
            f"Together with {helpers_within(least)} or more partners of list {listed.number} that are in the group"
        )
        return f"{chosen}, {least} sites or more. {together}, the server can then read this site's own update."
    running = {one.site for one in listed.coordinating}
    inside = sorted(running.intersection(group) - {own})
    partners = sorted(set(group) - {own} - running)
    runs = (
        f"{listed.coordinator} runs the server and is in this site's group as {', '.join(inside)}. " if inside else ""
    )
    needed = helpers_within(len(group)) - len(inside)
    if needed <= 0 or not partners:
        return f"{runs}It can read this site's own update."
    some = "" if needed == len(partners) else f"{needed} of "
    within = f"{runs}The server can read this site's own update only together with {some}{listed.named(partners)}"
    return f"{within}{_outside(listed, group)}."


def _outside(listed: Consortium, group: Collection[SiteId]) -> str:
    """The other way in which a server can read a site's own update, as the end of a sentence; empty: there is none."""
    if (helpers := helpers_outside(len(group), len(listed.partners))) is None:
        return ""
    running = {one.site for one in listed.coordinating}.difference(group)
    if (needed := helpers - len(running)) > 0:
        return f", or with {count(needed, 'partner')} outside the group, if it lies about who is missing"
    return f", or alone, by its sites {', '.join(sorted(running))}, if it lies about who is missing"


def _without_list(least: int | None, *, required: bool | None) -> str:
    none = "No list of partners is confirmed here"
    match required:
        case True:
            helpers = "partners" if least is None else f"{helpers_within(least)} or more partners"
            then = f"With a confirmed list, {helpers} must help the server to read this site's own update."
            return f"{none}, so this site is in no secure aggregation. {then}"
        case False:
            return f"{none}. {INVENTED}"
        case None:
            waits = 'With partners = "confirmed" in its policy, this site is in no secure aggregation until one is.'
            return f'{none}. {waits} With "first-use": {INVENTED[0].lower()}{INVENTED[1:]}'


@dataclass(frozen=True)
class PartnersView:
    """What a state folder says of partners.

    Attributes:
        own: this site's identity for secure aggregation, in hexadecimal digits; empty: no daemon has started here.
        group: of the site, for secure aggregation; None: none yet.
    """

    own: str
    offered: Consortium | None
    confirmed: Confirmed | None
    group: Pinned | None

    @classmethod
    def of(cls, state: Path) -> PartnersView:
        """That of a state folder; nothing is written.

        Raises:
            StateError: a file is damaged.
        """
        partners = Partners(state)
        return cls(partners.own(), partners.offered(), partners.confirmed(), pinned_in(state / FOLDER))

    @property
    def listed(self) -> Consortium | None:
        """The confirmed list."""
        return None if self.confirmed is None else self.confirmed.consortium

    @property
    def site(self) -> SiteId:
        """This site, as the newest list that has its key calls it; empty: none has."""
        names = (
            one.site
            for known in (self.offered, self.listed)
            if known is not None
            for one in known.partners
            if one.identity == self.own
        )
        return next(names, "")

    @property
    def leaving(self) -> list[SiteId]:
        """Sites of this site's group that are not in the offered list: with it, the group ends."""
        if self.offered is None or self.group is None:
            return []
        return sorted(set(self.group.group) - self.offered.identities.keys())

    def asked(self) -> list[str]:
        """What a person reads before the offered list is confirmed; nothing where none is."""
        if self.offered is None:
            return []
        sentences = [*described(self.offered, with_code=False), *changes(self.listed, self.offered)]
        sentences.append(f"This site is {self.site} in it.")
        if self.leaving:
            leaving = ", ".join(self.leaving)
            sentences.append(f"This site's group ends, because {leaving} is no longer a partner. {TOLD}")
        return sentences

    def lines(self, least: int | None = None) -> list[str]:
        """Both lists, the group, and what it takes to read this site's update alone."""
        lines = list[str]()
        if self.offered is not None and self.offered != self.listed:
            lines += ["offered, not confirmed here:", *described(self.offered, with_code=False)]
            lines += [
                *changes(self.listed, self.offered),
                f"Ask the other hospitals whether this list is theirs, and {CONFIRM}.",
            ]
        if self.confirmed is not None:
            lines += [
                f"confirmed here {self.confirmed.at} by {self.confirmed.by}:",
                *described(self.confirmed.consortium),
            ]
        if self.group is not None:
            lines.append(f"group: {', '.join(self.group.group)}, since {self.group.at}, run {self.group.run}")
        return [*lines, self.who_reads(least)]

    def who_reads(self, least: int | None = None, *, required: bool | None = None) -> str:
        """What it takes to read this site's update alone; `least` and `required` as of the function."""
        group = () if self.group is None else self.group.group
        return who_reads(self.site, group, self.listed, least, required=required)

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "site": self.site,
            "identity": self.own,
            "offered": None if self.offered is None else asdict(self.offered),
            "confirmed": None
            if self.confirmed is None
            else {**plain(self.confirmed.consortium), "at": self.confirmed.at, "by": self.confirmed.by},
            "group": None if self.group is None else asdict(self.group),
        }


def described(listed: Consortium, *, with_code: bool = True) -> list[str]:
    """A list for people: its partners, who runs the server, and the code.

    Args:
        with_code: not of a list that a person is to confirm: what was heard is typed, and not what this machine shows.
    """
    running = {one.site for one in listed.coordinating}
    width = max(len(one.site) for one in listed.partners)
    rows = [
        f"  {one.site:<{width}}  {one.institution}{', which runs the server' if one.site in running else ''}"
        for one in listed.partners
    ]
    head = f"list {listed.number}, {count(len(rows), 'partner')}; {listed.coordinator} runs the server"
    return [head, *rows, *([f"code  {listed.code}"] if with_code else [])]


def plain(listed: Consortium) -> dict[str, Any]:
    """A list as plain values, with its code."""
    return {**asdict(listed), "digest": listed.digest, "code": listed.code}


NOBODY = PartnersView("", None, None, None)
