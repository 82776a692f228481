"""How many sites sent no scores of their own models although they were asked: absent is not missing."""

from __future__ import annotations

from collections.abc import Iterable

from protofed.client.policy.score_disclosures import is_own
from protofed.deploy.operator.snapshot import PUBLISHED
from protofed.protos.v1 import operator_pb2 as pb


def keeping(detail: pb.RunDetail) -> int:
    """Sites that answered the newest request for scores of their own models and sent none.

    Sites are asked after the rounds that `score_personal_every` names; of another round's scores nothing follows.
    """
    if any(task.kind == "score-sum" for row in detail.rounds for task in row.sites):
        return 0  # trainers are asked for a sum of theirs
    rows = [row for row in detail.rounds if row.round >= detail.scored_round and row.outcome != "rolled-back"]
    answered = next((sites for row in reversed(rows) if (sites := _answered(row.sites))), frozenset[str]())
    telling = max((score.sites for score in detail.scores if is_own(score.name)), default=0)
    return max(0, len(answered) - telling)


def kept_by_noise(detail: pb.RunDetail) -> bool:
    """Whether rounds have been published and no site's own score is there because the run has noise."""
    published = any(row.round and row.outcome in PUBLISHED for row in detail.rounds)
    return detail.info.noisy and published and not any(is_own(score.name) for score in detail.scores)


def _answered(tasks: Iterable[pb.SiteTask]) -> frozenset[str]:
    """Sites that trained in the round, so that they have a model of their own, and answered when asked for scores."""
    reported = [task for task in tasks if task.task_status == "reported"]
    trained = {task.site for task in reported if task.kind == "fit"}
    return frozenset(task.site for task in reported if task.kind == "score" and task.site in trained)
