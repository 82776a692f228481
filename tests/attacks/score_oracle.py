"""Label counts from SCORE tasks: a model that always says one class scores that class's share of the test set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.attacks.hostile_server import as_payload, facing, honest_model, recipe_like, sites_of
from tests.attacks.outcome import Outcome

from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import TaskKind

BIAS = 8.0  # norms of the head; ten are refused


def attack(policy: str) -> Outcome:
    """Recovered: classes whose share of the site's own test set the server reads off, over all sites."""
    recipe = recipe_like("digits-fedavg")
    honest = as_payload(honest_model(recipe))
    found = of = answered = 0
    for data in sites_of(recipe):
        data = replace(data, local_test=data.train)
        held = np.bincount(data.train.labels.numpy(), minlength=recipe.classes) / len(data.train)
        harness = facing(policy, recipe, data)
        agent = harness.agent()
        harness.offer(TaskKind.FIT, 1, honest)
        agent.step(0.0)
        of += recipe.classes
        for c in range(recipe.classes):
            harness.offer(TaskKind.SCORE, c + 1, says(honest, c))  # a round is scored once
            before = len(harness.link.scores)
            agent.step(0.0)
            for scores in harness.link.scores[before:]:
                answered += bool(scores)
                told = [value for name, value in scores.items() if name == "global.local.accuracy"]
                found += any(abs(value - held[c]) < 1e-6 for value in told)
    return Outcome(found, of, silent=not answered)


def says(model: Payload, c: int) -> Payload:
    """The model with a bias that says class `c` of nearly all, as large as the checks of a base let it be."""
    head = {name: np.array(tensor) for name, tensor in model[Part.HEAD].items()}
    head["bias"][c] += BIAS * float(np.linalg.norm(head["weight"]))
    return {**model, Part.HEAD: head}
