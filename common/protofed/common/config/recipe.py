"""A run's recipe: TOML parsed into frozen models; an unknown key is an error that names the nearest known one.

`Plan` is how sites train. `DpCost` is what a round costs in differential privacy: numbers of recipe and method alone,
the same for every site.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from protofed.common.codec import Digest, digest
from protofed.common.config.data import Data
from protofed.common.config.evaluation import MAX_CLASSES, Evaluation
from protofed.common.config.tables import Input, Model, NamedOptions, NamedTransform, Share, StrictModel
from protofed.common.config.tasks import CLASSIFICATION, build_task, tasks
from protofed.common.config.toml_files import explain, read_extended, read_table
from protofed.common.config.transforms import MAX_TRANSFORMS
from protofed.common.deprecated import rename_json, rename_keys
from protofed.common.errors import ConfigError
from protofed.common.ids import Id
from protofed.common.protocol.messages import LONGEST_S, MAX_BYTES, MAX_SECURE_SITES, MIN_SECURE_SITES, Role
from protofed.common.protocol.scores import JUDGED_BY, ScoreFamily, ScoreNames, list_families
from protofed.common.secure_aggregation.linear_form import POINT, FixedPoint

# that `client.models.catalogue` registers, for processes without torch
MODELS = ("conv2cifar", "digits-cnn", "fedavg-cnn", "mlp", "resnet18", "resnet50", "simple-cnn")


Augment = Literal["none", "crop-flip", "reflect-crop-flip", "crop-flip-rotate"]
AugmentationSetting: TypeAlias = Augment | tuple[NamedTransform, ...]
LocalLoss = Literal["cross-entropy", "balanced-softmax", "logit-adjustment"]
OptimizerName = Literal["sgd", "adam", "adamw"]
Sampling = Literal["shuffled", "class-balanced"]
MAX_WARMUP = 10_000  # rounds: a site that checks a run goes through all of them
ShareBelowOne = Annotated[float, Field(gt=0, lt=1)]


def _read_augmentation(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Of a name and a list, only the one that was written is explained."""
    try:
        return read(value)
    except ValidationError as error:
        of_names = [str(problem["loc"][0]).startswith("literal") for problem in error.errors()]
        problem = error.errors()[of_names.index(isinstance(value, str))]
        raise ValueError(problem["msg"].removeprefix("Value error, ")) from None


class DpPlan(StrictModel):
    """`[plan.dp]`: noise, so that what a site sends tells almost nothing about any one patient.

    A unit is a patient, or one image where the site's data have no groups.
    """

    noise_multiplier: Annotated[
        float, Field(gt=0, le=1e6)
    ]  # sigma: std of the noise on a step's gradient sum, in units of max_unit_norm
    max_unit_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # C: a unit's gradient is clipped to this norm
    sampling_rate: Annotated[float, Field(ge=1e-5, le=1)]  # q: the chance that a unit is in a step
    class_noise_multiplier: Annotated[float, Field(gt=0, le=1e6)] | None = (
        None  # std of the noise on class sums and counts, to which a unit adds a norm of 1 at most
    )
    max_feature_norm: Annotated[float, Field(gt=0, le=1e6)] = (
        1.0  # largest norm of a feature in class sums; unit features have norm 1
    )
    min_noisy_count: Annotated[float, Field(ge=0, le=1e6)] = 10.0  # a class with a lower noisy count counts as absent
    shared_by: Annotated[int, Field(ge=2, le=MAX_SECURE_SITES)] | None = (
        None  # h: a fit is one step, to which each site adds noise of sigma / sqrt(h); None: each site adds all noise
    )

    def steps(self, epochs: int) -> int:
        """Noisy steps of a call of `train`: of public numbers alone, for the site's number of images is none."""
        return round(epochs / self.sampling_rate) if self.shared_by is None else min(epochs, 1)

    def sensitivity(self, lr: float, batch_size: int) -> float:
        """How far one unit moves the model by a step of SGD at most, as a norm: lr C / B."""
        return lr * self.max_unit_norm / batch_size

    def noise_share(self, lr: float, batch_size: int) -> float:
        """Std of what each site adds to each number of a sum, where noise is shared; sigma lr C / (B sqrt(h))."""
        return self.noise_multiplier * self.sensitivity(lr, batch_size) / math.sqrt(self.shared_by or 1)


