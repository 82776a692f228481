"""Which classes a site has, from which prototypes it sends, or from which rows of its head stay where they were."""

from __future__ import annotations

import numpy as np
from tests.attacks.hostile_server import always, as_payload, honest_model, recipe_like, sites_of, updates
from tests.attacks.outcome import Outcome
from tests.attacks.policies import policy_of
from tests.bench.leakage_runs import Case, posed, rounds_of, seeded

from protofed.common.payload import Part


def rows_sent(policy: str) -> Outcome:
    """FedNH on the digits, one round; recovered: pairs of a site and a class it has, of which a row was sent."""
    recipe = seeded(Case("digits-fednh"), 0, 1)
    # Of a run that its sites decline, the first attempt has seen all that there is to see.
    recipe = recipe.model_copy(update={"federation": recipe.federation.model_copy(update={"max_attempts": 1})})
    running = posed(recipe, policy_of(policy, recipe))
    running.go()
    ((sent, _),) = rounds_of(running)
    held = {site: np.unique(data.train.labels.numpy()) for site, data in running.data.items()}
    running.ledger.close()
    shown = sum(str(c) in payload.get(Part.PROTOTYPES, {}) for site, payload in sent.items() for c in held[site])
    return Outcome(shown, sum(map(len, held.values())), silent=not sent)


def still_rows(policy: str) -> Outcome:
    """FedAvg by the balanced softmax, one round: no example pulls at the row of a class that the site lacks.

    Recovered: sites of which all classes are told, and none that they lack.
    """
    recipe = recipe_like("digits-fedavg", plan={"loss": "balanced-softmax", "weight_decay": 0.0})
    base = as_payload(honest_model(recipe))
    found = of = answered = 0
    for data in sites_of(recipe):
        sent = updates(policy, recipe, data, [always(base)])
        of += 1
        if not sent:
            continue
        answered += 1
        moved = np.linalg.norm(sent[0][Part.HEAD]["weight"] - base[Part.HEAD]["weight"], axis=1)  # [C]
        told = np.flatnonzero(moved > 1e-6 * moved.max())
        found += np.array_equal(told, np.unique(data.train.labels.numpy()))
    return Outcome(int(found), of, silent=not answered)
