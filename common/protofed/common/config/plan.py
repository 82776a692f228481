"""A recipe's `[plan]`: how sites train."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from protofed.common.config.tables import Share, StrictModel
from protofed.common.protocol.messages import MAX_SUMMED

Augment = Literal["none", "crop-flip", "reflect-crop-flip", "crop-flip-rotate"]
LocalLoss = Literal["cross-entropy", "balanced-softmax", "logit-adjustment"]
OptimizerName = Literal["sgd", "adam", "adamw"]
Sampling = Literal["shuffled", "class-balanced"]
MOST_WARMUP = 10_000  # rounds: a site that checks a run goes through all of them
ShareBelowOne = Annotated[float, Field(gt=0, lt=1)]


class DpPlan(StrictModel):
    """`[plan.dp]`: noise by which what leaves a site tells almost nothing of any one of its patients.

    A unit is a patient, or one image where the site's data have no groups.
    """

    noise_multiplier: Annotated[float, Field(gt=0, le=1e6)]  # sigma: std of the noise on a step's sum, in max_unit_norm
    max_unit_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # C: a unit's gradient is clipped to this norm
    sampling_rate: Annotated[float, Field(ge=1e-5, le=1)]  # q: the chance that a unit is in a step
    class_noise_multiplier: Annotated[float, Field(gt=0, le=1e6)] | None = (
        None  # std of the noise on class sums and counts, to which a unit adds a norm of 1 at most
    )
    max_feature_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # of a feature in class sums; unit features have 1
    min_noisy_count: Annotated[float, Field(ge=0, le=1e6)] = 10.0  # of a class, or it counts as absent
    shared_by: Annotated[int, Field(ge=2, le=MAX_SUMMED)] | None = (
        None  # h: a fit is one step, and each site of a secure sum adds noise of sigma / sqrt(h); None: all of it
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

    epochs: Annotated[int, Field(ge=1, le=100_000)] = 1  # over the site's examples, in each round
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 64  # examples; over all ranks, if there are several
    drop_last: bool = False  # leave out an epoch's last, smaller batch
    loss: LocalLoss = "cross-entropy"  # of class logits; the others make up for the site's class frequencies pi
    tau: Annotated[float, Field(gt=0, le=1000)] = 1.0  # logit-adjustment: cross-entropy of logits + tau log pi
    sampling: Sampling = "shuffled"  # class-balanced: each class that a site has as often, drawn with replacement
    optimizer: OptimizerName = "sgd"  # made anew in each round
    lr: Annotated[float, Field(gt=0, le=1e38)] = 0.01  # of the first round, or at the end of the warm-up
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of sgd
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0  # of all parameters that are trained
    schedule: Literal["constant", "exponential", "step", "cosine"] = "constant"  # of lr, over rounds
    lr_decay: Share = 1.0  # exponential: lr * lr_decay ** (round - 1); step: the factor at each of lr_steps
    lr_steps: Annotated[tuple[ShareBelowOne, ...], Field(max_length=100)] = (0.5, 0.75)  # step: shares of the rounds
    warmup_rounds: Annotated[int, Field(ge=0, le=MOST_WARMUP)] = 0  # first rounds, in which the rate rises linearly
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None  # largest norm of all gradients together
    augmentation: Augment = (
        "none"  # crop after padding by 4 (with black, or reflected), horizontal flip, up to 15 degrees
    )
    amp: bool = True  # bfloat16 autocast and channels_last on a GPU; the CPU trains in float32
    buffers: Literal["averaged", "local"] = "averaged"  # BatchNorm's statistics with which a site goes on
    checkpoint: bool = False  # keep each epoch on the site's disk, so that an interrupted fit goes on there
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
                    f"plan.{key} = {getattr(self, key)!r}: with plan.dp.shared_by a fit is one step of SGD, whose "
                    f"noise is that of the sum; set {expected!r}"
                )
        return self

    @model_validator(mode="after")
    def _noise_hides_all(self) -> Plan:
        for key, expected in (("loss", "cross-entropy"), ("sampling", "shuffled")):
            if self.dp is not None and getattr(self, key) != expected:
                raise ValueError(
                    f"plan.{key} = {getattr(self, key)!r} follows a site's exact class counts, which [plan.dp] is to "
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
