"""Label counts from scores: an honest server keeps the updates, and PM(L) makes equations of them.

PM(L) = sum_c p_c correct_c / sum_c p_c T_c is linear in the site's shares p once the server has rebuilt the site's own
model and scored it on the shared test set. Some rounds of it are a system of equations whose solution is n_c / n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from tests.attacks.outcome import Outcome
from tests.attacks.policies import policy_of
from tests.bench.leakage_runs import Case, posed, rounds_of, seeded, sums_of

from protofed.client.models.catalogue import device_model
from protofed.client.models.split import load
from protofed.client.tasks.classification import Tally
from protofed.client.training.evaluation import predict
from protofed.common.payload import Part
from protofed.deploy.simulation.simulation import EVALUATOR, load_data

MAX_EXAMPLES = 3000  # of a site, as the attacker supposes
SCORE = "personal.pm_l"
Floats = NDArray[np.float64]


def attack(policy: str, rounds: int = 20, seed: int = 0, *, secure: bool = False) -> Outcome:
    """FedAvg on the digits; recovered: sites whose exact label counts the server computes.

    With secure aggregation the nearest to a site's model is the mean of all, and no score is one site's.
    """
    recipe = seeded(Case("digits-fedavg", secure=secure), seed, rounds)
    every_round = recipe.federation.model_copy(update={"score_every": 1})
    recipe = recipe.model_copy(update={"federation": every_round})
    running = posed(recipe, policy_of(policy, recipe))
    running.go()
    test = load_data(recipe)[EVALUATOR]
    model = device_model(recipe, torch.device("cpu"), frozenset())
    equations: dict[str, list[Floats]] = {site: [] for site in running.data}
    reported = running.ledger.scores(recipe.name)
    for number, (sent, _) in enumerate(sums_of(running) if secure else rounds_of(running), start=1):
        for site, payload in sent.items():
            if SCORE not in reported.get(number, {}).get(site, {}):
                continue
            load(model.body, payload[Part.BODY])
            load(model.head, payload[Part.HEAD])
            predicted = predict(model, test)
            found = Tally.of(predicted.outputs, predicted.targets, test.classes)
            pm_l = reported[number][site][SCORE]
            equations[site].append(found.correct.double().numpy() - pm_l * found.totals.double().numpy())
    truth = {site: np.bincount(data.train.labels, minlength=recipe.classes) for site, data in running.data.items()}
    running.ledger.close()
    exact = [site for site, rows in equations.items() if _same(_counts(rows), truth[site])]
    return Outcome(len(exact), len(truth), silent=not any(equations.values()))


def _counts(equations: Sequence[Floats]) -> Floats | None:
    """The smallest whole numbers whose shares solve the equations [R, C] w = 0, sum w = 1, w >= 0."""
    if not equations:
        return None
    rows = np.stack(equations)
    matrix = np.vstack([rows / np.abs(rows).max(), 1e3 * np.ones(rows.shape[1])])
    shares, _ = nnls(matrix, np.append(np.zeros(len(rows)), 1e3))
    for n in range(1, MAX_EXAMPLES):
        whole = np.round(n * shares)
        if whole.sum() == n and np.abs(n * shares - whole).max() < 0.02:
            return np.asarray(whole)
    return None


def _same(counts: Floats | None, truth: NDArray[np.int64]) -> bool:
    """Whether the counts are the true ones, or these divided by a common factor."""
    return counts is not None and np.array_equal(counts * truth.sum(), truth * counts.sum())
