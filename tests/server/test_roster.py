"""Who is there: one daemon a site, and only as long as it gets on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protofed.common.errors import ExcludedError, FencedError, NotEnrolledError
from protofed.common.protocol.messages import Activity, PauseReason, Progress, Role
from protofed.server.rounds.presence import SitePresence
from protofed.server.storage.ledger import Ledger

if TYPE_CHECKING:
    from tests.server.conftest import Clock

TRAINER, EVALUATOR = Role.TRAINER, Role.EVALUATOR


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def roster(ledger: Ledger, clock: Clock) -> SitePresence:
    roster = SitePresence(ledger, clock)
    roster.enroll("ann", {TRAINER}, "one")
    return roster


def test_nobody_is_there_who_did_not_enroll(ledger: Ledger, clock: Clock) -> None:
    roster = SitePresence(ledger, clock)
    assert roster.enrolled(TRAINER) == roster.alive(TRAINER, 10.0) == frozenset()
    with pytest.raises(NotEnrolledError, match="site ann is not enrolled"):
        roster.seen("ann", "one")


def test_roles_are_kept_apart(roster: SitePresence, ledger: Ledger) -> None:
    roster.enroll("eva", {EVALUATOR}, "x")
    roster.enroll("bob", {TRAINER, EVALUATOR}, "x")
    assert roster.enrolled(TRAINER) == {"ann", "bob"}
    assert roster.enrolled(EVALUATOR) == {"bob", "eva"}
    assert ledger.sites() == {"ann": ["trainer"], "bob": ["evaluator", "trainer"], "eva": ["evaluator"]}


def test_a_newer_daemon_fences_the_older_for_good(roster: SitePresence) -> None:
    roster.seen("ann", "one")
    roster.enroll("ann", {TRAINER}, "two")
    for _ in range(2):
        with pytest.raises(FencedError, match="newer daemon of site ann"):
            roster.seen("ann", "one")
    roster.seen("ann", "two")


def test_a_fenced_daemon_does_not_keep_its_site_alive(roster: SitePresence, clock: Clock) -> None:
    roster.enroll("ann", {TRAINER}, "two")
    clock.now = 20.0
    with pytest.raises(FencedError):
        roster.seen("ann", "one")
    assert roster.alive(TRAINER, 10.0) == frozenset()


def test_a_daemon_that_enrolls_again_changes_its_roles(roster: SitePresence) -> None:
    roster.enroll("ann", {EVALUATOR}, "two")
    assert roster.enrolled(TRAINER) == frozenset()
    assert roster.enrolled(EVALUATOR) == {"ann"}


def test_a_site_is_alive_until_it_was_idle_too_long_and_again_when_it_speaks(
    roster: SitePresence, clock: Clock
) -> None:
    clock.now = 10.0
    assert roster.alive(TRAINER, 10.0) == {"ann"}
    clock.now = 10.1
    assert roster.alive(TRAINER, 10.0) == frozenset()
    assert roster.enrolled(TRAINER) == {"ann"}
    roster.seen("ann", "one")
    assert roster.alive(TRAINER, 10.0) == {"ann"}


def test_progress_keeps_a_site_alive_and_noise_does_not(roster: SitePresence, clock: Clock) -> None:
    for batch in range(5):
        roster.seen("ann", "one", ("epoch", batch))
        clock.now += 8.0
    assert roster.alive(TRAINER, 10.0) == {"ann"}
    for _ in range(2):
        roster.seen("ann", "one", ("epoch", 4))
        clock.now += 8.0
    assert roster.alive(TRAINER, 10.0) == frozenset()
    roster.seen("ann", "one", ("epoch", 5))
    assert roster.alive(TRAINER, 10.0) == {"ann"}


def test_training_that_says_it_moves_counts_for_hours_and_one_that_stops_does_not(
    roster: SitePresence, clock: Clock
) -> None:
    told = Progress("n", Activity.TRAINING, epoch=1, epochs=2, making_progress=True)
    for _ in range(1000):
        clock.now += 8.0
        roster.seen("ann", "one", told)
    assert roster.alive(TRAINER, 10.0) == {"ann"}
    for _ in range(3):
        clock.now += 8.0
        roster.seen("ann", "one", replace(told, making_progress=False))
    assert roster.alive(TRAINER, 10.0) == frozenset()


def test_telemetry_that_changes_is_no_progress(roster: SitePresence, clock: Clock) -> None:
    """A hung daemon whose disk fills is as silent as any other."""
    told = Progress("n", Activity.TRAINING, epoch=1, epochs=2)
    for free in range(4):
        roster.seen("ann", "one", replace(told, telemetry={"disk_free_bytes": float(free)}))
        clock.now += 4.0
    assert roster.alive(TRAINER, 10.0) == frozenset()
    assert roster.telemetry("ann") == {"disk_free_bytes": 3.0}  # it is heard all the same
    roster.note("ann", replace(told, epoch=2))
    assert roster.alive(TRAINER, 10.0) == frozenset()


def test_what_a_daemon_told_last_is_there_to_be_looked_at(roster: SitePresence) -> None:
    idle, training = Progress("", Activity.IDLE, telemetry={"step_seconds": 0.5}), Progress("n", Activity.TRAINING)
    assert roster.progress("ann") is None
    assert roster.progress("nobody") is None
    assert roster.telemetry("ann") == roster.telemetry("nobody") == {}
    roster.seen("ann", "one", training)
    assert roster.progress("ann") is training
    roster.seen("ann", "one")  # any other call says nothing of it
    assert roster.progress("ann") is training
    roster.note("ann", idle)
    assert (roster.progress("ann"), roster.telemetry("ann")) == (idle, {"step_seconds": 0.5})
    roster.note("nobody", idle)
    assert roster.progress("nobody") is None
    roster.enroll("ann", {TRAINER}, "two")  # another daemon
    assert roster.progress("ann") is None


def test_what_a_fenced_daemon_says_is_not_kept(roster: SitePresence) -> None:
    roster.enroll("ann", {TRAINER}, "two")
    with pytest.raises(FencedError):
        roster.seen("ann", "one", Progress("n", Activity.TRAINING))
    assert roster.progress("ann") is None


def test_a_word_without_a_mark_always_counts(roster: SitePresence, clock: Clock) -> None:
    roster.seen("ann", "one", "mark")
    for _ in range(3):
        clock.now += 8.0
        roster.seen("ann", "one")
    assert roster.alive(TRAINER, 10.0) == {"ann"}


def test_marks_of_two_sites_are_not_compared(roster: SitePresence, clock: Clock) -> None:
    roster.enroll("bob", {TRAINER}, "x")
    roster.seen("ann", "one", "mark")
    clock.now = 20.0
    roster.seen("bob", "x", "mark")
    assert roster.alive(TRAINER, 10.0) == {"bob"}


def test_presumed_sites_count_as_alive_until_they_were_idle_too_long(ledger: Ledger, clock: Clock) -> None:
    ledger.enroll("ann", ["trainer"])
    ledger.enroll("eva", ["evaluator"])
    clock.now = 1000.0
    roster = SitePresence(ledger, clock)
    assert roster.enrolled(TRAINER) == frozenset()
    roster.presume()
    assert roster.alive(TRAINER, 10.0) == {"ann"}
    assert roster.alive(EVALUATOR, 10.0) == {"eva"}
    clock.now += 10.1
    assert roster.alive(TRAINER, 10.0) == frozenset()


def test_a_presumed_site_has_to_enroll_before_it_is_heard(ledger: Ledger, clock: Clock) -> None:
    ledger.enroll("ann", ["trainer"])
    roster = SitePresence(ledger, clock)
    roster.presume()
    with pytest.raises(NotEnrolledError):
        roster.seen("ann", "one")
    roster.enroll("ann", {TRAINER}, "one")
    roster.seen("ann", "one")


def test_an_excluded_site_is_refused_in_every_call_and_counts_nowhere(roster: SitePresence, ledger: Ledger) -> None:
    roster.exclude("ann", "wrong labels")
    calls: list[Callable[[], object]] = [
        lambda: roster.seen("ann", "one"),
        lambda: roster.enroll("ann", {TRAINER}, "two"),
    ]
    for call in calls:
        with pytest.raises(ExcludedError, match="the operator has excluded site ann: wrong labels"):
            call()
    assert roster.enrolled(TRAINER) == roster.alive(TRAINER, 10.0) == frozenset()
    assert roster.look("ann") is None
    assert ledger.sites() == {"ann": ["trainer"]}


def test_an_excluded_site_stays_out_after_a_restart_and_is_not_presumed(
    roster: SitePresence, ledger: Ledger, clock: Clock
) -> None:
    roster.exclude("ann", "wrong labels")
    again = SitePresence(ledger, clock)
    again.presume()
    assert again.enrolled(TRAINER) == frozenset()
    assert again.exclusion("ann") == "wrong labels"
    again.admit("ann")
    assert again.exclusion("ann") is None
    again.enroll("ann", {TRAINER}, "two")
    assert SitePresence(ledger, clock).exclusion("ann") is None


def test_what_is_known_of_a_silent_site_is_said_in_words(roster: SitePresence, ledger: Ledger, clock: Clock) -> None:
    assert roster.silence("ann") == "idle, last progress 0 s ago"
    roster.seen("ann", "one", Progress("n", Activity.DOWNLOADING))
    clock.now = 7.0
    assert roster.silence("ann") == "downloading, last progress 7 s ago"
    roster.seen("ann", "one", Progress("n", Activity.TRAINING, epoch=2, epochs=3))
    assert roster.silence("ann") == "training, epoch 2/3, last progress 0 s ago"
    roster.exclude("ann", "wrong labels")
    assert roster.silence("ann") == "excluded: wrong labels"
    again = SitePresence(ledger, clock)
    assert again.silence("bob") == "not heard of since the server started"


def test_a_site_that_is_held_is_known_and_counts_for_no_round(roster: SitePresence, ledger: Ledger) -> None:
    roster.enroll("bob", {TRAINER, EVALUATOR}, "x", PauseReason.APPROVAL)
    roster.enroll("cyd", {TRAINER}, "x", PauseReason.SCHEDULE)
    for role, there in ((TRAINER, {"ann"}), (EVALUATOR, set())):
        assert roster.enrolled(role) == roster.alive(role, 10.0) == there
    assert ledger.sites().keys() == {"ann", "bob", "cyd"}
    assert (roster.hold("ann"), roster.hold("bob"), roster.hold("eve")) == (
        PauseReason.NONE,
        PauseReason.APPROVAL,
        PauseReason.NONE,
    )


def test_what_is_known_of_a_held_site_says_why(roster: SitePresence, clock: Clock) -> None:
    roster.enroll("bob", {TRAINER}, "x", PauseReason.APPROVAL)
    roster.enroll("cyd", {TRAINER}, "x", PauseReason.SCHEDULE)
    clock.now += 4.0
    assert roster.look("bob") == (4.0, "awaiting approval")
    assert roster.silence("cyd") == "outside its schedule, last progress 4 s ago"


def test_a_site_is_held_until_it_enrolls_without_a_reason(roster: SitePresence) -> None:
    roster.enroll("ann", {TRAINER}, "one", PauseReason.SCHEDULE)
    roster.seen("ann", "one", Progress("n", Activity.TRAINING))  # speaking is not enough
    assert roster.enrolled(TRAINER) == frozenset()
    roster.enroll("ann", {TRAINER}, "one")
    assert roster.enrolled(TRAINER) == {"ann"}
    with pytest.raises(FencedError):
        roster.seen("ann", "two")
