"""What the server says of its sites, as rows of a `Scene`."""

from __future__ import annotations

from collections.abc import Iterable

from protofed.deploy.operator.snapshot import AMISS, Attention, SiteSnapshot
from protofed.protos.v1 import operator_pb2 as pb

OPEN = ("invited", "started")
DONE = ("reported", "set-aside")
_BAD_STATUSES = ("excluded", "silent", "revoked", "expired", "not-yet-valid")
_NEVER = pb.SiteInfo(status="away", progress_age_s=-1.0, progress=-1.0)


def sites(known: Iterable[pb.SiteInfo], newest: pb.RoundInfo | None, *, ended: bool) -> tuple[SiteSnapshot, ...]:
    """Those that are there or were invited to the newest attempt, the worst first.

    Args:
        ended: the run has; nobody waits for a site any more.
    """
    fates = {} if newest is None else _fates(newest)
    infos = {info.site: info for info in known}
    found = [_site(name, infos.get(name, _NEVER), fates.get(name)) for name in {**infos, **fates}]
    if ended:
        found = [site for site in found if site.fate or site.status != "away"]
    return tuple(sorted(found, key=_order))


def printable(text: str) -> str:
    """What a peer or an operator wrote, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _fates(newest: pb.RoundInfo) -> dict[str, pb.SiteFate]:
    """Of a site's tasks in an attempt, the open one, else the last one that went wrong, else the last."""
    found: dict[str, pb.SiteFate] = {}
    for fate in newest.sites:
        before = found.get(fate.site)
        if before is None or fate.fate in OPEN or before.fate not in (*OPEN, *AMISS):
            found[fate.site] = fate
    return found


def _site(name: str, info: pb.SiteInfo, fate: pb.SiteFate | None) -> SiteSnapshot:
    was = "" if fate is None else fate.fate
    return SiteSnapshot(
        site=name,
        status=info.status,
        doing=printable(_doing(info)),
        fate=was,
        reason="" if fate is None else printable(fate.reason),
        care=_care(info.status, was),
        progress=_progress(info, was),
        bytes_moved=info.bytes_moved,
        still_s=None if info.progress_age_s < 0 else info.progress_age_s,
        telemetry=dict(sorted(info.telemetry.items())),
    )


def _doing(info: pb.SiteInfo) -> str:
    match info.status:
        case "excluded":
            return f"excluded: {info.excluded}"
        case "held" | "silent":
            return f"{info.status}: {info.activity_text}"
        case "away":
            return "no daemon since the server started"
        case "revoked" | "expired" | "not-yet-valid":
            return f"certificate {info.status}" + (f": {info.activity_text}" if info.activity_text else "")
        case _:
            return info.activity_text or info.status


def _care(status: str, fate: str) -> Attention:
    if fate in AMISS or status in _BAD_STATUSES or (status == "away" and fate in OPEN):
        return Attention.BAD
    if status in ("held", "away"):
        return Attention.HELD
    return Attention.AWAITED if fate in OPEN else Attention.WELL


def _progress(info: pb.SiteInfo, fate: str) -> float | None:
    """Of the task of this attempt; what the daemon says of itself may still be about another."""
    if fate in DONE:
        return 1.0
    return info.progress if fate in OPEN and info.progress >= 0 else None


def _order(site: SiteSnapshot) -> tuple[Attention, float, str]:
    return site.care, -1.0 if site.progress is None else site.progress, site.site
