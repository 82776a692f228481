"""What is counted when it happens: everything once, by the process that made it durable."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.operator_lab import OperatorLab, operator_lab

from protofed.common.errors import OutOfSpaceError
from protofed.common.payload import Part
from protofed.common.protocol.messages import Verdict
from protofed.server.metrics import METRICS, ServerMetrics
from protofed.server.rounds.machine import phases
from protofed.server.verdicts import RefusalCode, RejectionCode

if TYPE_CHECKING:
    from tests.server.conftest import Lab, Later, MakeLab


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def rounds(metrics: ServerMetrics) -> dict[str, float | None]:
    return {
        name: value(metrics, "protofed_rounds_total", outcome=name) for name in ("committed", "degraded", "abandoned")
    }


def updates(metrics: ServerMetrics) -> dict[tuple[str, str], float]:
    """Verdicts and reasons that were counted at all."""
    (family,) = [found for found in metrics.registry.collect() if found.name == "protofed_updates"]
    counted = {(sample.labels["verdict"], sample.labels["reason"]): sample.value for sample in family.samples}
    return {key: count for key, count in counted.items() if count}


# The contract


def test_names_say_what_they_are() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("protofed_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name


def test_what_has_not_happened_yet_is_zero_and_there() -> None:
    metrics = ServerMetrics()
    assert rounds(metrics) == {"committed": 0, "degraded": 0, "abandoned": 0}
    (family,) = [found for found in metrics.registry.collect() if found.name == "protofed_updates"]
    counted = {(sample.labels["verdict"], sample.labels["reason"]): sample.value for sample in family.samples}
    plain = [(one, "") for one in ("accepted", "duplicate", "late", "not-needed")]
    refused = [("refused", code) for code in RefusalCode]
    assert counted == dict.fromkeys([*plain, *refused, *(("rejected", code) for code in RejectionCode)], 0.0)
    assert value(metrics, "protofed_recoveries_total") == 0


# Rounds


def test_a_whole_round_is_committed_and_one_without_a_site_degraded(lab: Lab) -> None:
    assert rounds(lab.metrics) == {"committed": 1, "degraded": 0, "abandoned": 0}  # round 0 made the model
    lab.round(ann=1.0, bob=2.0, cyd=6.0)
    assert rounds(lab.metrics) == {"committed": 2, "degraded": 0, "abandoned": 0}
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(1.0))
    lab.later(101.0)
    assert rounds(lab.metrics) == {"committed": 2, "degraded": 1, "abandoned": 0}
    lab.clock.now += 10.0
    lab.restart()
    assert rounds(lab.metrics) == {"committed": 0, "degraded": 0, "abandoned": 0}  # those were the last process's
    assert seconds(lab.metrics, "collecting") == (None, None)  # and a phase that it began is not timed


def test_a_round_that_is_abandoned_and_opened_again(lab: Lab) -> None:
    lab.push("ann", lab.model(1.0))
    lab.later(101.0, alive=("ann", "bob", "cyd"))
    lab.later(0.0)
    assert rounds(lab.metrics) == {"committed": 1, "degraded": 0, "abandoned": 1}
    lab.round(ann=1.0, bob=2.0, cyd=6.0)
    assert rounds(lab.metrics) == {"committed": 2, "degraded": 0, "abandoned": 1}


def test_what_is_rolled_back_stays_counted_and_is_counted_again_when_it_is_done_again(make: MakeLab) -> None:
    lab = make(rounds=3, keep_rounds=0).begin()
    lab.round(ann=1.0, bob=2.0, cyd=6.0)
    lab.run.roll_back(0)
    assert rounds(lab.metrics)["committed"] == 2
    lab.later(0.0)
    lab.round(ann=1.0, bob=2.0, cyd=6.0)
    assert rounds(lab.metrics)["committed"] == 3
    assert updates(lab.metrics) == {("accepted", ""): 8}  # two of them made the first model


def test_a_promise_that_the_journal_lacks_counts_when_it_is_kept(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def append_all(self, *_: Any, **__: Any) -> None:
            raise OutOfSpaceError("no space left")

    class Free:
        def append_all(self, *_: Any, **__: Any) -> None: ...

    lab.ledger.attach(Full())
    with pytest.raises(OutOfSpaceError):
        lab.push("ann", lab.model(1.0))
    assert updates(lab.metrics) == {("accepted", ""): 2}  # the first models
    lab.ledger.attach(Free())
    assert lab.push("ann", lab.model(1.0)).verdict is Verdict.ACCEPTED
    assert updates(lab.metrics) == {("accepted", ""): 3}
    assert sum(row.verdict is Verdict.ACCEPTED for row in lab.ledger.updates("test")) == 3


# Restarts


def test_a_restart_in_the_middle_of_an_aggregation_counts_it_once(make: MakeLab, workshop: Later) -> None:
    lab = make(work=workshop)
    lab.enroll("eva")
    lab.gather()
    lab.first_models()
    workshop.finish()
    for site, number in (("ann", 1.0), ("bob", 2.0), ("cyd", 3.0), ("eva", 2.0)):
        lab.push(site, lab.model(number))
    assert isinstance(lab.phase, phases.Aggregating)
    before = lab.metrics
    lab.restart()
    workshop.jobs.clear()  # it died with the process
    lab.later(0)
    workshop.finish()
    assert rounds(before)["committed"] == 1
    assert rounds(lab.metrics)["committed"] == 1
    assert updates(lab.metrics) == {}  # they were accepted by the process before


@pytest.fixture
def queue() -> OperatorLab:
    found = operator_lab()
    found.enroll("ann", "bob", "cyd")
    found.start("one")
    found.start("two")
    return found


def test_runs_that_are_taken_up_again_are_recoveries(queue: OperatorLab) -> None:
    assert value(queue.metrics, "protofed_recoveries_total") == 0
    queue.restart()
    assert value(queue.metrics, "protofed_recoveries_total") == 2
    queue.operation.abort("two", "enough")
    queue.restart()
    assert value(queue.metrics, "protofed_recoveries_total") == 1
    with queue.ledger._write() as connection:
        connection.exec_driver_sql("update runs set recipe = '{}' where run = 'one'")  # of a later version
    queue.restart()
    assert (value(queue.metrics, "protofed_recoveries_total"), queue.statuses()["one"]) == (0, "failed")


# Updates


def test_every_verdict_is_counted_once(lab: Lab) -> None:
    fit = lab.task("ann")
    odd: Any = {Part.BODY: {"w": np.ones(2, np.float32)}}
    assert lab.push("ann", odd, fit).verdict is Verdict.REFUSED
    assert lab.push("ann", lab.model(math.inf), fit).verdict is Verdict.REFUSED
    assert lab.push("ann", lab.model(1.0), fit, metrics={"loss": math.inf}).verdict is Verdict.REFUSED
    assert lab.push("ann", lab.model(1.0), fit).verdict is Verdict.ACCEPTED
    for _ in range(2):
        assert lab.push("ann", lab.model(1.0), fit).verdict is Verdict.DUPLICATE
    assert lab.push("ann", lab.model(2.0), fit).verdict is Verdict.REFUSED
    late = lab.task("cyd")
    lab.push("bob", lab.model(1.0))
    lab.later(101.0, alive=("ann", "bob"))
    assert lab.push("cyd", lab.model(1.0), late).verdict is Verdict.LATE
    assert updates(lab.metrics) == {
        ("accepted", ""): 4,  # two of them made the model
        ("late", ""): 1,
        ("duplicate", ""): 2,
        ("refused", "tensors"): 1,
        ("refused", "not-finite"): 1,
        ("refused", "scalars"): 1,
        ("refused", "equivocation"): 1,
    }


def test_what_is_rejected_was_accepted_before(make: MakeLab) -> None:
    lab = make(federation={"outlier_factor": 10.0}).begin()
    lab.round(ann=1.0, bob=1.0, cyd=1000.0)
    assert updates(lab.metrics) == {("accepted", ""): 5, ("rejected", RejectionCode.OUTLIER): 1}
    assert rounds(lab.metrics) == {"committed": 1, "degraded": 1, "abandoned": 0}
    lab.restart()
    assert updates(lab.metrics) == {}


def test_norms_are_of_accepted_updates_and_not_of_the_first_model(lab: Lab) -> None:
    assert value(lab.metrics, "protofed_update_norm_count") == 0
    lab.push("ann", lab.model(2.0))
    lab.push("bob", lab.model(math.inf))
    assert value(lab.metrics, "protofed_update_norm_count") == 1
    norm = 2.0 * math.sqrt(4 + 3 * 2)  # from 0 to 2 in a body of [2, 2] and a head of [3, 2]
    assert value(lab.metrics, "protofed_update_norm_sum") == pytest.approx(norm)


# Phases


def seconds(metrics: ServerMetrics, phase: str) -> tuple[float | None, float | None]:
    """How many there were, and their sum."""
    name = "protofed_round_seconds"
    return value(metrics, f"{name}_count", phase=phase), value(metrics, f"{name}_sum", phase=phase)


def test_phases_are_timed_when_they_end(make: MakeLab, workshop: Later) -> None:
    lab = make(work=workshop)
    lab.later(0)
    lab.clock.now = 1000.0  # waiting for sites is no phase of a round
    lab.gather()
    lab.later(5.0)
    lab.first_models()
    assert seconds(lab.metrics, "collecting") == (1, 5.0)
    lab.clock.now += 3.0
    workshop.finish()
    assert seconds(lab.metrics, "aggregating") == (1, 3.0)
    lab.clock.now += 7.0
    lab.train(1.0)
    assert seconds(lab.metrics, "collecting") == (2, 12.0)
    workshop.finish()
    lab.clock.now += 2.0
    for site in ("ann", "bob", "cyd"):
        lab.score(site)
    assert seconds(lab.metrics, "evaluating") == (1, 2.0)
    assert seconds(lab.metrics, "idle") == (None, None)


# Bytes


def test_bytes_of_a_chunk_go_to_parts_by_their_shares() -> None:
    metrics = ServerMetrics()
    metrics.bytes_transferred("in", {Part.BODY: 0.75, Part.HEAD: 0.25}, 1000)
    metrics.bytes_transferred("in", {Part.BODY: 1.0}, 100)
    assert value(metrics, "protofed_transfer_bytes_total", direction="in", part="body") == 850
    assert value(metrics, "protofed_transfer_bytes_total", direction="in", part="head") == 250
    assert value(metrics, "protofed_transfer_bytes_total", direction="out", part="body") is None
