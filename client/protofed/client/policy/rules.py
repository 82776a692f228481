"""The keys of a site's policy file, and what a server can compute from each score that key `metrics` lets leave.

`[limits]` has the most, and the least, that a server may ask of a site; `schedule` when it takes tasks, in UTC.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, time, timedelta
from enum import StrEnum
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from protofed.common.config.recipe import MAX_ROUNDS, LocalLoss, Robust, Sampling
from protofed.common.config.tables import MAX_NUMBER, StrictModel
from protofed.common.config.tasks import CLASSIFICATION, Classification, MultiLabel, Regression
from protofed.common.config.transforms import FAMILIES, check_allowed_names
from protofed.common.payload import Exchange, Part
from protofed.common.protocol.messages import MAX_SECURE_SITES, Role, Telemetry, score_family

GLOBAL, PERSONAL, LOSS, TRAINING, LOCAL = "global.", "personal.", "loss", "train.", ".local."


class Day(StrEnum):
    """A day of the week; the order is that of `datetime.weekday`."""

    MON = "mon"
    TUE = "tue"
    WED = "wed"
    THU = "thu"
    FRI = "fri"
    SAT = "sat"
    SUN = "sun"


DAYS = tuple(Day)


class Window(StrictModel):
    """A daily window of time, which may last over midnight."""

    days: Annotated[frozenset[Day], Field(min_length=1)] = frozenset(DAYS)  # days on which the window begins
    begins: Annotated[time, Field(alias="from")]  # when the window begins, as 20:00, in UTC
    until: time  # when the window ends, in UTC; if not later than `from`: on the next day

    @field_validator("begins", "until")
    @classmethod
    def _utc(cls, value: time) -> time:
        if value.tzinfo is not None:
            raise ValueError("expected a time without a zone, as 20:00: schedules are in UTC")
        return value

    def contains(self, now: datetime) -> bool:
        """Whether `now`, UTC, is in the window."""
        days = (now, now - timedelta(days=1))  # a window that began yesterday may last until today
        return any(begin <= now < end for begin, end in map(self._on, days) if begin)

    def next_begin(self, now: datetime) -> datetime:
        """When the window begins next, at `now` (UTC) at the earliest."""
        # Eight days: today's window may have started already, and its day come again only in a week.
        days = (now + timedelta(days=ahead) for ahead in range(8))
        return min(begin for begin, _ in map(self._on, days) if begin and begin >= now)

    def _on(self, day: datetime) -> tuple[datetime | None, datetime]:
        """Begin and end of the window of this day; the begin is None if the day is not one of `days`."""
        begin, end = (datetime.combine(day, at, day.tzinfo) for at in (self.begins, self.until))
        end += timedelta(days=0 if end > begin else 1)
        return (begin if DAYS[day.weekday()] in self.days else None), end

    def __str__(self) -> str:
        days = "daily" if len(self.days) == len(DAYS) else ", ".join(day for day in DAYS if day in self.days)
        return f"{days} {self.begins:%H:%M} to {self.until:%H:%M}"


def is_open(schedule: Sequence[Window], now: datetime) -> bool:
    """Whether a site takes tasks at `now`, UTC; always, if the schedule is empty."""
    return not schedule or any(window.contains(now) for window in schedule)


def next_opening(schedule: Sequence[Window], now: datetime) -> datetime:
    """When a site that takes no tasks at `now`, UTC, takes them again; its schedule is not empty."""
    return min(window.next_begin(now) for window in schedule)


def _ordered(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"{list(bounds)}: expected the least first, then the most")
    return bounds


AtLeast1 = Annotated[int, Field(ge=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Bounds = Annotated[tuple[AtLeast1, AtLeast1], AfterValidator(_ordered)]
RecipeDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Limits(StrictModel):
    """Without these a server could choose a run whose updates are images: one huge step, on a model that it prepared.

    The defaults are those of `deploy/policies/standard.toml`.
    """

    models: frozenset[str] = frozenset(
        {"digits-cnn", "conv2cifar", "fedavg-cnn", "simple-cnn", "resnet18", "resnet50"}
    )  # architectures that runs may train, besides those in `plugins`; an mlp's updates reveal images most easily
    transforms: Annotated[frozenset[str], AfterValidator(check_allowed_names)] = frozenset(
        FAMILIES
    )  # transforms of images that runs may name, besides those in `plugins`; a family is all that protofed lists of it
    max_width: AtLeast1 = 1024  # largest number among the model's options, such as units of a layer
    # Of few features a head learns hardly more than the label shares: sums over three sites told the shares of each.
    min_features_per_class: AtLeast0 = 1.0  # least number of features that the head reads, for each of the classes
    sides: Bounds = (8, 1024)  # least and most height and width of images, in pixels
    min_std: AtLeast0 = 0.05  # least input.std; then input.std is at most 1, and input.mean from 0 to 1; 0: any
    # Images that a window or a crop made all alike: what a fit then learns of them is how many there are of each label.
    min_contrast: AtLeast0 = 0.03  # least typical difference of two training images: root mean square, pixels in 0..1
    batches: Bounds = (8, 256)  # least and most batch_size
    # Of a loss adjusted by class frequencies the head's rows of absent classes stay where they are, and the others tell
    # the more of shares, the larger tau. Where few images make half of an epoch, the movement is that of these images.
    losses: frozenset[LocalLoss] = frozenset({"cross-entropy"})  # losses of class logits that runs may train with
    samplings: frozenset[Sampling] = frozenset({"shuffled"})  # ways in which runs may draw examples
    # Without "none" a site takes part only where no single other site can move the model at will.
    robust: frozenset[Robust] = frozenset(get_args(Robust))  # values of federation.robust that runs may have
    epochs: AtLeast1 = 20  # most epochs in a round
    lr: Above0 = 0.5  # largest plan.lr
    weight_decay: AtLeast0 = 0.01  # largest plan.weight_decay
    rounds: AtLeast1 = 1000  # most rounds of a run
    steps: AtLeast1 = 2  # least optimizer steps of an epoch on this site's training examples
    # Least movement of a fit: its learning rates, summed over all steps. With almost none, the update of a head is the
    # label shares times a constant.
    min_step_sum: AtLeast0 = 1.0  # least sum of learning rates over a fit's steps, where head or prototypes are sent
    min_grad_norm: AtLeast0 = 1.0  # least max_grad_norm, if the recipe has one
    max_method_number: Annotated[float, Field(ge=1)] = 1e3  # largest number among the method's options, and its inverse
    min_cohort: AtLeast1 = 2  # least number of sites in a round's aggregate, as the server announces it
    tasks_per_day: AtLeast1 = 1000  # most fits and first models in a day, which begins at 00:00 UTC
    scorings_per_day: AtLeast1 = 1000  # most scorings in a day, which begins at 00:00 UTC
    recipes: frozenset[RecipeDigest] = frozenset()  # digests of the recipes that may run; empty: any recipe
    check_base: bool = True  # refuse a received model that no honest server sends
    max_base_change: Above0 = 3.0  # most change of the received model since the site last saw it, relative to its norm
    max_rollback_rounds: Annotated[int, Field(ge=0)] = 5  # most rounds that a run may go back


def unlimited(models: Collection[str]) -> Limits:
    """No limits but the architectures of `models`: for simulations, whose server and sites are one program."""
    return Limits(
        models=frozenset(models),
        max_width=int(MAX_NUMBER),
        min_features_per_class=0.0,
        sides=(1, int(MAX_NUMBER)),
        min_std=0.0,
        min_contrast=0.0,
        batches=(1, int(MAX_NUMBER)),
        losses=frozenset(get_args(LocalLoss)),
        samplings=frozenset(get_args(Sampling)),
        robust=frozenset(get_args(Robust)),
        epochs=MAX_ROUNDS,
        lr=1e38,
        weight_decay=1e38,
        rounds=MAX_ROUNDS,
        steps=1,
        min_step_sum=0.0,
        min_grad_norm=0.0,
        max_method_number=1e300,
        min_cohort=1,
        tasks_per_day=int(MAX_NUMBER),
        scorings_per_day=int(MAX_NUMBER),
        check_base=False,
        max_base_change=1e38,
        max_rollback_rounds=MAX_ROUNDS,
    )


DType = Literal["float32", "float64", "int64"]  # those of the codec
Megabytes = Annotated[float, Field(gt=0)]


class PrivacyBudget(StrictModel):
    """What all runs on the site's data together may tell of one unit: (epsilon, delta)-differential privacy."""

    epsilon: Annotated[float, Field(gt=0, le=1000)]  # most epsilon over all rounds of all runs
    delta: Annotated[float, Field(ge=1e-12, le=1e-2)]  # delta of the guarantee: far below 1 / number of units
    unit: Literal["patient", "image"]  # whom it protects; patient: the site's data must have groups
    colluders: Annotated[int, Field(ge=0, le=MAX_SECURE_SITES)] = 1  # partners that may tell the server their noise


