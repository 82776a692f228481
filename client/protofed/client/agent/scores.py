"""The tasks that ask for scores of a round: of the site's own model as a trainer, of the global one as an evaluator.

What of a site's own scores a server may have that chose the model: no answer tells how many images have which label.
A model that always says one class has that class's share of right answers. A good model that is kept from naming a
class loses the same share. So the first is not answered; and what is answered is of a half of the test set that only
this site knows, the same in all rounds and runs: whatever models a server tries, it can count no more than that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from protofed.client.agent.computation import Computation, RemoteExecutor, ScoredModel, predictions, score
from protofed.client.agent.task_tools import BaseModelCache, TaskTools
from protofed.client.data.examples import stratified_sample
from protofed.client.data.site_data import SiteData
from protofed.client.policy.rules import is_own
from protofed.client.secure_aggregation.steps import SumSteps
from protofed.client.site import DaemonStatus, PreparedRun, Site, is_aggregated
from protofed.client.state.store import SiteState
from protofed.client.task import Predictions
from protofed.client.training.evaluation import PERSONAL, compute_scores
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Activity, Role, Scores, Task, TaskKind, score_family
from protofed.common.protocol.scores import LOSS
from protofed.common.secure_aggregation import score_sums

log = structlog.get_logger()
# A test set with fewer images, or one that the task says cannot be asked, has no score in a sum: honest models would
# often be constant there, and one site's random numbers take the score of all. That is known before any model is.
MIN_IMAGES = 20


class PlainScores:
    """A SCORE task: the scores that the site's policy releases, one by one."""

    def __init__(self, tools: TaskTools, scorer: Scorer, own_scores: OwnScoreKeeper) -> None:
        self._tools, self._scorer, self._own_scores = tools, scorer, own_scores

    def work(self, run: PreparedRun, task: Task) -> None:
        """Take the scores, and report them."""
        answers = _take_scores(self._tools, self._scorer, run, task)
        # A policy that releases none keeps them from the server, not from the site.
        self._own_scores.keep(task, answers.scores)
        self._tools.link.report(task, self._tools.site.policy.release_scores(answers.direct, noisy=run.noisy))


class SecureScores:
    """A SCORE_SUM task: the scores leave in a sum alone, in the steps of `SumSteps`."""

    def __init__(self, tools: TaskTools, scorer: Scorer, own_scores: OwnScoreKeeper, sums: SumSteps) -> None:
        self._tools, self._scorer, self._own_scores, self._sums = tools, scorer, own_scores, sums

    def work(self, run: PreparedRun, task: Task) -> None:
        """Take the scores, and push the keys for their sum; taken once, whatever happens to the daemon."""
        tools = self._tools
        if (released := tools.passed(task, lambda: self._sums.scored(run, task))) is None:
            answers = _take_scores(tools, self._scorer, run, task)
            self._own_scores.keep(task, answers.scores)
            aggregated = {**self._own_scores.trained(task), **answers.aggregated, **_random_numbers(answers.withheld)}
            released = tools.passed(task, lambda: self._sums.begin_scores(run, task, aggregated))
        tools.check_taken(tools.push(task, released))


def _random_numbers(withheld: Collection[str]) -> Scores:
    """In place of scores that are withheld: by them nobody can read the others' either.

    If they were left out, the server would see that this site has no answer. If two of three sites withheld an answer,
    the server could read the third site's.
    """
    return {name: score_sums.random_number() for name in withheld}


def _take_scores(tools: TaskTools, scorer: Scorer, run: PreparedRun, task: Task) -> Answers:
    """The scores of a task; a site gives those of a round once.

    Raises:
        PolicyRefusedError: it gave them before, or the policy allows no more tasks today.
    """
    tools.begin(task)
    tools.passed(task, lambda: tools.guard.check_score(task, scorer.roles(run, task)))
    return scorer.answers(run, task)


