"""A site and its resources, a run that the site has checked and prepared, and what the site's daemon is doing.

The agent writes the daemon's status; heartbeat, metrics and decision watch read it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import structlog
import torch

from protofed.client.data.augmentation import build_augmentation, move_images
from protofed.client.data.examples import CONTRAST_IMAGES, Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import ClientMethod, client_methods, compute_dp_cost
from protofed.client.models.catalogue import architectures
from protofed.client.models.split import SplitModel, dump
from protofed.client.policy import run_limits
from protofed.client.policy.policy import GateContext, Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.policy.run_limits import RunFacts
from protofed.client.policy.update_checks import ROWS, PolicyRefusedError
from protofed.client.state.store import SiteState, Store, run_seed
from protofed.client.training.context import Checkpoints, FitContext, FitProgress, NoCheckpoints, Throughput, seeded
from protofed.client.training.dp import MAX_STEPS, SIMULATED_SECRET, DpContext, DpNoise, NoiseShare, fit_seed
from protofed.client.training.noisy_steps import check_model as check_noisy_model
from protofed.common.codec import Digest, digest, encode
from protofed.common.config.recipe import MAX_ROUNDS, DpCost, Plan, Recipe, parse_json
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.config.tasks import check_defined
from protofed.common.errors import (
    CodecError,
    ConfigError,
    DataError,
    FailureReason,
    PolicyViolationError,
    StateError,
    TaskFailedError,
    WithdrawnError,
    short,
)
from protofed.common.payload import Part, Payload, SiteId, Update
from protofed.common.plugins import PluginKind, is_plugin
from protofed.common.protocol.messages import (
    MAX_BYTES,
    MAX_RECIPE_BYTES,
    Activity,
    Assignment,
    Progress,
    Role,
    Task,
    TaskKind,
)
from protofed.common.secure_aggregation.linear_form import POINT, read_form
from protofed.common.version import VERSION

# Fixed at the site, and long: a server that could shorten it would see single batches, and count the examples.
PROGRESS_WINDOW_S = 60.0
# On a CPU one batch of a scoring may take minutes. With the window of a fit each would be seen, and so the number of
# test images.
SCORING_WINDOW_S = 300.0
_WINDOWS_S = {Activity.TRAINING: PROGRESS_WINDOW_S, Activity.SCORING: SCORING_WINDOW_S}
log = structlog.get_logger()
# The code that the server gets for an error. Its text stays in the site's log: it may name paths or data.
_REASONS: dict[type[Exception], FailureReason] = {
    PolicyViolationError: FailureReason.POLICY,
    ConfigError: FailureReason.REFUSED,
    CodecError: FailureReason.REFUSED,
    DataError: FailureReason.DATA,
    StateError: FailureReason.DISK,
    WithdrawnError: FailureReason.WITHDRAWN,
    torch.OutOfMemoryError: FailureReason.OUT_OF_MEMORY,
}
FORESEEN = tuple(_REASONS)  # errors that need no traceback in the log
_COUNTED = ROWS | {Part.CLASS_PRESENCE, Part.LABEL_DISTRIBUTION}  # parts that rule `min_samples_per_class` looks at
_ROUNDS: dict[
    TaskKind, Callable[[int], tuple[int, int]]
] = {  # first and last valid round, by the run's rounds; others: as FIT
    TaskKind.INITIALISE: lambda _: (0, 0),
    TaskKind.FIT: lambda rounds: (1, rounds),
    TaskKind.SCORE: lambda rounds: (1, rounds),
}


Train: TypeAlias = "Callable[[PreparedRun, Task, FitContext, Payload], Update]"


class PreprocessingError(ConfigError):
    """The run's images would be preprocessed differently from the server's, or from what the settings pin."""


def no_checkpoints(_: Task) -> AbstractContextManager[Checkpoints]:
    """The checkpoints of a site without a state folder, as in a simulation: none."""
    return nullcontext(NoCheckpoints())


def train_alone(run: PreparedRun, _: Task, local: FitContext, base: Payload) -> Update:
    """A FIT task in one process."""
    return run.method.fit(local, base)


@dataclass(eq=False)
class Site:
    """An agent's identity and resources; of these, only the policy ever changes.

    Attributes:
        policy: as `refresh_policy` last read it: one task has one policy.
        load_data: the site's data, brought to the recipe's input; raises DataError.
        build_model: a model on the site's device; the sites of a simulation share one.
        checkpoints: opens the checkpoints of a fit and closes them after it.
        preprocessing_digest: pinned in the site's settings: runs with another are refused; None: not pinned.
        fit: runs a FIT task; replaced where several processes train together.
    """

    name: SiteId
    roles: frozenset[Role]
    policy: Policy
    store: Store
    load_data: Callable[[Recipe], SiteData]
    build_model: Callable[[Recipe], SplitModel]
    checkpoints: Callable[[Task], AbstractContextManager[Checkpoints]] = no_checkpoints
    preprocessing_digest: str | None = None
    fit: Train = train_alone
    simulated: bool = False  # what it hands in stays in this process
    read_policy: Callable[[], Policy] | None = None  # None: the policy never changes, as in a simulation

    def refresh_policy(self) -> bool:
        """Read the policy again; whether it has changed, so that runs must be prepared again.

        Raises:
            ConfigError, PolicyViolationError: it cannot be read; `policy` must not be used before it can.
        """
        before, self.policy = self.policy, self.policy if self.read_policy is None else self.read_policy()
        return self.policy != before


@dataclass(frozen=True)
class DpSource:
    """What the noise of a run's fits follows from.

    Attributes:
        secret: of the site, 32 bytes.
        cost: of one round.
        recipe: digest of the run's, as it was offered.
    """

    secret: bytes = field(repr=False)
    cost: DpCost
    recipe: Digest


@dataclass(frozen=True)
class PreparedRun:
    """A run that passed all checks of this site, with everything that its tasks need.

    Attributes:
        seed: of batches, augmentation and dropout; by the policy the recipe's, or one of the site's secret.
        dp: what fits draw their noise from, if the recipe has `[plan.dp]`.
        withheld: why nothing that this site learns leaves in the run, which only the site may know; None: it does.
    """

    recipe: Recipe
    method: ClientMethod
    model: SplitModel
    data: SiteData
    seed: int = field(repr=False)
    dp: DpSource | None = None
    withheld: PolicyRefusedError | None = None

    def fit_context(
        self, site: SiteId, task: Task, state: SiteState, status: DaemonStatus, checkpoints: Checkpoints
    ) -> FitContext:
        """The context of one task for the method; the method may change its memory without changing `state`."""
        recipe = self.recipe
        return FitContext(
            site=site,
            round=task.round,
            rounds=recipe.rounds,
            model=self.model,
            data=self.data,
            classes=recipe.classes,
            plan=recipe.plan,
            rng=seeded(self.seed, task.round, site, self.data.device),
            client_state={part: dict(tensors) for part, tensors in state.client_state.items()},
            fit_progress=status.fit_progress,
            throughput=status.throughput,
            check=status.check,
            checkpoints=checkpoints,
            participation=recipe.federation.participation,
            dp=self._dp(site, task, state),
        )

    def noise(self, site: SiteId, task: Task, state: SiteState) -> DpNoise | None:
        """The noise of one fit; None: it has none. A fit that differs only in its memory has other noise."""
        if self.dp is None or task.kind is not TaskKind.FIT:
            return None
        # Not the task: its id is another in a simulation. `DpBudget` refuses two tasks with the same noise.
        depends = (self.dp.recipe, site, task.run, task.round, task.attempt, task.base_digest or "")
        own = (self.data.train.fingerprint().hex(), digest(encode(state.client_state)))
        return DpNoise(fit_seed(self.dp.secret, *depends, *own))

    def _dp(self, site: SiteId, task: Task, state: SiteState) -> DpContext | None:
        if self.dp is None or self.recipe.plan.dp is None or (noise := self.noise(site, task, state)) is None:
            return None
        return DpContext(self.recipe.plan.dp, self.dp.cost, noise)

    @property
    def shares_noise(self) -> bool:
        """Whether an update leaves in a sum alone, with this site's share of the noise: it has none by itself."""
        return self.recipe.plan.dp is not None and self.recipe.plan.dp.shared_by is not None

    def noise_share(self, site: SiteId, task: Task, state: SiteState, std: float) -> NoiseShare:
        """What a site adds to the update of a fit where noise is shared.

        Args:
            task, state: those of the fit.
            std: as of `share_std`.

        Raises:
            TaskFailedError: there is no noise, or it cannot be written in a sum; nothing leaves.
        """
        if (noise := self.noise(site, task, state)) is None or not std > 0:
            raise TaskFailedError(
                FailureReason.INTERNAL, "the noise of this update cannot be made, so the update is not sent"
            )
        if not std < math.ldexp(MAX_STEPS, -POINT.bits):
            # All of it would be the same number: a server could send a model so large that it takes the noise away.
            text = f"the server sent such a large model that its noise (std {std:.3g}) does not fit into an aggregate"
            raise TaskFailedError(FailureReason.REFUSED, text)
        return NoiseShare(noise, std)

    def gate_context(self) -> GateContext:
        """What the gate needs to decide on an update; it is never sent."""
        counts = self.data.task.counts(self.data.train.labels.cpu(), self.recipe.classes)
        return GateContext(counts.numpy(), noisy=self.noisy)

    @property
    def noisy(self) -> bool:
        """Whether what leaves in this run has noise, and nothing leaves without."""
        return self.recipe.plan.dp is not None

    def check_task(self, task: Task) -> None:
        """Check a task against the run; its types were checked when the message was unpacked.

        Raises:
            TaskFailedError: its round is not one of the run, or its base is larger than `MAX_BYTES`.
        """
        least, most = _ROUNDS.get(task.kind, _ROUNDS[TaskKind.FIT])(self.recipe.rounds)
        if not least <= task.round <= most:
            raise TaskFailedError(
                FailureReason.REFUSED, f"a {task.kind} task of round {task.round}: expected {least} to {most}"
            )
        if task.base_bytes > MAX_BYTES:
            raise TaskFailedError(
                FailureReason.REFUSED, f"a model of {task.base_bytes} bytes: expected at most {MAX_BYTES}"
            )


