"""Which sites a run could have, and why one of them is not there."""

from __future__ import annotations

from protofed.common.payload import SiteId
from protofed.common.pki.certificate import Party
from protofed.common.protocol.messages import PauseReason, Role
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.waiting import NO_TRAINER


def possible_trainers(presence: SitePresence, certificates: Certificates) -> frozenset[SiteId]:
    """Sites that may train: registered ones with that role, or in plain text those that ever enrolled in it.

    Excluded sites are none. May be called from any thread.
    """
    rows = certificates.all()
    if rows:  # a server with TLS: its operator at least is registered
        valid = (row for row in rows if row.party == Party.SITE and certificates.status(row) == "valid")
        sites = {SiteId(row.name) for row in valid if Role.TRAINER in row.roles}
    else:
        sites = {site for site, roles in presence.known().items() if Role.TRAINER in roles}
    return frozenset(site for site in sites if presence.exclusion(site) is None)


def absences(presence: SitePresence, certificates: Certificates, stall_timeout_s: float) -> dict[SiteId, str]:
    """Why each site that is known and not alive as a trainer is not. May be called from any thread."""
    rows = [row for row in certificates.all() if row.party == Party.SITE]
    status = {SiteId(row.name): certificates.status(row) for row in sorted(rows, key=lambda row: row.added_at)}
    status |= {SiteId(row.name): "valid" for row in rows if certificates.status(row) == "valid"}
    granted = {SiteId(row.name): row.roles for row in rows}
    known = presence.known()
    alive = presence.alive(Role.TRAINER, stall_timeout_s)
    found: dict[SiteId, str] = {}
    for site in {*known, *status} - alive:
        roles = {*known.get(site, ()), *granted.get(site, ())}
        trains = not roles or Role.TRAINER in roles  # one that was excluded before it enrolled has none
        found[site] = _why(presence, site, status.get(site, ""), trains=trains, enrolled=site in known)
    return found


def _why(presence: SitePresence, site: SiteId, certificate: str, *, trains: bool, enrolled: bool) -> str:
    if not trains:
        return NO_TRAINER
    if certificate not in ("", "valid"):
        return f"certificate {certificate}"
    if presence.exclusion(site) is not None:
        return "excluded"
    if presence.look(site) is None:
        return "away" if enrolled else "never enrolled"
    if (reason := presence.pause_reason(site)) is not PauseReason.NONE:
        return reason.value
    return "silent" if Role.TRAINER in presence.roles(site) else NO_TRAINER
