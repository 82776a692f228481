"""How the units of a model answer to the site's own images: a trap shows in it, whatever its weights look like.

Nothing of it is sent, except that some site of a sum keeps what it learnt. Measured on honest runs of the digits
recipes without noise, five sites: of the units of a layer at most 0.16 answer to few images only (`MAX_FEW` allows 0.5
more than in the built model), and at most 0.92 of the variance of a layer lies along one direction (`ONE_MEASUREMENT`).
The features' variance over images is at least 0.26 of the built model's (0.15 of a model of a single site), where
learning rates add up to 1.6 (`SEEING`: 0.1 there), and beside their mean square at least 0.15; of ResNet-18 with group
normalisation at least 0.03 in its first 230 steps, whose rates add up to far more (0.01).

Beside the built model's, a body is measured by itself, for a recipe chooses how wide the built model is. Of built
bodies of 1, 2 and 4 features, centred, 60 sums at rates of 1 told a share to 0.022, 0.040 and 0.054, where the mean
share is off by 0.081; of ten to 0.080. Their variance was 0.002 to 0.008, of ten 0.023 or more, and the squared
distance between the means of two classes 0.002 to 0.011, of ten 0.023 or more. Features made to vary and to tell
nothing of classes told a share to 0.027 at a variance of 0.03, to 0.061 at 0.05, and nothing (0.094) at 0.08. In honest
runs of the digits recipes the variance, times the square of the rates, was 0.1 or more; in those of HAM10000 at 28
pixels 0.17.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from protofed.client.base_checks.statistics import BaseCheck, BaseProblem
from protofed.client.data.site_data import Batch
from protofed.client.models.split import SplitModel
from protofed.client.tasks.classification import CLASSES
from protofed.common.payload import Part

IMAGES = 128  # that are looked at
MIN_IMAGES, MIN_UNITS = 32, 8  # below which shares of units say nothing
MIN_SEEN = 8  # images, below which the variance of features does not
MIN_PIXELS = 16  # numbers of an image: of fewer, every measurement is nearly the same one (spiral: 2, and 0.998)
FEW = 0.05  # share of the images; a unit that answers to one image of a batch gives it away
MAX_FEW = 0.5  # share of a layer's units, above the built model's
ONE_MEASUREMENT = 0.97  # share of a layer's variance along one direction: units that differ in their thresholds alone
# Least share of the built model's variance of features, of a fit whose learning rates add up to 1, to more, and of what
# the variance is beside the mean square. Of a body that answers to all images alike the head learns the label shares
# alone, and what it learns is not linear in them: sums over three sites tell the shares of each (privacy.md). The more
# a fit moves, the more the head makes of what little it sees.
SEEING, MIN_SEEING, MIN_CONTRAST = 0.25, (0.01, 0.2), 0.01
# Least variance of the features, and least squared distance between the means of two classes, of a fit whose learning
# rates add up to 1 or less; of r it is this / r^2, for the body learns to see in the fit. One of the two is enough: the
# features of an honest first model may tell the site's classes apart hardly at all, but then they vary.
SEEING_ALONE, APART_ALONE = 0.075, 0.025
FEATURES = ""  # the body's own name among its modules


@dataclass(frozen=True)
class Response:
    """Of the units of one linear or convolutional layer.

    Attributes:
        few: share of units that are positive for at least one image, and for `FEW` of them at most; a channel is
            positive if it is anywhere in the image.
        along_one: share of the variance, over images, along the direction with the most of it; units count alike.
    """

    few: float
    along_one: float


@dataclass(frozen=True)
class Seen:
    """Of the features, the body's output.

    Attributes:
        variance: over images, of all features together.
        contrast: the same, as a share of their mean square.
        apart: mean squared distance between the means of two classes, less what chance adds; of a single class the
            variance, for there is nothing to tell apart.
    """

    variance: float
    contrast: float
    apart: float


@dataclass(frozen=True)
class Responses:
    """Of a body; a layer is left out, and `sight` is None, where too few images or units tell nothing."""

    layers: Mapping[str, Response]
    sight: Seen | None


def responses(
    model: SplitModel, batches: Iterable[Batch], strata: Callable[[Tensor], Tensor] = CLASSES.strata
) -> Responses:
    """How a body answers to images [B, channels, height, width] of targets [B, ...], on the model's device.

    `strata` is the task's: images of one stratum count as of one class.

    Features are those of training, which BatchNorm makes with each batch's own statistics. With its stored statistics,
    a server could make a blind body seem to see.
    """
    # BatchNorm takes no statistics of one image.
    looked = [(x, y) for x, y in batches if len(x) > 1 and math.prod(x.shape[1:]) >= MIN_PIXELS]
    if not looked:
        return Responses({}, None)
    answers = _answers(model, looked)
    features = answers[FEATURES]
    classes = strata(torch.cat([y for _, y in looked]).cpu())
    sight = _seen(features.double(), classes) if len(features) >= MIN_SEEN else None
    layers = {
        name: _response(answer)
        for name, answer in answers.items()
        if name != FEATURES and len(answer) >= MIN_IMAGES and answer.shape[1] >= MIN_UNITS
    }
    return Responses(layers, sight)


def _answers(model: SplitModel, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """What the body and its layers answer to all images, by the module's name."""
    outputs: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(_recorder(outputs.setdefault(name, [])))
        for name, module in model.body.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) or name == FEATURES
    ]
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            for images, _ in batches:
                model.body(images)
            with _by_batches(model.body) as normalised:
                if normalised:
                    outputs[FEATURES].clear()
                for images, _ in batches if normalised else ():
                    model.body(images)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(parts) for name, parts in outputs.items() if parts}