class Plan(StrictModel):
    """Local training: one fit on a site."""

    epochs: Annotated[int, Field(ge=1, le=100_000)] = 1  # passes over the site's examples in each round
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 64  # examples in a batch, over all ranks
    drop_last: bool = False  # leave out an epoch's last, smaller batch
    loss: LocalLoss = (
        "cross-entropy"  # the task's own loss; of classes, the others correct for the site's frequencies pi
    )
    tau: Annotated[float, Field(gt=0, le=1000)] = 1.0  # logit-adjustment: cross-entropy of logits + tau log pi
    sampling: Sampling = "shuffled"  # class-balanced: each of the site's classes equally often, with replacement
    optimizer: OptimizerName = "sgd"  # without state from earlier rounds
    lr: Annotated[float, Field(gt=0, le=1e38)] = 0.01  # learning rate of the first round, or at the end of the warm-up
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # momentum of sgd
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0  # weight decay of all trained parameters
    schedule: Literal["constant", "exponential", "step", "cosine"] = "constant"  # how lr changes over rounds
    lr_decay: Share = 1.0  # exponential: lr * lr_decay ** (round - 1); step: the factor at each of lr_steps
    lr_steps: Annotated[tuple[ShareBelowOne, ...], Field(max_length=100)] = (0.5, 0.75)  # step: shares of the rounds
    warmup_rounds: Annotated[int, Field(ge=0, le=MAX_WARMUP)] = (
        0  # number of first rounds in which the rate rises linearly
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = (
        None  # largest norm of all gradients together; None: no clipping
    )
    augmentation: Annotated[
        Augment | Annotated[tuple[NamedTransform, ...], Field(min_length=1, max_length=MAX_TRANSFORMS)],
        WrapValidator(_read_augmentation),
    ] = "none"  # a crop after padding by 4 (black or reflected), a flip, up to 15 degrees; or a list of transforms
    amp: bool = True  # bfloat16 autocast and channels_last on a GPU; the CPU trains in float32
    buffers: Literal["averaged", "local"] = "averaged"  # BatchNorm statistics that a site continues with
    checkpoint: bool = False  # store each epoch on the site's disk, so that an interrupted fit can continue
    dp: DpPlan | None = None  # differential privacy at the site; None: no noise

    @model_validator(mode="after")
    def _keys_in_use(self) -> Plan:
        for key, user, value in (("tau", "loss", "logit-adjustment"), ("lr_steps", "schedule", "step")):
            if getattr(self, key) != Plan.model_fields[key].default and getattr(self, user) != value:
                raise ValueError(f'plan.{key} is for plan.{user} = "{value}"; set that, too, or remove it')
        return self

    @model_validator(mode="after")
    def _one_linear_step(self) -> Plan:
        """Noise that is shared is that of the sum of all sites' steps, which an update must be: of nothing else."""
        for key, expected in (("epochs", 1), ("optimizer", "sgd"), ("max_grad_norm", None)):
            if self.dp is not None and self.dp.shared_by is not None and getattr(self, key) != expected:
                raise ValueError(
                    f"plan.{key} = {getattr(self, key)!r}: with plan.dp.shared_by a fit is one step of SGD; set "
                    f"{expected!r}"
                )
        return self

    @model_validator(mode="after")
    def _noise_hides_all(self) -> Plan:
        for key, expected in (("loss", "cross-entropy"), ("sampling", "shuffled")):
            if self.dp is not None and getattr(self, key) != expected:
                raise ValueError(
                    f"plan.{key} = {getattr(self, key)!r} uses a site's exact class counts, which [plan.dp] must "
                    f"hide; set {expected!r}"
                )
        return self

    def steps_per_epoch(self, examples: int) -> int:
        """Optimizer steps of one epoch on so many examples, 1 or more, as a site makes its batches; not with `dp`."""
        size = min(self.batch_size, examples)
        return examples // size if self.drop_last else math.ceil(examples / size)

    def learning_rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round, counted from 1, of a run of `rounds`; it rises in the warm-up alone.

        In round r of W of the warm-up it is r / W of the schedule's: linear (Goyal et al., arXiv 1706.02677, 2.2).
        """
        return min(1.0, round / max(self.warmup_rounds, 1)) * self._scheduled(round, rounds)

    def lowest_rate(self, rounds: int) -> float:
        """The lowest learning rate that a round of a run of `rounds` has: one of the warm-up's, or the last's."""
        return min(self.learning_rate(r, rounds) for r in (*range(1, min(self.warmup_rounds, rounds) + 1), rounds))

    def _scheduled(self, round: int, rounds: int) -> float:
        match self.schedule:
            case "constant":
                return self.lr
            case "exponential":
                return float(self.lr * self.lr_decay ** (round - 1))
            case "step":
                # By rounds that are done; a product of floats may be some last bits too large.
                passed = sum(round - 1 >= share * rounds - 1e-6 for share in self.lr_steps)
                return float(self.lr * self.lr_decay**passed)
            case "cosine":
                return self.lr * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2


MAX_ROUNDS, MAX_SITES = 1_000_000, 100_000
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Every = Annotated[int, Field(ge=0, le=MAX_ROUNDS)]
Sites = Annotated[int, Field(ge=1, le=MAX_SITES)]
Robust: TypeAlias = Literal["none", "clip", "median", "trimmed", "krum", "geometric-median"]
COUNTING: frozenset[Robust] = frozenset({"trimmed", "krum"})  # rules that have to know how many sites may be bad
ClassName = Annotated[str, Field(pattern=r"^\S(?:.{0,78}\S)?$")]
MIN_STEPS_OF_NOISE = 1024  # of 16 or more, rounding changes no probability by a factor that could be written down
PREPROCESSING = 1  # incremented when the same `[input]` gives other pixels than before, but for rounding to 16 bits
M = TypeVar("M", bound=BaseModel)


def _quorum(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:
        raise ValueError(
            "expected a number of updates (1, 2, 3, …), or a share of the round's sites: above 0 and at most 1.0"
        ) from None


class Federation(StrictModel):
    """Rounds: which sites are invited, how long the server waits, and when scores are taken."""

    min_sites: Sites = 2  # trainers that must be there before a round is opened
    participation: Share = 1.0  # share of the enrolled trainers that a round needs
    over_selection: Annotated[float, Field(ge=1, le=1000)] = 1.0  # invite this many times as many; the first ones count
    quorum: Annotated[Sites | Share, WrapValidator(_quorum)] = (
        0.5  # updates that a round needs: a count, or a share of its size
    )
    deadline_s: Seconds = 600.0  # then the round closes with the updates that it has, or is abandoned
    grace: Annotated[float, Field(ge=0, le=1)] = (
        0.5  # share of the deadline for which a quorum still waits for other updates
    )
    required_sites: Annotated[
        tuple[Id, ...], Field(max_length=1000)
    ] = ()  # a round counts only with an update of each of these sites
    min_contributors: Sites = 2  # sites needed to change a class; with fewer it stays as it was; 1: in simulations only
    stall_timeout_s: Seconds = 120.0  # a site without progress for so long counts as lost
    max_attempts: Annotated[int, Field(ge=1, le=1_000_000)] = (
        5  # attempts of one round below quorum before the run fails
    )
    site_wait_timeout_s: Seconds = 604_800.0  # how long a round waits for enough sites before the run fails
    max_update_norm: Annotated[float, Field(gt=0)] = (
        1e9  # largest norm of an update minus the model that it starts from
    )
    max_model_mb: Annotated[float, Field(gt=0, le=MAX_BYTES / 1e6)] = (
        512.0  # largest size of the first model, in 10^6 bytes
    )
    max_relative_norm: Annotated[float, Field(gt=0)] = 50.0  # the same, as a multiple of that model's own norm
    outlier_factor: Annotated[float, Field(ge=2)] | None = (
        20.0  # an update over so many times the cohort's median norm is rejected
    )
    robust: Robust = "none"  # how bad updates are bounded before the method aggregates; none: each counts as it is
    max_bad_sites: Annotated[int, Field(ge=1, le=MAX_SITES)] = (
        1  # bad sites that "trimmed" and "krum" withstand in a round
    )
    max_weight_ratio: Annotated[float, Field(ge=1)] = (
        4.0  # a site's example count is capped at so many times the cohort's median
    )
    score_every: Every = 1  # take scores every so many rounds; 0: only in the last
    score_personal_every: Every | None = None  # the same for sites' own models; None: as score_every
    best_by: str | None = (
        None  # score that decides which round's state is kept as the best; None: the first score that the run has
    )
    patience: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] | None = (
        None  # end the run after so many scored rounds without a better one
    )
    min_improvement: Annotated[float, Field(ge=0, le=20_000)] = (
        0.0  # by how much that score must improve for a round to count as better
    )
    score_deadline_s: Seconds = 600.0  # then the round continues without the missing scores
    heartbeat_s: Annotated[float, Field(ge=0.001, le=3600)] = (
        5.0  # time between a daemon's heartbeats; a daemon uses 1 s at least
    )
    secure: bool = False  # secure aggregation: the server gets the updates' aggregate in place of each update
    sum_step_s: Seconds = (
        60.0  # how long a step of a secure aggregation waits for sites; only training takes a site longer than moments
    )
    sum_group: Annotated[int, Field(ge=1, le=MAX_SECURE_SITES)] = (
        3  # least number of sites in a group, which is aggregated whole or not at all; 1: no groups
    )

    @model_validator(mode="before")
    @classmethod
    def _no_screening_under_secure(cls, table: Any) -> Any:
        """Nobody sees one site's norm: `outlier_factor` is then None, where it says no more than its usual default."""
        default = cls.model_fields["outlier_factor"].default
        if isinstance(table, dict) and table.get("secure") is True and table.get("outlier_factor", default) == default:
            return {**table, "outlier_factor": None}
        return table

    @property
    def fixed_point(self) -> FixedPoint | None:
        """How numbers are aggregated; None: not `secure`."""
        return POINT if self.secure else None


def _no_sum(rules: Federation) -> str:
    """Why rounds by these rules cannot have secure aggregation; empty: they can."""
    counted = {"quorum": rules.quorum, "required_sites": len(set(rules.required_sites))}
    if rules.min_sites < MIN_SECURE_SITES:
        return (
            f"min_sites = {rules.min_sites}: expected {MIN_SECURE_SITES} or more. With two sites, each can subtract "
            "its own update and so get the other's"
        )
    if isinstance(rules.quorum, int) and rules.quorum < MIN_SECURE_SITES:
        return f"quorum = {rules.quorum}: expected {MIN_SECURE_SITES} updates or more, or a share"
    for key, value in counted.items():
        if isinstance(value, int) and value > MAX_SECURE_SITES:
            return f"{key} asks for {value} sites in a round: a secure aggregation takes {MAX_SECURE_SITES} at most"
    if rules.sum_group != 1 and not MIN_SECURE_SITES <= rules.sum_group <= rules.min_sites:
        return (
            f"sum_group = {rules.sum_group}: expected {MIN_SECURE_SITES} to min_sites = {rules.min_sites}. A round "
            "opens with min_sites sites, and fewer sites than a group are not aggregated. Or set 1: then the "
            "difference of two rounds' aggregates may tell about one site"
        )
    if rules.outlier_factor is not None:
        return (
            f"outlier_factor = {rules.outlier_factor:g} compares the sites' norms, which the server does not see. "
            "Remove it. max_relative_norm still holds: each site scales its own update down to this norm"
        )
    if rules.robust != "none":
        return (
            f'robust = "{rules.robust}" compares the sites\' updates, and the server sees only their aggregate. '
            "Remove robust, or secure"
        )
    return ""


_OF_CLASSES = ("frequency_groups", "probabilities", "clinical", "class_order")
CLASSES = NamedOptions(name=CLASSIFICATION)


class Recipe(StrictModel):
    """One run: all that a server, its sites or a simulation need to carry it out."""

    name: Id  # name of the run, unique at its server
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0  # seed of the model, the batches and the choice of sites
    rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)]  # rounds after the one that makes the first model
    # Left out at its default: recipes without it keep the digests that they had before the key came.
    task: Annotated[NamedOptions, Field(exclude_if=lambda task: task == CLASSES)] = CLASSES  # what a model learns
    classes: Annotated[int, Field(ge=1, le=MAX_CLASSES)]  # number of classes, or findings; 1 for a number
    class_names: Annotated[tuple[ClassName, ...], Field(max_length=MAX_CLASSES)] = ()  # the classes or findings by name
    input: Input  # shape and values that images are converted to
    method: NamedOptions  # how sites train and the server aggregates
    model: Model  # what is trained
    plan: Plan = Plan()  # local training
    federation: Federation = Federation()  # who takes part, and for how long a round waits
    evaluation: Evaluation = Evaluation()  # which scores are taken
    data: Data | None = None  # simulations only: a daemon has its data in its own settings

    @model_validator(mode="after")
    def _class_names(self) -> Recipe:
        if self.class_names and (len(self.class_names), len(set(self.class_names))) != (self.classes, self.classes):
            raise ValueError(f"class_names: expected one name for each of {self.classes} classes, all different")
        return self

    @model_validator(mode="after")
    def _learnable(self) -> Recipe:
        """A plug-in's task is checked by who may load it: `check_task`."""
        if self.task.name in set(tasks):
            try:
                self.check_task()
            except ConfigError as error:
                raise ValueError(str(error)) from error
        if self.task.name != CLASSIFICATION:
            for table, keys in (("plan", ("loss", "sampling", "tau")), ("evaluation", _OF_CLASSES)):
                given, fields = getattr(self, table), type(getattr(self, table)).model_fields
                if unused := [key for key in keys if getattr(given, key) != fields[key].default]:
                    raise ValueError(f'{table}.{unused[0]} is for task.name = "{CLASSIFICATION}"; remove it')
        return self

    @model_validator(mode="after")
    def _class_order(self) -> Recipe:
        if (order := self.evaluation.class_order) and sorted(order) != list(range(self.classes)):
            raise ValueError(f"evaluation.class_order: expected each of 0 to {self.classes - 1} once")
        return self

    @model_validator(mode="after")
    def _personal_test_images(self) -> Recipe:
        if (images := self.evaluation.personal_test_images) is not None and images < self.classes:
            raise ValueError(
                f"evaluation.personal_test_images = {images}: expected at least {self.classes}, one image of each class"
            )
        return self

    @model_validator(mode="after")
    def _secure_aggregation(self) -> Recipe:
        rules, defaults = self.federation, Federation.model_fields
        if rules.secure and (problem := _no_sum(rules)):
            raise ValueError(f"federation.secure = true: {problem}")
        unused = [key for key in ("sum_step_s", "sum_group") if getattr(rules, key) != defaults[key].default]
        if unused and not rules.secure:
            raise ValueError(f"federation.{unused[0]} is for federation.secure = true; set that, too, or remove it")
        return self

    @model_validator(mode="after")
    def _bad_sites(self) -> Recipe:
        rules = self.federation
        if rules.max_bad_sites != Federation.model_fields["max_bad_sites"].default and rules.robust not in COUNTING:
            raise ValueError(
                'federation.max_bad_sites is for robust = "trimmed" and "krum"; set that, too, or remove it'
            )
        return self

    @model_validator(mode="after")
    def _no_counts_beside_noise(self) -> Recipe:
        if self.plan.dp is not None and self.method.options.get("weighting") == "examples":
            raise ValueError('method.weighting = "examples" sends a site\'s exact count; with [plan.dp] set "uniform"')
        return self

    @model_validator(mode="after")
    def _shared_noise(self) -> Recipe:
        dp, rules = self.plan.dp, self.federation
        if dp is None or dp.shared_by is None:
            return self
        if not rules.secure:
            raise ValueError(
                "plan.dp.shared_by is for runs whose updates the server sees only as an aggregate. Set "
                "federation.secure = true, too. Or remove shared_by, and each site adds all of the noise"
            )
        if not dp.shared_by <= rules.sum_group:
            raise ValueError(
                f"plan.dp.shared_by = {dp.shared_by}: expected at most federation.sum_group = {rules.sum_group}, "
                "the least number of sites whose noise is in an aggregate"
            )
        if (most := dp.noise_share(self.plan.lr, self.plan.batch_size)) > POINT.limit / 16:
            raise ValueError(
                f"plan.dp: a site's share of the noise is {most:.3g} on each number of the model. Expected at most "
                f"{POINT.limit / 16:g}, a 16th of what an aggregate can hold. Set a smaller plan.lr or noise"
            )
        step = dp.noise_share(self.plan.lowest_rate(self.rounds), self.plan.batch_size) * 2.0**POINT.bits
        if step < MIN_STEPS_OF_NOISE:
            raise ValueError(
                f"plan.dp: a site's share of the noise is {step:.3g} steps of 2^-{POINT.bits}, to which an "
                f"aggregate rounds. Expected {MIN_STEPS_OF_NOISE} steps or more, so that rounding costs no privacy. "
                "Set a larger plan.lr or noise"
            )
        return self

    @model_validator(mode="after")
    def _best_round(self) -> Recipe:
        rules, roles = self.federation, set(Role)
        if self.task.name in set(tasks):
            if rules.best_by is not None:
                roles = {self._judging_score().role}
            self._check_improvement()
        if rules.patience is None and rules.min_improvement:
            raise ValueError("federation.min_improvement is for federation.patience; set that, too, or remove it")
        personal = rules.score_every if rules.score_personal_every is None else rules.score_personal_every
        every = {Role.EVALUATOR: rules.score_every, Role.TRAINER: personal}
        if rules.patience is not None and not any(every[role] for role in roles):
            key = "score_personal_every" if roles == {Role.TRAINER} else "score_every"
            raise ValueError(f"federation.patience needs scores during the run: set federation.{key} to 1 or more")
        return self

    def check_task(self) -> None:
        """Check that the task can be learnt with these options and so many outputs, and has the score `best_by`.

        Raises:
            ConfigError: it cannot, or is a plug-in's that this process may not load.
        """
        build_task(self.task).check(self.classes)
        if self.task.name not in set(tasks):  # others: as the recipe was read
            try:
                if self.federation.best_by is not None:
                    self._judging_score()
                self._check_improvement()
            except ValueError as error:
                raise ConfigError(str(error)) from error

    def _judging_score(self) -> ScoreFamily:
        """What `best_by` names.

        Raises:
            ValueError: no score of this run that can judge a round.
        """
        try:
            return self.score_names().judges(str(self.federation.best_by))
        except ValueError as error:
            raise ValueError(f"federation.best_by = {error}") from error

    def _check_improvement(self) -> None:
        """Refuse a `min_improvement` that no score can reach which may judge the rounds: the run would end by it.

        Raises:
            ValueError: naming the most.
        """
        rules, families = self.federation, self.score_names().families
        judging = [families[name] for name in JUDGED_BY if name in families]
        if rules.best_by is not None:
            judging = [self._judging_score()]
        most = max((family.high - family.low for family in judging), default=math.inf)
        if rules.min_improvement > most:
            raise ValueError(
                f"federation.min_improvement = {rules.min_improvement:g}: the score that judges the rounds can improve "
                f"by {most:g} at most"
            )

    def score_names(self) -> ScoreNames:
        """The scores that the run can have; errors as of `check_task`."""
        families, evaluation = list_families(build_task(self.task).scores()), self.evaluation
        return ScoreNames(self.classes, families, evaluation.switched_on, evaluation.qualifiers)

    def wire(self) -> str:
        """As JSON, for sites: without `data`, which is a simulation's and names paths."""
        return self.model_dump_json(exclude={"data"})

    def preprocessing_digest(self) -> Digest:
        """A digest that is equal for recipes with the same preprocessing of images and the same order of classes."""
        fields = {"input": self.input.model_dump(), "class_names": self.class_names, "version": PREPROCESSING}
        return digest(json.dumps(fields, sort_keys=True).encode())

    @property
    def transforms(self) -> tuple[str, ...]:
        """The names of all transforms that it asks of sites, of the preparation first."""
        augmentation = () if isinstance(self.plan.augmentation, str) else self.plan.augmentation
        return tuple(step.transform for step in (*self.input.prepare, *augmentation))

    @property
    def names(self) -> frozenset[str]:
        """All names of its task, method, model, transforms and data; some may be plug-ins; `simulate` allows them."""
        data = () if self.data is None else (self.data.source, self.data.partition.kind)
        return frozenset({self.task.name, self.method.name, self.model.name, *self.transforms, *data})

    def fingerprint(self) -> Digest:
        """A digest that is equal for equal runs: a restarted server continues a run only with the same recipe."""
        return digest(self.wire().encode())


