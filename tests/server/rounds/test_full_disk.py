"""A disk that is full while the ledger or its journal is written: no tick ends the server; with room, all goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Connection
from tests.server.conftest import EVALUATOR, TRAINERS, Lab, recipe
from tests.server.rounds.secure_aggregation.test_steps import SITES, Secure
from tests.support.operator_lab import OperatorLab

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.errors import ConflictError, DiskFailureError, OutOfSpaceError, StateError
from protofed.common.protocol.messages import SUM_STEPS, Role, TaskKind, Verdict
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.aggregation.aggregation import PAUSE_S
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.waiting import WaitReason
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RoundOutcome

if TYPE_CHECKING:
    from tests.server.conftest import MakeLab

PLENTY = 10_000


class Room:
    """Of a disk: room for so many more records; without any, so many are refused until there is plenty again."""

    def __init__(self, records: int = PLENTY, refusals: int = PLENTY) -> None:
        self.records, self.refusals, self.refused = records, refusals, 0

    def take(self) -> None:
        if self.records == 0:
            self.refused += 1
            if self.refused < self.refusals:
                raise OutOfSpaceError("no space left on device; free some")
            self.records = PLENTY
            raise OutOfSpaceError("no space left on device; free some")
        self.records -= 1


class TightLedger(Ledger):
    """A ledger in such a room."""

    def __init__(self, room: Room) -> None:
        self.room = Room()
        super().__init__()
        self.room = room

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        self.settle_promises()
        self.room.take()
        with super()._write() as connection:
            yield connection


class TightJournal:
    """A journal in such a room."""

    def __init__(self, room: Room) -> None:
        self.room, self.events = room, list[str]()

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        self.room.take()
        self.events += [event for event, _ in entries]


def tight_ledger(room: Room, kind: str) -> Ledger:
    """A ledger of which one half is in this room, and the other has all it wants."""
    ledger = TightLedger(room if kind == "database" else Room())
    ledger.attach(TightJournal(room if kind == "journal" else Room()))
    return ledger


KINDS = ("database", "journal")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """What is full."""
    return str(request.param)


@pytest.fixture
def room() -> Room:
    return Room()


@pytest.fixture
def lab(make: MakeLab, room: Room, kind: str) -> Lab:
    """Round 1 of 2 is open, and so far there is room."""
    return make(ledger=tight_ledger(room, kind)).begin()


def attempted(call: Callable[[], object]) -> None:
    """What a site does: it tries again later."""
    with suppress(OutOfSpaceError):
        call()


def go_on(lab: Lab, turns: int = 40) -> None:
    """Every site does what it is asked for, until the run is over; the clock goes on by a pause a turn."""
    values = dict(zip(TRAINERS, (3.0, 4.0, 5.0), strict=True))
    for _ in range(turns):
        if isinstance(lab.phase, phases.FinishedPhase):
            return
        lab.later(PAUSE_S, alive=tuple(lab.here))  # which raises nothing
        for site in lab.here:
            kind = lab.asked(site)
            if kind is TaskKind.SCORE:
                attempted(lambda site=site: lab.score(site))  # type: ignore[misc]
            elif kind is not None:  # all make the same first model
                value = values[site] if kind is TaskKind.FIT else 0.0
                attempted(lambda site=site, value=value: lab.push(site, lab.model(value)))  # type: ignore[misc]


def waits_for(lab: Lab) -> WaitReason | None:
    waiting = lab.run.waiting(Certificates(lab.ledger))
    return None if waiting is None else waiting.reason


def ended(lab: Lab, outcome: str) -> float:
    """How many attempts ended so, by the server's metrics."""
    return lab.metrics.registry.get_sample_value("protofed_rounds_total", {"outcome": outcome}) or 0.0


@pytest.mark.parametrize(
    ("kind", "before"), [*(("database", n) for n in range(30)), *(("journal", n) for n in range(12))]
)
def test_full_before_any_record_for_a_while_a_run_ends_as_one_with_room(make: MakeLab, kind: str, before: int) -> None:
    room = Room()
    lab = make(ledger=tight_ledger(room, kind))
    lab.enroll(EVALUATOR, role=Role.EVALUATOR)
    lab.enroll(*TRAINERS)
    room.records, room.refusals = before, 3
    go_on(lab)
    assert room.refused == 3
    assert isinstance(lab.phase, phases.FinishedPhase)
    assert (lab.phase.outcome, lab.value) == (RoundOutcome.COMPLETED, 4.0)
    assert [row.attempt for row in lab.ledger.rounds("test")] == [1, 1, 1]
    for number in (1, 2):
        assert [row.task.site for row in lab.ledger.updates("test", number) if row.counts] == list(TRAINERS)
        assert set(lab.ledger.scores("test", number)[number]) == {*TRAINERS, EVALUATOR}
    assert (ended(lab, "committed"), ended(lab, "degraded"), ended(lab, "abandoned")) == (3, 0, 0)
    assert lab.ledger.is_settled


