"""A run as it looks from outside, by hand."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import TYPE_CHECKING

import pytest

from protofed.common.protocol.messages import Activity
from protofed.common.protocol.scores import Spread, spread, spreads
from protofed.server.operator.run_record import Overview, overview
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RefusalCode, RoundOutcome, UpdateProblem

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

SITES = ("ann", "bob", "cyd")


def seen(lab: Lab) -> Overview:
    found = overview(lab.ledger, "test")
    assert found is not None
    return found


def test_a_run_without_sites_waits(make: MakeLab) -> None:
    assert overview(Ledger(), "test") is None
    found = seen(make())
    assert (found.phase, found.began, found.ended, found.failed) == ("not started", False, False, False)
    assert (found.round, found.invited, found.reported, found.received, found.sent) == (0, 0, 0, 0, 0)
    assert (found.scores, found.scored_round, found.seconds) == ({}, 0, 0.0)


def test_a_run_is_followed_from_its_first_model_to_its_end(make: MakeLab) -> None:
    lab = make()
    lab.gather("eva")
    assert (seen(lab).phase, seen(lab).invited, seen(lab).sent) == ("making the model", 2, 0)
    lab.first_models()
    assert (seen(lab).phase, seen(lab).round, seen(lab).invited, seen(lab).reported) == ("collecting", 1, 3, 0)
    lab.push("ann", lab.model(1.0))
    assert (seen(lab).phase, seen(lab).reported) == ("collecting", 1)
    lab.push("bob", lab.model(1.0))
    lab.push("cyd", lab.model(1.0))
    assert (seen(lab).phase, seen(lab).invited, seen(lab).reported) == ("evaluating", 3, 3)
    for site in (*SITES, "eva"):
        lab.score(site)
    assert (seen(lab).phase, seen(lab).round) == ("collecting", 2)
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    assert (seen(lab).phase, seen(lab).ended, seen(lab).failed) == ("completed", True, False)


def test_bytes_are_those_of_counted_updates_and_of_models_to_be_fetched(lab: Lab) -> None:
    manifest, data = lab.announce(lab.model(1.0))
    state = len(lab.blobs.get(lab.address))
    first = seen(lab).received
    lab.push("ann", lab.model(1.0))
    lab.intake.refuse("bob", lab.task("bob").task_id, manifest, UpdateProblem(RefusalCode.DAMAGED, "no"))
    assert seen(lab).received == first + len(data)
    assert seen(lab).sent == 3 * state


def test_after_its_scores_a_round_waits_for_the_next(lab: Lab) -> None:
    lab.train(1.0)
    for site in SITES:
        lab.score(site)
    lab.later(100.0)  # eva never scores, and nobody is alive for another round
    assert seen(lab).phase == "waiting"


def test_an_abandoned_attempt_says_why_and_the_next_one_counts_anew(lab: Lab) -> None:
    lab.push("ann", lab.model(1.0))
    lab.later(100.0, alive=SITES)
    assert seen(lab).phase == "abandoned: 1 update at the deadline, quorum 2"
    lab.later(0.0)
    assert (seen(lab).phase, seen(lab).invited, seen(lab).reported) == ("collecting", 3, 0)
    lab.train(1.0)
    assert seen(lab).phase == "evaluating"


def test_rounds_with_fewer_updates_than_wanted_are_counted_as_degraded(lab: Lab) -> None:
    assert seen(lab).degraded == 0
    lab.beat("cyd", lab.task("cyd").task_id, activity=Activity.FAILED, failure=None)
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(1.0))
    lab.later(51.0, alive=("ann", "bob"))
    assert seen(lab).degraded == 1


def test_a_run_that_failed_says_so(lab: Lab) -> None:
    lab.run.stop("enough")
    assert (seen(lab).phase, seen(lab).failed, seen(lab).ended) == ("enough", False, True)
    lab.ledger.end_run("test", "disk", RoundOutcome.FAILED)
    assert (seen(lab).phase, seen(lab).failed) == ("disk", True)


def test_scores_are_those_of_the_newest_scored_round(lab: Lab) -> None:
    for first, scores in ((1.0, (0.5, 0.5, 0.5, 0.5)), (2.0, (0.25, 0.75, 0.5, 0.5))):
        lab.train(first)
        for site, value in zip((*SITES, "eva"), scores, strict=True):
            lab.score(site, value)
    assert seen(lab).scored_round == 2
    found = seen(lab).scores
    assert found.keys() == {"global.accuracy", "personal.accuracy"}
    assert found["global.accuracy"] == Spread(0.5, 0.0, 0.5, 1)
    assert astuple(found["personal.accuracy"]) == pytest.approx((0.5, math.sqrt(0.125 / 3), 0.25, 3))


def test_spreads_by_hand() -> None:
    for values, expected in (
        ([0.5], Spread(0.5, 0.0, 0.5, 1)),
        ([1.0, 2.0, 3.0, 4.0], Spread(2.5, math.sqrt(1.25), 1.0, 4)),
        ([-1.0, -1.0, -1.0], Spread(-1.0, 0.0, -1.0, 3)),
    ):
        assert astuple(spread(values)) == pytest.approx(astuple(expected), abs=1e-15)
    for absurd in ([1e308, 1e308, 1e308], [1.7e308, -1.7e308], [1e200, 0.0]):
        assert spread(absurd).worst == min(absurd)
    found = spreads({"ann": {"a": 1.0, "b": 2.0}, "bob": {"a": 3.0}, "cyd": {}})
    assert found == {"a": Spread(2.0, 1.0, 1.0, 2), "b": Spread(2.0, 0.0, 2.0, 1)}
    assert spreads({}) == {}