@contextmanager
def _by_batches(body: nn.Module) -> Iterator[bool]:
    """BatchNorm as in training, but that it keeps nothing; whether there is any."""
    norms = [module for module in body.modules() if isinstance(module, _BatchNorm)]
    tracked = [norm.track_running_stats for norm in norms]
    try:
        for norm in norms:
            norm.train()
            norm.track_running_stats = False
        yield bool(norms)
    finally:
        for norm, tracks in zip(norms, tracked, strict=True):
            norm.track_running_stats = tracks


def response_problem(base: Responses, built: Responses, rates: float) -> BaseProblem | None:
    """Whether a body answers to the site's images as no trained one does, and the built one does not.

    Args:
        rates: what the learning rates of the fit's steps add up to.
    """
    if base.sight is not None and (text := _blind(base.sight, built.sight, rates)) is not None:
        return BaseProblem(BaseCheck.RESPONSE, str(Part.BODY), text)
    for name, now in base.layers.items():
        first, layer = built.layers.get(name, Response(0.0, 0.0)), f"{Part.BODY}/{name}"
        if now.few > first.few + MAX_FEW:
            text = f"has a share of {now.few:.0%} of units that respond to very few images only"
            return BaseProblem(BaseCheck.RESPONSE, layer, text)
        if now.along_one > max(ONE_MEASUREMENT, first.along_one):
            text = f"has units that all measure the same thing of an image ({now.along_one:.1%} of their variance)"
            return BaseProblem(BaseCheck.RESPONSE, layer, text)
    return None


def _blind(now: Seen, first: Seen | None, rates: float) -> str | None:
    least, most = MIN_SEEING
    needed = min(max(SEEING / rates**2, least), most) if rates else most
    compared = ((now.variance, first.variance, needed), (now.contrast, first.contrast, MIN_CONTRAST)) if first else ()
    for value, before, enough in compared:
        if value < enough * before:
            text = (
                f"gives features whose variance over images is {value / before:.2%} of what it was before the first "
                "round"
            )
            return f"{text}: expected {enough:.2%} or more"
    variance, apart = (needed / max(rates, 1.0) ** 2 for needed in (SEEING_ALONE, APART_ALONE))
    if now.variance < variance and now.apart < apart:
        text = (
            f"gives features with a variance of {now.variance:.2g} over images, and classes that are "
            f"{max(now.apart, 0.0):.2g} apart"
        )
        return f"{text}: expected a variance of {variance:.2g} or more, or classes {apart:.2g} or more apart"
    return None


def _recorder(outputs: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def record(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.append((output.flatten(2).amax(2) if output.ndim > 2 else output).float().cpu())

    return record


def _response(answers: Tensor) -> Response:
    """Of [images, units] before the activation function."""
    positive = (answers > 0).sum(0)
    few = ((positive >= 1) & (positive <= max(1, int(FEW * len(answers))))).float().mean()
    centred = (answers - answers.mean(0)).double()
    spread = centred.norm(dim=0)
    scaled = centred[:, spread > 0] / spread[spread > 0]
    if not scaled.numel():
        return Response(float(few), 0.0)
    squares = torch.linalg.svdvals(scaled) ** 2
    return Response(float(few), float(squares[0] / squares.sum()))


def _seen(features: Tensor, labels: Tensor) -> Seen:
    """Of features [images, D] and labels [images]. The spread of n images adds its n-th part to that of their mean."""
    variance, mean_square = float(features.var(0, correction=0).sum()), float(features.square().mean(0).sum())
    contrast = variance / mean_square if variance else 0.0
    classes = [members for c in set(labels.tolist()) if len(members := features[labels == c]) > 1]
    if len(classes) < 2:
        return Seen(variance, contrast, variance)
    means = torch.stack([members.mean(0) for members in classes])
    chance = torch.stack([members.var(0).sum() / len(members) for members in classes]).mean()
    return Seen(variance, contrast, 2 * float(means.var(0).sum() - chance))