class Scorer:
    """Computes a site's scores; those of its own model once for each model."""

    def __init__(self, site: Site, status: DaemonStatus, bases: BaseModelCache, remote: RemoteExecutor) -> None:
        self._site, self._status, self._bases, self._remote = site, status, bases, remote
        self._personal: tuple[_OwnModel, Answers] | None = None

    def clear(self) -> None:
        """Forget the personal model's scores; called when a fit was settled."""
        self._personal = None

    def roles(self, run: PreparedRun, task: Task) -> frozenset[Role]:
        """Whose scores a task is for: under secure aggregation a trainer's are taken for a sum alone."""
        roles = frozenset(self._site.roles)
        if not is_aggregated(self._site, run.recipe):
            return roles
        return roles & {Role.TRAINER} if task.kind is TaskKind.SCORE_SUM else roles - {Role.TRAINER}

    def answers(self, run: PreparedRun, task: Task) -> Answers:
        """All scores that these roles give, by name; the policy still decides which of them leave."""
        answers = Answers({}, {}, {})
        for work in self._works(run, task):
            answers |= self._own(work) if work.scored is ScoredModel.OWN else self._computed(work)
        stay = (
            answers.withheld if is_aggregated(self._site, run.recipe) else answers.scores.keys() - answers.direct.keys()
        )
        if stay:
            log.info(
                "the scores are not sent: their model says nearly the same of all images, or the site's update is "
                "not sent",
                run=task.run,
                round=task.round,
                scores=sorted(name for name in stay if score_family(name) == name),
            )
        return answers

    def prefetch(self, run: PreparedRun, task: Task) -> list[Computation]:
        """What `answers` would compute now."""
        works = self._works(run, task)
        return [work for work in works if work.scored is not ScoredModel.OWN or self._known(work) is None]

    def _works(self, run: PreparedRun, task: Task) -> list[Computation]:
        """Scores of the site's own model, of the global model on its own test set, and on the shared one."""
        works: list[Computation] = []
        state, roles = self._site.store.last_counted(task.run, task.round + 1), self.roles(run, task)
        if Role.TRAINER in roles:
            if run.method.declares.personal == "loaded" or state.personal is not None:
                works.append(Computation(self._site.name, run, task, state, scored=ScoredModel.OWN))
            if run.method.declares.global_model and run.data.local_test is not None:
                works.append(Computation(self._site.name, run, task, SiteState(), scored=ScoredModel.GLOBAL_LOCALLY))
        # With noise a site's own images are trained on, and hidden, or held out of it: then their scores stay.
        if Role.EVALUATOR in roles and not run.data.own_test and not self._scores_own_images(run):
            works.append(Computation(self._site.name, run, task, SiteState(), scored=ScoredModel.GLOBAL))
        return works

    def _scores_own_images(self, run: PreparedRun) -> bool:
        """Whether an evaluator's scores would be of the images of a site that trains: its recalls tell their counts."""
        own = Role.TRAINER in self._site.roles and not len(run.data.test)
        return own and is_aggregated(self._site, run.recipe)

    def _own(self, work: Computation) -> Answers:
        if (known := self._known(work)) is None:
            known = self._computed(work)
            self._personal = _OwnModel.of(work), known
        return known

    def _known(self, work: Computation) -> Answers | None:
        return self._personal[1] if self._personal is not None and self._personal[0] == _OwnModel.of(work) else None

    def _computed(self, work: Computation) -> Answers:
        base = self._bases.get(work.run, work.task)
        self._status.activity = Activity.SCORING
        # All may know an evaluator's test set, and a simulation's scores stay in its process.
        if self._site.simulated or work.scored is ScoredModel.GLOBAL:
            scores = self._remote.score(work) or score(work, base, self._status)
            return Answers(scores, scores, scores)
        predicted, run = predictions(work, base, self._status), work.run
        return answered(predicted, run.data, run.recipe, self._site.store.secret(), withheld=work.state.withheld)


class _OwnModel(NamedTuple):
    """Which model a site's own scores are of."""

    run: str
    round: int
    base: Digest | None  # a "loaded" model is made from the base, so another base makes another model

    @classmethod
    def of(cls, work: Computation) -> _OwnModel:
        loaded = work.run.method.declares.personal == "loaded"
        return cls(work.task.run, work.state.round, work.task.base_digest if loaded else None)