def is_aggregated(site: Site, recipe: Recipe) -> bool:
    """Whether updates of a run leave in secure aggregation only; those of a simulation stay in its process."""
    return recipe.federation.secure and not site.simulated


def is_offered_aggregated(site: Site, offered: Assignment) -> bool:
    """As `is_aggregated`, of a run that is not prepared yet; False of an unreadable recipe, which is declined."""
    return not site.simulated and Role.TRAINER in site.roles and _is_secure(offered.recipe)


@lru_cache(maxsize=8)
def _is_secure(recipe: str) -> bool:
    try:
        return parse_json(recipe, Recipe, "the offered recipe").federation.secure
    except ConfigError:
        return False


def trains_to_its_end(site: Site, run: PreparedRun) -> bool:
    """Whether a fit that diverges goes on: where its update would not tell of the images, that it stopped would.

    With noise whether a fit diverges follows from noisy sums, and whether its loss is a number must not count.
    """
    tells_nothing = is_aggregated(site, run.recipe) or not (site.simulated or run.method.sends)
    return tells_nothing and run.recipe.plan.dp is None


def prepare(site: Site, assignment: Assignment) -> PreparedRun:
    """Check everything that the server sent before any of it is used, then build the model and load the data.

    Raises:
        TaskFailedError: this site takes no part in the run; all its tasks are declined by this error's reason.
    """
    try:
        recipe = read_recipe(assignment)
        check_preprocessing(recipe, assignment.preprocessing_digest, site.preprocessing_digest)
        method = client_methods.build(recipe.method.name, recipe.method.options, site.policy.rules.plugins)
        form = None
        if recipe.federation.secure:
            form = read_form(method, recipe.method.name)
            site.policy.admit_group(recipe.federation.sum_group)
            site.policy.admit_rows(recipe.method)
        site.policy.admit_task(recipe.task.name)
        check_defined(recipe.method.name, method.declares.tasks, recipe.task.name)
        site.policy.admit(recipe.method.name, method.sends, form, exchanges=method.declares.exchanges)
        site.policy.admit_noise(recipe)
        check_model(recipe.model, recipe.input, recipe.classes)
        model = site.build_model(recipe)
        # By the model's own head: which tensors of it a method sends is known only after the first fit.
        if Part.HEAD in method.sends and form is None:
            site.policy.admit_head(dump(model.head), recipe.classes)
        offered, plugins = digest(assignment.recipe.encode()), site.policy.rules.plugins
        facts = RunFacts(
            offered,
            method.sends,
            plugins,
            assignment.min_cohort,
            own_losses=method.declares.own_losses,
            features=model.features,
        )
        run_limits.admit(recipe, site.policy.rules.limits, facts)
        data = site.load_data(recipe)
        if Role.TRAINER in site.roles:
            site.policy.admit_noise(recipe, grouped=data.train.units is not None)
        withheld = _refused_by_images(recipe, site, data, facts)
        cost = check_dp(recipe, method, model, data, site.policy.rules)
        secret = site.store.secret if not site.simulated else lambda: SIMULATED_SECRET
        dp = None if cost is None else DpSource(secret(), cost, recipe.fingerprint())
        return PreparedRun(recipe, method, model, data, _seed(site, assignment.run, recipe), dp, withheld)
    except FORESEEN as error:
        raise TaskFailedError(classify_error(error), str(error)) from error
    except Exception as error:  # from a driver, or a site's own model: keep the daemon alive
        log.exception("run failed to be prepared", run=assignment.run)
        raise TaskFailedError(classify_error(error), f"{type(error).__name__}: {error}") from error


