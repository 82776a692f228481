"""Several runs, one after the other, on one ledger."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.server.conftest import Later
from tests.server.conftest import recipe as recipe_of
from tests.support.operator_lab import OperatorLab, operator_lab

from protofed.common.codec import Buffer
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import (
    ConfigError,
    FencedError,
    NotEnrolledError,
    OutOfSpaceError,
    ProtocolError,
    StateError,
    VersionMismatchError,
)
from protofed.common.protocol.messages import (
    PROTOCOL_VERSION,
    Activity,
    Assignment,
    Finished,
    PauseReason,
    Progress,
    Role,
    Signal,
    Task,
    Wait,
)
from protofed.deploy.site.check import as_offered
from protofed.server.rounds import queue
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.phases import Broken
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import NO_RUN, RunQueue
from protofed.server.rounds.run import Run
from protofed.server.storage.blobs import FolderBlobs, MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.testing.small_recipe import small_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import Clock, MakeLab

SITES = ("ann", "bob", "cyd")


@pytest.fixture
def context(clock: Clock) -> ServerContext:
    ledger = Ledger()
    return ServerContext(ledger, MemoryBlobs(), SitePresence(ledger, clock), clock)


@pytest.fixture
def recipe(make: MakeLab) -> Callable[..., Recipe]:
    return lambda run, **tables: make(run, **tables).recipe


@pytest.fixture
def two(context: ServerContext, recipe: Callable[..., Recipe]) -> RunQueue:
    return RunQueue([recipe("one"), recipe("two")], context)


def enroll(runs: RunQueue, site: str, protocol: int = PROTOCOL_VERSION) -> Assignment | Finished:
    return runs.enroll(site, f"d-{site}", protocol, "0.0", "0.1", {Role.TRAINER})


def going_on(runs: RunQueue) -> Run:
    """The run that goes on; fails if there is none."""
    assert runs.current is not None
    return runs.current


def ask(runs: RunQueue, run: str, site: str) -> Any:
    return runs.next_task(run, site, f"d-{site}")


def test_what_a_site_sees_before_a_run_is_what_it_is_sent_also_after_a_restart(context: ServerContext) -> None:
    recipe = small_recipe("fednh", seed=7, method={"name": "fednh"})
    preview = as_offered(recipe)
    for _ in range(2):
        answer = enroll(RunQueue([recipe], context), "ann")
        assert isinstance(answer, Assignment)
        assert (answer.run, answer.recipe) == (recipe.name, preview.recipe)
        assert answer.preprocessing_digest == recipe.preprocessing_digest()
    method = parse_json(preview.recipe, Recipe, "wire").method
    other = recipe.model_copy(update={"method": method.model_copy(update={"scale": 30.0})})
    with pytest.raises(StateError, match="another recipe"):
        RunQueue([other], context)


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_refused_by_both_versions_and_not_enrolled(two: RunQueue, protocol: int) -> None:
    with pytest.raises(VersionMismatchError):
        enroll(two, "ann", protocol)
    with pytest.raises(NotEnrolledError):
        ask(two, "one", "ann")


def test_of_many_sites_the_timers_tick_looks_at_all_together(two: RunQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick looks at every site: thousands that enroll at once would each pay for all of them."""
    monkeypatch.setattr(queue, "FEW_SITES", 1)
    for site in SITES:
        enroll(two, site)
    assert isinstance(ask(two, "one", "ann"), Wait)
    two.tick()
    assert any(isinstance(ask(two, "one", site), Task) for site in SITES)


def test_a_site_without_a_task_is_told_so_as_the_coordinator_would(two: RunQueue, clock: Clock) -> None:
    for site in SITES[:3]:
        enroll(two, site)
    for site in SITES[:3]:
        answer = ask(two, "one", site)
        assert two.idle("one", site, f"d-{site}") == (answer if isinstance(answer, Wait) else None)
    assert two.idle("two", "ann", "d-ann") is None, "another run"
    with pytest.raises(NotEnrolledError):
        two.idle("one", "stranger", "d-stranger")
    idle = next(site for site in SITES[:3] if isinstance(ask(two, "one", site), Wait))
    with pytest.raises(FencedError):
        two.idle("one", idle, "older")
    clock.now += 1000.0
    two.idle("one", idle, f"d-{idle}")
    assert idle in two._context.presence.alive(Role.TRAINER, 1.0), "it has called"


