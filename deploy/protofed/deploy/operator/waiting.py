"""Why a run does not go on, as the operator's screens say it."""

from __future__ import annotations

from protofed.deploy.console.tables import span
from protofed.deploy.operator.snapshot import MissingSite, Waiting
from protofed.deploy.operator.snapshot_sites import printable
from protofed.protos.v1 import operator_pb2 as pb

BLOCKED = (
    "trainers",
    "required-sites",
    "evaluator",
    "back-off",
    "disk",
)  # reasons for which somebody has to do something


def waiting(info: pb.RunInfo) -> Waiting | None:
    """What the server says that a run waits for; None: nothing."""
    if not info.HasField("waiting"):
        return None
    sent = info.waiting
    return Waiting(
        reason=sent.reason,
        text=printable(sent.text),
        round=sent.round,
        needed=sent.needed,
        has=sent.has,
        missing=tuple(
            MissingSite(site.site, printable(site.why), printable(site.similar), site.required) for site in sent.missing
        ),
        behind=printable(sent.behind),
        seconds_left=sent.seconds_left if sent.HasField("seconds_left") else None,
    )


def sentence(what: Waiting) -> str:
    """All of it in a line, with the time that is left."""
    if what.seconds_left is None:
        return what.text
    left = span(what.seconds_left)
    match what.reason:
        case "back-off":
            return f"{what.text}, in {left}"
        case "updates" | "sum" | "refinement" | "scores":
            return f"{what.text}; {left} left"
        case _:
            return f"{what.text}; the run fails in {left} if that stays so"


def short(what: Waiting | None) -> str:
    """For a table's cell; empty for what other columns say: what the open round is waiting for."""
    return (
        ""
        if what is None or what.reason in ("updates", "sum", "refinement", "scores", "paused")
        else what.text.partition("; missing")[0]
    )


def blocked(what: Waiting | None) -> bool:
    """Whether the run stands still until somebody does something, or for a while."""
    return what is not None and what.reason in BLOCKED


def unmet(info: pb.RunInfo) -> tuple[str, ...]:
    """What the run needs and the sites that may take part cannot give."""
    return tuple(printable(warning) for warning in info.unmet)