def _refused_by_images(recipe: Recipe, site: Site, data: SiteData, facts: RunFacts) -> PolicyRefusedError | None:
    """The limit that a run breaks by this site's images: how far a fit moves, and what it learns, depend on them.

    A server could offer one run after the other, and count the images from the runs that are declined. So where updates
    are sent in secure aggregations only, the run is not declined: the site trains, and random numbers take the place of
    what it trained.

    Raises:
        PolicyRefusedError: in a run without secure aggregation, whose updates tell the server more than this.
    """
    if not (facts.sends and len(data.train)):  # nothing of the images leaves
        return None
    try:
        # With noise no limit asks the images: it stands for them.
        contrast = _contrast(data, recipe.plan) if recipe.plan.dp is None else None
        of_images = replace(facts, examples=len(data.train), contrast=contrast)
        run_limits.admit(recipe, site.policy.rules.limits, of_images)
    except PolicyRefusedError as refusal:
        if not is_aggregated(site, recipe):
            raise
        return refusal
    return None


def _contrast(data: SiteData, plan: Plan) -> float:
    """By how much two images differ as a fit sees them: transforms can make them alike, as a window can."""
    train = data.train
    if isinstance(plan.augmentation, str):
        return train.contrast()
    seen = train.sample(CONTRAST_IMAGES, 0, data.task.strata)
    augmentation = build_augmentation(plan.augmentation)
    moves = augmentation.draw(len(seen), torch.Generator().manual_seed(0))
    moved = move_images(augmentation, seen.pixels(), moves)
    return min(train.contrast(), Examples(moved, seen.labels).contrast())


