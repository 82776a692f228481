"""What a server says of a run, as a snapshot; worked out by hand."""

from __future__ import annotations

import pytest
from tests.support.server_replies import NOW, answer, attempt, info, mixed_reply, published, score, site, snapshot_of

from protofed.common.protocol.messages import Activity, Progress
from protofed.deploy.operator.snapshot import Attempt, Attention, Problem, TimeRemaining
from protofed.deploy.operator.snapshot_builder import place
from protofed.deploy.operator.watch import changes
from protofed.deploy.run_view import BestSnapshot
from protofed.protos.v1 import operator_pb2 as pb

# Where it is


def test_a_phase_lasts_since_its_round_was_opened_or_published() -> None:
    now = snapshot_of(answer(phase="waiting for sites", round=0))
    assert (now.phase, now.phase_s, now.seconds, now.rest, now.done) == ("waiting for sites", 110.0, None, None, 0)
    assert (now.history, now.sites, now.scores, now.problems) == ((), (), (), ())
    rounds = published(910, 920, a="reported")
    assert snapshot_of(answer([*rounds, attempt(2, "open", 985, a="started")])).phase_s == 15.0
    scoring = snapshot_of(answer(rounds, phase="evaluating", deadline_s=600.0))
    assert (scoring.phase, scoring.phase_s, scoring.deadline_s) == ("evaluating", 80.0, None)
    assert snapshot_of(answer([attempt(2, "open", 985, a="started")], deadline_s=600.0)).deadline_s == 600.0
    assert snapshot_of(answer([attempt(1, "open", 985, a="reported", b="started")])).phase == "collecting"
    assert snapshot_of(answer([attempt(1, "open", 985, a="reported", b="failed")])).phase == "aggregating"
    now = snapshot_of(answer([attempt(1, "open", 985, a="started")]), now=900.0)
    assert (now.phase_s, now.seconds) == (0.0, 0.0)
    rounds = published(910, 920, 930)
    assert snapshot_of(answer(rounds)).seconds == 90.0
    assert snapshot_of(answer(rounds, status="completed", ended_at=935.0)).seconds == 25.0


def test_the_rest_is_as_the_last_rounds_were() -> None:
    """Periods 10, 12 and 20 s; 17 rounds are left, and 4 s of the next one are over."""
    rounds = published(910, 920, 932, 952)
    assert snapshot_of(answer(rounds), now=956.0).rest == TimeRemaining(12 * 17 - 4, 10 * 17 - 4, 20 * 17 - 4, 3)


def test_attempts_that_were_abandoned_and_waits_between_rounds_count() -> None:
    """Published at 920, 950 (after an abandoned attempt) and 965 (opened at 957): periods 10, 30 and 15 s."""
    rounds = [
        attempt(1, "published", 910, 920),
        attempt(2, "abandoned", 920, 940),
        attempt(2, "published", 940, 950),
        attempt(3, "degraded", 957, 965),
    ]
    assert snapshot_of(answer(rounds), now=965.0).rest == TimeRemaining(15 * 17, 10 * 17, 30 * 17, 3)


def test_what_says_nothing_of_rounds_and_one_alone_give_no_estimate() -> None:
    rounds = [attempt(0, "published", 900, 909), *published(910, 920, 930), attempt(3, "rolled-back", 930, 940)]
    rest = snapshot_of(answer(rounds), now=940.0).rest
    assert rest == TimeRemaining(10 * 18 - 10, 10 * 18 - 10, 10 * 18 - 10, 2)
    assert snapshot_of(answer(published(910, 920))).rest is None


@pytest.mark.parametrize("status", ["queued", "paused", "completed", "failed", "aborted"])
def test_the_rest_of_a_run_that_does_not_go_on_is_not_estimated(status: str) -> None:
    assert snapshot_of(answer(published(910, 920, 930), status=status)).rest is None


