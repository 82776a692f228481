"""What models of a regression tell of the mean number of each site: a table of `make leakage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from tests.attacks.hostile_server import REGRESSION
from tests.bench.attack_views import Scores, Seen, head
from tests.bench.leakage_runs import Case, posed, seeded, sites_seen
from tests.bench.leakage_scores import ROUNDS, correlation

from protofed.common.payload import Part
from protofed.deploy.simulation.simulation import everything

CASE = Case("digits-fedavg", task=REGRESSION)
COLUMNS = ("policy", "attack", "rounds", "correlation between sites")


def rows(seeds: Sequence[int], rounds: int) -> list[list[str]]:
    """By attack, the correlation of what it says with the sites' means, less the mean over the sites of a run."""
    made = []
    for case in (CASE, replace(CASE, secure=True)):
        runs = [_run(case, seed, rounds) for seed in seeds]
        truth = np.concatenate([means - means.mean() for _, means in runs])
        for name, attack in ATTACKS.items():
            for words, which in ROUNDS.items():
                said = [np.array([np.mean([attack(one) for one in site[which]]) for site in seen]) for seen, _ in runs]
                between = np.concatenate([each - each.mean() for each in said])
                made.append([case.said, name, words, f"{abs(correlation(between, truth)):.2f}"])
    return made


def _run(case: Case, seed: int, rounds: int) -> tuple[list[list[Seen]], Scores]:
    """What the server saw of each site, and each site's mean number."""
    recipe = seeded(case, seed, rounds)
    running = posed(recipe, everything(recipe))
    running.go()
    seen = sites_seen(running)
    means = np.array([float(data.train.labels.mean()) for data in running.data.values()])
    running.ledger.close()
    return [seen[site] for site in running.data], means


def _bias(seen: Seen) -> float:
    """How far the head's bias went up."""
    return float(seen.sent[Part.HEAD]["bias"][0] - seen.received[Part.HEAD]["bias"][0])


def _said(seen: Seen, features: Scores) -> float:
    """What the sent model says on average."""
    weight = head(seen.sent)
    assert weight is not None
    return float(np.mean(features @ weight.T) + seen.sent[Part.HEAD]["bias"][0])


ATTACKS: Mapping[str, Callable[[Seen], float]] = {
    "head gradient": _bias,
    "mean over noise": lambda seen: _said(seen, seen.noise_after),
    "mean over public images": lambda seen: _said(seen, seen.after),
}
