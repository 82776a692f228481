"""How blind a body may be before sums of fits on it tell the label shares of each site: a table of `make leakage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from tests.attacks import share_sets
from tests.attacks.hostile_server import as_payload, as_task, honest_model

from protofed.client.base_checks.responses import IMAGES, Responses, response_problem, responses
from protofed.client.data.site_data import SiteData
from protofed.client.models.split import load
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.payload import Part, Payload

RATES = (1.0, 1.5, 2.0, 4.0)  # what a fit's learning rates add up to
SUMS = 60
COLUMNS = ("body", "variance", "classes apart", *(f"error, rates of {rates:g}" for rates in RATES), "mean, thrice")


@dataclass(frozen=True)
class _Asked:
    """What sums of fits on one body told: its name, variance and distance of classes, the mean error of a share."""

    body: str
    seen: tuple[float, float]
    told: str
    naive: float


def rows(task: str = CLASSIFICATION) -> list[list[str]]:
    """One for each body: what its features are at three sites in the mean, and the mean error of a share.

    In brackets: one of the three withholds what it learnt.
    """
    plans = [[_asked(*body) for body in _bodies(rates, task)] for rates in RATES]
    return [
        [
            body[0].body,
            *(f"{max(size, 0.0):.2g}" for size in body[0].seen),
            *(plan.told for plan in body),
            f"{body[0].naive:.3f}",
        ]
        for body in zip(*plans, strict=True)
    ]


def _bodies(rates: float, task: str) -> Iterator[tuple[str, Recipe, float, Payload]]:
    """Every weight times a factor; the last layer's so that features tell nothing of classes; as built, of few."""
    run = as_task(share_sets.recipe(rates), task)
    built = as_payload(honest_model(run))
    for scale in (0.3, 0.5, 0.6, 0.7, 0.8, 1):
        yield f"weights x {scale:g}", run, rates, share_sets.faint(built, scale)
    for scale in (0.5, 0.75, 1, 1.25):
        yield f"level x {scale:g}", run, rates, share_sets.level(run, built, scale)
    for width in (1, 2, 4, 10):
        narrow = as_task(share_sets.recipe(rates, model={"name": "digits-cnn", "features": width}), task)
        yield f"built, {width} features", narrow, rates, as_payload(honest_model(narrow))


def _asked(name: str, run: Recipe, rates: float, body: Payload) -> _Asked:
    body, built = share_sets.centred(run, body), as_payload(honest_model(run))
    answers = [(_answers(run, body, site), _answers(run, built, site)) for site in share_sets.group(run)]
    seen = [now.sight for now, _ in answers if now.sight is not None]
    withheld = any(response_problem(now, first, rates) for now, first in answers)
    told, naive = share_sets.errors(run, body, SUMS)
    sizes = mean(one.variance for one in seen), mean(one.apart for one in seen)
    return _Asked(name, sizes, f"({told:.3f})" if withheld else f"{told:.3f}", naive)


def _answers(run: Recipe, model: Payload, site: SiteData) -> Responses:
    split = honest_model(run)
    load(split.body, model[Part.BODY])
    sample = site.train.sample(IMAGES, 0, site.task.strata)
    return responses(split, site.ordered(sample, run.plan.batch_size), site.task.strata)
