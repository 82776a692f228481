"""Scores that sites keep are absent, and the screens say so; other absences they leave alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from tests.support.server_replies import answer, attempt, score, snapshot_of

from protofed.deploy.operator.screen import WatchScreen
from protofed.deploy.operator.snapshot_builder import ServerReply, keeping, kept_by_noise
from protofed.deploy.operator.tables import run_parts
from protofed.deploy.operator.watch import _Lines, remarks
from protofed.deploy.run_view import NOISE_KEEPS, kept_sentence, score_text
from protofed.protos.v1 import operator_pb2 as pb

GLOBAL, OWN = score("global.accuracy", 0.9, sites=1), score("personal.pm_v", 0.8, sites=1)


def scored(round: int, scores: str = "reported", **fits: Any) -> pb.RoundInfo:
    """A round after which the sites that trained, and the evaluator, were asked for scores."""
    row = attempt(round, "published", 900.0 + round, 901.0 + round, **fits)
    for site in [*fits, "evaluator"]:
        row.sites.add(site=site, kind="score", task_status=scores)
    return row


def kept(*rounds: pb.RoundInfo, scores: dict[int, list[pb.Score]] | None = None) -> int:
    return keeping(answer(rounds, scores=scores).detail)


def test_sites_that_answer_without_scores_keep_them_and_no_others() -> None:
    both = scored(2, a="reported", b="reported")
    assert kept(both, scores={2: [GLOBAL]}) == 2
    assert kept(both, scores={2: [GLOBAL, OWN]}) == 1
    assert kept(both, scores={2: [score("personal.pm_v", 0.8, sites=2)]}) == 0
    assert kept(both) == 2  # nobody sent any: no evaluator, or no model of all sites
    assert kept(scored(2, a="failed")) == 0
    assert kept(attempt(2, "published", 910, 920, a="reported")) == 0
    # `score_personal_every = 2`: the scores at hand are of round 3, after which no trainer was asked.
    told, evaluator_only = scored(2, a="reported"), attempt(3, "published", 920, 930, a="reported")
    evaluator_only.sites.add(site="evaluator", kind="score", task_status="reported")
    assert kept(told, evaluator_only, scores={3: [GLOBAL]}) == 0
    assert kept(told, evaluator_only, scores={2: [GLOBAL]}) == 1
    row = scored(2, a="reported")
    row.outcome = "rolled-back"
    assert kept(row) == 0


@pytest.mark.parametrize("status", ["invited", "started", "late", "failed"])
def test_who_has_not_answered_keeps_nothing(status: str) -> None:
    assert kept(scored(2, status, a="reported")) == 0


def shown(reply: ServerReply, width: int = 80) -> tuple[str, str]:
    """`runs watch` and `runs show`."""
    console = Console(file=io.StringIO(), width=width)
    console.print(WatchScreen(snapshot_of(reply), None))
    watched = console.file.getvalue()  # type: ignore[attr-defined]
    for part in run_parts(reply.detail, everything=False):
        console.print(part)
    return watched, console.file.getvalue()[len(watched) :]  # type: ignore[attr-defined]


def test_every_screen_says_it() -> None:
    reply = answer([scored(2, a="reported", b="reported")], scores={2: [GLOBAL]})
    assert snapshot_of(reply).keeping == 2
    for text in shown(reply):
        assert kept_sentence(2) in text
        assert "nan" not in text
    silent = answer([scored(2, a="reported", b="reported")], scores={2: [score("personal.pm_v", 0.8, sites=2)]})
    assert not any("sent no scores" in text for text in shown(silent))


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("aggregated", [False, True], ids=["plain", "secure"])
def test_of_a_run_with_noise_every_screen_says_that_own_scores_stay_for_that(aggregated: bool) -> None:
    row = scored(2, a="reported", b="reported")
    if aggregated:
        row.sites.add(site="a", kind="score-sum", task_status="reported")
    reply = answer([row], scores={2: [GLOBAL]}, noisy=True)
    assert snapshot_of(reply).noisy
    for text in map(one_line, shown(reply)):
        assert text.count(NOISE_KEEPS) == 1
        assert kept_sentence(2) not in text
    assert remarks(snapshot_of(answer([], noisy=True))) == []
    assert remarks(snapshot_of(reply)) == [NOISE_KEEPS]


@pytest.mark.parametrize(
    ("rounds", "scores", "noisy"),
    [
        ([scored(2, a="reported")], [GLOBAL], False),
        ([scored(2, a="reported")], [GLOBAL, OWN], True),  # of a site that does not keep to it
        ([scored(0, a="reported")], [], True),
        ([attempt(1, "open", 910, a="started")], [], True),
    ],
    ids=["no noise", "there are some", "the first model", "no round yet"],
)
def test_noise_is_no_reason_where_nothing_is_absent_for_it(
    rounds: list[pb.RoundInfo], scores: list[pb.Score], noisy: bool
) -> None:
    reply = answer(rounds, scores={2: scores}, noisy=noisy)
    assert not kept_by_noise(reply.detail)
    assert not any(NOISE_KEEPS in one_line(text) for text in shown(reply))


def test_lines_say_it_once_and_not_while_sites_still_answer() -> None:
    before = snapshot_of(answer([attempt(2, "published", 910, 920, a="reported")]))
    asked = answer([scored(2, a="reported", b="reported")], scores={2: [GLOBAL]}, phase="evaluating")
    first = snapshot_of(answer([scored(2, a="reported")], scores={2: [GLOBAL]}))
    later = snapshot_of(answer([scored(2, a="reported"), scored(3, a="reported")], scores={3: [GLOBAL]}))
    console = Console(file=io.StringIO(), width=200)
    lines = _Lines(console)
    for seen in (before, snapshot_of(asked), first, later):
        lines(seen)
    assert console.file.getvalue().count("sent no scores") == 1  # type: ignore[attr-defined]
    assert kept_sentence(1) in console.file.getvalue()  # type: ignore[attr-defined]


def test_decimals_do_not_hide_an_error_in_a_small_range() -> None:
    assert [score_text(value) for value in (0.98765, 0.0, 0.00012345, -0.00098765)] == [
        "0.9877",
        "0.0000",
        "0.000123",
        "-0.000988",
    ]
    assert [score_text(value, 3) for value in (0.98765, 0.0123456, 0.0098765)] == ["0.988", "0.012", "0.00988"]