def test_a_round_is_abandoned_when_there_is_room_to_say_so(lab: Lab, room: Room) -> None:
    task = lab.task("ann")
    room.records = 0
    lab.later(101.0, alive=TRAINERS)
    for tries in range(2, 5):
        assert waits_for(lab) is WaitReason.DISK
        assert lab.asked("ann") is None  # an update would come too late
        lab.later(PAUSE_S, alive=TRAINERS)
        assert (room.refused, ended(lab, "abandoned")) == (tries, 0)
    room.records = PLENTY
    lab.later(PAUSE_S - 0.1, alive=TRAINERS)
    assert waits_for(lab) is WaitReason.DISK
    lab.later(0.1, alive=TRAINERS)
    lab.later(0.0)
    assert (ended(lab, "abandoned"), waits_for(lab)) == (1, WaitReason.UPDATES)
    first, second = lab.ledger.rounds("test")[1:]
    assert (first.abandoned, second.attempt) == ("0 updates at the deadline, quorum 2", 2)
    seen = {task.reason for task in lab.ledger.tasks("test", 1, 1)}
    assert seen == {"idle, last progress 0 s ago"}
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.LATE
    go_on(lab)
    assert lab.value == 4.0


def test_the_end_of_a_run_is_recorded_once_behind_what_led_to_it(make: MakeLab, room: Room, kind: str) -> None:
    """The attempt is abandoned, and of the end of the run the disk takes nothing at first."""
    lab = make(ledger=tight_ledger(room, kind), federation={"max_attempts": 1}).begin()
    room.records = 1
    lab.later(101.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.ledger.rounds("test")[-1].abandoned is not None
    room.records = PLENTY
    lab.later(PAUSE_S)
    assert isinstance(lab.phase, phases.FinishedPhase)
    assert (lab.phase.outcome, ended(lab, "abandoned")) == (RoundOutcome.FAILED, 1)
    run = lab.ledger.run("test")
    assert run is not None
    assert (run.outcome, lab.ledger.is_settled) == (RoundOutcome.FAILED, True)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_restart_and_a_roll_back_while_a_step_waits_decide_again_from_the_ledger(
    lab: Lab, room: Room, rolled_back: bool
) -> None:
    room.records = 0
    lab.later(101.0)
    room.records = PLENTY
    if rolled_back:
        lab.run.roll_back(0)
        lab.later(0.0, alive=TRAINERS)
        assert waits_for(lab) is WaitReason.UPDATES
    else:
        lab.restart()
    go_on(lab)
    assert isinstance(lab.phase, phases.FinishedPhase)
    assert lab.value == 4.0


def test_an_order_to_stop_is_refused_and_the_run_goes_on(make: MakeLab, room: Room) -> None:
    lab = make(ledger=tight_ledger(room, "database")).begin()
    room.records = 0
    with pytest.raises(OutOfSpaceError):
        lab.run.stop("enough")
    room.records = PLENTY
    lab.later(0.0)
    go_on(lab)
    assert isinstance(lab.phase, phases.FinishedPhase)
    assert (lab.phase.outcome, lab.value) == (RoundOutcome.COMPLETED, 4.0)


def test_an_order_to_stop_is_refused_while_a_step_waits(lab: Lab, room: Room) -> None:
    room.records = 0
    lab.later(101.0)
    room.records = PLENTY
    with pytest.raises(OutOfSpaceError):
        lab.run.stop("enough")
    lab.later(PAUSE_S)
    lab.run.stop("enough")
    assert isinstance(lab.phase, phases.FinishedPhase)
    assert (lab.phase.outcome, ended(lab, "abandoned")) == (RoundOutcome.ABORTED, 1)


def test_a_roll_back_of_a_run_that_has_ended_ends_the_server_and_forgets_no_daemon(room: Room) -> None:
    """Its ledger has gone back, and its journal not: the next start says which of them counts."""
    lab = OperatorLab(recipe(), MemoryBlobs(), tight_ledger(room, "journal"))
    lab.start("one")
    lab.begin()
    for value in (1.0, 2.0):
        lab.round(ann=value, bob=value, cyd=value)
    lab.start("two")
    lab.later(0.0)
    assert lab.statuses() == {"one": "completed", "two": "running"}
    room.records = 0
    for _ in range(2):
        with pytest.raises(OutOfSpaceError):
            lab.operation.roll_back("one", 1)
    assert all(lab.presence.look(site) is not None for site in TRAINERS)
    room.records = PLENTY
    with pytest.raises(OutOfSpaceError):
        lab.later(0.0)
    lab.restart()
    assert lab.statuses() == {"two": "running", "one": "queued"}


# Secure aggregation and rules that set updates aside


@pytest.mark.parametrize("step", SUM_STEPS)
def test_a_step_of_a_secure_aggregation_is_asked_for_when_there_is_room(room: Room, step: TaskKind) -> None:
    sums = Secure("fedprp", ledger=tight_ledger(room, "database"))
    before = sums.steps[sums.steps.index(step) - 1]
    *first, last = sums.go_to(before)
    sums.answer(first)
    room.records = 1  # for the update that closes the step
    sums.answer([last])
    assert sums.asked() == {}
    assert waits_for(sums.lab) is WaitReason.DISK
    with pytest.raises(ConflictError):  # the step has its groups
        sums.lab.run.check_regrouping()
    room.records = PLENTY
    sums.lab.later(PAUSE_S, alive=SITES)
    assert set(sums.asked().values()) == {step}
    sums.finish()
    undisturbed = Secure("fedprp")
    undisturbed.finish()
    assert sums.lab.address == undisturbed.lab.address


@pytest.mark.parametrize("records", range(3))
def test_an_update_is_rejected_when_there_is_room_to_say_so(make: MakeLab, room: Room, records: int) -> None:
    rules: dict[str, Any] = {"robust": "krum", "min_sites": 5, "quorum": 5, "outlier_factor": None}
    lab = make(ledger=tight_ledger(room, "database"), federation={**rules, "max_relative_norm": 1e9})
    lab.enroll(EVALUATOR, role=Role.EVALUATOR)
    lab.enroll("ann", "bob", "cyd", "dan", "eve")
    lab.later(0)
    lab.first_models()
    for site, value in {"ann": 1.0, "bob": 1.5, "cyd": 1.75, "dan": 2.0}.items():
        lab.push(site, lab.model(value))
    room.records, room.refusals = 2 + records, 2  # the update, the begin of its aggregation, and some
    lab.push("eve", lab.model(-30.0))
    assert waits_for(lab) is WaitReason.DISK
    for _ in range(3):
        lab.later(PAUSE_S)
    assert room.refused == 2
    assert {row.task.site for row in lab.ledger.updates("test", 1) if row.counts} == {"ann", "bob", "cyd", "dan"}
    assert (lab.value, isinstance(lab.phase, phases.Evaluating)) == (1.5625, True)


# Restarts while an aggregation waits


class TightBlobs(MemoryBlobs):
    """Blobs that take nothing new, or nothing at `all`, while `broken` says why."""

    broken: StateError | None = None
    all = False

    def put(self, *data: Buffer) -> Digest:
        if self.broken is not None and (self.all or not self.has(codec.digest(*data))):
            raise self.broken
        return super().put(*data)


def aggregating(make: MakeLab, broken: StateError) -> Lab:
    """All updates of round 1 are there, and the state that they give, 2.0, cannot be stored."""
    lab = make(blobs=(blobs := TightBlobs())).begin()
    for site, value in (("ann", 1.0), ("bob", 2.0)):
        lab.push(site, lab.model(value))
    blobs.put(lab.announce(lab.model(3.0))[1])
    blobs.broken = broken
    with suppress(StateError):
        lab.push("cyd", lab.model(3.0))
    return lab


def test_a_round_is_opened_when_there_is_room_for_its_base(make: MakeLab) -> None:
    lab = make(blobs=(blobs := TightBlobs())).begin()
    lab.run.pause(paused=True)
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    lab.restart()
    lab.run.pause(paused=False)
    blobs.broken, blobs.all = OutOfSpaceError("no space left on device; free some"), True
    for _ in range(3):
        lab.later(1.0)
        assert lab.asked("ann") is None
        assert [row.round for row in lab.ledger.rounds("test")] == [0, 1]
    blobs.broken = None
    lab.later(1.0)
    assert lab.task("ann").round == 2


def test_a_server_that_is_restarted_while_an_aggregation_waits_for_space_has_not_died(make: MakeLab) -> None:
    lab = aggregating(make, OutOfSpaceError("no space left on device; free some"))
    for _ in range(2 * lab.recipe.federation.max_attempts):
        assert waits_for(lab) is WaitReason.DISK
        lab.later(PAUSE_S)
        lab.restart()
        lab.later(0.0)
    assert isinstance(lab.blobs, TightBlobs)
    lab.blobs.broken = None
    lab.later(PAUSE_S)
    assert isinstance(lab.phase, phases.Evaluating)
    assert (lab.value, lab.ledger.rounds("test")[1].aggregations) == (2.0, 1)


def test_a_server_that_ended_for_a_failing_disk_has_not_died_of_its_aggregation(make: MakeLab) -> None:
    """Of blobs on another disk than the ledger: the latter can be written."""
    lab = aggregating(make, DiskFailureError("cannot write a blob: Input/output error"))
    for _ in range(2 * lab.recipe.federation.max_attempts):
        with pytest.raises(DiskFailureError):
            lab.later(0.0)
        lab.restart()
    assert isinstance(lab.blobs, TightBlobs)
    lab.blobs.broken = None
    lab.later(0.0)
    assert (lab.value, lab.ledger.rounds("test")[1].aggregations) == (2.0, 1)
