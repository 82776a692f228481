"""The groups of secure sums of a ledger in memory."""

from __future__ import annotations

import time

from protofed.common.secure_aggregation.groups import Group, Groups, in_order, members


class MemoryGroups:
    """Each with the time since when it is, and until when it was."""

    def __init__(self) -> None:
        self._spans: dict[tuple[Group, float], float | None] = {}  # since when, and until when; None: to this day

    def at(self, moment: float | None = None) -> Groups:
        """See `LedgerReader.groups`."""
        spans = ((group, since, until) for (group, since), until in self._spans.items())
        if moment is None:
            return in_order(group for group, _, until in spans if until is None)
        return in_order(group for group, since, until in spans if since <= moment and (until is None or until > moment))

    def keep(self, groups: Groups) -> None:
        """See `Ledger.keep_groups`."""
        known, now = members(self.at()), time.time()
        self._spans |= {(group, now): None for group in groups if len(group) > 1 and known.isdisjoint(group)}

    def dissolve(self, group: Group) -> None:
        """See `Ledger.dissolve`."""
        now = time.time()
        self._spans |= {key: now for key, until in self._spans.items() if key[0] == group and until is None}
