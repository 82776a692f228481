"""A site as its agent knows it, and a run as far as the site has prepared for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import structlog
import torch

import protofed.client.methods  # noqa: F401  (registers the client halves)
from protofed.client.agent.failure_codes import FORESEEN, reason_of
from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.data.site_data import SiteData
from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.catalogue import architectures
from protofed.client.models.split import SplitModel
from protofed.client.privacy.decoys import run_secret
from protofed.client.privacy.policy import GateContext, Policy
from protofed.client.state.store import SiteState, Store
from protofed.client.training.context import Checkpoints, FitContext, NoCheckpoints, seeded
from protofed.common.config.recipe import MOST_ROUNDS, Input, NamedOptions, Recipe, parse_json
from protofed.common.errors import ConfigError, FailureReason, TaskFailedError, short
from protofed.common.payload import Payload, SiteId, Update
from protofed.common.plugins import PluginKind, is_plugin
from protofed.common.protocol.messages import MOST_BYTES, MOST_RECIPE_BYTES, Assignment, Role, Task, TaskKind
from protofed.common.version import VERSION

log = structlog.get_logger()
_ROUNDS: dict[TaskKind, Callable[[int], tuple[int, int]]] = {  # of a run with so many
    TaskKind.INITIALISE: lambda _: (0, 0),
    TaskKind.FIT: lambda rounds: (1, rounds),
    TaskKind.SCORE: lambda rounds: (1, rounds),
}


def no_checkpoints(_: Task) -> AbstractContextManager[Checkpoints]:
    """Of a site without a state folder, as in a simulation."""
    return nullcontext(NoCheckpoints())


@dataclass(frozen=True)
class Site:
    """Who this agent is and what it has.

    Attributes:
        load_data: the site's data, brought to the recipe's input; raises DataError.
        build_model: a model on the device; a simulation shares one among its sites.
        checkpoints: of a fit, as long as it is worked on.
        preprocessing_digest: digest that every run's must equal; None: any run's that the server says rightly.
        fit: what a task of that kind is; several processes may do it together.
    """

    name: SiteId
    roles: frozenset[Role]
    policy: Policy
    store: Store
    load_data: Callable[[Recipe], SiteData]
    build_model: Callable[[Recipe], SplitModel]
    checkpoints: Callable[[Task], AbstractContextManager[Checkpoints]] = no_checkpoints
    preprocessing_digest: str | None = None
    fit: Callable[[PreparedRun, Task, FitContext, Payload], Update] = lambda run, _, local, base: run.method.fit(
        local, base
    )


@dataclass(frozen=True)
class PreparedRun:
    """One run, as far as this site has prepared for it."""

    recipe: Recipe
    method: ClientMethod
    model: SplitModel
    data: SiteData

    def local(
        self, site: SiteId, task: Task, held: SiteState, now: DaemonStatus, checkpoints: Checkpoints
    ) -> FitContext:
        """What the method works on in one task; what the site holds stays as it is."""
        recipe = self.recipe
        return FitContext(
            site=site,
            round=task.round,
            rounds=recipe.rounds,
            model=self.model,
            data=self.data,
            classes=recipe.classes,
            plan=recipe.plan,
            rng=seeded(recipe.seed, task.round, site, self.data.device),
            memory={part: dict(tensors) for part, tensors in held.memory.items()},
            steps=now.steps,
            pace=now.pace,
            check=now.check,
            checkpoints=checkpoints,
        )

    def background(self, site: Site, task: Task, received: Payload) -> GateContext:
        """What the gate has to know to let an update of this task pass."""
        examples = np.bincount(self.data.train.labels.cpu().numpy(), minlength=self.recipe.classes)
        hides = site.policy.rules.hide_class_presence
        return GateContext(examples, received, run_secret(site.store.secret(), task.run) if hides else b"")

    def check(self, task: Task) -> None:
        """What a task says, beside what the wire's types say.

        Raises:
            TaskFailure: it is not a task of this run.
        """
        least, most = _ROUNDS[task.kind](self.recipe.rounds)
        if not least <= task.round <= most:
            raise TaskFailedError(
                FailureReason.REFUSED, f"a {task.kind} task of round {task.round}: expected {least} to {most}"
            )
        if task.base_bytes > MOST_BYTES:
            raise TaskFailedError(
                FailureReason.REFUSED, f"a model of {task.base_bytes} bytes: expected at most {MOST_BYTES}"
            )


def prepare(site: Site, assignment: Assignment) -> PreparedRun:
    """Check all that the server says before any of it is used, then load the data.

    Raises:
        TaskFailure: this site takes no part in the run; the reason is that of all its tasks.
    """
    try:
        recipe = read(assignment)
        check_preprocessing(recipe, assignment.preprocessing_digest, site.preprocessing_digest)
        method = client_methods.build(recipe.method.name, recipe.method.options, site.policy.rules.plugins)
        site.policy.admit(recipe.method.name, method.sends)
        check_model(recipe.model, recipe.input, recipe.classes)
        return PreparedRun(recipe, method, site.build_model(recipe), site.load_data(recipe))
    except FORESEEN as error:
        raise TaskFailedError(reason_of(error), str(error)) from error
    except Exception as error:  # a driver, or a site's own model: the daemon lives
        log.exception("run failed to be prepared", run=assignment.run)
        raise TaskFailedError(reason_of(error), f"{type(error).__name__}: {error}") from error


def read(assignment: Assignment) -> Recipe:
    """The recipe that the server gave, every value of it checked.

    Raises:
        ConfigError: it cannot be used; nothing of it was.
    """
    if (size := len(assignment.recipe.encode())) > MOST_RECIPE_BYTES:
        raise ConfigError(f"a recipe of {size} bytes: expected at most {MOST_RECIPE_BYTES}")
    if assignment.keep_rounds > MOST_ROUNDS:
        raise ConfigError(f"keep_rounds = {assignment.keep_rounds}: expected at most {MOST_ROUNDS}")
    try:
        recipe = parse_json(assignment.recipe, Recipe, f"the recipe of run {assignment.run}")
    except ConfigError as error:
        raise ConfigError(f"{error} (if the server's protofed is newer than {VERSION}, upgrade this site's)") from error
    if recipe.data is not None:
        raise ConfigError(f"the recipe of run {assignment.run} has [data]: a site reads only its own settings' data")
    return recipe


def check_preprocessing(recipe: Recipe, told: str = "", pinned: str | None = None) -> None:
    """That this software brings images to the model as the server's does, and as the site has it pinned.

    Args:
        told: the server's digest; empty, of an older server: not compared.

    Raises:
        ConfigError: it does not; no image was read.
    """
    own = recipe.preprocessing_digest()
    if told and told != own:
        raise ConfigError(
            f"the server prepares images otherwise than this site's software for run {recipe.name} (digest "
            f"{told[:16]}…, here {own[:16]}…): upgrade the older of the two, so that both have the same protofed"
        )
    if pinned is not None and pinned != own:
        raise ConfigError(
            f"run {recipe.name} prepares images otherwise than this site's settings have it pinned (digest "
            f"{own}, pinned {short(pinned)}): compare them with `protofed client check`, then correct "
            "data.preprocessing_digest"
        )


def check_model(choice: NamedOptions, input_: Input, classes: int) -> None:
    """That a model of the catalogue is not larger than a site takes one, before memory is asked for it.

    Raises:
        ConfigError: it is, or there is no such model.
    """
    if choice.name not in set(architectures) and is_plugin(PluginKind.MODEL, choice.name):  # its policy names it
        return
    architecture = architectures.build(choice.name, choice.options)
    if min(input_.shape[1:]) < architecture.smallest:  # `build` says so
        return
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = architecture.build(input_, classes)
        nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    except (RuntimeError, OverflowError) as error:  # sizes that no tensor can have
        raise ConfigError(f"model {choice.name} cannot be made with these options: {error}") from error
    if nbytes > MOST_BYTES:
        raise ConfigError(f"model {choice.name} takes {nbytes} bytes: expected at most {MOST_BYTES}")
