"""Whole rounds over groups: who is left out, who waits, and that a restart forms no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from tests.server.rounds.test_secure_rounds import Secure, digest

from protofed.common.errors import ConflictError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TaskKind
from protofed.common.protocol.sum_messages import RosterMessage, message_of
from protofed.common.secure_sums.groups import Groups
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds import phases
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import SetAsideCode

NAMES = tuple(f"s{number:02}" for number in range(1, 13))
RULES: dict[str, Any] = {
    "rounds": 4,
    "federation": {"secure": True, "min_sites": 3, "quorum": 3, "score_every": 0, "sum_group": 3},
}


def run_of(count: int, method: str = "fedavg", ledger: Ledger | None = None) -> Secure:
    return Secure(method, ledger or Ledger(), NAMES[:count], RULES)


def groups_of(run: Secure) -> Groups:
    return run.ledger.groups()


def told(run: Secure, site: SiteId) -> Groups:
    """The groups that a site is told when it is asked to share."""
    base = run.lab.task(site).base_digest
    assert base is not None
    return message_of(run.lab.blobs.view(base), RosterMessage)[0].groups


def others(run: Secure, site: SiteId) -> list[SiteId]:
    """The sites of all groups but this one's."""
    return [name for group in groups_of(run) if site not in group for name in group]


def statuses(run: Secure, number: int, sites: Iterable[SiteId]) -> set[tuple[str, str]]:
    rows = run.ledger.tasks("test", number)
    return {(row.task_status, row.reason) for row in rows if row.kind is TaskKind.FIT and row.site in sites}


@pytest.mark.parametrize("method", ["fedavg", "fedprp"])
def test_a_site_that_does_not_report_leaves_its_group_out_and_the_round_counts_over_the_others(method: str) -> None:
    run = run_of(6, method)
    run.finish()
    first, second = groups_of(run)
    assert (len(first), len(second)) == (3, 3)
    lost = first[0]
    run.start = run.lab.coordinator.published.state  # type: ignore[union-attr]
    run.answer([site for site in run.asked() if site != lost])
    run.lab.later(600.0, alive=run.names)
    assert run.asked() == dict.fromkeys(second, TaskKind.SHARE)
    assert told(run, second[0]) == (second,)
    assert statuses(run, 2, first[1:]) == {
        ("set-aside", f"waits for {lost}: its group is summed together, or not at all")
    }
    run.finish(2)
    assert run.published(2) == digest(run.state_of(second))
    assert verify_round(run.ledger, run.lab.blobs, "test", 2, 1).finding is VerificationResult.SAME
    assert groups_of(run) == (first, second)


@pytest.mark.parametrize("step", [TaskKind.SHARE, TaskKind.MASK])
def test_a_site_that_drops_out_of_a_sum_takes_its_group_along(step: TaskKind) -> None:
    """Of twelve sites nine are left, and t is nine."""
    run = run_of(12)
    run.go_to(step)
    lost = groups_of(run)[0][0]
    run.answer([site for site in run.asked() if site != lost])
    run.lab.later(60.0, alive=run.names)
    assert sorted(run.asked()) == sorted(others(run, lost))
    phase = run.lab.phase
    run.lab.restart()
    assert run.lab.phase == phase
    run.finish()
    assert run.published() == digest(run.state_of(others(run, lost)))
    assert verify_round(run.ledger, run.lab.blobs, "test", 1, 1).finding is VerificationResult.SAME
    run.finish(2)
    assert run.ledger.state("test", 2) is not None


def test_behind_the_numbers_sites_may_drop_out_of_any_group() -> None:
    run = run_of(12)
    run.go_to(TaskKind.AGREE)
    lost = {group[0] for group in groups_of(run)[:3]}
    run.answer([site for site in run.asked() if site not in lost])
    run.lab.later(60.0, alive=run.names)
    run.finish()
    assert run.published() == digest(run.state_of(run.names))


def test_newcomers_wait_until_they_are_a_group_and_the_others_go_on() -> None:
    run = run_of(3)
    run.answer(NAMES[:3])
    (group,) = groups_of(run)
    for comer, invited in (("x1", 3), ("x2", 3), ("x3", 6)):
        run.names = (*run.names, comer)
        run.updates[comer] = run._update(comer)
        run.sites[comer] = run._site(comer)
        run.lab.enroll(comer)
        run.finish(number := run.lab.phase.round)  # type: ignore[union-attr]
        if number < 4:
            assert run.ledger.state("test", number) is not None
            assert len(run.asked()) == invited, comer
    assert groups_of(run) == (group,)
    run.answer(list(run.asked()))
    assert groups_of(run) == (group, ("x1", "x2", "x3"))
    run.finish(4)
    assert run.ledger.state("test", 4) is not None


def test_newcomers_whose_others_do_not_report_are_set_aside_with_what_they_wait_for() -> None:
    run = run_of(7)
    run.answer(NAMES[:4])
    run.lab.later(600.0, alive=run.names)
    run.finish()
    assert groups_of(run) == (NAMES[:4],)
    assert set(run.asked()) == set(run.names)
    run.answer(NAMES[:6])
    run.lab.later(600.0, alive=run.names)
    assert set(run.asked()) == set(NAMES[:4])
    text = "waits for 1 more new site: its sums are over groups of 3"
    assert statuses(run, 2, NAMES[4:6]) == {("set-aside", text)}
    aside = {row.task.site: row.code for row in run.ledger.updates("test", 2) if row.set_aside is not None}
    assert aside == dict.fromkeys(NAMES[4:6], SetAsideCode.GROUP)
    run.finish(2)
    assert groups_of(run) == (NAMES[:4],)
    run.answer(NAMES[:7])
    assert groups_of(run) == (NAMES[:4], NAMES[4:7])


