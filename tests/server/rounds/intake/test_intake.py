"""Verdicts: an update counts exactly once, for the invitation that it answers, or it is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from protofed.common.codec import Digest
from protofed.common.errors import FailureReason, ProtocolError
from protofed.common.payload import Part
from protofed.common.protocol.messages import Receipt, TaskKind, Verdict
from protofed.server.rounds.intake.intake import MAX_REJECTED
from protofed.server.rounds.machine import phases
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RejectionCode, UpdateProblem

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

SITES = ("ann", "bob", "cyd")


def verdicts(lab: Lab, round: int, attempt: int | None = None) -> list[tuple[str, str]]:
    """Every commit of a round as the ledger has it."""
    return [(row.task.site, row.verdict.value) for row in lab.ledger.updates("test", round, attempt)]


# ACCEPTED and DUPLICATE


def test_an_update_in_time_is_accepted_and_its_receipt_names_it(lab: Lab) -> None:
    manifest, _ = lab.announce(lab.model(1.0))
    receipt = lab.push("ann", lab.model(1.0), metrics={"loss": 0.5})
    assert (receipt.verdict, receipt.reason, receipt.digest) == (Verdict.ACCEPTED, "", manifest.digest)
    (row,) = lab.ledger.updates("test", 1)
    assert (row.metrics, row.bytes, row.receipt()) == ({"loss": 0.5}, manifest.total_bytes, receipt)
    assert lab.asked("ann") is None


def test_the_same_update_again_is_a_duplicate_with_the_same_seal_and_counts_once(lab: Lab) -> None:
    task = lab.task("ann")
    first = lab.push("ann", lab.model(9.0), task)
    for _ in range(5):
        again = lab.push("ann", lab.model(9.0), task)
        assert again == replace(first, verdict=Verdict.DUPLICATE)
    assert verdicts(lab, 1) == [("ann", "accepted")]
    lab.round(bob=0.0, cyd=0.0)
    assert lab.value == 3.0


def test_a_commit_repeated_because_its_answer_was_lost_is_a_duplicate(lab: Lab) -> None:
    task = lab.task("ann")
    first = lab.push("ann", lab.model(1.0), task)
    manifest, _ = lab.announce(lab.model(1.0))
    again = lab.intake.commit("ann", "daemon-ann", task.task_id, manifest, {}, None, None)
    assert again == replace(first, verdict=Verdict.DUPLICATE)


def test_a_duplicate_stays_one_after_its_round_and_its_run_are_over(lab: Lab) -> None:
    task = lab.task("ann")
    first = lab.push("ann", lab.model(1.0), task)
    lab.round(bob=1.0, cyd=1.0)
    assert lab.push("ann", lab.model(1.0), task) == replace(first, verdict=Verdict.DUPLICATE)
    lab.run.stop("enough")
    assert lab.push("ann", lab.model(1.0), task) == replace(first, verdict=Verdict.DUPLICATE)


def test_another_update_under_an_answered_nonce_is_equivocation(lab: Lab) -> None:
    task = lab.task("ann")
    lab.push("ann", lab.model(1.0), task)
    other = lab.push("ann", lab.model(100.0), task)
    assert other.verdict is Verdict.INVALID
    assert "already accepted" in other.reason
    assert verdicts(lab, 1) == [("ann", "accepted"), ("ann", "invalid")]
    lab.round(bob=1.0, cyd=1.0)
    assert lab.value == 1.0


def test_of_two_updates_begun_before_either_was_committed_exactly_one_counts(lab: Lab) -> None:
    task = lab.task("ann")
    left, right = (lab.announce(lab.model(value))[0] for value in (1.0, 2.0))
    for manifest in (left, right):
        assert lab.intake.begin("ann", "daemon-ann", task.task_id, task.round, task.base_digest, manifest) is None
    receipts = [lab.intake.commit("ann", "daemon-ann", task.task_id, m, {}, None, None) for m in (left, right)]
    assert [receipt.verdict for receipt in receipts] == [Verdict.ACCEPTED, Verdict.INVALID]


# STALE and NOT_NEEDED


def test_an_update_for_a_closed_round_is_stale_and_does_not_count(lab: Lab) -> None:
    task = lab.task("cyd")
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    lab.later(51.0, alive=("ann", "bob"))
    receipt = lab.push("cyd", lab.model(100.0), task)
    assert receipt.verdict is Verdict.STALE
    assert receipt.reason == "round 1 is closed"
    assert lab.value == 2.0


def test_an_update_for_an_abandoned_attempt_is_stale_and_does_not_count_in_the_next(lab: Lab) -> None:
    task = lab.task("ann")
    lab.later(100.0, alive=SITES)
    lab.later(0.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.push("ann", lab.model(100.0), task).verdict is Verdict.STALE
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
    assert verdicts(lab, 1).count(("cyd", "stale")) == 1
    for value in range(1, MAX_REJECTED):
        assert lab.push("cyd", lab.model(float(value)), task).verdict is Verdict.STALE
    for value in range(50, 60):
        with pytest.raises(ProtocolError, match="updates were refused for this task"):
            lab.push("cyd", lab.model(float(value)), task)
    assert verdicts(lab, 1).count(("cyd", "stale")) == MAX_REJECTED
    assert lab.push("cyd", lab.model(100.0), task) == receipts[0]  # what was said once is still said


def test_other_updates_after_the_one_that_counts_add_only_some_rows(lab: Lab) -> None:
    task = lab.task("ann")
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.ACCEPTED
    for value in range(2, 2 + MAX_REJECTED):
        for _ in range(3):
            assert lab.push("ann", lab.model(float(value)), task).verdict is Verdict.INVALID
    with pytest.raises(ProtocolError, match="updates were refused for this task"):
        lab.push("ann", lab.model(99.0), task)
    assert verdicts(lab, 1) == [("ann", "accepted")] + [("ann", "invalid")] * MAX_REJECTED
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.DUPLICATE


def test_an_update_of_a_site_that_said_it_could_not_is_refused_politely(lab: Lab) -> None:
    task = lab.task("ann")
    lab.beat("ann", task.task_id, failure=FailureReason.NUMERIC)
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.STALE


def test_an_update_after_the_end_of_the_run_is_stale(lab: Lab) -> None:
    task = lab.task("ann")
    lab.run.stop("enough")
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.STALE


def test_a_replay_of_last_rounds_update_is_a_duplicate_of_it_and_no_update_of_this_round(lab: Lab) -> None:
    task = lab.task("ann")
    lab.push("ann", lab.model(1.0), task)
    lab.round(bob=1.0, cyd=1.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.push("ann", lab.model(1.0), task).verdict is Verdict.DUPLICATE
    assert lab.phase.reported == frozenset()


# INVALID


def test_an_update_from_another_base_is_refused_before_it_is_sent(lab: Lab) -> None:
    task = lab.task("ann")
    for base in (None, Digest("0" * 64)):
        receipt = lab.push("ann", lab.model(1.0), replace(task, base_digest=base))
        assert receipt.verdict is Verdict.INVALID
        assert "another model" in receipt.reason
    assert lab.asked("ann") is TaskKind.FIT


def test_a_first_model_has_no_base(make: MakeLab) -> None:
    lab = make()
    lab.enroll(*SITES)
    lab.later(0)
    maker = lab.makers()[0]
    task = lab.task(maker)
    assert lab.push(maker, lab.model(0.0), replace(task, base_digest=Digest("0" * 64))).verdict is Verdict.INVALID
    assert lab.push(maker, lab.model(0.0), task).verdict is Verdict.ACCEPTED


def test_a_first_model_of_the_wrong_shape_is_refused_and_a_right_one_still_taken(make: MakeLab) -> None:
    lab = make()
    lab.enroll(*SITES)
    lab.later(0)
    maker = lab.makers()[0]
    bad = lab.push(maker, {Part.BODY: lab.model(0.0)[Part.BODY]})
    assert (bad.verdict, bad.reason) == (Verdict.INVALID, "a first model needs a head with weight [3, D]")
    assert lab.run.published is None
    assert lab.push(maker, lab.model(0.0)).verdict is Verdict.ACCEPTED


def test_an_update_of_the_wrong_shape_is_refused_by_name_and_a_right_one_still_taken(lab: Lab) -> None:
    payload = {**lab.model(1.0), Part.HEAD: {"weight": np.zeros((2, 3), np.float32)}}
    receipt = lab.push("ann", payload)
    assert receipt.verdict is Verdict.INVALID
    assert receipt.reason == "head/weight is float32 [2, 3], expected float32 [3, 2]"
    assert lab.push("ann", lab.model(1.0)).verdict is Verdict.ACCEPTED
    assert verdicts(lab, 1) == [("ann", "invalid"), ("ann", "accepted")]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 2.0**53])
def test_an_example_count_that_is_none_is_refused_even_where_it_is_not_used(lab: Lab, weight: float) -> None:
    receipt = lab.push("ann", lab.model(1.0), weight=weight)
    assert receipt.verdict is Verdict.INVALID
    assert "example count" in receipt.reason
    assert lab.asked("ann") is TaskKind.FIT


def test_a_withheld_example_count_is_refused_where_the_run_weights_by_it(make: MakeLab) -> None:
    lab = make(method={"name": "fedavg", "weighting": "examples"}).begin()
    assert "total example count is missing" in lab.push("ann", lab.model(1.0)).reason
    assert lab.push("ann", lab.model(1.0), weight=5).verdict is Verdict.ACCEPTED


def test_metrics_that_are_not_finite_are_refused(lab: Lab) -> None:
    receipt = lab.push("ann", lab.model(1.0), metrics={"loss": float("nan")})
    assert (receipt.verdict, receipt.reason) == (Verdict.INVALID, "loss = nan: expected 0 to 1e+09")


@pytest.mark.parametrize("name", ["lo\0ss", "\x1b[2Jloss", "lo\u202ess"])
def test_a_refusal_that_cites_control_characters_is_kept(make: MakeLab, ledger_url: str, name: str) -> None:
    lab = make(ledger=Ledger(ledger_url)).begin()
    receipt = lab.push("ann", lab.model(1.0), metrics={name: 1.0})
    (row,) = lab.ledger.updates("test", 1)
    assert (row.verdict, row.code, row.reason) == (Verdict.INVALID, RejectionCode.SCALARS, receipt.reason)
    assert row.reason.isprintable()
    lab.ledger.close()


def test_a_blob_that_was_refused_is_written_down_and_counts_for_nothing(lab: Lab) -> None:
    task = lab.task("ann")
    manifest, _ = lab.announce(lab.model(1.0))
    receipt = lab.intake.refuse(
        "ann", task.task_id, manifest, UpdateProblem(RejectionCode.NOT_FINITE, "body/conv.weight has values")
    )
    assert receipt.verdict is Verdict.INVALID
    assert verdicts(lab, 1) == [("ann", "invalid")]
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.phase.reported == frozenset()


# Whose invitation


def test_another_sites_nonce_is_refused_and_leaves_no_row(lab: Lab) -> None:
    with pytest.raises(ProtocolError, match="no such task"):
        lab.push("ann", lab.model(1.0), lab.task("bob"))
    assert verdicts(lab, 1) == []


def test_a_recorded_update_of_another_site_is_refused_even_after_it_was_accepted(lab: Lab) -> None:
    task = lab.task("bob")
    lab.push("bob", lab.model(1.0), task)
    with pytest.raises(ProtocolError, match="no such task"):
        lab.push("ann", lab.model(1.0), task)


@pytest.mark.parametrize("task_id", ["", "unknown", "../../x", "x" * 10_000, "nul\0"])
def test_an_unknown_nonce_is_refused(lab: Lab, task_id: str) -> None:
    with pytest.raises(ProtocolError, match="no such task"):
        lab.push("ann", lab.model(1.0), replace(lab.task("ann"), task_id=task_id))


def test_a_score_task_takes_no_update(lab: Lab) -> None:
    for site in SITES:
        lab.push(site, lab.model(1.0))
    with pytest.raises(ProtocolError, match="no such task"):
        lab.push("ann", lab.model(1.0))


def test_a_nonce_of_another_run_is_unknown_to_this_one(make: MakeLab) -> None:
    one = make("one").begin()
    two = make("two", ledger=one.ledger, blobs=one.blobs).begin()
    with pytest.raises(ProtocolError, match="no such task"):
        two.push("ann", two.model(1.0), one.task("ann"))


# The seal


def test_receipts_of_different_decisions_have_different_seals(lab: Lab) -> None:
    receipts: list[Receipt] = [lab.push(site, lab.model(float(n))) for n, site in enumerate(SITES)]
    receipts.append(
        lab.intake.refuse(
            "ann",
            lab.ledger.tasks("test", 1)[0].task_id,
            lab.announce({})[0],
            UpdateProblem(RejectionCode.DAMAGED, "no"),
        )
    )
    assert len({receipt.record_hash for receipt in receipts}) == len(receipts)
    assert all(len(receipt.record_hash) == 64 for receipt in receipts)


def test_a_rejection_is_recorded_with_its_code_and_reason(lab: Lab) -> None:
    task, (manifest, _) = lab.task("ann"), lab.announce(lab.model(1.0))
    for code in (RejectionCode.DAMAGED, RejectionCode.NORM):
        receipt = lab.intake.refuse("ann", task.task_id, manifest, UpdateProblem(code, f"because {code}"))
        assert (receipt.verdict, receipt.reason) == (Verdict.INVALID, f"because {code}")
    rows = [(update.verdict, update.code, update.reason) for update in lab.ledger.updates("test", 1)]
    assert rows == [(Verdict.INVALID, "damaged", "because damaged"), (Verdict.INVALID, "norm", "because norm")]