class PolicyRules(StrictModel):
    """Lists of names are complete: there is no "all", and an empty one allows nothing."""

    methods: frozenset[str]  # names of the methods that runs may use
    tasks: frozenset[str] = frozenset({CLASSIFICATION})  # what runs may learn, by the names of tasks
    parts: frozenset[Part]  # parts of updates that may be sent
    exchange: frozenset[Exchange] = frozenset()  # models of single sites: "receive" those of others, "share" its own
    metrics: frozenset[str] = frozenset()  # scores that may be sent, by their family; own ones tell label counts
    telemetry: frozenset[Telemetry] = frozenset()  # numbers of the site's machine that heartbeats may contain
    plugins: frozenset[str] = frozenset()  # plug-ins that a run may name: code from outside protofed
    dtypes: frozenset[DType] = frozenset({"float32", "int64"})  # dtypes of tensors that may be sent
    max_tensor_mb: Megabytes = 256.0  # largest size of one tensor, in 10^6 bytes
    max_update_mb: Megabytes = 1024.0  # largest size of one update, in 10^6 bytes
    example_count: bool = False  # whether the total number of examples may be sent
    class_distribution_estimate: bool = False  # whether part class-shares may be sent, if `parts` names it, too
    min_samples_per_class: Annotated[int, Field(ge=1)] = 10  # a class with fewer examples counts as absent
    min_images_per_unit: Annotated[int, Field(ge=1)] = 4  # a unit that fewer images activate is sent as it was received
    hide_class_presence: bool = (
        False  # what tells the site's classes, as everything trained does, is sent only in a secure aggregation
    )
    secure: Literal["allowed", "required"] = (
        "allowed"  # required: everything but the first model is sent only in a secure aggregation
    )
    partners: Literal["confirmed", "first-use"] = (
        "confirmed"  # confirmed: only sites of the list that a person here confirmed; first-use: any with a certificate
    )
    sum_group: Annotated[int, Field(ge=1, le=MAX_SECURE_SITES)] = (
        3  # least sites in this site's group, which is aggregated whole or not
    )
    aggregated_metrics: frozenset[str] = frozenset()  # own scores that may be sent in a secure aggregation
    batch_order: Literal["secret", "recipe"] = "secret"  # seed of the batches; the server knows the recipe's
    approval: Literal["automatic", "manual"] = "automatic"  # manual: each run needs `protofed client approve`
    dp: PrivacyBudget | None = None  # runs must have noise (plan.dp); the site stops when this budget is spent
    schedule: tuple[Window, ...] = ()  # when tasks are taken, in UTC; none: always
    limits: Limits = Limits()  # limits on what a server may ask

    @model_validator(mode="after")
    def _confirms(self) -> PolicyRules:
        if self.secure == "required" and self.partners == "first-use":
            raise ValueError(
                'with partners = "first-use", whoever signs certificates can invent this site\'s partners, and then '
                'read its update out of an aggregate. With secure = "required", set partners = "confirmed"'
            )
        return self