def test_the_worst_site_comes_first_and_each_says_what_it_does() -> None:
    row = attempt(7, "open", 985, well="reported", slow="started", quick="started", lost="invited", ill="failed")
    known = [
        site("well", "idle", "idle"),
        site("slow", progress=0.2),
        site("quick", progress=0.8),
        site("held", "held", "awaiting approval", progress=-1.0),
        site("out", "excluded", "", excluded="wrong data", progress_age_s=-1.0),
        site("quiet", "silent"),
        site("gone", "revoked", "laptop lost"),
        site("late", "away", "", progress_age_s=-1.0),
    ]
    found = snapshot_of(answer([row], known)).sites
    assert [(one.site, one.care.name) for one in found] == [
        *((name, "BAD") for name in ("gone", "ill", "lost", "out", "quiet")),
        *((name, "HELD") for name in ("held", "late")),
        ("slow", "AWAITED"),
        ("quick", "AWAITED"),
        ("well", "WELL"),
    ]
    doing = {one.site: one.doing for one in found}
    assert doing["held"] == "held: awaiting approval"
    assert doing["out"] == "excluded: wrong data"
    assert doing["quiet"] == "silent: training, epoch 2/5"
    assert doing["gone"] == "certificate revoked: laptop lost"
    assert doing["late"] == doing["lost"] == "no daemon since the server started"
    assert doing["slow"] == "training, epoch 2/5"
    assert {one.site: one.still_s for one in found}["out"] is None


def test_a_sites_progress_is_of_its_task_of_this_round() -> None:
    row = attempt(7, "open", 985, done="reported", at_work="started", failed="failed", aside="rejected")
    known = [site(name) for name in ("done", "at-work", "failed", "aside", "other")]
    shares = {one.site: one.progress for one in snapshot_of(answer([row], known)).sites}
    assert shares == {"done": 1.0, "at-work": 0.4, "failed": None, "aside": 1.0, "other": None}
    unknown = snapshot_of(answer([attempt(7, "open", 985, a="started")], [site("a", progress=-1.0)])).sites
    assert unknown[0].progress is None
    row = attempt(7, "published", 985, 990, a="reported", b="late", c="reported")
    row.sites.extend(
        pb.SiteTask(site=name, kind="score", task_status=task_status)
        for name, task_status in zip("abc", ("started", "reported", "failed"), strict=True)
    )
    assert {one.site: one.task_status for one in snapshot_of(answer([row])).sites} == {
        "a": "started",
        "b": "late",
        "c": "failed",
    }
    now = snapshot_of(
        answer([attempt(7, "open", 985, a="late")], [site("b", "away", ""), site("c", "idle")], status="aborted")
    )
    assert [one.site for one in now.sites] == ["a", "c"]
    assert now.history[-1].outcome == "unfinished"


def test_attempts_count_who_reported_and_problems_come_newest_first() -> None:
    row = attempt(3, "degraded", 910, 922, a="reported", b="rejected", c="late", d="late", e="not-needed")
    row.sites.add(site="judge", kind="score", task_status="failed")
    (found,) = snapshot_of(answer([row])).history
    assert found == Attempt(3, 1, "degraded", "", 12.0, 5, 2, {"failed": 1, "late": 2, "rejected": 1}, tuple("bcde"))
    rounds = [attempt(1, "degraded", 910, 920, a="late", b="reported"), attempt(2, "abandoned", 920, 930, a="failed")]
    rounds[0].sites[1].refusals.append("not-finite: body/w")
    rounds[1].reason = "no quorum"
    assert snapshot_of(answer(rounds)).problems == (
        Problem(2, 1, "", "abandoned", "no quorum"),
        Problem(2, 1, "a", "failed", ""),
        Problem(1, 1, "a", "late", ""),
        Problem(1, 1, "b", "refused", "not-finite: body/w"),
    )


