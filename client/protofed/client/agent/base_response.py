"""How the units of a model answer to the site's own images: a trap shows in it, whatever its weights look like.

Nothing of it leaves the site, but that some site of a sum keeps what it learnt. Measured on honest runs of the digits
recipes without noise, five sites: of the units of a layer at most 0.16 answer to few images only (`MOST_FEW` allows 0.5
more than in the built model), and at most 0.92 of the variance of a layer lies along one direction (`ONE_MEASUREMENT`).
The features' variance over images is at least 0.26 of the built model's (0.15 of a model of a single site), where
learning rates add up to 1.6 (`SEEING`: 0.1 there), and beside their mean square at least 0.15; of ResNet-18 with group
normalisation at least 0.03 in its first 230 steps, whose rates add up to far more (0.01).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from protofed.client.models.split import SplitModel
from protofed.client.privacy.base_checks import BaseProblem, Check
from protofed.common.payload import Part

IMAGES = 128  # that are looked at
LEAST_IMAGES, LEAST_UNITS = 32, 8  # below which shares of units say nothing
LEAST_SEEN = 8  # images, below which the variance of features does not
LEAST_PIXELS = 16  # numbers of an image: of fewer, every measurement is nearly the same one (spiral: 2, and 0.998)
FEW = 0.05  # share of the images; a unit that answers to one image of a batch gives it away
MOST_FEW = 0.5  # share of a layer's units, above the built model's
ONE_MEASUREMENT = 0.97  # share of a layer's variance along one direction: units that differ in their thresholds alone
# Least share of the built model's variance of features, of a fit whose learning rates add up to 1, to more, and of what
# the variance is beside the mean square. Of a body that answers to all images alike the head learns the label shares
# alone, and what it learns is not linear in them: sums over three sites tell the shares of each (privacy.md). The more
# a fit moves, the more the head makes of what little it sees.
SEEING, LEAST_SEEING, LEAST_CONTRAST = 0.25, (0.01, 0.2), 0.01
FEATURES = ""  # the body's own name among its modules


@dataclass(frozen=True)
class Response:
    """Of the units of one linear or convolutional layer, or of the features, the body's output.

    Attributes:
        few: share of units that are positive for at least one image, and for `FEW` of them at most; a channel is
            positive if it is anywhere in the image.
        along_one: share of the variance, over images, along the direction with the most of it; units count alike.
        variance: over images, of all units together.
        contrast: the same, as a share of their mean square.
    """

    few: float
    along_one: float
    variance: float
    contrast: float


def responses(model: SplitModel, images: Iterable[Tensor]) -> dict[str, Response]:
    """By layer of the body, for images [B, channels, height, width] on the model's device; `IMAGES` of them at most.

    Empty if there are too few images, or too small ones, to tell anything. Features are those of training, which
    BatchNorm makes of each batch's own statistics: by those that it keeps a server could have a blind body seem to see.
    """
    looked = _first(images)
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(_recorder(seen.setdefault(name, [])))
        for name, module in model.body.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) or name == FEATURES
    ]
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            for batch in looked:
                model.body(batch)
            with _by_batches(model.body) as normalised:
                if normalised:
                    seen[FEATURES].clear()
                for batch in looked if normalised else ():
                    model.body(batch)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    answers = {name: torch.cat(outputs) for name, outputs in seen.items() if outputs}
    return {
        name: _response(answer)
        for name, answer in answers.items()
        if (name == FEATURES and len(answer) >= LEAST_SEEN)
        or (len(answer) >= LEAST_IMAGES and answer.shape[1] >= LEAST_UNITS)
    }


def _first(images: Iterable[Tensor]) -> list[Tensor]:
    """The first `IMAGES` of them, in batches of more than one, of which BatchNorm can take statistics."""
    batches, left = list[Tensor](), IMAGES
    for batch in images:
        if left <= 0 or math.prod(batch.shape[1:]) < LEAST_PIXELS:
            break
        batches.append(batch[:left])
        left -= len(batch)
    return [batch for batch in batches if len(batch) > 1]


@contextmanager
def _by_batches(body: nn.Module) -> Iterator[bool]:
    """BatchNorm as in training, but that it keeps nothing; whether there is any."""
    norms = [module for module in body.modules() if isinstance(module, _BatchNorm)]
    kept = [norm.track_running_stats for norm in norms]
    try:
        for norm in norms:
            norm.train()
            norm.track_running_stats = False
        yield bool(norms)
    finally:
        for norm, tracks in zip(norms, kept, strict=True):
            norm.track_running_stats = tracks


def response_problem(base: Mapping[str, Response], built: Mapping[str, Response], rates: float) -> BaseProblem | None:
    """Whether a layer answers to the site's images as no trained one does, and the built model does not.

    Args:
        rates: what the learning rates of the fit's steps add up to.
    """
    for name, now in base.items():
        first = built.get(name, Response(0.0, 0.0, 0.0, 0.0))
        if name == FEATURES:
            if (problem := _blind_problem(now, first, rates)) is not None:
                return problem
            continue
        layer = f"{Part.BODY}/{name}"
        if now.few > first.few + MOST_FEW:
            return BaseProblem(Check.RESPONSE, layer, f"has {now.few:.0%} of units that answer to very few images only")
        if now.along_one > max(ONE_MEASUREMENT, first.along_one):
            text = f"has units that all measure the same of an image ({now.along_one:.1%} of their variance)"
            return BaseProblem(Check.RESPONSE, layer, text)
    return None


def _blind_problem(now: Response, first: Response, rates: float) -> BaseProblem | None:
    least, most = LEAST_SEEING
    needed = min(max(SEEING / rates**2, least), most) if rates else most
    shares = ((_share(now.variance, first.variance), needed), (_share(now.contrast, first.contrast), LEAST_CONTRAST))
    for share, enough in shares:
        if share < enough:
            text = f"gives features that vary over images by {share:.2%} of what they do before the first round"
            return BaseProblem(Check.RESPONSE, str(Part.BODY), f"{text}: expected {enough:.2%} or more")
    return None


def _share(now: float, first: float) -> float:
    return now / first if first else math.inf


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
    variance, mean_square = float((spread**2).sum()), float(answers.double().square().sum())
    sizes = variance / len(answers), _share(variance, mean_square) if variance else 0.0
    if not scaled.numel():
        return Response(float(few), 0.0, *sizes)
    squares = torch.linalg.svdvals(scaled) ** 2
    return Response(float(few), float(squares[0] / squares.sum()), *sizes)
