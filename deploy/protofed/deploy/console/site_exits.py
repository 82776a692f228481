"""Sites that were excluded or had their certificates revoked without a note of it: servers of 0.2.0 noted none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class SiteExit:
    """What a run's record has of a site, but for its interventions.

    Attributes:
        at: Unix time in seconds; None: it is not known.
    """

    site: str
    action: Literal["excluded", "revoked"]
    reason: str
    at: float | None = None


def unrecorded_exits(record: Mapping[str, Any]) -> Iterator[SiteExit]:
    """Exclusions as they are now, and revocations until the end of the run, that the record has no intervention of."""
    revoked = {done["site"] for done in record.get("interventions", ()) if done["action"] == "revoked"}
    ended_at = record["run"]["ended_at"] or float("inf")
    for site, fields in record["sites"].items():
        if fields["excluded"] and fields.get("excluded_at") is None:
            yield SiteExit(site, "excluded", fields["excluded"])
        revoked_at = fields.get("revoked_at")
        if revoked_at is not None and revoked_at <= ended_at and site not in revoked:
            yield SiteExit(site, "revoked", fields["revoked"], revoked_at)