def read_recipe(path: Path) -> Recipe:
    """A recipe from a file, read as by `read_extended`.

    Raises:
        ConfigError: as of `read_toml` and `read_extended`.
    """
    return parse(read_extended(path), Recipe, str(path))


def read_toml(path: Path, model: type[M]) -> M:
    """A TOML file as `model`.

    Raises:
        ConfigError: no such file, no TOML, an unknown key, or a value out of range, with the path of the key.
    """
    return parse(read_table(path), model, str(path))


def parse(table: dict[str, Any], model: type[M], where: str) -> M:
    """A table as `model`, its old keys renamed; errors name `where` and the key.

    Raises:
        ConfigError: an unknown key (with the nearest known one), one under its old and its new name, or a value out of
            range.
    """
    try:
        return model.model_validate(rename_keys(table, model.__name__, where))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model, table)}") from error


def parse_json(text: str, model: type[M], where: str) -> M:
    """JSON as `model`, its old keys renamed; errors name `where` and the key.

    Raises:
        ConfigError: no JSON, an unknown key or a value out of range.
    """
    try:
        return model.model_validate_json(rename_json(text, model.__name__, where))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model)}") from error


@dataclass(frozen=True)
class DpCost:
    """The noisy mechanisms of one round at one site, as the method's client half declares them before it begins.

    Attributes:
        epochs: of each call of `train`, in their order; one of e epochs is `DpPlan.steps(e)` Gaussian mechanisms, each
            on a Poisson sample of the units.
        class_releases: of class sums and counts, each a Gaussian mechanism of noise `class_noise_multiplier` on all
            units, without sampling.
        linear: what is sent is the model after one training, and nothing stays for a later fit. After a training of one
            step the noise can be added where updates are aggregated (`DpPlan.shared_by`).
    """

    epochs: tuple[int, ...]
    class_releases: int = 0
    linear: bool = False

    def steps(self, plan: DpPlan) -> int:
        """Noisy steps of the round, over all calls of `train`."""
        return sum(plan.steps(epochs) for epochs in self.epochs)
