"""`[limits]` of a policy: the most, and the least, that a server may ask of a site."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, get_args

from pydantic import AfterValidator, Field

from protofed.common.config.plan import LocalLoss, Sampling
from protofed.common.config.recipe import MOST_ROUNDS, Robust
from protofed.common.config.tables import MAX_NUMBER, StrictModel


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
    )  # architectures that runs may train, beside plug-ins that `plugins` names; an mlp gives images away most easily
    max_width: AtLeast1 = 1024  # largest number among the model's options: units of a layer
    # Of few features a head learns hardly more than the label shares: sums over three sites told the shares of each.
    min_features_per_class: AtLeast0 = 1.0  # least number of features that the head reads, for each of the classes
    sides: Bounds = (8, 1024)  # least and most height and width of images, in pixels
    min_std: AtLeast0 = 0.05  # least std of the input; std at most 1, mean from 0 to 1: else inputs blow up or vanish
    # Images that a window or a crop made all alike: what a fit then learns of them is how many there are of each label.
    min_contrast: AtLeast0 = 0.03  # least typical difference of two training images: root mean square, pixels in 0..1
    batches: Bounds = (8, 256)  # least and most batch_size
    # Of a loss adjusted by class frequencies the head's rows of absent classes stay where they are, and the others tell
    # the more of shares, the larger tau. Where few images make half of an epoch, the movement is that of these images.
    losses: frozenset[LocalLoss] = frozenset({"cross-entropy"})  # of class logits, that runs may train by
    samplings: frozenset[Sampling] = frozenset({"shuffled"})  # ways in which runs may draw examples
    # Without "none" a site takes part only where no single other site can move the model at will.
    robust: frozenset[Robust] = frozenset(get_args(Robust))  # rules that updates may be aggregated by
    epochs: AtLeast1 = 20  # most, in a round
    lr: Above0 = 0.5  # most
    weight_decay: AtLeast0 = 0.01  # most
    rounds: AtLeast1 = 1000  # most
    steps: AtLeast1 = 2  # least optimizer steps of an epoch on this site's training examples
    # Least movement of a fit: its learning rates, summed over all steps. With almost none, the update of a head is the
    # label shares times a constant.
    min_step_sum: AtLeast0 = 1.0  # least sum of learning rates over a fit's steps, where head or prototypes are sent
    min_grad_norm: AtLeast0 = 1.0  # least max_grad_norm, if the recipe has one
    max_method_number: Annotated[float, Field(ge=1)] = 1e3  # largest number among the method's options, and its inverse
    min_cohort: AtLeast1 = 2  # least number of sites whose updates a round aggregates, as the server announces it
    tasks_per_day: AtLeast1 = 1000  # fits and first models, from 00:00 UTC on
    scorings_per_day: AtLeast1 = 1000  # likewise, scorings
    recipes: frozenset[RecipeDigest] = frozenset()  # digests of the only recipes that may run; empty: any
    check_base: bool = True  # refuse models to start from that no honest server sends
    max_base_change: Above0 = 3.0  # most movement of that model since the site last saw it, relative to its norm
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
        epochs=MOST_ROUNDS,
        lr=1e38,
        weight_decay=1e38,
        rounds=MOST_ROUNDS,
        steps=1,
        min_step_sum=0.0,
        min_grad_norm=0.0,
        max_method_number=1e300,
        min_cohort=1,
        tasks_per_day=int(MAX_NUMBER),
        scorings_per_day=int(MAX_NUMBER),
        check_base=False,
        max_base_change=1e38,
        max_rollback_rounds=MOST_ROUNDS,
    )
