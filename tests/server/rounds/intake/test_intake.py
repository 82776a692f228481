"""Verdicts: an update counts exactly once, for the invitation that it answers, or it is refused with its reason.

The update firewall names what is wrong, and has nothing to say of an update that is right.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import FailureReason, ProtocolError
from protofed.common.payload import BLOCK, NOT_A_MOVE, Array, Part, Payload, Tensors, describe
from protofed.common.protocol.messages import Manifest, TaskKind, Verdict
from protofed.server.method import ExpectedUpdate
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.methods.fednh import FedNHServer
from protofed.server.methods.solo import SoloServer
from protofed.server.rounds.aggregation.publisher import outliers
from protofed.server.rounds.intake.intake import (
    MAX_REFUSED,
    base_problem,
    examined,
    first_model_problem,
    manifest_problem,
    scalars_problem,
    size_problem,
)
from protofed.server.rounds.machine import phases
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RefusalCode, UpdateProblem

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

CLASSES, FEATURES = 4, 3
BODY: Tensors = {"conv.weight": np.zeros((2, 3), np.float32), "bn.batches": np.zeros((), np.int64)}
MODEL: Payload = {Part.BODY: BODY, Part.HEAD: {"weight": np.zeros((CLASSES, FEATURES), np.float32)}}
FEDAVG = FedAvgServer().expects(MODEL)
FEDNH = FedNHServer().expects(FedNHServer().init(MODEL, round_context(CLASSES)))


def manifest(payload: Payload, **changes: Any) -> Manifest:
    data = codec.encode(payload)
    return replace(Manifest(describe(payload), len(data), codec.digest(data)), **changes)


def body(**tensors: Array) -> Payload:
    return {**MODEL, Part.BODY: {**BODY, **tensors}}


def prototypes(**rows: Array) -> Payload:
    """A FedNH update; `c2=row` is the prototype of class 2."""
    named = {name.removeprefix("c"): row for name, row in rows.items()}
    return {Part.BODY: BODY, Part.HEAD: {"scale": np.ones((), np.float32)}, Part.PROTOTYPES: named}


ROW = np.ones(FEATURES, np.float32)

# Announcements


def test_an_update_as_expected_has_no_fault() -> None:
    for payload, expected in ((MODEL, FEDAVG), ({}, SoloServer().expects(MODEL))):
        assert manifest_problem(manifest(payload), expected) is None
        assert size_problem(manifest(payload)) is None
    address = codec.digest(b"a model")
    assert base_problem(address, address) is None
    assert base_problem(None, None) is None


@pytest.mark.parametrize("other", [None, codec.digest(b"another")])
def test_an_update_of_another_model_than_the_tasks_is_a_fault(other: codec.Digest | None) -> None:
    fault = UpdateProblem(RefusalCode.BASE, "it starts from another model than the task names")
    assert base_problem(other, codec.digest(b"a model")) == fault
    assert base_problem(codec.digest(b"a model"), other) == fault


@pytest.mark.parametrize("held", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_a_prototype_may_come_for_any_class_or_none(held: tuple[int, ...]) -> None:
    assert manifest_problem(manifest(prototypes(**{f"c{c}": ROW for c in held})), FEDNH) is None


def without(payload: Payload, part: Part, name: str) -> Payload:
    return {**payload, part: {key: array for key, array in payload[part].items() if key != name}}


NO_PART = "{} is not part of this method's update"
FAULTS: dict[str, tuple[Payload, ExpectedUpdate, str]] = {
    "nothing": ({}, FEDAVG, "body/bn.batches is missing (3 in all)"),
    "missing": (without(MODEL, Part.BODY, "conv.weight"), FEDAVG, "body/conv.weight is missing (1 in all)"),
    "missing part": ({Part.BODY: BODY}, FEDAVG, "head/weight is missing (1 in all)"),
    "extra": (body(evil=ROW), FEDAVG, NO_PART.format("body/evil")),
    "extra part": ({**MODEL, Part.PROTOTYPES: {"0": ROW}}, FEDAVG, NO_PART.format("prototypes/0")),
    "something for solo": (MODEL, SoloServer().expects(MODEL), NO_PART.format("body/bn.batches")),
    "transposed": (
        body(**{"conv.weight": np.zeros((3, 2), np.float32)}),
        FEDAVG,
        "body/conv.weight is float32 [3, 2], expected float32 [2, 3]",
    ),
    "wrong dtype": (
        body(**{"conv.weight": np.zeros((2, 3))}),
        FEDAVG,
        "body/conv.weight is float64 [2, 3], expected float32 [2, 3]",
    ),
    "class behind the last": (prototypes(c4=ROW), FEDNH, NO_PART.format("prototypes/4")),
    "class with a leading zero": (prototypes(c01=ROW), FEDNH, NO_PART.format("prototypes/01")),
    "prototype of another length": (
        prototypes(c1=np.ones(4, np.float32)),
        FEDNH,
        "prototypes/1 is float32 [4], expected float32 [3]",
    ),
}


@pytest.mark.parametrize(("payload", "expected", "said"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_named(payload: Payload, expected: ExpectedUpdate, said: str) -> None:
    assert manifest_problem(manifest(payload), expected) == UpdateProblem(RefusalCode.TENSORS, said)


def test_a_tensor_announced_twice_is_a_fault() -> None:
    twice = manifest(MODEL, tensors=(*describe(MODEL), describe(MODEL)[0]))
    fault = UpdateProblem(RefusalCode.TENSORS, "a tensor is announced twice")
    assert manifest_problem(twice, FEDAVG) == fault
    assert first_model_problem(twice, CLASSES, 512.0) == fault


SIZE = len(codec.encode(MODEL))


@pytest.mark.parametrize("total", [0, SIZE - 1, SIZE + 1, SIZE + 8, SIZE + (4 << 20), 5 << 30, 2**63])
def test_a_total_that_cannot_be_is_a_fault(total: int) -> None:
    """Not even one byte of padding: a header of megabytes was once accepted."""
    said = f"{total} bytes announced for tensors that are encoded to {SIZE}"
    fault = size_problem(manifest(MODEL, total_bytes=total))
    assert (fault, str(fault)) == (UpdateProblem(RefusalCode.SIZE, said), said)
    nothing = size_problem(manifest({}, total_bytes=0))
    assert nothing == UpdateProblem(RefusalCode.SIZE, "0 bytes announced for tensors that are encoded to 16")


# First models


@pytest.mark.parametrize(
    "payload",
    [
        {Part.BODY: BODY},
        {Part.BODY: BODY, Part.HEAD: {"bias": ROW}},
        {Part.HEAD: {"weight": np.zeros((3, 4), np.float32)}},
        {Part.HEAD: {"weight": np.zeros(4, np.float32)}},
        {Part.HEAD: {"weight": np.zeros((4, 3), np.int64)}},
    ],
)
def test_a_first_model_has_a_body_and_a_proper_head(payload: Payload) -> None:
    assert first_model_problem(manifest(MODEL), CLASSES, 512.0) is None
    for one, said in (
        (payload, "a first model needs a head with weight [4, D]"),
        ({**MODEL, Part.PROTOTYPES: {"0": ROW}}, "a first model has only a body and a head"),
    ):
        assert first_model_problem(manifest(one), CLASSES, 512.0) == UpdateProblem(RefusalCode.TENSORS, said)


# Blobs

LARGE = 1e9


def of_bytes(payload: Payload, base: Payload | None = None, max_update_norm: float = LARGE) -> UpdateProblem | float:
    return examined(codec.encode(payload), manifest(payload), base, max_update_norm)


def test_a_blob_as_announced_has_no_fault() -> None:
    assert of_bytes(MODEL) == 0.0
    assert examined(codec.encode(MODEL), manifest(MODEL, tensors=describe(MODEL)[::-1]), None, LARGE) == 0.0
    assert of_bytes({}) == 0.0


@pytest.mark.parametrize("other", [{}, body(evil=ROW), {Part.BODY: BODY}, body(**{"conv.weight": np.zeros((3, 2))})])
def test_a_blob_of_other_tensors_than_announced_is_a_fault(other: Payload) -> None:
    said = "the upload holds other tensors than were announced"
    assert examined(codec.encode(other), manifest(MODEL), None, LARGE) == UpdateProblem(RefusalCode.CONTENTS, said)


@pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(100), b"\x7fELF" + bytes(100)])
def test_bytes_that_are_no_payload_are_a_fault(data: bytes) -> None:
    fault = examined(data, manifest(MODEL), None, LARGE)
    assert isinstance(fault, UpdateProblem)
    assert fault.code is RefusalCode.DAMAGED


@pytest.mark.parametrize("max_update_norm", [LARGE, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [Part.BODY, Part.HEAD])
def test_a_number_that_is_not_finite_is_a_fault_by_name(part: Part, value: float, max_update_norm: float) -> None:
    payload = {**MODEL, part: {name: array.copy() for name, array in MODEL[part].items()}}
    name = "conv.weight" if part is Part.BODY else "weight"
    payload[part][name].flat[-1] = value
    said = f"{part}/{name} has values that are not finite"
    assert of_bytes(payload, MODEL, max_update_norm) == UpdateProblem(RefusalCode.NOT_FINITE, said)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38])
def test_odd_but_finite_numbers_have_a_norm(value: float) -> None:
    payload = body(**{"conv.weight": np.full((2, 3), value, np.float32)})
    norm = of_bytes(payload, max_update_norm=1e39)
    assert norm == pytest.approx(abs(float(np.float32(value))) * math.sqrt(6), rel=1e-12)


# Norms


def of_numbers(*values: float, dtype: type[np.floating[Any]] = np.float32) -> Payload:
    return {Part.BODY: {"w": np.array(values, dtype)}}


def test_whatever_the_update_and_its_base_hold_the_norm_is_of_what_the_site_changed() -> None:
    base: Payload = {Part.BODY: {"a": np.array([1, 1], np.float32), "b": np.array([[5]], np.float32)}}
    update: Payload = {Part.BODY: {"a": np.array([1, 4], np.float32), "b": np.array([[1]], np.float32)}}
    assert of_bytes(update, base) == 5.0  # sqrt(0^2 + 3^2 + 4^2)
    assert of_bytes(update) == math.sqrt(1 + 16 + 1)
    assert of_bytes(base, base) == 0.0
    counted: Payload = {Part.BODY: {"w": np.array([3, 4], np.float32), "bn.batches": np.array([2**62], np.int64)}}
    assert of_bytes(counted) == 5.0
    base = {
        Part.BODY: {"w": np.ones(2, np.float32), "shape": np.ones((2, 3), np.float32)},
        Part.HEAD: {"p": ROW},
    }
    update = {
        Part.BODY: {"w": np.ones(2, np.float32), "shape": np.full((3, 2), 2, np.float32)},  # 6 x 4
        Part.PROTOTYPES: {"p": np.array([1, 0, 0], np.float32)},  # 1
    }
    assert of_bytes(update, base) == 5.0
    large, start = np.ones(3 * BLOCK + 7, np.float32), np.zeros(3 * BLOCK + 7, np.float32)
    start[[0, BLOCK - 1, BLOCK, -1]] = 1  # the norm goes over every block once
    assert of_bytes({Part.BODY: {"w": large}}, {Part.BODY: {"w": start}}) == math.sqrt(3 * BLOCK + 3)


@pytest.mark.parametrize("part", sorted(NOT_A_MOVE))
def test_what_says_who_counts_or_how_long_is_no_part_of_the_norm(part: Part) -> None:
    payload = {**body(**{"conv.weight": np.full((2, 3), 2.0, np.float32)}), part: {"told": np.array([800.0, 3.0])}}
    assert of_bytes(payload, MODEL, max_update_norm=5.0) == pytest.approx(2 * math.sqrt(6))
    unreadable = of_bytes({**payload, part: {"told": np.array([800.0, np.inf])}}, MODEL, max_update_norm=5.0)
    assert unreadable == UpdateProblem(RefusalCode.NOT_FINITE, f"{part}/told has values that are not finite")


def test_differences_of_the_largest_numbers_do_not_overflow() -> None:
    assert of_bytes(of_numbers(3e38), of_numbers(-3e38), 1e39) == pytest.approx(6e38)
    huge = of_bytes(of_numbers(1e308, dtype=np.float64), of_numbers(-1e308, dtype=np.float64), math.inf)
    assert huge == UpdateProblem(RefusalCode.NORM, "the update's norm is inf: this run accepts at most inf")


@pytest.mark.parametrize(("limit", "let_in"), [(5.0, True), (math.nextafter(5.0, 0), False), (1e-3, False)])
def test_a_norm_above_the_largest_is_a_fault_with_both_numbers(limit: float, let_in: bool) -> None:
    fault = UpdateProblem(RefusalCode.NORM, f"the update's norm is 5: this run accepts at most {limit:g}")
    assert of_bytes(of_numbers(3, 4), max_update_norm=limit) == (5.0 if let_in else fault)


def test_an_examination_takes_no_memory_of_the_models_size() -> None:
    weight = np.ones(1 << 22, np.float32)  # 16 MiB
    base: Payload = {Part.BODY: {"w": weight}}
    data, announced = codec.encode(base), manifest(base)
    tracemalloc.start()
    examined(data, announced, base, LARGE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


# Outliers


def cohort(*norms: float) -> dict[str, float]:
    return {f"site-{number}": norm for number, norm in enumerate(norms)}


def test_an_update_far_from_the_cohorts_median_is_rejected() -> None:
    found = outliers(cohort(1.0, 2.0, 3.0, 301.0), 100.0)
    assert found == {"site-3": "its norm of 301 is more than 100 times the cohort's median of 3"}
    assert outliers(cohort(1.0, 2.0, 3.0, 300.0), 100.0) == {}
    assert set(outliers(cohort(60.0, 1.0), 20.0)) == {"site-0"}  # of two the larger one


NOBODY: dict[str, tuple[Mapping[str, float], float | None]] = {
    "no updates": ({}, 100.0),
    "one update": (cohort(1e9), 100.0),
    "two updates alike": (cohort(1.0, 99.0), 100.0),
    "of two updates one unchanged": (cohort(0.0, 1.0), 100.0),
    "off": (cohort(1.0, 1.0, 1.0, 1e9), None),
    "off by zero": (cohort(1.0, 1.0, 1.0, 1e9), 0.0),
    "half of an even number": (cohort(1.0, 1.0, 1e9, 1e9), 100.0),
    "all alike": (cohort(2.0, 2.0, 2.0), 1.0),
    "too small": (cohort(0.0, 5.0, 5.0), 100.0),
    "most unchanged": (cohort(0.0, 0.0, 0.0, 1.0), 100.0),
    "all unchanged": (cohort(0.0, 0.0, 0.0), 100.0),
}


@pytest.mark.parametrize(("norms", "factor"), NOBODY.values(), ids=NOBODY)
def test_nobody_is_rejected(norms: Mapping[str, float], factor: float | None) -> None:
    assert outliers(norms, factor) == {}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.0, 1e-300, 1.0, 2.0, 1e3]) | st.floats(0, 1e9), max_size=9), st.floats(1, 1e6))
def test_fewer_than_half_or_one_of_two_are_ever_rejected(norms: list[float], factor: float) -> None:
    found = outliers(cohort(*norms), factor)
    assert not found or len(found) < len(norms) / 2 or (len(found), len(norms)) == (1, 2)


# Scalars


@pytest.mark.parametrize("weight", [1.0, 2.5, 2.0**53 - 1, None])
def test_a_usable_count_is_no_fault(weight: float | None) -> None:
    assert scalars_problem({"loss": 0.5}, weight, ExpectedUpdate(())) is None


@pytest.mark.parametrize("weight", [0.0, -0.0, 0.5, 1e-60, -1.0, math.nan, math.inf, -math.inf, 2.0**53, 2.0**63])
def test_a_count_that_is_none_is_a_fault(weight: float) -> None:
    for needed in (True, False):
        assert scalars_problem({}, weight, ExpectedUpdate((), weight=needed)) == UpdateProblem(
            RefusalCode.COUNT, f"an example count of {weight}"
        )


def test_a_withheld_count_is_a_fault_only_where_it_is_needed() -> None:
    fault = scalars_problem({}, None, ExpectedUpdate((), weight=True))
    assert fault is not None
    assert fault.code is RefusalCode.COUNT
    assert "total example count is missing" in fault.text
    assert scalars_problem({}, None, ExpectedUpdate(())) is None
    assert FedAvgServer(weighting="examples").expects(MODEL).weight
    assert not FedAvgServer().expects(MODEL).weight


@pytest.mark.parametrize(
    "metrics", [{"loss": math.nan}, {"loss": -0.5}, {"accuracy": 0.5}, {"loss": 0.5, "global.accuracy": 1.0}]
)
def test_numbers_that_no_training_gives_are_a_fault(metrics: dict[str, float]) -> None:
    fault = scalars_problem(metrics, None, ExpectedUpdate(()))
    assert fault is not None
    assert fault.code is RefusalCode.SCALARS


SITES = ("ann", "bob", "cyd")


def verdicts(lab: Lab, round: int, attempt: int | None = None) -> list[tuple[str, str]]:
    """Every commit of a round as the ledger has it."""
    return [(row.task.site, row.verdict.value) for row in lab.ledger.updates("test", round, attempt)]


# ACCEPTED and DUPLICATE


def test_an_update_in_time_is_accepted_and_its_receipt_names_it(lab: Lab) -> None:
    task, (manifest, _) = lab.task("ann"), lab.announce(lab.model(1.0))
    receipt = lab.push("ann", lab.model(1.0), metrics={"loss": 0.5})
    assert (receipt.verdict, receipt.reason, receipt.digest) == (Verdict.ACCEPTED, "", manifest.digest)
    (row,) = lab.ledger.updates("test", 1)
    assert (row.metrics, row.bytes, row.receipt()) == ({"loss": 0.5}, manifest.total_bytes, receipt)
    assert lab.asked("ann") is None
    again = lab.intake.commit("ann", "daemon-ann", task.task_id, manifest, {}, None, None)  # its answer was lost
    assert again == replace(receipt, verdict=Verdict.DUPLICATE)


def test_the_same_update_again_is_a_duplicate_with_the_same_seal_and_counts_once(lab: Lab) -> None:
    task = lab.task("ann")
    first = lab.push("ann", lab.model(9.0), task)
    for _ in range(5):
        again = lab.push("ann", lab.model(9.0), task)
        assert again == replace(first, verdict=Verdict.DUPLICATE)
    assert verdicts(lab, 1) == [("ann", "accepted")]
    lab.round(bob=0.0, cyd=0.0)
    assert lab.value == 3.0


def test_a_duplicate_stays_one_after_its_round_and_its_run_are_over(lab: Lab) -> None:
    task = lab.task("ann")
    first = lab.push("ann", lab.model(1.0), task)
    lab.round(bob=1.0, cyd=1.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.push("ann", lab.model(1.0), task) == replace(first, verdict=Verdict.DUPLICATE)
    assert lab.phase.reported == frozenset()
    bobs = lab.task("bob")
    lab.run.stop("enough")
    assert lab.push("ann", lab.model(1.0), task) == replace(first, verdict=Verdict.DUPLICATE)
    assert lab.push("bob", lab.model(1.0), bobs).verdict is Verdict.LATE


def test_another_update_under_an_answered_nonce_is_equivocation(lab: Lab) -> None:
    task = lab.task("ann")
    lab.push("ann", lab.model(1.0), task)
    other = lab.push("ann", lab.model(100.0), task)
    assert other.verdict is Verdict.REFUSED
    assert "already accepted" in other.reason
    assert verdicts(lab, 1) == [("ann", "accepted"), ("ann", "refused")]
    lab.round(bob=1.0, cyd=1.0)
    assert lab.value == 1.0


def test_of_two_updates_started_before_either_was_committed_exactly_one_counts(lab: Lab) -> None:
    task = lab.task("ann")
    left, right = (lab.announce(lab.model(value))[0] for value in (1.0, 2.0))
    for manifest in (left, right):
        assert lab.intake.begin("ann", "daemon-ann", task.task_id, task.round, task.base_digest, manifest) is None
    receipts = [lab.intake.commit("ann", "daemon-ann", task.task_id, m, {}, None, None) for m in (left, right)]
    assert [receipt.verdict for receipt in receipts] == [Verdict.ACCEPTED, Verdict.REFUSED]


# STALE and NOT_NEEDED


def test_an_update_for_a_closed_round_is_stale_and_does_not_count(lab: Lab) -> None:
    task = lab.task("cyd")
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    lab.later(51.0, alive=("ann", "bob"))
    receipt = lab.push("cyd", lab.model(100.0), task)
    assert receipt.verdict is Verdict.LATE
    assert receipt.reason == "round 1 is closed"
    assert lab.value == 2.0


def test_an_update_for_an_abandoned_attempt_is_stale_and_does_not_count_in_the_next(lab: Lab) -> None:
    task = lab.task("ann")
    lab.later(100.0, alive=SITES)
    lab.later(0.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.push("ann", lab.model(100.0), task).verdict is Verdict.LATE
    assert lab.phase.reported == frozenset()
    assert verdicts(lab, 1, attempt=2) == []
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    assert lab.value == 1.0


def test_an_over_selected_update_is_not_needed_and_does_not_count(make: MakeLab) -> None:
    lab = make(federation={"participation": 0.6, "over_selection": 1.5}).begin()
    task = lab.task("cyd")
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    receipt = lab.push("cyd", lab.model(100.0), task)
    assert receipt.verdict is Verdict.NOT_NEEDED
    assert lab.value == 2.0
    statuses = {row.site: row.task_status for row in lab.ledger.tasks("test", 1) if row.kind is TaskKind.FIT}
    assert statuses == {"ann": "reported", "bob": "reported", "cyd": "not-needed"}


def test_asking_again_after_a_closed_round_adds_no_row_and_other_updates_only_some(lab: Lab) -> None:
    task = lab.task("cyd")
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    lab.later(51.0, alive=("ann", "bob"))
    receipts = [lab.push("cyd", lab.model(100.0), task) for _ in range(20)]
    assert len({receipt.record_hash for receipt in receipts}) == 1
    assert verdicts(lab, 1).count(("cyd", "late")) == 1
    for value in range(1, MAX_REFUSED):
        assert lab.push("cyd", lab.model(float(value)), task).verdict is Verdict.LATE
    for value in range(50, 60):
        with pytest.raises(ProtocolError, match="updates were refused for this task"):
            lab.push("cyd", lab.model(float(value)), task)
    assert verdicts(lab, 1).count(("cyd", "late")) == MAX_REFUSED
    assert lab.push("cyd", lab.model(100.0), task) == receipts[0]  # what was said once is still said


def test_other_updates_after_the_one_that_counts_add_only_some_rows(lab: Lab) -> None:
    task = lab.task("ann")
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.ACCEPTED
    for value in range(2, 2 + MAX_REFUSED):
        for _ in range(3):
            assert lab.push("ann", lab.model(float(value)), task).verdict is Verdict.REFUSED
    with pytest.raises(ProtocolError, match="updates were refused for this task"):
        lab.push("ann", lab.model(99.0), task)
    assert verdicts(lab, 1) == [("ann", "accepted")] + [("ann", "refused")] * MAX_REFUSED
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.DUPLICATE


def test_an_update_of_a_site_that_said_it_could_not_is_refused_politely(lab: Lab) -> None:
    task = lab.task("ann")
    lab.beat("ann", task.task_id, failure=FailureReason.NUMERIC)
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.LATE


# INVALID


def test_an_update_from_another_base_is_refused_before_it_is_sent(lab: Lab) -> None:
    task = lab.task("ann")
    for base in (None, Digest("0" * 64)):
        receipt = lab.push("ann", lab.model(1.0), replace(task, base_digest=base))
        assert receipt.verdict is Verdict.REFUSED
        assert "another model" in receipt.reason
    with pytest.raises(ProtocolError, match="belongs to round 1, not to round 2"):
        lab.push("ann", lab.model(1.0), replace(task, round=2))
    assert lab.asked("ann") is TaskKind.FIT


def test_a_first_model_has_no_base(make: MakeLab) -> None:
    lab = make()
    lab.gather()
    maker = lab.makers()[0]
    task = lab.task(maker)
    assert lab.push(maker, lab.model(0.0), replace(task, base_digest=Digest("0" * 64))).verdict is Verdict.REFUSED
    bad = lab.push(maker, {Part.BODY: lab.model(0.0)[Part.BODY]})
    assert (bad.verdict, bad.reason) == (Verdict.REFUSED, "a first model needs a head with weight [3, D]")
    assert lab.push(maker, lab.model(0.0), task).verdict is Verdict.ACCEPTED


def test_a_withheld_example_count_is_refused_where_the_run_weights_by_it(make: MakeLab) -> None:
    lab = make(method={"name": "fedavg", "weighting": "examples"}).begin()
    assert "total example count is missing" in lab.push("ann", lab.model(1.0)).reason
    assert lab.push("ann", lab.model(1.0), weight=5).verdict is Verdict.ACCEPTED


@pytest.mark.parametrize("name", ["lo\0ss", "\x1b[2Jloss", "lo\u202ess"])
def test_a_refusal_that_cites_control_characters_is_kept(make: MakeLab, ledger_url: str, name: str) -> None:
    lab = make(ledger=Ledger(ledger_url)).begin()
    receipt = lab.push("ann", lab.model(1.0), metrics={name: 1.0})
    (row,) = lab.ledger.updates("test", 1)
    assert (row.verdict, row.code, row.reason) == (Verdict.REFUSED, RefusalCode.SCALARS, receipt.reason)
    assert row.reason.isprintable()
    lab.ledger.close()


# Whose invitation


@pytest.mark.parametrize("task_id", ["", "unknown", "../../x", "x" * 10_000, "nul\0", "bob's"])
def test_an_unknown_nonce_and_another_sites_are_refused_and_leave_no_row(lab: Lab, task_id: str) -> None:
    task = lab.task("bob") if task_id == "bob's" else replace(lab.task("ann"), task_id=task_id)
    with pytest.raises(ProtocolError, match="no such task"):
        lab.push("ann", lab.model(1.0), task)
    assert verdicts(lab, 1) == []


def test_a_score_task_takes_no_update(lab: Lab) -> None:
    lab.train(1.0)
    with pytest.raises(ProtocolError, match="no such task"):
        lab.push("ann", lab.model(1.0))


def test_a_nonce_of_another_run_is_unknown_to_this_one(make: MakeLab) -> None:
    one = make("one").begin()
    two = make("two", ledger=one.ledger, blobs=one.blobs).begin()
    with pytest.raises(ProtocolError, match="no such task"):
        two.push("ann", two.model(1.0), one.task("ann"))


# The seal


def test_a_rejection_is_recorded_with_its_code_and_reason(lab: Lab) -> None:
    task, (manifest, _) = lab.task("ann"), lab.announce(lab.model(1.0))
    for code in (RefusalCode.DAMAGED, RefusalCode.NORM):
        receipt = lab.intake.refuse("ann", task.task_id, manifest, UpdateProblem(code, f"because {code}"))
        assert (receipt.verdict, receipt.reason) == (Verdict.REFUSED, f"because {code}")
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.phase.reported == frozenset()
    rows = [(update.verdict, update.code, update.reason) for update in lab.ledger.updates("test", 1)]
    assert rows == [(Verdict.REFUSED, "damaged", "because damaged"), (Verdict.REFUSED, "norm", "because norm")]