def test_a_daemon_that_waits_for_a_run_is_given_the_next_one_and_fences_no_newer_one(
    context: ServerContext, recipe: Callable[..., Recipe]
) -> None:
    runs = RunQueue([], context)
    assert enroll(runs, "ann") == runs.offer("ann", "d-ann") == Finished("no run is queued", last=True)
    runs.enroll("ann", "newer", PROTOCOL_VERSION, "0.0", "0.1", {Role.TRAINER})
    runs.start(recipe("one"))
    with pytest.raises(FencedError):
        runs.offer("ann", "d-ann")
    answer = runs.offer("ann", "newer")
    assert isinstance(answer, Assignment)
    assert answer.run == "one"


def test_the_next_run_begins_when_one_is_finished(two: RunQueue) -> None:
    for site in SITES:
        enroll(two, site)
    going_on(two).stop("enough")
    assert going_on(two).name == "two"
    assert not two.finished
    assert ask(two, "one", "ann") == Finished("enough", last=False)
    again = enroll(two, "ann")
    assert isinstance(again, Assignment)
    assert again.run == "two"


def test_when_no_run_is_left_everyone_who_is_alive_has_to_be_told(two: RunQueue, clock: Clock) -> None:
    for site in ("ann", "bob"):
        enroll(two, site)
    first = going_on(two)
    first.stop("enough")
    ask(two, "one", "ann")  # being told of one run is not being told of all
    assert two.of("one") is first
    going_on(two).stop("enough")
    assert two.finished
    assert not two.all_informed()
    assert ask(two, "two", "ann") == Finished("enough", last=True)
    assert not two.all_informed()
    assert enroll(two, "bob") == Finished("enough", last=True)
    assert two.all_informed()
    enroll(two, "ann")
    clock.now += 1000.0
    assert two.all_informed()


def test_failed_runs_are_listed_with_their_reason(context: ServerContext, recipe: Callable[..., Recipe]) -> None:
    runs = RunQueue([recipe("one"), recipe("two"), recipe("three")], context)
    runs.of("one").handle(Broken("disk"))
    runs.of("two").stop("enough")
    assert runs.failed == ["one: disk"]
    again = RunQueue([recipe("one"), recipe("two"), recipe("three")], context)
    assert (going_on(again).name, again.finished) == ("three", False)
    with pytest.raises(ProtocolError, match="no such run"):
        again.of("four")
    with pytest.raises(ConfigError, match="same name: one, two, one"):
        RunQueue([recipe("one"), recipe("two"), recipe("one", rounds=9)], context)


def test_a_fit_from_before_a_restart_is_waited_for_and_ended_when_its_round_is_over() -> None:
    """Its daemon has not enrolled again, and does so when the fit ends."""
    lab = operator_lab()
    lab.start("one", federation={"deadline_s": 3600.0, "grace": 0.5})
    lab.enroll(*SITES)
    lab.later(0.0)
    lab.first_models()
    cyd = lab.task("cyd")
    del lab.here["cyd"]
    lab.restart()
    beat = "one", "cyd", "daemon-cyd", Progress(cyd.task_id, Activity.TRAINING, making_progress=True)
    for site in ("ann", "bob"):
        lab.push(site, lab.model(1.0))
    for _ in range(100):  # far longer than stall_timeout_s
        lab.later(5.0)
        with pytest.raises(NotEnrolledError):
            lab.runs.heartbeat(*beat)
    assert lab.ledger.state("one", 1) is None
    lab.later(51.0)  # it hangs
    assert lab.ledger.state("one", 1) is not None
    assert lab.runs.heartbeat(*beat) is Signal.ABORT
    lab.operation.abort("one", "enough")
    assert lab.runs.heartbeat(*beat) is Signal.ABORT
    with pytest.raises(NotEnrolledError):  # an idle one enrolls at once
        lab.runs.heartbeat("one", "cyd", "daemon-cyd", Progress("", Activity.IDLE))


def test_a_heartbeat_of_another_run_is_aborted(two: RunQueue) -> None:
    for site in ("ann", "bob"):
        enroll(two, site)
    task_id = ask(two, "one", "ann").task_id
    progress = Progress(task_id, Activity.TRAINING)
    assert two.heartbeat("two", "ann", "d-ann", progress) is Signal.ABORT
    assert two.heartbeat("one", "ann", "d-ann", progress) is Signal.CONTINUE
    going_on(two).stop("enough")
    assert two.heartbeat("one", "ann", "d-ann", progress) is Signal.ABORT


def test_a_fenced_daemon_is_fenced_in_every_run(two: RunQueue) -> None:
    enroll(two, "ann")
    two.enroll("ann", "newer", PROTOCOL_VERSION, "0.0", "0.1", {Role.TRAINER})
    for run in ("one", "two", "unknown"):
        with pytest.raises(FencedError):
            ask(two, run, "ann")


