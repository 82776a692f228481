"""Sums of sites' own scores, through the real coordinator and ledgers, with sites in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial

import pytest
from tests.server.conftest import daemon
from tests.server.rounds.secure_aggregation.test_steps import SITES, Secure
from tests.server.rounds.test_phase_metrics import ABANDONED, counted
from tests.support.sum_sites import SumSite

from protofed.common.errors import FailureReason
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import SUM_STEPS, Activity, Progress, Role, SumOf, TaskKind, Verdict
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.linear_form import POINT
from protofed.common.secure_aggregation.masking import Share
from protofed.server.monitoring.collector import _scores
from protofed.server.operator.run_record import overview, run_record
from protofed.server.rounds.machine import phases
from protofed.server.rounds.scores.best_round import best_kept
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import Rejection, RejectionCode

OWN = {"ann": 0.25, "bob": 0.5, "cyd": 0.5, "dan": 0.75, "eli": 1.0}
NAME = "personal.accuracy"
ALL = [TaskKind.SCORE_SUM, *SUM_STEPS]
MEAN: float = pytest.approx(0.6, abs=score_sums.STEP / 2)  # type: ignore[assignment]
FOUND = Spread(MEAN, None, None, 5)


class Scored(Secure):
    """A run of five sites whose last round is published: their own scores are asked for."""

    def __init__(self, ledger: Ledger | None = None, evaluator: SiteId | None = None) -> None:
        super().__init__("fedavg", ledger or Ledger())
        if evaluator is not None:
            self.lab.enroll(evaluator, role=Role.EVALUATOR)
        self.score_names = self.lab.recipe.score_names()
        self.scorers = {site: self._scorer(site) for site in SITES}
        self.finish(1)
        self.finish(2)

    def _scorer(self, site: SiteId) -> SumSite:
        layout, given = score_sums.lay_out_scores(self.score_names), {NAME: OWN[site]}
        if site in ("ann", "bob"):
            given["personal.pm_v"] = 0.5  # of two sites alone
        terms = score_sums.as_update(site, self.score_names, given)
        words = partial(layout.words, terms, POINT)
        digest = self.lab.recipe.fingerprint()
        return SumSite(site, digest, self.lab.blobs.view, layout.flags(terms), words, score_sums.CONTRIBUTORS)

    def answer_scores(self, sites: Iterable[SiteId]) -> None:
        for site in sites:
            task = self.lab.task(site)
            receipt = self.lab.push(site, self.scorers[site].answer(task), task)
            assert receipt.verdict is Verdict.ACCEPTED, receipt.reason

    def scores_until(self, step: TaskKind | None) -> None:
        """Answer everything before this step; None: everything."""
        while phases.is_scoring(self.lab.phase) and set(self.asked().values()) != {step}:
            self.answer_scores([*self.asked()][:1])

    def sums(self) -> dict[str, Spread]:
        return self.ledger.score_sums("test").get(2, {})

    def decline(self, site: SiteId) -> None:
        task = self.lab.task(site)
        self.lab.intake.heartbeat(
            site, daemon(site), Progress(task.task_id, Activity.FAILED, failure=FailureReason.POLICY)
        )


def test_the_ledger_has_the_mean_and_no_score_of_a_site_and_whoever_asks_is_shown_it() -> None:
    run = Scored()
    for step in ALL:
        assert run.asked() == dict.fromkeys(SITES, step)
        task = run.lab.task("ann")
        assert (task.round, task.attempt, task.sum_of) == (2, 1, SumOf.SCORES)
        run.answer_scores(SITES)
    assert run.sums() == {NAME: FOUND}  # and nothing of what two sites have
    assert run.ledger.scores("test") == {}
    assert isinstance(run.lab.phase, phases.FinishedPhase)
    assert not run.lab.phase.failed
    assert run.ledger.rounds("test")[-1].scored
    assert not any(task.is_open for task in run.ledger.tasks("test"))
    assert counted(run.lab.metrics, ABANDONED) == {}
    seen = overview(run.ledger, "test")
    assert seen is not None
    assert (seen.scored_round, seen.scores) == (2, {NAME: FOUND})
    record = json.loads(json.dumps(run_record(run.ledger, run.lab.blobs, "test")))
    assert record["scores"] == [{"round": 2, "sites": {}, "sums": {NAME: {"mean": MEAN, "sites": 5}}}]
    best = best_kept(run.ledger, run.lab.blobs, "test")
    assert best is not None
    assert (best.round, best.score, best.value) == (2, NAME, MEAN)
    exported = {
        sample.labels["stat"]: sample.value
        for family in _scores(run.ledger, "test")
        for sample in family.samples
        if sample.name == "protofed_score"
    }
    assert exported == {"mean": MEAN}


@pytest.mark.parametrize("step", ALL)
def test_a_restart_at_any_step_goes_on(step: TaskKind) -> None:
    run = Scored()
    run.scores_until(step)
    asked = run.asked()
    run.answer_scores(SITES[:2])
    half = run.lab.phase
    run.lab.restart()
    assert run.lab.phase == half
    assert run.asked() == {site: kind for site, kind in asked.items() if site not in SITES[:2]}
    run.scores_until(None)
    assert run.sums() == {NAME: FOUND}


def test_a_process_that_dies_as_it_records_the_sum_records_it_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Scored()
    run.scores_until(TaskKind.REVEAL)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.ledger, "mark_scored", die)
        with pytest.raises(KeyboardInterrupt):
            run.answer_scores(SITES)
    run.lab.restart()
    run.lab.later(0.0)
    assert run.sums() == {NAME: FOUND}
    assert isinstance(run.lab.phase, phases.FinishedPhase)


@pytest.mark.parametrize("gone", [("eli",), SITES[2:]])
def test_sites_that_decline_end_nothing_for_the_others_and_two_are_not_aggregated(gone: tuple[SiteId, ...]) -> None:
    run = Scored()
    for site in gone:
        run.decline(site)
    run.scores_until(None)
    assert {name: found.sites for name, found in run.sums().items()} == ({NAME: 4} if gone == ("eli",) else {})
    assert isinstance(run.lab.phase, phases.FinishedPhase)
    assert not run.lab.phase.failed


@pytest.mark.parametrize("step", SUM_STEPS)
def test_a_site_that_drops_out_ends_no_round(step: TaskKind) -> None:
    run = Scored()
    run.scores_until(step)
    run.answer_scores(SITES[1:])
    run.lab.later(60.0, alive=SITES)
    run.scores_until(None)
    alone = (TaskKind.AGREE_CONTRIBUTORS, TaskKind.REVEAL_CONTRIBUTORS, TaskKind.MASK)  # a row could be left with one
    assert (run.sums().get(NAME) is None) is (step in alone)
    assert isinstance(run.lab.phase, phases.FinishedPhase)
    assert not run.lab.phase.failed
    assert run.ledger.rounds("test")[-1].abandoned is None
    assert run.ledger.rounds("test")[-1].scored


@pytest.mark.parametrize("step", [TaskKind.CONTRIBUTORS, TaskKind.MASK, TaskKind.REVEAL])
def test_a_sum_of_scores_that_comes_to_nothing_counts_as_any_other(step: TaskKind) -> None:
    run = Scored()
    run.scores_until(step)
    run.answer_scores(SITES[:2])
    run.lab.later(60.0, alive=SITES)
    reason = "left" if step is TaskKind.MASK else "too-few"
    assert counted(run.lab.metrics, ABANDONED) == {(reason, step.value): 1.0}


def test_false_shares_of_a_sum_of_scores_count_once() -> None:
    run = Scored()
    run.scores_until(TaskKind.REVEAL)
    for site in SITES[:2]:
        shares = run.scorers[site].party.shares
        for dealer, dealt in shares.items():
            shares[dealer] = {vector: Share(bytes(16), bytes(16)) for vector in dealt}
    run.answer_scores(SITES)
    assert run.sums() == {}
    assert counted(run.lab.metrics, ABANDONED) == {("unusable", "reveal"): 1.0}


def test_evaluators_report_first_and_trainers_report_none_by_themselves() -> None:
    run = Scored(evaluator="eva")
    assert run.lab.asked("eva") is TaskKind.SCORE
    assert run.asked() == {}
    run.lab.score("eva")
    assert run.asked() == dict.fromkeys(SITES, TaskKind.SCORE_SUM)
    run.lab.restart()
    assert run.asked() == dict.fromkeys(SITES, TaskKind.SCORE_SUM)
    run.scores_until(None)
    assert run.sums() == {NAME: FOUND}
    assert run.ledger.scores("test") == {2: {"eva": {"global.accuracy": 0.5}}}


def test_an_evaluator_that_is_late_is_not_asked_again_by_a_restarted_server() -> None:
    run = Scored(evaluator="eva")
    run.lab.later(run.lab.recipe.federation.score_deadline_s, alive=(*SITES, "eva"))
    run.answer_scores(SITES)
    assert run.asked() == dict.fromkeys(SITES, TaskKind.SHARE)
    assert run.lab.asked("eva") is None
    run.lab.restart()
    assert run.lab.asked("eva") is None
    run.scores_until(None)
    assert run.sums() == {NAME: FOUND}


def test_a_restart_between_evaluators_and_trainers_asks_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Scored(evaluator="eva")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.ledger, "invite", die)
        with pytest.raises(KeyboardInterrupt):
            run.lab.score("eva")
    run.lab.restart()
    run.lab.later(0.0)
    assert run.asked() == dict.fromkeys(SITES, TaskKind.SCORE_SUM)


def test_a_restart_among_evaluators_asks_the_same_trainers_also_who_was_not_in_the_round() -> None:
    run = Scored(evaluator="eva")
    task = next(row for row in run.ledger.tasks("test", 2, 1) if (row.site, row.kind) == ("eli", TaskKind.FIT))
    update = next(row for row in run.ledger.updates("test", 2, 1) if row.task.task_id == task.task_id)
    run.ledger.reject(update, Rejection(RejectionCode.GROUP, "was not drawn"))
    then = run.lab.phase
    run.lab.restart()
    assert run.lab.phase == then
    run.lab.score("eva")
    assert run.asked() == dict.fromkeys(SITES, TaskKind.SCORE_SUM)


def test_a_site_that_has_not_been_aggregated_is_not_asked() -> None:
    run = Scored(evaluator="eva")
    run.lab.enroll("new")
    run.lab.score("eva")
    assert run.lab.asked("new") is None
