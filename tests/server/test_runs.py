"""Several runs, one after the other, on one ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from protofed.common.errors import ConfigError, Fenced, NotEnrolled, ProtocolError, VersionMismatch
from protofed.common.recipe import Recipe, parse_json
from protofed.common.task import PROTOCOL_VERSION, Activity, Assignment, Finished, Progress, Role, Signal, Task
from protofed.server.blobs import MemoryBlobs
from protofed.server.coordinator import Coordinator
from protofed.server.ledger import Ledger
from protofed.server.phases import Broken
from protofed.server.roster import Roster
from protofed.server.runs import Runs
from protofed.server.surroundings import Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import Clock, MakeLab

SITES = ("ann", "bob", "cyd")


@pytest.fixture
def around(clock: Clock) -> Surroundings:
    ledger = Ledger()
    return Surroundings(ledger, MemoryBlobs(), Roster(ledger, clock), clock)


@pytest.fixture
def recipe(make: MakeLab) -> Callable[..., Recipe]:
    return lambda run, **tables: make(run, **tables).recipe


@pytest.fixture
def two(around: Surroundings, recipe: Callable[..., Recipe]) -> Runs:
    return Runs([recipe("one"), recipe("two")], around)


def enroll(runs: Runs, site: str, protocol: int = PROTOCOL_VERSION) -> Assignment | Finished:
    return runs.enroll(site, f"d-{site}", protocol, "0.0", "0.1", {Role.TRAINER})


def going_on(runs: Runs) -> Coordinator:
    """The run that goes on; fails if there is none."""
    assert runs.current is not None
    return runs.current


def ask(runs: Runs, run: str, site: str) -> Any:
    return runs.next_task(run, site, f"d-{site}")


def test_a_daemon_is_given_the_current_run_whole(two: Runs) -> None:
    answer = enroll(two, "ann")
    assert isinstance(answer, Assignment)
    assert answer.run == "one"
    assert parse_json(answer.recipe, Recipe, "wire") == going_on(two).recipe


def test_the_first_trainer_is_asked_for_the_model_at_once(two: Runs) -> None:
    enroll(two, "ann")
    assert isinstance(ask(two, "one", "ann"), Task)


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_refused_by_both_versions_and_not_enrolled(two: Runs, protocol: int) -> None:
    with pytest.raises(VersionMismatch, match=r"protofed 0\.0\) speaks protocol .*protofed 0\.1\) protocol"):
        enroll(two, "ann", protocol)
    with pytest.raises(NotEnrolled):
        ask(two, "one", "ann")


def test_the_next_run_begins_when_one_is_finished(two: Runs) -> None:
    for site in SITES:
        enroll(two, site)
    going_on(two).stop("enough")
    assert going_on(two).run == "two"
    assert not two.finished
    assert ask(two, "one", "ann") == Finished("enough", last=False)
    again = enroll(two, "ann")
    assert isinstance(again, Assignment)
    assert again.run == "two"


def test_a_site_of_an_older_run_is_told_how_that_one_ended(two: Runs) -> None:
    enroll(two, "ann")
    going_on(two).stop("failed badly")
    going_on(two).stop("completed")
    assert ask(two, "one", "ann") == Finished("failed badly", last=True)
    assert ask(two, "two", "ann") == Finished("completed", last=True)


def test_when_no_run_is_left_everyone_who_is_alive_has_to_be_told(two: Runs, clock: Clock) -> None:
    for site in ("ann", "bob"):
        enroll(two, site)
    for _ in range(2):
        going_on(two).stop("enough")
    assert two.finished
    assert not two.everyone_was_told()
    assert ask(two, "two", "ann") == Finished("enough", last=True)
    assert not two.everyone_was_told()
    assert enroll(two, "bob") == Finished("enough", last=True)
    assert two.everyone_was_told()
    enroll(two, "ann")
    clock.now += 1000.0
    assert two.everyone_was_told()


def test_being_told_of_one_finished_run_is_not_being_told_of_all(two: Runs) -> None:
    enroll(two, "ann")
    going_on(two).stop("enough")
    ask(two, "one", "ann")
    going_on(two).stop("enough")
    assert not two.everyone_was_told()


def test_failed_runs_are_listed_with_their_reason(around: Surroundings, recipe: Callable[..., Recipe]) -> None:
    runs = Runs([recipe("one"), recipe("two"), recipe("three")], around)
    runs.of("one")._driver.handle(Broken("disk"))
    runs.of("two").stop("enough")
    assert runs.failed == ["one: disk"]


def test_a_heartbeat_of_another_run_is_aborted(two: Runs) -> None:
    enroll(two, "ann")
    nonce = ask(two, "one", "ann").nonce
    progress = Progress(nonce, Activity.TRAINING)
    assert two.heartbeat("two", "ann", "d-ann", progress) is Signal.ABORT
    assert two.heartbeat("one", "ann", "d-ann", progress) is Signal.CONTINUE
    going_on(two).stop("enough")
    assert two.heartbeat("one", "ann", "d-ann", progress) is Signal.ABORT


def test_a_fenced_daemon_is_fenced_in_every_run(two: Runs) -> None:
    enroll(two, "ann")
    two.enroll("ann", "newer", PROTOCOL_VERSION, "0.0", "0.1", {Role.TRAINER})
    for run in ("one", "two", "unknown"):
        with pytest.raises(Fenced):
            ask(two, run, "ann")


def test_runs_are_found_by_name_also_when_they_are_over(two: Runs) -> None:
    first = going_on(two)
    first.stop("enough")
    assert two.of("one") is first
    with pytest.raises(ProtocolError, match="no such run"):
        two.of("three")


def test_two_recipes_of_one_name_are_refused(around: Surroundings, recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match="same name: one, two, one"):
        Runs([recipe("one"), recipe("two"), recipe("one", rounds=9)], around)


def test_a_restarted_server_goes_on_with_the_run_that_is_not_over(
    two: Runs, around: Surroundings, recipe: Callable[..., Recipe]
) -> None:
    going_on(two).stop("enough")
    again = Runs([recipe("one"), recipe("two")], around)
    assert going_on(again).run == "two"
    assert not again.finished
