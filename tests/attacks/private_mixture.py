"""Class shares from cwFedAVG with mixing on the sites: class heads that are unit vectors come back as the mixture."""

from __future__ import annotations

import numpy as np
from tests.attacks.hostile_server import always, as_payload, honest_model, recipe_like, sites_of, updates
from tests.attacks.outcome import Outcome
from tests.attacks.policies import limits_of
from tests.support.round_contexts import round_context

from protofed.common.payload import Part
from protofed.deploy import shipped
from protofed.server.methods.cwfedavg_private import CwFedAvgPrivateServer

LARGE = 1000.0
LIKENESS = 1e-3  # of shares: one step of training moves a bias by less than a unit in a thousand


NO_STEP: dict[str, object] = {"epochs": 1, "lr": 1e-30, "momentum": 0.0, "weight_decay": 0.0}


def without_a_step(policy: str) -> Outcome:
    """A learning rate of nothing: what comes back is where the site began."""
    batch = min(10**6, limits_of(policy, shipped.recipe("digits-cwfedavg-private")).batches[1])
    return _attacked(policy, {**NO_STEP, "batch_size": batch})


def honest_plan(policy: str) -> Outcome:
    """The plan of an honest study: the first of what comes back is where the site began."""
    return _attacked(policy, {})


def _attacked(policy: str, plan: dict[str, object]) -> Outcome:
    """Recovered: classes whose share at the site the uploaded bias holds, over all sites."""
    recipe = recipe_like("digits-cwfedavg-private", plan=plan)
    base = CwFedAvgPrivateServer().init(as_payload(honest_model(recipe)), round_context(recipe.classes))
    unit = LARGE * np.eye(recipe.classes, dtype=np.float32)
    base = {**base, Part.CLASS_MODELS: {**base[Part.CLASS_MODELS], "bias": unit}}
    found = of = answered = 0
    for data in sites_of(recipe):
        shares = np.bincount(data.train.labels.numpy(), minlength=recipe.classes) / len(data.train)
        sent = updates(policy, recipe, data, [always(base)])
        held = shares > 0
        of += int(held.sum())
        if sent:
            answered += 1
            found += int((np.abs(sent[0][Part.HEAD]["bias"] / LARGE - shares) < LIKENESS)[held].sum())
    return Outcome(found, of, silent=not answered)