def test_the_first_groups_wait_for_enough_sites() -> None:
    run = run_of(5)
    run.answer(NAMES[:2])
    run.lab.later(600.0, alive=run.names)
    assert groups_of(run) == ()
    assert "2 updates at the deadline, 0 of them in whole groups, quorum 3" in str(
        run.ledger.rounds("test")[-1].abandoned
    )


@pytest.mark.parametrize("method", ["fedavg", "fedprp"])
def test_a_server_that_is_restarted_between_any_two_events_forms_the_same_groups(method: str) -> None:
    expected, run = run_of(7, method), run_of(7, method)
    expected.finish()
    while isinstance(run.lab.phase, phases.Collecting | phases.Summing) and run.lab.phase.round == 1:
        run.lab.restart()
        run.answer([*run.asked()][:1])
        assert groups_of(run) in ((), groups_of(expected))
        run.lab.restart()
    assert groups_of(run) == groups_of(expected)
    assert run.published() == expected.published()
    run.finish(2)
    assert groups_of(run) == groups_of(expected)


def test_groups_stay_when_a_run_is_rolled_back() -> None:
    run = run_of(6)
    run.finish()
    run.finish(2)
    before = groups_of(run)
    run.lab.coordinator.roll_back(1)
    run.lab.later(0.0)
    run.lab.restart()
    run.go_to(TaskKind.SHARE)
    assert told(run, "s01") == before == groups_of(run)


def next_run(run: Secure, name: str, names: tuple[SiteId, ...] = (), **federation: Any) -> Secure:
    """Another run of the same server, whose first one has ended."""
    run.lab.coordinator.stop("enough")
    changes = {**RULES, "name": name, "federation": {**RULES["federation"], **federation}}
    return Secure("fedavg", run.ledger, names or run.names, changes)


def test_groups_are_those_of_all_runs_of_a_server() -> None:
    run = run_of(7)
    run.finish()
    before = groups_of(run)
    later = next_run(run, "later", NAMES[:10])
    later.finish()
    assert set(groups_of(later)) == {*before, NAMES[7:10]}


def test_a_run_of_larger_groups_than_sites_are_in_is_of_the_others_alone() -> None:
    run = run_of(3)
    run.finish()
    later = next_run(run, "larger", NAMES[:7], sum_group=4, min_sites=4, quorum=4)
    assert set(later.asked()) == set(NAMES[3:7])
    later.finish()
    assert groups_of(later) == (NAMES[:3], NAMES[3:7])
    assert later.ledger.state("larger", 1) == digest(later.state_of(NAMES[3:7]))


def test_a_run_of_any_sites_sums_those_without_a_group_alone_and_gives_them_none() -> None:
    run = run_of(3)
    run.finish()
    later = next_run(run, "any", NAMES[:5], sum_group=1)
    later.go_to(TaskKind.SHARE)
    assert told(later, "s01") == (NAMES[:3], ("s04",), ("s05",))
    later.lab.restart()
    later.finish()
    assert groups_of(later) == (NAMES[:3],)
    assert later.ledger.state("any", 1) == digest(later.state_of(NAMES[:5]))


def test_a_group_that_was_dissolved_is_formed_anew_of_those_that_are_left_and_past_rounds_stay_verified() -> None:
    run = run_of(5)
    run.finish()
    (group,) = groups_of(run)
    assert isinstance(run.lab.phase, phases.Collecting)
    run.ledger.dissolve(group)
    run.lab.coordinator.regrouped()
    run.answer(NAMES[:4])
    run.lab.later(600.0, alive=run.names)
    assert groups_of(run) == (NAMES[:4],)
    assert told(run, "s01") == (NAMES[:4],)
    run.finish(2)
    assert run.ledger.state("test", 2) is not None
    for number in (1, 2):
        found = verify_round(run.ledger, run.lab.blobs, "test", number, 1)
        assert found.finding is VerificationResult.SAME, number


def test_a_clock_that_was_set_back_hides_no_group_from_a_verification() -> None:
    run = run_of(6)
    run.finish()
    run.finish(2)
    assert len(groups_of(run)) == 2
    with run.ledger._write() as connection:
        connection.exec_driver_sql("update rounds set closed_at = closed_at - 3600 where round = 2")
    assert run.ledger.groups(run.ledger.rounds("test")[2].closed_at) == ()
    assert verify_round(run.ledger, run.lab.blobs, "test", 2, 1).finding is VerificationResult.SAME


def test_no_group_is_dissolved_while_a_sum_is_open() -> None:
    run = run_of(3)
    run.lab.coordinator.check_regrouping()
    run.go_to(TaskKind.SHARE)
    with pytest.raises(ConflictError, match="pause the run"):
        run.lab.coordinator.check_regrouping()
    run.finish()
    run.lab.coordinator.check_regrouping()