def _seed(site: Site, run: str, recipe: Recipe) -> int:
    """The seed of a run's fits, by rule `batch_order`.

    With the recipe's, a server knows which examples made which step, and so more of each than their sum tells.
    """
    match site.policy.rules.batch_order:
        case "secret":
            return run_seed(site.store.secret(), run)
        case "recipe":
            return recipe.seed


def read_recipe(assignment: Assignment) -> Recipe:
    """Parse and validate the recipe that the server sent.

    Raises:
        ConfigError: it is too large or invalid, or contains a [data] table.
    """
    if (size := len(assignment.recipe.encode())) > MAX_RECIPE_BYTES:
        raise ConfigError(f"a recipe of {size} bytes: expected at most {MAX_RECIPE_BYTES}")
    if assignment.keep_rounds > MAX_ROUNDS:
        raise ConfigError(f"keep_rounds = {assignment.keep_rounds}: expected at most {MAX_ROUNDS}")
    try:
        recipe = parse_json(assignment.recipe, Recipe, f"the recipe of run {assignment.run}")
    except ConfigError as error:
        raise ConfigError(f"{error} (if the server's protofed is newer than {VERSION}, upgrade this site's)") from error
    if recipe.data is not None:
        raise ConfigError(f"the recipe of run {assignment.run} has [data]: a site reads only its own settings' data")
    return recipe