def test_scores_change_since_the_scored_round_before() -> None:
    first = answer(scores={5: [score("global.accuracy", 0.5), score("global.ece", 0.3)]})
    second = answer(scores={6: [score("global.ece", 0.1), score("global.accuracy", 0.75), score("other", 1.0)]})
    assert [one.mean_change for one in snapshot_of(first).scores] == [None, None]
    found = {one.name: one for one in snapshot_of(first, second, second).scores}
    assert list(found) == ["global.accuracy", "global.ece", "other"]
    assert found["global.accuracy"].mean_change == 0.25
    assert found["global.ece"].worst_change == pytest.approx(-0.2)
    assert (found["global.ece"].lower_is_better, found["global.accuracy"].lower_is_better) == (True, False)
    assert found["other"].mean_change is None
    assert [one.name for one in snapshot_of(mixed_reply()).scores] == ["global.accuracy", "personal.pm_v"]


def test_a_run_that_waits_says_behind_whom() -> None:
    ended, going = info(run="a", status="completed"), info(run="b", round=3)
    queue = [ended, going, *(info(run=name, status="queued") for name in "cdefghijklmn")]
    assert place("b", queue) == ""
    assert place("c", queue) == "next in the queue, behind b (running, round 3 of 20)"
    assert place("d", queue) == "second in the queue, behind b (running, round 3 of 20) and c"
    assert place("f", queue) == "fourth in the queue, behind b (running, round 3 of 20) and 3 more"
    assert place("n", queue).startswith("12th in the queue")
    assert place("unknown", queue) == ""


def test_time_is_no_change_and_nothing_that_a_terminal_would_obey_comes_through() -> None:
    before = mixed_reply()
    assert snapshot_of(before) == snapshot_of(before, now=NOW + 60)
    later = mixed_reply()
    later.detail.rounds[-1].sites[1].task_status = "reported"
    assert snapshot_of(later) != snapshot_of(before)
    assert snapshot_of(before).sites[0].care is Attention.BAD
    nasty = "a\x1b[2Jb\r\n\x9bc"
    row = attempt(1, "abandoned", 910, 920, a="failed")
    row.reason = row.sites[0].reason = nasty
    row.sites[0].refusals.append(nasty)
    now = snapshot_of(answer([row], [site("a", "excluded", excluded=nasty)], method=nasty, reason=nasty, phase=nasty))
    assert "\\" not in repr(now)


@pytest.mark.parametrize(
    ("told", "share"),
    [
        (Progress("n", Activity.DOWNLOADING, 5, 5), 0.0),
        (Progress("n", Activity.TRAINING), None),
        (Progress("n", Activity.TRAINING, 0, 4), 0.0),
        (Progress("n", Activity.TRAINING, 1, 4), 0.0),
        (Progress("n", Activity.TRAINING, 4, 4), 0.75),
        (Progress("n", Activity.UPLOADING, 4, 4), 1.0),
        (Progress("n", Activity.SCORING, 4, 4), None),
        (Progress("", Activity.IDLE, 4, 4), None),
    ],
)
def test_an_epoch_counts_when_it_is_done(told: Progress, share: float | None) -> None:
    assert told.share == share


def test_the_best_round_is_told_with_its_round_and_again_at_the_end() -> None:
    reply = answer(published(910, 920))
    assert snapshot_of(reply).best is None
    reply.detail.best.CopyFrom(pb.BestRound(round=2, score="global.accuracy", value=0.5, kept=-1))
    later = snapshot_of(reply)
    assert later.best == BestSnapshot(2, "global.accuracy", 0.5, None)
    scored = answer(published(910, 920, 930), scores={2: [score("global.accuracy", 0.5)]})
    scored.detail.best.CopyFrom(reply.detail.best)
    assert " · global.accuracy 0.5000 · best so far · " in changes(snapshot_of(answer()), snapshot_of(scored))[-1]
    scored.detail.info.status = "completed"
    lines = changes(later, snapshot_of(scored))
    assert lines[-1].startswith("best: round 2, global.accuracy 0.5000")
    assert not any("best" in line for line in changes(later, later))