class OwnScoreKeeper:
    """Shows the site its own scores, whatever its policy lets leave: in its metrics, its log and its state folder."""

    def __init__(self, site: Site, status: DaemonStatus) -> None:
        self._site, self._status = site, status
        self._losses: tuple[str, int, Scores] | None = None  # of the newest training: run, round and what it reported

    def trained(self, task: Task) -> Scores:
        """What the training of a task's round reported; nothing if no update of the site counted in it."""
        if self._site.store.newest_counted(task.run) != task.round:
            return {}
        if self._losses is not None and self._losses[:2] == (task.run, task.round):
            return self._losses[2]
        if (stored := self._site.store.own_scores) is None or task.run not in stored.runs():
            return {}
        of_round = next((scored.scores for scored in stored.rounds(task.run) if scored.round == task.round), {})
        return {name: value for name, value in of_round.items() if name == LOSS}

    def take_up(self, run: str) -> None:
        """Show what was kept of a run, in place of another run's."""
        stored = self._site.store.own_scores
        try:
            self._status.own_scores = {} if stored is None else _families(stored.latest(run))
        except StateError as error:
            self._status.own_scores = {}
            log.warning("the site's own scores cannot be read", run=run, why=str(error))

    def keep(self, task: Task, scores: Scores) -> None:
        """Keep those of a task's scores that are the site's own. A disk that takes none is only logged."""
        own = {name: value for name, value in scores.items() if is_own(name)}
        if task.kind is TaskKind.FIT:
            self._losses = task.run, task.round, own
        if not own:
            return
        families = _families(own)
        self._status.own_scores = {**self._status.own_scores, **families}
        if (stored := self._site.store.own_scores) is None:
            return  # a simulation without a state folder: hundreds of sites would share one log
        rounded = {name: round(value, 4) for name, value in families.items()}
        log.info("own scores", run=task.run, round=task.round, scores=rounded)
        try:
            stored.record(task.run, task.round, own)
        except StateError as error:
            log.warning("the site's own scores could not be written", run=task.run, why=str(error))


def _families(scores: Scores) -> dict[str, float]:
    """Without the scores of single classes; there may be thousands."""
    return {name: value for name, value in scores.items() if score_family(name) == name}


@dataclass(frozen=True)
class Answers:
    """Scores by name.

    Attributes:
        scores: for the site itself, on all images that it has for them.
        direct: the same, for a server that gets no sum; the site's policy still decides which of them leave.
        aggregated: for a sum, on the secret half, likewise.
        withheld: those of `aggregated` in whose place random numbers leave.
    """

    scores: Scores
    direct: Scores
    aggregated: Scores
    withheld: frozenset[str] = frozenset()

    def __or__(self, other: Answers) -> Answers:
        """Of both."""
        scores, direct = {**self.scores, **other.scores}, {**self.direct, **other.direct}
        return Answers(scores, direct, {**self.aggregated, **other.aggregated}, self.withheld | other.withheld)


def answered(
    predictions: Mapping[str, Predictions], data: SiteData, recipe: Recipe, secret: bytes, *, withheld: bool
) -> Answers:
    """What the predictions of one model on the site's test sets give, by the prefix of their scores.

    Args:
        withheld: nothing that this model has learnt leaves.
    """
    halves = {
        prefix: predicted.of_some(_half(prefix, len(predicted.targets), data, recipe, secret))
        for prefix, predicted in predictions.items()
        if _is_asked(prefix, predicted, data)
    }
    scores, aggregated = (compute_scores(some, data, recipe) for some in (predictions, halves))
    # In a sum by the half alone: that a site withholds is an answer, too.
    in_sums, outside = (withheld or _tells(some, data) for some in (halves, predictions))
    return Answers(scores, {} if outside else scores, aggregated, frozenset(aggregated if in_sums else ()))


def _tells(predictions: Mapping[str, Predictions], data: SiteData) -> bool:
    return any(data.task.is_nearly_constant(predicted.outputs) for predicted in predictions.values())


def secret_half(secret: bytes, images: int) -> Tensor:
    """Which images [N] bool are in the half, by their places in the test set alone."""
    # Not by their bytes: a server that chooses how large images are would have as many halves as sizes.
    bits = hashlib.shake_256(b"protofed scored half\0" + secret).digest(-(-images // 8))
    return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=images).astype(bool))


def _is_asked(prefix: str, predicted: Predictions, data: SiteData) -> bool:
    """Whether a test set, and of an own model what it was trained on, are such that scores leave; of no model."""
    sets = [predicted.targets, *([data.train.labels.cpu()] if prefix.startswith(PERSONAL) else [])]
    return len(predicted.targets) >= MIN_IMAGES and all(map(data.task.can_be_asked, sets))


def _half(prefix: str, images: int, data: SiteData, recipe: Recipe, secret: bytes) -> Tensor:
    """Of a run's sample of the shared test set, those that are in the half of the whole."""
    if prefix != PERSONAL or images == len(data.test):
        return secret_half(secret, images)
    rows = stratified_sample(data.task.strata(data.test.labels.cpu()), images, recipe.seed)
    return secret_half(secret, len(data.test))[rows]