def is_own(name: str) -> bool:
    """Whether a score is of the site's own data or its own model: all but an evaluator's of the global model."""
    return not name.startswith(GLOBAL) or LOCAL in name


def tells_of_classes(name: str) -> bool:
    """Whether a score tells which classes the site has, or may (a plug-in's): `hide_class_presence` excludes it."""
    return is_own(name) and name != LOSS


def answers_about_classes(name: str) -> bool:
    """Whether a score of a model that a server chose tells of the site's classes what a sum over three does not hide.

    It is no mean over images, or over other images at each site: what it adds up to depends on who has what. A loss is
    a mean of numbers that a server likes, one for each class of the training images.
    """
    return name in ("personal.pm_v", LOSS) or (LOCAL in name and name.rpartition(".")[2] != "accuracy")


def on_own_images(roles: Collection[Role], names: Collection[str]) -> list[str]:
    """The evaluator's scores among `names` if the site trains, too: most often on a part held out of its images."""
    return sorted(name for name in names if not is_own(name)) if set(roles) >= {*Role} else []


def discloses(name: str) -> str:
    """What a server can compute from a score, with the site's updates and the shared test set: one sentence or more."""
    family = score_family(name)
    if family in _BY_NAME:
        return _BY_NAME[family]
    if family.startswith(TRAINING):
        return _TRAINING
    if not is_own(family):
        return _GLOBAL
    score, local = family.rpartition(".")[2], LOCAL in family
    if score in _OF_NUMBERS:
        return _LOCAL_NUMBERS if local else _PERSONAL_NUMBERS
    if score not in _OF_CLASSES:
        return _OTHER
    return _BY_LOCAL_SCORE.get(score, _LOCAL) if local else _PERSONAL


