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
from protofed.server.storage.rows import CertificateRow

if TYPE_CHECKING:
    from tests.server.conftest import Clock

TRAINER, EVALUATOR = Role.TRAINER, Role.EVALUATOR


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def presence(ledger: Ledger, clock: Clock) -> SitePresence:
    presence = SitePresence(ledger, clock)
    presence.enroll("ann", {TRAINER}, "one")
    return presence


def test_roles_are_kept_apart(presence: SitePresence, ledger: Ledger) -> None:
    presence.enroll("eva", {EVALUATOR}, "x")
    presence.enroll("bob", {TRAINER, EVALUATOR}, "x")
    assert presence.enrolled(TRAINER) == {"ann", "bob"}
    assert presence.enrolled(EVALUATOR) == {"bob", "eva"}
    assert ledger.sites() == {"ann": ["trainer"], "bob": ["evaluator", "trainer"], "eva": ["evaluator"]}


def test_a_newer_daemon_fences_the_older_for_good_with_all_that_it_says(presence: SitePresence, clock: Clock) -> None:
    presence.seen("ann", "one")
    presence.enroll("ann", {EVALUATOR}, "two")
    assert not presence.enrolled(TRAINER)
    assert presence.enrolled(EVALUATOR) == {"ann"}
    clock.now = 20.0
    for _ in range(2):
        with pytest.raises(FencedError):
            presence.seen("ann", "one", Progress("n", Activity.TRAINING))
    assert presence.progress("ann") is None
    assert presence.alive(EVALUATOR, 10.0) == frozenset()
    presence.seen("ann", "two")
    assert presence.alive(EVALUATOR, 10.0) == {"ann"}


def test_a_site_is_alive_until_it_was_idle_too_long_and_again_when_it_speaks(
    presence: SitePresence, clock: Clock
) -> None:
    clock.now = 10.0
    assert presence.alive(TRAINER, 10.0) == {"ann"}
    clock.now = 10.1
    assert presence.alive(TRAINER, 10.0) == frozenset()
    assert presence.enrolled(TRAINER) == {"ann"}
    presence.seen("ann", "one")
    assert presence.alive(TRAINER, 10.0) == {"ann"}


def test_progress_keeps_a_site_alive_and_noise_does_not(presence: SitePresence, clock: Clock) -> None:
    for batch in range(5):
        presence.seen("ann", "one", ("epoch", batch))
        clock.now += 8.0
    assert presence.alive(TRAINER, 10.0) == {"ann"}
    for _ in range(2):
        presence.seen("ann", "one", ("epoch", 4))
        clock.now += 8.0
    assert presence.alive(TRAINER, 10.0) == frozenset()
    presence.seen("ann", "one", ("epoch", 5))
    assert presence.alive(TRAINER, 10.0) == {"ann"}


def test_training_that_says_it_moves_counts_for_hours_and_one_that_stops_does_not(
    presence: SitePresence, clock: Clock
) -> None:
    told = Progress("n", Activity.TRAINING, epoch=1, epochs=2, making_progress=True)
    for _ in range(1000):
        clock.now += 8.0
        presence.seen("ann", "one", told)
    assert presence.alive(TRAINER, 10.0) == {"ann"}
    for _ in range(3):
        clock.now += 8.0
        presence.seen("ann", "one", replace(told, making_progress=False))
    assert presence.alive(TRAINER, 10.0) == frozenset()


def test_telemetry_that_changes_is_no_progress(presence: SitePresence, clock: Clock) -> None:
    """A hung daemon whose disk fills is as silent as any other."""
    told = Progress("n", Activity.TRAINING, epoch=1, epochs=2)
    for free in range(4):
        presence.seen("ann", "one", replace(told, telemetry={"disk_free_bytes": float(free)}))
        clock.now += 4.0
    assert presence.alive(TRAINER, 10.0) == frozenset()
    assert presence.telemetry("ann") == {"disk_free_bytes": 3.0}  # it is heard all the same
    presence.note("ann", replace(told, epoch=2))
    assert presence.alive(TRAINER, 10.0) == frozenset()


