"""What a server has of a run under secure aggregation tells nothing of one site; what it does tell is said here, too.

Each attack succeeds in the same test without secure aggregation, or on sums that nothing restricts: so it is one.
That a masked upload is uniform, that t - 1 sites with the server open nothing, and that t do, is in
tests/common/secure_aggregation/test_masking.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.attacks import share_sets
from tests.attacks.hostile_server import as_payload, honest_model
from tests.attacks.policies import NONE, PERCEPTRONS
from tests.attacks.sums import TRAPS, Counted, all_but_one, every_cohort, images, signed_by_all
from tests.bench import attacks
from tests.bench.leakage_runs import Case, attacked
from tests.bench.leakage_scores import Found, strongest, tried

from protofed.common.payload import Part, Update, describe
from protofed.common.secure_aggregation.groups import alone
from protofed.common.secure_aggregation.linear_form import POINT, SumLayout
from protofed.server.methods.cwfedavg_private import CwFedAvgPrivateServer
from protofed.server.rounds.machine.rules import Grouping
from protofed.server.rounds.secure_aggregation.totals import unmasked_total

SITES = 6
EVERY = {**attacks.BY_CLASS, **attacks.MODEL, **attacks.WITH_DATA}


def found(case: Case) -> list[Found]:
    victims, _ = attacked(case, seed=0, rounds=2)
    return tried(EVERY, victims)


def best(some: list[Found], by: str) -> float:
    one = strongest(some, by)
    assert one is not None
    return float(getattr(one, by))


@pytest.mark.parametrize(
    ("plain", "secure"),
    [
        (Case("digits-fedavg"), Case("digits-fedavg", secure=True)),
        (Case("digits-fednh"), Case("digits-fednh", secure=True)),
        (Case("digits-fedprp"), Case("digits-fedprp", secure=True)),
        (Case("digits-cwfedavg"), Case("digits-cwfedavg", method={"shares": "true"}, secure=True)),
    ],
    ids=lambda case: f"{case.recipe} {case.said}",
)
def test_no_attack_tells_one_site_from_another_by_sums(plain: Case, secure: Case) -> None:
    without, within = found(plain), found(secure)
    assert best(without, "own_auc") > 0.9
    assert best(without, "own_correlation") > 0.7
    assert {one.attack for one in within} >= {one.attack for one in without} - {"row agreement", "head mixture"}
    assert best(within, "own_auc") == 0.5
    assert best(within, "own_correlation") == 0


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted.of(SITES, rounds=SITES + 1)


def test_one_sum_of_all_sites_gives_nobody_s_label_counts(counted: Counted) -> None:
    assert counted.without_sums().recovered == SITES
    assert counted.by_sums([set(counted.sent)]).recovered == 0


def test_sums_whose_sites_differ_by_one_give_its_label_counts(counted: Counted) -> None:
    """So with `sum_group = 1`, for a server that asks the same again and chooses whom."""
    cohorts = all_but_one(counted.sent)
    assert signed_by_all(alone(counted.sent), cohorts) == cohorts
    assert counted.by_sums(cohorts).recovered == SITES
    assert counted.by_sums(cohorts[:2]).recovered == 1


def test_of_all_sums_that_sites_in_groups_of_three_sign_a_site_shows_as_its_group(counted: Counted) -> None:
    groups = Grouping("run", seed=0, fewest=3).formed(set(counted.sent))
    cohorts = signed_by_all(groups, every_cohort(counted.sent))
    assert len(cohorts) == 3, "either group, and both"
    assert counted.by_sums(cohorts).recovered == 0
    shares = dict(zip(counted.sent, counted.truth / counted.truth.sum(axis=1, keepdims=True), strict=True))
    told = dict(zip(counted.sent, map(counted.shares, counted.disaggregated(cohorts)), strict=True))
    for group in groups:
        for site in group:
            assert told[site] == pytest.approx(np.mean([shares[one] for one in group], axis=0), abs=1e-5)
            assert np.abs(told[site] - shares[site]).max() > 0.05


@pytest.mark.parametrize(("accomplices", "recovered"), [(0, 0), (1, 0), (2, SITES)])
def test_two_accomplices_of_a_group_of_three_give_the_thirds(
    counted: Counted, accomplices: int, recovered: int
) -> None:
    """So do two that the server invented, which is why a person confirms the partners: see test_partners."""
    assert counted.less(accomplices).recovered == recovered


def test_sums_by_class_of_whole_models_give_the_head_of_the_only_site_without_a_class() -> None:
    """With `cwfedavg-private`: the sum over all sites less that over those that have the class. It has no name."""
    generator, present = np.random.default_rng(0), ([1, 1, 0], [0, 1, 1], [1, 1, 1])
    heads = generator.standard_normal((3, 3, 5)).astype(np.float32)
    sent = [
        Update(
            f"site-{number}",
            {
                Part.BODY: {"weight": np.ones(2, np.float32)},
                Part.HEAD: {"weight": head},
                Part.CLASS_PRESENCE: {"present": np.array(has, np.float32)},
            },
            {},
        )
        for number, (head, has) in enumerate(zip(heads, present, strict=True))
    ]
    layout = SumLayout.of(CwFedAvgPrivateServer().sum_form(), describe(sent[0].payload), {})
    total = unmasked_total(layout, lambda: sent, POINT, min_contributors=2)
    sums = layout.named(POINT.decoded(total))
    for c, lacks in ((0, 1), (2, 0)):
        assert np.array_equal(sums["mean/head/weight"] - sums["mixture/head/weight"][c], heads[lacks])


@pytest.mark.parametrize("trap", TRAPS)
def test_a_sum_of_three_sites_gives_images_to_a_server_that_chose_the_model(trap: str) -> None:
    """Fewer than their updates do, and not whose: secure aggregation is no rule against trap weights."""
    apart, aggregated = (images(NONE, TRAPS[trap], aggregated=which) for which in (False, True))
    assert 0 < aggregated.recovered < apart.recovered


def test_the_rules_of_sites_for_models_hold_under_secure_aggregation_as_without() -> None:
    assert images(PERCEPTRONS, TRAPS["sorted thresholds"], aggregated=True).silent
    for trap in ("a perceptron that hardly any image wakes", "units behind convolutions that hardly any wakes"):
        assert images(PERCEPTRONS, TRAPS[trap], aggregated=True).recovered == 0


def test_a_few_sums_of_fits_on_a_blind_body_give_the_label_shares_of_each_site() -> None:
    run = share_sets.recipe()
    told, guessed = share_sets.errors(run, share_sets.dead(as_payload(honest_model(run))), number=8)
    assert told < 0.01
    assert guessed > 0.08