_OF_NUMBERS = frozenset(score.name for score in Regression(range=(0.0, 1.0)).scores())
_OF_CLASSES = frozenset(score.name for task in (Classification(), MultiLabel()) for score in task.scores())
_BY_NAME = {
    "loss": "The mean over the site's own training examples. A server that chooses the models can compute how many "
    "examples of each class or finding the site has, and of numbers their mean and their spread.",
    "personal.pm_l": "It weighs each class by its frequency at the site. Over some rounds it tells exactly how many "
    "examples of each class the site has.",
    "personal.pm_v": "The mean over the classes that the site has. It tells which classes these are.",
}
_BY_LOCAL_SCORE = {
    "accuracy": "k right answers of m. It tells how many examples the site's own test set has and, over some rounds, "
    "how many of each class.",
    "recall": "One fraction k/m for each class. It tells which classes the site's own test set has, and how many "
    "examples of each.",
}
_TRAINING = (
    "A number of a plug-in's own, computed on the site's training examples. Only its author knows what it tells."
)
_OTHER = (
    "A score of a plug-in's task, of the site's own model or test set. It may tell how many examples of each kind the "
    "site has. Only its author knows what else it tells."
)
_LOCAL = (
    "Taken over the site's own test set. It tells which classes or findings this set has and, over some rounds, how "
    "many examples of each."
)
_LOCAL_NUMBERS = (
    "Taken over the site's own test set. It tells roughly the mean of the numbers in this set and, over some rounds "
    "with models that a server chooses, how they are distributed."
)
_PERSONAL = (
    "How well the site's own model knows each class or finding. It tells which of them the site has, and which are "
    "common there."
)
_PERSONAL_NUMBERS = (
    "How far the site's own model is off on the shared test set. It tells roughly which numbers are common at the site."
)
_GLOBAL = (
    "What the evaluator's test set has of each class, finding or number, which is public. It tells nothing about a "
    "site's training examples, unless the test set was held out of them."
)
