"""Blobs that nobody needs go, blobs that somebody needs stay, whoever shares them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protofed.common.codec import Digest
from protofed.server.verdicts import RefusalCode, UpdateProblem

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

SITES = ("ann", "bob", "cyd")
UNSCORED = {"score_every": 0}  # no round is the best


def states(lab: Lab) -> list[Digest]:
    """The published states, oldest first."""
    return [row.state for row in lab.ledger.rounds(lab.run.name) if row.state]


def digests(lab: Lab, round: int) -> set[Digest]:
    """All that a round was sent."""
    return {row.digest for row in lab.ledger.updates(lab.run.name, round)}


def go(lab: Lab, *rounds: int) -> Lab:
    """Complete these rounds with updates that no other round has."""
    for number in rounds:
        lab.round(ann=number + 0.25, bob=number + 0.5, cyd=number * 3.0)
    return lab


def test_the_newest_rounds_blobs_are_kept_and_older_ones_discarded(make: MakeLab) -> None:
    lab = go(make(rounds=7, keep_rounds=2, federation=UNSCORED).begin(), 1, 2, 3, 4, 5, 6)
    kept = [lab.has(state) for state in states(lab)]
    assert kept == [False, False, False, True, True, True, True]  # round 4's tasks start from round 3's state
    assert not any(lab.has(digest) for number in (1, 2, 3) for digest in digests(lab, number))
    assert all(lab.has(digest) for number in (4, 5, 6) for digest in digests(lab, number))


def test_a_state_that_never_changes_is_kept(make: MakeLab) -> None:
    lab = make(rounds=6, method={"name": "solo"}, keep_rounds=1).begin()
    for _ in range(5):
        for site in SITES:
            lab.push(site, {})
        for site in SITES:
            lab.score(site)
    assert len(set(states(lab))) == 1
    assert lab.has(lab.address)


def test_refused_and_stale_updates_and_those_of_an_abandoned_attempt_are_discarded_too(make: MakeLab) -> None:
    lab = make(rounds=6, keep_rounds=1).begin()
    lab.push("ann", lab.model(55.0))
    (given_up,) = digests(lab, 1)
    lab.later(100.0, alive=SITES)
    lab.later(0.0)
    late = lab.task("cyd")
    lab.push("ann", lab.model(1.0))
    manifest, data = lab.announce(lab.model(77.0))
    lab.blobs.put(data)
    lab.intake.refuse("cyd", late.task_id, manifest, UpdateProblem(RefusalCode.NOT_FINITE, "not finite"))
    lab.round(bob=1.0, cyd=1.0)
    assert lab.has(manifest.digest)
    for number in (2, 3):
        assert lab.has(lab.task("ann").base_digest or Digest(""))  # the open round's base is there
        go(lab, number)
    assert not lab.has(manifest.digest)
    assert not lab.has(given_up)


def test_a_restarted_server_prunes_on(make: MakeLab) -> None:
    lab = go(make(rounds=6, keep_rounds=1, federation=UNSCORED).begin(), 1, 2)
    lab.restart()
    go(lab, 3, 4, 5)
    assert [lab.has(state) for state in states(lab)] == [False, False, False, True, True, True]


def test_another_runs_newest_state_is_not_discarded_with_this_runs_old_ones(make: MakeLab) -> None:
    short = make("short", rounds=2, keep_rounds=1).begin()
    before = go(short, 1, 2).value
    longer = make("longer", rounds=6, keep_rounds=1, ledger=short.ledger, blobs=short.blobs).begin()
    go(longer, 1, 2)
    assert longer.address == short.address  # the same seed, sites and method: the same bytes
    go(longer, 3, 4, 5)
    short.restart()
    assert short.value == before


def test_a_first_model_that_another_run_ended_with_is_not_discarded(make: MakeLab) -> None:
    alone = make("alone", rounds=1, method={"name": "solo"}).begin()
    for site in SITES:
        alone.push(site, {})
    together = make("together", rounds=6, keep_rounds=1, ledger=alone.ledger, blobs=alone.blobs).begin()
    go(together, 1, 2, 3, 4)
    alone.restart()
    assert alone.value == 0.0
