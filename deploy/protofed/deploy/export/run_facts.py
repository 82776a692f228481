"""What a model card says of the run behind a model, from the run's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from protofed.common.errors import count
from protofed.common.protocol.messages import score_family
from protofed.common.statistics import recorded_spreads
from protofed.deploy.console.run_words import MOST_SITES, BestSnapshot

Choice: TypeAlias = Literal["newest", "given", "best"]
ROUND_COUNTS = ("published", "degraded")
MOST_LEFT = 12  # sites that a card names


@dataclass(frozen=True)
class RunFacts:
    """The run of an exported model, as the server recorded it.

    Attributes:
        status: completed, failed, aborted, paused or "going on".
        reason: why it failed, was aborted or stopped early.
        by: the operator who aborted it; empty: nobody did, or the name is not known.
        ended: date and time, UTC; empty: it has not ended.
        done, planned: rounds.
        contributors: sites of which updates were used up to the model's round.
        warnings: signs of a useless model, the first ones, each with the round of which it was said.
        chosen: how the model's round was chosen.
        best: the best round by the score that judges the run's rounds; None: none has it.
        values: mean of that score, by round.
        left: what became of sites that were excluded or had their certificates revoked, a sentence each.
    """

    status: str
    reason: str
    by: str
    ended: str
    done: int
    planned: int
    contributors: Sequence[str] = ()
    warnings: Sequence[tuple[int, str]] = ()
    left: Sequence[str] = ()
    chosen: Choice = "newest"
    best: BestSnapshot | None = None
    values: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any], round: int) -> RunFacts:
        """From a run's record, for its model of this round."""
        run = record["run"]
        counted = [one for one in record["rounds"] if one["round"] and one["outcome"] in ROUND_COUNTS]
        done = record.get("interventions", ())
        best = None if record.get("best") is None else BestSnapshot(**record["best"])
        return cls(
            status=str(run["status"]),
            reason="" if run["reason"] == run["status"] else run["reason"],
            by=next((one["operator"] for one in reversed(done) if one["action"] == "aborted"), ""),
            ended=_date(run["ended_at"]) if run["ended_at"] else "",
            done=len(counted),
            planned=record["recipe"]["rounds"],
            contributors=_contributors([one for one in counted if one["round"] <= round]),
            warnings=_warnings(record),
            left=_left(record),
            best=best,
            values={} if best is None else _means(record, best.score),
        )


def _means(record: Mapping[str, Any], score: str) -> dict[int, float]:
    """By round; a score of a single class is in the record of two rounds only, the newest and the best."""
    by_class = [
        entry
        for entry in (record["classes"]["newest"], record["classes"]["best"])
        if entry["sites"] or entry.get("sums")
    ]
    entries = record["scores"] if score_family(score) == score else by_class
    found = {entry["round"]: recorded_spreads(entry) for entry in entries}
    return {number: by_name[score].mean for number, by_name in found.items() if score in by_name}


def _contributors(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    tasks = [task for attempt in attempts for task in attempt["tasks"]]
    return sorted({task["site"] for task in tasks if (task["kind"], task["task_status"]) == ("fit", "reported")})


def _warnings(record: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Of the global model all, of sites' own models the first few: hundreds of sites may have one each."""
    found = record.get("warnings", ())
    own = [one for one in found if one["site"]]
    chosen = [one for one in found if not one["site"]] + own[:MOST_SITES]
    told = [(one["round"], one["text"]) for one in chosen]
    more = own[MOST_SITES:]
    text = f"{count(len(more), 'more warning')} of sites' own models: `protofed report --json` has them."
    return told + ([(more[0]["round"], text)] if more else [])


def _left(record: Mapping[str, Any]) -> list[str]:
    """Exclusions and revocations of the run, the first ones."""
    what = {"excluded": "excluded", "revoked": "certificate revoked"}
    sentences = [
        f"{one['site']} ({what[one['action']]}{_during(one['round'])}{': ' * bool(one['reason'])}{one['reason']})"
        for one in record.get("interventions", ())
        if one["action"] in what
    ]
    more = sentences[MOST_LEFT:]
    return sentences[:MOST_LEFT] + ([f"{len(more):,} more, which `protofed report` has"] if more else [])


def _during(number: int | None) -> str:
    return "" if number is None else f", round {number}"  # None: before the first round was opened


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
