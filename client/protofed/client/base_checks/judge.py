"""The door: decides on every model that the server sends, by the measures of `statistics` and `responses`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import structlog

from protofed.client.base_checks.responses import IMAGES, Responses, response_problem, responses
from protofed.client.base_checks.statistics import (
    SLACK_OF_HEADS,
    BaseProblem,
    BaseStatistics,
    change_problem,
    finite_problem,
    first_problem,
    statistics,
    structure_problem,
)
from protofed.client.models.catalogue import first_model
from protofed.client.models.split import choose_start, class_models, led_by_controls, load, site_models
from protofed.client.policy.policy import PolicyRefusedError
from protofed.client.policy.run_limits import step_sum
from protofed.client.site import PreparedRun, Site, is_aggregated
from protofed.client.training.progress import sgd_length
from protofed.common.payload import Exchange, Part, Payload
from protofed.common.protocol.messages import Task, TaskKind

log = structlog.get_logger()
# Rounds that a site missed widen the bound, so that it finds its way back; not further: the server names the rounds.
MAX_MISSED = 3
WHAT_TO_DO = (
    "Nothing was trained. Compare the digest with another site's audit log, and ask the coordinator what was sent. "
    "In the policy, limits.max_base_change and limits.check_base say what this site accepts"
)


class BaseJudge:
    """Remembers, durably, the last base that the site accepted of each run; a base is checked once.

    `judge` decides by what the server sent and the policy says, never by the site's data. Otherwise a server could try
    one base after the other, and learn about the data from what is declined. `judge_by_images` is for what the images
    decide.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._accepted: tuple[str, str | None, bool] | None = None  # run, digest, whether as the model of round 1
        # Run, digest and round of the newest base that the images were asked about, and what they found.
        self._answered: tuple[tuple[str, str | None, int], BaseProblem | None] | None = None
        # Of the model that this site builds, by the recipe's digest.
        self._built: tuple[str, BaseStatistics] | None = None
        self._built_responses: tuple[str, Responses] | None = None

    def judge(self, run: PreparedRun, task: Task, base: Payload) -> None:
        """Accept the base of a FIT, REFINE or SCORE task, or refuse it.

        Each class model is checked: a mixture keeps what all of them keep. Each model of another site is checked: a fit
        may start from it, or use it in its loss. Control variates are for methods that send some, class models for
        those that mix them.

        Raises:
            PolicyRefusedError: naming the check, the layer and the base's digest.
            CodecError: it has models by class or of sites that are none.
            StateError: the last base cannot be read, or this one cannot be stored.
        """
        if Part.CONTROL in base and Part.CONTROL not in run.method.sends:
            text = f"the model of round {task.round} has control variates, and {run.recipe.method.name} uses none"
            raise PolicyRefusedError("limits.check_base", text, part=Part.CONTROL)
        if Part.CLASS_MODELS in base and not run.method.declares.mixes_classes:
            text = f"the model of round {task.round} has class models, and {run.recipe.method.name} mixes none"
            raise PolicyRefusedError("limits.check_base", text, part=Part.CLASS_MODELS)
        if Part.SITE_MODELS in base and Exchange.RECEIVE not in self._site.policy.rules.exchange:
            text = (
                f"the model of round {task.round} has models of other sites, and the policy has no "
                f"'{Exchange.RECEIVE}' in exchange"
            )
            raise PolicyRefusedError("exchange", text, part=Part.SITE_MODELS)
        if not self._site.policy.rules.limits.check_base:
            return
        version = base_version(task)
        key = (task.run, task.base_digest, version == 0)
        if key == self._accepted:
            return
        base = {part: tensors for part, tensors in base.items() if part is not Part.CONTROL}
        if (problem := next(filter(None, self._problems(run, task, base, version)), None)) is not None:
            raise base_refusal(task, problem)
        stored: Payload = {part: tensors for part, tensors in base.items() if part is not Part.SITE_MODELS}
        self._site.store.keep_base(task.run, version, stored)
        self._accepted = key
        log.info("model accepted", run=task.run, round=task.round, digest=task.base_digest)

    def judge_by_images(self, run: PreparedRun, task: Task, base: Payload) -> BaseProblem | None:
        """What of an accepted base the site's own images find: how units answer to them, where controls lead a fit.

        Under secure aggregation the problem is returned, and nobody else must learn whose it is. Images are not asked
        where nothing of them leaves but an answer to this, nor with noise (`plan.dp`), which stands for them.

        Args:
            task: FIT or REFINE.

        Raises:
            PolicyRefusedError: in a run without secure aggregation, whose updates tell the server more than this.
            CodecError: control variates are none.
        """
        if not self._site.policy.rules.limits.check_base or run.recipe.plan.dp is not None or not run.method.sends:
            return None
        question = task.run, task.base_digest, base_version(task)
        if self._answered is None or self._answered[0] != question:
            self._answered = question, self._images_problem(run, base, question[2])
        problem = self._answered[1]
        if problem is not None and not (is_aggregated(self._site, run.recipe) and task.kind is TaskKind.FIT):
            raise base_refusal(task, problem)
        return problem

    def _images_problem(self, run: PreparedRun, base: Payload, version: int) -> BaseProblem | None:
        start = choose_start(base, run.data.label_frequencies)
        models = [start, *site_models(base)]
        if Part.CONTROL in base:
            led, problem = self._led(run, base, version)
            if problem is not None:
                return replace(problem, text=f"moved by the control variates of one fit, {problem.text}")
            models.append(led)
        return next(filter(None, (self._response(run, model, version) for model in models)), None)

    def _problems(self, run: PreparedRun, task: Task, base: Payload, version: int) -> Iterator[BaseProblem | None]:
        """Of all models in a base; nothing is computed before it is asked for."""
        # Of round 1 the model that this site builds itself is compared, of later ones the last that it accepted.
        built = None if version else first_model(run.recipe, self._site.policy.rules.plugins)
        last = self._site.store.last_base(task.run) if version else None
        yield self._problem(run, base, built) or self._change(base, last, version)
        yield from self._class_problems(run, base, built, last, version)
        yield from (structure_problem(model, self._statistics(run, None)) for model in site_models(base))

    def _class_problems(
        self, run: PreparedRun, base: Payload, built: Payload | None, last: tuple[int, Payload] | None, version: int
    ) -> Iterator[BaseProblem | None]:
        """Of each class model; where the last base had class models, also how far it has moved. One is in memory."""
        classes = run.recipe.classes
        before = iter(()) if last is None else class_models(last[1], classes)
        for c, model in enumerate(class_models(base, classes)):
            known = None if last is None or (earlier := next(before, None)) is None else (last[0], earlier)
            problem = self._problem(run, model, built) or self._change(model, known, version, SLACK_OF_HEADS)
            yield problem and replace(problem, text=f"{problem.text}, in the model of class {c}")

    def _problem(self, run: PreparedRun, base: Payload, built: Payload | None) -> BaseProblem | None:
        """Of one model by itself.

        Args:
            built: that of round 1, as the site builds it; None: it is of a later one.
        """
        if (problem := finite_problem(base)) is not None:
            return problem
        if built is not None and (problem := first_problem(base, built, run.recipe.method.options)) is not None:
            return problem
        return structure_problem(base, self._statistics(run, built))

    def _led(self, run: PreparedRun, base: Payload, version: int) -> tuple[Payload, BaseProblem | None]:
        """The model to which all corrections of a fit would lead, and what is wrong with it but for its answers.

        The number of steps is the site's own. Before the first round there are no corrections.
        """
        plan, steps, rate = run.recipe.plan, _steps(run), _rate(run, version)
        led = led_by_controls(base, rate * sgd_length(steps, plan.momentum if plan.optimizer == "sgd" else 0.0))
        most = self._site.policy.rules.limits.max_base_change if version else 0.0
        problem = finite_problem(led) or change_problem(led, base, most)
        return led, problem or structure_problem(led, self._statistics(run, None))

    def _change(
        self, base: Payload, last: tuple[int, Payload] | None, version: int, slack: float = 1.0
    ) -> BaseProblem | None:
        if last is None:  # the site joins later: only what the built model tells
            return None
        rounds = min(max(1, abs(version - last[0])), MAX_MISSED)
        return change_problem(base, last[1], self._site.policy.rules.limits.max_base_change * rounds * slack)

    def _response(self, run: PreparedRun, base: Payload, version: int) -> BaseProblem | None:
        """What is loaded into the run's model here is replaced by the method's `load_global`."""
        if Part.BODY not in base:
            return None
        if self._built_responses is None or self._built_responses[0] != run.recipe.fingerprint():
            built = first_model(run.recipe, self._site.policy.rules.plugins)
            self._built_responses = run.recipe.fingerprint(), self._responses(run, built)
        rates = step_sum(run.recipe.plan, _steps(run), _rate(run, version))
        return response_problem(self._responses(run, base), self._built_responses[1], rates)

    def _responses(self, run: PreparedRun, model: Payload) -> Responses:
        load(run.model.body, model[Part.BODY])
        strata = run.data.task.strata
        sample = run.data.train.sample(IMAGES, 0, strata)  # not the first, which may all be of one class
        return responses(run.model, run.data.ordered(sample, min(run.recipe.plan.batch_size, IMAGES)), strata)

    def _statistics(self, run: PreparedRun, built: Payload | None) -> BaseStatistics:
        """Of the built model; the model itself is not kept in memory."""
        recipe = run.recipe.fingerprint()
        if self._built is None or self._built[0] != recipe:
            self._built = recipe, statistics(built or first_model(run.recipe, self._site.policy.rules.plugins))
        return self._built[1]


def _steps(run: PreparedRun) -> int:
    """Of a fit; 0 of an evaluator, which fits nothing."""
    return run.recipe.plan.epochs * math.ceil(len(run.data.train) / run.recipe.plan.batch_size)


def _rate(run: PreparedRun, version: int) -> float:
    return run.recipe.plan.learning_rate(min(version + 1, run.recipe.rounds), run.recipe.rounds)


def base_version(task: Task) -> int:
    """The round that published the task's base, or aggregated it; 0: the first model."""
    return task.round - 1 if task.kind is TaskKind.FIT else task.round


def base_refusal(task: Task, problem: BaseProblem) -> PolicyRefusedError:
    """A problem as what the policy refuses, in words for the site's people."""
    text = f"the model of round {task.round} (digest {task.base_digest}) is refused by check '{problem.check}': "
    return PolicyRefusedError("limits.check_base", f"{text}{problem.layer} {problem.text}. {WHAT_TO_DO}", problem.layer)
