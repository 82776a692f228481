"""A run whose rounds an evaluator refines, through the real coordinator, ledger and blobs; FEDIC's server half."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.errors import ConfigError, FailureReason, OutOfSpaceError, ProtocolError
from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import Role, TaskKind, Verdict
from protofed.server.access.certificates import Certificates
from protofed.server.methods.fedic import FEDICServer
from protofed.server.operator.run_record import overview
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.machine import phases
from protofed.server.storage.blobs import FolderBlobs, MemoryBlobs
from protofed.server.verdicts import RefusalCode, RoundOutcome

if TYPE_CHECKING:
    from tests.server.conftest import Lab, Later, MakeLab

SITES = ("ann", "bob", "cyd")
FEDIC: dict[str, Any] = {"method": {"name": "fedic"}}


def trained(lab: Lab, **values: float) -> Lab:
    """All sites have trained, and the aggregate is there."""
    for site, value in (values or {"ann": 1.0, "bob": 2.0, "cyd": 6.0}).items():
        assert lab.push(site, lab.model(value)).verdict is Verdict.ACCEPTED
    return lab


@pytest.fixture
def refining(make: MakeLab) -> Lab:
    """Round 1 is aggregated, and the evaluator is asked."""
    return trained(make(**FEDIC).begin())


def working(make: MakeLab, workshop: Later, **federation: Any) -> Lab:
    """Round 1 is open; what is aggregated and refined waits until the workshop finishes it."""
    lab = make(**FEDIC, work=workshop, federation=federation)
    lab.gather("eva")
    lab.first_models()
    workshop.finish()
    return lab


def base(lab: Lab, site: str = "eva") -> Any:
    digest = lab.task(site).base_digest
    assert digest is not None
    return codec.decode(lab.blobs.get(digest))


def statuses(lab: Lab, round: int = 1) -> dict[str, str]:
    return {row.site: row.task_status for row in lab.ledger.tasks("test", round) if row.kind is TaskKind.REFINE}


def test_an_evaluator_is_sent_the_mean_and_the_sites_models_and_nothing_is_published(refining: Lab) -> None:
    task = refining.task("eva")
    assert (task.kind, task.round, task.remaining_s) == (TaskKind.REFINE, 1, 100.0)
    assert [refining.asked(site) for site in SITES] == [None] * 3
    sent = base(refining)
    assert (sent[Part.BODY]["conv.weight"] == 3.0).all()
    assert sent[Part.SITE_MODELS]["body.conv.weight"][:, 0, 0].tolist() == [1.0, 2.0, 6.0]  # in site order
    assert sent[Part.SITE_MODELS]["head.weight"].shape == (3, 3, 2)
    assert refining.value == 0.0  # the first model
    (row,) = refining.ledger.rounds("test", since=1)
    assert (row.state, row.aggregate, row.complete, row.closed_at) == (None, task.base_digest, True, None)
    view = overview(refining.ledger, "test")
    assert view is not None
    assert (view.phase, view.invited, view.reported) == ("refining", 3, 3)


def test_what_stays_on_the_server_is_not_sent_to_an_evaluator_either(
    make: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FEDICServer.to_refine

    def to_refine(half: FEDICServer, state: Payload) -> Payload:
        return {**whole(half, state), Part.PRIVATE: {"secret": np.ones(1)}}

    monkeypatch.setattr(FEDICServer, "to_refine", to_refine)
    lab = trained(make(**FEDIC).begin())
    assert base(lab).keys() == {Part.BODY, Part.HEAD, Part.SITE_MODELS}


def test_what_it_made_is_published_scored_and_sent_on_without_the_sites_models(refining: Lab) -> None:
    assert refining.push("eva", refining.model(4.0)).verdict is Verdict.ACCEPTED
    assert refining.value == 4.0
    assert refining.run.published is not None
    assert refining.run.published.state.keys() == {Part.BODY, Part.HEAD}
    assert refining.asked("eva") is TaskKind.SCORE
    for site in ("eva", *SITES):
        refining.score(site)
    assert refining.asked("ann") is TaskKind.FIT
    assert refining.task("ann").base_digest == refining.address
    (row, *_) = refining.ledger.rounds("test", since=1)
    assert (row.state, row.complete) == (refining.address, True)
    assert refining.metrics.registry.get_sample_value("protofed_rounds_total", {"outcome": "committed"}) == 2


def test_a_run_ends_after_its_last_refinement_and_every_state_comes_out_again(make: MakeLab) -> None:
    lab = make(**FEDIC, federation={"score_every": 0}, keep_rounds=0).begin()
    for value in (4.0, 5.0):
        trained(lab)
        lab.push("eva", lab.model(value))
    for site in ("eva", *SITES):
        lab.score(site)
    assert lab.phase == phases.FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert lab.value == 5.0
    for number in (1, 2):
        assert verify_round(lab.ledger, lab.blobs, "test", number, 1).finding is VerificationResult.SAME
    (update,) = [row for row in lab.ledger.updates("test", 1) if row.task.kind is TaskKind.REFINE]
    lab.blobs.discard(update.digest)
    assert verify_round(lab.ledger, lab.blobs, "test", 1, 1).finding is VerificationResult.NOT_KEPT


@pytest.mark.parametrize("spoilt", ["shape", "part", "nan", "far"])
def test_what_it_sends_is_judged_as_every_update_is(refining: Lab, spoilt: str) -> None:
    good = refining.model(4.0)
    bad = {
        "shape": {**good, Part.HEAD: {"weight": np.zeros((3, 3), np.float32)}},
        "part": {**good, Part.PROTOTYPES: {"0": np.zeros(2, np.float32)}},
        "nan": {**good, Part.HEAD: {"weight": np.full((3, 2), np.nan, np.float32)}},
        "far": refining.model(1e5),
    }[spoilt]
    codes = {"shape": RefusalCode.TENSORS, "part": RefusalCode.TENSORS}
    codes |= {"nan": RefusalCode.NOT_FINITE, "far": RefusalCode.NORM}
    assert refining.push("eva", bad).verdict is Verdict.REFUSED
    (refused,) = [row for row in refining.ledger.updates("test", 1) if row.verdict is Verdict.REFUSED]
    assert refused.code == codes[spoilt]
    assert refining.push("eva", good).verdict is Verdict.ACCEPTED
    assert refining.value == 4.0


def test_how_far_it_may_move_the_mean_does_not_grow_with_the_sites_models(make: MakeLab) -> None:
    lab = trained(make(**FEDIC, federation={"max_relative_norm": 1.0}).begin(), ann=-4.0, bob=0.0, cyd=7.0)
    assert lab.push("eva", lab.model(2.5)).verdict is Verdict.REFUSED  # the mean is 1.0, and moves by 1.0 at most
    assert lab.push("eva", lab.model(1.75)).verdict is Verdict.ACCEPTED


def test_a_run_without_an_evaluator_waits_says_so_and_goes_on_when_one_comes(make: MakeLab) -> None:
    lab = make(**FEDIC)
    lab.gather()
    lab.first_models()
    trained(lab)
    assert isinstance(lab.phase, phases.Refining)
    waits = lab.run.waiting(Certificates(lab.ledger))
    assert waits is not None
    assert waits.reason == "evaluator"
    lab.later(40.0, alive=SITES)
    lab.enroll("eva", role=Role.EVALUATOR)
    lab.later(0.0)
    assert lab.task("eva").kind is TaskKind.REFINE
    assert len(lab.ledger.rounds("test")) == 2  # no site trains again


def test_one_that_cannot_is_followed_by_another_that_is_sent_the_same_though_the_aggregate_rots(
    make: MakeLab, tmp_path: Path
) -> None:
    lab = make(**FEDIC, blobs=FolderBlobs(tmp_path))
    lab.enroll("eve", role=Role.EVALUATOR)
    trained(lab.begin())
    (first,) = [site for site in ("eva", "eve") if lab.asked(site)]
    (other,) = {"eva", "eve"} - {first}
    sent = lab.task(first).base_digest
    assert sent is not None
    (tmp_path / sent).write_bytes(b"rotten")
    lab.beat(first, lab.task(first).task_id, failure=FailureReason.DATA)
    lab.later(60.0, alive=(first, other))
    assert lab.asked(first) is None
    assert lab.task(other).base_digest == sent
    assert lab.has(sent)
    lab.push(other, lab.model(4.0))
    assert lab.value == 4.0
    assert statuses(lab) == {first: "failed", other: "reported"}


def test_one_that_is_late_is_asked_again_with_another_task(refining: Lab) -> None:
    late = refining.task("eva")
    refining.later(100.0, alive=("eva", *SITES))
    assert refining.asked("eva") is None
    refining.later(60.0, alive=("eva", *SITES))
    again = refining.task("eva")
    assert (again.kind, again.base_digest) == (TaskKind.REFINE, late.base_digest)
    assert again.task_id != late.task_id
    before = refining.phase
    assert isinstance(before, phases.Refining)
    refining.restart()
    assert isinstance(refining.phase, phases.Refining)
    assert (refining.phase.tries, refining.phase.passed) == (before.tries, before.passed) == (1, frozenset({"eva"}))
    assert refining.task("eva").task_id == again.task_id
    with pytest.raises(ProtocolError, match="no such task"):
        refining.push("ann", refining.model(9.0), again)  # in its place
    assert refining.push("eva", refining.model(4.0), late).verdict is Verdict.LATE
    assert refining.push("eva", refining.model(5.0), again).verdict is Verdict.ACCEPTED
    assert refining.push("eva", refining.model(5.0), again).verdict is Verdict.DUPLICATE
    assert refining.value == 5.0


def test_a_server_that_died_in_the_aggregation_has_not_died_in_the_refinement(make: MakeLab, workshop: Later) -> None:
    """Of two attempts the aggregation took one, and so may the refinement."""
    lab = trained(working(make, workshop, max_attempts=2))
    for _ in ("the aggregation", "the refinement"):
        assert [row.aggregations for row in lab.ledger.rounds("test", since=1)] == [1]
        workshop.jobs.clear()  # the process dies in the middle of it
        lab.restart()
        lab.later(0.0)
        workshop.finish()
        if isinstance(lab.phase, phases.Refining):
            assert [row.aggregations for row in lab.ledger.rounds("test", since=1)] == [0]
            lab.push("eva", lab.model(4.0))
    assert lab.value == 4.0


def test_a_damaged_upload_is_rejected_and_asked_for_again(make: MakeLab, workshop: Later) -> None:
    lab = trained(working(make, workshop))
    workshop.finish()
    lab.push("eva", lab.model(4.0))
    (update,) = [row for row in lab.ledger.updates("test", 1) if row.task.kind is TaskKind.REFINE]
    lab.blobs.discard(update.digest)
    workshop.finish()
    assert statuses(lab) == {"eva": "rejected"}
    lab.later(60.0, alive=("eva", *SITES))
    lab.push("eva", lab.model(5.0))
    workshop.finish()
    assert lab.value == 5.0
    assert [row.complete for row in lab.ledger.rounds("test", since=1) if row.round == 1] == [True]


class Tight(MemoryBlobs):
    """Takes no blob while it is full."""

    full = False

    def put(self, *data: Buffer) -> Digest:
        if self.full:
            raise OutOfSpaceError("no space left on device; free some")
        return super().put(*data)


def test_a_full_disk_delays_the_published_state(make: MakeLab) -> None:
    disk = Tight()
    lab = trained(make(**FEDIC, blobs=disk).begin())
    task = lab.task("eva")
    data = lab.announce(lab.model(4.0))[1]
    disk.put(data)  # the upload itself is there
    disk.full = True
    disk.put = lambda *pieces: codec.digest(*pieces) if disk.full and pieces == (data,) else Tight.put(disk, *pieces)  # type: ignore[method-assign]
    lab.push("eva", lab.model(4.0), task)
    assert isinstance(lab.phase, phases.Aggregating)
    disk.full = False
    lab.later(10.0)
    assert lab.value == 4.0


def test_a_full_disk_delays_the_question(make: MakeLab) -> None:
    disk = Tight()
    lab = trained(make(**FEDIC, blobs=disk).begin())
    lab.beat("eva", lab.task("eva").task_id, failure=FailureReason.DISK)
    lab.restart()  # which encodes what the evaluator fetches anew
    disk.full = True
    lab.later(60.0, alive=("eva", *SITES))
    assert lab.asked("eva") is None
    disk.full = False
    lab.later(1.0, alive=("eva", *SITES))
    assert lab.asked("eva") is TaskKind.REFINE


def test_a_run_goes_back_from_a_refinement_to_a_published_round(refining: Lab) -> None:
    refining.run.dismiss("eva", "excluded: noisy")  # the round does not wait for it
    assert isinstance(refining.phase, phases.Refining)
    assert not refining.phase.requested
    refining.run.roll_back(0)
    assert refining.asked("eva") is None
    refining.later(0.0)
    trained(refining, ann=8.0, bob=8.0, cyd=8.0)
    assert (base(refining)[Part.BODY]["conv.weight"] == 8.0).all()
    with pytest.raises(ConfigError):
        refining.run.roll_back(1)


def test_aggregates_go_with_the_rounds_that_are_not_kept(make: MakeLab) -> None:
    lab = make(**FEDIC, rounds=4, federation={"score_every": 0}, keep_rounds=1).begin()
    aggregates = []
    for value in (1.0, 2.0, 3.0):
        trained(lab, ann=value, bob=value, cyd=value)
        aggregates.append(lab.task("eva").base_digest)
        lab.push("eva", lab.model(value + 0.5))
    assert [lab.blobs.has(address) for address in aggregates if address is not None] == [False, True, True]
