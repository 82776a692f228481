"""What a server has of a run under secure sums tells nothing of one site; what it still gives, is said here, too.

Each attack succeeds in the same test on a run without secure sums, or on sums that nothing restricts: so it is one.
That a masked upload is uniform, that t - 1 sites with the server open nothing, and that t do, is in
tests/common/secure_sums/test_secure_sums.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.attacks.policies import NONE, PERCEPTRONS
from tests.attacks.sums import TRAPS, Counted, any_cohorts, images, whole_groups
from tests.bench import attacks
from tests.bench.leakage_runs import Case, attacked
from tests.bench.leakage_scores import Found, strongest, tried

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


# Differences of sums


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted.of(SITES, rounds=SITES + 1)


def test_one_sum_of_all_sites_gives_nobody_s_label_counts(counted: Counted) -> None:
    assert counted.without_sums().recovered == SITES
    assert counted.by_sums([range(SITES)]).recovered == 0


def test_sums_whose_sites_differ_by_one_give_its_label_counts(counted: Counted) -> None:
    """So with `sum_group = 1`, for a server that asks the same again and chooses whom: SECURITY.md says it."""
    everyone = range(SITES)
    assert counted.by_sums(any_cohorts(SITES)).recovered == SITES
    assert counted.by_sums([everyone, range(1, SITES)]).recovered == 1


def test_whatever_sums_over_whole_groups_a_server_has_a_site_shows_as_its_group(counted: Counted) -> None:
    groups = [(0, 1, 2), (3, 4, 5)]
    cohorts = whole_groups(groups)
    assert len(cohorts) == 3
    assert counted.by_sums(cohorts).recovered == 0
    shares = counted.truth / counted.truth.sum(axis=1, keepdims=True)
    told = [counted.shares(one) for one in counted.disaggregated(cohorts)]
    for group in groups:
        for site in group:
            assert told[site] == pytest.approx(shares[list(group)].mean(axis=0), abs=1e-5)
            assert np.abs(told[site] - shares[site]).max() > 0.05


# A server that chooses the model


@pytest.mark.parametrize("trap", TRAPS)
def test_a_sum_of_three_sites_gives_images_to_a_server_that_chose_the_model(trap: str) -> None:
    """Fewer than their updates do, and not whose: secure sums are no rule against trap weights."""
    apart, summed = (images(NONE, TRAPS[trap], summed=which) for which in (False, True))
    assert 0 < summed.recovered < apart.recovered


def test_the_rules_of_sites_for_models_hold_under_secure_sums_as_without() -> None:
    assert images(PERCEPTRONS, TRAPS["sorted thresholds"], summed=True).silent
    for trap in ("a perceptron that hardly any image wakes", "units behind convolutions that hardly any wakes"):
        assert images(PERCEPTRONS, TRAPS[trap], summed=True).recovered == 0
