"""Why a run does not go on: the pure function of phase and presence, by its fields and its line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.server.rounds.machine.test_advance import DEADLINE, collecting, rules, tick

from protofed.common.protocol.messages import SumOf, TaskKind
from protofed.server.rounds.machine.phases import (
    NOBODY,
    Aggregating,
    Evaluating,
    FinishedPhase,
    Idle,
    Phase,
    Refining,
    Summing,
    Tick,
)
from protofed.server.rounds.machine.rules import Grouping
from protofed.server.rounds.machine.waiting import (
    LONG_S,
    NO_TRAINER,
    UNKNOWN,
    MissingSite,
    Waiting,
    WaitReason,
    waiting,
)
from protofed.server.verdicts import RoundOutcome

WEEK = 604_800.0


def reason(
    phase: Phase, seen: Tick, absent: dict[str, str] | None = None, *, disk_full: bool = False, **federation: Any
) -> Waiting | None:
    return waiting(rules(**federation), phase, seen, lambda: absent or {}, disk_full=disk_full)


def known(found: Waiting | None) -> Waiting:
    assert found is not None
    return found


def test_a_typo_in_required_sites_is_named_with_the_nearest_site() -> None:
    found = known(reason(Idle(1), tick(trainers="a", enrolled="a"), {"south": "away"}, required_sites=("suoth",)))
    assert (found.reason, found.round, found.needed, found.has) == (WaitReason.REQUIRED_SITES, 1, 2, 1)
    assert found.missing == (MissingSite("suoth", UNKNOWN, "south", required=True), MissingSite("south", "away"))
    assert found.seconds_left == WEEK
    assert found.text == (
        "needs 2 trainers, has 1; missing: suoth (required, no such site is known; did you mean south?), south (away)"
    )
    found = known(reason(Idle(1), tick(trainers="ab"), {"c": "silent"}, required_sites=("c",)))
    assert (found.reason, found.needed, found.has) == (WaitReason.REQUIRED_SITES, 2, 2)
    assert found.text == "needs each of its required sites; missing: c (required, silent)"
    found = known(reason(Idle(0), tick(trainers="a"), required_sites=("norht",)))  # the first model needs none
    assert (found.reason, found.missing[0].why) == (WaitReason.TRAINERS, UNKNOWN)
    assert reason(Idle(0), tick(trainers="ab"), required_sites=("norht",)) is None


@pytest.mark.parametrize(
    ("federation", "round_", "trainers", "needed"),
    [
        ({"min_sites": 3}, 1, "ab", 3),
        ({"min_sites": 1, "quorum": 4}, 1, "abc", 4),
        ({"min_sites": 1, "quorum": 1.0}, 1, "abc", 4),  # four are enrolled
        ({"required_sites": ("a", "b", "c")}, 1, "ab", 3),
        ({"min_sites": 5, "quorum": 5}, 0, "a", 2),  # the first model
        ({"min_sites": 1}, 0, "", 1),
    ],
)
def test_it_needs_as_many_trainers_as_the_machine_asks_for(
    federation: dict[str, Any], round_: int, trainers: str, needed: int
) -> None:
    found = known(reason(Idle(round_), tick(trainers=trainers), **federation))
    assert (found.needed, found.has) == (needed, len(trainers))


def test_a_run_that_would_open_a_round_waits_for_nothing_and_only_time_makes_no_other_reason() -> None:
    assert reason(Idle(1), tick()) is None
    assert reason(Idle(0), tick(trainers="ab")) is None
    assert reason(Aggregating(1, 1, frozenset("ab")), tick()) is None
    assert reason(FinishedPhase("completed", RoundOutcome.COMPLETED), tick()) is None
    assert reason(Idle(1), tick(1.0, trainers="")) == reason(Idle(1, since=1.0), tick(9.0, trainers=""))


def test_sites_that_cannot_come_are_named_only_where_they_are_required() -> None:
    absent = {"eva": NO_TRAINER, "old": "certificate revoked", "west": "excluded"}
    found = known(reason(Idle(1), tick(trainers="a"), absent))
    assert found.reason is WaitReason.TRAINERS
    assert [site.site for site in found.missing] == ["west"]
    found = known(reason(Idle(1), tick(trainers="a"), absent, required_sites=("eva", "old")))
    assert [(site.site, site.why) for site in found.missing] == [
        ("eva", NO_TRAINER),
        ("old", "certificate revoked"),
        ("west", "excluded"),
    ]


def test_a_run_between_two_attempts_says_when_it_tries_again_and_how_often_it_may() -> None:
    found = known(reason(Idle(1, tries=2, again_at=50.0), tick(40.0)))
    assert (found.reason, found.has, found.needed, found.seconds_left) == (WaitReason.BACK_OFF, 3, 5, 10.0)
    assert found.text == "tries round 1 again, attempt 3 of 5"
    assert reason(Idle(1, tries=2, again_at=50.0), tick(50.0)) is None
    found = known(reason(Refining(1, 1, 5.0, tries=2, again_at=50.0), tick(40.0, evaluators="e")))
    assert (found.reason, found.has, found.needed, found.seconds_left) == (WaitReason.BACK_OFF, 3, 5, 10.0)
    assert known(reason(Idle(1, again_at=50.0), tick(trainers="", paused=True))).reason is WaitReason.PAUSED
    found = known(reason(Idle(1, since=10.0), tick(30.0, trainers=""), site_wait_timeout_s=50.0))
    assert found.seconds_left == 30.0


def test_an_open_round_names_whose_updates_and_scores_it_waits_for_and_what_they_do() -> None:
    phase = collecting(quorum=3, reported=frozenset("a"), failed=frozenset("b"), required=frozenset("d"))
    found = known(reason(phase, tick(60.0), {"c": "silent", "x": "away"}))
    assert (found.reason, found.needed, found.has) == (WaitReason.UPDATES, 3, 1)
    assert found.missing == (MissingSite("c", "silent"), MissingSite("d", required=True))
    assert found.seconds_left == DEADLINE - 60.0
    assert found.text == "waits for updates of c (silent), d (required); has 1, the quorum is 3"
    found = known(reason(Evaluating(1, frozenset({"eva", "ann"}), 5.0), tick(30.0), {"eva": NO_TRAINER}))
    assert (found.reason, found.missing) == (WaitReason.SCORES, (MissingSite("ann"), MissingSite("eva")))
    assert found.seconds_left == DEADLINE - 25.0


@pytest.mark.parametrize("phase", [Idle(1), Aggregating(1, 1, NOBODY), Refining(1, 1, 0.0)])
def test_a_full_disk_is_a_reason(phase: Phase) -> None:
    assert known(reason(phase, tick(evaluators="e"), disk_full=True)).reason is WaitReason.DISK


def test_without_an_evaluator_or_with_one_a_refinement_says_so_and_when_the_run_fails() -> None:
    phase = Refining(1, 1, 5.0, requested=frozenset({"eva"}))
    found = known(reason(phase, tick(30.0), {"eva": NO_TRAINER}))
    assert (found.reason, found.missing, found.round) == (WaitReason.REFINEMENT, (MissingSite("eva"),), 1)
    assert found.seconds_left == DEADLINE - 25.0
    assert reason(replace(phase, reported=phase.requested), tick(30.0)) is None
    found = known(reason(Refining(1, 1, 5.0), tick(30.0)))
    assert (found.reason, found.needed, found.has, found.seconds_left) == (WaitReason.EVALUATOR, 1, 0, WEEK - 25.0)
    assert reason(Refining(1, 1, 5.0), tick(30.0, evaluators="e")) is None


def test_a_line_names_a_few_of_many_sites() -> None:
    found = known(reason(Idle(1), tick(trainers=""), {f"s{i}": "away" for i in range(9)}))
    assert len(found.missing) == 9
    assert found.text.endswith("s4 (away) and 4 more")


def test_a_step_of_a_secure_aggregation_tells_who_has_reported_beside_who_counts() -> None:
    asked = frozenset("abc")
    at, reported, groups = (1, 1, SumOf.UPDATE, TaskKind.SHARE), frozenset("ab"), (("a", "b", "c"),)
    phase = Summing(*at, asked, asked, 3, 3, contributors=False, opened=0.0, reported=reported, groups=groups)
    found = known(reason(phase, tick(), {"c": "silent"}))
    assert found.text == (
        "waits for c (silent) in step share of a secure aggregation; has 2 of 3, 0 in whole groups, needs 3"
    )
    alone = known(reason(replace(phase, groups=(("a", "b"), ("c",))), tick()))
    assert alone.text.endswith("; has 2, needs 3")


def test_sites_that_have_reported_without_their_group_count_for_nothing_yet() -> None:
    grouped = {"secure": True, "min_sites": 3, "sum_group": 3}
    what = replace(rules(**grouped), grouping=Grouping("run", 0, 3))
    known = (("a", "b", "c"),)
    idle = waiting(
        what,
        Idle(2),
        replace(tick(trainers="ab", enrolled="abc"), groups=known),
        lambda: {"c": "away"},
        disk_full=False,
    )
    assert idle is not None
    assert idle.text == (
        "needs 3 trainers in whole groups of 3 or more, has 0; missing: c (away); the group a, b, c is without c"
    )
    late = replace(tick(LONG_S + 5.0, trainers="ab", enrolled="abc"), groups=known)
    idle = waiting(what, Idle(2, since=5.0), late, lambda: {"c": "away"}, disk_full=False)
    assert idle is not None
    assert idle.text.endswith("; the group a, b, c is without c (for good? `protofed sites regroup c`)")
    lost = replace(tick(trainers="abd", enrolled="abcd"), groups=known)
    idle = waiting(what, Idle(2), lost, lambda: {"c": "away"}, disk_full=False)
    assert idle is not None
    assert idle.text.endswith("is without c; d waits for 2 more new sites: sums are over groups of 3")
    there = replace(tick(trainers="abcde", enrolled="abcde"), groups=known)
    phase = replace(collecting(), cohort=frozenset("abc"), reported=frozenset("ab"), groups=known, fewest=3, quorum=3)
    found = waiting(what, phase, there, dict, disk_full=False)
    assert found is not None
    assert found.text == (
        "waits for updates of c; has 2 of 3, 0 in whole groups, the quorum is 3; "
        "d, e wait for 1 more new site: sums are over groups of 3"
    )
    found = waiting(what, phase, replace(there, trainers=frozenset("abcd")), dict, disk_full=False)
    assert found is not None
    assert found.text.endswith("; d waits for 2 more new sites: sums are over groups of 3")