def test_what_a_daemon_told_last_is_there_to_be_looked_at(presence: SitePresence) -> None:
    idle, training = Progress("", Activity.IDLE, telemetry={"step_seconds": 0.5}), Progress("n", Activity.TRAINING)
    assert presence.progress("ann") is None
    assert presence.progress("nobody") is None
    assert presence.telemetry("ann") == presence.telemetry("nobody") == {}
    presence.seen("ann", "one", training)
    assert presence.progress("ann") is training
    presence.seen("ann", "one")  # any other call says nothing of it
    assert presence.progress("ann") is training
    presence.note("ann", idle)
    assert (presence.progress("ann"), presence.telemetry("ann")) == (idle, {"step_seconds": 0.5})
    presence.note("nobody", idle)
    assert presence.progress("nobody") is None
    presence.enroll("ann", {TRAINER}, "two")  # another daemon
    assert presence.progress("ann") is None


def test_a_site_that_leaves_takes_no_tasks_until_it_enrolls_or_asks_for_one(presence: SitePresence) -> None:
    ways: list[Callable[[], None]] = [
        lambda: presence.enroll("ann", {TRAINER}, "one"),
        lambda: presence.asks("ann", "one"),
    ]
    for back in ways:
        presence.leaves("ann")
        presence.seen("ann", "one", Progress("n", Activity.TRAINING))  # a heartbeat that was under way
        assert presence.pause_reason("ann") is PauseReason.WITHDRAWN
        assert presence.alive(TRAINER, 10.0) == frozenset()
        assert (presence.look("ann") or (0.0, ""))[1] == PauseReason.WITHDRAWN.value
        back()
        assert presence.pause_reason("ann") is PauseReason.NONE
        assert presence.alive(TRAINER, 10.0) == {"ann"}


def test_asking_for_a_task_changes_nothing_of_how_a_site_enrolled(presence: SitePresence) -> None:
    presence.enroll("ann", {TRAINER}, "one", PauseReason.PAUSED)
    presence.asks("ann", "one")
    presence.leaves("nobody")
    assert presence.pause_reason("ann") is PauseReason.PAUSED
    assert presence.pause_reason("nobody") is PauseReason.NONE


def test_presumed_sites_count_as_alive_until_they_were_idle_too_long_and_are_heard_only_when_they_enroll(
    ledger: Ledger, clock: Clock
) -> None:
    ledger.enroll("ann", ["trainer"])
    ledger.enroll("eva", ["evaluator"])
    clock.now = 1000.0
    presence = SitePresence(ledger, clock)
    assert presence.enrolled(TRAINER) == frozenset()
    presence.presume()
    assert presence.alive(TRAINER, 10.0) == {"ann"}
    assert presence.alive(EVALUATOR, 10.0) == {"eva"}
    clock.now += 10.1
    for site in ("ann", "eve"):
        with pytest.raises(NotEnrolledError):
            presence.seen(site, "one")
    assert presence.alive(TRAINER, 10.0) == frozenset()
    assert (presence.look("ann"), presence.look("eve")) == (None, None)


def test_a_presumed_site_that_trains_is_alive_by_its_heartbeats_and_one_that_hangs_is_not(
    ledger: Ledger, clock: Clock
) -> None:
    """It enrolls only when its fit of hours ends."""
    ledger.enroll("ann", ["trainer"])
    presence = SitePresence(ledger, clock)
    presence.presume()
    assert presence.last_seen("ann") == "not heard of since the server started"

    def beat(mark: Progress | None) -> None:
        clock.now += 8.0
        with pytest.raises(NotEnrolledError):
            presence.seen("ann", "one", mark)

    told = Progress("n", Activity.TRAINING, epoch=1, epochs=2, making_progress=True)
    for _ in range(100):
        beat(told)
    assert presence.alive(TRAINER, 10.0) == {"ann"}
    assert presence.last_seen("ann") == "training, epoch 1/2, last progress 0 s ago"
    for _ in range(3):
        beat(replace(told, making_progress=False))
    assert presence.alive(TRAINER, 10.0) == frozenset()