# Runs that cannot go on: none does for ever


@pytest.fixture
def desk() -> OperatorLab:
    """Run `one` of 2 rounds has published round 1, of 1.0; `two` waits."""
    desk = operator_lab()
    for run in ("one", "two"):
        desk.start(run)
    desk.begin()
    desk.round(ann=1.0, bob=1.0, cyd=1.0)
    return desk


def reason_of(desk: OperatorLab, run: str) -> str:
    row = desk.ledger.run(run)
    assert row is not None
    return row.reason or ""


def test_a_run_whose_state_is_gone_has_failed_the_next_one_goes_on_and_so_does_it_from_an_earlier_round(
    desk: OperatorLab,
) -> None:
    desk.blobs.discard(desk.address)
    desk.restart()
    assert desk.statuses() == {"one": "failed", "two": "running"}
    assert "could not be taken up again: blob" in reason_of(desk, "one")
    assert "`protofed runs rollback one` to an earlier round" in reason_of(desk, "one")
    assert desk.runs.failed == [f"one: {reason_of(desk, 'one')}"]
    desk.later(0.0)
    assert desk.task(desk.makers()[0]).run == "two"
    with pytest.raises(ConfigError, match="no longer kept"):
        desk.operation.roll_back("one", 1)
    assert desk.operation.roll_back("one", 0).status == "queued"
    desk.operation.abort("two", "")
    desk.later(0.0)
    assert (desk.task("ann").run, desk.task("ann").round) == ("one", 1)
    assert desk.value == 0.0


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EMFILE, OutOfSpaceError), (errno.ENOMEM, OutOfSpaceError), (errno.EIO, StateError)]
)
def test_a_lack_of_handles_or_memory_at_the_start_is_no_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: type[StateError]
) -> None:
    """The server ends, and is started again; of a blob that cannot be read for good, the run has failed."""
    desk = OperatorLab(recipe_of(), FolderBlobs(tmp_path), Ledger())
    desk.start("one")
    desk.begin()

    def unreadable(_path: Path) -> Buffer:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(desk.blobs, "_read", unreadable)
        if code is OutOfSpaceError:
            with pytest.raises(OutOfSpaceError):
                desk.restart()
        else:
            desk.restart()
    desk.restart()
    assert desk.statuses() == {"one": "running" if code is OutOfSpaceError else "failed"}


