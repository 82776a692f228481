"""A run's recipe: TOML parsed into frozen models; an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from protofed.common.codec import Digest, digest
from protofed.common.config.data import Data as Data
from protofed.common.config.data import Dirichlet as Dirichlet
from protofed.common.config.plan import Augment as Augment
from protofed.common.config.plan import DpPlan as DpPlan
from protofed.common.config.plan import Plan as Plan
from protofed.common.config.problems import explain
from protofed.common.config.tables import Input as Input
from protofed.common.config.tables import Model as Model
from protofed.common.config.tables import NamedOptions as NamedOptions
from protofed.common.config.tables import Share
from protofed.common.config.tables import StrictModel as StrictModel
from protofed.common.config.toml_files import read_extended, read_table
from protofed.common.deprecated import rename_keys
from protofed.common.errors import ConfigError
from protofed.common.ids import Id as Id
from protofed.common.protocol.messages import LONGEST_S, MAX_SUMMED, MIN_SUMMED, MOST_BYTES, Role
from protofed.common.protocol.score_names import ScoreNames
from protofed.common.secure_aggregation.fixed_point import POINT, FixedPoint

MOST_ROUNDS, MOST_CLASSES, MOST_SITES = 1_000_000, 100_000, 100_000
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Every = Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
Sites = Annotated[int, Field(ge=1, le=MOST_SITES)]
Robust: TypeAlias = Literal["none", "clip", "median", "trimmed", "krum", "geometric-median"]
COUNTING: frozenset[Robust] = frozenset({"trimmed", "krum"})  # rules that have to know how many sites may be bad
Order = Annotated[tuple[int, ...], Field(max_length=MOST_CLASSES)]
ClassName = Annotated[str, Field(pattern=r"^\S(?:.{0,78}\S)?$")]
FEWEST_STEPS_OF_NOISE = 1024  # of 16 or more, rounding changes no probability by a factor that could be written down
PREPROCESSING = 1  # incremented when the same `[input]` gives other pixels than before
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
    over_selection: Annotated[float, Field(ge=1, le=1000)] = 1.0  # invite this many times more; the first ones count
    quorum: Annotated[Sites | Share, WrapValidator(_quorum)] = (
        0.5  # updates that a round needs: a count, or a share of its size
    )
    deadline_s: Seconds = 600.0  # after that a round is closed with what it has, or abandoned
    grace: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of the deadline that a quorum still waits for the rest
    required_sites: Annotated[tuple[Id, ...], Field(max_length=1000)] = ()  # sites without whose update no round counts
    min_contributors: Sites = 2  # to a class, or what there is of it stays; 1: in simulations only
    stall_timeout_s: Seconds = 120.0  # without progress, a site counts as lost
    max_attempts: Annotated[int, Field(ge=1, le=1_000_000)] = 5  # of one round below quorum, before the run fails
    site_wait_timeout_s: Seconds = 604_800.0  # that a round waits for enough sites, before the run fails
    max_update_norm: Annotated[float, Field(gt=0)] = 1e9  # of an update less the model that it starts from
    max_model_mb: Annotated[float, Field(gt=0, le=MOST_BYTES / 1e6)] = 512.0  # of the first model, in 10^6 bytes
    max_relative_norm: Annotated[float, Field(gt=0)] = 50.0  # the same, as a multiple of that model's own norm
    outlier_factor: Annotated[float, Field(ge=2)] | None = 20.0  # times the cohort's median norm: set aside
    robust: Robust = "none"  # how bad updates are bounded before the method aggregates; none: each counts as it is
    max_bad_sites: Annotated[int, Field(ge=1, le=MOST_SITES)] = 1  # that "trimmed" and "krum" withstand in a round
    max_weight_ratio: Annotated[float, Field(ge=1)] = 4.0  # a site's example count over the cohort's median: capped
    score_every: Every = 1  # rounds; 0: only the last
    score_personal_every: Every | None = None  # likewise for sites' own models; None: as score_every
    best_by: str | None = None  # score of the round whose state is kept as the best; None: the first that the run has
    patience: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] | None = None  # scored rounds without a better one: then end
    min_improvement: Annotated[float, Field(ge=0, le=1)] = 0.0  # of that score, for a round to count as better
    score_deadline_s: Seconds = 600.0  # after that a round goes on without the scores that are missing
    heartbeat_s: Annotated[float, Field(ge=0.001, le=3600)] = (
        5.0  # between a daemon's heartbeats; it takes 1 s at least
    )
    secure: bool = False  # the server gets one sum in place of the updates
    sum_step_s: Seconds = 60.0  # that a step of a sum waits for sites; each but the training takes a site moments
    sum_group: Annotated[int, Field(ge=1, le=MAX_SUMMED)] = 3  # least sites of a group, summed together or not; 1: any

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
        """How numbers are summed; None: not `secure`."""
        return POINT if self.secure else None


def _no_sum(rules: Federation) -> str:
    """Why rounds by these rules cannot be secure sums; empty: they can."""
    counted = {"quorum": rules.quorum, "required_sites": len(set(rules.required_sites))}
    if rules.min_sites < MIN_SUMMED:
        return (
            f"min_sites = {rules.min_sites}: expected {MIN_SUMMED} or more, for of two sites each has the other's "
            "update by subtracting its own"
        )
    if isinstance(rules.quorum, int) and rules.quorum < MIN_SUMMED:
        return f"quorum = {rules.quorum}: expected {MIN_SUMMED} updates or more, or a share"
    for key, value in counted.items():
        if isinstance(value, int) and value > MAX_SUMMED:
            return f"{key} asks for {value} sites in a round: a secure sum takes {MAX_SUMMED} at most"
    if rules.sum_group != 1 and not MIN_SUMMED <= rules.sum_group <= rules.min_sites:
        return (
            f"sum_group = {rules.sum_group}: expected {MIN_SUMMED} to min_sites = {rules.min_sites}, for a round "
            "opens with so many sites, and fewer than a group are not summed; or 1, and the difference of two rounds' "
            "sums may tell of one site"
        )
    if rules.outlier_factor is not None:
        return (
            f"outlier_factor = {rules.outlier_factor:g} compares the sites' norms, of which the server sees none; "
            "remove it (max_relative_norm holds: each site scales its own update down to it)"
        )
    if rules.robust != "none":
        return (
            f'robust = "{rules.robust}" compares the sites\' updates, of which the server sees none but their sum; '
            "remove it, or secure: a run has one or the other"
        )
    return ""


class Evaluation(StrictModel):
    """Scores in addition to those that every run has."""

    frequency_groups: bool = (
        False  # accuracy on many (the first 20 % of classes), medium (the next 30 %) and few (the rest)
    )
    probabilities: bool = False  # area under the ROC curve, and calibration error: seconds more at a daemon's start
    personal_test_images: Annotated[int, Field(ge=2)] | None = (
        None  # of the shared test set, for sites' own models: a stratified sample by the seed; None: all
    )
    class_order: Order = ()  # the classes from the most frequent to the rarest; empty: 0, 1, 2, … as a long tail

    @property
    def switched_on(self) -> frozenset[str]:
        """The keys that are true: each of them gives scores that other runs have not."""
        return frozenset(key for key, value in self if value is True)


class Recipe(StrictModel):
    """One run: all that a server, its sites or a simulation need to carry it out."""

    name: Id  # of the run, unique at its server
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0  # of the model, the batches and who is invited
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)]  # after the one that makes the model
    classes: Annotated[int, Field(ge=2, le=MOST_CLASSES)]  # C
    class_names: Annotated[tuple[ClassName, ...], Field(max_length=MOST_CLASSES)] = ()  # the classes by name
    input: Input  # what images are brought to
    method: NamedOptions  # how sites train and the server aggregates
    model: Model  # what is trained
    plan: Plan = Plan()  # local training
    federation: Federation = Federation()  # who takes part, and for how long a round waits
    evaluation: Evaluation = Evaluation()  # which scores are taken
    data: Data | None = None  # simulations only: a site's data are its own daemon's setting

    @model_validator(mode="after")
    def _class_names(self) -> Recipe:
        if self.class_names and (len(self.class_names), len(set(self.class_names))) != (self.classes, self.classes):
            raise ValueError(f"class_names: expected a name of its own for each of {self.classes} classes")
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
    def _secure_sums(self) -> Recipe:
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
                "plan.dp.shared_by is for sums of which the server sees no term: set federation.secure = true, too, or "
                "remove it, and each site adds all of the noise"
            )
        if not dp.shared_by <= rules.sum_group:
            raise ValueError(
                f"plan.dp.shared_by = {dp.shared_by}: expected at most federation.sum_group = {rules.sum_group}, the "
                "least sites whose noise is in a sum"
            )
        if (most := dp.noise_share(self.plan.lr, self.plan.batch_size)) > POINT.limit / 16:
            raise ValueError(
                f"plan.dp: a site's share of the noise is {most:.3g} on each number of the model; expected at most "
                f"{POINT.limit / 16:g}, a 16th of what a sum takes: a smaller plan.lr or noise"
            )
        step = dp.noise_share(self.plan.lowest_rate(self.rounds), self.plan.batch_size) * 2.0**POINT.bits
        if step < FEWEST_STEPS_OF_NOISE:
            raise ValueError(
                f"plan.dp: a site's share of the noise is {step:.3g} steps of 2^-{POINT.bits}, to which a sum rounds; "
                f"expected {FEWEST_STEPS_OF_NOISE} or more, so that it costs no privacy: a larger plan.lr or noise"
            )
        return self

    @model_validator(mode="after")
    def _best_round(self) -> Recipe:
        rules, roles = self.federation, set(Role)
        if rules.best_by is not None:
            try:
                roles = {ScoreNames(self.classes, self.evaluation.switched_on).judges(rules.best_by).role}
            except ValueError as error:
                raise ValueError(f"federation.best_by = {error}") from error
        if rules.patience is None and rules.min_improvement:
            raise ValueError("federation.min_improvement is for federation.patience; set that, too, or remove it")
        personal = rules.score_every if rules.score_personal_every is None else rules.score_personal_every
        every = {Role.EVALUATOR: rules.score_every, Role.TRAINER: personal}
        if rules.patience is not None and not any(every[role] for role in roles):
            key = "score_personal_every" if roles == {Role.TRAINER} else "score_every"
            raise ValueError(f"federation.patience needs scores during the run: set federation.{key} to 1 or more")
        return self

    def wire(self) -> str:
        """As JSON, for sites: without `data`, which is a simulation's and names paths."""
        return self.model_dump_json(exclude={"data"})

    def preprocessing_digest(self) -> Digest:
        """A digest that is equal for recipes by which sites preprocess images and number classes in the same way."""
        fields = {"input": self.input.model_dump(), "class_names": self.class_names, "version": PREPROCESSING}
        return digest(json.dumps(fields, sort_keys=True).encode())

    @property
    def names(self) -> frozenset[str]:
        """All names of methods, models and data in it, of which some may be plug-ins; `simulate` allows them."""
        data = () if self.data is None else (self.data.source, self.data.partition.kind)
        return frozenset({self.method.name, self.model.name, *data})

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
    """JSON as `model`; errors name `where` and the key.

    Raises:
        ConfigError: no JSON, an unknown key or a value out of range.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model)}") from error
