"""How many examples a site has, from how many steps it trained: what parts `steps` and `control` tell besides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.bench.attack_views import Seen
from tests.bench.leakage_scores import Victim

from protofed.client.training.progress import sgd_length
from protofed.common.config.recipe import Plan
from protofed.common.payload import Part, weights

MOST = 500  # steps that are tried


def steps_told(seen: Seen, plan: Plan, lr: float) -> int | None:
    """J of one fit; None: nothing that was sent tells it.

    FedNova sends the length of J steps, which grows with J. SCAFFOLD's model has moved by this length, in learning
    rates, times what is sent beside it.
    """
    if Part.STEPS in seen.sent:
        return _steps_of(float(seen.sent[Part.STEPS]["steps"]), plan)
    if Part.CONTROL not in seen.sent:
        return None
    before, after, control = weights(seen.received), weights(seen.sent), seen.sent[Part.CONTROL]
    moved = np.concatenate([(before[path] - after[path]).ravel() for path in sorted(control)]).astype(np.float64)
    by = np.concatenate([control[path].ravel() for path in sorted(control)]).astype(np.float64)
    return _steps_of(float(moved @ by / (by @ by)) / lr, plan)


def _steps_of(length: float, plan: Plan) -> int:
    """The number of steps whose length is nearest."""
    lengths = [abs(sgd_length(steps, plan.momentum) - length) for steps in range(1, MOST)]
    return 1 + int(np.argmin(lengths))


def told_to_a_batch(victims: Sequence[Victim], plan: Plan) -> tuple[int, int] | None:
    """Of how many sites, of all, the number of examples is known to within a batch; None: nothing tells it."""
    told = [(steps_told(victim.seen[0], plan, plan.lr), int(victim.counts.sum())) for victim in victims]
    known = [(steps, examples) for steps, examples in told if steps is not None]
    # An epoch has as many steps as batches, the last one of which may have a single example.
    right = [(batches - 1) * plan.batch_size < n <= batches * plan.batch_size for batches, n in _batches(known, plan)]
    return (sum(right), len(told)) if known else None


def _batches(known: Sequence[tuple[int, int]], plan: Plan) -> list[tuple[int, int]]:
    return [(round(steps / plan.epochs), examples) for steps, examples in known]
