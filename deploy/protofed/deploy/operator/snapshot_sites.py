"""What the server says of its sites, as rows of a `Scene`."""

from __future__ import annotations

from collections.abc import Iterable

from protofed.deploy.operator.snapshot import FAILED, Attention, SiteSnapshot
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
    tasks = {} if newest is None else _site_tasks(newest)
    infos = {info.site: info for info in known}
    found = [_site(name, infos.get(name, _NEVER), tasks.get(name)) for name in {**infos, **tasks}]
    if ended:
        found = [site for site in found if site.task_status or site.status != "away"]
    return tuple(sorted(found, key=_order))


def printable(text: str) -> str:
    """What a peer or an operator wrote, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _site_tasks(newest: pb.RoundInfo) -> dict[str, pb.SiteTask]:
    """Of a site's tasks in an attempt, the open one, else the last one that went wrong, else the last."""
    found: dict[str, pb.SiteTask] = {}
    for task in newest.sites:
        before = found.get(task.site)
        if before is None or task.task_status in OPEN or before.task_status not in (*OPEN, *FAILED):
            found[task.site] = task
    return found


def _site(name: str, info: pb.SiteInfo, task: pb.SiteTask | None) -> SiteSnapshot:
    was = "" if task is None else task.task_status
    return SiteSnapshot(
        site=name,
        status=info.status,
        doing=printable(_doing(info)),
        task_status=was,
        reason="" if task is None else printable(task.reason),
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


def _care(status: str, task_status: str) -> Attention:
    if task_status in FAILED or status in _BAD_STATUSES or (status == "away" and task_status in OPEN):
        return Attention.BAD
    if status in ("held", "away"):
        return Attention.HELD
    return Attention.AWAITED if task_status in OPEN else Attention.WELL


def _progress(info: pb.SiteInfo, task_status: str) -> float | None:
    """Of the task of this attempt; what the daemon says of itself may still be about another."""
    if task_status in DONE:
        return 1.0
    return info.progress if task_status in OPEN and info.progress >= 0 else None


def _order(site: SiteSnapshot) -> tuple[Attention, float, str]:
    return site.care, -1.0 if site.progress is None else site.progress, site.site
