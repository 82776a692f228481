"""Builds the sites of a `RunSnapshot` from the server's replies."""

from __future__ import annotations

from collections.abc import Iterable

from protofed.deploy.operator.snapshot import FAILED, Attention, SiteSnapshot
from protofed.protos.v1 import operator_pb2 as pb

OPEN = ("invited", "started")
DONE = ("reported", "set-aside")
_BAD_STATUSES = ("excluded", "silent", "revoked", "expired", "not-yet-valid")
# Of an invited site that the server does not list; -1 is unknown, where protobuf's default of 0 would be a number.
_NEVER = pb.SiteInfo(status="away", progress_age_s=-1.0, progress=-1.0)


def sites(reported: Iterable[pb.SiteInfo], newest: pb.RoundInfo | None, *, ended: bool) -> tuple[SiteSnapshot, ...]:
    """All sites that the server knows or that were invited to the newest attempt, those with problems first.

    Args:
        reported: the server's list of sites.
        newest: the newest attempt; None: there is none.
        ended: the run is over: sites without a daemon and without a task are left out.
    """
    tasks = {} if newest is None else _site_tasks(newest)
    infos = {info.site: info for info in reported}
    rows = [_site(name, infos.get(name, _NEVER), tasks.get(name)) for name in {**infos, **tasks}]
    if ended:
        rows = [site for site in rows if site.task_status or site.status != "away"]
    return tuple(sorted(rows, key=_order))


def printable(text: str) -> str:
    """Text from a site or another operator, without control characters: a terminal would obey them."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _site_tasks(newest: pb.RoundInfo) -> dict[str, pb.SiteTask]:
    """One task for each site of an attempt: the open one, else the first that failed, else the last."""
    tasks: dict[str, pb.SiteTask] = {}
    for task in newest.sites:
        chosen = tasks.get(task.site)
        if chosen is None or task.task_status in OPEN or chosen.task_status not in (*OPEN, *FAILED):
            tasks[task.site] = task
    return tasks


def _site(name: str, info: pb.SiteInfo, task: pb.SiteTask | None) -> SiteSnapshot:
    task_status = "" if task is None else task.task_status
    return SiteSnapshot(
        site=name,
        status=info.status,
        doing=printable(_doing(info)),
        task_status=task_status,
        reason="" if task is None else printable(task.reason),
        care=_care(info.status, task_status),
        progress=_progress(info, task_status),
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
    """Progress of the task of this attempt; a heartbeat may still be about an earlier task."""
    if task_status in DONE:
        return 1.0
    return info.progress if task_status in OPEN and info.progress >= 0 else None


def _order(site: SiteSnapshot) -> tuple[Attention, float, str]:
    # The slowest first: the round waits for it. Unknown progress counts as less than none.
    return site.care, -1.0 if site.progress is None else site.progress, site.site
