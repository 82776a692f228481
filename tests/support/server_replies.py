"""Hand-made answers of a server, for those that watch a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from protofed.deploy.operator.snapshot import RunSnapshot
from protofed.deploy.operator.snapshot_builder import ServerReply, WatchHistory, snapshot
from protofed.protos.v1 import operator_pb2 as pb

RUN = "digits-fednh"
NOW = 1000.0


def info(**changes: Any) -> pb.RunInfo:
    """A run in round 7 of 20, queued at second 890."""
    known = {"run": RUN, "method": "fednh", "status": "running", "phase": "collecting", "round": 7, "rounds": 20}
    return pb.RunInfo(**{**known, "began_at": 890.0, **changes})


def attempt(round: int, outcome: str, opened_at: float, closed_at: float = 0.0, **tasks: Any) -> pb.RoundInfo:
    """One attempt at a round, with the task of each site's fit (`_` for `-` in both)."""
    row = pb.RoundInfo(round=round, attempt=1, outcome=outcome, opened_at=opened_at, closed_at=closed_at)
    for site, task in tasks.items():
        row.sites.add(site=site.replace("_", "-"), kind="fit", task_status=task.replace("_", "-"))
    return row


def published(*times: float, first: int = 1, **tasks: Any) -> list[pb.RoundInfo]:
    """Rounds that were opened and published at these times, one after the other."""
    return [attempt(first + index, "published", *pair, **tasks) for index, pair in enumerate(pairwise(times))]


def site(name: str, status: str = "working", doing: str = "training, epoch 2/5", **changes: Any) -> pb.SiteInfo:
    """A site that trains; 2 of its 5 epochs are done."""
    known = {"roles": ["trainer"], "progress_age_s": 3.0, "progress": 0.4, "bytes_moved": 12_300_000}
    return pb.SiteInfo(**{**known, "site": name, "status": status, "activity_text": doing, **changes})


def score(name: str, mean: float, **changes: Any) -> pb.Score:
    known: dict[str, Any] = {"name": name, "mean": mean, "std": 0.01, "worst": mean - 0.1, "sites": 5}
    return pb.Score(**{**known, **changes})


def answer(
    rounds: Sequence[pb.RoundInfo] = (),
    sites: Sequence[pb.SiteInfo] = (),
    scores: Mapping[int, Sequence[pb.Score]] | None = None,
    runs: Sequence[pb.RunInfo] = (),
    **changes: Any,
) -> ServerReply:
    """What a server says of a run; `scores` by round, of which it tells the newest."""
    newest = max(scores or {0: []})
    detail = pb.RunDetail(info=info(**changes), rounds=rounds, attempts=len(rounds), scored_round=newest)
    detail.scores.extend((scores or {newest: []})[newest])
    return ServerReply(detail, sites, runs)


def snapshot_of(*answers: ServerReply, now: float = NOW) -> RunSnapshot:
    """The last answer as a snapshot, of who saw the others, too."""
    history = WatchHistory()
    for one in answers:
        history = history.after(one)
    return snapshot(answers[-1], history, now)


def mixed_reply(sites: int = 6) -> ServerReply:
    """Round 7 is tried again: of four sites each one reported, trains, failed, or was just invited; a site more is
    excluded. Round 4 was degraded.
    """
    names = [f"site-{number:02d}" for number in range(sites)]
    everyone: dict[str, Any] = dict.fromkeys(names, "reported")
    rounds = published(910, 920, 930, 940, 950, 960, 970, **everyone)
    rounds[3].outcome = "degraded"
    for task in rounds[3].sites[1:2]:
        task.task_status, task.reason = "late", "epoch 1/3 [/]"
    rounds.append(attempt(7, "abandoned", 970, 980))
    rounds[-1].reason = "no quorum: 2 of 4"
    tasks = ("reported", "started", "failed", "invited")
    now: dict[str, Any] = {name: tasks[number % 4] for number, name in enumerate(names)}
    again = attempt(7, "open", 985, **now)
    again.attempt = 2
    for task in again.sites:
        task.reason = "[red]out-of-memory" if task.task_status == "failed" else ""
    rounds.append(again)
    out = site(
        "hospital-with-a-rather-long-name-indeed",
        "excluded",
        "",
        excluded="[bold]wrong data\x1b[2J",
        **dict.fromkeys(("progress", "progress_age_s"), -1.0),
    )
    out.bytes_moved = 0
    machines = {"gpu_memory_bytes": 3.2e9, "disk_free_bytes": 1.2e11}
    there = [site(name, telemetry=machines) for name in names]
    scores = {6: [score("global.accuracy", 0.9), score("personal.pm_v", 0.8), score("global.recall.3", 0.1)]}
    counts: dict[str, Any] = {"invited": sites, "reported": -(-sites // 4), "degraded": 1, "abandoned": 1}
    return answer(rounds, [*there, out], scores, received_bytes=12_300_000, sent_bytes=45_600_000, **counts)
