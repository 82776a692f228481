"""Checks every model that the server sends before the site trains or scores with it; `privacy.base_checks` decides."""

from __future__ import annotations

import structlog

from protofed.client.agent.base_response import IMAGES, Response, response_problem, responses
from protofed.client.agent.first_model import first_model
from protofed.client.agent.site import PreparedRun, Site
from protofed.client.models.mixture import site_models, start_of
from protofed.client.models.split import load
from protofed.client.privacy.base_checks import (
    BaseProblem,
    BaseStatistics,
    change_problem,
    finite_problem,
    first_problem,
    statistics,
    structure_problem,
)
from protofed.client.privacy.policy import PolicyRefusedError
from protofed.common.payload import Exchange, Part, Payload
from protofed.common.protocol.messages import Task, TaskKind

log = structlog.get_logger()
# Rounds that a site missed widen the bound, so that it finds its way back; not further: the server names the rounds.
MOST_MISSED = 3
WHAT_TO_DO = (
    "nothing was trained. Compare the digest with another site's audit log, and ask the coordinator what was sent; "
    "limits.max_base_change and limits.check_base of the policy say what this site accepts"
)


class BaseGuard:
    """Remembers, durably, the last base that the site accepted of each run; a base is checked once."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._accepted: tuple[str, str | None, bool] | None = None  # run, digest, whether as the model of round 1
        # Of the model that this site builds, by the recipe's digest.
        self._built: tuple[str, BaseStatistics] | None = None
        self._built_responses: tuple[str, dict[str, Response]] | None = None

    def check(self, run: PreparedRun, task: Task, base: Payload) -> None:
        """Accept the base of a FIT, REFINE or SCORE task, or refuse it.

        Of class models also what this site makes of them; of models of other sites each, for a fit may start from one
        or have it in its loss.

        Raises:
            PolicyRefusedError: naming the check, the layer and the base's digest.
            CodecError: it has models by class or of sites that are none.
            StateError: the last base cannot be read, or this one cannot be stored.
        """
        if Part.SITE_MODELS in base and Exchange.RECEIVE not in self._site.policy.rules.exchange:
            text = f"the model of round {task.round} has models of other sites: no '{Exchange.RECEIVE}' in exchange"
            raise PolicyRefusedError("exchange", text, part=Part.SITE_MODELS)
        if not self._site.policy.rules.limits.check_base:
            return
        version = version_of(task)
        key = (task.run, task.base_digest, version == 0)
        if key == self._accepted:
            return
        start = start_of(base, run.data.label_frequencies())
        for model in (base,) if start is base else (base, start):
            if (problem := self._problem(run, task, model, version)) is not None:
                raise _refusal(task, problem)
        for model in site_models(base):
            if (problem := self._model_problem(run, model)) is not None:
                raise _refusal(task, problem)
        kept: Payload = {part: tensors for part, tensors in start.items() if part is not Part.SITE_MODELS}
        self._site.store.keep_base(task.run, version, kept)
        self._accepted = key
        log.info("model accepted", run=task.run, round=task.round, digest=task.base_digest)

    def _problem(self, run: PreparedRun, task: Task, base: Payload, version: int) -> BaseProblem | None:
        if (problem := finite_problem(base)) is not None:
            return problem
        built = first_model(run.recipe, self._site.policy.rules.plugins) if version == 0 else None
        if built is not None and (problem := first_problem(base, built, run.recipe.method.options)) is not None:
            return problem
        if (problem := structure_problem(base, self._statistics(run, built))) is not None:
            return problem
        return self._change(task, base, version) or self._response(run, base)

    def _model_problem(self, run: PreparedRun, model: Payload) -> BaseProblem | None:
        """Of one of several models, which no round before this one need have had: its structure and its answers."""
        return structure_problem(model, self._statistics(run, None)) or self._response(run, model)

    def _change(self, task: Task, base: Payload, version: int) -> BaseProblem | None:
        last = self._site.store.last_base(task.run) if version else None
        if last is None:  # the site joins later: only what the built model tells
            return None
        rounds = min(max(1, abs(version - last[0])), MOST_MISSED)
        return change_problem(base, last[1], self._site.policy.rules.limits.max_base_change * rounds)

    def _response(self, run: PreparedRun, base: Payload) -> BaseProblem | None:
        """What is loaded into the run's model here is replaced by the method's `install`."""
        if Part.BODY not in base:
            return None
        if self._built_responses is None or self._built_responses[0] != run.recipe.fingerprint():
            built = first_model(run.recipe, self._site.policy.rules.plugins)
            self._built_responses = run.recipe.fingerprint(), self._responses(run, built)
        return response_problem(self._responses(run, base), self._built_responses[1])

    def _responses(self, run: PreparedRun, model: Payload) -> dict[str, Response]:
        load(run.model.body, model[Part.BODY])
        batches = run.data.ordered(run.data.train, min(run.recipe.plan.batch_size, IMAGES))
        return responses(run.model, (images for images, _ in batches))

    def _statistics(self, run: PreparedRun, built: Payload | None) -> BaseStatistics:
        """Of the built model; the model itself is not kept in memory."""
        recipe = run.recipe.fingerprint()
        if self._built is None or self._built[0] != recipe:
            self._built = recipe, statistics(built or first_model(run.recipe, self._site.policy.rules.plugins))
        return self._built[1]


def version_of(task: Task) -> int:
    """The round that published the task's base, or aggregated it; 0: the first model."""
    return task.round - 1 if task.kind is TaskKind.FIT else task.round


def _refusal(task: Task, problem: BaseProblem) -> PolicyRefusedError:
    text = f"the model of round {task.round} (digest {task.base_digest}) is refused by check '{problem.check}': "
    return PolicyRefusedError("limits.check_base", f"{text}{problem.layer} {problem.text}; {WHAT_TO_DO}", problem.layer)
