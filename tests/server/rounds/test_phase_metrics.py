"""What a secure aggregation counts for: its steps, who dropped out of which, and why one came to nothing."""

from __future__ import annotations

import pytest
from tests.server.conftest import Lab
from tests.server.rounds.secure_aggregation.test_steps import SITES, Secure

from protofed.common.protocol.messages import SUM_STEPS, TaskKind
from protofed.common.secure_aggregation.masking import Share
from protofed.server.metrics import COUNTED_STEPS, ServerMetrics, SumFailure
from protofed.server.monitoring import collector
from protofed.server.rounds.machine import phases
from protofed.server.rounds.run import count

DROPOUTS, ABANDONED = "protofed_sum_dropouts_total", "protofed_sums_abandoned_total"


@pytest.fixture(params=["fedavg", "fedprp"])
def run(request: pytest.FixtureRequest) -> Secure:
    return Secure(request.param)


def counted(metrics: ServerMetrics, name: str) -> dict[tuple[str, ...], float]:
    """What is not 0, by the labels' values in their names' order."""
    samples = [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name]
    return {
        tuple(sample.labels[key] for key in sorted(sample.labels)): sample.value for sample in samples if sample.value
    }


def test_every_series_is_there_before_anything_has_happened_and_no_other_comes() -> None:
    def series(name: str) -> int:
        return sum(sample.name == name for family in metrics.registry.collect() for sample in family.samples)

    metrics = ServerMetrics()
    assert (series(DROPOUTS), series(ABANDONED)) == (len(SUM_STEPS), len(COUNTED_STEPS) * len(SumFailure))
    assert {*COUNTED_STEPS} == {TaskKind.FIT, *SUM_STEPS}


def test_each_step_of_a_round_has_its_duration_and_nobody_drops_out(run: Secure) -> None:
    run.go_to(TaskKind.MASK)
    run.answer(SITES[1:])
    run.lab.clock.now += 7.0
    run.finish()
    steps = {(step.value,): 1.0 for step in run.steps if step is not TaskKind.FIT}
    metrics = run.lab.metrics
    assert counted(metrics, "protofed_sum_step_seconds_count") == steps
    assert counted(metrics, "protofed_sum_step_seconds_sum") == {("mask",): 7.0}
    assert counted(metrics, DROPOUTS) == counted(metrics, ABANDONED) == {}


@pytest.mark.parametrize("step", [TaskKind.SHARE, TaskKind.AGREE, TaskKind.REVEAL])
def test_a_dropout_counts_at_the_step_that_it_did_not_report_and_not_again(run: Secure, step: TaskKind) -> None:
    run.go_to(step)
    run.answer(SITES[1:])
    run.lab.later(60.0, alive=SITES)
    run.finish()
    assert counted(run.lab.metrics, DROPOUTS) == {(step.value,): 1.0}
    assert counted(run.lab.metrics, ABANDONED) == {}


def test_a_site_that_leaves_between_contributors_and_numbers_is_another_reason_than_too_few() -> None:
    run = Secure("fedprp")
    run.go_to(TaskKind.MASK)
    run.answer(SITES[1:])
    run.lab.later(60.0, alive=SITES)
    assert counted(run.lab.metrics, ABANDONED) == {("left", "mask"): 1.0}
    assert counted(run.lab.metrics, DROPOUTS) == {("mask",): 1.0}
    run = Secure("fedprp")
    run.go_to(TaskKind.AGREE)
    run.answer(SITES[:3])
    run.lab.later(60.0, alive=SITES)
    assert counted(run.lab.metrics, ABANDONED) == {("too-few", "agree"): 1.0}
    assert counted(run.lab.metrics, DROPOUTS) == {("agree",): 2.0}


def test_what_gives_no_sum_is_unusable_and_nobody_dropped_out(run: Secure) -> None:
    run.go_to(TaskKind.REVEAL)
    for site in SITES[:2]:
        shares = run.sites[site].party.shares
        for dealer, dealt in shares.items():
            shares[dealer] = {vector: Share(bytes(16), bytes(16)) for vector in dealt}
    run.answer(SITES)
    assert counted(run.lab.metrics, ABANDONED) == {("unusable", "reveal"): 1.0}
    assert counted(run.lab.metrics, DROPOUTS) == {}


def test_an_upload_that_cannot_be_read_is_unusable_at_the_step_that_needs_it(run: Secure) -> None:
    run.go_to(TaskKind.SHARE)
    run.answer(SITES[1:])
    (lost,) = [
        row for row in run.ledger.updates("test", 1) if (row.task.kind, row.task.site) == (TaskKind.SHARE, "bob")
    ]
    run.lab.blobs.discard(lost.digest)
    run.answer(SITES[:1])
    (_, step), times = next(iter(counted(run.lab.metrics, ABANDONED).items()))
    assert (step, times) == (run.steps[2].value, 1.0)


@pytest.mark.parametrize(("reported", "expected"), [("ab", {("too-few", "fit"): 1.0}), ("a", {})])
def test_a_sum_that_cannot_begin_counts_and_a_round_without_its_quorum_is_no_sum(
    reported: str, expected: dict[tuple[str, ...], float]
) -> None:
    metrics, before = ServerMetrics(), phases.Collecting(1, 1, frozenset("abc"), 3, 2, 0.0, frozenset("a"))
    event = phases.Arrived(reported[-1], 1.0)
    given_up = [phases.Abandon(1, 1, "the sites are in no group yet")]
    count(metrics, "run", before, event, phases.Idle(1, 1), given_up, 1.0, secure=True)
    assert counted(metrics, ABANDONED) == expected


def test_a_run_that_is_stopped_lost_no_site(run: Secure) -> None:
    run.go_to(TaskKind.SHARE)
    run.lab.run.handle(phases.Stop("enough"))
    assert counted(run.lab.metrics, DROPOUTS) == counted(run.lab.metrics, ABANDONED) == {}


def gauges(run: Secure) -> dict[str, dict[tuple[str, ...], float]]:
    """Of secure aggregation, as a scrape has them now: those that are not 0."""
    families = [*collector._sum_step(run.lab.recipe, run.lab.phase), *collector._state(run.ledger, "test")]
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples if sample.value}
        for family in families
        if family.name.startswith("protofed_sum")
    }


def test_the_open_step_is_shown_and_the_sites_of_the_newest_sum_after_a_restart_too(run: Secure) -> None:
    assert gauges(run) == {"protofed_sum_step": {}}
    run.go_to(TaskKind.MASK)
    run.answer(SITES)
    assert gauges(run)["protofed_sum_step"] == {("test", "agree"): 1.0}
    run.answer(SITES[1:])
    run.lab.later(60.0, alive=SITES)
    run.finish()
    assert gauges(run) == {
        "protofed_sum_step": {},
        "protofed_sum_sites": {("test",): 5.0},
    }  # who drops out later is in it
    run.lab.restart()
    assert gauges(run)["protofed_sum_sites"] == {("test",): 5.0}


def test_a_run_without_secure_aggregation_has_no_such_gauges(lab: Lab) -> None:
    lab.round(ann=1.0, bob=2.0, cyd=6.0)
    families = [*collector._sum_step(lab.recipe, lab.phase), *collector._state(lab.ledger, "test")]
    assert [family.name for family in families if "sum" in family.name] == []
