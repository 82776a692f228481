"""Sites that took no part in a run: what one round of training from its last model gives them (FedPRP, Table VII)."""

from __future__ import annotations

from dataclasses import replace

import structlog

from protofed.client.agent.computation import Computation, ScoredModel, fit, score
from protofed.client.site import DaemonStatus, Site, prepare, train_alone
from protofed.client.state.store import SiteState
from protofed.client.training.context import NoCheckpoints
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import PolicyViolationError, TaskFailedError
from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.messages import Assignment, Scores, Task, TaskKind
from protofed.deploy.simulation.simulation import Simulation
from protofed.server.method import joined, sent
from protofed.server.rounds.context import method_of

log = structlog.get_logger()


def held_out_scores(running: Simulation) -> dict[SiteId, Scores]:
    """By held-out site, the scores of its own model after one round of training from the last state of an ended run.

    The site trains as one that the last round invites for the first time, by that round's learning rate, and predicts
    with what the server would send it then, where that is its own model. The run gets nothing of it. A site whose
    policy refuses the run has no scores.
    """
    if not running.held_out:
        return {}
    recipe = running.run.recipe
    last = [row for row in running.ledger.rounds(recipe.name) if row.state is not None][-1]
    assert last.state is not None  # noqa: S101  (see above)
    state, scores = codec.decode(running.blobs.get(last.state)), dict[SiteId, Scores]()
    for site in running.held_out:
        try:
            scores[site.name] = _after_training(recipe, site, state, max(last.round, 1))
        except (TaskFailedError, PolicyViolationError) as refusal:
            log.warning("a held-out site cannot take part in the run", site=site.name, why=str(refusal))
    return scores


def _after_training(recipe: Recipe, site: Site, state: Payload, round: int) -> Scores:
    half, run = method_of(recipe), prepare(site, _assignment(recipe))
    base = codec.encode(sent(half, state, site.name))
    task = Task(TaskKind.FIT, recipe.name, round, f"held-out-{site.name}", codec.digest(base), len(base), 0.0)
    begun = Computation(site.name, run, task, SiteState(), site.policy.rules.min_images_per_unit)
    outcome = fit(begun, codec.decode(base), DaemonStatus(), NoCheckpoints(), train_alone)
    own = replace(begun, state=SiteState(round, outcome.memory, outcome.personal), scored=ScoredModel.OWN)
    then = codec.encode(sent(half, joined(half, state, outcome.update), site.name))
    return site.policy.release_scores(score(own, codec.decode(then), DaemonStatus()), noisy=run.noisy).scores


def _assignment(recipe: Recipe) -> Assignment:
    return Assignment(recipe.name, recipe.wire(), preprocessing_digest=recipe.preprocessing_digest())
