"""The keys of a site's policy file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protofed.client.privacy.schedule import Window
from protofed.common.config.recipe import StrictModel
from protofed.common.payload import Part
from protofed.common.protocol.telemetry import Telemetry

DType = Literal["float32", "float64", "int64"]  # those of the codec
Megabytes = Annotated[float, Field(gt=0)]


class PolicyRules(StrictModel):
    """Every list is complete: there is no "all". What is not said is on the safe side."""

    methods: frozenset[str]  # by name
    parts: frozenset[Part]  # what tensors may disclose
    metrics: frozenset[str] = frozenset()  # scalars by name, without a class's number at its end; the others stay
    telemetry: frozenset[Telemetry] = frozenset()  # numbers of the site's machine that its heartbeats may tell
    plugins: frozenset[str] = frozenset()  # what a run may name of code beside protofed, as `protofed.common.plugins`
    dtypes: frozenset[DType] = frozenset({"float32", "int64"})  # of the tensors that may leave
    max_tensor_mb: Megabytes = 256.0  # of one tensor that leaves
    max_update_mb: Megabytes = 1024.0  # of all that leaves in a round
    example_count: bool = False  # whether the total number of examples may be sent
    class_distribution_estimate: bool = False  # whether part class-shares may leave, beside being in `parts`
    min_samples_per_class: Annotated[int, Field(ge=1)] = 1  # a class with fewer examples is one that is not there
    hide_class_presence: bool = False  # send decoys for classes that are not there
    approval: Literal["automatic", "manual"] = "automatic"  # manual: each run needs `protofed client approve`
    schedule: tuple[Window, ...] = ()  # when tasks are taken, in UTC; none: always
