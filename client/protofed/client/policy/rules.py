"""The keys of a site's policy file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from protofed.client.policy.limits import Limits
from protofed.client.policy.schedule import Window
from protofed.common.config.recipe import StrictModel
from protofed.common.payload import Exchange, Part
from protofed.common.protocol.messages import MAX_SUMMED
from protofed.common.protocol.telemetry import Telemetry

DType = Literal["float32", "float64", "int64"]  # those of the codec
Megabytes = Annotated[float, Field(gt=0)]


class PrivacyBudget(StrictModel):
    """What all runs on the site's data together may tell of one unit: (epsilon, delta)-differential privacy."""

    epsilon: Annotated[float, Field(gt=0, le=1000)]  # most, over all rounds of all runs
    delta: Annotated[float, Field(ge=1e-12, le=1e-2)]  # chance that it is more: far below 1 / number of units
    unit: Literal["patient", "image"]  # whom it protects; patient: the site's data must have groups
    colluders: Annotated[int, Field(ge=0, le=MAX_SUMMED)] = 1  # sites of a sum whose noise the server may know


class PolicyRules(StrictModel):
    """Lists of names are complete: there is no "all", and an empty one allows nothing."""

    methods: frozenset[str]  # names of the methods that runs may use
    parts: frozenset[Part]  # parts of updates that may leave
    exchange: frozenset[Exchange] = frozenset()  # models of single sites: "receive" those of others, "share" its own
    metrics: frozenset[str] = frozenset()  # scores that may leave, without a class's number; own ones tell label counts
    telemetry: frozenset[Telemetry] = frozenset()  # numbers of the site's machine that heartbeats may contain
    plugins: frozenset[str] = frozenset()  # code outside of protofed that a run may name, as `protofed.common.plugins`
    dtypes: frozenset[DType] = frozenset({"float32", "int64"})  # of tensors that may leave
    max_tensor_mb: Megabytes = 256.0  # of one tensor, in 10^6 bytes
    max_update_mb: Megabytes = 1024.0  # of one update, in 10^6 bytes
    example_count: bool = False  # whether the total number of examples may be sent
    class_distribution_estimate: bool = False  # whether part class-shares may leave, if `parts` names it, too
    min_samples_per_class: Annotated[int, Field(ge=1)] = 10  # a class with fewer examples counts as absent
    min_images_per_unit: Annotated[int, Field(ge=1)] = 4  # a unit that fewer images activate leaves as it was received
    hide_class_presence: bool = False  # what tells of classes, as all that is trained does, leaves only in a secure sum
    secure: Literal["allowed", "required"] = "allowed"  # required: all but the first model leaves only in a secure sum
    partners: Literal["confirmed", "first-use"] = "confirmed"  # with whom the site is summed: see `_confirms`
    sum_group: Annotated[int, Field(ge=1, le=MAX_SUMMED)] = 3  # least sites of its group, summed together or not
    summed_metrics: frozenset[str] = frozenset()  # own scores that leave in a sum of three sites or more, as `metrics`
    batch_order: Literal["secret", "recipe"] = "secret"  # what draws batches; the server knows the recipe
    approval: Literal["automatic", "manual"] = "automatic"  # manual: each run needs `protofed client approve`
    dp: PrivacyBudget | None = None  # runs must have noise (plan.dp), and end for this site where the budget does
    schedule: tuple[Window, ...] = ()  # when tasks are taken, in UTC; none: always
    limits: Limits = Limits()  # what a server may ask

    @model_validator(mode="after")
    def _confirms(self) -> PolicyRules:
        if self.secure == "required" and self.partners == "first-use":
            raise ValueError(
                'partners = "first-use" lets whoever signs certificates invent the partners of this site, and read its '
                'update out of a sum: with secure = "required" it must be "confirmed"'
            )
        return self
