"""Which classes a site has, from which prototypes it sends: no attack is needed, the rows say it."""

from __future__ import annotations

import numpy as np
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
