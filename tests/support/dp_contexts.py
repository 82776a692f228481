"""Noise for a fit by hand: what an agent makes of the site's secret."""

from __future__ import annotations

from dataclasses import replace

from protofed.client.training.context import FitContext
from protofed.client.training.dp import DpContext, DpNoise
from protofed.common.config.recipe import DpCost, DpPlan

VAST = DpCost(epochs=(1000,), class_releases=1000)


def with_noise(local: FitContext, plan: DpPlan, cost: DpCost = VAST, seed: bytes = b"seed") -> FitContext:
    """The context of a fit under this `[plan.dp]`."""
    dp = DpContext(plan, cost, DpNoise(seed))
    return replace(local, plan=local.plan.model_copy(update={"dp": plan}), dp=dp)