def check_preprocessing(recipe: Recipe, server_digest: str = "", pinned: str | None = None) -> None:
    """Check that this software preprocesses images as the server's does, and as the site's settings pin it.

    Args:
        server_digest: the server's `Recipe.preprocessing_digest()`; empty, where the recipe comes from the
            site's own files: not compared.
        pinned: `data.preprocessing_digest` of the settings; None: not pinned.

    Raises:
        PreprocessingError: a digest differs; no image was read.
    """
    own = recipe.preprocessing_digest()
    if server_digest and server_digest != own:
        raise PreprocessingError(
            f"for run {recipe.name} the server preprocesses images differently from this site's software (digest "
            f"{server_digest[:16]}…, here {own[:16]}…). Install the same protofed on both"
        )
    if pinned is not None and pinned != own:
        raise PreprocessingError(
            f"run {recipe.name} preprocesses images differently from what this site's settings pin (digest {own}, "
            f"pinned {short(pinned)}). Compare them with `protofed client check`, then correct "
            "data.preprocessing_digest"
        )


def check_model(choice: NamedOptions, input_: Input, classes: int) -> None:
    """Check that a catalogue model is not larger than `MAX_BYTES`, before memory is allocated for it.

    Raises:
        ConfigError: it is larger, or there is no such model.
    """
    if choice.name not in set(architectures) and is_plugin(PluginKind.MODEL, choice.name):
        return  # the site's own code, which its policy names
    architecture = architectures.build(choice.name, choice.options)
    if min(input_.shape[1:]) < architecture.smallest:
        return  # `build_model` refuses it with a better message
    try:
        # On the meta device parameters have shapes but no storage, so options that ask for terabytes cost nothing.
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = architecture.build(input_, classes)
        nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    except (RuntimeError, OverflowError) as error:  # sizes that no tensor can have
        raise ConfigError(f"model {choice.name} cannot be made with these options: {error}") from error
    if nbytes > MAX_BYTES:
        raise ConfigError(f"model {choice.name} takes {nbytes} bytes: expected at most {MAX_BYTES}")


def check_dp(
    recipe: Recipe, method: ClientMethod, model: SplitModel, data: SiteData, rules: PolicyRules
) -> DpCost | None:
    """What a round of the run costs at this site; None: the recipe has no `[plan.dp]`.

    Args:
        model: on the site's device.
        data: an evaluator's has nothing to protect, and the policy's rules on counts do not matter there.

    Raises:
        ConfigError: the method or the model cannot be trained so.
        PolicyRefusedError: a rule of the site decides by exact counts of its images.
    """
    plan = recipe.plan.dp
    if plan is None:
        return None
    cost = compute_dp_cost(method, recipe.method.name, recipe.plan)
    check_noisy_model(model, recipe.input, data.device)
    if not data.scores_only:
        check_rules(method, rules)
    return cost