def test_a_run_whose_end_could_not_be_recorded_ends_the_server(
    desk: OperatorLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its phase says that it has ended, and the ledger that it goes on."""

    def locked(*_end: object) -> None:
        raise StateError("the ledger cannot be used: database is locked")

    desk.operation.abort("two", "enough")
    with monkeypatch.context() as patched:
        patched.setattr(desk.ledger, "end_run", locked)
        with pytest.raises(StateError, match="locked"):
            desk.round(ann=2.0, bob=2.0, cyd=2.0)
    assert isinstance(desk.phase, phases.FinishedPhase)
    assert not desk.runs.finished
    assert desk.come_back("ann") == Finished("enough", last=False)  # its daemon does not end
    for _ in range(2):
        with pytest.raises(StateError, match="locked"):
            desk.later(0.0)
    desk.restart()
    desk.later(desk.recipe.federation.score_deadline_s)
    assert desk.statuses()["one"] == "completed"


@pytest.mark.parametrize(
    ("old", "new", "phrase"),
    [("fedavg", "fedhn", "did you mean 'fednh'?"), ("rounds", "ronds", "did you mean 'rounds'?")],
)
def test_a_run_of_a_recipe_that_this_version_does_not_know_has_failed(
    desk: OperatorLab, old: str, new: str, phrase: str
) -> None:
    with desk.ledger._write() as connection:
        change = "update runs set recipe = replace(recipe, ?, ?) where run = 'one'"
        connection.exec_driver_sql(change, (f'"{old}"', f'"{new}"'))
    desk.restart()
    assert desk.statuses() == {"one": "failed", "two": "running"}
    assert phrase in reason_of(desk, "one")


def test_recipes_of_runs_that_have_ended_may_be_given_again_and_no_others_of_their_name(desk: OperatorLab) -> None:
    desk.operation.abort("one", "enough")
    desk.given = (recipe_of("one"), recipe_of("two"))
    desk.restart()
    assert desk.statuses() == {"one": "aborted", "two": "running"}
    desk.given = (recipe_of("one", rounds=3),)
    with pytest.raises(StateError, match="'one' of another recipe"):
        desk.restart()


def test_a_server_without_a_run_answers_so_and_takes_one_later() -> None:
    desk = operator_lab()
    desk.enroll(*SITES)
    assert desk.come_back("ann") == Finished(NO_RUN, last=True)
    assert desk.runs.finished
    beat = Progress("n", Activity.TRAINING)
    assert desk.runs.heartbeat("one", "ann", "daemon-ann", beat) is Signal.ABORT
    assert desk.presence.progress("ann") is beat  # it is shown, whatever run it is of
    desk.start("one")
    answer = desk.come_back("ann")
    assert isinstance(answer, Assignment)
    assert answer.run == "one"
    assert not desk.runs.all_informed()


def test_a_run_that_waits_for_sites_longer_than_its_patience_has_failed() -> None:
    desk = operator_lab()
    desk.start("one", federation={"site_wait_timeout_s": 60.0})
    desk.start("two", federation={"site_wait_timeout_s": 60.0})
    desk.later(0.0)
    desk.later(59.0)
    assert desk.statuses() == {"one": "running", "two": "queued"}
    desk.later(1.0)
    assert reason_of(desk, "one") == "waited 60 s for enough sites to open round 0"
    assert desk.statuses() == {"one": "failed", "two": "running"}
    desk.later(59.0)  # two began to wait when it was its turn
    assert desk.statuses()["two"] == "running"


def test_a_server_that_dies_in_every_aggregation_gives_the_run_up() -> None:
    workshop = Later()
    desk = operator_lab()
    desk.work = workshop
    desk.restart()
    desk.start("one", federation={"max_attempts": 3, "min_sites": 1, "quorum": 1})
    desk.start("two")
    desk.enroll("ann")
    desk.later(0.0)
    desk.push("ann", desk.model(0.0))
    for _ in range(2):
        workshop.jobs.clear()  # with the process
        desk.restart()
        desk.later(0.0)
        assert desk.statuses() == {"one": "running", "two": "queued"}
        assert len(workshop.jobs) == 1
    desk.restart()
    desk.later(0.0)
    assert desk.statuses() == {"one": "failed", "two": "running"}
    assert reason_of(desk, "one") == "the server died 3 times while it aggregated round 0; it may need more memory"


# Sites that wait for their approval, or their hours


def held(runs: RunQueue, site: str, hold: PauseReason = PauseReason.APPROVAL) -> Assignment | Finished:
    return runs.enroll(site, f"d-{site}", PROTOCOL_VERSION, "0.0", "0.1", {Role.TRAINER}, hold)


def test_a_held_site_is_told_of_the_run_and_no_round_counts_on_it(two: RunQueue) -> None:
    answer = held(two, "ann")
    assert isinstance(answer, Assignment)
    assert answer.run == "one"
    assert isinstance(ask(two, "one", "ann"), Wait)
    for site in ("bob", "cyd"):
        enroll(two, site)
    assert isinstance(ask(two, "one", "bob"), Task)
    enroll(two, "ann")
    assert isinstance(ask(two, "one", "ann"), Wait)  # bob and cyd make the model


def test_a_site_that_leaves_is_not_waited_for(two: RunQueue) -> None:
    for site in ("ann", "bob"):
        enroll(two, site)
    task = ask(two, "one", "ann")
    assert isinstance(task, Task)
    held(two, "ann", PauseReason.SCHEDULE)
    enroll(two, "cyd")
    two.tick()
    assert isinstance(ask(two, "one", "bob"), Task)
    assert isinstance(ask(two, "one", "ann"), Wait)
    statuses = {row.site: (row.task_status, row.reason) for row in two._ledger.tasks("one", 0)}
    assert statuses["ann"] == ("failed", "outside its schedule")


def test_nobody_has_to_tell_a_held_site_that_no_run_is_left(two: RunQueue) -> None:
    for site in ("ann", "bob"):
        enroll(two, site)
    held(two, "ann")
    for _ in range(2):
        going_on(two).stop("enough")
    assert not two.all_informed()
    assert ask(two, "two", "bob") == Finished("enough", last=True)
    assert two.all_informed()
    assert held(two, "ann") == Finished("enough", last=True)


@pytest.mark.parametrize("hold", [hold for hold in PauseReason if hold])
def test_the_operator_sees_why_a_site_is_held(hold: PauseReason) -> None:
    desk = operator_lab()
    desk.start("one")
    desk.runs.enroll("ann", "d", PROTOCOL_VERSION, "0", "0", {Role.TRAINER}, hold)
    (seen,) = desk.operation.sites()
    assert (seen.site, seen.status, seen.activity_text) == ("ann", "held", hold.value)
