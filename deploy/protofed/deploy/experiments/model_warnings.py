"""What speaks against the models of a finished run, from its scores and losses alone: a result has no update."""

from __future__ import annotations

from protofed.common.protocol.score_names import LOSS
from protofed.deploy.experiments.experiment import Result
from protofed.server.rounds.scores.model_warnings import (
    ModelWarning,
    RunHistory,
    ScoredRound,
    TrainedRound,
    model_warnings,
)


def warnings_about(result: Result) -> list[ModelWarning]:
    """As `rounds.model_warnings` has them for a run that has ended."""
    recipe, numbers = result.recipe, sorted({*result.scores, *result.sums})
    by_round = [(number, result.scores.get(number, {})) for number in numbers]
    losses = {number: [one[LOSS] for one in sites.values() if LOSS in one] for number, sites in by_round}
    return model_warnings(
        RunHistory(
            recipe.classes,
            recipe.rounds,
            ended=True,
            global_model=False,  # its states are not in a result
            class_names=recipe.class_names,
            scored=[ScoredRound(number, sites, result.sums.get(number, {})) for number, sites in by_round],
            trained=[TrainedRound(number, None, losses=values) for number, values in losses.items()],
        )
    )