def check_rules(method: ClientMethod, rules: PolicyRules) -> None:
    """Check that no rule of a site decides by exact counts of its images what leaves, or PolicyRefusedError."""
    counted = (
        ("min_images_per_unit", rules.min_images_per_unit, Part.BODY in method.sends),
        ("min_samples_per_class", rules.min_samples_per_class, bool(method.sends & _COUNTED)),
    )
    for rule, fewest, applies in counted:
        if applies and fewest > 1:
            text = (
                f"{rule} = {fewest} decides by exact counts of this site's images what is sent, and the run has "
                f"[plan.dp], whose noise hides single patients. Set {rule} = 1 in a policy with dp"
            )
            raise PolicyRefusedError(rule, text)


def classify_error(error: Exception) -> FailureReason:
    """The code of an error; INTERNAL for unforeseen ones."""
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return FailureReason.DEVICE if isinstance(error, torch.AcceleratorError) else FailureReason.INTERNAL


class TaskAbortedError(Exception):
    """The server no longer waits for the task that is being worked on."""


@dataclass
class DaemonStatus:
    """What the daemon is doing. The agent and its training write it, the heartbeat's thread and the metrics read it.

    Attributes:
        clock: monotonic seconds.
        progressed_at: when training or scoring last began a batch, by that clock.
        asks: a call of the agent's for a run or a task is under way.
        own_scores: the newest of the site's own scores of the run, by family; never sent.
        privacy: epsilon that the site has spent, and the policy's budget (None: it has none); None: not computed yet.
        left_run: the run that the site has left, as the decision watch saw it; empty: none.
    """

    run: str = ""
    task_id: str = ""
    round: int = 0  # of the task with `task_id`
    activity: Activity = Activity.IDLE
    fit_progress: FitProgress = field(default_factory=FitProgress)
    throughput: Throughput = field(default_factory=Throughput)  # for the site's own metrics; never sent
    aborted_task_id: str = ""  # the task that the server no longer waits for
    left_run: str = ""
    heartbeat_s: float = 1.0  # replaced by the run's, once there is a run
    idle_heartbeat_s: float = 1.0  # likewise
    asks: bool = False
    clock: Callable[[], float] = time.monotonic
    progressed_at: float = -math.inf
    own_scores: Mapping[str, float] = field(default_factory=dict)
    privacy: tuple[float, float | None] | None = None

    def progress(self, bytes_moved: int, telemetry: Mapping[str, float] | None = None) -> Progress:
        """The content of a heartbeat: of training the epoch, and of it and of scoring whether they got on lately.

        Args:
            bytes_moved: by the link, since the daemon's start.
            telemetry: the numbers that the site's policy releases.
        """
        activity, fit = self.activity, self.fit_progress  # read once: the agent writes them meanwhile
        making_progress = self.clock() - self.progressed_at < _WINDOWS_S.get(activity, 0.0)
        return Progress(
            self.task_id,
            activity,
            fit.epoch,
            fit.epochs,
            making_progress,
            bytes_moved,
            telemetry=telemetry or {},
        )

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note that the agent asks the server for work, for as long as the context lasts."""
        self.asks = True
        try:
            yield
        finally:
            self.asks = False

    def log_fields(self) -> dict[str, str | int]:
        """Run and round of the current task, for the log; empty while the daemon is idle."""
        return {"run": self.run, "round": self.round} if self.task_id else {}

    def check(self) -> None:
        """Called between the batches of training and of scoring.

        Raises:
            TaskAbortedError: the server no longer waits for this task.
            WithdrawnError: the site has left the run.
        """
        self.progressed_at = self.clock()
        if self.left_run and self.left_run == self.run:
            raise WithdrawnError(f"this site has left run {self.run}: its fit ends here")
        if self.aborted_task_id and self.aborted_task_id == self.task_id:
            raise TaskAbortedError