def test_an_excluded_site_is_refused_in_every_call_and_counts_nowhere(presence: SitePresence, ledger: Ledger) -> None:
    presence.exclude("ann", "wrong labels")
    calls: list[Callable[[], object]] = [
        lambda: presence.seen("ann", "one"),
        lambda: presence.enroll("ann", {TRAINER}, "two"),
    ]
    for call in calls:
        with pytest.raises(ExcludedError, match="the operator has excluded site ann: wrong labels"):
            call()
    assert presence.enrolled(TRAINER) == presence.alive(TRAINER, 10.0) == frozenset()
    assert presence.look("ann") is None
    assert ledger.sites() == {"ann": ["trainer"]}


def test_an_excluded_site_stays_out_after_a_restart_and_is_not_presumed(
    presence: SitePresence, ledger: Ledger, clock: Clock
) -> None:
    presence.exclude("ann", "wrong labels")
    again = SitePresence(ledger, clock)
    again.presume()
    assert again.enrolled(TRAINER) == frozenset()
    assert again.exclusion("ann") == "wrong labels"
    again.admit("ann")
    assert again.exclusion("ann") is None
    again.enroll("ann", {TRAINER}, "two")
    assert SitePresence(ledger, clock).exclusion("ann") is None


def test_a_site_is_presumed_unless_all_of_its_certificates_are_revoked(ledger: Ledger, clock: Clock) -> None:
    def certificate(number: int, site: str, revoked_at: float | None) -> CertificateRow:
        return CertificateRow(f"{number:064x}", "site", site, 0.0, 1e9, 0.0, revoked_at, roles=("trainer",))

    for site in ("ann", "bob", "cyd", "dan"):
        ledger.enroll(site, ["trainer"])
    ledger.register(certificate(1, "ann", None))
    ledger.register(certificate(2, "bob", 5.0))
    ledger.register(certificate(3, "bob", 6.0))
    ledger.register(certificate(4, "cyd", 5.0))
    ledger.register(certificate(5, "cyd", None))  # registered again; dan has none: a server in plain text
    presence = SitePresence(ledger, clock)
    presence.presume()
    assert presence.enrolled(TRAINER) == presence.ages().keys() == {"ann", "cyd", "dan"}


def test_what_is_known_of_a_silent_site_is_said_in_words(presence: SitePresence, ledger: Ledger, clock: Clock) -> None:
    assert presence.last_seen("ann") == "idle, last progress 0 s ago"
    presence.seen("ann", "one", Progress("n", Activity.DOWNLOADING))
    clock.now = 7.0
    assert presence.last_seen("ann") == "downloading, last progress 7 s ago"
    presence.seen("ann", "one", Progress("n", Activity.TRAINING, epoch=2, epochs=3))
    assert presence.last_seen("ann") == "training, epoch 2/3, last progress 0 s ago"
    presence.exclude("ann", "wrong labels")
    assert presence.last_seen("ann") == "excluded: wrong labels"
    again = SitePresence(ledger, clock)
    assert again.last_seen("bob") == "not heard of since the server started"


def test_a_site_that_is_held_is_known_and_counts_for_no_round_until_it_enrolls_without_a_reason(
    presence: SitePresence, ledger: Ledger
) -> None:
    presence.enroll("bob", {TRAINER, EVALUATOR}, "x", PauseReason.APPROVAL)
    presence.enroll("cyd", {TRAINER}, "x", PauseReason.SCHEDULE)
    assert presence.look("bob") == (0.0, "awaiting approval")
    assert presence.last_seen("cyd") == "outside its schedule, last progress 0 s ago"
    for role, there in ((TRAINER, {"ann"}), (EVALUATOR, set())):
        assert presence.enrolled(role) == presence.alive(role, 10.0) == there
    assert ledger.sites().keys() == {"ann", "bob", "cyd"}
    assert (presence.pause_reason("ann"), presence.pause_reason("bob"), presence.pause_reason("eve")) == (
        PauseReason.NONE,
        PauseReason.APPROVAL,
        PauseReason.NONE,
    )
    presence.enroll("ann", {TRAINER}, "one", PauseReason.SCHEDULE)
    presence.seen("ann", "one", Progress("n", Activity.TRAINING))  # speaking is not enough
    assert presence.enrolled(TRAINER) == frozenset()
    presence.enroll("ann", {TRAINER}, "one")
    assert presence.enrolled(TRAINER) == {"ann"}
    with pytest.raises(FencedError):
        presence.seen("ann", "two")
